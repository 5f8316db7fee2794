"""Slurm's names: what they ask for, what they print, and that they fail with Slurm's words and statuses."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_api import NOW_S, FakeApi, ended, job, node, partition, running, step, task

from hpcnode.commands import slurm_text
from hpcsched.cli import hacct, hcancel, hinfo, hprio, hqueue, hshare, hsub
from hpcsched.cli.slurm import sacctmgr, scontrol, scrontab, sdiag, sstat
from hpcsched.commands import queue
from hpcsched.errors import UsageError

Out = pytest.CaptureFixture[str]
UNKNOWN = {"job": "99", "error": "Invalid job id specified: 99", "kind": "NotFoundError"}
FOREIGN = {"job": "12", "error": "cannot cancel job 12: it belongs to eve", "kind": "PermissionDeniedError"}
MAINS: dict[str, Callable[..., int]] = {
    "sacct": hacct.sacct, "sacctmgr": sacctmgr.main, "sbatch": hsub.sbatch, "scancel": hcancel.scancel,
    "scontrol": scontrol.main, "sdiag": sdiag.main, "sinfo": hinfo.sinfo, "sprio": hprio.sprio, "squeue": hqueue.squeue,
    "sshare": hshare.sshare, "sstat": sstat.main,
}  # fmt: skip


def text(lines: str) -> bytes:
    """Return the API's answer with the queue as text."""
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(lines), lines.encode())


@pytest.fixture(autouse=True)
def _no_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if re.match("S[A-Z]+_|SLURM_", name)]:
        monkeypatch.delenv(name)


# ----- all of them


@pytest.mark.parametrize("name", MAINS)
@pytest.mark.parametrize("word", ["-V", "--version"])
def test_all_say_the_same_version(name: str, word: str, capsys: Out) -> None:
    assert MAINS[name]([word]) == 0
    assert capsys.readouterr() == ("slurm 23.02.7\n", "")


@pytest.mark.parametrize("name", MAINS)
def test_an_option_that_there_is_not_fails_with_getopts_words(name: str, capsys: Out) -> None:
    assert MAINS[name](["--frobnicate"]) == 1
    assert capsys.readouterr() == (
        "", f"{name}: unrecognized option '--frobnicate'\nTry \"{name} --help\" for more information\n"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "argv", "says"),
    [
        ("squeue", [], "slurm_load_jobs error: Unable to contact slurm controller"),
        ("sinfo", [], "slurm_load_partitions: Unable to contact slurm controller"),
        ("scontrol", ["show", "job", "1"], "slurm_load_jobs error: Unable to contact slurm controller"),
        (
            "sbatch",
            ["--wrap", "true"],
            "sbatch: error: Batch job submission failed: Unable to contact slurm controller",
        ),
        ("scancel", ["1"], "scancel: error: Kill job error: Unable to contact slurm controller"),
        ("sacct", ["-j", "1"], "sacct: error: slurmdbd: Unable to contact slurm controller"),
    ],
)
def test_without_a_controller_the_first_words_are_slurms(
    name: str, argv: list[str], says: str, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCSCHED_API", "/nonexistent/api.sock")
    assert MAINS[name](argv) == 1
    assert capsys.readouterr().err.startswith(says)


# ----- squeue


@pytest.mark.parametrize(
    ("argv", "asked"),
    [
        ([], {"format": queue.FORMAT, "order": "P,t,-p"}),
        (["-l"], {"format": queue.LONG_FORMAT, "order": "P,t,-p", "dated": "1"}),
        (["-h", "-j", "12", "-o", "%i %t"], {"format": "%i %t", "id": "12", "noheader": "1", "order": "P,t,-p"}),
        (["--noheader", "--format=%i|%T", "--states=all", "--name", "x"],
         {"format": "%i|%T", "noheader": "1", "state": "ALL", "name": "x", "order": "P,t,-p"}),
        (["-O", "JobArrayID,StateCompact,Reason", "-t", "PD,cg", "--me"],
         {"format": "JobArrayID,StateCompact,Reason", "long": "1", "state": "PENDING,COMPLETING", "user": str(os.getuid()),
          "order": "P,t,-p"}),
        (["-a", "-r", "-h", "-o %A|%a"], {"format": " %A|%a", "array": "1", "noheader": "1", "order": "P,t,-p"}),
        (["--start", "-j12,13"], {"format": queue.START_FORMAT, "id": "12,13", "order": "S", "expected": "1"}),
        (["-u", "ann,bob", "-p", "a", "-A", "x", "-q", "y", "-w", "n[1-2]", "-S", "-V", "-M", "all", "--only-job-state"],
         {"format": queue.FORMAT, "user": "ann,bob", "partition": "a", "account": "x", "qos": "y", "nodes": "n[1-2]",
          "order": "-V"}),
        (["--job=1,1"], {"format": queue.FORMAT, "id": "1,1", "order": "P,t,-p"}),
    ],
)  # fmt: skip
def test_squeue_asks_for_the_lines_that_are_meant(
    argv: list[str], asked: dict[str, str], api: FakeApi, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pwd.getpwnam", lambda name: None)  # all have an account here
    api.answers["GET /v1/queue"] = text("a line\n")
    assert hqueue.squeue(argv) == 0
    assert capsys.readouterr() == ("a line\n", "")
    assert api.parameters("GET /v1/queue") == asked


def test_squeue_takes_its_defaults_from_the_environment(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    api.answers["GET /v1/queue"] = text("")
    for name, value in {"FORMAT": "%i", "SORT": "i", "STATES": "R", "USERS": "ann", "PARTITION": "a"}.items():
        monkeypatch.setenv(f"SQUEUE_{name}", value)
    monkeypatch.setenv("SLURM_TIME_FORMAT", "standard")
    assert hqueue.squeue([]) == 0
    assert api.parameters("GET /v1/queue") == {
        "format": "%i", "order": "i", "state": "RUNNING", "user": "ann", "partition": "a", "time_format": "standard"
    }  # fmt: skip


def test_squeue_of_a_user_whom_nobody_knows_says_so(api: FakeApi, capsys: Out) -> None:
    api.answers["GET /v1/queue"] = text("JOBID\n")
    assert hqueue.squeue(["-u", "no-such-user,4711"]) == 0
    assert capsys.readouterr() == ("JOBID\n", "squeue: error: Invalid user: no-such-user\n")


def test_squeue_of_a_job_that_there_is_not(api: FakeApi, capsys: Out) -> None:
    api.answers["GET /v1/queue"] = (404, {"error": "Invalid job id specified: 99", "kind": "NotFoundError"})
    assert hqueue.squeue(["-j", "99"]) == 1
    assert capsys.readouterr() == ("", "slurm_load_jobs error: Invalid job id specified\n")


def test_squeue_as_json_has_slurms_names(api: FakeApi, capsys: Out) -> None:
    api.answers["GET /v1/jobs"] = {"now_s": NOW_S, "jobs": [running()]}
    assert hqueue.squeue(["--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["jobs"]
    assert (found["job_id"], found["job_state"], found["user_name"], found["nodes"]) == (11, "RUNNING", "ann", "n[1-2]")
    assert found["time_limit"] == {"set": True, "infinite": False, "number": 60}


def test_steps_that_run(api: FakeApi, capsys: Out) -> None:
    steps = [step("batch", ended_at_s=None), step("0", name="train", ended_at_s=None, state="RUNNING"), step("1")]
    api.answers["GET /v1/history"] = {"now_s": NOW_S, "jobs": [running() | {"steps": steps}]}
    for main in (hqueue.squeue, hqueue.main):
        assert main(["-s", "-h"]) == 0
        assert capsys.readouterr().out == (
            "       11.batch    batch      main      ann      8:20 n1\n           11.0    train      main      ann      8:20 n1\n"
        )
    assert scontrol.main(["-o", "show", "step", "11.0"]) == 0
    assert capsys.readouterr().out.startswith("StepId=11.0 UserId=1000 ")
    assert scontrol.main(["show", "step", "11.7"]) == 1
    assert sstat.main(["-j", "11.0", "-P", "-o", "JobID,NTasks"]) == 0
    assert capsys.readouterr().out == "JobID|NTasks\n11.0|1\n"


# ----- sbatch


def test_sbatch_prints_one_line_or_the_id(
    api: FakeApi, capsys: Out, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = {"jobs": [{"job_id": 5, "tasks": 1}], "notes": []}
    manners = {"parsable": True, "quiet": False, "verbose": False}
    api.answers["POST /v1/submit"] = lambda body, given: answer | ({"manners": manners} if "words" in body else {})
    api.answers["GET /v1/ping"] = {"cluster": "lab"}
    assert hsub.sbatch(["--wckey=submitit", "--wrap", "true"]) == 0
    assert hsub.sbatch(["--parsable", "--wrap", "true"]) == 0
    assert hsub.sbatch(["--parsable", "-M", "lab", "--wrap", "true"]) == 0
    assert capsys.readouterr() == ("Submitted batch job 5\n5\n5;lab\n", "")
    assert api.requests("POST /v1/submit")[0]["jobs"][0]["submit_line"] == "sbatch --wckey=submitit --wrap true"


@pytest.mark.parametrize(
    ("refusal", "phrase"),
    [
        ("cannot submit to partition 'x': invalid partition name specified; there are: main", "Invalid partition name specified"),
        ("cannot use account 'x': Invalid account or account/partition combination specified: ann may use a",
         "Invalid account or account/partition combination specified"),
        ("cannot use QOS 'x': Invalid qos specification: there is none", "Invalid qos specification"),
        ("cannot depend on job 9: there is no such job (Job dependency problem)", "Job dependency problem"),
        ("cannot give the job nine nodes: partition 'gpu' has 8", "Requested node configuration is not available"),
    ],
)  # fmt: skip
def test_sbatch_says_why_it_was_refused_in_slurms_words_and_in_ours(
    refusal: str, phrase: str, api: FakeApi, capsys: Out
) -> None:
    api.answers["POST /v1/submit"] = (400, {"error": refusal, "kind": "RequestError"})
    assert hsub.sbatch(["--wrap", "true"]) == 1
    assert (
        capsys.readouterr().err == f"sbatch: error: Batch job submission failed: {phrase}\nsbatch: error: {refusal}\n"
    )


@pytest.mark.parametrize(
    ("script", "first"), [(None, "Unable to open file job.sh"), ("", "Batch script is empty!"), ("#!/bin/sh", "")]
)
def test_sbatch_says_in_slurms_words_what_is_wrong_with_a_script(
    script: str | None, first: str, api: FakeApi, capsys: Out, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if script is not None:
        Path("job.sh").write_text(script)
    api.answers["POST /v1/submit"] = (400, {"error": "read here", "kind": "RequestError"})
    assert hsub.sbatch(["job.sh"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0] == f"sbatch: error: {first or 'Batch job submission failed: ' + slurm_text.of_job('')}"


@pytest.mark.parametrize("name", ["sbatch", "squeue", "sinfo", "scancel", "sacct"])
def test_another_cluster_is_refused(name: str, api: FakeApi, capsys: Out) -> None:
    api.answers["GET /v1/ping"] = {"cluster": "lab"}
    words = ["--wrap", "true"] if name == "sbatch" else ["1"] if name == "scancel" else []
    assert MAINS[name](["-M", "lab,other", *words]) == 1
    assert capsys.readouterr() == ("", f"{name}: error: No cluster 'other' known by database.\n")
    assert {route for route, _, _ in api.asked} == {"GET /v1/ping"}


@pytest.mark.parametrize(
    ("job_id", "error", "says"),
    [
        (0, "cannot give job nine nodes: partition 'main' has 3",
         "Unable to allocate resources: Requested node configuration is not available"),
        (0, "cannot submit to partition 'x': invalid partition name specified; there are: main",
         "Unable to allocate resources: Invalid partition name specified"),
        (9, "cannot start a step in job 9: Invalid job id specified",
         "Unable to confirm allocation for job 9: Invalid job id specified"),
        (9, "cannot give the step 99 tasks: the job has 2 cpus on 2 nodes",
         "Unable to create step for job 9: More processors requested than permitted"),
        (9, "cannot give the step 4096 MiB on n1: the job has 2048 MiB there",
         "Unable to create step for job 9: Memory required by task is not available"),
        (9, "cannot give the step 1 GPUs on n1: the job has 0 there",
         "Unable to create step for job 9: Invalid generic resource (gres) specification"),
        (9, "cannot start a step in job 9: it is COMPLETED, not RUNNING", ""),
        (0, "the job was cancelled", ""),
    ],
)  # fmt: skip
def test_srun_has_slurms_words_for_what_is_refused(job_id: int, error: str, says: str) -> None:
    assert slurm_text.of_step(job_id, error) == says


# ----- scancel


def test_scancel_refuses_what_is_no_job_id(api: FakeApi, capsys: Out) -> None:
    unknown = {"job": "abc", "kind": "NotFoundError", "error": "Invalid job id specified: abc"}
    api.answers["POST /v1/cancel"] = {"jobs": [], "errors": [unknown]}
    assert hcancel.scancel(["abc"]) == 1
    assert capsys.readouterr() == ("", "scancel: error: Invalid job id abc\n")


def test_scancel_is_silent_of_what_there_is_not(api: FakeApi, capsys: Out) -> None:
    api.answers["POST /v1/cancel"] = {"jobs": [], "errors": [UNKNOWN]}
    assert hcancel.scancel(["99", "--signal", "USR1"]) == 0
    assert capsys.readouterr() == ("", "")
    assert api.requests("POST /v1/cancel")[-1]["signal"] == "USR1"
    assert hcancel.scancel(["-v", "99"]) == 0
    assert capsys.readouterr().err == (
        "scancel: Terminating job 99\nscancel: error: Kill job error on job id 99: Invalid job id specified\n"
    )


def test_scancel_fails_where_it_may_not(api: FakeApi, capsys: Out) -> None:
    api.answers["POST /v1/cancel"] = {"jobs": [], "errors": [FOREIGN]}
    assert hcancel.scancel(["12"]) == 1
    assert capsys.readouterr().err == "scancel: error: Kill job error on job id 12: Access/permission denied\n"
    assert hcancel.scancel([]) == 1
    assert capsys.readouterr().err == "scancel: error: No job identification provided\n"


def test_scancel_narrows_by_what_scancel_narrows_by(api: FakeApi) -> None:
    api.answers["POST /v1/cancel"] = {"jobs": [], "errors": []}
    assert hcancel.scancel(["-u", "ann", "-t", "PD", "-A", "x", "-w", "n[1-2]", "-q", "y", "-R", "r", "--name=z"]) == 0
    assert api.requests("POST /v1/cancel")[0]["filters"] == {
        "user": "ann", "state": "PENDING", "account": "x", "node": "n1,n2", "qos": "y", "reservation": "r", "name": "z"
    }  # fmt: skip


# ----- sacct


def history(api: FakeApi, *jobs: dict[str, Any]) -> None:
    api.answers["GET /v1/history"] = {"now_s": NOW_S, "jobs": [{"steps": [], **one} for one in jobs]}


def test_sacct_has_sacct_widths_and_a_space_behind_each(api: FakeApi, capsys: Out) -> None:
    history(api, ended(name="longer than ten", account="physics") | {"steps": [step("batch", name="batch")]})
    assert hacct.sacct([]) == 0
    assert capsys.readouterr().out == (
        "JobID           JobName  Partition    Account  AllocCPUS      State ExitCode \n"
        "------------ ---------- ---------- ---------- ---------- ---------- -------- \n"
        "10           longer th+       main    physics          8     FAILED      3:0 \n"
        "10.batch          batch               physics          4     FAILED      3:0 \n"
    )


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["-X", "--parsable2", "--noheader", "--format=JobIdRaw,State"], "10|FAILED"),
        (["-X", "-n", "--format=jobid,state%20"], "10                         FAILED "),
        (["-X", "-n", "-o", "nodelist%-20"], "n[1-2]               "),
        (["-Xnp", "-o", "JobID,ExitCode,DerivedExitCode"], "10|3:0|0:0|"),
        (["-XnP", "--delimiter=^|^", "-o", "JobID,Elapsed,NNodes,ReqMem,Timelimit,AdminComment"],
         "10^|^00:01:01^|^2^|^8G^|^01:00:00^|^"),
        (["-XnP", "--units=M", "-o", "ReqMem,CPUTimeRAW,Planned"], "8192M|488|00:01:40"),
        (["-XnP", "-b"], "10|FAILED|3:0"),
    ],
)  # fmt: skip
def test_sacct_in_the_shapes_that_clients_ask_for(argv: list[str], line: str, api: FakeApi, capsys: Out) -> None:
    history(api, ended())
    assert hacct.sacct(argv) == 0
    assert capsys.readouterr().out == line + "\n"


def test_sacct_knows_every_column_of_sacct(capsys: Out) -> None:
    assert hacct.sacct(["--helpformat"]) == 0
    names = capsys.readouterr().out.split()
    assert {"JobIDRaw", "AdminComment", "TRESUsageInTot", "MaxVMSize", "Cluster", "QOSRAW", "WCKey"} <= set(names)
    assert names == sorted(names, key=str.lower)


def test_sacct_shows_only_those_that_are_asked_for(api: FakeApi, capsys: Out) -> None:
    history(api, ended(10, account="a", partition="x"), ended(11, account="b", partition="y"), ended(12, account="b"))
    assert hacct.sacct(["-XnP", "-o", "JobID", "-A", "b", "-r", "y"]) == 0
    assert hacct.sacct(["-XnP", "-o", "JobID", "-N", "n7"]) == 0
    assert hacct.sacct(["-XnP", "-o", "JobID", "-j", "10,12"]) == 0
    assert capsys.readouterr().out == "11\n10\n12\n"
    assert hacct.sacct(["-XnP", "-S1970-01-01-00:00:01", "-E", "now", "-a"]) == 0
    assert float(api.parameters("GET /v1/history")["start_s"]) == 1.0


def test_sacct_json_is_what_clients_of_23_02_read(api: FakeApi, capsys: Out) -> None:
    history(api, ended() | {"steps": [step("0")]})
    api.answers["GET /v1/ping"] = {"cluster": "lab"}
    assert hacct.sacct(["--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["jobs"]
    assert (found["job_id"], found["state"]["current"], found["cluster"]) == (10, "FAILED", "lab")
    assert found["exit_code"]["return_code"]["number"] == 3
    assert found["steps"][0]["step"]["id"]["step_id"] == "0"


# ----- sinfo


NODES = [
    node("n1", state="MIXED", cpus_alloc=2, mem_alloc_mib=1024),
    node("n2", features=["fast"], gpus=[{"index": at, "type": "a100", "shards": 1} for at in (0, 1)]),
    node("n3", cpus=4, state="DOWN", link="down", link_why="no route"),
    node("n4", state="DRAINED", drained=True, drained_why="fan", drained_by="ann", drained_at_s=NOW_S, partitions=["main", "b"]),
]  # fmt: skip


@pytest.fixture
def nodes(api: FakeApi) -> FakeApi:
    api.answers["GET /v1/nodes"] = {"now_s": NOW_S, "nodes": NODES}
    found = [partition("main", ["n1", "n2", "n3", "n4"]), partition("b", ["n4"], max_time_s=7200)]
    api.answers["GET /v1/partitions"] = {"partitions": found}
    return api


@pytest.mark.parametrize(
    ("argv", "lines"),
    [
        (["-h"], ["main*        up   infinite      1  down* n3", "main*        up   infinite      1  drain n4",
                  "main*        up   infinite      1    mix n1", "main*        up   infinite      1   idle n2",
                  "b            up    2:00:00      1  drain n4"]),
        (["-h", "-o", "%C"], ["2/14/12/28"]),
        (["-h", "-o%P"], ["main*", "b"]),
        (["-h", "-o", "%R,%C"], ["main,2/14/12/28", "b,0/0/8/8"]),
        (["-h", "-o", "%T:%N"], ["down*:n3", "drained:n4", "mixed:n1", "idle:n2"]),
        (["-h", "-o", "%D %c %m %F"], ["4 4+ 16384 1/1/2/4"]),
        (["-aho", "%P %G %l %c"], ["main* (null) infinite 4+", "main* gpu:a100:2 infinite 8", "b (null) 2:00:00 8"]),
        (["-h", "-N", "-o", "%N\x1f%t\x1f%G"], ["n1\x1fmix\x1f(null)", "n2\x1fidle\x1fgpu:a100:2", "n3\x1fdown*\x1f(null)",
                                               "n4\x1fdrain\x1f(null)"]),
        (["-h", "-N", "-o", "%R", "-n", "n4"], ["main", "b"]),
        (["-h", "-o", "%N", "-t", "idle,mix"], ["n[1-2]"]),
        (["-h", "-o", "%N", "-p", "b"], ["n4"]),
        (["-h", "-o", "%N", "-d"], ["n3"]),
        (["-h", "-R", "-o", "%E|%u|%N"], ["no route|slurm|n3", "fan|ann|n4"]),
        (["-h", "-N", "-O", "NodeHost:4,AllocMem:6,CPUsState:10,StateLong:8", "-n", "n1"], ["n1  1024  2/6/0/8   mixed   "]),
        (["-s", "-h"], ["main*        up   infinite          1/1/2/4 n[1-4]", "b            up    2:00:00          0/0/1/1 n4"]),
    ],
)  # fmt: skip
def test_sinfo(argv: list[str], lines: list[str], nodes: FakeApi, capsys: Out) -> None:
    assert hinfo.sinfo(argv) == 0
    assert capsys.readouterr().out.splitlines() == lines


def test_sinfo_refuses_a_state_that_there_is_not(nodes: FakeApi, capsys: Out) -> None:
    assert hinfo.sinfo(["-t", "busy"]) == 1
    assert "Bad state string: busy" in capsys.readouterr().err


# ----- scontrol


def test_scontrol_show_job_has_slurms_lines(api: FakeApi, capsys: Out) -> None:
    api.answers["GET /v1/job/11"] = {"jobs": [running(ntasks_per_node=1)]}
    assert scontrol.main(["show", "job", "11"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "JobId=11 JobName=train"
    assert "   JobState=RUNNING Reason=None Dependency=(null)" in lines
    assert "   NumNodes=2 NumCPUs=8 NumTasks=2 CPUs/Task=4 ReqB:S:C:T=0:0:*:*" in lines
    assert "   Socks/Node=* NtasksPerN:B:S:C=1:0:*:* CoreSpec=*" in lines
    assert "   MinCPUsNode=1 MinMemoryNode=4G MinTmpDiskNode=0" in lines
    assert lines[-1] == ""
    assert scontrol.main(["show", "job", "-o", "11"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    words = dict(word.partition("=")[::2] for word in line.split())
    assert (words["TimeLimit"], words["UserId"], words["Partition"]) == ("01:00:00", "ann(1000)", "main")


def test_scontrol_of_what_there_is_not(api: FakeApi, capsys: Out) -> None:
    api.answers["GET /v1/job/99"] = (404, {"error": "Invalid job id specified: 99", "kind": "NotFoundError"})
    assert scontrol.main(["show", "job", "99"]) == 1
    assert capsys.readouterr().err == "slurm_load_jobs error: Invalid job id specified\n"
    api.answers["POST /v1/requeue"] = {"jobs": [], "errors": [UNKNOWN]}
    assert scontrol.main(["requeue", "99"]) == 1
    assert capsys.readouterr().err == "Invalid job id specified for job 99\n"
    api.answers["GET /v1/nodes"] = {"now_s": NOW_S, "nodes": NODES}
    assert scontrol.main(["show", "node", "n9"]) == 1
    assert capsys.readouterr().out == "Node n9 not found\n"
    assert scontrol.main(["frobnicate"]) == 1
    assert scontrol.main(["show", "frobs"]) == 1
    assert capsys.readouterr().err == "invalid keyword: frobnicate\ninvalid entity:frobs for keyword:show \n"


@pytest.mark.parametrize(
    ("argv", "route", "body"),
    [
        (["hold", "12"], "hold", {"jobs": ["12"]}),
        (["release", "12,13"], "release", {"jobs": ["12", "13"]}),
        (["requeue", "10_3"], "requeue", {"jobs": ["10_3"]}),
        (["suspend", "jobid=12"], "suspend", {"jobs": ["12"]}),
        (["resume", "12"], "resume", {"jobs": ["12"]}),
        (["update", "JobId=12", "TimeLimit=30"], "update", {"jobs": ["12"], "changes": {"time_limit": "30"}}),
        (["update", "job", "12", "NumNodes=2"], "update", {"jobs": ["12"], "changes": {"num_nodes": "2"}}),
    ],
)
def test_scontrol_asks_for_what_hctl_asks_for(argv: list[str], route: str, body: dict[str, Any], api: FakeApi) -> None:
    api.answers[f"POST /v1/{route}"] = {"jobs": [12], "errors": []}
    api.answers["GET /v1/job/12"] = {"jobs": [{"state": "PENDING"}]}
    assert scontrol.main(argv) == 0
    assert api.requests(f"POST /v1/{route}") == [body]


def test_host_lists_need_no_controller(capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCSCHED_API", "/nonexistent/api.sock")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    for argv in (["show", "hostnames"], ["show", "hostname", "n[3-4]"], ["show", "hostnames", "a,b"]):
        assert scontrol.main(argv) == 0
    assert capsys.readouterr().out.split() == ["n1", "n2", "n3", "n4", "a", "b"]
    assert scontrol.main(["show", "hostlist", "n1,n2,n5"]) == 0
    assert scontrol.main(["show", "hostlistsorted", "n10,n2,n1"]) == 0
    assert capsys.readouterr().out.split() == ["n[1-2,5]", "n[1-2,10]"]


def test_scontrol_writes_the_script(api: FakeApi, capsys: Out, tmp_path: Path) -> None:
    api.answers["GET /v1/job/12"] = {"jobs": [job() | {"script": "#!/bin/sh\ntrue\n"}]}
    assert scontrol.main(["write", "batch_script", "12", "-"]) == 0
    assert capsys.readouterr().out == "#!/bin/sh\ntrue\n"
    assert scontrol.main(["write", "batch_script", "12", str(tmp_path / "s.sh")]) == 0
    assert (tmp_path / "s.sh").read_text() == "#!/bin/sh\ntrue\n"


def test_scontrol_show_partition_and_node_on_one_line(nodes: FakeApi, capsys: Out) -> None:
    assert scontrol.main(["-o", "show", "part"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["PartitionName=main", "PartitionName=b"]
    assert scontrol.main(["show", "node", "-o", "n2,n4"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert " CPUTot=8 " in first
    assert " Gres=gpu:2 " in first
    assert " State=IDLE+DRAIN " in second
    assert " Reason=fan [ann@2027-01-15T08:00:00]" in second


def test_scontrol_show_config_has_what_clients_look_for(api: FakeApi, capsys: Out) -> None:
    scheduler = {"max_array_size": 1000, "max_jobs": 10}
    api.answers["GET /v1/config"] = {"config": {"min_job_age_s": 300.0, "kill_wait_s": 30.0, "scheduler": scheduler}}
    api.answers["GET /v1/ping"] = {"cluster": "lab", "started_at_s": NOW_S, "now_s": NOW_S}
    assert scontrol.main(["show", "config"]) == 0
    found = dict(re.findall(r"^(\w+) += (.*)$", capsys.readouterr().out, re.MULTILINE))
    assert (found["MinJobAge"], found["MaxArraySize"], found["ClusterName"]) == ("300 sec", "1001", "lab")


# ----- the rest


def test_sacctmgr_lists_accounts_and_changes_nothing(api: FakeApi, capsys: Out) -> None:
    shares = [{"account": "a", "user": "", "shares": 1}, {"account": "a", "user": "ann", "shares": 2}]
    api.answers["GET /v1/shares"] = {"now_s": NOW_S, "shares": shares}
    api.answers["GET /v1/ping"] = {"cluster": "lab"}
    limits = {"max_jobs": 2, "max_wall_s": 5400, "grp_tres": [["gres/gpu", 4]]}
    accounting = {
        "accounts": [{"name": "a", "parent": "", "qos": ["normal", "fast"], "default_qos": "fast", "limits": limits}],
        "qos": [
            {
                "name": "fast",
                "priority": 7,
                "usage_factor": 2.0,
                "grace_time_s": 90,
                "preempt": ["normal"],
                "limits": limits,
            }
        ],
        "licenses": [["matlab", 3]],
    }
    api.answers["GET /v1/config"] = {"config": {}, "accounting": accounting}
    assert sacctmgr.main(["-n", "-s", "list", "user", "ann", "format=account%10"]) == 0
    assert capsys.readouterr().out == "         a \n"
    assert sacctmgr.main(["show", "assoc", "format=cluster,account,user", "--noheader", "--parsable2", "user=ann"]) == 0
    assert capsys.readouterr().out == "lab|a|ann\n"
    assert sacctmgr.main(["-nP", "show", "cluster", "format=cluster"]) == 0
    assert capsys.readouterr().out == "lab\n"
    assert (
        sacctmgr.main(
            ["-nP", "show", "qos", "format=name,priority,gracetime,preempt,usagefactor,maxwall,maxjobspu,grptres"]
        )
        == 0
    )
    assert capsys.readouterr().out.splitlines() == [
        "normal|0|00:00:00||1.000000|||",
        "fast|7|00:01:30|normal|2.000000|1:30:00|2|gres/gpu=4",
    ]
    assert sacctmgr.main(["-nP", "list", "account", "withassoc", "format=account,qos,defaultqos,maxjobs"]) == 0
    assert capsys.readouterr().out == "a|normal,fast|fast|2\n"
    assert sacctmgr.main(["-nP", "show", "tres"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["gres|gpu|1001", "license|matlab|1002"]
    assert sacctmgr.main(["-P", "show", "events"]) == 0
    assert capsys.readouterr().out == "Cluster|NodeName|TimeStart|TimeEnd|State|Reason|User\n"
    assert sacctmgr.main(["add", "user", "eve"]) == 1
    assert "hpcsched.toml" in capsys.readouterr().err


def test_usage_errors_cross_the_wire_as_such(api: FakeApi, capsys: Out) -> None:
    api.answers["GET /v1/queue"] = (400, {"error": "Invalid sort specification: x", "kind": UsageError.__name__})
    assert hqueue.squeue(["-S", "x"]) == 1
    assert capsys.readouterr().err == "squeue: error: Invalid sort specification: x\n"


def test_sacct_has_slurm_s_states_and_an_array_s_waiting_tasks_as_one(api: FakeApi, capsys: Out) -> None:
    tasks = [task(20, index) | {"steps": []} for index in (1, 2, 5)]
    jobs = [running(state="COMPLETING") | {"steps": []}, running(12, state="CONFIGURING") | {"steps": []}, *tasks]
    api.answers["GET /v1/history"] = {"now_s": NOW_S, "jobs": jobs}
    assert hacct.sacct(["-nPa", "-o", "JobID,JobIDRaw,State"]) == 0
    assert capsys.readouterr().out.split() == ["11|11|RUNNING", "12|12|RUNNING", "20_[1-2,5%2]|20|PENDING"]
    assert hacct.sacct(["-nPa", "--array", "-o", "JobID", "-s", "R,PD"]) == 0
    assert capsys.readouterr().out.split() == ["11", "12", "20_1", "20_2", "20_5"]
    asked = api.parameters("GET /v1/history")["state"].split(",")
    assert sorted(asked) == ["COMPLETING", "CONFIGURING", "PENDING", "RUNNING"]


def test_sacct_shows_what_a_step_has_read_and_written(api: FakeApi, capsys: Out) -> None:
    moved = step("0", ntasks=2, disk_read_bytes=3 * 2**20, disk_write_bytes=999)
    api.answers["GET /v1/history"] = {"now_s": NOW_S, "jobs": [ended() | {"steps": [moved]}]}
    assert (
        hacct.sacct(["-nP", "-j", "10.0", "-o", "JobID,AveDiskRead,MaxDiskWrite,TRESUsageInTot,TRESUsageOutAve"]) == 0
    )
    assert capsys.readouterr().out == "10.0|1.50M|499.50|cpu=00:01:00,fs/disk=3145728,mem=20480K|fs/disk=499\n"
    assert hacct.sacct(["-nP", "-j", "10.0", "-o", "AveDiskRead", "--units=K"]) == 0
    assert capsys.readouterr().out == "1536K\n"


def test_a_step_that_is_named_is_shown_alone(api: FakeApi, capsys: Out) -> None:
    steps = [step("batch"), step("0"), step("1")]
    api.answers["GET /v1/history"] = {"now_s": NOW_S, "jobs": [ended() | {"steps": steps}]}
    for named, shown in (("10.1", "10.1"), ("10.batch,10.0", "10.batch 10.0"), ("10,10.1", "10 10.batch 10.0 10.1")):
        assert hacct.sacct(["-nP", "-o", "JobID", "-j", named]) == 0
        assert capsys.readouterr().out.split() == shown.split()


def test_nodes_and_partitions_as_json_have_slurm_s_names(api: FakeApi, capsys: Out) -> None:
    idle = node(
        "n1", gpus=[{"index": 0, "type": "a100"}], gpus_alloc=1, cpus_alloc=2, mem_alloc_mib=1024, state="MIXED"
    )
    drained = node("n2", state="DRAINED", drained=True, drained_why="fan", drained_by="ann", drained_at_s=NOW_S)
    api.answers["GET /v1/nodes"] = {"now_s": NOW_S, "nodes": [idle, drained]}
    api.answers["GET /v1/partitions"] = {"partitions": [partition("main", ["n1", "n2"], max_time_s=3600)]}
    for command in (lambda: hinfo.sinfo(["--json"]), lambda: scontrol.main(["show", "node", "--json"])):
        assert command() == 0
        answer = json.loads(capsys.readouterr().out)
        first, second = answer["nodes"]
        assert (first["name"], first["state"], first["partitions"]) == ("n1", ["MIXED"], ["main"])
        assert (first["cpus"], first["alloc_cpus"], first["alloc_idle_cpus"]) == (8, 2, 6)
        assert (first["real_memory"], first["alloc_memory"], first["gres"]) == (16384, 1024, "gpu:1")
        assert first["tres_used"] == "cpu=2,mem=1G,gres/gpu=1"
        assert (second["state"], second["reason"], second["reason_set_by_user"]) == (["IDLE", "DRAIN"], "fan", "ann")
        assert (answer["errors"], answer["meta"]["Slurm"]["release"]) == ([], "23.02.7")
    assert scontrol.main(["show", "partition", "main", "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)["partitions"]
    assert (shown["name"], shown["nodes"]["total"], shown["partition"]["state"]) == ("main", 2, ["UP"])
    assert shown["maximums"]["time"] == {"set": True, "infinite": False, "number": 60}


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["-o", "JobID,nope"], 'sacct: error: Invalid field requested: "nope"\n'),
        (["-j", "no one"], "sacct: fatal: Bad job/step specified: no one\n"),
    ],
)
def test_what_sacct_cannot_show_it_says_in_slurm_s_words(argv: list[str], says: str, api: FakeApi, capsys: Out) -> None:
    api.answers["GET /v1/jobs"] = (404, {"error": "Invalid job id specified: no one", "kind": "NotFoundError"})
    assert hacct.sacct(argv) == 1
    assert capsys.readouterr().err.endswith(says)


# ----- scrontab


def test_an_entry_of_a_crontab_is_no_service(tmp_path: Path, api: FakeApi, capsys: Out) -> None:
    path = tmp_path / "crontab"
    path.write_text("#SCRON --serve=chat\n0 4 * * * ./serve\n")
    assert scrontab.main([str(path)]) == 1
    assert "line 2 of the crontab: cannot start a service here" in capsys.readouterr().err
    assert api.asked == []
