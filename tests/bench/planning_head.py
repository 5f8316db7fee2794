"""A controller with its API, over nodes that are only pretended: `planning_head SOCKET NODES JOBS POLICY [TABLES [LEAST-MOST]]`.

The nodes answer at once that a job has started, and after some time that it has ended; so plans go on all the time. Prints
"ready" once all jobs have been submitted and the first plan is made, and when it is told to stop (by a line) what the ticks took,
in processor time. A POLICY is that of backfill, or with preemption `easy+preemption`. TABLES is more of hpcsched.toml, as JSON; a
job runs for LEAST to MOST seconds.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import secrets
import socket
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hpcnode.wire import protocol
from hpcsched.auth.authorize import Identity, Role
from hpcsched.config.load import build_config
from hpcsched.controller.credentials import Credentials
from hpcsched.controller.daemon import GC_THRESHOLD, Alarm
from hpcsched.controller.recovery import policy_of
from hpcsched.controller.requests import submission
from hpcsched.controller.tick import Controller
from hpcsched.controller.views.backend import ControllerBackend
from hpcsched.controller.views.routes import make_server
from hpcsched.model.ids import NodeName
from hpcsched.model.node import Gpu, GpuRequest, Link, Node, NodeSpec, Partition
from hpcsched.model.spec import JobSpec
from hpcsched.sched.policy import Backfill
from hpcsched.state.cluster import ClusterState
from hpcsched.store.engine import incarnation, open_database, raise_epoch
from hpcsched.store.store import Store

AT_ONCE = 200  # jobs in one request
RUNS_S = (60.0, 600.0)
PREEMPTION = {  # with POLICY+preemption every tenth job may take the place of the others
    "qos": {"low": {}, "high": {"preempt": ["low"]}},
    "accounts": {"all": {"users": ["*"], "qos": ["low", "high"]}},
    "scheduler": {"preempt_type": "qos", "preempt_mode": "requeue"},
}


class Head:
    """The ports of a controller whose nodes are pretended."""

    def __init__(
        self, directory: Path, nodes: int, policy: str, tables: dict[str, Any], runs_s: tuple[float, float]
    ) -> None:
        engine = open_database(directory / "queue.db", make=True)
        policy, _, preempts = policy.partition("+")
        self._runs_s = runs_s
        config = build_config(tables | (PREEMPTION if preempts else {}), [], config_dir=directory, environ={})
        state = ClusterState(config=config, incarnation=incarnation(engine), epoch=raise_epoch(engine))
        names = [NodeName(f"n{at}") for at in range(nodes)]
        state.nodes = {name: _node(name) for name in names}
        state.spools = {name: f"spool-{name}" for name in names}  # known, as of connected nodes
        state.partitions = {"main": Partition(name="main", nodes=tuple(names), default=True)}
        self.store = Store(engine)
        self.controller = Controller(state, self.store, self, replace(policy_of(config), backfill=Backfill(policy)))
        self.ticks_s: list[float] = []
        self.started = 0
        self.wake = Alarm(self._tick).wake
        self._chance = random.Random(1)
        self._seq = 0

    def send(self, node: NodeName, message: Any, blob: bytes = b"") -> None:
        loop = asyncio.get_running_loop()
        if isinstance(message, protocol.Launch):
            self.started += 1
            loop.call_later(0.001, self._report, node, message.token, protocol.STARTED)
            loop.call_later(self._chance.uniform(*self._runs_s), self._report, node, message.token, protocol.ENDED)
        elif isinstance(message, protocol.EndJob):
            gone = protocol.JobGone(incarnation=message.incarnation, job_id=message.job_id, attempt=message.attempt)
            loop.call_later(0.001, self.controller.node_says, node, gone)

    def nonce(self) -> str:
        return secrets.token_hex(16)

    def monotonic_s(self) -> float:
        return time.monotonic()

    def processor_s(self) -> float:
        return time.process_time()

    def boot_clock(self) -> tuple[str, float]:
        return "", 0.0

    def _tick(self) -> None:
        began_s = time.thread_time()
        self.controller.tick(time.time())
        self.ticks_s.append(time.thread_time() - began_s)

    def _report(self, node: NodeName, token: str, status: str) -> None:
        self._seq += 1
        ended = {"codes": [0], "signals": [0]} if status == protocol.ENDED else {}
        report = protocol.Report(seq=self._seq, token=token, status=status, at_s=time.time(), **ended)
        self.controller.node_says(node, report)


def _node(name: NodeName) -> Node:
    gpus = tuple(Gpu(index=at, type="a100") for at in range(8))
    spec = NodeSpec(name=name, host="127.0.0.1", host_key="ssh-ed25519 AAAA", cpus=64, mem_mib=512_000, gpus=gpus)
    return Node(spec=spec, link=Link.UP, boot_id="b")


def _specs(count: int, *, preemption: bool) -> list[JobSpec]:
    chance = random.Random(2)
    specs = []
    for at in range(count):
        gpus = chance.choice((1, 2, 4, 8))
        specs.append(
            JobSpec(
                name="bench",
                qos=("high" if at % 10 == 9 else "low") if preemption else "",
                script="#!/bin/sh\n",
                work_dir="/tmp",
                cpus_per_task=8 * gpus,
                mem_per_node_mib=1000,
                gpus_per_node=(GpuRequest(count=gpus),),
                time_limit_s=chance.randrange(1, 48) * 1800,
            )
        )
    return specs


async def _submit(head: Head, specs: list[JobSpec]) -> None:
    identity = Identity(uid=1000, user="ann", role=Role.USER)
    for at in range(0, len(specs), AT_ONCE):
        done = asyncio.get_running_loop().create_future()
        some = specs[at : at + AT_ONCE]
        head.controller.ask(
            lambda tx, some=some: submission.submit(tx, identity, "", some, head.store.request_jobs), done.set_result
        )
        answer = await done
        if isinstance(answer, Exception):
            raise answer


async def serve(
    path: Path, nodes: int, jobs: int, policy: str, tables: str = "{}", runs_s: str = f"{RUNS_S[0]}-{RUNS_S[1]}"
) -> None:
    """Serve at `path` until a line comes in."""
    least, _, most = runs_s.partition("-")
    with tempfile.TemporaryDirectory() as directory:
        head = Head(Path(directory), nodes, policy, json.loads(tables), (float(least), float(most)))
        credentials = Credentials(head.controller.cluster, Path(directory), head.store.cluster_id(), time.time)
        backend = ControllerBackend(
            head.controller,
            SimpleNamespace(),  # type: ignore[arg-type]  # no route that is asked needs the connections
            clock=time.time,
            started_at_s=time.time(),
            apply_config=list,
            database=Path(directory) / "queue.db",
            credentials=credentials,
        )
        coming = asyncio.get_running_loop().create_future()
        coming.set_result(backend)
        server = make_server(backend, coming, identify=credentials.identify)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        path.chmod(0o666)  # a gateway has an account of its own
        listener.listen()
        await server.serve(listener)
        await _submit(head, _specs(jobs, preemption="+" in policy))
        while head.controller.last_plan is None or len(head.controller.last_plan.waits) < jobs // 4:
            await asyncio.sleep(0.1)
        gc.freeze()  # as the daemon does
        gc.set_threshold(*GC_THRESHOLD)
        head.ticks_s.clear()
        print("ready", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        print(json.dumps({"ticks_s": sorted(head.ticks_s), "started": head.started}), flush=True)
        await server.close()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]))
