"""What hqueue, hinfo, hacct, hctl and hwhy ask for, what they refuse, and how they look on a terminal."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from typing import Any

import pytest
from fake_api import NOW_S, FakeApi, ended, job, node, partition, queue_answer, running, task
from waiting import wait_until

from hpcsched import client
from hpcsched.cli import hacct, hctl, hinfo, hqueue, hwhy
from hpcsched.cli.slurm import sreport
from hpcsched.commands import queue
from hpcsched.errors import UsageError

ME = client.my_name()
LAYOUT = {"format", "long", "order", "array", "noheader", "fit", "colour", "others", "ended", "fold"}


@pytest.mark.parametrize(
    ("argv", "asked"),
    [
        ([], {"whose": "default"}),
        (["--me"], {"user": ME}),
        (["-a"], {}),
        (["-a", "-A", "phys", "-w", "n[1-2]", "-R", "r"], {"account": "phys", "nodes": "n[1-2]", "reservation": "r"}),
        (["-a", "--start"], {"expected": "1"}),
        (["-u", "ann,bob"], {"user": "ann,bob"}),
        (["-u", "ann", "--me"], {"user": f"ann,{ME}"}),
        (["-j", "12,10_[1,3]", "-h"], {"id": "12,10_[1,3]"}),
        (["12", "13"], {"id": "12,13"}),
        (["12", "-o", "%i"], {"id": "12"}),
        (
            ["-t", "PD,cg", "-p", "a,b", "-n", "x"],
            {"whose": "default", "state": "PENDING,COMPLETING", "partition": "a,b", "name": "x"},
        ),
        (["-t", "all"], {"whose": "default"}),
    ],
)
def test_hqueue_asks_for_the_jobs_that_are_meant(argv: list[str], asked: dict[str, str], api: FakeApi) -> None:
    api.answers |= {"GET /v1/jobs": {"now_s": NOW_S, "jobs": []}, "GET /v1/queue": queue_answer()}
    for route, more in (("GET /v1/queue", []), ("GET /v1/jobs", ["--json"])):
        assert hqueue.main([*argv, *more]) == 0
        filters = {name: value for name, value in api.parameters(route).items() if name not in LAYOUT}
        assert filters == {"strict": "1", "state": "ALL", **asked}


@pytest.mark.parametrize(
    ("argv", "asked"),
    [
        ([], {"ended": "1", "others": "1", "format": queue.DEFAULT_COLUMNS, "order": "phase", "fit": "1", "fold": "1"}),
        (["-l"], {"ended": "1", "others": "1", "format": queue.LONG_COLUMNS, "order": "phase", "fit": "1", "fold": "1"}),
        (["--start"], {"format": queue.START_COLUMNS, "order": "phase", "fit": "1", "fold": "1"}),
        (["-r", "-S", "-time,id"],
         {"ended": "1", "format": queue.DEFAULT_COLUMNS, "order": "-time,id,phase", "fit": "1", "fold": "1", "array": "1"}),
        (["-O", "JobID:8"], {"format": "JobID:8", "order": "phase", "fit": "1", "fold": "1", "long": "1"}),
        (["-q"], {"format": "%i", "order": "phase", "fit": "1", "fold": "1", "array": "1", "noheader": "1"}),
    ],
)  # fmt: skip
def test_hqueue_asks_for_its_layout(argv: list[str], asked: dict[str, str], api: FakeApi) -> None:
    api.answers["GET /v1/queue"] = queue_answer()
    assert hqueue.main(argv) == 0
    assert {name: value for name, value in api.parameters("GET /v1/queue").items() if name in LAYOUT} == asked


@pytest.mark.parametrize(
    ("argv", "state"),
    [
        ([], "ALL"),
        (["-a"], "ALL"),
        (["-h"], None),
        (["-q"], None),
        (["-o", "id"], None),
        (["-h", "-a"], "ALL"),
        (["-t", "CD", "-q"], "COMPLETED"),
    ],
)  # fmt: skip
def test_what_is_for_programs_has_ended_jobs_only_if_asked(argv: list[str], state: str | None, api: FakeApi) -> None:
    api.answers["GET /v1/queue"] = queue_answer()
    assert hqueue.main(argv) == 0
    asked = api.parameters("GET /v1/queue")
    assert asked.get("state") == state
    if state is None:
        assert not {"ended", "others"} & set(asked)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["-o", "id,nmae"], "did you mean name?"),
        (["-o", "%i %"], "cannot show column '%'"),
        (["-o", "%é"], "cannot show column"),
        (["-S", "nope"], "Invalid sort specification: nope; write squeue's letters or columns"),
    ],
)
def test_columns_that_there_are_not_are_refused_by_the_controller(
    argv: list[str], says: str, api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(body: Any, given: dict[str, str]) -> Any:
        try:
            return queue_answer()(body, given)
        except UsageError as error:
            return 400, {"error": str(error), "kind": "UsageError"}

    api.answers["GET /v1/queue"] = answer
    assert hqueue.main(argv) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "argv", "says"),
    [
        (hqueue.main, ["--staes=all"], "did you mean --states or --"),
        (hqueue.main, ["-t", "XX"], "Invalid job state specified: XX"),
        (hqueue.main, ["--watch=0"], "at least 0.1"),
        (hinfo.main, ["n1"], "write -N -n NODE"),
        (hinfo.main, ["-t", "up"], "Invalid node state specified: up"),
        (hacct.main, ["12"], "write -j JOB"),
        (hacct.main, ["-o", "jobid,elapsd"], "did you mean elapsed"),
        (hacct.main, ["-o", "jobid%x"], "its width must be a number"),
        (hctl.main, [], "cannot tell what to do"),
        (hctl.main, ["shwo", "job"], "did you mean show?"),
        (hctl.main, ["show", "host"], "no such thing to show"),
        (hctl.main, ["drain", "n1"], "give the reason"),
        (hctl.main, ["update", "12"], "name what to change"),
        (hctl.main, ["update", "NodeName=n1", "State=DOWN"], "write State=DRAIN"),
        (hctl.main, ["hold"], "name the jobs"),
        (hwhy.main, [], "name one"),
    ],
)
def test_what_cannot_be_understood_is_refused_with_status_2(
    command: Any, argv: list[str], says: str, api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(argv) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert says in said.err
    assert api.asked == []


def test_no_controller_is_said_by_every_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HPCSCHED_API", "/nowhere/api.sock")
    commands = ((hqueue, []), (hinfo, []), (hacct, []), (hwhy, ["1"]), (hctl, ["ping"]), (hctl, ["show", "job"]))
    for command, argv in commands:
        assert command.main(argv) == 1
        said = capsys.readouterr()
        name = command.COMMAND.name
        assert said.err.startswith(
            f"{name}: error: Unable to contact hpcsched controller (/nowhere/api.sock: No such file"
        )
        assert "'hpcsched up'" in said.err


def test_a_job_is_not_shown_with_its_script(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    api.answers["GET /v1/job/12"] = {"now_s": NOW_S, "jobs": [job() | {"script": "secret", "env": {"PASSWORD": "x"}}]}
    assert hqueue.main(["12", "--json"]) == 0
    assert "secret" not in capsys.readouterr().out
    assert hctl.main(["show", "job", "12", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["jobs"][0]["script"] == "secret"


def test_an_elastic_job_is_shown_with_what_it_was_asked_for(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    asked = running() | {"elastic": [1, 4], "wanted_nodes": ["n1", "n2"]}
    api.answers["GET /v1/job/11"] = {"now_s": NOW_S, "jobs": [asked]}
    assert hctl.main(["-o", "show", "job", "11"]) == 0
    assert " ElasticNodes=1-4 WantedNodes=n[1-2] " in capsys.readouterr().out


def test_an_array_is_a_table_and_its_waiting_tasks_one_line(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    api.answers["GET /v1/job/20"] = {"now_s": NOW_S, "jobs": [task(20, index) for index in (1, 2, 3)]}
    api.answers["GET /v1/queue"] = queue_answer(task(20, 1) | {"folded": "[1-3%2]"})
    assert hqueue.main(["20"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[0] == "20_[1-3%2]"
    assert api.parameters("GET /v1/queue")["id"] == "20"


def test_a_job_whose_node_is_silent_says_so_beside_its_nodes(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [running() | {"reason": "NodeDown", "node_list": "n[1-2]"}, job() | {"reason": "NodeDown"}]
    api.answers["GET /v1/queue"] = queue_answer(*jobs)
    assert hqueue.main(["-o", "where", "--noheader"]) == 0
    assert [line.strip() for line in capsys.readouterr().out.splitlines()[:2]] == ["n[1-2] (NodeDown)", "(NodeDown)"]


def test_hacct_asks_for_arrays_whole_and_keeps_the_tasks_that_are_meant(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = [task(20, index, state="COMPLETED") | {"steps": []} for index in (1, 2, 3, 12)]
    api.answers["GET /v1/history"] = {"now_s": NOW_S, "jobs": tasks}
    assert hacct.main(["-n", "-P", "-o", "jobid", "-j", "20_[2-3]", "--jobs=20_12"]) == 0
    assert capsys.readouterr().out == "20_2\n20_3\n20_12\n"
    assert api.parameters("GET /v1/history") == {"id": "20"}


def test_all_pages_of_the_history_are_read(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    """The controller answers with 10,000 jobs at most, the newest first."""
    ended = {"state": "COMPLETED", "started_at_s": NOW_S - 3600, "ended_at_s": NOW_S - 1800, "steps": []}

    def page(_: dict[str, object], given: dict[str, str]) -> dict[str, object]:
        last = int(given.get("after", 4)) - 1
        more = {"next_cursor": str(last)} if last > 1 else {}
        held = {"node": "n1", "since_s": NOW_S - 3600, "until_s": NOW_S - 1800, "mem_mib": 1, "gpus": 0.0}
        held["cpus"] = job(last)["num_cpus"]
        attempt = {"attempt": 0, "waited_s": 0.0, "allocated_at_s": NOW_S - 3600, "ended_at_s": NOW_S - 1800}
        attempt |= {"requeued": False, "holdings": [held]}
        return {"now_s": NOW_S, "jobs": [job(last) | ended | {"attempts": [attempt]}]} | more

    api.answers["GET /v1/history"] = page
    assert hacct.main(["-n", "-P", "-o", "jobid"]) == 0
    assert capsys.readouterr().out == "1\n2\n3\n"
    api.answers["GET /v1/ping"] = {"cluster": "lab"}
    period = (f"start=uts{NOW_S - 7200:.0f}", f"end=uts{NOW_S:.0f}", "-t", "Seconds", "-nP")
    assert sreport.main(["user", "top", *period]) == 0
    assert f"|{3 * 1800 * job(1)['num_cpus']}" in capsys.readouterr().out


def test_hacct_finds_jobs_by_name_and_times_in_slurms_notations(api: FakeApi) -> None:
    api.answers["GET /v1/jobs"] = {"now_s": NOW_S, "jobs": [job(33)]}
    api.answers["GET /v1/history"] = {"now_s": NOW_S, "jobs": []}
    assert hacct.main(["-j", "train", "-S", "2027-01-15T00:00:00", "-E", "uts1800000000", "-s", "CD,f"]) == 0
    assert api.parameters("GET /v1/history") == {
        "id": "33", "state": "COMPLETED,FAILED", "start_s": str(NOW_S - 8 * 3600), "end_s": str(NOW_S)
    }  # fmt: skip
    api.answers["GET /v1/jobs"] = {"now_s": NOW_S, "jobs": [task(20, 1), task(20, 2)]}
    assert hacct.main(["-j", "last"]) == 0
    assert api.parameters("GET /v1/history") == {"id": "20"}
    assert hacct.main([]) == 0
    assert set(api.parameters("GET /v1/history")) == {"user", "start_s"}


@pytest.mark.parametrize(
    ("argv", "route", "body"),
    [
        (["hold", "12", "10_[1,2],x"], "POST /v1/hold", {"jobs": ["12", "10_[1,2]", "x"]}),
        (
            ["update", "12", "time_limit=1:00:00"],
            "POST /v1/update",
            {"jobs": ["12"], "changes": {"time_limit": "1:00:00"}},
        ),
        (
            ["update", "JobId=12,13", "TimeLimit=5", "Nice=3", "StartTime=now"],
            "POST /v1/update",
            {"jobs": ["12", "13"], "changes": {"time_limit": "5", "nice": "3", "begin": "now"}},
        ),
        (
            ["create", "reservation", "ReservationName=r", "Users=ann", "Duration=2:00:00", "Nodes=n[1-2]"],
            "POST /v1/reservations/create",
            {"name": "r", "changes": {"Users": "ann", "Duration": "2:00:00", "Nodes": "n[1-2]"}},
        ),
        (
            ["update", "ReservationName=r", "Users+=ben", "Flags-=MAINT"],
            "POST /v1/reservations/update",
            {"name": "r", "changes": {"Users+": "ben", "Flags-": "MAINT"}},
        ),
        (["delete", "reservation", "r"], "POST /v1/reservations/delete", {"name": "r"}),
        (["delete", "ReservationName=r"], "POST /v1/reservations/delete", {"name": "r"}),
        (
            ["update", "10_3", "ReservationName="],
            "POST /v1/update",
            {"jobs": ["10_3"], "changes": {"reservation": ""}},
        ),
        (
            ["update", "PartitionName=main", "State=DRAIN"],
            "POST /v1/partitions/update",
            {"name": "main", "state": "DRAIN"},
        ),
        (["drain", "n1", "--reason=fan is loud"], "POST /v1/nodes/drain", {"nodes": "n1", "why": "fan is loud"}),
        (["drain", "n[1-2]", "fan", "is loud"], "POST /v1/nodes/drain", {"nodes": "n[1-2]", "why": "fan is loud"}),
        (["update", "NodeName=n1", "State=drain", "Reason=x"], "POST /v1/nodes/drain", {"nodes": "n1", "why": "x"}),
        (["resume", "n1", "n2"], "POST /v1/nodes/resume", {"nodes": "n1,n2"}),
        (["fence", "n1", "it", "burnt"], "POST /v1/nodes/fence", {"nodes": "n1", "why": "it burnt"}),
        (["reconfigure"], "POST /v1/reconfigure", {}),
        (["reset", "usage", "all"], "POST /v1/usage/reset", {"accounts": [], "users": []}),
        (
            ["reset", "usage", "Account=a,b", "user=ann"],
            "POST /v1/usage/reset",
            {"accounts": ["a", "b"], "users": ["ann"]},
        ),
    ],
)
def test_hctl_sends_what_its_words_say(argv: list[str], route: str, body: dict[str, Any], api: FakeApi) -> None:
    api.answers[route] = {"jobs": [12], "errors": [], "nodes": ["n1"], "changed": [], "name": "r", "reset": []}
    assert hctl.main(argv) == 0
    assert api.requests(route) == [body]


@pytest.mark.parametrize(
    "words", [["usage"], ["all"], ["usage", "all", "User=ann"], ["usage", "User="], ["usage", "ann"]]
)
def test_usage_is_reset_only_by_words_that_are_whole(words: list[str], api: FakeApi) -> None:
    assert hctl.main(["reset", *words]) == 2
    assert api.requests("POST /v1/usage/reset") == []


def test_who_fences_reads_what_was_given_up(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    became = ["job 12 goes back to the queue", "job 13 has ended as NODE_FAIL"]
    api.answers["POST /v1/nodes/fence"] = {"jobs": [12, 13], "errors": [], "became": became}
    assert hctl.main(["fence", "n1", "burnt"]) == 0
    assert capsys.readouterr().out == "n1 fenced; given up on your word, not on proof:\n  " + "\n  ".join(became) + "\n"


RESERVATION = {
    "name": "r", "state": "ACTIVE", "start_s": NOW_S, "end_s": NOW_S + 7200, "duration_s": 7200, "nodes": ["n1", "n2"],
    "node_list": "n[1-2]", "cpus": 16, "node_count": 0, "features": "", "partition": "", "users": ["ann", "ben"],
    "accounts": [], "flags": ["DAILY", "MAINT"], "made_by": "root", "made_at_s": NOW_S, "jobs": [12],
}  # fmt: skip


def test_reservations_are_shown_with_slurm_s_words(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    api.answers["GET /v1/reservations"] = {"now_s": NOW_S, "reservations": [RESERVATION]}
    assert hctl.main(["-o", "show", "reservation", "r"]) == 0
    line = capsys.readouterr().out
    for words in ("ReservationName=r StartTime=", "Duration=02:00:00 Nodes=n[1-2] NodeCnt=2 CoreCnt=16", "Users=ann,ben",
                  "Flags=DAILY,MAINT,SPEC_NODES", "State=ACTIVE"):  # fmt: skip
        assert words in line
    assert hctl.main(["show", "reservation", "q"]) == 1
    assert "Reservation q not found; there are: r" in capsys.readouterr().err
    assert hinfo.main(["-T"]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["RESV_NAME", "STATE", "START_TIME", "END_TIME", "DURATION", "NODELIST"]
    assert row.split()[:2] == ["r", "ACTIVE"]
    assert row.endswith("02:00:00 n[1-2]")


def test_without_reservations_that_is_said(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    api.answers["GET /v1/reservations"] = {"now_s": NOW_S, "reservations": []}
    assert (hctl.main(["show", "res"]), hinfo.main(["-T"])) == (0, 0)
    assert capsys.readouterr().out == "No reservations in the system\n" * 2


def test_what_cannot_be_created_or_deleted_is_said(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    assert hctl.main(["create", "partition", "x"]) == 2
    assert hctl.main(["delete", "12"]) == 2
    assert hctl.main(["delete", "reservation"]) == 2
    assert capsys.readouterr().err.count("cannot") == 3


def test_hctl_fails_if_one_job_is_refused(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    api.answers["POST /v1/hold"] = {"jobs": [12], "errors": [{"job": "9", "error": "Invalid job id specified: 9"}]}
    assert hctl.main(["hold", "12", "9"]) == 1
    assert capsys.readouterr().err == "hctl: error: Invalid job id specified: 9\n"


def test_host_lists_need_no_controller(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HPCSCHED_API", "/nowhere")
    assert hctl.main(["show", "hostnames", "n[01-03],m7"]) == 0
    assert capsys.readouterr().out == "n01\nn02\nn03\nm7\n"
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    assert hctl.main(["show", "hostname"]) == 0
    assert capsys.readouterr().out == "n1\nn2\n"
    assert hctl.main(["show", "hostlist", "n1,n2", "n3"]) == 0
    assert capsys.readouterr().out == "n[1-3]\n"
    assert hctl.main(["show", "hostnames", "n[1-99999999]"]) == 1


def test_names_that_there_are_not_are_refused(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    api.answers["GET /v1/nodes"] = {"now_s": NOW_S, "nodes": [node("n1")]}
    api.answers["GET /v1/partitions"] = {"partitions": [partition("main", ["n1"])]}
    assert hctl.main(["show", "node", "n9"]) == 1
    assert "Invalid node name specified: n9; there are: n1" in capsys.readouterr().err
    assert hinfo.main(["-p", "gpu"]) == 1
    assert "there are main" in capsys.readouterr().err


# ----- on a terminal


def on_terminal(module: str, *argv: str, **environ: str) -> str:
    """Return what a command writes to a terminal."""
    control, terminal = pty.openpty()
    clean = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    process = subprocess.Popen(
        [sys.executable, "-c", f"import sys; from hpcsched.cli.{module} import main; sys.exit(main())", *argv],
        stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal, env=clean | {"TERM": "xterm"} | environ,
    )  # fmt: skip
    os.close(terminal)
    said = b""
    with open(control, "rb", buffering=0) as stream:
        try:
            while data := stream.read(4096):
                said += data
        except OSError:  # EIO: the other end is closed
            pass
    wait_until(lambda: process.poll() is not None, what="the command to end")
    return said.decode().replace("\r\n", "\n")


def test_colours_and_bars_are_for_terminals(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    api.answers["GET /v1/queue"] = queue_answer(running(), ended())
    assert "\x1b[32m" in on_terminal("hqueue")
    assert api.parameters("GET /v1/queue")["others"] == "1"
    plain = on_terminal("hqueue", NO_COLOR="1")
    assert "\x1b" not in plain
    on_terminal("hqueue", "-a")
    assert "others" not in api.parameters("GET /v1/queue")
    assert hqueue.main([]) == 0
    assert capsys.readouterr().out == plain
    assert "colour" not in api.parameters("GET /v1/queue")
    api.answers["GET /v1/nodes"] = {"now_s": NOW_S, "nodes": [node("n1", cpus_alloc=4, state="MIXED")]}
    api.answers["GET /v1/partitions"] = {"partitions": []}
    assert "[#####-----] 4/8" in on_terminal("hinfo", "-N")


def test_a_reader_that_has_seen_enough_is_no_error(api: FakeApi) -> None:
    api.answers["GET /v1/queue"] = queue_answer(*[job(number) for number in range(1, 3000)])
    command = "import sys; from hpcsched.cli.hqueue import main; sys.exit(main())"
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # would hide the error
    process = subprocess.Popen(
        [sys.executable, "-c", command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout as stream:
        assert b"JOBID" in stream.readline()
    with process.stderr as stream:
        assert stream.read() == b""
    wait_until(lambda: process.poll() is not None, what="the command to end")


def test_hwhy_says_which_task_of_an_array_it_is_about(api: Any, capsys: pytest.CaptureFixture[str]) -> None:
    answer = {"lines": ["Priority: behind job 3."], "expected_start_s": None, "job": "7_2"}
    api.answers["GET /v1/job/7/why"] = answer | {"of": 3, "waiting": 2}
    assert hwhy.main(["7"]) == 0
    assert capsys.readouterr().out == "Of 3 tasks 2 wait; of job 7_2, the first of them:\nPriority: behind job 3.\n"
    api.answers["GET /v1/job/7/why"] = answer | {"of": 1, "waiting": 1}
    assert hwhy.main(["7"]) == 0
    assert capsys.readouterr().out == "Priority: behind job 3.\n"


def test_each_verb_of_hctl_has_a_help_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(hctl.HELPS) == set(hctl.VERBS)
    for verb in hctl.VERBS:
        assert hctl.main([verb, "--help"]) == 0
        usage = [line for line in capsys.readouterr().out.split("\n\n")[0].splitlines()]
        assert usage
        assert all(line.removeprefix("Usage:").split()[:2] == ["hctl", verb] for line in usage)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["drain", "n1", "why", "--reason=x"], "cannot take two reasons"),
        (["drain", "n1", "--reason="], "give the reason"),
        (["hold", "1", "--reason=x"], "cannot use --reason with hold: it is for drain and fence"),
        (["update", "PartitionName=main", "State=UP", "MaxTime=1"], "only State=UP|DOWN|DRAIN|INACTIVE"),
    ],
)
def test_reasons_and_states_that_cannot_be_are_refused(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hctl.main(argv) == 2
    assert says in capsys.readouterr().err


def test_h_alone_says_how_to_get_help_on_a_terminal(
    api: FakeApi, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    api.answers["GET /v1/queue"] = queue_answer()
    assert hqueue.main(["-h"]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert hqueue.main(["-h"]) == 0
    assert capsys.readouterr().err == "hqueue: -h leaves the header out, as in Slurm; for help: hqueue --help\n"


def test_hacct_cuts_a_long_meaning_unless_a_program_reads_it(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    why = "a long story " * 20
    api.answers["GET /v1/history"] = {"now_s": NOW_S, "jobs": [ended(exit_code=0, reason_detail=why) | {"steps": []}]}
    assert hacct.main(["-n", "-o", "Meaning"]) == 0
    assert capsys.readouterr().out == why[:59] + "+\n"
    assert hacct.main(["-n", "-o", "Meaning%300"]) == 0
    assert capsys.readouterr().out.strip() == why.strip()
    assert hacct.main(["-nP", "-o", "Meaning"]) == 0
    assert capsys.readouterr().out == why + "\n"
