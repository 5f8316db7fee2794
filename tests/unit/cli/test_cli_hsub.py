"""hsub: what it sends, what it prints, how it waits and what it refuses."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_api import FakeApi, ended, running, task

from hpcsched.cli import hsub
from hpcsched.cli import hsub as hsubeach
from hpcsched.jobscript.options import OPTIONS
from hpcsched.model.codec import spec_from_json

SCRIPT = "#!/bin/sh\n#SBATCH --nodes=2\n#HSUB -J fromscript\ntrue\n#SBATCH --time=5\n"
ACCEPTED = {"jobs": [{"job_id": 5, "tasks": 1}], "notes": []}


@pytest.fixture(autouse=True)
def _plain(api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    api.answers["POST /v1/submit"] = ACCEPTED
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.sh").write_text(SCRIPT)


def sent(api: FakeApi) -> dict[str, Any]:
    """Return the one job of the last submission."""
    (job,) = api.requests("POST /v1/submit")[-1]["jobs"]
    spec_from_json(job)  # must be what the controller takes
    return job


def test_a_script_is_sent_with_all_that_was_said(
    api: FakeApi, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "env")
    monkeypatch.setenv("SBATCH_ACCOUNT", "env")
    assert hsub.main(["-A", "mine", "job.sh", "--nodes=9", "a b"]) == 0
    assert capsys.readouterr() == ("Submitted batch job 5\n", "")
    job = sent(api)
    assert (job["script"], job["script_args"], job["name"]) == (SCRIPT, ["--nodes=9", "a b"], "fromscript")
    assert job["script_path"] == str(tmp_path / "job.sh")
    assert (job["nodes_min"], job["partition"], job["account"]) == (2, "env", "mine")
    assert (job["work_dir"], job["submit_line"]) == (str(tmp_path), "hsub -A mine job.sh --nodes=9 'a b'")
    assert len(api.requests("POST /v1/submit")[0]["request_id"]) == 32


def test_standard_input_and_wrap_make_scripts(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    for argv in ([], ["/dev/stdin"], ["-"]):
        stdin = io.TextIOWrapper(io.BytesIO(b"#!/bin/sh\ncat\n"))
        monkeypatch.setattr(sys, "stdin", stdin)
        assert hsub.main(argv) == 0
        assert (sent(api)["script"], sent(api)["name"]) == ("#!/bin/sh\ncat\n", "sbatch")
    assert hsub.main(["--wrap", "echo $x"]) == 0
    assert sent(api)["name"] == "wrap"
    assert sent(api)["script"].endswith("\necho $x\n")


@pytest.mark.parametrize(
    ("argv", "printed"),
    [(["--parsable"], "5\n"), (["-Q"], ""), (["--json"], json.dumps({"version": 1, **ACCEPTED}) + "\n")],
)
def test_what_is_printed_can_be_chosen(argv: list[str], printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert hsub.main([*argv, "job.sh"]) == 0
    assert capsys.readouterr() == (printed, "")


def test_notes_are_for_verbose_and_terminals_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert hsub.main(["-v", "--wckey=x", "job.sh"]) == 0
    said = capsys.readouterr()
    assert said.out == "Submitted batch job 5\n"
    assert "--wckey has no effect" in said.err
    assert "line 5 of the script is ignored" in said.err


def test_test_only_says_when_and_where_as_sbatch_does(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    place = {
        "job_id": 7,
        "nodes": ["n1", "n2"],
        "node_list": "n[1-2]",
        "cpus": 4,
        "partition": "main",
        "text": "",
        "reason": "",
    }
    api.answers["POST /v1/test"] = place | {"start_s": 1800000000.0}
    assert hsub.main(["--test-only", "job.sh"]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(
        r"hsub: Job 7 to start at 20\d\d-\d\d-\d\dT[\d:]{8} using 4 processors on nodes n\[1-2\] in partition main\n",
        said.err,
    )
    api.answers["POST /v1/test"] = place | {"start_s": None, "text": "would wait in partition main (JobHeldUser): held"}
    assert hsub.main(["--test-only", "job.sh"]) == 0
    assert capsys.readouterr().err == "hsub: Job 7 would wait in partition main (JobHeldUser): held\n"
    assert not api.requests("POST /v1/submit")


def test_dry_run_sends_nothing_and_prints_the_request(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    assert hsub.main(["--dry-run", "job.sh"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["version"], shown["job"]["name"]) == (1, "fromscript")
    assert {field.name for field in dataclasses.fields(spec_from_json(shown["job"]))} == set(shown["job"])
    assert api.asked == []


@pytest.mark.parametrize(
    ("argv", "status", "says"),
    [
        (["--nodse=2", "job.sh"], 2, "did you mean --nodes"),
        (["--nodes"], 2, "without a value"),
        (["--wrap", "x", "job.sh"], 2, "beside --wrap"),
        (["--wrap", " "], 1, "cannot submit: the command of --wrap is empty"),
        (["none.sh"], 1, "cannot read script none.sh: No such file or directory"),
        (["."], 1, "cannot read script .: Is a directory"),
        (["bad.sh"], 1, "This does not look like a batch script"),
        (["latin.sh"], 1, "line 2 is not UTF-8"),
        (["typo.sh"], 1, "line 2 of the script"),
        (["huge.sh"], 1, "the most is"),
    ],
)
def test_what_cannot_be_is_refused_before_it_is_sent(
    argv: list[str], status: int, says: str, api: FakeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.sh").write_text("echo hello\n")
    (tmp_path / "latin.sh").write_bytes(b"#!/bin/sh\n# \xe9\n")
    (tmp_path / "typo.sh").write_text("#!/bin/sh\n#SBATCH --tiem=5\n")
    (tmp_path / "huge.sh").write_bytes(b"#!/bin/sh\n" + b"#" * (5 << 20))
    assert hsub.main(argv) == status
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("hsub: error: ")
    assert said.err.count("\n") == 1
    assert says in said.err
    assert api.asked == []


def test_g5_a_lost_answer_is_asked_for_again_with_the_same_id(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    api.answers["POST /v1/submit"] = [None, ACCEPTED]
    assert hsub.main(["job.sh"]) == 0
    assert capsys.readouterr() == ("Submitted batch job 5\n", "")
    first, second = api.requests("POST /v1/submit")
    assert first == second


def test_if_no_answer_comes_the_way_to_submit_once_is_said(
    api: FakeApi, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcsched.client.protocol.RETRY_S", -1.0)
    api.answers["POST /v1/submit"] = [None]
    assert hsub.main(["job.sh"]) == 1
    request_id = api.requests("POST /v1/submit")[0]["request_id"]
    assert f"add --request-id={request_id}" in capsys.readouterr().err
    assert hsub.main(["--request-id=" + request_id, "job.sh"]) == 1
    assert api.requests("POST /v1/submit")[-1]["request_id"] == request_id


def test_wait_ends_with_the_job_and_its_exit_code(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    api.answers["GET /v1/jobs"] = [{"jobs": [running(5)]}, None, {"jobs": [ended(5, exit_code=7)]}]
    assert hsub.main(["--wait", "job.sh"]) == 7
    assert capsys.readouterr() == ("Submitted batch job 5\n", "")


def test_wait_for_an_array_is_for_its_worst_task(api: FakeApi) -> None:
    over = {"state": "COMPLETED", "exit_code": 0}
    tasks = [task(5, 0, **over), task(5, 1, state="FAILED", exit_signal=9, exit_code=0), task(5, 2, **over)]
    api.answers["GET /v1/jobs"] = (404, {"error": "Invalid job id specified: 5", "kind": "NotFoundError"})
    api.answers["GET /v1/job/5"] = {"jobs": tasks}
    assert hsub.main(["-W", "job.sh"]) == 137


def test_a_job_that_ended_badly_without_a_code_fails_the_wait(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    gone = ended(5, state="CANCELLED", exit_code=None, exit_signal=None, reason_detail="cancelled by ann")
    api.answers["GET /v1/jobs"] = {"jobs": [gone]}
    assert hsub.main(["--wait", "job.sh"]) == 1
    assert "job 5 ended as CANCELLED: cancelled by ann" in capsys.readouterr().err
    api.answers["GET /v1/jobs"] = {"jobs": [gone | {"state": "TIMEOUT", "reason_detail": ""}]}
    assert hsub.main(["--wait", "job.sh"]) == 1
    assert capsys.readouterr().err.endswith("job 5 ended as TIMEOUT\n")


@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ({"reason_detail": "cannot enter /x", "started_at_s": None, "exit_code": 1}, 1, "FAILED: cannot enter /x"),
        (
            {"state": "OUT_OF_MEMORY", "reason_detail": "had 2G of 1G", "exit_signal": 9},
            137,
            "OUT_OF_MEMORY: had 2G of 1G",
        ),
    ],
)
def test_the_wait_says_what_an_exit_code_does_not(
    api: FakeApi, capsys: pytest.CaptureFixture[str], how: dict[str, Any], status: int, said: str
) -> None:
    api.answers["GET /v1/jobs"] = {"jobs": [ended(5) | how]}
    assert hsub.main(["--wait", "job.sh"]) == status
    assert capsys.readouterr().err == f"hsub: error: job 5 ended as {said}\n"


def test_help_has_all_options_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert hsub.main(["--help"]) == 0
    text = capsys.readouterr().out
    for option in OPTIONS:
        assert f"  {option.spelling}" in text


def _scripts(tmp_path: Path, count: int) -> list[str]:
    names = [f"s{number}.sh" for number in range(count)]
    for name in names:
        (tmp_path / name).write_text(f"#!/bin/sh\n#SBATCH -J of_{name}\n")
    return names


def _ids(body: dict[str, Any], given: dict[str, str]) -> dict[str, Any]:
    """Answer with an id for each job: that of its script's number."""
    numbers = [int(job["name"].removeprefix("of_s").removesuffix(".sh")) for job in body["jobs"]]
    return {"jobs": [{"job_id": 10 + number, "tasks": 1} for number in numbers], "notes": []}


def test_many_scripts_go_in_parts_each_with_a_request_id_of_its_own(
    api: FakeApi, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hsubeach, "PART_JOBS", 2)
    names = _scripts(tmp_path, 5)
    api.answers["POST /v1/submit"] = [_ids, None, _ids, _ids]  # the second part's first answer is lost
    assert hsub.main(["--parsable", "--request-id=mine", "--each", *names]) == 0
    assert capsys.readouterr() == ("10\n11\n12\n13\n14\n", "")
    parts = api.requests("POST /v1/submit")
    assert [part["request_id"] for part in parts] == ["mine.0", "mine.1", "mine.1", "mine.2"]
    assert [len(part["jobs"]) for part in parts] == [2, 2, 2, 1]
    assert parts[-1]["jobs"][0]["submit_line"] == "hsub --parsable --request-id=mine --each s4.sh"


def test_of_many_scripts_the_refused_one_is_named_with_what_is_queued_and_what_to_do(
    api: FakeApi, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hsubeach, "PART_JOBS", 2)
    names = _scripts(tmp_path, 5)
    api.answers["POST /v1/submit"] = [_ids, (400, {"error": "cannot do it", "kind": "RequestError", "at": 1})]
    assert hsub.main(["--request-id=mine", "--each", *names]) == 1
    assert capsys.readouterr() == (
        "Submitted batch job 10\nSubmitted batch job 11\n",
        "hsub: error: s3.sh: cannot do it; the first 2 of 5 scripts are in the queue: to submit the others, and none twice, "
        "add --request-id=mine\n",
    )


@pytest.mark.parametrize(
    ("argv", "status", "why"),
    [
        (["--each"], 2, "cannot submit each of no scripts"),
        (["--each", "s0.sh", "-"], 2, "cannot read a script from standard input"),
        (["--each", "--dry-run", "s0.sh"], 2, "cannot take --dry-run"),
        (["--each", "--wrap", "true", "s0.sh"], 2, "beside --wrap"),
        (["--each", "s0.sh", "none.sh"], 1, "none.sh: cannot read script none.sh"),
        (["--each", "s0.sh", "bad.sh"], 1, "bad.sh: "),
    ],
)
def test_nothing_is_submitted_before_all_scripts_have_been_read(
    api: FakeApi, capsys: pytest.CaptureFixture[str], tmp_path: Path, argv: list[str], status: int, why: str
) -> None:
    _scripts(tmp_path, 1)
    (tmp_path / "bad.sh").write_text("#!/bin/sh\n#SBATCH --nodes=many\n")
    assert hsub.main(argv) == status
    assert why in capsys.readouterr().err
    assert api.asked == []


# ----- --serve: the script is a service

SERVED = "#!/bin/sh\n#HSUB --serve=chat --serve-replicas=1-3\n#HSUB --serve-open=account --mem=1G\nserver\n"
STARTED = "Started service chat: 'hserve ls chat' shows when it is ready\n"


def test_a_script_with_serve_starts_a_service_of_its_job_and_submits_none(
    api: FakeApi, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SECRET", "x")
    api.answers["POST /v1/services/start"] = {"service": {}}
    (tmp_path / "serve.sh").write_text(SERVED)
    assert hsub.main(["serve.sh"]) == 0
    assert capsys.readouterr() == (STARTED, "")
    (body,) = api.requests("POST /v1/services/start")
    spec = spec_from_json(body.pop("job"))
    assert body == {
        "name": "chat", "model": str(tmp_path / "serve.sh"), "least": 1, "most": 3, "audience": "account",
    }  # fmt: skip
    assert (spec.name, spec.script, spec.mem_per_node_mib) == ("chat", SERVED, 1024)
    assert "PATH" in dict(spec.env)
    assert "SECRET" not in dict(spec.env)  # the service is kept for a long time
    assert api.requests("POST /v1/submit") == []
    assert hsub.main(["--export=ALL", "-J", "mine", "serve.sh"]) == 0
    spec = spec_from_json(api.requests("POST /v1/services/start")[-1]["job"])
    assert (spec.name, dict(spec.env)["SECRET"]) == ("mine", "x")


@pytest.mark.parametrize(
    ("words", "status", "why"),
    [
        (["--serve=Chat", "job.sh"], 1, "cannot name a service 'Chat'"),
        (["--serve=chat", "--serve-replicas=3-1", "job.sh"], 1, "cannot use 3-1 replicas"),
        (["--serve=chat", "--wait", "job.sh"], 2, "cannot take --wait with --serve"),
        (["--serve=chat", "--each", "job.sh"], 1, "cannot take --serve with --each"),
    ],
    ids=str,
)
def test_serve_with_what_a_service_cannot_have_is_refused(
    api: FakeApi, capsys: pytest.CaptureFixture[str], words: list[str], status: int, why: str
) -> None:
    assert hsub.main(words) == status
    assert why in capsys.readouterr().err
    assert api.asked == []
