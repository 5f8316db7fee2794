"""Findings: faults staged on real nodes are named, and healthy jobs have none.

Each fault is real: processes that burn, allocate, read or wait. A fake nvidia-smi stands for GPUs, and a FUSE file system that
stops for NFS; their names say so. What no machine here has (swap space, a hot CPU, a busy link) is judged from tables of values
in tests/unit/metrics/test_findings.py, and not counted here.

Where other programs load the machine, `load from outside` is no mistake: it is counted apart, if the bench saw that load too.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpcsched.loopback.cluster import LocalCluster
from hpcsched.metrics.findings import LEAST_LOOKS, SlowCause
from tests.bench.figures import Figure
from tests.integration.fake_gpus import FakeGpu, GpuCluster
from tests.integration.losing_disk import LosingDisk
from tests.waiting import wait_until

INTERVAL_S = 1.0
PATIENCE_S = 240.0  # looks at jobs are rare while a machine does much else
LOAD_S, LOADED_CPUS = 1.0, 0.4
PYTHON = sys.executable
GPUS = (FakeGpu("idle"), FakeGpu("hot", (97, 97), is_hot=True), FakeGpu("starved", (5, 95)), FakeGpu("busy", (96, 98)))
BURN = "while True: sum(range(10000))"
SLEEP = "import time; time.sleep(600)"
HOLD = "import time\nkept = bytearray({mib} << 20)\nwhile True: sum(range(100000)); kept[::4096] = kept[::4096]"
THRASH = """
import mmap, random
with open("big", "wb") as file:
    for _ in range(300): file.write(bytes(1 << 20))
with open("big", "rb") as file:
    view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
view.madvise(mmap.MADV_RANDOM)
while True: view[random.randrange(300 << 20)]
"""
SATURATE = """
import mmap, os
file = os.open("out", os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
block = mmap.mmap(-1, 4 << 20)
while True: os.pwrite(file, block, 0)
"""
HUNG = "import subprocess; subprocess.run(['SHARE/program'])"  # as on NFS: the wait cannot be interrupted
TORCH = """
import torch
torch.set_num_threads({threads})
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
adam = torch.optim.Adam(model.parameters())
while True:
    adam.zero_grad(); model(torch.randn(64, 256)).square().mean().backward(); adam.step()
"""
POOL = """
import multiprocessing
def work(_): return sum(range(300000))
with multiprocessing.Pool({count}) as pool:
    while True: pool.map(work, range(40))
"""
LOADER = """
import os, time
for _ in range(8):
    open("part", "wb").write(os.urandom(1 << 20)); open("part", "rb").read()
while True:
    sum(range(2000000)); open("checkpoint", "wb").write(bytes(4 << 20))
"""
TRAIN = """
import time, torch
from hpctrain.run import start
with start(out="run-JOB", steps=100000, batch=8, checkpoint_every=0, print_every=100) as run:
    model = torch.nn.Linear(64, 64)
    for batch in run.steps(model, torch.optim.SGD(model.parameters(), lr=1e-3)):
        until_s = time.monotonic() + 0.02
        while time.monotonic() < until_s: sum(range(1000))
        time.sleep({late_s} * run.rank)
        batch.backward(model(torch.ones(len(batch), 64)).square().mean())
"""
MPI = """
from mpi4py import MPI
while True: MPI.COMM_WORLD.allreduce(sum(range(1000000)))
"""
TYPED = "import time\nwhile True:\n    sum(range(8000000)); time.sleep(0.5)"  # as by a person who looks and types
GROWN = "kept = []\nfor _ in range(15): kept.append(bytearray(10 << 20)); sum(range(3000000))\n" + BURN
MAPPED = """
import mmap
with open("mapped", "wb") as file: file.write(bytes(64 << 20))
with open("mapped", "rb") as file: view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
while True: sum(view[::4096])
"""
READER = """
with open("once", "wb") as file: file.write(bytes(64 << 20))
while True:
    with open("once", "rb") as file:
        while part := file.read(1 << 20): sum(part[::64])
"""
COMMITS = """
import sqlite3
rows = sqlite3.connect("rows.db")
rows.execute("CREATE TABLE IF NOT EXISTS t (x)")
while True:
    sum(range(3000000)); rows.execute("INSERT INTO t VALUES (1)"); rows.commit()
"""
SERVER = """
import http.server, threading, time, urllib.request
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
server.RequestHandlerClass.log_message = lambda *_: None
threading.Thread(target=server.serve_forever, daemon=True).start()
while True: urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/program.py").read(); time.sleep(0.01)
"""
CHILDREN = (
    "import subprocess\nwhile True: subprocess.run(['/bin/sh', '-c', 'for i in 1 2 3; do echo | wc >/dev/null; done'])"
)
SHORT = "sum(range(30000000))"


class Staged(NamedTuple):
    """A job; `cause`: what must be found, None if it is well."""

    name: str
    cause: SlowCause | None
    options: tuple[str, ...]
    code: str = ""  # a program, or with "hrun" or "mpirun" before a colon how it is started; "": an allocation
    beside: str = ""  # run outside of the queue, twice
    typed: bool = False  # an allocation in which somebody starts the program


# What needs no CPU is staged at the same time.
QUIET = (
    Staged("does nothing", SlowCause.IDLE, ("-c1", "-wn1"), SLEEP),
    Staged("an allocation without a process", SlowCause.HELD_EMPTY, ("-c1", "-wn2")),
    Staged("an allocation with a GPU, no process (fake driver)", SlowCause.HELD_EMPTY, ("-c1", "-wn1", "--gres=gpu:idle:1")),
    Staged("a program without use of its GPU (fake driver)", SlowCause.GPU_UNUSED, ("-c1", "-wn2", "--gres=gpu:idle:1"), SLEEP),
)  # fmt: skip
QUIET_TOO = (
    Staged("two nodes, and a program on one", SlowCause.HELD_EMPTY, ("-N2", "--ntasks-per-node=1"), SLEEP),
    Staged("a GPU that is slowed down for heat (fake driver)", SlowCause.THROTTLED, ("-c1", "-wn2", "--gres=gpu:hot:1"), SLEEP),
)  # fmt: skip
FAULTS = (
    Staged("one thread on two CPUs", SlowCause.ONE_THREAD, ("-c2",), BURN),
    Staged("eight processes on one CPU", SlowCause.OVERSUBSCRIBED, ("-c1",), POOL.format(count=8)),
    Staged("six threads of torch on one CPU", SlowCause.OVERSUBSCRIBED, ("-c1",), TORCH.format(threads=6)),
    Staged("programs outside of the queue", SlowCause.OUTSIDE_LOAD, ("-c2",), POOL.format(count=2), BURN),
    Staged("memory at its limit", SlowCause.MEMORY_LIMIT, ("-c1", "--mem=200M"), HOLD.format(mib=180)),
    Staged("files that do not fit", SlowCause.CACHE_THRASH, ("-c1", "--mem=100M"), THRASH),
    Staged("a disk without pause", SlowCause.DISK_SATURATED, ("-c1",), SATURATE),
    Staged("a share that does not answer (FUSE)", SlowCause.SHARE_SLOW, ("-c1",), HUNG),
    Staged("a GPU that waits for its data (fake driver)", SlowCause.DATA_STARVED, ("-c1", "--gres=gpu:starved:1"), BURN),
    Staged("a rank that the other one waits for", SlowCause.STRAGGLER, ("-N2", "-n2"), "hrun:" + TRAIN.format(late_s=0.1)),
)  # fmt: skip
WELL = (
    *(Staged(f"burns {count} CPUs", None, (f"-c{count}",), POOL.format(count=count)) for count in (1, 2)),
    *(Staged(f"torch, {count} threads", None, (f"-c{count}",), TORCH.format(threads=count)) for count in (1, 2)),
    Staged("half of its memory", None, ("-c1", "--mem=400M"), HOLD.format(mib=200)),
    Staged("near its limit of memory", None, ("-c1", "--mem=400M"), HOLD.format(mib=330)),
    Staged("loads its data, then computes", None, ("-c1", "--mem=400M"), GROWN),
    Staged("writes checkpoints", None, ("-c1",), LOADER),
    Staged("burns one CPU", None, ("-c1", "--mem=1G"), BURN),
    Staged("a short job", None, ("-c1",), SHORT),
    Staged("trains with hpctrain", None, ("-c1",), TRAIN.format(late_s=0)),
    Staged("trains on two nodes", None, ("-N2", "-n2"), "hrun:" + TRAIN.format(late_s=0)),
    Staged("MPI", None, ("-n2",), "mpirun:" + MPI),
    Staged("many small steps", None, ("-c1",), "steps:" + SHORT),
    Staged("an allocation in use", None, ("-c1",), TYPED, typed=True),
    Staged("a step that computes in an allocation", None, ("-c1",), BURN, typed=True),
    Staged("reads a file again and again", None, ("-c1",), READER),
    Staged("a mapped file that fits", None, ("-c1",), MAPPED),
    Staged("commits to a database", None, ("-c1",), COMMITS),
    Staged("a web server with visitors", None, ("-c1",), SERVER),
    Staged("many short processes", None, ("-c1",), CHILDREN),
    Staged("a busy GPU (fake driver)", None, ("-c1", "--gres=gpu:busy:1"), SLEEP),
)


def run(quick: bool) -> list[Figure]:
    """Stage all faults one after the other, then healthy jobs, and count what was said."""
    rounds = 1 if quick else 3
    settings: dict[str, dict[str, object]] = {"metrics": {"interval_s": INTERVAL_S}, "licenses": {"matlab": 1}}
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp") as directory,
        LosingDisk(Path(directory) / "hung") as share,  # before the nodes, which have mount namespaces of their own
        GpuCluster(Path(directory), ["n1", "n2"], GPUS, mem_mib=2048, settings=settings) as cluster,
    ):
        Path(directory).chmod(0o755)
        stage = Stage(cluster, share)
        named = [*stage.queue(), *stage.named(QUIET), *stage.named(QUIET_TOO)]
        named += [right for staged in FAULTS for right in stage.named([staged])]
        blamed = [stage.blamed(staged) for _ in range(rounds) for staged in WELL]
        beside = stage.beside
    return [
        Figure(name=f"causes named right, of {len(named)} staged", value=sum(named), unit="", bar="all but one"),
        Figure(name=f"healthy runs blamed falsely, of {len(blamed)}", value=sum(blamed), unit="", bar="0"),
        Figure(name="runs beside a load from outside that was there", value=beside, unit=""),
    ]


class Stage:
    """A cluster on which jobs are staged."""

    def __init__(self, cluster: LocalCluster, share: LosingDisk) -> None:
        self._cluster, self._share = cluster, share
        self.beside = 0  # runs in which load from outside was named, and seen here

    def named(self, several: Sequence[Staged]) -> list[bool]:
        """Run jobs at the same time; return for each whether its cause was named first."""
        right = []
        for staged, causes in zip(several, self._causes(several), strict=True):
            assert staged.cause is not None
            print(f"{staged.name}: {', '.join(causes) or 'nothing'}", flush=True)
            right.append(causes[:1] == [staged.cause.value])
        return right

    def blamed(self, staged: Staged) -> bool:
        """Run a healthy job; return whether anything was said of it."""
        (causes,) = self._causes([staged])
        print(f"healthy: {staged.name}: {', '.join(causes) or 'nothing'}", flush=True)
        return bool(causes)

    def queue(self) -> list[bool]:
        """Hold up the queue in three ways; return whether each was named."""
        run = self._cluster.run
        right = []
        for cause, options in (
            ("fragmentation", (("-c1", "-wn1"), ("-c1", "-wn2"), ("-c2",))),
            ("licence", (("-c1", "--licenses=matlab"), ("-c1", "--licenses=matlab"))),
            ("reservation", (("-c2",), ("-c2",))),
        ):
            if cause == "reservation":
                words = "ReservationName=course StartTime=now Duration=60 Users=nobody Nodes=n1"
                run("hctl", "create", "reservation", *words.split())
            jobs = [run("hsub", "--parsable", *words, "--wrap", "sleep 600").stdout.strip() for words in options]
            found = wait_until(lambda: json.loads(run("hwhy", "--slow", "--json").stdout)["findings"], what=cause)
            print(f"queue: {cause}: {found[0]['text']}", flush=True)
            right.append(found[0]["cause"] == cause)
            run("hcancel", *jobs)
            if cause == "reservation":
                run("hctl", "delete", "reservation", "course")
            self._wait_for_empty_queue()
        return right

    def _causes(self, several: Sequence[Staged]) -> list[list[str]]:
        """Run jobs until they can be judged, and return the causes that are named."""
        before = used_outside(LOAD_S)
        with contextlib.ExitStack() as stack:
            for staged in several:
                if "SHARE" in staged.code:
                    self._share.stop()
                    stack.callback(self._share.go_on)
                for _ in range(2 if staged.beside else 0):
                    burner = stack.enter_context(subprocess.Popen([PYTHON, "-c", staged.beside]))
                    stack.callback(burner.kill)
            jobs = [self._submit(staged, stack) for staged in several]
            stack.callback(self._cluster.run, "hcancel", *jobs, check=False)
            answers = [self._judged(job, staged) for job, staged in zip(jobs, several, strict=True)]
        self._wait_for_empty_queue()
        is_loaded = max(before, used_outside(LOAD_S)) > LOADED_CPUS or os.getloadavg()[0] > 2 * (os.cpu_count() or 1)
        found = [[finding["cause"] for finding in answer.get("findings", ())] for answer in answers]
        for staged, causes in zip(several, found, strict=True):
            if is_loaded and staged.cause is not SlowCause.OUTSIDE_LOAD and SlowCause.OUTSIDE_LOAD.value in causes:
                causes.remove(SlowCause.OUTSIDE_LOAD.value)
                self.beside += 1
        return found

    def _submit(self, staged: Staged, stack: contextlib.ExitStack) -> str:
        cluster = self._cluster
        how, colon, code = staged.code.partition(":")
        how, code = (how, code) if colon and how in ("hrun", "mpirun", "steps") else ("", staged.code)
        if not code or staged.typed:
            said = cluster.run("halloc", "--no-shell", *staged.options).stderr
            job = next(word for word in said.split() if word.isdigit())
        program = cluster.share / "program.py"
        if code:
            program.write_text(code.replace("SHARE", str(self._share.path)).replace("JOB", str(time.monotonic_ns())))
        if staged.typed:
            command = [Path(PYTHON).with_name("hrun"), f"--jobid={job}", PYTHON, program]
            typing = stack.enter_context(subprocess.Popen(command, env=cluster.env, cwd=cluster.share))
            stack.callback(typing.kill)
        if not code or staged.typed:
            return job
        starter = {"hrun": "exec hrun ", "mpirun": f"exec {Path(PYTHON).with_name('mpirun')} -n 2 ", "": "exec "}
        line = (
            f"while :; do hrun -n1 {PYTHON} {program}; done" if how == "steps" else f"{starter[how]}{PYTHON} {program}"
        )
        script = f"#!/bin/sh\nexport PATH={Path(PYTHON).parent}:$PATH\n{line}\n"
        return cluster.run("hsub", "--parsable", *staged.options, stdin=script).stdout.split(";")[0].strip()

    def _judged(self, job: str, staged: Staged) -> dict[str, Any]:
        """Return the findings as soon as there are enough looks for all rules, or the job has ended."""
        found: dict[str, Any] = {}

        def enough() -> bool:
            time.sleep(2 * INTERVAL_S)  # asked all the time, the command itself would be a load from outside
            answer = self._cluster.run("hwhy", "--slow", "--json", job, check=False)
            if answer.returncode:
                return staged.cause is None and "COMPLETED" in answer.stderr
            found.update(json.loads(answer.stdout))
            told = [finding["cause"] for finding in found["findings"]]
            is_told = staged.cause is not SlowCause.STRAGGLER or staged.cause.value in told  # by its program, later
            return bool(found["looks"] >= LEAST_LOOKS + 2 and is_told)

        wait_until(enough, PATIENCE_S, f"enough looks at: {staged.name}")
        return found

    def _wait_for_empty_queue(self) -> None:
        run = self._cluster.run
        wait_until(lambda: not run("hqueue", "--noheader", "--format=%i").stdout.strip(), what="an empty queue")


def used_outside(seconds: float) -> float:
    """Return how many CPUs are busy while nothing of ours computes."""

    def busy() -> float:
        ticks = list(map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9]))
        return (sum(ticks) - ticks[3] - ticks[4]) / 100

    before, began_s = busy(), time.monotonic()
    time.sleep(seconds)
    return (busy() - before) / (time.monotonic() - began_s)
