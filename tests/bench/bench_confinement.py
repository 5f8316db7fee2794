"""What the confinement of jobs holds and costs: cpu time, a fork bomb beside another job, memory, and the start of a job.

The node's agent is real and runs as root; the jobs are those of an unprivileged account. What this machine cannot enforce is
printed and not measured. A bomb has SECONDS_OF_BOMB at most, in a group with a limit of processes; its job is ended, and a
process beside this one kills its group in any case.
"""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).parents[1] / "integration"), str(Path(__file__).parents[1])]

from agent_client import AS_ROOT, INCARNATION, Controller, NodeUnderTest, new_token, running_node  # noqa: E402
from waiting import wait_until  # noqa: E402

from hpcnode.os import cgroup  # noqa: E402
from hpcnode.shepherd import confinement  # noqa: E402
from hpcnode.wire import protocol  # noqa: E402
from tests.bench.figures import Figure, from_samples  # noqa: E402

ACCOUNT = "nobody"
WORDS = ["cpus", "processes", "shm", "tmp", "proc"]
PYTHON = "/usr/bin/python3 -I -S"
BOMB_PROCESSES = 200
BOMB_S, SECONDS_OF_BOMB = 1.5, 10.0
MEM_MIB = 100

BUSY = "for one in 1 2 3 4; do while :; do :; done & done; touch busy; wait"
COUNT = f"""{PYTHON} - <<'X'
import mmap, struct
with open("count", "r+b") as file:
    shared, count = mmap.mmap(file.fileno(), 8), 0
    while True:
        for _ in range(2000):
            count += 1
        shared[:] = struct.pack("q", count)
X
"""
BOMB = f"""touch lit; {PYTHON} - <<'X'
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
X
"""
HOARD = f"""{PYTHON} - <<'X'
import os, socket
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen(64)
kept = []
for _ in range(60):
    one = socket.create_connection(listener.getsockname())
    one.setblocking(False)
    try:
        while True:
            one.send(bytes(1 << 16))
    except BlockingIOError:
        pass
    kept.append((one, listener.accept()))
for folder in ("/tmp", "/dev/shm"):
    with open(folder + "/hoard", "wb") as file:
        for _ in range(40):
            file.write(bytes(1 << 20))
open("almost", "w").close()
more = [bytearray(b"x") * (1 << 20) for _ in range(200)]
X
"""


class Node:
    """A node, and the number of its next job."""

    def __init__(self, node: NodeUnderTest, work: Path) -> None:
        self.controller, self.work, self._root, self._jobs = Controller(node), work, node.root, 0
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self.tree = confinement.survey(str(node.root), "n1", boot_id).tree
        self.missing = {word: why for word, can, why in self.controller.welcome.facts["abilities"] if not can}

    def launch(self, script: str, *, words: list[str] | None = None, mem_mib: int = 0, out: str = "out") -> str:
        """Start a job of one cpu, and return its token."""
        self._jobs += 1
        words = WORDS if words is None else words
        share = protocol.Confinement(words=words, cpus=1, max_processes=BOMB_PROCESSES, mem_mib=mem_mib)
        return self.controller.launch(
            script,
            token=new_token(job=self._jobs),
            confine=protocol.changed(share, **({} if words else {"cpus": 0, "max_processes": 0})),
            mem_mib=mem_mib,
            user=ACCOUNT,
            work_dir=str(self.work),
            stdout=out,
            append=False,
        )

    def end(self, token: str) -> None:
        """End a job, and wait for its end."""
        self.controller.send(protocol.EndJob(INCARNATION, int(token.split(".")[1]), 0, 0.0))
        self.finish(token)

    def finish(self, token: str) -> protocol.Report:
        """Wait for the end of a job."""
        report: protocol.Report = self.controller.final(token)
        self.controller.ack(report)
        self.controller.messages.clear()
        return report

    def group(self, token: str, controller: str = "") -> Path:
        """Return the group of a job; without a controller that of version 2."""
        owners = confinement.owners(confinement.owners_directory(str(self._root)))
        root = self.tree.controllers[controller] if controller else self.tree.unified
        job = int(token.split(".")[1])
        return Path(root) / f"job-{owners[f'{INCARNATION}.{job}.0'].sandbox}"

    def lacks(self, what: str, *words: str) -> bool:
        """Return whether this node cannot enforce one of `words`, and print what is not measured."""
        for word in words:
            if word in self.missing:
                print(f"not measured: {what}: this node cannot enforce {word}: {self.missing[word]}")
                return True
        return False


def run(quick: bool = False) -> list[Figure]:
    """Return what confinement holds and costs here."""
    if not AS_ROOT:
        print("not root: nothing is measured")
        return []
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="confinement-") as folder:
        Path(folder).chmod(0o755)
        work = Path(folder, "work")
        work.mkdir()
        work.chmod(0o777)
        with running_node(Path(folder, "node")) as agent:
            node = Node(agent, work)
            print(
                "this node cannot enforce:", ", ".join(f"{word} ({why})" for word, why in node.missing.items()) or "-"
            )
            found = [*cpu_of_a_job(node), *beside_a_bomb(node, 5 if quick else 12), *peaks(node)]
            return [*found, *starts(node, 20 if quick else 60)]


def cpu_of_a_job(node: Node) -> list[Figure]:
    """Return how many cpus a job of one cpu uses with four busy processes."""
    if node.lacks("the cpus of a job", "cpus", "kill"):
        return []
    token = node.launch(BUSY)
    wait_until((node.work / "busy").exists, what="the job")
    stat = node.group(token) / "cpu.stat"
    begun_s, before_s = time.perf_counter(), _used_s(stat)
    time.sleep(10)
    took_s, used_s = time.perf_counter() - begun_s, _used_s(stat) - before_s
    node.end(token)
    return [
        Figure(
            name="cpus used by a 1-cpu job with 4 busy processes, 10 s", value=used_s / took_s, unit="", bar="<= 1.05"
        )
    ]


def _used_s(stat: Path) -> float:
    return int(dict(line.split() for line in stat.read_text().splitlines())["usage_usec"]) / 1e6


def beside_a_bomb(node: Node, pairs: int) -> list[Figure]:
    """Return what a job on the other cpu loses to a fork bomb: rounds with and without it alternate."""
    if node.lacks("a fork bomb", "pin", "processes", "kill"):
        return []
    (node.work / "count").write_bytes(bytes(8))
    (node.work / "count").chmod(0o666)
    counting = node.launch(COUNT, out="counting")
    wait_until(lambda: _count(node), what="the counting job")
    stat = node.group(counting) / "cpu.stat"
    if not cgroup.pinned_to(node.tree, stat.parent.name.removeprefix("job-")):
        print("not measured: a fork bomb: other agents have the cpus")
        pairs = 0
    lost, of_its_time, seconds = [], [], []
    for _ in range(pairs):
        alone = _round(node, stat, lambda: False)
        with bomb(node) as is_over:
            beside = _round(node, stat, is_over)
        lost.append(100 * (1 - beside.per_s / alone.per_s))
        of_its_time.append(100 * (1 - beside.per_cpu_s / alone.per_cpu_s))
        seconds.append(beside.took_s)
    node.end(counting)
    if not lost:
        return []
    return [
        from_samples("lost by a job beside a fork bomb on the other cpu", lost, "%", bar="< 5 %"),
        from_samples("... of what it does in a second of its cpu time", of_its_time, "%", bar="< 5 %"),
        from_samples("... time until the node ended the bomb, or the round", seconds, "s"),
    ]


class Round(NamedTuple):
    """What the counting job did."""

    per_s: float
    per_cpu_s: float  # a second of its own: other processes of the machine have no part in it
    took_s: float


def _round(node: Node, stat: Path, is_over: Callable[[], bool]) -> Round:
    """Return what the counting job does in BOMB_S, or until `is_over`."""
    begun_s, begun_cpu_s, before = time.perf_counter(), _used_s(stat), _count(node)
    while time.perf_counter() - begun_s < BOMB_S and not is_over():
        time.sleep(0.01)
    took_s, used_s, done = time.perf_counter() - begun_s, _used_s(stat) - begun_cpu_s, _count(node) - before
    return Round(done / took_s, done / used_s, took_s)


def _count(node: Node) -> int:
    return int(struct.unpack("q", (node.work / "count").read_bytes())[0])


@contextlib.contextmanager
def bomb(node: Node) -> Iterator[Callable[[], bool]]:
    """Run a job that is a fork bomb; yields whether its node has ended it."""
    (node.work / "lit").unlink(missing_ok=True)
    token = node.launch(BOMB, out="bomb")
    wait_until((node.work / "lit").exists, what="the bomb")
    group = node.group(token)
    kill = f"sleep {SECONDS_OF_BOMB}; echo 1 > {group}/cgroup.kill"
    with subprocess.Popen(["sh", "-c", kill], start_new_session=True, stderr=subprocess.DEVNULL) as killer:
        try:
            yield lambda: _is_empty(group)
        finally:
            node.end(token)
            os.killpg(killer.pid, 9)


def _is_empty(group: Path) -> bool:
    try:
        return "populated 0" in (group / "cgroup.events").read_text()
    except FileNotFoundError:
        return True


def peaks(node: Node) -> list[Figure]:
    """Return the most memory of a job of 100 MiB that fills /dev/shm, /tmp, buffers of TCP and its own memory."""
    if node.lacks("the memory of a job", "memory", "shm"):
        return []
    token = node.launch(f"{HOARD}\nsleep 600", mem_mib=MEM_MIB)
    wait_until((node.work / "almost").exists, what="the files and buffers")
    group = node.group(token, "memory")
    wait_until(lambda: _oom_kills(group), what="the kernel's refusal")
    names = ("memory.peak", "memory.max_usage_in_bytes")
    peak = next(int((group / name).read_text()) for name in names if (group / name).exists())
    found = [Figure(name="peak memory with --mem=100M", value=peak / 2**20, unit="MiB", bar=f"<= {MEM_MIB} MiB")]
    sockets = group / "memory.kmem.tcp.max_usage_in_bytes"
    if sockets.exists():
        print(
            "cgroup version 1 does not count buffers of TCP as memory: they have a limit besides, and each connection may have "
            "one packet in each direction above it"
        )
        found.append(
            Figure(
                name="... buffers of TCP besides",
                value=int(sockets.read_text()) / 2**20,
                unit="MiB",
                bar="not enforced here",
            )
        )
    node.end(token)
    return found


def _oom_kills(group: Path) -> int:
    """Return how many processes of the job's step were killed because its memory was used up."""
    files = [group / name for name in ("memory.events", "first/memory.oom_control", "memory.oom_control")]
    lines = [line.split() for file in files if file.exists() for line in file.read_text().splitlines()]
    return sum(int(words[1]) for words in lines if words[0] == "oom_kill")


def starts(node: Node, count: int) -> list[Figure]:
    """Return what confinement adds to the time until a job's first line, in a sandbox that is new, and one that is not."""
    return [
        *_compared(node, "in a new sandbox", count, "; echo > /dev/shm/left"),  # no other job may have that sandbox
        *_compared(node, "in one that is there", count, ""),
    ]


def _compared(node: Node, how: str, count: int, then: str) -> list[Figure]:
    words = [word for word in WORDS if word not in node.missing]
    sides: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * count + 2):
        is_confined = bool(number % 2)
        out = node.work / f"first-{number}"
        out.unlink(missing_ok=True)
        sent_s = time.time()
        token = node.launch(f"date +%s.%N{then}", words=words if is_confined else [], out=out.name)
        node.finish(token)
        if then:
            Path("/dev/shm/left").unlink(missing_ok=True)  # of a job that is not confined, which has the other sandbox
            wait_until(lambda: len(cgroup.jobs(node.tree)) <= 1, what="the removal of the sandbox")
        if number > 1:  # the first ones warm up
            sides[is_confined].append((float(out.read_text()) - sent_s) * 1e3)
    added = [with_it - without for with_it, without in zip(sides[True], sides[False], strict=True)]
    return [
        from_samples(f"launch -> first line, confined, {how}", sides[True], "ms"),
        from_samples("... not confined", sides[False], "ms"),
        from_samples("... added by confinement", added, "ms", bar="< 5 ms"),
    ]
