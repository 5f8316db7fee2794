"""What `hpcsched node bench` measures, beside openssl, sysbench, a STREAM copy in C, fio, iperf3 and PyTorch, in turns.

Each figure is the median of rounds in which both measured one after the other. A tool that is not there is left out. At the end
all links of 16 nodes, which are on this machine: what counts is the time of all rounds.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hpcnode.agent import bench, link_speed, probe
from hpcsched.loopback.cluster import LocalCluster
from tests.bench import hosts
from tests.bench.figures import Figure, from_samples

BAR = "0.85 to 1.15"
MBIT_PER_S = 200  # what two busy cpus can send and count
STREAM = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + 1e-9 * t.tv_nsec; }
int main(int argc, char **argv) {
    size_t size = strtoul(argv[1], 0, 10);
    int windows = atoi(argv[2]);
    double length = atof(argv[3]), start;
    char *a = malloc(size), *b = malloc(size);
    memset(a, 1, size); memset(b, 2, size);
    puts("ready"); fflush(stdout);
    if (scanf("%lf", &start) != 1) return 1;
    while (now() < start) ;
    for (int window = 0; window < windows; window++) {
        double began = now(), done = 0, at = began;
        do { memcpy(b, a, size); __asm__ volatile("" ::: "memory"); done += 2.0 * size; at = now(); }
        while (at < start + (window + 1) * length);
        printf("%f\n", done / (at - began) / 1e9);
    }
    return 0;
}
"""


def run(quick: bool = False) -> list[Figure]:
    """Return each measurement with that of its tool as the floor."""
    rounds = 3 if quick else 9
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        pairs = {**_cpu(), **_cpus(), **_memory(Path(folder)), **_disk(Path(folder)), **_gemm()}
        figures = [_in_turns(name, *pair, rounds) for name, pair in pairs.items()]
        return [*figures, *_link(Path(folder), rounds), _all_links()]


Measure = Callable[[], float]


def _in_turns(name: str, ours: Measure, theirs: Measure, rounds: int) -> Figure:
    samples = [(ours(), theirs()) for _ in range(rounds)]
    tool = name.partition(" beside ")[2]
    unit = {"cpu": "GB/s", "memory": "GB/s", "fsync": "ms", "link": "Mbit/s", "all": "CPUs", "product": "GFLOP/s"}.get(
        name.split()[0], "MB/s"
    )
    floor = statistics.median(theirs for _, theirs in samples)
    return from_samples(name, [one for one, _ in samples], unit, bar=BAR, floor=floor, floor_name=tool)


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def _cpu() -> dict[str, tuple[Measure, Measure]]:
    if shutil.which("openssl") is None:
        return {}

    def theirs() -> float:
        last = _said("openssl", "speed", "-seconds", "1", "-bytes", str(len(probe.CHUNK)), "-evp", "blake2b512")
        return float(last.split()[-1].rstrip("k")) / 1e6

    return {"cpu beside openssl speed": (probe.cpu_speed, theirs)}


def _cpus() -> dict[str, tuple[Measure, Measure]]:
    """Return how many CPUs' work all CPUs do at once: fewer than there are where they share cores."""
    count = len(os.sched_getaffinity(0))
    if shutil.which("sysbench") is None or count == 1:
        return {}

    def hashed(number: int) -> float:
        return max(bench.together(number, bench._hashing, bench.CPU_WINDOWS, bench.CPU_WINDOW_S))

    def events(number: int) -> float:
        said = _said("sysbench", "cpu", f"--threads={number}", "--time=1", "run")
        return float(said.partition("events per second:")[2].split()[0])

    return {"all CPUs beside sysbench": (lambda: hashed(count) / hashed(1), lambda: events(count) / events(1))}


def _memory(folder: Path) -> dict[str, tuple[Measure, Measure]]:
    if shutil.which("gcc") is None:
        return {}
    (folder / "stream.c").write_text(STREAM)
    program = str(folder / "stream")
    _said("gcc", "-O3", "-march=native", "-o", program, str(folder / "stream.c"))
    count = len(os.sched_getaffinity(0))
    size = bench.array_bytes(probe.memory()["mem_free_mib"] << 20, count)

    def theirs() -> float:
        """Sum the rates of each window, and return the best sum, as `bench.together` and `bench.summary` do."""
        command = [program, str(size), str(bench.MEMORY_WINDOWS), str(bench.MEMORY_WINDOW_S)]
        running = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)
        ]
        for one in running:
            assert one.stdout is not None
            one.stdout.readline()  # its arrays are there
        start = f"{time.monotonic() + 0.02}\n"
        for one in running:
            assert one.stdin is not None
            one.stdin.write(start)
            one.stdin.flush()
        rates = [list(map(float, one.communicate()[0].split())) for one in running]
        return max(map(sum, zip(*rates, strict=True)))

    def ours() -> float:
        windows = bench.MEMORY_WINDOWS
        return max(bench.together(count, lambda: bench._copying(size), windows, bench.MEMORY_WINDOW_S))

    return {"memory beside a STREAM copy in C": (ours, theirs)}


def _disk(folder: Path) -> dict[str, tuple[Measure, Measure]]:
    if shutil.which("fio") is None:
        return {}

    def ours(test: str) -> float:
        return statistics.median(bench.disk(str(folder), 1, {})[test])

    def fio(way: str, *words: str) -> dict[str, dict[str, float]]:
        where = [f"--filename={folder}/fio", "--name=one", "--ioengine=psync", "--output-format=json"]
        found: dict[str, dict[str, float]] = json.loads(_said("fio", *where, f"--rw={way}", *words))["jobs"][0]
        return found

    blocks = ("--direct=1", "--bs=4M", "--time_based", "--runtime=1")
    # As ours, a sparse file of which nothing was allocated before.
    new = (*blocks, "--size=1G", "--fallocate=none", "--unlink=1")
    old = (*blocks, "--size=256M")

    def fsync_ms() -> float:
        """Overwrite blocks that are there already: a new block also costs a commit of the journal."""
        words = ("--bs=4k", "--size=240k", "--fsync=1", "--number_ios=60", "--overwrite=1", "--unlink=1")
        sync: dict[str, dict[str, float]] = fio("write", *words)["sync"]  # type: ignore[assignment]
        return sync["lat_ns"]["percentile"]["50.000000"] / 1e6  # type: ignore[index]

    return {
        "write beside fio": (lambda: ours("disk_write"), lambda: fio("write", *new)["write"]["bw_bytes"] / 1e6),
        "read beside fio": (lambda: ours("disk_read"), lambda: fio("read", *old)["read"]["bw_bytes"] / 1e6),
        "fsync beside fio": (lambda: ours("fsync"), fsync_ms),
    }


def _gemm() -> dict[str, tuple[Measure, Measure]]:
    if importlib.util.find_spec("torch") is None:
        return {}

    def ours() -> float:
        said = _said(sys.executable, "-I", "-c", bench._PRODUCTS, str(bench.GEMM_S))  # not as nobody, as root would
        return statistics.median(json.loads(said)["rounds"]["gemm_fp32"])

    def theirs() -> float:
        return float(_said(sys.executable, "-c", _TORCH_TIMER))

    return {"product of matrices beside torch.utils.benchmark": (ours, theirs)}


_TORCH_TIMER = """
import torch
from torch.utils.benchmark import Timer
a, b = torch.ones(1024, 1024), torch.ones(1024, 1024)
took = Timer("a @ b", globals={"a": a, "b": b}, num_threads=torch.get_num_threads()).blocked_autorange(min_run_time=1.5)
print(2 * 1024 ** 3 / took.median / 1e9)
"""

_SERVE = """
import sys
from hpcnode.agent import link_speed
listener = link_speed._listener()
print(listener.getsockname()[1], flush=True)
link_speed.serve(listener, "key")
"""
_MEASURE = """
import json, sys
from hpcnode.agent import link_speed
print(json.dumps(link_speed.measure(sys.argv[1], int(sys.argv[2]), "key")))
"""


def _link(folder: Path, rounds: int) -> list[Figure]:
    if not hosts.can_make_hosts() or shutil.which("iperf3") is None:
        return []
    os.environ["PYTHONPATH"] = str(Path(link_speed.__file__).parents[2])
    with hosts.hosts(2, MBIT_PER_S, folder) as addresses:
        first, second = (["ip", "netns", "exec", hosts.space_of(folder, at)] for at in range(2))

        def ours() -> float:
            with subprocess.Popen(
                [*second, sys.executable, "-c", _SERVE], stdout=subprocess.PIPE, text=True
            ) as serving:
                assert serving.stdout is not None
                port = serving.stdout.readline().strip()
                link = json.loads(_said(*first, sys.executable, "-c", _MEASURE, addresses[1], port))
            return float(link["up_mbps"])

        def theirs() -> float:
            with subprocess.Popen(
                [*second, "iperf3", "-s", "-1", "--forceflush"], stdout=subprocess.PIPE, text=True
            ) as serving:
                assert serving.stdout is not None
                serving.stdout.readline()
                serving.stdout.readline()  # it listens
                said = _said(*first, "iperf3", "-c", addresses[1], "-t", "1", "-O", "1", "-J")
                serving.communicate()
            return float(json.loads(said)["end"]["sum_received"]["bits_per_second"]) / 1e6

        return [_in_turns(f"link of {MBIT_PER_S} Mbit/s beside iperf3", ours, theirs, rounds)]


def _all_links(count: int = 16) -> Figure:
    """Return what all links of nodes take, from the command to its table."""
    names = tuple(f"n{number}" for number in range(1, count + 1))
    with tempfile.TemporaryDirectory(dir="/tmp") as base, LocalCluster(Path(base), names) as cluster:
        began_s = time.monotonic()
        found = cluster.json("hpcsched", "node", "bench", "--links", "--json")["links"]
        took_s = time.monotonic() - began_s
        wrong = [link["why"] for link in found if link["why"]]
        assert (len(found), wrong) == (count * (count - 1) // 2, []), wrong[:3]
    return Figure(name=f"all links of {count} nodes", value=took_s, unit="s", bar="<= 30 s")
