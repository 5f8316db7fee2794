"""A job specification survives its way through JSON, whatever it holds."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcsched.errors import ProtocolError
from hpcsched.model.codec import spec_from_json, spec_to_json, spec_to_short_json, value_from_json, value_to_json
from hpcsched.model.node import Share
from hpcsched.model.spec import ArraySpec, Dependency, JobSpec, SignalSpec

TEXT = st.text(max_size=12)
NUMBER = st.integers(0, 2**53)
DEPENDENCIES = st.builds(Dependency, kind=..., job_ids=st.lists(NUMBER, max_size=3).map(tuple))
SPECS = st.builds(
    JobSpec,
    name=TEXT,
    script=TEXT,
    work_dir=TEXT,
    script_args=st.lists(TEXT, max_size=3).map(tuple),
    script_path=TEXT,
    submit_line=TEXT,
    submit_dir=TEXT,
    mem_per_node_mib=st.none() | NUMBER,
    env=st.lists(st.tuples(TEXT, TEXT), max_size=3).map(tuple),
    time_limit_s=st.none() | NUMBER,
    gpus_per_node=...,
    nodelist=st.lists(TEXT, max_size=3).map(tuple),
    array=st.none() | st.builds(ArraySpec, indices=st.lists(NUMBER, max_size=4).map(tuple), limit=NUMBER),
    dependency=st.lists(
        st.builds(Dependency, kind=..., job_ids=st.lists(NUMBER, max_size=3).map(tuple)), max_size=2
    ).map(tuple),
    signal=st.none() | st.builds(SignalSpec, signum=NUMBER),
    requeue=st.none() | st.booleans(),
    exclusive=st.booleans(),
    begin_at_s=st.none() | NUMBER,
)


@settings(max_examples=60)
@given(SPECS)
def test_a_spec_is_the_same_after_a_round_trip(spec: JobSpec) -> None:
    assert spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec


@settings(max_examples=30)
@given(st.builds(Share, node=TEXT, cpus=NUMBER, mem_mib=NUMBER, gpus=st.lists(NUMBER, max_size=3).map(tuple)))
def test_a_share_is_the_same_after_a_round_trip(share: Share) -> None:
    assert value_from_json(Share, json.loads(json.dumps(value_to_json(share)))) == share


@settings(max_examples=60)
@given(SPECS)
def test_a_spec_without_its_defaults_is_read_as_the_whole(spec: JobSpec) -> None:
    short = json.loads(json.dumps(spec_to_short_json(spec)))
    assert spec_from_json(short) == spec
    defaults = {field.name: field.default for field in fields(JobSpec)}
    assert not [name for name in short if getattr(spec, name) == defaults[name]]


def test_a_field_from_elsewhere_is_refused_wherever_it_stands() -> None:
    text = json.dumps(spec_to_json(JobSpec(name="a", script="", work_dir="/")), separators=(",", ":"))
    for key in (field.name for field in fields(JobSpec)):
        wrong = text.replace(f'"{key}":', f'"odd":1,"{key}":', 1)
        with pytest.raises(ProtocolError, match="unknown field 'odd'"):
            spec_from_json(json.loads(wrong))
