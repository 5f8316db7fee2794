"""`hpcsched node impact`: waits that jobs had before and after a node was added, and the replay without it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from fake_api import FakeApi
from unit.controller.cluster import ROOT, T0, Cluster

from hpcsched.cli.admin import hpcsched_command, run
from hpcsched.cli.admin.impact import promise_line
from hpcsched.config.load import render_node
from hpcsched.listing.text import date_text

Json = dict[str, Any]
DAY_S = 86400.0
HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHVZF4l5bhNmVmZVp3ym9tR0pXoV4cRyEGQf8NUZzr3H"


@pytest.fixture
def api_with_nodes(api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    """Two nodes, of which n2 was added ten days ago."""
    directory = tmp_path / "etc"
    (directory / "nodes.d").mkdir(parents=True)
    (directory / "hpcsched.toml").write_text(f'[controller]\nstate_dir = "{tmp_path}/state"\n')
    values = {"host_key": HOST_KEY, "cpus": 2, "memory": "2G"}
    for name, more in (("n1", {}), ("n2", {"added": date_text(T0 - 10 * DAY_S)})):
        (directory / "nodes.d" / f"{name}.toml").write_text(render_node(name, {"host": name, **values, **more}))
    monkeypatch.setenv("HPCSCHED_CONFIG", str(directory))
    backend = Cluster("n1", "n2").backend()
    api.answers["GET /v1/snapshot"] = lambda body, given: asyncio.run(backend.snapshot(ROOT))
    api.answers["GET /v1/history"] = {"now_s": T0, "jobs": []}
    return api


def ended(number: int, submit_s: float, wait_s: float, node: str = "n1") -> Json:
    """Return a job of the history that ran for an hour on all cpus of a node."""
    share = {"node": node, "cpus": 2, "mem_mib": 100, "gpus": [], "tasks": 1, "shards": 0}
    times = {"submitted_at_s": submit_s, "eligible_at_s": submit_s, "started_at_s": submit_s + wait_s}
    ends = {"ended_at_s": submit_s + wait_s + 3600, "suspended_s": 0.0, "time_limit_s": 7200}
    return times | ends | {
        "id": number, "user": "ann", "partition": "main", "shares": [share], "attempt": 1, "steps": [],
    }  # fmt: skip


def pairs(days: float, wait_s: float, node: str) -> list[Json]:
    """Return two jobs a day, of which the second waits so long, on `node`; the last came `days` days ago."""
    found = []
    for day in range(5):
        at_s = T0 - (days + day) * DAY_S
        found += [ended(2 * day, at_s, 0.0), ended(2 * day + 1, at_s + 1, wait_s, node)]
    return found


def test_waits_before_and_after_and_the_replay_without_it(
    api_with_nodes: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = pairs(11, 3599.0, "n1") + pairs(1, 0.0, "n2")
    api_with_nodes.answers["GET /v1/history"] = {"now_s": T0, "jobs": jobs}
    assert run(hpcsched_command, "hpcsched", ["node", "impact", "n2"]) == 0
    said = capsys.readouterr().out
    assert "n2 was added" in said
    assert "10 jobs in the 7.0 days before, 10 in the 7.0 days to now" in said
    assert "mean wait  30:00 -> 0:00" in said
    assert "The 7.0 days to now again by replay: without it 30:00, with it 0:00" in said
    assert "less than a week" not in said
    assert run(hpcsched_command, "hpcsched", ["node", "impact", "n2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["node"], found["is_known"], found["is_enough"]) == ("n2", True, True)
    assert found["before"]["use"] == pytest.approx(10 / (7 * 24))
    assert found["after"]["use"] == pytest.approx(10 / (7 * 24) / 2)


def test_less_than_a_week_is_said_and_what_there_is_is_shown(
    api_with_nodes: FakeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at_s = T0 - 2 * DAY_S
    jobs = [ended(1, at_s, 0.0), ended(2, at_s + 1, 0.0, "n1"), ended(3, at_s + 60, 0.0, "n2")]
    api_with_nodes.answers["GET /v1/history"] = {"now_s": T0, "jobs": jobs}
    path = tmp_path / "etc" / "nodes.d" / "n2.toml"
    text = path.read_text()
    path.write_text("\n".join(line for line in text.splitlines() if not line.startswith("added")) + "\n")
    assert run(hpcsched_command, "hpcsched", ["node", "impact", "n2"]) == 0
    said = capsys.readouterr().out
    assert "by its first job" in said
    assert "Only 2.0 days of history with it" in said
    api_with_nodes.answers["GET /v1/history"] = {"now_s": T0, "jobs": []}
    assert run(hpcsched_command, "hpcsched", ["node", "impact", "n2"]) == 0
    assert "nothing to compare" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "why"), [(["n9"], "no node of that name"), (["n2", "--since", "9999d"], "at most a year")]
)
def test_an_impact_that_cannot_be_says_why(
    api_with_nodes: FakeApi, capsys: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    assert run(hpcsched_command, "hpcsched", ["node", "impact", *words]) == 1
    assert why in capsys.readouterr().err


def test_a_new_node_is_told_what_the_last_month_would_have_been_with_it(api_with_nodes: FakeApi) -> None:
    assert promise_line("n2") == ""
    api_with_nodes.answers["GET /v1/history"] = {"now_s": T0, "jobs": pairs(1, 3599.0, "n1")}
    assert promise_line("n2") == ""
    api_with_nodes.answers["GET /v1/history"] = {"now_s": T0, "jobs": pairs(9, 3599.0, "n1")}
    assert promise_line("n2") == "waits of jobs in the last 13 days: 30:00 -> about 0:00 with it"
    assert promise_line("n9") == ""
