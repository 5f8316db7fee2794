"""slurmrestd's job description becomes a job of ours, or is refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest

from hpcsched.errors import NotFoundError, PermissionDeniedError, RequestError, UnavailableError
from hpcsched.gateway.slurm_objects import error_of, minutes, number, submission
from hpcsched.model.node import GpuRequest

slurmrestapi = pytest.importorskip("slurmrestapi")  # a client that is generated from Slurm's specification
NOW_S = 1_800_000_000.0
SCRIPT = "#!/bin/sh\n#SBATCH --nodes=7\nhostname\n"


def submitted(**job: Any) -> Any:
    return submission({"script": SCRIPT, "job": job}, "/home/ann", NOW_S)[0]


def test_a_description_of_a_generated_client_is_understood() -> None:
    described = slurmrestapi.V0041JobDescMsg(
        name="sweep", partition="main", account="lab", tasks=4, cpus_per_task=2, minimum_nodes=1, maximum_nodes=3,
        time_limit=slurmrestapi.V0041JobDescMsgTimeLimit(set=True, number=90), current_working_directory="/home/ann/w",
        environment=["PATH=/bin", "EMPTY=", "A=b=c"], array="0-3%2", standard_output="%A.out", requeue=False, hold=True,
        memory_per_node=slurmrestapi.V0041JobDescMsgMemoryPerCpu(set=True, number=2048), tres_per_node="gres/gpu:a100:2",
        begin_time=slurmrestapi.V0041JobDescMsgBeginTime(set=True, number=1_800_000_600), required_nodes=["n1", "n2"],
        kill_warning_signal="USR1", kill_warning_delay=slurmrestapi.V0041JobDescMsgKillWarningDelay(set=True, number=30),
        exclusive=["true"], argv=["job.sh", "one", "two words"],
    )  # fmt: skip
    body = slurmrestapi.V0041JobSubmitReq(script=SCRIPT, job=described).to_dict()
    spec, warnings = submission(body, "/home/ann", NOW_S)
    assert warnings == []
    assert (spec.name, spec.partition, spec.account, spec.ntasks, spec.cpus_per_task) == ("sweep", "main", "lab", 4, 2)
    assert (spec.nodes_min, spec.nodes_max, spec.time_limit_s, spec.work_dir) == (1, 3, 5400, "/home/ann/w")
    assert dict(spec.env) == {"PATH": "/bin", "EMPTY": "", "A": "b=c"}
    assert spec.array is not None
    assert (spec.array.indices, spec.array.limit) == ((0, 1, 2, 3), 2)
    assert (spec.stdout, spec.requeue, spec.hold, spec.exclusive) == ("%A.out", False, True, True)
    assert spec.mem_per_node_mib == 2048
    assert spec.gpus_per_node == (GpuRequest(type="a100", count=2),)
    assert spec.begin_at_s == 1_800_000_600
    assert spec.nodelist == ("n1", "n2")
    assert spec.signal is not None
    assert (spec.signal.signum, spec.signal.before_s) == (10, 30)
    assert spec.script_args == ("one", "two words")


def test_lines_of_options_in_the_script_are_ignored_as_slurmrestd_does() -> None:
    assert submitted().nodes_min == 1


@pytest.mark.parametrize(
    ("job", "spec"),
    [
        ({"time_limit": 5}, {"time_limit_s": 300}),
        ({"time_limit": "1:00:00"}, {"time_limit_s": 3600}),
        ({"time_limit": {"set": True, "infinite": True, "number": 0}}, {"time_limit_s": 3_153_600_000}),
        ({"time_limit": {"set": False, "infinite": False, "number": 7}}, {"time_limit_s": None}),
        ({"memory_per_cpu": {"number": 100}}, {"mem_per_cpu_mib": 100}),
        ({"nodes": "2-4"}, {"nodes_min": 2, "nodes_max": 4}),
        ({"environment": {"A": "b"}}, {"env": (("A", "b"),)}),
        ({"partition": None, "comment": "", "required_nodes": [], "tasks": None}, {"partition": "", "ntasks": None}),
        ({"script": "#!/bin/sh\nhere\n"}, {"script": "#!/bin/sh\nhere\n"}),
        ({}, {"work_dir": "/home/ann", "name": "sbatch", "exclusive": False}),
    ],
)
def test_fields_have_several_forms(job: dict[str, Any], spec: dict[str, Any]) -> None:
    made = submitted(**job)
    assert {name: getattr(made, name) for name in spec} == spec


@pytest.mark.parametrize(
    ("job", "why"),
    [
        ({"user_id": "0"}, "cannot take the field user_id: the token says who asks"),
        ({"group_id": "0"}, "the token says who asks"),
        ({"hetjob_group": 1}, "use hsub for heterogeneous jobs"),
        ({"tasks": "many"}, "many"),
        ({"tasks": True}, "it is not a number"),
        ({"tasks": [1]}, "it is not a number"),
        ({"name": 5}, "cannot take the field name: it is not a text"),
        ({"environment": ["A=1"] * 2_001}, "at most 2000"),
        ({"environment": {"A": 1}}, "a value is not a text"),
        ({"environment": [1]}, "it is not a list of texts"),
        ({"environment": "A"}, "Invalid|environment|cannot"),
        ({"tres_per_node": "gres/fpga:1"}, "there are GPUs only"),
        ({"begin_time": {"set": True, "number": -4}}, "not a Unix time"),
        ({"begin_time": "9" * 400}, "not a Unix time"),
        ({"nodes": "1-99999999999999"}, "cannot"),
        ({"array": "0-4294967295"}, "cannot"),
        ({"hold": "yes"}, "it is not true or false"),
    ],
)
def test_what_is_not_possible_is_refused(job: dict[str, Any], why: str) -> None:
    with pytest.raises(RequestError, match=why):
        submitted(**job)


@pytest.mark.parametrize("body", [{}, {"job": []}, {"jobs": [{}, {}]}, {"job": {}}, {"script": 5, "job": {}}])
def test_a_request_without_a_job_or_script_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="cannot submit"):
        submission(body, "/home/ann", NOW_S)


def test_fields_without_effect_are_named_in_warnings() -> None:
    _, warnings = submission({"script": SCRIPT, "job": {"wckey": "x", "nonsense": 1}}, "/home/ann", NOW_S)
    assert warnings == ["the field nonsense has no effect", "the field wckey has no effect"]


def test_errors_have_slurms_numbers_and_words() -> None:
    for error, expected in (
        (NotFoundError("cannot find job 9"), (404, 2017, "Invalid job id specified")),
        (PermissionDeniedError("cannot cancel job 9"), (403, 2002, "Access/permission denied")),
        (RequestError("cannot submit: invalid partition name 'x'"), (400, 2000, "Invalid partition name specified")),
        (RequestError("cannot take the field tasks: it is not a number"), (400, 9001, "Failure during parsing")),
        (UnavailableError("gone"), (503, 1800, "Unable to contact slurm controller (connect failure)")),
    ):
        status, shown = error_of(error, "here")
        assert (status, shown["error_number"], shown["error"]) == expected
        assert shown["description"] == str(error)


def test_numbers_may_be_missing() -> None:
    assert number(None) == {"set": False, "infinite": False, "number": 0}
    assert minutes(61) == {"set": True, "infinite": False, "number": 2}
    assert minutes(None)["infinite"] is True
