"""How tasks ended, in the words that srun has for it."""

from __future__ import annotations

import signal
from typing import Dict, List

from hpcnode import protocol


def failures(started: protocol.StepStarted, ended: protocol.StepEnded) -> List[str]:
    """Return a line for each group of tasks of a node that failed alike."""
    lines = []
    for node, ranks, _ in started.parts():
        groups: Dict[str, List[int]] = {}
        for task in (rank for rank in ranks if rank < len(ended.codes)):
            code, signum = ended.codes[task], ended.signals[task]
            if signum:
                groups.setdefault(_signal_text(signum), []).append(task)
            elif code:
                groups.setdefault("Exited with exit code %d" % code, []).append(task)
        lines += ["%s: %s: %s" % (node, task_list(tasks), how) for how, tasks in groups.items()]
    return lines


def _signal_text(signum: int) -> str:
    try:
        return signal.strsignal(signum) or "signal %d" % signum
    except ValueError:
        return "signal %d" % signum


def task_list(tasks: List[int]) -> str:
    """Return ``task 3``, or ``tasks 0-3,7``."""
    spans: List[List[int]] = []
    for task in tasks:
        if spans and spans[-1][1] == task - 1:
            spans[-1][1] = task
        else:
            spans.append([task, task])
    text = ",".join(str(a) if a == b else "%d-%d" % (a, b) for a, b in spans)
    return ("tasks " if len(tasks) > 1 else "task ") + text
