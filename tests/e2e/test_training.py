"""A training job that loses a node goes on from its last checkpoint, to the very bits of one that lost nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from waiting import wait_until

from hpcsched.loopback.cluster import LocalCluster
from hpctrain.metrics import read_metrics

TESTS = Path(__file__).parents[1]
SMALL = "--layers 1 --width 32 --heads 2 --context 32 --batch 8 --eval-every 0 --sample 0 --checkpoint-every 4 --base-every 3"


def lines(path: Path) -> list[dict[str, Any]]:
    return list(read_metrics(path)) if path.exists() else []


def test_a_killed_training_job_resumes_to_the_same_bits(
    cluster: LocalCluster,
    sub: Callable[..., int],
    running: Any,
    ended: Any,
    output: Callable[[int], str],
) -> None:
    gate = cluster.share / "gate"
    train = f"{sys.executable} {TESTS}/train/faulty_chargpt.py gate:40:{gate} {SMALL} --steps 60"
    script = f"export PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={TESTS}\nmpirun {train}"
    killed = sub(f"{script} --out killed", "-N2", "--requeue", "-t", "5", "--open-mode=append")
    metrics = cluster.share / "killed" / "metrics.jsonl"
    wait_until(lambda: any(line["step"] >= 39 for line in lines(metrics)), what="the steps before the gate")
    published = cluster.share / "killed" / "checkpoints"
    wait_until(lambda: list(published.glob("step-*.json")), what="a checkpoint")
    node = running(killed)["nodes"][1]
    assert cluster.machines is not None
    cluster.machines.power_off(node)
    gate.touch()
    cluster.machines.power_on(node)
    done = ended(killed)
    assert (done["state"], done["attempt"]) == ("COMPLETED", 1), output(killed)
    second = [line["step"] for line in lines(metrics) if line["attempt"] == 1]
    assert second[0] > 1, "it began again from nothing"
    whole = sub(f"{script} --out whole", "-N2", "-t", "5")
    assert ended(whole)["state"] == "COMPLETED", output(whole)
    assert weights(output(whole)) == weights(output(killed)) != ""


def weights(text: str) -> str:
    """Return the hash of the final weights that the program prints."""
    found = [line for line in text.splitlines() if "sha256" in line]
    return found[-1].split()[-1] if found else ""


def test_a_training_job_says_how_far_it_is(
    cluster: LocalCluster, sub: Callable[..., int], job: Any, ended: Any, output: Callable[[int], str]
) -> None:
    script = f"{sys.executable} -m hpctrain.examples.chargpt {SMALL} --steps 100000 --out told"
    number = sub(script, "-t", "5")
    told = wait_until(lambda: job(number)["training"], what="its first word")
    assert (told["total_steps"], told["attempt"]) == (100000, 0), output(number)
    assert min(told["loss"], told["samples_per_s"], told["ends_at_s"] - told["at_s"]) > 0
    shown = cluster.run("hqueue", str(number)).stdout
    assert "of 100000" in shown
    assert "samples/s" in shown
    assert "goodput" in shown
    assert 0 < told["goodput"] <= 1
    words = cluster.run("hctl", "show", "job", str(number)).stdout
    assert "TrainStep=" in words
    assert "TrainGoodput=" in words
    cluster.run("hcancel", str(number))
    ended(number)
    assert job(number)["training"]["step"] >= told["step"]  # kept: it says where a requeued job would resume
    past = cluster.run("hacct", "-j", str(number), "-nXP", "-o", "TrainSteps,TrainLoss").stdout
    assert past.split("|")[0].endswith("/100000")


FAILS = """
import os, sys
from hpctrain.comm import connect
from hpctrain.run import all_or_none
comm = connect("auto", os.environ)
with all_or_none(comm):
    if comm.rank == 1:
        raise ValueError("the tape is torn")
    comm.barrier()
"""


def test_hlogs_says_which_rank_failed_first_and_why(
    cluster: LocalCluster, sub: Callable[..., int], ended: Any, output: Callable[[int], str]
) -> None:
    (cluster.share / "fails.py").write_text(FAILS)
    number = sub(f"hrun {sys.executable} fails.py", "-N2", "-n2", "-t", "5")
    assert ended(number)["state"] == "FAILED", output(number)
    told = cluster.run("hlogs", str(number)).stderr.splitlines()
    assert "first cause: rank 1 of 2" in told[0]
    assert told[0].endswith("ValueError: the tape is torn")
    assert any("noticed by: rank 0 of 2" in line for line in told), told
