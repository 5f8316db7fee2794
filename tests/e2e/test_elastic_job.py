"""An elastic job that trains: it gets ranks on idle nodes, they leave one that another job needs, each step is taken once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from preloaded import command as python
from waiting import wait_until

from hpcsched.loopback.cluster import LocalCluster
from hpctrain.metrics import read_metrics

TESTS = Path(__file__).parents[1]
SMALL = "--layers 1 --width 32 --heads 2 --context 32 --batch 12 --eval-every 0 --sample 0 --checkpoint-every 50"
PROGRAM = ("-m", "hpctrain.examples.chargpt")


def script_of(out: str, program: Sequence[str] = PROGRAM, words: str = "--steps 1000000") -> str:
    """Return a script that trains into `out`; its ranks are forks of a process that has imported torch."""
    elastic = f"exec {sys.executable} -m hpctrain.elastic --silence 60 --report report.json"
    return f"{elastic} -- {' '.join([*python(), *program])} {SMALL} {words} --out {out}\n"


def told(path: Path) -> list[dict[str, Any]]:
    """The lines of steps."""
    return [line for line in read_metrics(path) if "loss" in line] if path.exists() else []


def losses(path: Path) -> list[float]:
    """The loss of each step, as it was taken last."""
    return [loss for _, loss in sorted({line["step"]: line["loss"] for line in told(path)}.items())]


def worlds(path: Path) -> list[int]:
    """How many ranks took each step."""
    if not path.exists():
        return []
    lines = list(read_metrics(path))
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["world"] for line in lines]


def test_the_ranks_of_an_elastic_job_follow_its_nodes(
    cluster: LocalCluster, sub: Callable[..., int], running: Any, ended: Any, output: Callable[[int], str]
) -> None:
    first = sub("while [ ! -e free ]; do sleep 0.05; done", "--exclusive", "-N1")
    running(first)
    number = sub(
        script_of("elastic"),
        "--exclusive",
        "-N1-3",
        "--elastic",
        "--ntasks-per-node=1",
        "--signal=B:USR1@10",
        "-t",
        "10",
    )
    metrics = cluster.share / "elastic" / "metrics.jsonl"
    assert running(number)["num_nodes"] == 2

    def until(world: int) -> None:
        wait_until(lambda: worlds(metrics)[-1:] == [world], what=f"{world} ranks")

    until(2)
    (cluster.share / "free").touch()
    until(3)
    other = sub("while [ ! -e over ]; do sleep 0.05; done", "--exclusive", "-N1")
    running(other)
    until(2)
    (cluster.share / "over").touch()
    assert ended(other)["state"] == "COMPLETED"
    until(3)  # the node that it gave back has come back
    cluster.run("hcancel", "-b", "-s", "USR1", str(number))
    assert ended(number)["exit_code"] == 75, output(number)
    report = json.loads((cluster.share / "report.json").read_text())
    assert report["faults"] == [], "ranks left, none was lost"


def test_an_elastic_job_survives_a_nodes_power_loss_and_has_it_again_afterwards(
    cluster: LocalCluster, sub: Callable[..., int], running: Any, job: Any, ended: Any, output: Callable[[int], str]
) -> None:
    number = sub(script_of("power"), "--exclusive", "-N2-3", "--elastic", "--ntasks-per-node=1", "-t", "10")
    metrics = cluster.share / "power" / "metrics.jsonl"
    node = running(number)["nodes"][2]
    wait_until(lambda: worlds(metrics)[-1:] == [3], what="3 ranks")
    assert cluster.machines is not None
    cluster.machines.power_off(node)
    wait_until(lambda: worlds(metrics)[-1:] == [2], what="2 ranks")
    cluster.machines.power_on(node)
    wait_until(lambda: worlds(metrics)[-1:] == [3], what="3 ranks again")
    assert (job(number)["state"], job(number)["attempt"]) == ("RUNNING", 0), output(number)
    story = cluster.run("hctl", "story", str(number)).stdout
    assert "it continues without that node" in story
    assert f"is given {node} as well" in story
    cluster.run("hcancel", str(number))
    ended(number)


def test_when_all_nodes_and_the_controller_die_a_job_continues_with_the_same_samples(
    cluster: LocalCluster, sub: Callable[..., int], running: Any, ended: Any, output: Callable[[int], str]
) -> None:
    words = "--steps 60 --checkpoint-every 4 --base-every 3"
    gate = cluster.share / "gate"
    faulty = (f"{TESTS}/train/faulty_chargpt.py", f"gate:40:{gate}")
    script = f"export PYTHONPATH={TESTS}\n{script_of('dead', faulty, words)}"
    options = (
        "--exclusive",
        "-N2-3",
        "--elastic",
        "--ntasks-per-node=1",
        "-t",
        "10",
        "--requeue",
        "--open-mode=append",
    )
    number = sub(script, *options)
    metrics = cluster.share / "dead" / "metrics.jsonl"
    nodes = running(number)["nodes"]
    wait_until(lambda: len(told(metrics)) >= 39, what="the steps before the gate")
    assert cluster.machines is not None
    cluster.down()
    for node in nodes:
        cluster.machines.power_off(node)
    gate.touch()
    for node in nodes:
        cluster.machines.power_on(node)
    cluster.up()
    done = ended(number)
    assert (done["state"], done["attempt"]) == ("COMPLETED", 1), output(number)
    assert sorted({line["step"] for line in told(metrics)}) == list(range(1, 61))
    assert told(metrics)[-1]["interruptions"] == 1
    train = [*python(), *PROGRAM, *SMALL.split(), *words.split(), "--out", "whole"]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}  # threads that wait for each other are slow on a busy machine
    whole = subprocess.run(train, cwd=cluster.share, capture_output=True, text=True, check=False, env=alone)
    assert whole.returncode == 0, whole.stderr
    assert losses(metrics) == pytest.approx(losses(cluster.share / "whole" / "metrics.jsonl"), rel=1e-3)
