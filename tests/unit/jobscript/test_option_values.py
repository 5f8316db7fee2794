"""Arrays, dependencies, GPUs and the like, read from their texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hpcsched.errors import RequestError
from hpcsched.jobscript.options import ALL_OPTIONS
from hpcsched.jobscript.values import (
    Export,
    exported,
    parse_array,
    parse_dependency,
    parse_exclusive,
    parse_export,
    parse_gpus,
    parse_gres,
    parse_limit_s,
    parse_mail_types,
    parse_nice,
    parse_node_names,
    parse_nodes,
    parse_open_mode,
    parse_path,
    parse_priority,
    parse_yes_no,
    terms_text,
    with_job_ids,
)
from hpcsched.model.node import GpuRequest
from hpcsched.model.spec import ArraySpec, Dependency, DependencyKind
from hpcsched.model.units import UNLIMITED_S


@pytest.mark.parametrize(
    ("text", "indices", "limit"),
    [
        ("107", (107,), 0),
        ("8,18,28", (8, 18, 28), 0),
        ("1-9%9", tuple(range(1, 10)), 9),
        ("1%6", (1,), 6),
        ("0-15:4%2", (0, 4, 8, 12), 2),
        ("3,1-2,2", (1, 2, 3), 0),
        ("[0-2]", (0, 1, 2), 0),
        ("0-2%0", (0, 1, 2), 0),
    ],
)
def test_an_array(text: str, indices: tuple[int, ...], limit: int) -> None:
    assert parse_array(text) == ArraySpec(indices=indices, limit=limit)


@pytest.mark.parametrize(
    "text",
    ["", "a", "1-", "-1", "5-1", "1-5:0", "1,,2", "1%", "1%x", "1%-1", "1-2-3", "0-4294967295", "0-100000", "4000001"],
)
def test_what_is_no_array_or_too_large_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="cannot"):
        parse_array(text)


AFTER_OK = Dependency(kind=DependencyKind.AFTER_OK, job_ids=(12, 13))


@pytest.mark.parametrize(
    ("text", "dependencies", "any_one"),
    [
        ("", (), False),
        ("afterok:12:13", (AFTER_OK,), False),
        ("AfterOK:12:13", (AFTER_OK,), False),
        ("afterok:12:13,singleton", (AFTER_OK, Dependency(kind=DependencyKind.SINGLETON)), False),
        ("afterok:12:13?afterany:5", (AFTER_OK, Dependency(kind=DependencyKind.AFTER_ANY, job_ids=(5,))), True),
        ("after:14+5", (Dependency(kind=DependencyKind.AFTER, job_ids=(14,), delay_s=300),), False),
        ("afterok:12_3", (Dependency(kind=DependencyKind.AFTER_OK, job_ids=(12,), task=3),), False),
        ("after:12_0+5", (Dependency(kind=DependencyKind.AFTER, job_ids=(12,), task=0, delay_s=300),), False),
        (
            "after:1:2+1:3",
            (
                Dependency(kind=DependencyKind.AFTER, job_ids=(1, 3)),
                Dependency(kind=DependencyKind.AFTER, job_ids=(2,), delay_s=60),
            ),
            False,
        ),
    ],
)
def test_a_dependency(text: str, dependencies: tuple[Dependency, ...], any_one: bool) -> None:
    assert parse_dependency(text) == (dependencies, any_one)
    assert parse_dependency(terms_text(dependencies, any_one=any_one)) == (dependencies, any_one)


def test_a_dependency_is_shown_as_it_is_written() -> None:
    dependencies, any_one = parse_dependency("afterok:12:13?after:14+5?singleton")
    assert terms_text(dependencies, any_one=any_one) == "afterok:12:13?after:14+5?singleton"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("12", "'12' is none of after, afterok"),
        ("afterok", "afterok needs job ids"),
        ("afterok:", "'' is not a job id"),
        ("afterok:0", "not a job id"),
        ("afterok:x", "'x' is not a job id"),
        ("afterok:12_", "'12_' is not a job id, as 12 or 12_3"),
        ("afterok:12_x", "not a job id"),
        ("afterok:1+5", "only after takes +minutes"),
        ("singleton:1", "takes no job ids"),
        ("afterok:1,afterany:2?after:3", "not both"),
        ("afterok:1,", "'' is none of"),
        ("afterok" + ":1" * 1001, "more than 1000"),
        ("singleton," * 2000 + "singleton", "more than 1000"),
    ],
)
def test_a_wrong_dependency_is_refused(text: str, why: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse_dependency(text)
    assert why in str(refused.value)


def test_names_of_jobs_in_a_dependency_become_ids() -> None:
    ids = {"last": 41, "fit": 12}
    assert with_job_ids("afterok:last:7,after:fit+5,singleton", ids.__getitem__) == "afterok:41:7,after:12+5,singleton"
    assert with_job_ids("afterok:12_3?afterany:fit", ids.__getitem__) == "afterok:12_3?afterany:12"
    assert with_job_ids("afterok:,nonsense", ids.__getitem__) == "afterok:,nonsense"  # the parser says what is wrong


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("gpu", (GpuRequest(count=1),)),
        ("gpu:1", (GpuRequest(count=1),)),
        ("gpu:a100", (GpuRequest(count=1, type="a100"),)),
        ("gpu:a100:2", (GpuRequest(count=2, type="a100"),)),
        ("gpu:h100:4", (GpuRequest(count=4, type="h100"),)),
        ("gres/gpu:2", (GpuRequest(count=2),)),
        ("gpu:a100:1,gpu:v100:2", (GpuRequest(count=1, type="a100"), GpuRequest(count=2, type="v100"))),
        ("gpu:0", ()),
        ("none", ()),
    ],
)
def test_gres(text: str, gpus: tuple[GpuRequest, ...]) -> None:
    assert parse_gres(text) == (gpus, ())


def test_gres_of_shards() -> None:
    assert parse_gres("shard:2") == ((), (GpuRequest(count=2),))
    assert parse_gres("shard") == ((), (GpuRequest(count=1),))
    assert parse_gres("shard:a100:3") == ((), (GpuRequest(count=3, type="a100"),))


def test_a_mig_profile_is_a_type() -> None:
    assert parse_gpus("1g.10gb:2") == (GpuRequest(count=2, type="1g.10gb"),)
    assert parse_gres("gpu:1g.10gb") == ((GpuRequest(count=1, type="1g.10gb"),), ())


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("4", (GpuRequest(count=4),)),
        ("A40:1", (GpuRequest(count=1, type="A40"),)),
        ("a100", (GpuRequest(count=1, type="a100"),)),
        ("a100:1,v100:2", (GpuRequest(count=1, type="a100"), GpuRequest(count=2, type="v100"))),
        ("0", ()),
    ],
)
def test_gpus(text: str, gpus: tuple[GpuRequest, ...]) -> None:
    assert parse_gpus(text) == gpus


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (parse_gres, "fpga:1"), (parse_gres, "gpu:1,shard:1"), (parse_gres, "shard:a:1,shard:b:1"),
        (parse_gres, "gpu:a:b:1"), (parse_gres, "gpu:1,gpu:2"), (parse_gres, "gpu:-1"),
        (parse_gres, "gpu:a100:x"), (parse_gres, "gpu:"),
        (parse_gpus, ""), (parse_gpus, ":2"), (parse_gpus, "a100:"), (parse_gpus, "1,2"),
        (parse_gpus, "9" * 7), (parse_gpus, "٤"), (parse_nodes, "0"), (parse_nodes, "4-2"), (parse_nodes, "2-"),
        (parse_nodes, "-2"), (parse_nodes, "1,2"), (parse_node_names, "-oProxyCommand=x"), (parse_node_names, "a;b"),
        (parse_node_names, "n[0-999999999]"), (parse_mail_types, "SOMETIMES"), (parse_mail_types, ""),
        (parse_nice, "very"), (parse_nice, "2147483646"), (parse_priority, "-1"), (parse_priority, "4294967295"),
        (parse_open_mode, "x"), (parse_open_mode, ""), (parse_exclusive, "no"), (parse_yes_no, "maybe"),
        (parse_path, "a\nb"), (parse_export, "A=1,='x'"), (parse_export, "A='x"), (parse_export, "ALL,NONE"),
        (parse_export, "A B=1"), (parse_limit_s, "soon"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused(read: Callable[[str], Any], text: str) -> None:
    with pytest.raises(RequestError, match="cannot"):
        read(text)


def test_single_values() -> None:
    assert parse_nodes("4") == (4, 4)
    assert parse_nodes("2-4") == (2, 4)
    assert parse_limit_s("0") == parse_limit_s("UNLIMITED") == UNLIMITED_S
    assert parse_node_names("n[1-2],n1") == ("n1", "n2")
    assert parse_mail_types("end,FAIL,end") == ("END", "FAIL")
    assert parse_nice("-5") == -5
    assert parse_priority("top") == 4_294_967_294
    assert parse_open_mode("A") == "append"
    assert parse_path("None") == "/dev/null"


ENVIRON = {"PATH": "/bin", "HOME": "/home/u", "A": "1", "_": "/usr/bin/hsub"}


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("ALL", {"PATH": "/bin", "HOME": "/home/u", "A": "1"}),
        ("NONE", {}),
        ("nil", {}),
        ("A,MISSING", {"A": "1"}),
        ("A=2,B=x=y", {"A": "2", "B": "x=y"}),
        ("ALL,A=2", {"PATH": "/bin", "HOME": "/home/u", "A": "2"}),
        ("NONE,B=1", {"B": "1"}),
        ("B='x,y',C=\"z\"", {"B": "x,y", "C": "z"}),
        ("", {}),
    ],
)
def test_export_takes_along(text: str, taken: dict[str, str]) -> None:
    assert exported(parse_export(text), ENVIRON) == (taken, [])


def test_slurms_commands_and_the_umask_go_along_whatever_is_exported() -> None:
    environ = ENVIRON | {"PATH": "/venv/libexec/hpcsched/slurm:/bin", "SLURM_UMASK": "0002"}
    path = "/venv/libexec/hpcsched/slurm:/usr/local/bin:/usr/bin:/bin"
    assert exported(parse_export("NONE"), environ) == ({"PATH": path, "SLURM_UMASK": "0002"}, [])
    assert exported(parse_export("PATH=/x"), environ)[0]["PATH"] == "/x"
    assert exported(parse_export("PATH"), environ)[0]["PATH"] == environ["PATH"]


def test_a_job_submitted_from_within_a_job_takes_nothing_of_that_one_along() -> None:
    within = ENVIRON | {
        "HPCSCHED_JOB_ID": "1", "HPCSCHED_CONFIG": "/etc/x", "SLURM_JOB_ID": "1", "SLURM_TIME_FORMAT": "standard",
        "SRUN_DEBUG": "3", "PMIX_RANK": "0", "PMI_RANK": "0", "OMPI_MCA_x": "1", "HYDRA_HOST_FILE": "/x",
        "HYDRA_FULL_ERROR": "1", "RANK": "0", "MASTER_ADDR": "n1", "CUDA_VISIBLE_DEVICES": "0",
    }  # fmt: skip
    taken, _ = exported(Export(everything=True), within)
    assert set(taken) == {"PATH", "HOME", "A", "HPCSCHED_CONFIG", "SLURM_TIME_FORMAT", "HYDRA_FULL_ERROR"}
    taken, _ = exported(Export(everything=True), ENVIRON | {"MASTER_ADDR": "n1"})
    assert taken["MASTER_ADDR"] == "n1"


def test_what_cannot_be_taken_along_is_left_out_with_a_note() -> None:
    taken, notes = exported(Export(everything=True), {"OK": "1", "BAD": "caf\udce9", "BIG": "x" * (128 << 10)})
    assert taken == {"OK": "1"}
    assert len(notes) == 2
    assert "'BAD'" in notes[0]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("bit", ["a", "1", ",", ":", "-", "?", "%", "1,", "a:", "'", "+", "gpu,", "afterok:", "\n"])
def test_long_values_need_no_long_work(bit: str) -> None:
    text = bit * (100_000 // len(bit))
    for option in ALL_OPTIONS:
        try:
            option.parse(text)
        except RequestError as refused:
            if len(str(refused)) > 1000:
                raise
