"""A training step of a small GPT on two ranks: what exchanging gradients costs beside ranks that do not talk.

On one host, and as root on two hosts joined by 1 Gbit/s; torch's DDP over Gloo is measured in turns in the same run.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tests.bench import hosts
from tests.bench.figures import Figure, from_samples

STEP = Path(__file__).with_name("train_step.py")
MODES = ("alone", "ddp:25", "ddp:4", "ddp:4:bf16", "ours:bf16", "ours")
BARS = {  # of the ranks that do not talk
    ("one host", "ours"): ">= 0.96",
    ("two hosts, 1 Gbit/s", "ours"): ">= 0.92",
    ("two hosts, 1 Gbit/s", "ours:bf16"): ">= 0.96",
}
MBIT_PER_S = 1000


def run(quick: bool = False) -> list[Figure]:
    """Return samples per second of each mode, as a part of those of ranks that do not talk."""
    modes = (MODES[0], *MODES[-2:]) if quick else MODES
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        figures = _figures("one host", hosts.run(hosts.mpirun_here(2, STEP, *modes)), modes)
        if not hosts.can_make_hosts():
            print("not root, or no iproute2: nothing is measured between hosts")
            return figures
        with hosts.hosts(2, MBIT_PER_S, here) as addresses:
            between = hosts.run(
                hosts.mpirun(addresses, here, STEP, *modes), hosts.TCP_ONLY | {"BENCH_ADDRESS": addresses[0]}
            )
        return figures + _figures("two hosts, 1 Gbit/s", between, modes)


def _figures(where: str, output: str, modes: tuple[str, ...]) -> list[Figure]:
    rates = json.loads(output.splitlines()[-1])
    alone = rates["alone"]["median"]
    return [
        from_samples(
            f"GPT, 2 ranks, {where}: {mode}",
            rates[mode]["all"],
            "samples/s",
            bar=BARS.get((where, mode), ""),
            floor=alone if mode != "alone" else None,
            floor_name="alone",
        )
        for mode in modes
    ]
