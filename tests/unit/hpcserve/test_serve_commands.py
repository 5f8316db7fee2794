"""`hserve plan`: nodes from words and files, the table, and wrong input."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace

import pytest
from tiny_models import tiny_model

from hpcserve.__main__ import main, make_parser, node_of
from hpcserve.errors import ServeError


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return str(tiny_model(tmp_path_factory.mktemp("models") / "llama"))


SHORT = ["--prompt", "100", "--answer", "100"]


def test_all_candidates_are_printed_with_reasons(llama, capsys):
    assert main(["plan", llama, *SHORT, "--nodes", "a:free=1,bw=20", "b:free=1,bw=10,cores=4", "c:free=0.1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["CANDIDATE", "MS/TOKEN", "FIRST", "TOKENS/S", "J/TOKEN", "MEMORY", "NODES"]
    assert {line[:10].strip() for line in lines[1:4]} == {"one node", "pipeline 2", "tensor 2"}
    assert any(line.startswith("c is left out: has 0.1 GiB free") for line in lines)


def test_a_plan_is_printed_as_json(llama, capsys, tmp_path):
    nodes = {
        "nodes": [{"name": "n1", "free": 1, "bw": 20}, {"name": "n2", "free": 1}],
        "links": [{"nodes": ["n1", "n2"], "ms": 0.001, "gbit": 100}],
    }
    (tmp_path / "nodes.json").write_text(json.dumps(nodes))
    assert main(["plan", llama, *SHORT, "--nodes", str(tmp_path / "nodes.json"), "--goal", "energy", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["goal"] == "energy"
    split = next(one for one in made["candidates"] if one["name"] == "tensor 2")
    first, second = split["replicas"][0]["ranks"]
    assert first["ffn"][1] == second["ffn"][0]
    assert second["vocab"][1] == 320


def test_nodes_links_and_notes_come_from_the_standard_input(llama, capsys, monkeypatch):
    given = {
        "nodes": [{"name": name, "free": 1, "bw": 20} for name in "abc"],
        "links": [{"nodes": ["a", "b"], "ms": 0.1, "gbit": 9}],
        "notes": ["d is drained"],
    }
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(json.dumps(given).encode())))
    assert main(["plan", llama, *SHORT, "--nodes", "-", "--json"]) == 0
    taken = "unknown links are taken as 0.936 Gbit/s, 0.2 ms ('hpcsched node bench --links' measures them): "
    assert json.loads(capsys.readouterr().out)["notes"] == ["d is drained", f"{taken}a and c, b and c"]


def test_links_that_are_taken_as_the_default_are_said_under_the_table(llama, capsys):
    assert main(["plan", llama, *SHORT, "--nodes", "a:free=1", "b:free=1", "--link", "1,10"]) == 0
    assert "note: unknown links are taken as 10 Gbit/s, 1 ms" in capsys.readouterr().out
    assert main(["plan", llama, *SHORT, "--nodes", "a:free=1"]) == 0
    assert "unknown links" not in capsys.readouterr().out


def test_this_machine_is_measured_without_nodes(llama, capsys):
    assert main(["plan", llama, *SHORT, "--quantize", "fp32"]) == 0
    assert "one node on this machine" in capsys.readouterr().out


def test_a_model_that_does_not_fit_is_refused_with_status_1(llama, capsys):
    assert main(["plan", llama, *SHORT, "--nodes", "a:free=0.1"]) == 1
    assert "cannot fit the model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "a:bw=3", "b:free=1"], "its free memory is missing"),
        (["--nodes", "a:free=1,speed=3"], "'speed' is unknown"),
        (["--nodes", "a:free=lots"], "not a number above 0"),
        (["--nodes", "a:free=inf"], "not a number above 0"),
        (["--nodes", ":free=1"], "no name"),
        (["--nodes", "a:free=1", "a:free=1"], "each once"),
        (["--nodes", "/nowhere"], "No such file"),
        (["--context", "100000"], "longer than the model's context"),
    ],
    ids=["no memory", "unknown", "words", "infinite", "nameless", "twice", "no file", "context"],
)
def test_wrong_nodes_are_refused_with_what_is_wrong(llama, capsys, words, message):
    assert main(["plan", llama, *SHORT, *words]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("number", [0, -1, "inf", None], ids=str)
def test_a_link_of_zero_is_refused(llama, capsys, tmp_path, number):
    nodes = [{"name": "a", "free": 1}, {"name": "b", "free": 1}]
    for key in ("ms", "gbit"):
        link = {"nodes": ["a", "b"], "ms": 1, "gbit": 1} | {key: number}
        (tmp_path / "nodes.json").write_text(json.dumps({"nodes": nodes, "links": [link]}))
        assert main(["plan", llama, *SHORT, "--nodes", str(tmp_path / "nodes.json")]) == 1
        assert "is not a number above 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"nodes": 3}', '{"nodes": [3]}', '{"nodes": [{"name": 3, "free": 1}]}', "[" * 100_000],
    ids=["empty", "list", "nothing", "number", "numbers", "name", "deep"],
)
def test_a_damaged_file_of_nodes_is_refused(llama, capsys, tmp_path, content):
    (tmp_path / "nodes.json").write_text(content)
    assert main(["plan", llama, *SHORT, "--nodes", str(tmp_path / "nodes.json")]) == 1
    assert "cannot read" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["plan"],
        ["plan", "m", "--streams", "0"],
        ["plan", "m", "--link", "3"],
        ["plan", "m", "--link", "0,1"],
        ["plan", "m", "--node", "a:free=1"],
        ["prune", "m", "t", "--share", "2"],
    ],
    ids=["none", "no model", "no stream", "link", "link of zero", "short name", "share"],
)
def test_wrong_options_have_status_2(words, capsys):
    with pytest.raises(SystemExit) as ended:
        make_parser().parse_args(words)
    assert ended.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_numbers_of_a_node_have_the_units_of_the_help():
    node = node_of("n", {"free": "2", "bw": 20, "flops": "100", "cores": "4", "watts": 65})
    assert (node.free_bytes, node.read_bytes_s, node.flops_s) == (2 << 30, 20e9, 100e9)
    assert (node.cores, node.power()) == (4, 65)
    with pytest.raises(ServeError):
        node_of("n" * 300, {"free": 1})
