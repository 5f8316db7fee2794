"""A cluster whose parts can be killed at any moment, and what must be true of it afterwards.

The controller is this process's child, so that it can be killed and started again at once; nodes stand behind real SSH
servers. Every execution of a job's script appends one line ``job attempt`` to a marker file.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from waiting import wait_until

from hpcsched import client, paths
from hpcsched.errors import UnavailableError
from hpcsched.lifecycle.events import EndRequested, JobEvent, Requeued, Submitted, from_data
from hpcsched.lifecycle.job import apply, submitted_jobs
from hpcsched.loopback.cluster import LocalCluster
from hpcsched.model.codec import spec_to_json
from hpcsched.model.job import ACTIVE, FINAL, Job, JobState
from hpcsched.model.spec import ArraySpec, JobSpec
from hpcsched.store.engine import open_read_only
from hpcsched.store.store import HistoryQuery, Store

Cluster = TypeVar("Cluster", bound="KillableCluster")
# Agents are killed more often than a real node's connection is lost: that drains none.
QUICK = {"controller": {"requeue_delay_s": 0, "kill_wait_s": 2, "link_drops": 0}}
CPUS = 4
# How long is waited before a thing counts as stuck: each controller and agent is a new Python, and the machine may be busy.
PATIENCE_S = 240.0
NOTICED_S = 5.0  # until the controller knows of a death, and gives away no more of what is dead
# One write of less than PIPE_BUF bytes to a file opened for appending: lines do not mix.
MARK = 'echo "$HPCSCHED_JOB_ID $HPCSCHED_ATTEMPT" >> {share}/ran\n'


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """What was killed, on which node, after and before which moment."""

    what: str
    node: str
    since_s: float
    until_s: float


@dataclass(slots=True)
class Accepted:
    """The jobs that a client was told of."""

    ids: list[int] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)  # whose cancellation was acknowledged as well
    failing: list[int] = field(default_factory=list)  # which cannot but fail


class KillableCluster(LocalCluster):
    """Nodes n1 to n3 and a controller that this process starts and kills."""

    def __init__(self, base: Path, **options: Any) -> None:
        super().__init__(base, cpus=CPUS, **{"settings": QUICK, **options})
        self.kills: list[Kill] = []
        self.accepted = Accepted()
        self._controller: subprocess.Popen[bytes] | None = None

    # ----- the controller

    def up(self, crash_at: str = "") -> None:
        """Start the controller and wait until it answers; with `crash_at` it will kill itself there."""
        self.start_controller(crash_at)
        wait_until(self.answers, PATIENCE_S, "the controller to answer")

    def start_controller(self, crash_at: str = "") -> None:
        """Start the controller."""
        extra = {"HPCSCHED_SIMULATED": "1", "HPCSCHED_CRASH_AT": crash_at} if crash_at else {}
        with open(self.base / "hpcschedd.log", "ab") as log:
            self._controller = subprocess.Popen(
                [sys.executable, "-m", "hpcsched.controller", "--config", str(self.config_dir)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.env | extra,
                cwd="/",
            )

    def answers(self) -> bool:
        """Return whether the controller answers. It must not have ended by itself."""
        assert self._controller is not None
        code = self._controller.poll()
        assert code in (None, -signal.SIGKILL), f"the controller ended with status {code}: {self.log_tail()}"
        try:
            return self.api("GET", "/v1/ping")["pid"] == self._controller.pid
        except UnavailableError:
            return False

    def kill_controller(self) -> None:
        """SIGKILL."""
        assert self._controller is not None
        self._controller.kill()
        self._controller.wait(timeout=PATIENCE_S)

    def controller_died(self) -> bool:
        """Return whether the controller has killed itself."""
        assert self._controller is not None
        return self._controller.poll() == -signal.SIGKILL

    def log_tail(self) -> str:
        """Return the end of the controller's log."""
        return _tail(self.base / "hpcschedd.log")

    def stop(self) -> None:
        try:
            if self._controller is not None:
                self._controller.terminate()
                self._controller.wait(timeout=PATIENCE_S)
        finally:
            if self.machines is not None:
                self.machines.stop()

    def __enter__(self) -> Self:
        return self.start()

    # ----- nodes

    def agent_root(self, node: str) -> Path:
        """Return the directory of a node's agent."""
        assert self.machines is not None
        return self.machines.nodes[node].root / "agent"

    def agent_pid(self, node: str) -> int | None:
        """Return the pid of the node's living agent."""
        return self.agent_pid_at(self.agent_root(node))

    def agent_pid_at(self, root: Path) -> int | None:
        """Return the pid of the living agent of this directory."""
        try:
            pid = int(json.loads((root / "agent.lock").read_text())["agent"][0])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return pid if _is_program(pid) else None

    def shepherds(self, node: str) -> list[int]:
        """Return the pids of the node's shepherds, those that wait for work included."""
        assert self.machines is not None
        agent = self.agent_pid(node)
        return [pid for pid in self.machines.processes(node) if pid != agent and _is_program(pid)]

    def kill_agent(self, node: str) -> bool:
        """SIGKILL the node's agent, if it has one."""
        pid = self.agent_pid(node)
        return pid is not None and self._killed("agent", node, pid)

    def kill_shepherd(self, node: str, rng: random.Random) -> bool:
        """SIGKILL one of the node's shepherds, if there is one."""
        pids = self.shepherds(node)
        return bool(pids) and self._killed("shepherd", node, rng.choice(pids))

    def _killed(self, what: str, node: str, pid: int) -> bool:
        since_s = time.time()
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        self.note_kill(what, node, since_s)
        return True

    def note_kill(self, what: str, node: str, since_s: float) -> None:
        """Remember that something was killed between then and now."""
        self.kills.append(Kill(what=what, node=node, since_s=since_s, until_s=time.time()))

    def cycle_power(self, node: str) -> None:
        """Pull the node's plug, and put it back."""
        assert self.machines is not None
        since_s = time.time()
        self.machines.power_off(node)
        self.machines.power_on(node)
        self.note_kill("power", node, since_s)

    # ----- jobs

    def submit(self, *specs: JobSpec) -> list[int]:
        """Submit the jobs of one request, again and again until it is acknowledged; return the ids."""
        body = {"request_id": uuid.uuid4().hex, "jobs": [spec_to_json(spec) for spec in specs]}

        def asked() -> list[int]:
            try:
                answer = client.call("POST", "/v1/submit", body, where=self.api_socket)
            except UnavailableError:
                return []
            return [int(job["job_id"]) for job in answer["jobs"]]

        ids = wait_until(asked, PATIENCE_S, "a submission to be acknowledged")
        for first, spec in zip(ids, specs, strict=True):
            tasks = len(spec.array.indices) if spec.array else 1
            self.accepted.ids += range(first, first + tasks)
        return ids

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Ask the controller, again and again until it answers."""

        def asked() -> dict[str, Any] | None:
            try:
                return self.api("POST", path, body)
            except UnavailableError:
                return None

        answer = wait_until(asked, PATIENCE_S, f"an answer to {path}")
        assert answer is not None
        return answer

    def job(self, job_id: int) -> dict[str, Any]:
        """Return what the controller says of a job, {} if there is none that could."""
        try:
            found: dict[str, Any] = self.api("GET", f"/v1/job/{job_id}")["jobs"][0]
        except UnavailableError:
            return {}
        return found

    def spec(self, script: str = "", **fields: Any) -> JobSpec:
        """Return a job that leaves its mark and then runs `script`."""
        return JobSpec(
            name="marked",
            script="#!/bin/sh\n" + MARK.format(share=self.share) + script,
            work_dir=str(self.share),
            **{"stdout": "/dev/null", **fields},
        )

    def one_task(self, for_s: float, **fields: Any) -> JobSpec:
        """Return a short job for one cpu."""
        return self.spec(f"sleep {for_s:.2f}\n", **fields)

    def array(self, count: int, for_s: float) -> JobSpec:
        """Return an array of short jobs."""
        return self.spec(f"sleep {for_s:.2f}\n", array=ArraySpec(indices=tuple(range(count))))

    def two_nodes(self, for_s: float) -> JobSpec:
        """Return a job whose tasks run on two nodes by hrun."""
        task = f'echo "$HPCSCHED_JOB_ID $HPCSCHED_ATTEMPT $HPCSCHED_PROCID" >> {self.share}/tasks; sleep {for_s:.2f}'
        fields = {"nodes_min": 2, "nodes_max": 2, "nodes_given": True, "ntasks_per_node": 1}
        return self.spec(f"exec hrun sh -c '{task}' 2>> {self.share}/complaints-$HPCSCHED_JOB_ID\n", **fields)

    def ran(self) -> Counter[tuple[int, ...]]:
        """Return how often each (job, attempt) has left its mark."""
        return self._marks("ran")

    def _marks(self, name: str) -> Counter[tuple[int, ...]]:
        path = self.share / name
        lines = path.read_text().splitlines() if path.exists() else []
        return Counter(tuple(int(word) for word in line.split()) for line in lines)

    def all_ended(self) -> bool:
        """Return whether no job waits or runs."""
        try:
            counts = self.api("GET", "/v1/ping")["counts"]
        except UnavailableError:
            return False
        return not any(counts.get(state.value) for state in (JobState.PENDING, *ACTIVE))

    def wait_until_ended(self, timeout_s: float, after: str = "") -> None:
        """Wait until all jobs have ended; a failure says what each that has not is waiting for."""
        try:
            wait_until(self.all_ended, timeout_s, "all jobs to end" + (f" after {after}" if after else ""))
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.unfinished()}") from error

    def unfinished(self) -> str:
        """Return, in words, all that is known of the jobs that have not ended, and of the nodes."""
        asked = [("hqueue",), ("hinfo", "-N")]
        ids = [line.split()[0] for line in self.run("hqueue", "-h", "-o", "%i").stdout.splitlines()]
        asked += [command for job_id in ids for command in (("hwhy", job_id), ("hctl", "story", job_id))]
        said = [f"$ {' '.join(words)}\n{self.run(*words, check=False).stdout}" for words in asked]
        assert self.machines is not None
        logs = [f"{node}: {_tail(self.agent_root(node) / 'log')}" for node in sorted(self.machines.nodes)]
        return "\n".join([*said, *logs, f"the controller: {self.log_tail()}", *self.leftovers()])

    def leftovers(self) -> list[str]:
        """Return the processes of jobs that are on the nodes now."""
        assert self.machines is not None
        return [
            f"{node}: {pid} {_command_line(pid)}"
            for node in self.machines.nodes
            for pid in self.machines.processes(node)
            if b"HPCSCHED_JOB_ID=" in _proc_file(pid, "environ")
        ]

    def database(self) -> Path:
        """Return the path of the controller's database."""
        return self.config_dir / "state" / paths.DATABASE_FILE

    # ----- what must be true in the end

    def violations(self) -> list[str]:
        """Return, in words, each promise that was broken. To be called when all jobs have ended."""
        database = open_read_only(self.database())
        store = Store(database)
        jobs = {job.id: job for job in store.history(HistoryQuery(limit=1_000_000))}
        rows = database.execute("SELECT kind, job_id, at_s, data FROM events WHERE job_id > 0 ORDER BY seq")
        events = [from_data(kind, job_id, at_s, json.loads(data)) for kind, job_id, at_s, data in rows]
        store.close()
        found = [
            f"job {job_id} was acknowledged and is not there" for job_id in self.accepted.ids if job_id not in jobs
        ]
        found += [f"job {job_id} was never acknowledged" for job_id in jobs if job_id not in set(self.accepted.ids)]
        found += check_history(events, jobs, CPUS)
        found += self._check_runs(jobs, events)
        return found

    def _check_runs(self, jobs: dict[Any, Job], events: list[JobEvent]) -> list[str]:
        ran = self.ran()
        found = [f"{mark} ran {times} times" for mark, times in (ran + self._marks("tasks")).items() if times != 1]
        found += [f"job {job_id} ran and nobody knows it" for job_id, _ in ran if job_id not in jobs]
        given = {(event.job_id, event.at_s) for event in events if type(event).__name__ == "Allocated"}
        for job in jobs.values():
            since_s = min((at_s for job_id, at_s in given if job_id == job.id), default=job.submitted_at_s)
            if job.state is JobState.COMPLETED and ran[(job.id, job.attempt)] != 1:
                found.append(f"job {job.id} is COMPLETED, and its attempt {job.attempt} did not run")
            if job.id in self.accepted.cancelled:
                found += [] if job.state is JobState.CANCELLED else [f"job {job.id} was cancelled, and is {job.state}"]
                continue
            if job.id in self.accepted.failing:
                ends = (JobState.FAILED, JobState.NODE_FAIL)
                found += [] if job.state in ends else [f"job {job.id} cannot but fail, and is {job.state}"]
                continue
            asked = any(event.job_id == job.id and _is_requeue(event) for event in events)
            if job.attempt and not asked and not self._was_hit(job, since_s, events):
                found.append(f"job {job.id} came to attempt {job.attempt}, and nothing explains it")
            if job.state is not JobState.COMPLETED and not self._may_have_failed(job, since_s, events):
                found.append(f"job {job.id} is {job.state}, and nothing explains it: {self._complaints(job)!r}")
        return found

    def _complaints(self, job: Job) -> str:
        """Return what the hrun of the job's script has complained of."""
        path = self.share / f"complaints-{job.id}"
        return path.read_text() if path.exists() else ""

    def _may_have_failed(self, job: Job, since_s: float, events: list[JobEvent]) -> bool:
        return job.state in (JobState.NODE_FAIL, JobState.FAILED) and self._was_hit(job, since_s, events)

    def _was_hit(self, job: Job, since_s: float, events: list[JobEvent]) -> bool:
        """Return whether a shepherd or a node that the job may have had was killed in the job's time."""
        nodes = {share.node for event in events if event.job_id == job.id for share in getattr(event, "shares", ())}
        hits = [kill for kill in self.kills if kill.what in ("shepherd", "power") and kill.node in nodes]
        ended_s = job.ended_at_s or 0.0
        return any(since_s - NOTICED_S <= kill.until_s and kill.since_s <= ended_s + NOTICED_S for kill in hits)


def new_cluster(kind: type[Cluster], names: Sequence[str]) -> Iterator[Cluster]:
    """Yield a running cluster in a directory of its own, with real sshds where the tests are to have them."""
    with tempfile.TemporaryDirectory(prefix="hpc") as directory:
        Path(directory).chmod(0o755)
        server = "sshd" if os.environ.get("CI") == "true" else "auto"
        with kind(Path(directory), names=names, server=server) as cluster:
            yield cluster


def check_history(events: list[JobEvent], jobs: dict[Any, Job], cpus: int) -> list[str]:
    """Return what is wrong in the events of all jobs, in their order, and with the rows that they led to."""
    known: dict[int, Job] = {}
    found: list[str] = []
    for event in events:
        if isinstance(event, Submitted):
            made = submitted_jobs(event, jobs[event.job_id].spec) if event.job_id in jobs else ()
            known |= {job.id: job for job in made}
            continue
        before = known[event.job_id]
        known[event.job_id] = after = apply(before, event)
        if before.state in FINAL and after.state is not JobState.PENDING:
            found.append(f"job {before.id} was {before.state} and became {after.state}")
        if after.held_nodes != before.held_nodes:
            found += _overfull(known, after, cpus)
    for job_id, job in jobs.items():
        if known.get(job_id) != job:
            found.append(f"the events of job {job_id} do not give its row: {known.get(job_id)} is not {job}")
    return found


def _is_requeue(event: JobEvent) -> bool:
    return isinstance(event, Requeued) or (isinstance(event, EndRequested) and event.requeue)


def _overfull(known: dict[int, Job], changed: Job, cpus: int) -> list[str]:
    held: Counter[str] = Counter()
    for job in known.values():
        if job.state in ACTIVE:
            for share in job.shares:
                held[share.node] += share.cpus if share.node in job.held_nodes else 0
    return [f"{node} has {n} of {cpus} cpus given away after job {changed.id}" for node, n in held.items() if n > cpus]


def _is_program(pid: int) -> bool:
    """Return whether the process is the agent's program: the agent itself, or a worker that it forked."""
    words = _proc_file(pid, "cmdline").split(b"\0")
    return b"agent" in words and any(b"hpcnode-" in word for word in words)


def _tail(path: Path) -> str:
    return path.read_bytes()[-3000:].decode(errors="replace") if path.exists() else ""


def _command_line(pid: int) -> str:
    return _proc_file(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def _proc_file(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


class Flow:
    """Jobs of all sorts, submitted in the background as long as they are wanted."""

    def __init__(self, cluster: KillableCluster, rng: random.Random, in_flight: int = 12) -> None:
        self._cluster, self._rng, self._in_flight = cluster, rng, in_flight
        self._stopped = threading.Event()
        self.also: Callable[[], None] = lambda: None  # what else is done, again and again
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="flow")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        self.check()

    def check(self) -> None:
        """Raise what has ended the flow, if something has."""
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._stopped.wait(0.02):
                if self._queued() < self._in_flight:
                    self._cluster.submit(*(self._one() for _ in range(self._rng.randint(1, 4))))
                if self._rng.random() < 0.15:
                    self._cancel_one()
                if self._rng.random() < 0.15:
                    self._requeue_one()
                self.also()
        except BaseException as error:
            self._failure = error

    def _cancel_one(self) -> None:
        (job_id,) = self._cluster.submit(self._cluster.one_task(60))
        self._cluster.ask("/v1/cancel", {"jobs": [str(job_id)]})
        self._cluster.accepted.cancelled.append(job_id)

    def _requeue_one(self) -> None:
        cancelled = set(self._cluster.accepted.cancelled)
        ids = [job_id for job_id in self._cluster.accepted.ids[-30:] if job_id not in cancelled]
        if ids:  # one that has not ended is refused or starts anew, which is as well
            self._cluster.ask("/v1/requeue", {"jobs": [str(self._rng.choice(ids))]})

    def _queued(self) -> int:
        try:
            counts = self._cluster.api("GET", "/v1/ping")["counts"]
        except UnavailableError:
            return 0
        return sum(counts.get(state.value, 0) for state in (JobState.PENDING, *ACTIVE))

    def _one(self) -> JobSpec:
        rng, cluster = self._rng, self._cluster
        for_s = rng.choice((0.0, 0.0, 0.05, 0.2, 0.5))
        kind = rng.random()
        if kind < 0.2:
            return cluster.two_nodes(for_s)
        if kind < 0.35:
            return cluster.array(rng.randint(2, 4), for_s)
        return cluster.one_task(for_s)
