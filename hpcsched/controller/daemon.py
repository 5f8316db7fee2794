"""Puts the controller together and runs it on an event loop: lock, database, nodes, sockets, ticks, shutdown."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import signal
import socket
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from hpcsched import paths
from hpcsched.api.app import make_server
from hpcsched.config import Config, load_config
from hpcsched.controller.alarm import Alarm
from hpcsched.controller.backend import ControllerBackend
from hpcsched.controller.faults import crash_around_commits, crash_points
from hpcsched.controller.fleet import Fleet, monotonic_s
from hpcsched.controller.heads import HeadStreams
from hpcsched.controller.lock import StateLock
from hpcsched.controller.stepping import Stepping
from hpcsched.controller.tick import Controller, load_world
from hpcsched.errors import ConfigError, InvariantError, RequestError
from hpcsched.launch.bundle import build_bundle
from hpcsched.launch.greeting import ControllerIdentity
from hpcsched.model.accounting import PreemptMode, PreemptType
from hpcsched.model.ids import NodeName
from hpcsched.model.node import Link, Node, NodeSpec
from hpcsched.sched.policy import Backfill, Policy, PreemptRules
from hpcsched.store.engine import asks_about_strays, incarnation, open_database, raise_epoch, restored_last_id
from hpcsched.store.store import Store
from hpcsched.store.world import World

log = logging.getLogger("hpcsched.daemon")

EXIT_INVARIANT = 70  # EX_SOFTWARE of sysexits.h: our own ledger is wrong
# Who has waited for our start is answered before the connections to the nodes and the first plan take the processor.
FIRST_ANSWERS_S = 0.05
BACKLOG = 1024
# The ledger is many thousands of values without cycles: looking through them all for garbage was half of the time that
# a request for 10,000 jobs took.
GC_THRESHOLD = (100_000, 20, 50)


class Daemon:
    """One life of hpcschedd."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._stop: asyncio.Event = asyncio.Event()
        self._exit_code = 0
        self._alarm = Alarm(self._tick)
        self._clock = time.time
        self._faults = crash_points(os.environ)

    async def run(self) -> int:
        """Serve until a signal or a broken invariant; return the exit status."""
        settings = self._config.controller
        make_private_dir(settings.state_dir)
        lock = StateLock(settings.state_dir)
        lock.acquire(datetime.fromtimestamp(self._clock()).isoformat(sep=" ", timespec="seconds"))
        mode = self._make_run_dir()
        listener = listening_socket(self._config.api_socket, mode)
        try:
            self._build(settings.state_dir)
            await self._serve(listener, mode)
        finally:
            self._config.api_socket.unlink(missing_ok=True)
            listener.close()
            lock.release()
        return self._exit_code

    def _build(self, state_dir: Path) -> None:
        gc.disable()  # nothing made here is garbage
        engine = open_database(state_dir / paths.DATABASE_FILE)
        store = Store(engine)
        if self._faults.armed:
            crash_around_commits(store, self._faults)
        world = World(config=self._config, incarnation=incarnation(engine), epoch=raise_epoch(engine))
        world.restored_last_id = restored_last_id(engine)
        world.ask_strays = asks_about_strays(engine)
        stored = store.load_nodes()
        for spec in self._config.nodes:
            world.nodes[spec.name] = node_of(spec, stored.get(spec.name))
        world.partitions = {partition.name: partition for partition in self._config.partitions}
        load_world(world, store, self._clock())
        self.controller = Controller(world, store, self, policy_of(self._config))
        identity = ControllerIdentity(cluster=self._config.name, incarnation=world.incarnation, epoch=world.epoch)
        self.fleet = Fleet(self.controller, bundle=build_bundle(), identity=identity, clock=self._clock)
        self.heads = HeadStreams()
        self.stepping = Stepping(self.controller, self, clock=self._clock, reply_head=self.heads.reply)
        self.heads.stepping = self.fleet.stepping = self.stepping
        self.store = store
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLD)
        gc.enable()
        log.info("term %d of cluster %s, %d jobs known", world.epoch, self._config.name, len(world.jobs))

    async def _serve(self, listener: socket.socket, mode: int) -> None:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        backend = ControllerBackend(
            self.controller,
            self.fleet,
            clock=self._clock,
            started_at_s=self._clock(),
            apply_config=self.apply_config,
            database=self._config.controller.state_dir / paths.DATABASE_FILE,
        )
        server = make_server(backend)
        try:
            await server.serve(listener)
            await self.heads.serve(self._config.steps_socket, mode)
            log.info("ready at %s", self._config.api_socket)
            await asyncio.sleep(FIRST_ANSWERS_S)
            self.fleet.configure(self._config)
            for job in self.controller.world.active_jobs():
                self.stepping.job_running(job)
            self.wake(0.0)
            await self._stop.wait()
            log.info("stopping; jobs run on")
        finally:
            self._config.steps_socket.unlink(missing_ok=True)
            await self.heads.close()
            self.fleet.close()
            await server.close()
            self.store.close()

    def _make_run_dir(self) -> int:
        """Make the directory of the sockets; return the sockets' mode: for everybody if we serve everybody."""
        run_dir = self._config.controller.run_dir
        for_all = os.getuid() == 0
        run_dir.mkdir(parents=True, exist_ok=True)
        status = run_dir.stat()
        if status.st_uid != os.getuid():
            raise ConfigError(f"cannot use {run_dir} for the sockets: it belongs to uid {status.st_uid}, not to us")
        run_dir.chmod(0o755 if for_all else 0o700)
        return 0o666 if for_all else 0o600

    def _reload(self) -> None:
        try:
            for change in self.apply_config():
                log.info("configuration: %s", change)
        except ConfigError as error:
            log.error("the configuration was not reloaded: %s", error)

    def apply_config(self) -> list[str]:
        """Read the configuration again and go on with it; return what changed, in words. Raises ConfigError."""
        config = load_config(self._config.config_dir)
        world = self.controller.world
        changed: list[str] = []
        specs = {spec.name: spec for spec in config.nodes}
        for name in list(world.nodes):
            if name not in specs:
                if world.jobs_on(name):
                    raise RequestError(f"cannot remove node {name}: jobs run there; drain it and wait for them")
                del world.nodes[name]
                changed.append(f"node {name} removed")
        stored = self.store.load_nodes()
        for name, spec in specs.items():
            known = world.nodes.get(name)
            if known is None:
                world.nodes[name] = node_of(spec, stored.get(name))
                changed.append(f"node {name} added")
            elif known.spec != spec:
                world.nodes[name] = replace(known, spec=spec)
                changed.append(f"node {name} changed")
        partitions = {partition.name: partition for partition in config.partitions}
        if partitions != world.partitions:
            changed.append("partitions: " + ", ".join(partitions))
        if config.accounting != world.config.accounting:
            changed.append("accounts, QOS, licences or fair share")
        world.partitions = partitions
        world.config = self._config = config
        self.controller.policy = policy_of(config)
        self.fleet.configure(config)
        self.controller.reconfigured()
        return changed

    # ----- Ports of the controller

    def send(self, node: NodeName, message: Any, blob: bytes = b"") -> None:
        self.fleet.send(node, message, blob)
        self._faults.queued(message)

    def nonce(self) -> str:
        return secrets.token_hex(16)

    def monotonic_s(self) -> float:
        return monotonic_s()

    def wake(self, after_s: float) -> None:
        self._alarm.wake(after_s)

    def _tick(self) -> None:
        try:
            self.controller.tick(self._clock())
        except Exception as error:  # the edge of a tick: what is in memory may not be what is on disk any more
            wrong = "the ledger is wrong" if isinstance(error, InvariantError) else "a tick failed"
            log.exception("%s: stopping rather than going on with it", wrong)
            self._exit_code = EXIT_INVARIANT
            self._stop.set()


def listening_socket(path: Path, mode: int) -> socket.socket:
    """Return the API's socket: whoever connects to it while the database is read waits, rather than being refused."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot serve at {path}: {error.strerror or error}") from None
    path.chmod(mode)
    listener.listen(BACKLOG)
    return listener


def make_private_dir(path: Path) -> None:
    """Make the directory, for us alone. Raises ConfigError if it is somebody else's."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.getuid():
        raise ConfigError(f"cannot use {path}: it belongs to uid {status.st_uid}, we are uid {os.getuid()}")
    path.chmod(0o700)


def node_of(spec: NodeSpec, row: Any) -> Node:
    """Return the node of the configuration with what the store remembers of it."""
    if row is None:
        return Node(spec=spec)
    return Node(
        spec=spec,
        link=Link.UNKNOWN,
        link_since_s=row.link_since_s,
        drained=bool(row.drained),
        drained_why=row.drained_why,
        drained_by=row.drained_by,
        drained_at_s=row.drained_at_s,
        boot_id=row.boot_id,
        machine_id=row.machine_id,
    )


def policy_of(config: Config) -> Policy:
    """Return the planner's policy as configured."""
    scheduler = config.scheduler
    return Policy(
        max_switch_wait_s=scheduler.max_switch_wait,
        backfill=Backfill(scheduler.policy) if scheduler.policy != "fifo" else Backfill.NONE,
        weight_age=scheduler.weights.age,
        weight_partition=scheduler.weights.partition,
        weight_size=scheduler.weights.size,
        weight_fairshare=scheduler.weights.fairshare,
        weight_qos=scheduler.weights.qos,
        weight_assoc=scheduler.weights.assoc,
        weights_tres=scheduler.weights.tres,
        favor_small=scheduler.favor_small,
        age_max_s=scheduler.age_max_s,
        preempt=PreemptRules(
            type=PreemptType(scheduler.preempt_type),
            mode=PreemptMode(scheduler.preempt_mode),
            grace_s=scheduler.preempt_grace_time_s,
            exempt_s=scheduler.preempt_exempt_time_s,
            requeue=config.controller.requeue,
            qos={qos.name: qos for qos in config.accounting.qos},
        ),
    )
