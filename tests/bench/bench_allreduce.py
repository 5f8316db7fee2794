"""Sums over ranks: within one host beside Gloo and MPI's own, and as root over 1 Gbit/s beside what the link can carry."""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

from tests.bench import hosts
from tests.bench.figures import Figure, from_samples

SCRIPT = Path(__file__).with_name("allreduce.py")
SMALL, LARGE = (4 << 10, 64 << 10), (16 << 20, 64 << 20, 256 << 20)
BETWEEN = (4 << 10, 1 << 20, 16 << 20)
MBIT_PER_S = 1000
BARS = {2: 0.94, 4: 0.93}  # of the bound 2(n-1)/n * S / B


def run(quick: bool = False) -> list[Figure]:
    """Return latencies of small sums, bus bandwidths of large ones, and shares of the link's bound."""
    figures = _within(LARGE[:1] if quick else LARGE)
    if not hosts.can_make_hosts():
        print("not root, or no iproute2: nothing is measured between hosts")
        return figures
    for count in (2,) if quick else (2, 4):
        figures += _between(count)
    return figures


def _within(large: tuple[int, ...]) -> list[Figure]:
    found = _measured(hosts.run(hosts.mpirun_here(2, SCRIPT, "gloo,mpi,ours", *map(str, SMALL + large))))
    figures = []
    for size in SMALL:
        gloo_s = statistics.median(found["gloo"][size])
        for kind in ("mpi", "ours"):
            name = f"all-reduce of {size >> 10} KiB, 2 ranks of one host: {kind}"
            samples_us = [1e6 * seconds for seconds in found[kind][size]]
            bar = "<= 0.05 of Gloo's" if kind == "ours" else ""
            figures.append(from_samples(name, samples_us, "us", bar=bar, floor=1e6 * gloo_s, floor_name="Gloo"))
    for size in large:
        ours = [size / 1e9 / seconds for seconds in found["ours"][size]]  # 2(n-1)/n is 1
        for kind, bar in (("gloo", ">= 5"), ("mpi", ">= 2.5" if size > LARGE[0] else "")):
            name = f"all-reduce of {size >> 20} MiB, 2 ranks of one host: ours"
            floor = size / 1e9 / statistics.median(found[kind][size])
            figures.append(from_samples(name, ours, "GB/s", bar=bar, floor=floor, floor_name=kind))
    return figures


def _between(count: int) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder, hosts.hosts(count, MBIT_PER_S, Path(folder)) as addresses:
        command = hosts.mpirun(addresses, Path(folder), SCRIPT, "gloo,mpi,ours", *map(str, BETWEEN))
        found = _measured(hosts.run(command, hosts.TCP_ONLY | {"BENCH_ADDRESS": addresses[0]}))
    figures = []
    for size in BETWEEN:
        for kind, seconds in found.items():
            name = f"all-reduce of {size >> 10} KiB, {count} hosts, 1 Gbit/s: {kind}"
            if size < 1 << 20:
                bar = "<= 100 us" if kind == "ours" else ""
                figures.append(from_samples(name, [1e6 * one for one in seconds[size]], "us", bar=bar))
                continue
            bound_s = 2 * (count - 1) / count * size / (MBIT_PER_S * 125e3)
            bar = f">= {BARS[count]} of the bound" if kind == "ours" else ""
            figures.append(from_samples(name, [bound_s / one for one in seconds[size]], "of the bound", bar=bar))
    return figures


def _measured(output: str) -> dict[str, dict[int, list[float]]]:
    found = json.loads(output.splitlines()[-1])
    return {kind: {int(size): seconds for size, seconds in sizes.items()} for kind, sizes in found.items()}
