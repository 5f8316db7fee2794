"""From options to a job: defaults, what follows from what, and what contradicts itself."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from hpcsched.errors import RequestError
from hpcsched.jobscript.build import Built, build_spec, script_name
from hpcsched.jobscript.options import parse_command_line
from hpcsched.model.node import GpuRequest
from hpcsched.model.spec import ArraySpec, JobSpec, SignalSpec
from hpcsched.model.units import UNLIMITED_S

SCRIPT = "#!/bin/sh\necho\n"
NOW_S = datetime(2026, 11, 21, 15, 30).timestamp()


def build(words: str, **more: Any) -> Built:
    given = {"script": SCRIPT, "default_name": "job.sh", "work_dir": "/home/u", "environ": {"A": "1"}, "now_s": NOW_S}
    return build_spec(parse_command_line(words.split()).options, **{**given, **more})


def spec(words: str, **more: Any) -> JobSpec:
    return build(words, **more).spec


def test_a_job_that_asks_for_nothing() -> None:
    assert build("") == Built(
        spec=JobSpec(
            name="job.sh", script=SCRIPT, work_dir="/home/u", submit_dir="/home/u", env=(("A", "1"),)
        )  # fmt: skip
    )


def test_a_job_that_asks_for_much() -> None:
    found = spec(
        "-J train -p gpu,big -A lab -q high -t 1-0 -N2-4 --ntasks-per-node=2 -c 4 --mem=4G --gres=gpu:a100:2 -a 0-7%2 "
        "-o %x-%j.out -e err -i in --open-mode=append -D sub --signal=B:USR1@120 --requeue --exclusive -w n[1-2] -x n3 "
        "-C a&b --comment hi --mail-type=END,FAIL --mail-user=a@b -H -b 16:00 --nice=5 --priority=9 --lease=kill "
        "--dependency=singleton --export=B=2",
        script_args=("x", "y"),
        submit_line="hsub -J train",
        submit_host="head",
    )
    assert found == JobSpec(
        name="train", script=SCRIPT, work_dir="/home/u/sub", submit_dir="/home/u", script_args=("x", "y"),
        env=(("B", "2"),), submit_line="hsub -J train", submit_host="head", account="lab", partition="gpu,big",
        qos="high", comment="hi", stdout="%x-%j.out", stderr="err", stdin="in", open_mode="append",
        time_limit_s=86_400, nodes_min=2, nodes_max=4, nodes_given=True, ntasks_per_node=2, cpus_per_task=4,
        cpus_per_task_given=True, mem_per_node_mib=4096, gpus_per_node=(GpuRequest(count=2, type="a100"),),
        exclusive=True, nodelist=found.nodelist, exclude=found.exclude, constraint="a&b",
        array=ArraySpec(indices=tuple(range(8)), limit=2), dependency=found.dependency,
        begin_at_s=int(datetime(2026, 11, 21, 16).timestamp()), hold=True, nice=5, priority=9, requeue=True,
        signal=SignalSpec(signum=10, before_s=120, batch_only=True), lease="kill", mail_user="a@b",
        mail_type=("END", "FAIL"),
    )  # fmt: skip
    assert found.nodelist == ("n1", "n2")
    assert found.exclude == ("n3",)


def test_mail_types_of_several_options_add_up() -> None:
    assert spec("--mail-type=END --mail-type=FAIL,END").mail_type == ("END", "FAIL")


def test_requeue_is_the_configurations_unless_said() -> None:
    assert spec("").requeue is None
    assert spec("--no-requeue").requeue is False


def test_no_limit_is_not_the_same_as_none_given() -> None:
    assert spec("").time_limit_s is None
    assert spec("-t 0").time_limit_s == spec("-t UNLIMITED").time_limit_s == UNLIMITED_S


def test_more_nodes_than_tasks_become_as_many_as_tasks() -> None:
    found = build("-N3 -n2")
    assert (found.spec.nodes_min, found.spec.nodes_max, found.spec.ntasks) == (2, 2, 2)
    assert found.notes == ("2 tasks cannot run on 3 nodes: the job asks for 2",)


def test_a_rounded_time_limit_and_a_signal_at_the_start_are_noted() -> None:
    assert build("-t 0:05").notes == ("the time limit is rounded up to whole minutes: 1:00",)
    assert build("-t 1:00").notes == build("-t 5").notes == ()
    (note,) = build("-t 1 --signal=USR1@120").notes
    assert note.startswith("the signal of --signal is due 120 s before the time limit of 1:00")


def test_a_least_time_is_no_more_than_the_limit() -> None:
    assert spec("--time=60 --time-min=0:30:00").time_min_s == 1800
    with pytest.raises(
        RequestError, match="cannot lower the time limit of 1:00:00 to --time-min=1:01:00: that is more"
    ):
        build("--time=60 --time-min=61")


def test_what_has_no_effect_is_accepted_and_said() -> None:
    found = build("--wckey=x --hint=nomultithread -M all --no-kill")
    assert found.spec == spec("")
    assert [note.split(":")[0] for note in found.notes] == [
        f"--{name} has no effect" for name in ("wckey", "clusters", "no-kill")
    ]


def test_what_is_for_each_gpu_is_shared_out() -> None:
    assert spec("--gpus-per-node=2 --cpus-per-gpu=4").cpus_per_task == 8
    assert spec("--gpus-per-node=2 --ntasks-per-node=4 --cpus-per-gpu=3").cpus_per_task == 2
    assert spec("--gpus-per-task=1 -n4 --cpus-per-gpu=3").cpus_per_task == 3
    assert spec("--gpus=8 -N4 --mem-per-gpu=2G").mem_per_node_mib == 4096
    assert spec("--gpus-per-task=1 --ntasks-per-node=2 --mem-per-gpu=2G").mem_per_node_mib == 4096


def test_an_allocation_needs_no_script() -> None:
    assert spec("-n1", script=None).script == ""


def test_a_directory_may_be_absolute() -> None:
    assert spec("-D /data").work_dir == "/data"


def test_gres_and_gpus_per_node_may_say_the_same() -> None:
    assert spec("--gres=gpu:2 --gpus-per-node=2").gpus_per_node == (GpuRequest(count=2),)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--gres=gpu:2 --gpus-per-node=3", "--gres and --gpus-per-node"),
        ("--gpus-per-node=1 --gpus-per-task=1", "--gpus-per-node (or --gres) and --gpus-per-task"),
        ("--mem=1G --mem-per-cpu=1G", "exclude each other"),
        ("--cpus-per-gpu=2 -c2 --gpus=1", "--cpus-per-gpu and --cpus-per-task"),
        ("--cpus-per-gpu=2", "without GPUs"),
        ("--mem-per-gpu=2G --gpus=3", "say --gpus-per-node"),
        ("-N2 --ntasks-per-node=2 -n5", "cannot give job 5 tasks: --nodes=2 with --ntasks-per-node=2 allows 4"),
        ("-N1 -w n[1-2]", "--nodelist names 2"),
        ("-w n[1-2] -x n2", "cannot use node n2"),
        ("-C a&&b", "cannot"),
        ("--mail-user=-oX", "--mail-user '-oX'"),
        ("-p a;b", "--partition 'a;b'"),
        ("-b yesteryear", "cannot read time 'yesteryear'"),
        ("-J " + "x" * 1025, "--name of 1025 characters"),
        ("--export=" + "A=" + "x" * (128 << 10), "the most is 131072"),
    ],
)
def test_contradictions_are_refused(words: str, why: str) -> None:
    with pytest.raises(RequestError) as refused:
        build(words)
    assert str(refused.value).startswith("cannot ")
    assert why in str(refused.value)


def test_a_script_without_an_interpreter_is_refused() -> None:
    with pytest.raises(RequestError, match="This does not look like a batch script"):
        build("", script="echo\n")


@pytest.mark.parametrize(
    ("words", "script", "name"),
    [
        ("job.sh", "/x/job.sh", "job.sh"),
        ("", None, "sbatch"),
        ("", "/dev/stdin", "sbatch"),
        ("--wrap=ls", None, "wrap"),
    ],
)
def test_a_job_is_named_after_its_script(words: str, script: str | None, name: str) -> None:
    assert script_name(parse_command_line(words.split()).options, script) == name
