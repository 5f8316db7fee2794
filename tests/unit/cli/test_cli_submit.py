"""hsub's start: what it hands to the controller as it is, and when the whole command has to do it."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_api import FakeApi

from hpcsched.cli import submit
from hpcsched.jobscript.options import ALL_OPTIONS, ScriptOption, Use
from hpcsched.jobscript.submission import read_remote, words_from_json
from hpcsched.model.codec import spec_to_json

SCRIPT = "#!/bin/sh\n#SBATCH --nodes=2\ntrue\n#SBATCH --time=5\n"
PLAIN = {"quiet": False, "verbose": False, "parsable": False}
ACCEPTED: dict[str, Any] = {"jobs": [{"job_id": 5, "tasks": 1}], "notes": ["a note"], "manners": PLAIN}


@pytest.fixture(autouse=True)
def _plain(api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    api.answers["POST /v1/submit"] = ACCEPTED
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.sh").write_text(SCRIPT)


def by_whole(_argv: object) -> int:
    """Stand for the whole command."""
    return 77


def _options(value: bool) -> list[ScriptOption]:
    known = submit.WITH_VALUE if value else submit.WITHOUT
    return [option for option in ALL_OPTIONS if option.name in known]


def test_what_is_known_of_the_options_is_what_their_table_says() -> None:
    taking, flags = _options(True), _options(False)
    assert len(taking) + len(flags) == len(submit.WITH_VALUE | submit.WITHOUT)
    assert all(option.takes_value and option.bare is None for option in taking)
    assert not any(option.takes_value for option in flags)
    assert {option.use for option in (*taking, *flags)} <= {Use.JOB, Use.COMMAND}
    assert sorted(option.short for option in taking if option.short) == sorted(submit.LETTERS_WITH_VALUE)
    assert sorted(option.short for option in flags if option.short) == sorted(submit.LETTERS_WITHOUT)


@pytest.mark.parametrize(
    ("argv", "end"),
    [
        ([], 0),
        (["job.sh", "-N2"], 0),
        (["-N", "2", "job.sh"], 2),
        (["-N2", "-HQ", "--mem=4G", "--time", "5", "job.sh", "x"], 5),
        (["-HN", "2", "job.sh"], 2),
        (["--", "-odd.sh"], 1),
        (["-", "x"], 0),
        (["-N"], None),
        (["--nodes"], None),
        (["--wait", "job.sh"], None),
        (["--part=x", "job.sh"], None),
        (["-W"], None),
        (["-s", "job.sh"], None),
        (["--nonsense"], None),
    ],
)
def test_the_options_end_before_the_script(argv: list[str], end: int | None) -> None:
    assert submit.options_end(argv) == end


def test_words_script_and_environment_go_to_the_controller(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "env")
    assert submit.start("hsub", ["-A", "mine", "job.sh", "a b"], by_whole) == 0
    assert capsys.readouterr() == ("Submitted batch job 5\n", "")
    (body,) = api.requests("POST /v1/submit")
    assert len(body["request_id"]) == 32
    read = read_remote(words_from_json(body["words"]), 0.0)
    job = spec_to_json(read.built.spec)
    assert (job["script"], job["script_args"], job["name"]) == (SCRIPT, ["a b"], "job.sh")
    assert (job["nodes_min"], job["partition"], job["account"]) == (2, "env", "mine")
    assert (job["work_dir"], job["submit_line"]) == (str(tmp_path), "hsub -A mine job.sh 'a b'")
    assert job["script_path"] == str(tmp_path / "job.sh")
    assert read.built.notes == ("line 4 of the script is not read: it stands behind a command",)


@pytest.mark.parametrize(
    ("manners", "out", "err"),
    [
        ({"parsable": True}, "5\n", ""),
        ({"quiet": True, "verbose": True}, "", ""),
        ({"verbose": True}, "Submitted batch job 5\n", "hsub: a note\n"),
    ],
)
def test_it_answers_as_the_options_of_all_places_ask(
    manners: dict[str, bool], out: str, err: str, api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    api.answers["POST /v1/submit"] = {**ACCEPTED, "manners": PLAIN | manners}
    assert submit.start("hsub", ["job.sh"], by_whole) == 0
    assert capsys.readouterr() == (out, err)


def test_what_the_controller_refuses_the_whole_command_does_with_the_script_that_was_read(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    api.answers["POST /v1/submit"] = [
        (400, {"error": "cannot submit: the body must be", "kind": "RequestError"}),
        ACCEPTED,
    ]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(SCRIPT.encode())))
    assert submit.main(["--mem=1G"]) == 0
    assert capsys.readouterr().out == "Submitted batch job 5\n"
    (job,) = api.requests("POST /v1/submit")[-1]["jobs"]
    assert (job["script"], job["mem_per_node_mib"]) == (SCRIPT, 1024)


@pytest.mark.parametrize("argv", [["none.sh"], ["."], ["latin.sh"], ["--help"], ["--wrap", "true", "job.sh"]])
def test_what_is_not_plain_is_for_the_whole_command(argv: list[str], api: FakeApi, tmp_path: Path) -> None:
    (tmp_path / "latin.sh").write_bytes(b"#!/bin/sh\n# \xe9\n")
    assert submit.start("hsub", argv, by_whole) == 77
    assert api.asked == []


def test_a_lost_answer_may_be_a_job_so_it_is_not_submitted_otherwise(
    api: FakeApi, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcsched.client.RETRY_S", -1.0)
    api.answers["POST /v1/submit"] = [None]
    assert submit.start("hsub", ["job.sh"], by_whole) == 1
    request_id = api.requests("POST /v1/submit")[0]["request_id"]
    assert f"add --request-id={request_id}" in capsys.readouterr().err


def test_without_a_controller_the_whole_command_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HPCSCHED_API", str(tmp_path / "none"))
    assert submit.main(["job.sh"]) == 1
    assert capsys.readouterr().err.startswith("hsub: error: Unable to contact hpcsched controller")
