"""Measures what `plan` needs of this machine: free memory, kernels, links.

Everything is bounded: half a second for a node, half a second for a link. The rates are those of the kernels that will run
(`kernels`), because they read neither as fast as memory allows nor alike. A rank that shares its memory with others measures
while they do: the rates of `readers` at once. Links are measured through the connections that will be used. Does not know models;
`plan` uses the facts.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hpcserve.group.links import LENGTH, STEP_LIMIT_S, RankLink, RankLinks
from hpcserve.kernels import Linear, Weight, WeightKind, make_linear
from hpcserve.plan import GIB, KERNELS, LinkFacts, ServeNode
from hpcserve.weights import GROUP_COLUMNS, Int4Weight, Int8Weight

MATRIX_ROWS, MATRIX_COLUMNS = 4096, 1024
MATRICES = {"fp32": 4, "bf16": 8, "int8": 16, "int4": 24}  # 64 MiB: more than caches hold
BATCH_ROWS = 16
NODE_LIMIT_S = 0.5
LINK_LIMIT_S = 0.5
PINGS = 20
FIRST_BYTES, LARGE_BYTES = 1 << 16, 1 << 20
MOST_ASKED = PINGS + 5
MEASURED = b"."  # the last message
MEMINFO = Path("/proc/meminfo")
OWN_CGROUP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpeed:
    """What a kind's kernel reads for one row, and computes for each further row."""

    read_bytes_s: float
    flops_s: float


def measured_node(name: str, kind: str, *, readers: int = 1, cores: int | None = None) -> ServeNode:
    """Return the facts of this machine while `readers` threads read at once."""
    cores = cores or torch.get_num_threads()
    speed = kernel_speed(WeightKind(kind), readers=readers)
    kernel = KERNELS[kind]
    return ServeNode(
        name=name,
        free_bytes=free_bytes(),
        read_bytes_s=speed.read_bytes_s / kernel.read_share,
        flops_s=speed.flops_s / kernel.flops_share,
        cores=cores,
        kernel_bytes_s={kind: speed.read_bytes_s},
    )


def kernel_speed(kind: WeightKind, *, readers: int = 1, limit_s: float = NODE_LIMIT_S) -> KernelSpeed:
    """Return what one of `readers` threads reaches while all of them read."""
    found: list[KernelSpeed] = []
    barrier = threading.Barrier(readers)

    def read() -> None:
        matrix = random_matrix(kind)
        products = [make_linear(copied(matrix), None, kind) for _ in range(MATRICES[kind])]
        barrier.wait()
        found.append(speed_of(kind, products, limit_s))

    threads = [threading.Thread(target=read, daemon=True) for _ in range(readers - 1)]
    for thread in threads:
        thread.start()
    read()
    for thread in threads:
        thread.join()
    return KernelSpeed(
        read_bytes_s=statistics.median(one.read_bytes_s for one in found),
        flops_s=statistics.median(one.flops_s for one in found),
    )


def random_matrix(kind: WeightKind) -> Weight:
    """Return a matrix as the files of a kind have it."""
    rows, columns = MATRIX_ROWS, MATRIX_COLUMNS
    if kind is WeightKind.INT8:
        return Int8Weight(values=torch.randint(-127, 128, (rows, columns), dtype=torch.int8), scale=torch.ones(rows))
    if kind is WeightKind.INT4:
        groups = torch.ones(rows, columns // GROUP_COLUMNS, dtype=torch.float16)
        values = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
        return Int4Weight(values=values, scales=groups, zeros=groups)
    return torch.rand(rows, columns, dtype=kind.hidden_dtype)


def copied(matrix: Weight) -> Weight:
    """Return a matrix with memory of its own; integers are copied when they are packed."""
    return matrix.clone() if isinstance(matrix, Tensor) else matrix


def speed_of(kind: WeightKind, products: list[Linear], limit_s: float) -> KernelSpeed:
    """Return the speed of products with matrices that do not fit caches together."""
    one = round_s(products, torch.rand(1, MATRIX_COLUMNS), limit_s / 2)
    many = round_s(products, torch.rand(BATCH_ROWS, MATRIX_COLUMNS), limit_s / 2)
    weights = len(products) * MATRIX_ROWS * MATRIX_COLUMNS
    more_s = max(many - one, one / 100)
    return KernelSpeed(
        read_bytes_s=weights * KERNELS[kind].weight_bytes / one,
        flops_s=2 * weights * (BATCH_ROWS - 1) / more_s,
    )


def round_s(products: list[Linear], states: Tensor, limit_s: float) -> float:
    """Return the median time for all products once, of as many rounds as fit the limit."""
    times: list[float] = []
    end_s = time.perf_counter() + limit_s
    with torch.inference_mode():
        products[0](states)
        while not times or time.perf_counter() < end_s:
            start_s = time.perf_counter()
            for product in products:
                product(states)
            times.append(time.perf_counter() - start_s)
    return statistics.median(times)


def free_bytes() -> int:
    """Return the memory that this process can get, of the machine and its control groups."""
    rooms = [room for room in (machine_room(), *group_rooms()) if room is not None]
    return max(0, min(rooms, default=GIB))


def machine_room(meminfo: Path = MEMINFO) -> int | None:
    """Return the machine's available memory."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError, IndexError):
        return None


def group_rooms(own: Path = OWN_CGROUP, groups: Path = CGROUPS) -> list[int]:
    """Return what the limits of this process's control group, and of those above it, leave."""
    try:
        path = next(line.removeprefix("0::") for line in own.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return []
    rooms = []
    group = groups / path.lstrip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(groups):
            break
        try:
            limit, used = (folder / "memory.max").read_text().strip(), int((folder / "memory.current").read_text())
            cached = sum(
                int(line.split()[1])
                for line in (folder / "memory.stat").read_text().splitlines()
                if line.startswith(("inactive_file ", "active_file "))
            )
        except (OSError, ValueError, IndexError):
            continue
        if limit.isdecimal():
            rooms.append(int(limit) - used + cached)
    return rooms


# ----- links: the lower rank of a pair asks, the other one answers


def measured_links(links: RankLinks, pairs: Iterable[Sequence[int]]) -> list[list[float]]:
    """Measure this rank's links of these pairs of ranks, in the same order on all ranks.

    All ranks call it with the same pairs. Returns both ranks, the latency in s and the rate in bytes/s of each pair that this
    rank has measured. Pairs without a link are left out.

    Raises:
        GroupLost: another rank is lost.
    """
    found: list[list[float]] = []
    for low, high in sorted((min(pair), max(pair)) for pair in pairs):
        link = links.link_with(high if links.rank == low else low) if links.rank in (low, high) else None
        if link is None:
            continue
        if links.rank == high:
            answer_link(link)
        else:
            facts = measured_link(link)
            found.append([low, high, facts.latency_s, facts.rate_bytes_s])
    return found


def measured_link(link: RankLink, limit_s: float = LINK_LIMIT_S) -> LinkFacts:
    """Return the facts of a link whose other end calls `answer_link`.

    Few and small messages are sent over a slow link.

    Raises:
        GroupLost: the other rank is lost.
    """
    began_s = time.perf_counter()
    times: list[float] = []
    while len(times) < PINGS and (not times or time.perf_counter() - began_s < limit_s / 2):
        times.append(asked_s(link, 0))
    trip_s = statistics.median(times)
    rates: list[float] = []
    for size in (FIRST_BYTES, LARGE_BYTES, LARGE_BYTES, LARGE_BYTES):
        if rates and time.perf_counter() - began_s + size / rates[-1] > limit_s:
            break
        rates.append(size / max(asked_s(link, size) - trip_s, 1e-6))
    link.post(LENGTH.pack(len(MEASURED)), MEASURED)
    return LinkFacts(latency_s=trip_s / 2, rate_bytes_s=max(rates))


def asked_s(link: RankLink, size: int) -> float:
    """Return the time until the other rank has got `size` bytes and said so."""
    began_s = time.perf_counter()
    link.post(LENGTH.pack(size), bytes(size))
    link.message(0, STEP_LIMIT_S)
    return time.perf_counter() - began_s


def answer_link(link: RankLink) -> None:
    """Answer the other end's `measured_link` until it has finished.

    Raises:
        GroupLost: the other rank is lost, or sends something else.
    """
    for _ in range(MOST_ASKED):
        if link.message(LARGE_BYTES, STEP_LIMIT_S) == MEASURED:
            return
        link.post(LENGTH.pack(0))
    raise link.lost("it measures the link without an end")
