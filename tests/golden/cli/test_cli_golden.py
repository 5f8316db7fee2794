"""What the commands print, to the letter, for a queue and nodes that never change. To record anew, after looking at the
difference: ``HPCSCHED_RECORD=1 pytest tests/golden/cli``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from fake_api import NOW_S, FakeApi, ended, job, node, partition, queue_answer, running, step, task

from hpcsched.cli import hacct, hctl, hinfo, hqueue, hsub, hwhy

EXPECTED = Path(__file__).parent / "expected"

HOSTILE = job(
    30, name="\x1b[2Jx\n99 root", user="eve", reason="Dependency", reason_detail="waits\rfor 29", expected_start_s=None
)
JOBS = [
    job(),
    running(name="a name longer than squeue's column"),
    ended(),
    *[task(20, index, reason="JobArrayTaskLimit", expected_start_s=None) for index in (3, 4, 5, 9)],
    running(
        21, array_job_id=20, array_task_id=1, display_id="20_1", array_limit=2, elapsed_s=90061.0, time_limit_s=None
    ),
    HOSTILE,
]
FOLDED = [one | {"folded": "[3-5,9%2]"} if one["id"] == 23 else one for one in JOBS if one["id"] not in (24, 25, 29)]
NODES = [
    node(
        "n1",
        state="MIXED",
        cpus_alloc=4,
        mem_alloc_mib=4096,
        jobs=[11],
        gpus=[{"index": 0, "type": "a100"}],
        gpus_alloc=1,
    ),
    node("n2"),
    node("n3", state="DOWN", link="down", link_why="cannot reach n3.lab:22: No route to host", link_since_s=NOW_S - 60),
    node("n4", state="DRAINED", drained=True, drained_why="fan\x07is loud", drained_by="ann", drained_at_s=NOW_S - 30),
    node(
        "n5", state="DOWN", link_why="asleep", drained=True, drained_why="old", drained_by="hhealth", drained_at_s=NOW_S
    ),
]
PARTITIONS = [
    partition("main", ["n1", "n2", "n3", "n4", "n5"]),
    partition("gpu", ["n1"], max_time_s=86400, up=False, state="DOWN"),
    partition("none", []),
]
STEPS = [step("0", name="train.py", exit_code=0, ntasks=2, nodes=["n1", "n2"], state="COMPLETED"), step("batch")]
HISTORY = [
    ended() | {"steps": STEPS},
    job() | {"steps": []},
    ended(9, state="CANCELLED", ended_by_uid=1000, exit_signal=15, exit_code=0) | {"steps": []},
]

WHY = {
    "text": "needs 2 nodes; 1 is free",
    "reason": "Resources",
    "expected_start_s": NOW_S + 1200,
    "position": 1,
    "ahead": [],
    "lines": [
        "Resources: needs 2 nodes; 1 is free.",
        "It starts in 20:00 at the latest.",
        "  n1 4 cpus",
        "  n2 has room now",
    ],
}

CASES: dict[str, tuple[Callable[[Sequence[str]], int], list[str]]] = {
    "hqueue": (hqueue.main, []),
    "hqueue-long": (hqueue.main, ["-al"]),
    "hqueue-array": (hqueue.main, ["-r", "-h", "-t", "pd"]),
    "hqueue-ids": (hqueue.main, ["-q"]),
    "hqueue-names": (hqueue.main, ["-o", "id,name,state,why,eta"]),
    "hqueue-squeue": (hqueue.main, ["-o", "%.18i %.9P %.8j %.8u %.2t %.10M %.6D %R"]),
    "hqueue-squeue-all": (
        hqueue.main,
        ["-h", "-o", '{"%A",%F,%K,"%T"} %5C|%l|%L|%S|%e|%V|%m|%b|%N|%B|%r|%q|%Q|%y|%E|%Z|%o|%k|%U|%a|%f %%'],
    ),
    "hqueue-sort": (hqueue.main, ["-S", "-state,user,-i", "-o", "state,user,id"]),
    "hqueue-waiting-job": (hqueue.main, ["12"]),
    "hqueue-running-job": (hqueue.main, ["11"]),
    "hqueue-ended-job": (hqueue.main, ["10"]),
    "hqueue-hostile-job": (hqueue.main, ["30"]),
    "hqueue-json": (hqueue.main, ["--json"]),
    "hinfo": (hinfo.main, []),
    "hinfo-nodes": (hinfo.main, ["-N"]),
    "hinfo-reasons": (hinfo.main, ["-R"]),
    "hinfo-some": (hinfo.main, ["-h", "-p", "main", "-t", "idle,drain"]),
    "hacct": (hacct.main, []),
    "hacct-jobs": (hacct.main, ["-Xn", "-j", "10,12"]),
    "hacct-parsable": (
        hacct.main,
        ["-P", "-o", "jobidraw,state,nodelist,ntasks,elapsed,timelimit,totalcpu,maxrss,reqmem,alloctres,start,end"],
    ),
    "hacct-widths": (hacct.main, ["--format=jobid%-8,state%6,nnodes%4,user%-5"]),
    "hctl-job": (hctl.main, ["show", "job", "11"]),
    "hctl-job-line": (hctl.main, ["show", "job", "12", "-o"]),
    "hctl-nodes": (hctl.main, ["show", "nodes"]),
    "hctl-partition": (hctl.main, ["show", "part", "gpu"]),
    "hctl-config": (hctl.main, ["show", "config"]),
    "hctl-story": (hctl.main, ["story", "12"]),
    "hwhy": (hwhy.main, ["12"]),
    "hwhy-many-nodes": (hwhy.main, ["13"]),
    "hwhy-verbose": (hwhy.main, ["-v", "13"]),
    "hwhy-running": (hwhy.main, ["11"]),
    "hwhy-ended": (hwhy.main, ["29"]),
    "hsub-test-only-json": (hsub.main, ["--test-only", "--json", "--wrap", "true"]),
}


def prepare(api: FakeApi) -> None:
    """Give the API the queue, the nodes and the history of these tests."""
    now = {"now_s": NOW_S}
    api.answers |= {
        "GET /v1/jobs": {**now, "jobs": JOBS},
        "GET /v1/queue": lambda body, given: queue_answer(*(JOBS if given.get("array") else FOLDED))(body, given),
        "GET /v1/nodes": {**now, "nodes": NODES},
        "GET /v1/partitions": {"partitions": PARTITIONS},
        "GET /v1/history": {**now, "jobs": HISTORY},
        "GET /v1/ping": {**now, "counts": {"RUNNING": 50}, "nodes": {}},
        "GET /v1/config": {"config": {"cluster": "lab", "share": None, "admins": [], "requeue": True, "scheduler": {"a_s": 1}}},
        "GET /v1/job/12/story": {"job_id": 12, "events": [{"at_s": NOW_S, "kind": "Submitted", "text": "submitted\nby x"}]},
        "GET /v1/job/12/why": WHY | {"nodes": {"n1": "4 cpus", "n2": ""}},
        "GET /v1/job/13/why": WHY | {"nodes": {f"n{i}": "" for i in range(9)}, "nearest": ["n1"]},
        "GET /v1/job/11/why": {"text": "job 11 is RUNNING", "reason": "None", "expected_start_s": None},
        "GET /v1/job/29/why": {"text": "its script ended\nwith 3", "reason": "NonZeroExitCode", "expected_start_s": None},
        "POST /v1/test": {
            "job_id": 31, "start_s": NOW_S, "nodes": ["n1"], "node_list": "n1", "cpus": 1, "partition": "main",
            "reason": "None", "text": "would start at once on n1 in partition main",
        },
    }  # fmt: skip
    for one in JOBS:
        api.answers[f"GET /v1/job/{one['id']}"] = {**now, "jobs": [one | {"script": "secret", "env": {"A": "secret"}}]}


@pytest.mark.parametrize("case", CASES)
def test_output_is_as_recorded(case: str, api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(api)
    command, argv = CASES[case]
    status = command(argv)
    said = capsys.readouterr()
    path = EXPECTED / f"{case}.txt"
    if os.environ.get("HPCSCHED_RECORD"):
        path.write_text(said.out)
    assert (status, said.err) == (0, "")
    assert said.out == path.read_text()


def test_every_recorded_output_has_its_case() -> None:
    assert {path.stem for path in EXPECTED.iterdir()} == set(CASES)
