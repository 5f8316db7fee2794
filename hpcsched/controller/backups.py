"""Scheduled backups of the cluster: `[backup]` of hpcsched.toml.

A child process makes them (`hpcsched backup --scheduled`), so the event loop never waits for a disk. This module decides when,
and keeps what the child said. Rules: the next backup is due `every` after the newest one that is there, so a restart changes
nothing; a newest one that is dated after now counts as made now. Where it failed it is tried again after `RETRY_S`; the log
and the audit log have it once until the reason changes, and the earlier backups stay.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hpcsched.auth.audit import DONE, FAILED, entry_of
from hpcsched.auth.authorize import CONTROLLER
from hpcsched.config.load import Config
from hpcsched.controller.tick import Controller
from hpcsched.state.cluster import BackupState

log = logging.getLogger(__name__)

RETRY_S = 600.0
LONGEST_S = 4 * 3600.0  # of a child
PROGRAM = (sys.executable, "-P", "-c", "from hpcsched.cli.admin import main; main()", "backup", "--scheduled")
SHORTEST_S = 1.0
MAX_WHY = 500


class ScheduledBackups:
    """The child of each backup. `configure` applies a changed configuration."""

    def __init__(self, controller: Controller, config: Config, clock: Callable[[], float]) -> None:
        self._controller, self._config, self._clock = controller, config, clock
        self._running: asyncio.Task[None] | None = None
        self._has_made = False  # the last child has made backups

    def configure(self, config: Config) -> None:
        """Begin, end or change the schedule. A change ends a backup that is being made."""
        changed = config.backup != self._config.backup
        self._config = config
        if changed or self._running is None:
            self.close()
            if config.backup.is_on:
                self._running = asyncio.get_running_loop().create_task(self._run())

    def close(self) -> None:
        """End the schedule, and the child if there is one."""
        if self._running is not None:
            self._running.cancel()
        self._running = None
        self._controller.cluster.backup = None

    async def _run(self) -> None:
        state = await self._asked("--look")
        while True:
            every_s = self._config.backup.every
            age_s = max(0.0, self._clock() - state.newest_at_s) if state.newest_at_s else every_s
            await asyncio.sleep(max(SHORTEST_S, RETRY_S if state.why else every_s - age_s))
            before, state = state.why, await self._asked("--due")
            self._record(state, before)

    async def _asked(self, *options: str) -> BackupState:
        """Run the child and keep what it says."""
        said, why = await self._said(*options)
        newest_at_s = said.get("newest_at_s") or 0.0
        state = BackupState(newest_at_s=newest_at_s, why=(why or said.get("why", ""))[:MAX_WHY])
        self._controller.cluster.backup = state
        self._has_made = bool(said.get("made"))
        return state

    async def _said(self, *options: str) -> tuple[dict[str, Any], str]:
        """Return the JSON of the child, and why it failed."""
        try:
            child = await asyncio.create_subprocess_exec(
                *PROGRAM,
                *options,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**os.environ, "HPCSCHED_CONFIG": str(self._config.config_dir)},
            )
        except OSError as error:  # no process, no memory; tried again as other failures are
            return {}, f"cannot back up: cannot start {PROGRAM[0]}: {error.strerror}"
        try:
            async with asyncio.timeout(LONGEST_S):
                out, err = await child.communicate()
        except TimeoutError:
            return {}, f"cannot back up: it took more than {LONGEST_S / 3600:g} hours"
        finally:
            with suppress(ProcessLookupError):
                if child.returncode is None:
                    child.kill()
        try:
            said = json.loads(out)
        except ValueError:
            said = None
        if not isinstance(said, dict):
            why = err.decode(errors="replace").strip().splitlines()[-1:]
            return {}, "".join(why) or f"cannot back up: exit status {child.returncode}"
        return said, ""

    def _record(self, state: BackupState, before: str) -> None:
        """Write an outcome into the logs, but a failure for the same reason as `before` only once."""
        if state.why == before if state.why else not self._has_made:
            return
        if state.why:
            log.error("scheduled backup: %s", state.why)
        to = ", ".join(self._config.backup.to)
        outcome, after = (FAILED, {"why": state.why}) if state.why else (DONE, None)
        entry = entry_of(CONTROLLER, "scheduled-backup", self._clock(), object=to, after=after, outcome=outcome)
        self._controller.ask(lambda tx: tx.audit(entry), lambda _: None, keep=True)
