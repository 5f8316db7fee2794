"""Local steps on a slow link: how much of the time two hosts compute, and the loss beside exact steps. Needs root."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from hpctrain.metrics import read_metrics
from tests.bench import hosts
from tests.bench.figures import Figure

MBIT_PER_S = 100
SYNC = "local:25:int8"
STEPS = 2000  # of a model so small that they take half a minute: at first any two ways to train differ
MODEL = ("--layers", "2", "--width", "64", "--heads", "4", "--context", "32")
OPTIONS = ("-m", "hpctrain.examples.chargpt", "--checkpoint-every", "0", "--sample", "0", *MODEL)


def run(quick: bool = False) -> list[Figure]:
    """Return the part of the time that steps take which do not meet, and the loss after as many samples as in exact steps."""
    if not hosts.can_make_hosts():
        print("not root, or no iproute2: nothing is measured")
        return []
    steps = STEPS // 5 if quick else STEPS
    with tempfile.TemporaryDirectory() as folder, hosts.hosts(2, MBIT_PER_S, Path(folder)) as addresses:
        here = Path(folder)
        options = (*OPTIONS, "--steps", str(steps), "--eval-every", str(steps))
        hosts.run(hosts.mpirun_here(2, *options, "--out", here / "exact"))
        command = hosts.mpirun(addresses, here, *options, "--sync", SYNC, "--out", here / "local")
        hosts.run(command, hosts.TCP_ONLY)
        exact, local = (list(read_metrics(here / name / "metrics.jsonl")) for name in ("exact", "local"))
    spent_s = [
        float(str(one["t_step_s"])) for one in local[len(local) // 10 : -1]
    ]  # the first warm up, the last validates
    meets = [bool(line["bytes"]) for line in local[len(local) // 10 : -1]]
    alone_s = statistics.median(one for one, met in zip(spent_s, meets, strict=True) if not met)
    return [
        Figure(
            name=f"2 hosts, {MBIT_PER_S} Mbit/s, --sync {SYNC}: of the time computed",
            value=alone_s * len(spent_s) / sum(spent_s),
            unit="",
            bar=">= 0.90",
        ),
        Figure(
            name=f"... validation loss after {steps} steps",
            value=float(str(local[-1]["val_loss"])),
            unit="",
            bar="<= 1.02",
            floor=float(str(exact[-1]["val_loss"])),
            floor_name="exact in every step",
        ),
    ]
