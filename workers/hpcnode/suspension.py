"""Stopping a step and letting it go on: its processes stand still meanwhile, and its time limit does not run.

With a control group of our own the processes are moved into a group below it, which is frozen: they cannot tell, and nobody
wakes them by a signal. Elsewhere they get SIGSTOP, and SIGCONT to go on. The shepherd itself is never stopped: it minds the lease
and obeys. A stopped tree can be killed as it is; to end by itself on SIGTERM it has to go on first.

It does not know why a step is stopped. Sources: scontrol(1) suspend, Documentation/admin-guide/cgroup-v2.rst
(cgroup.freeze), signal(7).
"""

from __future__ import annotations

import os
import signal
from typing import Callable, List, Optional, Tuple

from hpcnode import cgroup, process
from hpcnode.loop import Loop, Timer
from hpcnode.process import boot_clock_s


class Suspension:
    """Whether the processes below this one stand still, and for how long they have run."""

    def __init__(self, loop: Loop, group: Optional[str], on: bool) -> None:
        self.on = on  # from the first moment: then there is nothing yet to stop, and the caller releases nothing
        self._loop = loop
        self._group = group
        self._frozen = False  # by the kernel, not by SIGSTOP
        self._begun = False
        self._ran_s = 0.0  # until the last stop
        self._since_s: Optional[float] = None  # it runs since; None: it does not
        self._alarms: List[Tuple[float, Callable[[], None]]] = []  # after how long a run, what is called
        self._timers: List[Timer] = []

    def begin(self) -> None:
        """Count from now on: the tasks have been released."""
        self._begun, self._since_s = True, boot_clock_s()

    def after_run(self, run_s: float, call: Callable[[], None]) -> None:
        """Call once when the step has run for so long; while it is stopped the time does not count."""
        self._alarms.append((run_s, call))
        if self._since_s is not None:
            self._set_alarm(run_s, call)

    def forget(self) -> None:
        """Call nothing of what was to be called after a run."""
        self._cancel()
        self._alarms.clear()

    def stop(self) -> None:
        """Have everything below this process stand still, also what forks meanwhile."""
        if self.on:
            return
        self.on = True
        if self._since_s is not None:
            self._ran_s += boot_clock_s() - self._since_s
            self._since_s = None
        self._cancel()
        self._frozen = self._group is not None and cgroup.freeze_others(self._group)
        if not self._frozen:
            process.stop_all_below_us()

    def go_on(self) -> None:
        """Let everything go on that `stop` has stopped."""
        if not self.on:
            return
        self.on = False
        if self._frozen and self._group is not None:
            cgroup.thaw_others(self._group)
        else:
            process.signal_all(process.descendants([os.getpid()]), signal.SIGCONT)
        if self._begun:
            self._since_s = boot_clock_s()
        for run_s, call in self._alarms:
            self._set_alarm(run_s, call)

    def _cancel(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def _set_alarm(self, run_s: float, call: Callable[[], None]) -> None:
        def ring() -> None:
            self._alarms.remove((run_s, call))
            call()

        ran_s = self._ran_s + (boot_clock_s() - self._since_s if self._since_s is not None else 0.0)
        self._timers.append(self._loop.later(max(0.0, run_s - ran_s), ring))
