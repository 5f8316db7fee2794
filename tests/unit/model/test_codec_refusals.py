"""What is not exactly a job specification is refused, with the field that is wrong."""

from __future__ import annotations

import dataclasses

import pytest

from hpcsched.errors import ProtocolError
from hpcsched.model.codec import spec_from_json, spec_to_json
from hpcsched.model.node import GpuRequest
from hpcsched.model.spec import ArraySpec, Dependency, DependencyKind, JobSpec, SignalSpec

FULL = JobSpec(
    name="n",
    script="#!/bin/sh\n",
    work_dir="/w",
    env=(("A", "1"),),
    array=ArraySpec(indices=(1, 2), limit=1),
    dependency=(Dependency(kind=DependencyKind.AFTER_OK, job_ids=(3,)),),
    signal=SignalSpec(signum=10),
    gpus_per_node=(GpuRequest(count=2, type="a100"),),
)


def test_every_field_is_written_and_a_tuple_is_a_list() -> None:
    obj = spec_to_json(FULL)
    assert set(obj) == {field.name for field in dataclasses.fields(JobSpec)}
    assert obj["env"] == [["A", "1"]]
    assert obj["dependency"] == [{"kind": "afterok", "job_ids": [3], "delay_s": 0, "task": None}]
    assert type(obj["dependency"][0]["kind"]) is str
    assert spec_from_json(obj) == FULL


def test_missing_fields_take_their_defaults() -> None:
    spec = spec_from_json({"name": "n", "script": "", "work_dir": "/"})
    assert spec == JobSpec(name="n", script="", work_dir="/")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"colour": "red"}, "unknown field 'colour'"),
        ({"name": 5}, "name: a whole number where a text is wanted"),
        ({"nodes_min": True}, "nodes_min: true or false where a whole number is wanted"),
        ({"nodes_min": 1.0}, "nodes_min: a fraction where a whole number is wanted"),
        ({"nodes_min": None}, "nodes_min: null where a whole number is wanted"),
        ({"exclusive": 1}, "exclusive: a whole number where true or false is wanted"),
        ({"script_args": "abc"}, "script_args: a text where a list, each item a text, is wanted"),
        ({"script_args": ["a", 1]}, "script_args: "),
        ({"env": [["A"]]}, "env: a list where a list of a text and a text is wanted"),
        ({"env": {"A": "1"}}, "env: an object where a list is wanted"),
        ({"array": {"indices": [1, True]}}, "array: indices: "),
        ({"array": {}}, "array: it has no 'indices'"),
        ({"dependency": [{"kind": "afterwards"}]}, "dependency: kind: 'afterwards' is none of after, afterok"),
        ({"dependency": [{"kind": ["after"]}]}, "is none of"),
        ({"signal": {"signum": 10, "x": 1}}, "signal: unknown field 'x'"),
        ({"time_limit_s": "60"}, "time_limit_s: a text where a whole number is wanted"),
    ],
)
def test_a_wrong_field_is_refused_by_name(change: dict[str, object], why: str) -> None:
    with pytest.raises(ProtocolError) as refused:
        spec_from_json({**spec_to_json(FULL), **change})
    assert why in str(refused.value)


@pytest.mark.parametrize("obj", [None, [], "x", 1, {}, {"name": "n"}])
def test_what_is_no_object_or_lacks_fields_is_refused(obj: object) -> None:
    with pytest.raises(ProtocolError, match="cannot read JobSpec"):
        spec_from_json(obj)
