"""hserve: which words are whose, percentages, requests of a check, and the job of a replica."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from fake_api import FakeApi

from hpcsched.cli.admin.hserve import checks_of, factor_of, job_of, main, percent_of, server_script, split_words
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
