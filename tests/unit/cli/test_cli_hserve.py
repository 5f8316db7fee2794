"""hserve: which words are whose, percentages, requests of a check, and the job of a replica."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from fake_api import FakeApi

from hpcsched.cli.admin import hserve
from hpcsched.cli.admin.hserve import (
    checks_of,
    factor_of,
    is_description,
    job_of,
    main,
    percent_of,
    server_script,
    split_nodes,
    split_words,
)
from hpcsched.commands.options import UsageError
from hpcsched.errors import RequestError


@pytest.mark.parametrize(
    ("line", "own", "others", "served"),
    [
        ("start m --name=chat --gpus 2 -N 2", "start m --name=chat", "--gpus 2 -N 2", ""),
        ("start m --name chat --replicas 1-3 --json", "start m --name chat --replicas 1-3 --json", "", ""),
        ("start m --gpus=2 -- --name x --fp8", "start m", "--gpus=2", "--name x --fp8"),
        ("roll chat --back", "roll chat --back", "", ""),
        ("start --help", "start --help", "", ""),
        ("start m --name", "start m --name", "", ""),
    ],
    ids=str,
)
def test_options_are_split_into_those_of_hserve_of_hsub_and_of_the_server(
    line: str, own: str, others: str, served: str
) -> None:
    assert split_words(line.split()) == (own.split(), others.split(), served.split())


def test_percentages_and_factors_are_read_and_bounded() -> None:
    assert [percent_of("canary", text) for text in ("10%", "10", "0.5%", "100%")] == [0.1, 0.1, 0.005, 1.0]
    assert [factor_of(text) for text in ("1.3x", "2", "100x")] == [1.3, 2.0, 100.0]
    for text in ("", "x%", "-1%", "101%", "nan", "inf", "10%%"):
        with pytest.raises(UsageError, match="cannot take --canary"):
            percent_of("canary", text)
    for text in ("", "x", "0.9x", "101x", "nan", "inf"):
        with pytest.raises(UsageError, match="cannot take --max-ttft"):
            factor_of(text)


def test_checks_are_requests_one_on_each_line(tmp_path: Path) -> None:
    path = tmp_path / "checks.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"messages": [], "expect": "b"}\n')
    assert checks_of(str(path)) == [{"prompt": "a"}, {"messages": [], "expect": "b"}]
    for wrong in ("{", "[]", '{"expect": "b"}', "[" * 100_000):
        path.write_text('{"prompt": "a"}\n' + wrong)
        with pytest.raises(RequestError, match="line 2: it must be a JSON object with messages or prompt"):
            checks_of(str(path))
    with pytest.raises(RequestError, match="No such file"):
        checks_of(str(tmp_path / "none"))


def test_the_script_of_a_replica_runs_hpcserve_with_each_word_as_it_was_given() -> None:
    last = server_script("chat", "/models/it's $(here)", ["--note", "a b"]).splitlines()[-1]
    assert shlex.split(last)[5:] == [
        "/models/it's $(here)", "--name", "chat", "--listen", "unix:$socket", "--note", "a b",
    ]  # fmt: skip


def test_a_replica_gets_few_variables_unless_export_says_more() -> None:
    environ = {"PATH": "/bin", "SECRET": "x"}
    assert job_of("chat", "/m", [], [], "", environ)["env"] == [["PATH", "/bin"]]
    assert ["SECRET", "x"] in job_of("chat", "/m", ["--export=ALL"], [], "", environ)["env"]


def test_a_roll_without_options_of_the_job_keeps_those_of_the_present_version(api: FakeApi) -> None:
    api.answers["POST /v1/services/roll"] = {"service": {"rollout": {"label": "v2"}}}
    assert main(["roll", "chat", "--to=/models/new", "--canary=5%"]) == 0
    assert main(["roll", "chat", "--to=/models/new", "--gpus=2"]) == 0
    kept, new = api.requests("POST /v1/services/roll")
    assert (kept["model"], kept["canary"], "job" in kept) == ("/models/new", 5, False)
    assert new["job"]["script"].splitlines()[-1].startswith("exec python3 -m hpcserve run /models/new ")


@pytest.mark.parametrize(
    ("words", "why"),
    [([], "name one of start, roll, ls"), (["scal"], "did you mean scale"), (["start"], "write hserve start MODEL")],
    ids=str,
)
def test_a_missing_or_wrong_verb_is_told(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert why in capsys.readouterr().err


# ----- plan

NODE = {
    "mem_mib": 8192,
    "mem_alloc_mib": 0,
    "cpus": 4,
    "state": "IDLE",
    "drained": False,
    "facts": {"mem_free_mib": 4096},
}
RUN = {
    "at_s": 1.0,
    "how": "quick",
    "cpu_model": "x",
    "cpus": 4,
    "mem_mib": 8192,
    "gpus": [],
    "values": {"memory": 38.0, "gemm_bf16": 900.0},
}
LINK = {"one": "n1", "other": "n2", "at_s": 1.0, "rtt_us": 200.0, "to_mbps": 940.0, "from_mbps": 940.0} | {
    "near": {},
    "far": {},
}


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], str | None]]:
    """Return the words and the standard input of hpcserve's commands, none of which is run."""
    called: list[tuple[list[str], str | None]] = []

    def run_child(words: list[str], given: str | None = None) -> int:
        called.append((words, given))
        return 0

    monkeypatch.setattr(hserve, "run_child", run_child)
    return called


@pytest.fixture
def cluster(api: FakeApi) -> FakeApi:
    """Serve two measured nodes, and one that is not."""
    names = ["n1", "n2", "n3"]
    answers: dict[str, Any] = {
        "GET /v1/nodes": {"nodes": [{"name": name, **NODE} for name in names]},
        "GET /v1/partitions": {"partitions": [{"nodes": names, "up": True, "allow_accounts": []}]},
        "GET /v1/config": {"accounting": {"accounts": [], "users": [], "qos": [], "licenses": []}},
        "GET /v1/me": {"user": "ada"},
        "GET /v1/benches": {"benches": [{"node": name, **RUN} for name in names[:2]]},
        "GET /v1/links": {"links": [LINK]},
    }
    api.answers.update(answers)
    return api


@pytest.mark.parametrize(
    ("line", "others", "named"),
    [
        ("m", "m", ""),
        ("m --nodes n1 n2 --json", "m --json", "n1 n2"),
        ("m --nodes=n[1-2] --goal latency", "m --goal latency", "n[1-2]"),
        ("--streams 2 m --nodes -", "--streams 2 m", "-"),
    ],
    ids=str,
)
def test_names_of_nodes_are_told_from_other_words(line: str, others: str, named: str) -> None:
    assert split_nodes(line.split()) == (others.split(), named.split())


def test_a_description_of_nodes_is_told_from_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nodes.json").touch()
    assert all(map(is_description, ("n1:free=8", "nodes.json", "/no/such/file", "-")))
    assert not any(map(is_description, ("n1", "n[1-4]", "n1,n2", "other.json")))


@pytest.mark.parametrize("words", [[], ["--nodes", "n[1-2]"], ["--nodes=n2,n1"]], ids=str)
def test_a_plan_gets_what_the_controller_knows_of_the_nodes(
    words: list[str], cluster: FakeApi, children: list[tuple[list[str], str | None]]
) -> None:
    assert main(["plan", "model", "--streams", "4", *words]) == 0
    [(passed, given)] = children
    assert passed == ["plan", "model", "--streams", "4", "--nodes", "-"]
    document = json.loads(given or "")
    assert {one["name"]: (one["free"], one["bw"], one["flops"]) for one in document["nodes"]} == {
        "n1": (4.0, 38.0, 900.0),
        "n2": (4.0, 38.0, 900.0),
    }
    assert document["links"] == [{"nodes": ["n1", "n2"], "ms": 0.1, "gbit": 0.94}]
    assert len(document["notes"]) == (0 if words else 1), "n3 is not measured"
    assert cluster.parameters("GET /v1/nodes") == {"probe": "1"}


@pytest.mark.parametrize(
    ("name", "why"),
    [("n9", "there is no node of that name"), ("n3", "its memory bandwidth is not measured"), ("n[", "n[")],
    ids=["unknown", "not measured", "no list"],
)
def test_a_wrong_node_of_a_plan_is_named(
    name: str, why: str, cluster: FakeApi, children: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "model", "--nodes", name]) != 0
    assert why in capsys.readouterr().err
    assert children == []


def test_described_nodes_and_help_need_no_controller(children: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCSCHED_API", "/no/such/socket")
    for words in (["plan", "m", "--nodes", "a:free=1", "b:free=2"], ["plan", "--help"]):
        assert main(words) == 0
        assert children.pop() == (words, None)


def test_without_a_controller_only_this_machine_can_be_planned_with(
    children: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HPCSCHED_API", "/no/such/socket")
    assert main(["plan", "m"]) == 0
    assert children == [(["plan", "m"], None)]
    assert "only this machine" in capsys.readouterr().err
    assert main(["plan", "m", "--nodes", "n1"]) != 0
    assert len(children) == 1
