"""A specification from anywhere: each value that cannot be is refused, by its option's name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpcsched.errors import RequestError
from hpcsched.jobscript.build import check_spec
from hpcsched.model.ids import NodeName
from hpcsched.model.node import GpuRequest
from hpcsched.model.spec import ArraySpec, Dependency, DependencyKind, JobSpec, SignalSpec

GOOD = JobSpec(name="n", script="#!/bin/sh\n", work_dir="/w", env=(("A", "a\nb"), ("BASH_FUNC_x%%", "() { :; }")))


def test_a_good_one_passes() -> None:
    check_spec(GOOD)
    check_spec(replace(GOOD, script="", submit_line="hsub -J 'a\nb'", comment="caf\u00e9", mem_per_node_mib=0))


@pytest.mark.parametrize(
    "change",
    [
        {"name": ""}, {"name": "a\nb"}, {"name": "a\0b"}, {"name": "\x1b[31m"}, {"name": "x" * 1025}, {"name": "\udce9"},
        {"work_dir": "rel"}, {"work_dir": ""}, {"comment": "a\nb"}, {"comment": "x" * 4097}, {"stdout": "a\0"},
        {"account": "a b"}, {"partition": "$(id)"}, {"qos": "-x"}, {"mail_user": "a`b`@c"}, {"open_mode": "x"},
        {"lease": ""}, {"mail_type": ("SOMETIMES",)}, {"script": "echo"}, {"script": "#!/bin/sh\r\n"},
        {"script_args": ("a\0",)}, {"script_args": ("x" * (512 << 10),)}, {"submit_line": "\udce9"},
        {"env": (("", "1"),)}, {"env": (("A=B", "1"),)}, {"env": (("A\nB", "1"),)}, {"env": (("A", "\0"),)},
        {"env": (("A", "\udce9"),)}, {"env": (("A", "x" * (10 << 20)),)}, {"env": (("A", "x" * (200 << 10)),)},
        {"env": (("A", "1"), ("A", "2"))}, {"env": tuple((f"V{i}", "") for i in range(100_000))},
        {"nodes_min": 0}, {"nodes_min": 3, "nodes_max": 2}, {"nodes_max": 1 << 40}, {"cpus_per_task": 0},
        {"ntasks": 0}, {"ntasks": 1 << 31}, {"ntasks_per_node": -1}, {"mem_per_node_mib": -1},
        {"mem_per_cpu_mib": 1 << 60}, {"mem_per_node_mib": 1, "mem_per_cpu_mib": 1}, {"time_limit_s": 0},
        {"time_limit_s": 1 << 60}, {"begin_at_s": -1}, {"begin_at_s": 1 << 60}, {"priority": 1 << 32},
        {"nice": 1 << 31}, {"gpus_total": (GpuRequest(count=0),)}, {"gpus_total": (GpuRequest(count=1 << 30),)},
        {"gpus_per_node": (GpuRequest(count=1, type="a b"),)},
        {"gpus_per_task": (GpuRequest(count=1), GpuRequest(count=2))},
        {"reservation": "a;touch X"}, {"distribution": "`id`"}, {"hints": ("$(id)",)}, {"licenses": (("a\nb", 1),)},
        {"exclude": (NodeName("-oProxyCommand=x"),)}, {"stdin": "a\nb"}, {"stderr": "a\0"}, {"submit_host": "a\nb"},
        {"nodelist": (NodeName("-x"),)}, {"nodelist": (NodeName("n1"),), "exclude": (NodeName("n1"),)},
        {"exclude": tuple(NodeName(f"n{i}") for i in range(70_000))},
        {"array": ArraySpec(indices=())}, {"array": ArraySpec(indices=(2, 1))}, {"array": ArraySpec(indices=(1, 1))},
        {"array": ArraySpec(indices=(-1,))}, {"array": ArraySpec(indices=(1 << 40,))},
        {"array": ArraySpec(indices=tuple(range(100_001)))}, {"array": ArraySpec(indices=(1,), limit=-1)},
        {"dependency": (Dependency(kind=DependencyKind.AFTER),)},
        {"dependency": (Dependency(kind=DependencyKind.SINGLETON, job_ids=(1,)),)},
        {"dependency": (Dependency(kind=DependencyKind.AFTER_OK, job_ids=(1,), delay_s=60),)},
        {"dependency": (Dependency(kind=DependencyKind.AFTER_OK, job_ids=tuple(range(1, 1002))),)},
        {"dependency": (Dependency(kind=DependencyKind.AFTER_OK, job_ids=(0,)),)},
        {"signal": SignalSpec(signum=0)}, {"signal": SignalSpec(signum=65)},
        {"signal": SignalSpec(signum=9, before_s=70_000)},
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        check_spec(replace(GOOD, **change))
    assert str(refused.value).startswith("cannot ")
    assert len(str(refused.value)) < 500
