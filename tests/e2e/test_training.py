"""A training job that loses a node goes on from its last checkpoint, to the very bits of one that lost nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from waiting import wait_until

from hpcsched.demo.cluster import LocalCluster

SMALL = "--layers 1 --width 32 --heads 2 --context 32 --batch 8 --eval-every 0 --sample 0 --checkpoint-every 4 --base-every 3"


def lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def test_a_killed_training_job_resumes_to_the_same_bits(
    cluster: LocalCluster,
    sub: Callable[..., int],
    running: Any,
    ended: Any,
    output: Callable[[int], str],
) -> None:
    python = sys.executable
    script = f"export PATH={Path(python).parent}:$PATH\nmpirun {python} -m hpctrain.examples.chargpt {SMALL} --steps 60"
    whole = sub(f"{script} --out whole", "-N2", "--requeue", "-t", "5")
    assert ended(whole, 90)["state"] == "COMPLETED", output(whole)
    killed = sub(f"{script} --out killed", "-N2", "--requeue", "-t", "5", "--open-mode=append")
    metrics = cluster.share / "killed" / "metrics.jsonl"
    wait_until(lambda: any(line["step"] >= 20 for line in lines(metrics)), 60, "twenty steps")
    node = running(killed)["nodes"][1]
    assert cluster.machines is not None
    cluster.machines.power_off(node)
    cluster.machines.power_on(node)
    done = ended(killed, 90)
    assert (done["state"], done["attempt"]) == ("COMPLETED", 1), output(killed)
    second = [line["step"] for line in lines(metrics) if line["attempt"] == 1]
    assert second[0] > 1, "it began again from nothing"
    assert weights(output(whole)) == weights(output(killed)) != ""


def weights(text: str) -> str:
    """Return the hash of the final weights that the program prints."""
    found = [line for line in text.splitlines() if "sha256" in line]
    return found[-1].split()[-1] if found else ""
