"""How long a step takes that does nothing: `hrun -N4 hostname` in a job on four nodes, called -> all output there and ended."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from hpcsched.loopback.cluster import LocalCluster
from tests.bench.figures import Figure, from_samples

NODES = ("n1", "n2", "n3", "n4")
# The shell's own clock, on each side of the step; the first step of a job makes its tasks' workers, so it does not count.
SCRIPT = """#!/bin/bash
#HSUB -N4 -o {out}
hrun -N4 hostname > /dev/null
for i in $(seq {rounds}); do
    began=$EPOCHREALTIME
    hrun -N4 hostname > /dev/null || exit 1
    echo $began $EPOCHREALTIME
done
echo over
"""


def run(quick: bool) -> list[Figure]:
    """Measure steps within one allocation, one after the other."""
    rounds = 10 if quick else 30
    with tempfile.TemporaryDirectory() as directory, LocalCluster(Path(directory), NODES, cpus=2) as cluster:
        out = cluster.share / "out"
        cluster.run("hsub", stdin=SCRIPT.format(out=out, rounds=rounds))
        while not (out.exists() and out.read_text().endswith("over\n")):
            time.sleep(0.05)
        pairs = [line.replace(",", ".").split() for line in out.read_text().splitlines()[:-1]]
    samples = [(float(end) - float(began)) * 1000 for began, end in pairs]
    return [from_samples("hrun -N4 hostname in an allocation", samples, "ms", bar="<= 120 ms, reach 52")]
