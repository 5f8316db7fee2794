"""hpcsched plan: over the history that the controller answers, over a log, and with bad input."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from fake_api import FakeApi
from unit.controller.cluster import ROOT, T0, Cluster

from hpcsched.cli import admin
from hpcsched.cli.admin import plan as plan_module
from hpcsched.cli.admin.plan import plan
from hpcsched.planner.worth import MOST_LEFT_S, arrival_of

Json = dict[str, Any]
DAY_S = 86400.0
KTH = Path(__file__).parents[2] / "golden" / "traces" / "KTH-SP2.swf.gz"


def call(*words: str) -> int:
    return admin.run(plan, "hpcsched plan", words)


def answer_of(capsys: pytest.CaptureFixture[str], *words: str) -> Json:
    assert call(*words, "--json") == 0
    found: Json = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture
def cluster(api: FakeApi) -> Cluster:
    """Two nodes, and an empty history."""
    made = Cluster("n1", "n2")
    backend = made.backend()
    api.answers["GET /v1/snapshot"] = lambda body, given: asyncio.run(backend.snapshot(ROOT))
    api.answers["GET /v1/history"] = {"now_s": T0, "jobs": []}
    return made


def ended(cluster: Cluster, number: int, submit_s: float, run_s: float, **changes: object) -> Json:
    """Return a job of the history: of one node and all its cpus."""
    share = {"node": "n1", "cpus": 2, "mem_mib": 100, "gpus": [], "tasks": 1, "shards": 0}
    return {
        "id": number,
        "user": "ann",
        "partition": "main",
        "submitted_at_s": submit_s,
        "eligible_at_s": submit_s,
        "started_at_s": submit_s + 5,
        "ended_at_s": submit_s + 5 + run_s,
        "suspended_s": 0.0,
        "time_limit_s": 7200,
        "shares": [share],
        "attempt": 1,
        "steps": [],
    } | changes


def test_the_past_is_replayed_with_another_node_and_the_costs_are_told(
    cluster: Cluster, api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [ended(cluster, number, T0 - 3 * DAY_S + number, 3600.0) for number in range(4)]
    api.answers["GET /v1/history"] = {"now_s": T0, "jobs": jobs}
    found = answer_of(
        capsys, "worth", "--add", "2x2:1G", "--price", "1000", "--watts", "100", "--kwh", "0.3", "--cloud", "1"
    )
    now, then = found["past"]["now"], found["past"]["with"]
    assert now["waits"]["jobs"] == 4
    assert now["waits"]["mean_s"] == pytest.approx(1800, abs=5)  # two at once, two after an hour
    assert then["waits"]["mean_s"] == 0.0
    assert [machine["name"] for machine in found["added"]] == ["new1", "new2"]
    assert "ahead" not in found
    assert found["costs"]["per_saved_h"] > 0
    assert found["costs"]["years_to_pay"] > 0
    assert call("worth", "--add", "2x2:1G") == 0
    text = capsys.readouterr().out
    assert "mean wait 29:59 -> 0:00; 4 of 4 jobs would have started at once, 2 without it" in text
    assert "No forecast: there are 3 days of history; it needs 28." in text


def test_an_empty_history_says_so_and_gives_no_forecast(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("worth", "--add", "2:1G") == 0
    assert "No job was submitted in the last 28 days" in capsys.readouterr().out
    assert call("forecast") == 1
    assert "there are 0 days of history, and a forecast needs 28" in capsys.readouterr().err


def test_the_history_is_read_page_by_page(cluster: Cluster, api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    def page(body: Json, given: dict[str, str]) -> Json:
        number = int(given.get("after", "3"))
        jobs = [ended(cluster, number, T0 - DAY_S, 60.0)]
        return {"now_s": T0, "jobs": jobs, **({"next_cursor": str(number - 1)} if number > 1 else {})}

    api.answers["GET /v1/history"] = page
    assert answer_of(capsys, "worth", "--add", "2:1G")["past"]["now"]["waits"]["jobs"] == 3


def test_with_two_months_of_history_there_is_a_band(
    cluster: Cluster, api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [ended(cluster, day, T0 - day * DAY_S, 3600.0) for day in range(1, 60)]
    api.answers["GET /v1/history"] = {"now_s": T0, "jobs": jobs}
    found = answer_of(capsys, "forecast", "--draws", "5", "--days", "7")
    assert found["jobs"]["low"] >= 6
    assert found["utilization"]["low"] <= found["utilization"]["median"] <= found["utilization"]["high"]
    assert call("forecast", "--draws", "5") == 0
    assert "mean wait" in capsys.readouterr().out


def test_a_log_is_used_instead_of_the_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer_of(capsys, "worth", "--add", "1x10:1G", "--trace", str(KTH), "--draws", "5")
    assert found["past"]["with"]["waits"]["mean_s"] < found["past"]["now"]["waits"]["mean_s"]
    assert found["ahead"]["with"]["wait_mean_s"]["median"] < found["ahead"]["now"]["wait_mean_s"]["median"]


def test_jobs_of_the_history_become_arrivals(cluster: Cluster) -> None:
    kinds = {"n1": "a100"}
    share = {"node": "n1", "cpus": 2, "mem_mib": 100, "gpus": [0, 1], "tasks": 1, "shards": 0}
    step = {"attempt": 1, "cpu_user_s": 3.0, "cpu_system_s": 1.0}
    found = arrival_of(ended(cluster, 1, T0, 60.0, shares=[share] * 2, steps=[step, step | {"attempt": 0}]), T0, kinds)
    assert found is not None
    assert (found.nodes, found.cpus, found.gpus, found.gpu_type, found.cpu_used_s) == (2, 2, 2, "a100", 4.0)
    runs = arrival_of(ended(cluster, 1, T0, 60.0, ended_at_s=None), T0, kinds)
    assert runs is not None
    assert runs.run_s == 7200
    assert arrival_of(ended(cluster, 1, T0, 60.0, started_at_s=None), T0, kinds) is None
    assert arrival_of(ended(cluster, 1, T0, 60.0, shares=[]), T0, kinds) is None


def test_a_model_fits_or_lacks_memory_or_fits_with_less(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer_of(capsys, "fits", "--params", "1M", "--vocab", "1000", "--sequence", "64")
    assert [node["fits"] for node in found["nodes"]] == [True, True]
    found = answer_of(capsys, "fits", "--params", "7B")
    assert [node["words"].split()[0] for node in found["nodes"]] == ["lacks", "lacks"]
    assert found["together"]["fits"] is False
    assert call("fits", "--params", "7B", "--serve") == 0
    assert "All nodes together lack" in capsys.readouterr().out


def test_the_fewest_nodes_and_their_network(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--params", "1M", "--vocab", "1000", "--sequence", "64")
    found = answer_of(capsys, "minimum", *small, "--spare", "1", "--gflops", "1")
    assert found["nodes"] == ["n1", "n2"]
    assert found["link"]["mbit_s"] > 0
    assert call("minimum", *small, "--spare", "2") == 1
    assert "1 would do, and there are 2, too few for 2 that may be lost" in capsys.readouterr().err
    assert call("minimum", "--params", "7B") == 1
    assert "hpcsched plan fits names what would help" in capsys.readouterr().err


def test_the_work_of_each_node_and_its_electricity(
    cluster: Cluster, api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    api.answers["GET /v1/history"] = {"now_s": T0, "jobs": [ended(cluster, 1, T0 - DAY_S, 43200.0)]}
    found = answer_of(
        capsys, "upgrade-cycle", "--watts", "n1=100,n2=100", "--kwh", "0.5", "--idle", "0.5", "--days", "1"
    )
    rows = {row["node"]: row for row in found["nodes"]}
    assert rows["n1"]["part"] == 1.0
    assert rows["n1"]["use"] == pytest.approx(0.5, abs=0.01)
    assert rows["n2"]["kwh_a_year"] == pytest.approx(438.3, abs=0.1)
    assert found["nodes"][0]["node"] == "n2"  # the least work for its power


def test_a_job_with_a_limit_of_a_hundred_years_does_only_the_work_that_it_has_done(
    cluster: Cluster, api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = ended(cluster, 1, T0 - 40 * DAY_S, 0.0, ended_at_s=None, time_limit_s=36_500 * 86_400)
    other = ended(cluster, 2, T0 - DAY_S, DAY_S, shares=[runs["shares"][0] | {"node": "n2"}])
    api.answers["GET /v1/history"] = {"now_s": T0, "jobs": [runs, other]}
    found = answer_of(capsys, "upgrade-cycle", "--days", "2")
    assert {row["node"]: round(row["part"], 2) for row in found["nodes"]} == {"n1": 0.67, "n2": 0.33}
    assert {row["node"]: round(row["use"], 2) for row in found["nodes"]} == {"n1": 1.0, "n2": 0.5}
    arrival = arrival_of(runs, T0, {})
    assert arrival is not None
    assert arrival.began_s is not None
    assert arrival.began_s + arrival.run_s == T0 + MOST_LEFT_S


def test_whose_jobs_push_others_out_of_the_history_is_told(
    cluster: Cluster, api: FakeApi, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "MOST_JOBS", 3)
    jobs = [ended(cluster, number, T0 - DAY_S, 60.0, user="eve\x1b[2J") for number in range(3)]
    api.answers["GET /v1/history"] = {"now_s": T0, "jobs": jobs, "next_cursor": "1"}
    assert call("worth", "--add", "2:1G") == 0
    said = capsys.readouterr().err
    assert "! only the newest 3 jobs are in this, since " in said
    assert "3 of them are of eve" in said
    assert "\x1b" not in said


@pytest.mark.parametrize(
    ("words", "status", "why"),
    [
        (("worth", "--add", "many"), 1, "write COUNTxCPUS:MEM"),
        (("worth", "--add", "9999x1:1G"), 1, "more than 1000 nodes"),
        (("worth", "--add", "2:1G", "--price", "nan"), 2, "not a number"),
        (("worth", "--add", "2:1G", "--price", "-1"), 2, "not in the range"),
        (("worth", "--add", "2:1G", "--price", "inf"), 2, "not in the range"),
        (("worth", "--add", "2:1G", "--partition", "mian"), 1, "did you mean main"),
        (("worth", "--add", "2:1G", "--cpus", "3"), 1, "cannot use --cpus without --trace"),
        (("worth", "--add", "2:1G", "--trace", "/nowhere"), 1, "cannot read trace"),
        (("fits",), 1, "give a directory with config.json"),
        (("fits", "/nowhere"), 1, "cannot read the model"),
        (("fits", "x" * 300), 1, "File name too long"),
        (("fits", "a\0b"), 1, "cannot read the model"),
        (("fits", "/nowhere", "--params", "7B"), 1, "not both"),
        (("fits", "--params", "7B", "--dtype", "int8"), 1, "cannot train with weights of int8"),
        (("fits", "--params", "7B", "--gpu-memory", "h100=80G"), 1, "cannot find a GPU of type h100"),
        (("upgrade-cycle", "--watts", "n9=3"), 1, "no such node"),
        (("upgrade-cycle", "--watts", "n1=nan"), 1, "write watts"),
    ],
)
def test_bad_input_is_refused_with_what_to_do(
    words: tuple[str, ...], status: int, why: str, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*words) == status
    assert why in capsys.readouterr().err


def test_a_model_that_is_a_fifo_or_a_device_is_refused_at_once(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "config.json")
    for path in (tmp_path, "/dev/zero"):
        assert call("fits", str(path)) == 1
        assert "it is not a file" in capsys.readouterr().err


def test_a_configuration_with_control_characters_does_not_reach_the_terminal(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "\x1b]0;x\x07"}))
    assert call("fits", str(tmp_path)) == 1
    assert "\x1b" not in capsys.readouterr().err
