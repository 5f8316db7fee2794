"""Findings: faults staged on a real node are named, and healthy jobs have none.

Each fault is real: processes that burn, allocate, read or wait. What no machine here has (GPUs, swap space, heat, a busy link) is
judged from tables of values in tests/unit/metrics/test_findings.py, and not counted here.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from hpcsched.loopback.cluster import LocalCluster
from hpcsched.metrics.findings import LEAST_LOOKS, SlowCause
from tests.bench.figures import Figure
from tests.integration.losing_disk import LosingDisk
from tests.waiting import wait_until

INTERVAL_S = 1.0
PATIENCE_S = 240.0  # looks at jobs are rare while a machine does much else
PYTHON = sys.executable
BURN = "while True: sum(range(10000))"
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
READ = "while True:\n    for _ in range(50): sum(range(100000))\n    open({path!r}, 'rb').read()"
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


class Staged(NamedTuple):
    """A job; `cause`: what must be found, None if it is well."""

    name: str
    cause: SlowCause | None
    options: tuple[str, ...]
    code: str
    beside: str = ""  # run outside of the queue, twice


FAULTS = (
    Staged("does nothing", SlowCause.IDLE, ("-c1",), "import time; time.sleep(600)"),
    Staged("one thread on two CPUs", SlowCause.ONE_THREAD, ("-c2",), BURN),
    Staged("eight processes on one CPU", SlowCause.OVERSUBSCRIBED, ("-c1",), POOL.format(count=8)),
    Staged("six threads of torch on one CPU", SlowCause.OVERSUBSCRIBED, ("-c1",), TORCH.format(threads=6)),
    Staged("programs outside of the queue", SlowCause.OUTSIDE_LOAD, ("-c2",), POOL.format(count=2), BURN),
    Staged("memory at its limit", SlowCause.MEMORY_LIMIT, ("-c1", "--mem=200M"), HOLD.format(mib=180)),
    Staged("files that do not fit", SlowCause.CACHE_THRASH, ("-c1", "--mem=100M"), THRASH),
    Staged("a disk without pause", SlowCause.DISK_SATURATED, ("-c1",), SATURATE),
    Staged("a share that does not answer", SlowCause.SHARE_SLOW, ("-c1",), HUNG),
)  # fmt: skip
WELL = (
    *(Staged(f"burns {count} CPUs", None, (f"-c{count}",), POOL.format(count=count)) for count in (1, 2)),
    *(Staged(f"torch, {count} threads", None, (f"-c{count}",), TORCH.format(threads=count)) for count in (1, 2)),
    Staged("half of its memory", None, ("-c1", "--mem=400M"), HOLD.format(mib=200)),
    Staged("writes checkpoints", None, ("-c1",), LOADER),
    Staged("burns one CPU", None, ("-c1", "--mem=1G"), BURN),
)


def run(quick: bool) -> list[Figure]:
    """Stage all faults one after the other, then healthy jobs, and count what was said."""
    rounds = 1 if quick else 3
    settings = {"metrics": {"interval_s": INTERVAL_S}}
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp") as directory,
        LosingDisk(Path(directory) / "hung") as share,  # before the node, which has a mount namespace of its own
        LocalCluster(Path(directory), ["n1"], mem_mib=2048, settings=settings) as cluster,
    ):
        Path(directory).chmod(0o755)
        named = [_is_named(cluster, staged, share) for staged in (*FAULTS, HELD)]
        blamed = [_causes(cluster, staged, share) for _ in range(rounds) for staged in WELL]
    for staged, causes in zip(WELL * rounds, blamed, strict=True):
        if causes:
            print(f"healthy, but blamed: {staged.name}: {causes}", flush=True)
    return [
        Figure(name=f"causes named right, of {len(named)} staged", value=sum(named), unit="", bar="all but one"),
        Figure(name=f"healthy runs blamed, of {len(blamed)}", value=sum(map(bool, blamed)), unit="", bar="0"),
    ]


HELD = Staged("an allocation without a process", SlowCause.HELD_EMPTY, ("-c1",), "")


def _is_named(cluster: LocalCluster, staged: Staged, share: LosingDisk) -> bool:
    causes = _causes(cluster, staged, share)
    print(f"{staged.name}: {', '.join(causes) or 'nothing'}", flush=True)
    return bool(staged.cause and causes[:1] == [staged.cause.value])


def _causes(cluster: LocalCluster, staged: Staged, share: LosingDisk) -> list[str]:
    """Run a job until it can be judged, and return the causes that are named."""
    with contextlib.ExitStack() as stack:
        if "SHARE" in staged.code:
            share.stop()
            stack.callback(share.go_on)
        if staged.beside:
            for _ in range(2):
                burner = stack.enter_context(subprocess.Popen([PYTHON, "-c", staged.beside]))
                stack.callback(burner.kill)
        job = _submit(cluster, staged, share)
        stack.callback(cluster.run, "hcancel", str(job), check=False)
        answer = _judged(cluster, job)
    wait_until(lambda: not cluster.run("hqueue", "--noheader", "--format=%i").stdout.strip(), what="an empty queue")
    return [finding["cause"] for finding in answer["findings"]]


def _submit(cluster: LocalCluster, staged: Staged, share: LosingDisk) -> int:
    if not staged.code:
        cluster.run("halloc", "--no-shell", *staged.options)
        return int(cluster.run("hqueue", "--noheader", "--format=%i").stdout.split()[0])
    program = cluster.share / "program.py"
    program.write_text(staged.code.replace("SHARE", str(share.path)))
    script = f"#!/bin/sh\nexec {PYTHON} {program}\n"
    return int(cluster.run("hsub", "--parsable", *staged.options, stdin=script).stdout.split(";")[0])


def _judged(cluster: LocalCluster, job: int) -> dict[str, Any]:
    """Return the findings as soon as there are enough looks for all rules."""
    found: dict[str, Any] = {}

    def enough() -> bool:
        answer = cluster.run("hwhy", "--slow", "--json", str(job), check=False)
        if answer.returncode:
            return False
        found.update(json.loads(answer.stdout))
        return bool(found["looks"] >= LEAST_LOOKS + 2)

    wait_until(enough, PATIENCE_S, "enough looks")
    return found
