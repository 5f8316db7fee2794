"""The words of a command, read by the controller: the same job, text and status as in the command's own process."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))

from conftest_api import api  # noqa: E402, F401
from fake_api import FakeApi, queue_answer, running, task  # noqa: E402

from hpcsched.api import command, web  # noqa: E402
from hpcsched.auth.authorize import Identity, Role  # noqa: E402
from hpcsched.cli import hcancel, hqueue, hsub, thin  # noqa: E402
from hpcsched.commands.call import OwnProcessError  # noqa: E402
from hpcsched.errors import NotFoundError, RequestError  # noqa: E402
from hpcsched.model.codec import spec_to_json  # noqa: E402
from hpcsched.model.spec import JobSpec  # noqa: E402

WHOLE = {
    "hsub": hsub.main, "sbatch": hsub.sbatch, "hqueue": hqueue.main, "squeue": hqueue.squeue, "hcancel": hcancel.main,
    "scancel": hcancel.scancel,
}  # fmt: skip
ACCEPTED = {"version": 1, "jobs": [{"job_id": 5, "tasks": 1}], "notes": []}
JOBS = [running(), *[task(20, index) for index in (1, 2)]]
REFUSED = [
    {"job": "77", "error": "Invalid job id specified: 77", "kind": "NotFoundError"},
    {"job": "8", "error": "cannot cancel job 8: it belongs to eve", "kind": "PermissionDeniedError"},
]
ME = Identity(uid=os.getuid(), user="root" if os.getuid() == 0 else str(os.getuid()), role=Role.USER)
Done = tuple[int, str, str, Any]


class Inside:
    """The controller's side: the routes of the fake API, and submissions that are kept."""

    def __init__(self, fake: FakeApi) -> None:
        self.fake = fake
        self.jobs: list[Any] = []

    def find(self, request: web.Request) -> web.Handler:
        async def handle(asked: web.Request) -> web.Response:
            answer = self.fake.answers.get(
                f"{asked.method} {asked.path}", (404, {"error": "none", "kind": "NotFoundError"})
            )
            found = answer(json.loads(asked.body or b"{}"), asked.query) if callable(answer) else answer
            if isinstance(found, bytes):
                return web.Response(found.partition(b"\r\n\r\n")[2])
            status, body = found if isinstance(found, tuple) else (200, found)
            return web.Response(json.dumps({"version": 1, **body}).encode(), status)

        return handle

    async def submit(self, request_id: str, spec: JobSpec) -> dict[str, Any]:
        assert len(request_id) == 32
        if spec.name == "refused":
            raise RequestError("cannot run the job in partition 'main': Invalid qos specification")
        self.jobs.append(spec_to_json(spec))
        return ACCEPTED

    def job_id_of(self, reference: str) -> int:
        if reference != "last":
            raise NotFoundError(f"Invalid job id specified: {reference}")
        return 4


@pytest.fixture
def place(api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeApi:  # noqa: F811
    """A directory with scripts in it, and an API that takes everything but jobs called ``refused``."""

    def submitted(body: dict[str, Any], _query: object) -> Any:
        if body["jobs"][0]["name"] == "refused":
            return 400, {
                "error": "cannot run the job in partition 'main': Invalid qos specification",
                "kind": "RequestError",
            }
        return ACCEPTED

    api.answers |= {
        "POST /v1/submit": submitted,
        "POST /v1/cancel": {"jobs": ["11"], "errors": REFUSED, "without_steps": ["11"]},
        "GET /v1/ping": {"cluster": "lab"},
        "GET /v1/queue": queue_answer(*JOBS),
        "GET /v1/job/11": {"now_s": 1_800_000_000.0, "jobs": [running()]},
        "GET /v1/job/last": {"jobs": [{"array_job_id": None, "id": 4}]},
        "GET /v1/job/none": (404, {"error": "Invalid job id specified: none", "kind": "NotFoundError"}),
    }
    monkeypatch.chdir(tmp_path)
    for name, text in SCRIPTS.items():
        (tmp_path / name).write_text(text)
    for variable in ("LC_ALL", "LANG", "LC_CTYPE"):
        monkeypatch.setenv(variable, "C.UTF-8")
    return api


SCRIPTS = {
    "job.sh": "#!/bin/sh\n#SBATCH --nodes=2\n#HSUB -J fromscript\ntrue\n#SBATCH --time=5\n",
    "name with ünicode": "#!/bin/bash\n# ä\n#SBTACH -N2\necho ☃\n",
    "pbs.sh": "#!/bin/sh\n#PBS -l nodes=2:ppn=4,walltime=10:00\n#PBS -N pbs\ntrue\n",
    "het.sh": "#!/bin/sh\n#SBATCH -N2\n#SBATCH hetjob\n#SBATCH -n4\ntrue\n",
    "quiet.sh": "#!/bin/sh\n#HSUB --quiet --parsable\ntrue\n",
    "wrong.sh": "#!/bin/sh\n#SBATCH --nodes=two\ntrue\n",
    "wait.sh": "#!/bin/sh\n#SBATCH --begin=16:00\ntrue\n",
    "nobang.sh": "echo\n",
    "dos.sh": "#!/bin/sh\r\ntrue\r\n",
    "empty.sh": "",
}
STDIN = "#!/bin/sh\n#SBATCH -J piped\ncat\n"
POOL = [
    *SCRIPTS, "missing.sh", ".", "-N2", "-N", "2", "--nodes=1-3", "-n4", "-c", "3", "--mem=4G", "--mem-per-cpu=1G", "-t", "5",
    "--time=1:30:00", "-J", "näme", "--job-name=refused", "--array=0-9%2", "-a", "1-3", "-o", "%x-%j.out", "--export=NONE",
    "--export=A,B=c", "-d", "afterok:5", "-d", "afterok:last", "-d", "afterok:none", "--wrap", "echo hi", "--wrap=", "arg",
    "--parsable", "-Q", "-v", "--json", "-H", "--nonsense", "--part=x", "--ti=5", ":", "--", "-", "--gres=gpu:2", "-M", "lab",
    "--clusters=other", "--comment=\x01", "--gpus=2", "--cpus-per-gpu=2", "--mail-type=END", "--signal=B:USR1@600", "-HQ",
    "--propagate=NOFILE", "--switches=2@10", "-D", "/x", "-e", "err", "--qos", "q", "-A", "a", "-p", "b", "-x", "n[1-3]",
    "--chdir=sub", "--exclusive", "--exclusive=user", "--requeue", "--no-requeue", "--uid=5", "--licenses=a:2", "--nice", "",
]  # fmt: skip
ALONE = [
    "--wait",
    "--help",
    "--version",
    "--usage",
    "--test-only",
    "--begin=now",
    "--each",
    "--serve=chat",
    "--dry-run",
    "--deadline=16:00",
]


def by_itself(name: str, argv: Sequence[str], capsys: pytest.CaptureFixture[str], fake: FakeApi) -> Done:
    """Run the command in this process; return status, both texts, and the job that it submitted."""
    before = len(fake.asked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(STDIN.encode())))
        status = WHOLE[name](list(argv))
    said = capsys.readouterr()
    jobs = [body["jobs"][0] for route, _, body in fake.asked[before:] if route == "POST /v1/submit"]
    return status, said.out, said.err, [one for one in jobs if one["name"] != "refused"]


def by_controller(name: str, argv: Sequence[str], fake: FakeApi, /, **changes: Any) -> Done | None:
    """Send the words as a thin client does; return the same, None: the whole command has to do it."""
    inside = Inside(fake)
    script = thin._guess(argv) if name in ("hsub", "sbatch") else {}
    for _ in range(2):
        body = {**thin._facts(name, argv), "request_id": "0" * 32, **script, **changes}
        asked = web.Request("POST", "/v1/command", {}, {}, b"", peer=None, uid=ME.uid)
        routed = command.Routed(asked, inside.find, inside.submit, inside.job_id_of)
        try:
            words = command.read_words(json.loads(json.dumps(body)))
            said = asyncio.run(command.answer(words, ME, routed))
        except OwnProcessError:
            return None
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            status, wanted = thin._handle(said)
        if wanted is None:
            return None if status == thin._PYTHON else (status, out.getvalue(), err.getvalue(), inside.jobs)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(STDIN.encode())))
            script = thin._script(argv, wanted)
        if not script:
            return None
    return None


@pytest.mark.parametrize("name", ["hsub", "sbatch"])
@settings(max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(st.sampled_from(POOL), max_size=6), script=st.sampled_from([*SCRIPTS, ""]))
def test_a_submission_is_the_same_by_either_way(
    name: str, words: list[str], script: str, place: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*words, *([script] if script else [])]
    done = by_controller(name, argv, place)
    if done is not None:
        assert done == by_itself(name, argv, capsys, place)


@pytest.mark.parametrize("name", ["hsub", "sbatch"])
@pytest.mark.parametrize(
    "argv",
    [["job.sh"], ["-N2", "--mem=4G", "job.sh", "a b"], ["--wrap", "true"], ["het.sh"], ["pbs.sh"], ["wrong.sh"], ["--nonsense"],
     ["quiet.sh"], [], ["-"], ["-N1", ":", "-n4", "job.sh"], ["-d", "afterok:last", "job.sh"], ["-o", "job.sh", "pbs.sh"],
     ["--json", "job.sh"], ["-v", "name with ünicode"], ["-J", "refused", "job.sh"], ["empty.sh"], ["dos.sh"]],
)  # fmt: skip
def test_the_controller_takes_what_is_common(
    name: str, argv: list[str], place: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    assert by_controller(name, argv, place) == by_itself(name, argv, capsys, place)


@pytest.mark.parametrize("name", ["hsub", "sbatch"])
@pytest.mark.parametrize("option", ALONE)
def test_what_needs_the_command_itself_is_left_to_it(name: str, option: str, place: FakeApi) -> None:
    assert by_controller(name, [option], place) is None
    assert by_controller(name, ["wait.sh"], place) is None
    assert by_controller(name, ["missing.sh"], place) is None


QUEUE = [[], ["-a"], ["-l"], ["-h"], ["11"], ["none"], ["-q"], ["--me"], ["-u", "ann,nobody-has-this"], ["-o", "id,name"],
         ["-o", "%i"], ["-O", "JobID"], ["-t", "R"], ["-t", "wrong"], ["--start"], ["--nonsense"], ["-r"],
         ["-p", "a,b", "-n", "x"], ["-w", "n[1-2]"]]  # fmt: skip


@pytest.mark.parametrize("name", ["hqueue", "squeue"])
@pytest.mark.parametrize("argv", QUEUE)
def test_the_queue_is_the_same_by_either_way(
    name: str, argv: list[str], place: FakeApi, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQUEUE_SORT", "-i")
    assert by_controller(name, argv, place) == by_itself(name, argv, capsys, place)


@pytest.mark.parametrize("name", ["hcancel", "scancel"])
@pytest.mark.parametrize(
    "argv",
    [["11"], ["11,77", "8"], ["-v", "11"], ["-Q", "77"], ["--me"], ["-s", "USR1", "11"], ["-s", "WRONG", "11"], [], ["-b", "11"],
     ["-w", "n[1-2]"], ["-t", "PD"], ["--nonsense"], ["-M", "other", "11"]],
)  # fmt: skip
def test_a_cancellation_is_the_same_by_either_way(
    name: str, argv: list[str], place: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    assert by_controller(name, argv, place) == by_itself(name, argv, capsys, place)


@pytest.mark.parametrize(
    ("name", "argv"),
    [("hqueue", ["--json"]), ("hqueue", ["--watch"]), ("squeue", ["--steps"]), ("squeue", ["-i", "5"]), ("hcancel", ["-i", "11"]),
     ("squeue", ["--usage"]), ("squeue", ["-u", ",".join("abcdefghij")])],
)  # fmt: skip
def test_files_terminals_and_many_accounts_are_left_to_the_command(name: str, argv: list[str], place: FakeApi) -> None:
    assert by_controller(name, argv, place) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"argv": ["x"] * (command.MAX_WORDS + 1)},
        {"argv": ["x" * (command.MAX_WORD_CHARS + 1)]},
        {"environ": ["A=1"] * (command.MAX_VARIABLES + 1)},
        {"script": "#!/bin/sh\n" + "#SBTACH -N2\n" * (command.MAX_COMMENTS + 1), "script_at": 0},
        {"script": "x" * (command.MAX_SCRIPT_CHARS + 1), "script_at": 0},
        {"environ": ["LANG=de_DE.ISO-8859-1"]},
        {"environ": ["LANG=C", "PYTHONIOENCODING=latin-1"]},
    ],
)
def test_what_takes_long_or_another_encoding_is_left_to_the_command(changes: dict[str, Any], place: FakeApi) -> None:
    assert by_controller("hsub", ["job.sh"], place, **changes) is None


def test_the_longest_words_and_script_that_are_read_take_little_time(place: FakeApi) -> None:
    script = "#!/bin/sh\n" + "#SBTACH -N2\n" * (command.MAX_COMMENTS - 1)
    started_s = time.process_time()
    done = by_controller("hsub", ["--comment=" + "x" * 3000, "job.sh"], place, script=script, script_at=1)
    assert done is not None
    assert time.process_time() - started_s < 0.5


@pytest.mark.parametrize(
    "changes",
    [
        {"uid": 0},
        {"argv": "job.sh"},
        {"argv": [1]},
        {"environ": {"A": "1"}},
        {"script": 1, "script_at": 0},
        {"script_at": 0},
        {"script": "x"},
        {"script": "x", "script_at": "0"},
        {"work_dir": None},
        {"width": True},
        {"out_is_terminal": 1},
        {"command": 5},
        {"command": "hctl"},
    ],
)
def test_what_are_no_words_is_refused(changes: dict[str, Any], place: FakeApi) -> None:
    with pytest.raises(RequestError, match="cannot run the command"):
        by_controller("hqueue", [], place, **changes)


def test_a_variable_that_is_there_twice_is_the_first(place: FakeApi) -> None:
    facts = thin._facts("hqueue", [])
    facts["environ"] = ["A=1", "no variable", "A=2", "B="]
    words = command.read_words({**facts, "request_id": ""})
    assert words.environ == {"A": "1", "B": ""}


@pytest.mark.parametrize(
    ("environ", "shown"),
    [({}, True), ({"LANG": "de_DE.utf8"}, True), ({"LANG": "C.UTF-8@x"}, True), ({"LANG": "de_DE"}, False),
     ({"LANG": "C.UTF-8", "LC_ALL": "POSIX"}, True), ({"LC_CTYPE": "ru_RU.KOI8-R", "LANG": "C"}, False)],
)  # fmt: skip
def test_the_locale_says_whether_output_is_utf8(environ: dict[str, str], shown: bool) -> None:
    assert command.can_show(environ) is shown


def test_local_times_are_the_callers(place: FakeApi) -> None:
    assert by_controller("hqueue", ["11"], place, utc_offset_s=12345) is None
    assert by_controller("hqueue", [], place, utc_offset_s=12345) is not None
