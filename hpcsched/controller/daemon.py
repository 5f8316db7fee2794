"""Run the controller on an event loop: nodes, ticks, configuration and shutdown.

`hpcsched.controller.__main__` runs before it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from hpcnode.os.faults import CrashPoints, crash_points
from hpcsched import paths
from hpcsched.api import web
from hpcsched.api.connection_limits import SocketLimits
from hpcsched.auth.authorize import SIGHUP
from hpcsched.config.load import Config, load_config
from hpcsched.controller.backups import ScheduledBackups
from hpcsched.controller.credentials import Credentials
from hpcsched.controller.head_scripts import HeadScripts
from hpcsched.controller.head_socket import HeadStreams
from hpcsched.controller.nodes.edits import (
    follow_renames,
    jobs_held,
    move_renamed,
    refused_edits,
    renamed_nodes,
)
from hpcsched.controller.nodes.links import Fleet, monotonic_s
from hpcsched.controller.nodes.loss import lose_gone_nodes
from hpcsched.controller.power_switch import PowerSwitch
from hpcsched.controller.recovery import load_assessments, node_of, policy_of, settings_changed, unknown_users
from hpcsched.controller.relay import Relaying
from hpcsched.controller.requests.reaches import Reaches
from hpcsched.controller.requests.triggers import TriggerPrograms
from hpcsched.controller.stepping import Stepping
from hpcsched.controller.tick import RETRY_S, Controller
from hpcsched.controller.views.alerts import AlertFeed
from hpcsched.controller.views.backend import ControllerBackend
from hpcsched.errors import ConfigError, HpcschedError, InvariantError, UnavailableError, report_fault
from hpcsched.launch.bundle import build_bundle
from hpcsched.launch.link import ControllerIdentity
from hpcsched.model.ids import NodeName
from hpcsched.model.node import Node
from hpcsched.model.trigger import Trigger
from hpcsched.recorder import Recorder, RecorderSettings
from hpcsched.state.cluster import ClusterState
from hpcsched.state.transaction import WriteBatch
from hpcsched.store.audit_heads import HEADS_FILE, AuditHeads
from hpcsched.store.engine import damage_of, damaged, open_read_only
from hpcsched.store.store import Store

# ----- the time of the next tick: the earliest of the requested times
#
# Knows the event loop, but not what a tick does.


LONG_TICK_S = 0.010
PASSES = 5  # loop passes: a connection is accepted, set up, read, answered


class Alarm:
    """Calls `tick` on the event loop, once for all requests of the same or a later time.

    After a long tick the loop runs a few passes before the next one, so that short requests are
    answered in between.
    """

    def __init__(self, tick: Callable[[], None]) -> None:
        self._tick = tick
        self._timer: asyncio.TimerHandle | None = None
        self._soon = False
        self._passes = 0  # passes left until the next tick

    def wake(self, after_s: float) -> None:
        """Tick after the loop has handled pending events, or in `after_s` seconds if sooner."""
        loop = asyncio.get_running_loop()
        if after_s <= 0.0:
            if not self._soon:
                self._soon = True
                loop.call_soon(self._go)
            return
        due = loop.time() + after_s
        if self._timer is None or self._timer.when() > due:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_at(due, self._rang)

    def _rang(self) -> None:
        self._timer = None
        self.wake(0.0)

    def _go(self) -> None:
        if self._passes:
            self._passes -= 1
            asyncio.get_running_loop().call_soon(self._go)
            return
        self._soon = False
        began_s = time.monotonic()
        self._tick()
        if time.monotonic() - began_s >= LONG_TICK_S:
            self._passes = PASSES


log = logging.getLogger("hpcsched.daemon")

CLOCK_LOOK_S = 30.0  # look again this often: a clock change can bring a time of day closer
EXIT_DAMAGED = 1  # the exit code of a refused start
CHECK_S = 5.0  # a start waits this long for the database check
EXIT_INVARIANT = 70  # EX_SOFTWARE of sysexits.h: the cluster state is inconsistent
# The state holds many objects without cycles, so scanning all of them for garbage is slow and finds
# nothing.
GC_THRESHOLD = (100_000, 20, 50)


class Daemon:
    """One run of hpcschedd."""

    def __init__(
        self,
        config: Config,
        cluster: ClusterState,
        store: Store,
        socket_limits: SocketLimits,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._stop: asyncio.Event = asyncio.Event()
        self._exit_code = 0
        self._alarm = Alarm(self._tick)
        self._clock = clock
        self._boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self._faults = crash_points(os.environ, "HPCSCHED")
        if self._faults.armed:
            crash_around_commits(store, self._faults)
        self.store = store
        self.controller = Controller(cluster, store, self, policy_of(config))
        self.controller.metrics.started_s = clock()
        identity = ControllerIdentity(
            cluster=config.name, incarnation=cluster.incarnation, epoch=cluster.epoch, start=cluster.start
        )
        self.fleet = Fleet(self.controller, bundle=build_bundle(), identity=identity, clock=clock)
        self._socket_limits = socket_limits
        self._programs = TriggerPrograms()
        self._scripts = HeadScripts(self.controller)
        self._reloads: set[asyncio.Task[None]] = set()
        state_dir = config.controller.state_dir
        heads = Path(config.audit.heads) if config.audit.heads else state_dir / HEADS_FILE
        self._audit_heads = AuditHeads(
            state_dir, heads, store.audit_end, to_syslog=config.audit.syslog, incarnation=cluster.incarnation
        )
        self._recorder = Recorder(recorder_settings(config)) if config.metrics.history else None
        self._alerts = AlertFeed(self.controller, self._recorder, clock)
        self._power = PowerSwitch(self.controller, self.fleet)
        self._backups = ScheduledBackups(self.controller, config, clock)
        self.heads = HeadStreams(socket_limits)
        self.stepping = Stepping(self.controller, self, clock=clock, reply_head=self.heads.reply)
        self.heads.stepping = self.fleet.stepping = self.stepping
        self.heads.reaches = Reaches(cluster, clock)
        gc.freeze()  # objects made until here are never garbage
        gc.set_threshold(*GC_THRESHOLD)
        gc.enable()

    async def run(
        self,
        coming: asyncio.Future[ControllerBackend],
        mode: int,
        router: web.Router,
        answered: Callable[[], Awaitable[None]],
        credentials: Credentials,
    ) -> int:
        """Answer requests that wait for `coming`, and serve until a signal or a broken invariant.

        Return the exit status. The nodes are connected, and the first plan begins, when the
        requests that waited for the start are `answered`.
        """
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._callback_failed)
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload, coming)
        self.fleet.relaying = Relaying(
            self.controller.cluster, self.send, lambda request: router.find(request)(request), self._socket_limits
        )
        try:
            await self._check_database()
            self._check_audit_end()
            await self.heads.serve(self._config.steps_socket, mode)
            backend = self._backend(credentials)
            backend.note_start()
            coming.set_result(backend)
            log.info("ready at %s", self._config.api_socket)
            await answered()
            self._begin_work()
            self._settle_nodes()  # and wakes the controller
            self._backups.configure(self._config)
            self._alerts.configure(self._config)
            self._sign_audit()
            await self._stop.wait()
            log.info("stopping; jobs run on")
        finally:
            self._stop.set()
            if coming.done():  # else the database was refused: its end must not be signed
                self._audit_heads.sign(self._clock())
            self._config.steps_socket.unlink(missing_ok=True)
            await self.heads.close()
            self.fleet.close()
            self._backups.close()
            await self._alerts.close()
            if self._recorder is not None:
                await self._recorder.close()
        return self._exit_code

    def _begin_work(self) -> None:
        """Connect the nodes, and continue what an earlier controller has begun."""
        self._scripts.start()
        self.fleet.configure(self._config)
        self._power.start()
        if self._recorder is not None:
            self._recorder.start()
            self.controller.metrics.listeners.append(self._recorder.record)
        for job in self.controller.cluster.active_jobs():
            self.stepping.job_running(job)

    def _backend(self, credentials: Credentials) -> ControllerBackend:
        return ControllerBackend(
            self.controller,
            self.fleet,
            clock=self._clock,
            started_at_s=self._clock(),
            apply_config=self.apply_config,
            database=self._config.controller.state_dir / paths.DATABASE_FILE,
            audit_heads=self._audit_heads,
            credentials=credentials,
            recorder=self._recorder,
            alerts=self._alerts,
            reaches=self.heads.reaches,
        )

    async def _check_database(self) -> None:
        """Reject a damaged database before anything starts.

        The check of a large database continues in the background.

        Raises: ConfigError.
        """
        database = self._config.controller.state_dir / paths.DATABASE_FILE
        connection = open_read_only(database)
        loop = asyncio.get_running_loop()
        check = loop.run_in_executor(None, damage_of, connection)
        check.add_done_callback(lambda _: connection.close())
        await asyncio.wait({check}, timeout=CHECK_S)
        if check.done() and check.result():
            raise damaged(database, check.result())

        async def until_stopped() -> None:
            await self._stop.wait()
            connection.interrupt()

        def checked(done: asyncio.Future[str]) -> None:
            waiting.cancel()
            if done.result():
                log.error("%s", damaged(database, done.result()))
                self._exit_code = EXIT_DAMAGED
                self._stop.set()

        if not check.done():
            waiting = loop.create_task(until_stopped())
            check.add_done_callback(checked)

    def _check_audit_end(self) -> None:
        """Reject a database without the last record of the audit log that was signed.

        Raises: ConfigError.
        """
        try:
            lost = self._audit_heads.lost_since(self.store.audit_hash)
        except UnavailableError as error:
            log.error("cannot tell whether the database has all that was signed: %s", error)
            return
        if lost is not None:
            database = self._config.controller.state_dir / paths.DATABASE_FILE
            when = datetime.fromtimestamp(lost.at_s).isoformat(sep=" ", timespec="seconds")
            raise ConfigError(
                f"cannot use the database {database}: it has lost its last changes: its audit log ends with record "
                f"{self.store.audit_end()[0]}, and record {lost.seq} was signed at {when}. Is {database.name}-wal damaged or "
                "missing, or was an older copy put there? Restore a backup: hpcsched restore FILE. To continue without the lost "
                "changes, move the database away and restore that"
            )

    def _settle_nodes(self) -> None:
        """Settle jobs that name nodes which were removed or renamed while no controller ran."""
        given_up = self.store.given_up()
        self.controller.ask(lambda tx: lose_gone_nodes(tx, given_up), self._gone_nodes_lost, keep=True)
        self.controller.ask(lambda tx: follow_renames(tx, os.getuid()), _log_notes, keep=True)

    def _gone_nodes_lost(self, became: list[str] | Exception) -> None:
        """Log what became of jobs on nodes without a file, and clear the admin's removal requests."""
        if isinstance(became, Exception):
            log.error("jobs on nodes without a file were not ended: %s", became)
            return
        for line in became:
            log.error("%s", line)
        try:
            if self.store.given_up():
                self.store.forget_given_up()
        except UnavailableError as error:
            log.error("%s", error)  # the next start finds no jobs there

    def _sign_audit(self) -> None:
        """Sign the audit log now and then."""
        self._audit_heads.sign(self._clock())
        asyncio.get_running_loop().call_later(self._config.audit.sign_every_s, self._sign_audit)

    def _reload(self, coming: asyncio.Future[ControllerBackend]) -> None:
        """Reload the configuration as an admin's request would, with its records in the audit log."""

        async def reload() -> None:
            try:
                for change in (await (await coming).reconfigure(SIGHUP, [], []))["changed"]:
                    log.info("configuration: %s", change)
            except HpcschedError as error:
                log.error("%s", error)

        task = asyncio.get_running_loop().create_task(reload())
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    def apply_config(self, same_machine: Sequence[str] = ()) -> list[str]:
        """Reread and apply the configuration; return what changed, in words.

        All of it is checked before anything is changed. `same_machine`: see `refused_edits`.

        Raises: ConfigError, or UnavailableError if the database cannot be written.
        """
        config = load_config(self._config.config_dir)
        policy = policy_of(config)
        cluster = self.controller.cluster
        if refused := refused_edits(cluster, config, same_machine):
            raise ConfigError("\n  ".join(["cannot reload the configuration; nothing of it was changed:", *refused]))
        resealed = self.store.reseal()
        if config.name != cluster.config.name:
            self.store.put_cluster(config.name)
        nodes, changed = self._nodes_of(config)
        before = cluster.partitions
        cluster.set_partitions(config.partitions)
        if cluster.partitions != before:
            changed.append("partitions: " + ", ".join(cluster.partitions))
        if resealed:
            changed.append(f"{resealed} environments sealed with the key {self.store.keys.newest.id}")
        changed += settings_changed(cluster.config, config) + unknown_users(config.accounting)
        rate = config.controller.request_rate, config.controller.request_burst
        if rate != (self._config.controller.request_rate, self._config.controller.request_burst):
            self._socket_limits.set_rate(*rate)
        cluster.nodes.clear()
        cluster.nodes.update(nodes)
        load_assessments(cluster, self.store)  # of renamed nodes, by their new names
        cluster.config = self._config = config
        cluster.not_taken = ()
        self.controller.policy = policy
        self.fleet.configure(config)
        self._backups.configure(config)
        self._alerts.configure(config)
        if self._recorder is not None:
            self._recorder.configure(recorder_settings(config))
        self.controller.reconfigured()
        return changed

    def _nodes_of(self, config: Config) -> tuple[dict[NodeName, Node], list[str]]:
        """Return the configured nodes in order, with their known state, and the changes in words."""
        cluster = self.controller.cluster
        changed = move_renamed(config, self.store, jobs_held(cluster.active_jobs()))
        before, stored = cluster.nodes, self.store.load_nodes()
        nodes: dict[NodeName, Node] = {}
        moved = renamed_nodes(config.nodes) if changed else {}
        names = {spec.name for spec in config.nodes} | moved.keys()
        changed += [f"node {name} removed" for name in before if name not in names]
        for spec in config.nodes:
            known = before.get(spec.name)
            if known is None:
                nodes[spec.name] = node_of(spec, stored.get(spec.name))
                changed += [] if spec.name in moved.values() else [f"node {spec.name} added"]
            else:
                nodes[spec.name] = known if known.spec == spec else replace(known, spec=spec)
                changed += [] if known.spec == spec else [f"node {spec.name} changed"]
        return nodes, changed

    # ----- Ports of the controller

    def send(self, node: NodeName, message: Any, blob: bytes = b"") -> None:
        self.fleet.send(node, message, blob)
        queued(self._faults, message)

    def run_trigger(self, trigger: Trigger) -> None:
        self._programs.run(trigger)

    def switch_power(self, node: NodeName) -> None:
        self._power.switch(node)

    def nonce(self) -> str:
        return secrets.token_hex(16)

    def monotonic_s(self) -> float:
        return monotonic_s()

    def processor_s(self) -> float:
        return time.process_time()

    def boot_clock(self) -> tuple[str, float]:
        return self._boot_id, time.clock_gettime(time.CLOCK_BOOTTIME)

    def wake(self, after_s: float) -> None:
        self._alarm.wake(min(after_s, CLOCK_LOOK_S))

    def _callback_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an exception of a loop callback once; a broken invariant stops the controller."""
        error = context.get("exception")
        if isinstance(error, InvariantError):
            log.error("the ledger is wrong: stopping; the next start reads it from disk again", exc_info=error)
            self._exit_code = EXIT_INVARIANT
            self._stop.set()
        elif isinstance(error, Exception):
            report_fault(error, f"continue after: {context.get('message')}")
        else:
            log.error("%s", context.get("message"))

    def _tick(self) -> None:
        began_s = monotonic_s()
        try:
            self.controller.tick(self._clock())
            self.controller.metrics.tick.observe(monotonic_s() - began_s)
            self.controller.metrics.look_at_process(began_s)
        except InvariantError:  # memory and disk may differ
            log.exception("the ledger is wrong: stopping; the next start reads it from disk again")
            self._exit_code = EXIT_INVARIANT
            self._stop.set()
        except Exception as error:  # the parts have their own barriers; this failed outside them
            report_fault(error, "do a tick")
            self.wake(RETRY_S)


def _log_notes(notes: list[str] | Exception) -> None:
    for note in [f"renamed nodes: {notes}"] if isinstance(notes, Exception) else notes:
        log.error("%s", note)


def recorder_settings(config: Config) -> RecorderSettings:
    """Return the settings of the recorder."""
    metrics = config.metrics
    return RecorderSettings(
        database=str(config.controller.state_dir / paths.METRICS_FILE),
        keep_s=(metrics.keep_samples, metrics.keep_minutes, metrics.retention),
        max_bytes=metrics.max_size << 20,
        remote_write=metrics.remote_write,
        remote_token_file=metrics.remote_write_token,
        cluster=config.name,
        renamed=renamed_nodes(config.nodes),
    )


# ----- crash points, where a test makes the controller kill itself: ``HPCSCHED_CRASH_AT=point[:n]``
# (`hpcnode.os.faults`)
#
# commit.before.KIND  commit.after.KIND   a batch with such an event (Submitted, ...) is written
# queued.MESSAGE  sent.MESSAGE            a message was queued on its link; had time to be sent

SENT_AFTER_S = 0.05  # the link's own thread sends


def queued(faults: CrashPoints, message: Any) -> None:
    """Record that a message was queued on a link."""
    if faults.armed:
        name = type(message).__name__
        faults.reached(f"queued.{name}")
        asyncio.get_running_loop().call_later(SENT_AFTER_S, faults.reached, f"sent.{name}")


def crash_around_commits(store: Store, faults: CrashPoints) -> None:
    """Put crash points around the commits of `store`."""
    commit = store.commit

    def crashing(batch: WriteBatch) -> None:
        kinds = sorted({type(event).__name__ for event in batch.events})
        for kind in kinds:
            faults.reached(f"commit.before.{kind}")
        commit(batch)
        for kind in kinds:
            faults.reached(f"commit.after.{kind}")

    store.commit = crashing  # type: ignore[method-assign]  # of this one alone
