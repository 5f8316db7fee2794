"""A training step of a small GPT on two ranks: what exchanging gradients costs beside ranks that do not talk.

On one host, and as root on two hosts joined by 1 Gbit/s, where bare sockets that carry as many bytes show what no exchange over
TCP can save on this machine; torch's DDP over Gloo is measured in turns in the same run.
A figure is the median, over the rounds of the run, of the mode's rate divided by the other one's in the same round: what the
machine does for longer than a round cancels out, and what it does for shorter spoils few of them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.bench import hosts
from tests.bench.figures import Figure, from_samples

STEP = Path(__file__).with_name("train_step.py")
QUICK = ("alone", "ours:bf16", "ours")
DDP = ("ddp:25", "ddp:4", "ddp:4:bf16")
FLOORS = {"ours": "floor", "ours:bf16": "floor:bf16"}
BARS = {  # of the ranks that do not talk
    ("one host", "ours"): ">= 0.96",
    ("two hosts, 1 Gbit/s", "ours"): ">= 0.92",
    ("two hosts, 1 Gbit/s", "ours:bf16"): ">= 0.96",
}
MBIT_PER_S = 1000


def run(quick: bool = False) -> list[Figure]:
    """Return the rate of each mode, as a part of that of ranks that do not talk and of bare sockets."""
    modes = QUICK if quick else QUICK + DDP
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        figures = _figures("one host", hosts.run(hosts.mpirun_here(2, STEP, *modes)))
        if not hosts.can_make_hosts():
            print("not root, or no iproute2: nothing is measured between hosts")
            return figures
        modes += tuple(FLOORS.values())
        with hosts.hosts(2, MBIT_PER_S, here) as addresses:
            between = hosts.run(
                hosts.mpirun(addresses, here, STEP, *modes), hosts.TCP_ONLY | {"BENCH_ADDRESS": addresses[0]}
            )
        return figures + _figures("two hosts, 1 Gbit/s", between)


def _figures(where: str, output: str) -> list[Figure]:
    modes = json.loads(output.splitlines()[-1])
    alone = modes["alone"]
    said = f"GPT, 2 ranks, {where}"
    figures = [from_samples(f"{said}: alone", alone["rates"], "samples/s")]
    for mode, found in modes.items():
        if mode != "alone":
            figures.append(_beside(f"{said}: {mode}", found, alone, "of alone", BARS.get((where, mode), "")))
        if FLOORS.get(mode) in modes:
            figures.append(_beside(f"{said}: {mode}", found, modes[FLOORS[mode]], "of bare sockets"))
    return figures + [_cost(f"{said}: {mode}", found, alone) for mode, found in modes.items() if mode != "alone"]


def _beside(name: str, mode: Mapping, other: Mapping, unit: str, bar: str = "") -> Figure:
    ratios = [ours / theirs for ours, theirs in zip(mode["rates"], other["rates"], strict=True)]
    return from_samples(name, ratios, unit, bar=bar)


def _cost(name: str, mode: Mapping, alone: Mapping) -> Figure:
    """CPU beyond that of a step alone; how it is divided, and what else a step costs, is in the name."""
    more = {key: value - alone["costs"][key] for key, value in mode["costs"].items()}
    return Figure(
        name=f"{name}: beyond alone, {more['own_cpu_ms']:.1f} ms its own thread and {more['other_cpu_ms']:.1f} ms others; "
        f"{more['own_switches']:.0f} and {more['other_switches']:.0f} switches; waits {more['waited_ms']:.1f} ms",
        value=more["own_cpu_ms"] + more["other_cpu_ms"],
        unit="ms CPU a step",
    )
