"""The scheduler: logs of real machines replayed, and one plan of a large world, its growth with the queue.

The policy `default` is compared with EASY, EASY-SJBF and EASY++ on all logs, and on logs whose requested times were made useless.
Of the logs in HPCSCHED_TRACES (see tests/unit/sim/test_sim_traces.py) each is replayed with each policy; without it only the
plans are measured. Starts that differ from the reference schedules are counted for the policies that have one.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.node import Gpu, Partition, Share
from hpcsched.model.reservation import Flag, Reservation, reserved_intervals_of
from hpcsched.sched.explain import explain
from hpcsched.sched.place.request import ResourceRequest, Shape
from hpcsched.sched.plan import plan
from hpcsched.sched.policy import Backfill, Policy
from hpcsched.sched.pool import Pool
from hpcsched.sched.snapshot import NodeView, PendingJob, RunningJob, Snapshot
from hpcsched.sim.policies import metrics_of, replay, simulate
from hpcsched.sim.swf import Trace, TraceJob, read_trace
from tests.bench.figures import Figure, from_samples

LOGS = ("KTH-SP2", "SDSC-SP2", "CTC-SP2")
REFERENCES = {"fcfs": "fcfs", "easy": "easy", "easy-sjbf": "easy_sjbf"}
WINDOWS = (
    ("lublin_256", 256, "<= 73.3, reach 58.6"),
    ("lublin_256_new2", 256, "<= 92.0"),
    ("SDSC-SP2-1998-4.2-cln", 128, "<= 548, reach 397.8"),
)
# Logs, and what the requests of most users are raised to in a second replay (0: there is none).
UNSEEN = (
    ("KTH-SP2.pyss", 86_400.0),
    ("CTC-SP2.pyss", 86_400.0),
    ("SDSC-SP2.pyss", 2 * 86_400.0),
    ("LLNL-Atlas-2006-2.1-cln", 0.0),
    ("NASA-iPSC-1993-3.1-cln", 0.0),
    ("lublin_256", 0.0),
    ("lublin_256_new2", 0.0),
)
BARS = {
    "easy": (">= 40k, reach 80k", ">= 20k, reach 37k", ">= 20k, reach 40k"),
    "conservative": (">= 12k, reach 23k", ">= 6k, reach 15k", ">= 3k, reach 6k"),
}


def run(quick: bool) -> list[Figure]:
    """Replay the logs and plan for large worlds."""
    return [*_replays(1 if quick else 3), *_windows(), *_unseen(), *_plans(quick), *_answers(quick)]


def _replays(rounds: int) -> list[Figure]:
    there = os.environ.get("HPCSCHED_TRACES")
    if not there:
        print("HPCSCHED_TRACES is not set: no log is replayed")
        return []
    figures = []
    for at, log in enumerate(LOGS):
        trace = read_trace(Path(there) / f"{log}.pyss.swf.gz")
        for policy in ("fcfs", "easy", "easy-sjbf", "conservative", "slurm-like", "default"):
            done = [simulate(trace, policy) for _ in range(rounds)]
            bar = BARS[policy][at] if policy in BARS else ""
            figures.append(from_samples(f"{log} {policy}", [one.jobs_per_s for one in done], "jobs/s", bar=bar))
            slowdown = done[0].metrics.bounded_slowdown_mean
            figures.append(Figure(name=f"{log} {policy}: mean bounded slowdown", value=slowdown, unit=""))
            for name in ("wait_mean_s", "wait_max_s"):
                figures.append(
                    Figure(name=f"{log} {policy}: {name}", value=round(getattr(done[0].metrics, name)), unit="s")
                )
            if policy in REFERENCES:
                wrong = _differ(Path(there) / "reference" / f"{log}.pyss.{REFERENCES[policy]}.csv.gz", done[0])
                figures.append(Figure(name=f"{log} {policy}: differ", value=wrong, unit="starts", bar="0"))
    return figures


def _windows() -> list[Figure]:
    """RLScheduler's ten windows of 1024 jobs, each from an empty machine: the mean of their mean bounded slowdowns."""
    there = os.environ.get("HPCSCHED_TRACES")
    if not there:
        return []
    starts = json.loads((Path(there) / "reference" / "rlscheduler-windows.json").read_text())["window_starts_0based"]
    figures = []
    for log, procs, bar in WINDOWS:
        jobs = _rl_jobs(Path(there) / f"{log}.swf.gz")
        means = []
        for start in starts:
            window = sorted(jobs[start : start + 1024], key=lambda job: job.submit_s)
            done = simulate(Trace(name=log, jobs=tuple(window), procs=procs), "default")
            means.append(done.metrics.bounded_slowdown_mean)
        value = round(sum(means) / len(means), 1)
        figures.append(Figure(name=f"{log} default, ten windows: mean bounded slowdown", value=value, unit="", bar=bar))
    return figures


class PlusPlus(Pool):
    """EASY++ (Tsafrir 2007): EASY-SJBF by the mean of the user's last two runs; a run that outlasts it gets its request.

    A prediction is made at submission. Nothing keeps predictions from delaying the head of the queue.
    """

    def __init__(self, size: int, jobs: Sequence[TraceJob]) -> None:
        super().__init__(size, [job.procs for job in jobs], [job.asked_s for job in jobs])
        self.jobs = jobs
        self.predicted_s: dict[int, float] = {}
        self.last_s: dict[int, list[float]] = {}
        self.began_s: dict[int, float] = {}

    def submit(self, job: int, now_s: float) -> Sequence[int]:
        last_s = self.last_s.get(self.jobs[job].user, [])
        known = len(last_s) == 2 and self.jobs[job].user >= 0
        self.predicted_s[job] = min(self.limits_s[job], sum(last_s) // 2 if known else self.limits_s[job])
        self._wait((self.procs[job], self.limits_s[job], job))
        return self.choose(now_s)  # after every event, as the published EASY++ does

    def end(self, job: int, now_s: float) -> Sequence[int]:
        self.last_s[self.jobs[job].user] = [*self.last_s.get(self.jobs[job].user, []), now_s - self.began_s[job]][-2:]
        return super().end(job, now_s)

    def start(self, job: int, now_s: float) -> None:
        super().start(job, now_s)
        self.began_s[job] = now_s

    def choose(self, now_s: float) -> list[int]:
        started = self._heads(now_s)
        if len(self.queue) < 2 or not self.free:
            return started
        missing, shadow_s, extra = self.queue[0][0] - self.free, float("inf"), 0
        for end_s, procs in sorted((self._end_s(job, now_s), procs) for _, job, procs in self.ends):
            if missing <= 0 and end_s != shadow_s:
                break
            missing -= procs
            if missing <= 0:
                shadow_s, extra = end_s, -missing
        for job in sorted(self.queue[1:], key=lambda job: self.predicted_s[job[2]]):
            late = now_s + self.predicted_s[job[2]] > shadow_s
            if job[0] <= self.free and (not late or job[0] <= extra):
                extra -= job[0] if late else 0
                self._leave(job)
                self.start(job[2], now_s)
                started.append(job[2])
        return started

    def _end_s(self, job: int, now_s: float) -> float:
        end_s = self.began_s[job] + self.predicted_s[job]
        return end_s if end_s > now_s else self.ends_of[job]


def asking_for_long(trace: Trace, least_s: float, part: float, seed: int = 1) -> Trace:
    """Return the log with the requests of this part of the users raised to `least_s`: as where nobody looks at limits."""
    users = sorted({job.user for job in trace.jobs})
    careless = {user for user in users if random.Random(user * 7919 + seed * 104729 + 13).random() < part}
    jobs = [job._replace(asked_s=max(job.asked_s, least_s)) if job.user in careless else job for job in trace.jobs]
    return replace(trace, name=f"{trace.name}, requests of {least_s / 3600:g} h", jobs=tuple(jobs))


def _unseen() -> list[Figure]:
    """Slowdown, mean and longest wait of `default` beside those of EASY, EASY-SJBF and EASY++."""
    there = os.environ.get("HPCSCHED_TRACES")
    if not there:
        return []
    figures = []
    for log, least_s in UNSEEN:
        trace = read_trace(Path(there) / f"{log}.swf.gz")
        for case in (trace, asking_for_long(trace, least_s, 0.8)) if least_s else (trace,):
            jobs = tuple(job for job in case.jobs if job.procs <= case.procs)
            went = {policy: simulate(case, policy).metrics for policy in ("easy", "easy-sjbf", "default")}
            went["easy++"] = metrics_of(jobs, replay(jobs, PlusPlus(case.procs, jobs)), case.procs)
            bars = {
                "bounded_slowdown_mean": 1.1
                * min(went[name].bounded_slowdown_mean for name in ("easy-sjbf", "easy++")),
                "wait_mean_s": went["easy"].wait_mean_s,
                "wait_max_s": went["easy"].wait_max_s,
            }
            for policy, metrics in went.items():
                for name, most in bars.items():
                    bar = f"<= {most:.1f}" if policy == "default" else ""
                    value = round(getattr(metrics, name), 1)
                    figures.append(Figure(name=f"{case.name} {policy}: {name}", value=value, unit="", bar=bar))
    return figures


def _rl_jobs(path: Path) -> list[TraceJob]:
    """Return the jobs as RLScheduler reads them, but that a run time above the request counts as requested."""
    jobs = []
    with gzip.open(path, "rt") as lines:
        for line in lines:
            if line.startswith(";") or line.isspace():
                continue
            fields = [float(field) for field in line.split()]
            run_s = fields[3] if fields[3] >= 0 else 10.0
            if run_s:
                procs = int(max(fields[4], fields[7]))
                jobs.append(TraceJob(int(fields[0]), fields[1], run_s, procs, max(fields[8], run_s), int(fields[11])))
    return sorted(jobs, key=lambda job: job.id)


def _differ(path: Path, done: object) -> int:
    with gzip.open(path, "rt") as lines:
        reference = {int(row["job_id"]): int(row["start"]) for row in csv.DictReader(lines)}
    return sum(reference[job.id] != at_s for job, at_s in zip(done.jobs, done.starts_s, strict=True))  # type: ignore[attr-defined]


def large_world(waiting: int, nodes: int, seed: int = 1) -> Snapshot:
    """Return nodes of 64 cpus and 8 GPUs, half of the GPUs busy, and jobs of all sizes that wait."""
    chance = random.Random(seed)
    views = tuple(
        NodeView(
            name=NodeName(f"n{at}"),
            cpus=64,
            mem_mib=512_000,
            gpus=tuple(Gpu(index=gpu, type="a100") for gpu in range(8)),
        )
        for at in range(nodes)
    )
    running = tuple(
        RunningJob(
            id=JobId(1_000_000 + at),
            display_id=str(at),
            shares=(Share(node=node.name, cpus=32, mem_mib=256_000, gpus=(0, 1, 2, 3)),),
            began_at_s=0.0,
            ends_at_s=1000.0 + chance.randrange(1, 200) * 600,
        )
        for at, node in enumerate(views)
    )
    shapes = [
        Shape(
            nodes_min=count, nodes_max=count, cpus_per_task=8 * gpus, mem_per_node_mib=1000, gpus_per_node=(("", gpus),)
        )
        for count in (1, 2, 4, 8, 16, 64)
        for gpus in (1, 2, 4, 8)
    ]
    pending = tuple(
        PendingJob(
            id=JobId(at),
            display_id=str(at),
            partition="main",
            request=ResourceRequest(shape=chance.choice(shapes), time_limit_s=chance.randrange(1, 48) * 1800),
            submitted_at_s=float(at) / waiting,
        )
        for at in range(waiting)
    )
    names = tuple(node.name for node in views)
    return Snapshot(
        now_s=1000.0,
        nodes=views,
        partitions={"main": Partition(name="main", nodes=names, default=True)},
        running=running,
        pending=pending,
    )


def _plans(quick: bool) -> list[Figure]:
    figures = []
    policy = Policy(backfill=Backfill.CONSERVATIVE, conservative_depth=1000)
    for waiting in (1_000, 10_000) if quick else (1_000, 10_000, 100_000):
        world = large_world(waiting, 1_000)
        samples = []
        for _ in range(1 if quick else 3):
            began_s = time.perf_counter()
            plan(world, policy)
            samples.append(time.perf_counter() - began_s)
        bar = "<= 1 s, reach 0.2" if waiting == 10_000 else ""
        figures.append(from_samples(f"plan, 1,000 nodes, depth 1,000, {waiting:,} waiting", samples, "s", bar=bar))
    return figures


def _answers(quick: bool) -> list[Figure]:
    """How long it takes to explain a job in the middle of a long queue, and to plan around reservations."""
    policy, world = Policy(), large_world(10_000, 1_000)
    names = [node.name for node in world.nodes]
    reservations = tuple(
        Reservation(
            name=f"r{at}",
            start_s=2_000 + at * 50_000,
            end_s=40_000 + at * 50_000,
            nodes=tuple(names[at * 100 : at * 100 + 200]),
            flags=(Flag.DAILY,) if at % 2 else (Flag.OVERLAP,),
        )
        for at in range(4)
    )
    reserved = replace(
        world, reservations=reservations, reserved_intervals=reserved_intervals_of(reservations, world.now_s)
    )
    made = plan(world, policy)
    middle = list(made.waits)[len(made.waits) // 2]
    figures = []
    for name, work in (
        ("plan, easy", lambda: plan(world, policy)),
        ("plan, easy, 4 reservations of 200 nodes", lambda: plan(reserved, policy)),
        ("explain a job in the middle, beside its plan", lambda: explain(world, policy, made, middle)),
    ):
        samples = []
        for _ in range(1 if quick else 3):
            began_s = time.perf_counter()
            work()
            samples.append(time.perf_counter() - began_s)
        figures.append(from_samples(f"{name}, 10,000 waiting, 1,000 nodes", samples, "s"))
    return figures
