"""The controller on an event loop: nodes, ticks, configuration, shutdown. `hpcsched.controller.opening` comes before it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from hpcsched import paths
from hpcsched.api import web
from hpcsched.api.app import Backend
from hpcsched.config import Config, load_config
from hpcsched.controller.alarm import Alarm
from hpcsched.controller.backend import ControllerBackend
from hpcsched.controller.configured import node_of, policy_of, settings_changed
from hpcsched.controller.faults import crash_around_commits, crash_points
from hpcsched.controller.fleet import Fleet, monotonic_s
from hpcsched.controller.heads import HeadStreams
from hpcsched.controller.relaying import Relaying
from hpcsched.controller.stepping import Stepping
from hpcsched.controller.tick import Controller
from hpcsched.errors import ConfigError, InvariantError, RequestError
from hpcsched.launch.bundle import build_bundle
from hpcsched.launch.greeting import ControllerIdentity
from hpcsched.model.ids import NodeName
from hpcsched.store.store import Store
from hpcsched.store.world import World

log = logging.getLogger("hpcsched.daemon")

CLOCK_LOOK_S = 30.0  # a time of day that is waited for may come sooner: the clock may be set meanwhile
EXIT_INVARIANT = 70  # EX_SOFTWARE of sysexits.h: our own ledger is wrong
# When the nodes have been connected: what `hacct` and the like need takes a tenth of a second to import.
AT_LEISURE_S = 2.0
# The ledger is many thousands of values without cycles: looking through them all for garbage was half of the time that
# a request for 10,000 jobs took.
GC_THRESHOLD = (100_000, 20, 50)


class Daemon:
    """One life of hpcschedd."""

    def __init__(self, config: Config, world: World, store: Store, clock: Callable[[], float]) -> None:
        self._config = config
        self._stop: asyncio.Event = asyncio.Event()
        self._exit_code = 0
        self._alarm = Alarm(self._tick)
        self._clock = clock
        self._boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self._faults = crash_points(os.environ)
        if self._faults.armed:
            crash_around_commits(store, self._faults)
        self.store = store
        self.controller = Controller(world, store, self, policy_of(config))
        identity = ControllerIdentity(cluster=config.name, incarnation=world.incarnation, epoch=world.epoch)
        self.fleet = Fleet(self.controller, bundle=build_bundle(), identity=identity, clock=clock)
        self.heads = HeadStreams()
        self.stepping = Stepping(self.controller, self, clock=clock, reply_head=self.heads.reply)
        self.heads.stepping = self.fleet.stepping = self.stepping
        gc.freeze()  # nothing made until here is garbage
        gc.set_threshold(*GC_THRESHOLD)
        gc.enable()

    async def run(
        self, coming: asyncio.Future[Backend], mode: int, router: web.Router, answered: Callable[[], Awaitable[None]]
    ) -> int:
        """Answer whoever waits for what is `coming`, and serve until a signal or a broken invariant; return the exit status.

        The nodes are connected, and the first plan begins, when those who have waited for our start have been `answered`.
        """
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        self.fleet.relaying = Relaying(self.controller.world, self.send, lambda request: router.find(request)(request))
        backend = ControllerBackend(
            self.controller,
            self.fleet,
            clock=self._clock,
            started_at_s=self._clock(),
            apply_config=self.apply_config,
            database=self._config.controller.state_dir / paths.DATABASE_FILE,
        )
        try:
            await self.heads.serve(self._config.steps_socket, mode)
            coming.set_result(backend)
            log.info("ready at %s", self._config.api_socket)
            await answered()
            self.fleet.configure(self._config)
            for job in self.controller.world.active_jobs():
                self.stepping.job_running(job)
            self.wake(0.0)
            loop.call_later(AT_LEISURE_S, loop.run_in_executor, None, import_module, "hpcsched.store.seldom")
            await self._stop.wait()
            log.info("stopping; jobs run on")
        finally:
            self._config.steps_socket.unlink(missing_ok=True)
            await self.heads.close()
            self.fleet.close()
        return self._exit_code

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
        changed += settings_changed(world.config, config)
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

    def boot_clock(self) -> tuple[str, float]:
        return self._boot_id, time.clock_gettime(time.CLOCK_BOOTTIME)

    def wake(self, after_s: float) -> None:
        self._alarm.wake(min(after_s, CLOCK_LOOK_S))

    def _tick(self) -> None:
        try:
            self.controller.tick(self._clock())
        except Exception as error:  # the edge of a tick: what is in memory may not be what is on disk any more
            wrong = "the ledger is wrong" if isinstance(error, InvariantError) else "a tick failed"
            log.exception("%s: stopping rather than going on with it", wrong)
            self._exit_code = EXIT_INVARIANT
            self._stop.set()
