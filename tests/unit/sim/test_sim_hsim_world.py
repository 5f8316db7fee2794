"""hsim replay and hsim whatif as they are typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from unit.sched.world import world

from hpcsched.cli.hsim import main
from hpcsched.sched.snapshot import snapshot_to_json


@pytest.fixture
def saved(tmp_path: Path) -> str:
    made = world(nodes="1x4", running=["1: n1 2c 100s"], waiting=["2: 4c 600s", "3: 2c 100s", "4: 2c 300s"])
    path = tmp_path / "world.json"
    path.write_text(json.dumps(snapshot_to_json(made.snapshot(), made.policy)))
    return str(path)


def test_replay_shows_the_plan_and_what_another_policy_changes(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", saved, "--policy", "fifo,easy"]) == 0
    plan, fifo, easy = capsys.readouterr().out.split("\n\n")
    assert "policy easy: 1 start, 2 wait" in plan
    assert [line.split()[:3] for line in plan.splitlines()[2:]] == [
        ["2", "ann", "Resources,"],
        ["3", "ann", "starts"],
        ["4", "ann", "Priority,"],
    ]
    assert "policy fifo 2 of 3" in fifo or "policy fifo 1 of 3" in fifo
    assert "starts on n1 Priority" in " ".join(fifo.split())
    assert "policy easy 0 of 3" in easy


def test_replay_as_json(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", saved, "-p", "fifo", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [plan["policy"] for plan in answer["plans"]] == ["easy", "fifo"]
    assert [job["nodes"] for job in answer["plans"][0]["jobs"]] == [[], ["n1"], []]
    assert 3 in [one["job_id"] for one in answer["differences"][0]]


def test_whatif_sets_variants_beside_today(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["whatif", saved, "--add-nodes", "2x4:1G:gpu:a100:2", "--policy", "fifo", "--jobs", "ann"]) == 0
    table, jobs = capsys.readouterr().out.split("\n\n")
    assert [line.split()[-4] for line in table.splitlines()[1:]] == ["11:40", "0:00", "0:00"]  # WAIT_MAX
    assert "+2x4:1G:gpu:a100:2 fifo" in jobs.splitlines()[0]
    assert jobs.splitlines()[1].split() == ["2", "ann", "1970-01-01T00:01:40", "now", "now"]
    assert main(["whatif", saved, "--remove-node", "n1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [one["left"] for one in answer["variants"]] == [0, 3]
    assert answer["jobs"] == []


def test_who_has_no_job_that_waits_is_told(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["whatif", saved, "--jobs", "nobody"]) == 0
    assert capsys.readouterr().out.endswith("\n\nNo job of nobody waits.\n")


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["whatif", "--add-nodes", "0x4:1G"], "cannot add nodes '0x4:1G': write COUNTxCPUS:MEM"),
        (["whatif", "--add-nodes", "many"], "cannot add nodes 'many': write COUNTxCPUS:MEM"),
        (["whatif", "--remove-node", "n7"], "cannot remove node 'n7': there are n1"),
        (["whatif", "--policy", "magic"], "cannot follow policy 'magic': known are fcfs"),
        (["whatif", "--plot", "x"], "cannot use --plot with whatif"),
        (["replay", "--predict"], "cannot use --predict with replay"),
    ],
)
def test_what_cannot_be_tried_is_refused(
    saved: str, argv: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([argv[0], saved, *argv[1:]]) != 0
    assert why in capsys.readouterr().err


def test_what_is_no_world_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x"
    path.write_text("{")
    for operand, why in ((str(path), "it is not JSON"), (str(tmp_path / "none"), "No such file")):
        assert main(["replay", operand]) == 1
        assert why in capsys.readouterr().err
    assert main(["replay"]) == 2
    assert main(["run", "x.swf", "--predict"]) == 2
