"""JSON and numbers from outside: accepted within bounds, else rejected with a reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hpcnode.commands.step_client import as_text
from hpcnode.wire import gate, protocol
from hpcsched.errors import RequestError
from hpcsched.model.units import number, whole_number


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        0,
        -1,
        10**18 - 1,
        -(10**18) + 1,
        0.25,
        1e300,
        "é",
        "\U0001f600",
        "\\u0000 in a script",
        "\\ud800",
        {"a": [None, True]},
    ],
)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_good_json_is_read(value: Any, ascii_only: bool) -> None:
    assert gate.read_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"a": "\\ud800"}', "a: it is not UTF-8 text"),
        (b'{"a": ["x", "y\\udcff"]}', r"a: number 2: it is not UTF-8 text \(character 2\)"),
        (b'{"\\uD800": 1}', "a name: it is not UTF-8 text"),
        (b'{"a": "\\u0000"}', "a: it has a NUL"),
        (b'"a\xffb"', r"it is not UTF-8 text \(byte 2\)"),
        (b"1" * 19, "more than 18 digits"),
        (b"-" + b"9" * 5000, "more than 18 digits"),
        (b"1e999", "too large"),
        (b"0." + b"1" * 100, "too long"),
        (b"NaN", "NaN is not a number"),
        (b"[-Infinity]", "-Infinity is not a number"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b"[" * 33 + b"]" * 33, "nested too deep"),
        (b'{"a":' * 33 + b"1" + b"}" * 33, "nested too deep"),
        (b'{"a":' * 32 + b"{}" + b"}" * 32, "nested too deep"),
        (b"[[], 0, " + b"[" * 32 + b"1" + b"]" * 33, "nested too deep"),
        (b"[" * 200_000, "nested too deep"),
        (b"{", "not JSON"),
        (b"", "not JSON"),
        (b'"\x00"', "not JSON"),
    ],
)
def test_d2_bad_json_is_rejected_with_its_place(text: bytes, why: str) -> None:
    with pytest.raises(gate.GateError, match=why):
        gate.read_json(text)


def test_nesting_up_to_the_limit_is_read() -> None:
    text = b"[" * gate.MAX_DEPTH + b"]" * gate.MAX_DEPTH
    assert gate.read_json(text)
    assert gate.read_json(b"[" + b"[]," * 1000 + b"[]]") == [[]] * 1001  # wide is not deep


@pytest.mark.parametrize("text", ["0", "007", "+5", "-5", "9" * 18])
def test_a_whole_number_is_read(text: str) -> None:
    assert gate.whole_number(text) == whole_number(text) == int(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "'' is not a whole number"),
        ("9" * 19, "more than 18 digits"),
        ("9" * 10_000, "more than 18 digits"),
        ("1_000", "is not a whole number"),
        (" 1", "is not a whole number"),
        ("٣", "is not a whole number|more than"),
        ("1.5", "is not a whole number"),
        ("--1", "is not a whole number|more than"),
        ("1\n", "is not a whole number"),
    ],
)
def test_another_text_is_refused_as_a_whole_number(text: str, why: str) -> None:
    with pytest.raises(gate.GateError, match=why):
        gate.whole_number(text)
    with pytest.raises(RequestError, match="cannot read a job id: "):
        whole_number(text, "a job id")


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999", "x", "", "1" * 100])
def test_what_is_not_a_number_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="cannot read start_s: "):
        number(text, "start_s")


@pytest.mark.parametrize("bad", ['"\\ud800"', '"\\u0000"', "1e400", "9" * 400, "[" * 100 + "]" * 100])
def test_a_message_with_bad_text_is_rejected_for_every_type(bad: str) -> None:
    """S9: boot_id, facts.fault, facts.machine_id and Condition.why of a hostile node; S1: what a step command says."""
    texts = [
        f'{{"type":"Condition","why":{bad}}}',
        f'{{"type":"Welcome","version":1,"node":"n1","boot_id":"b","agent_version":"x","pid":1,"epoch":1,"inventory":[],'
        f'"facts":{{"fault":{bad}}}}}',
        f'{{"type":"FromStream","stream":1,"uid":1,"job_id":1,"attempt":0,"message":{{"type":"Progress","note":{bad}}}}}',
        f'{{"type":"StepRequest","version":1,"job_id":1,"options":{{"output":{bad}}},"argv":["a"],"work_dir":"/","env":{{}}}}',
    ]
    for text in texts:
        with pytest.raises(protocol.WireError, match="cannot read"):
            protocol.parse(text.encode())


def test_a_message_about_a_name_that_is_not_utf8_is_readable() -> None:
    framer = protocol.Framer()
    ((said, _),) = framer.feed(protocol.encode(protocol.Condition(why="cannot write /data/caf\udce9: disk full")))
    assert said == protocol.Condition(why="cannot write /data/caf\ufffd: disk full")


def test_a_program_whose_name_is_not_utf8_is_refused_before_it_is_asked_for() -> None:
    """S1: hrun $'./prog\\xff'."""
    request = protocol.StepRequest(
        version=1, job_id=1, options={}, argv=["./prog\udcff"], work_dir="/", env=as_text({"A": "1", "B": "\udcff"})
    )
    assert request.env == {"A": "1"}
    with pytest.raises(protocol.WireError, match="cannot send StepRequest: argv: number 1: it is not UTF-8"):
        protocol.encode(request)
