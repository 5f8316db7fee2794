"""The binary form of a step: read as it was written, and damaged bytes are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcserve.errors import ServeError
from hpcserve.steps import ForwardStep, StepRow

NUMBERS = st.lists(st.integers(0, 2**32 - 1), max_size=40).map(tuple)
ROWS = st.builds(
    StepRow,
    tokens=NUMBERS,
    start=st.integers(0, 1 << 20),
    blocks=NUMBERS,
    logits=st.integers(0, 9),
    hidden=st.booleans(),
)
PLANS = st.builds(ForwardStep, number=st.integers(0, 2**32 - 1), rows=st.lists(ROWS, max_size=5).map(tuple))


@given(PLANS)
def test_a_step_is_read_as_it_was_written(plan: ForwardStep) -> None:
    assert ForwardStep.from_bytes(plan.to_bytes()) == plan


@given(PLANS, st.data())
def test_a_cut_step_is_refused(plan: ForwardStep, data: st.DataObject) -> None:
    content = plan.to_bytes()
    with pytest.raises(ServeError):
        ForwardStep.from_bytes(content[: data.draw(st.integers(0, len(content) - 1))])


@given(st.binary(max_size=200))
def test_other_bytes_are_refused_or_read(content: bytes) -> None:
    try:
        ForwardStep.from_bytes(content)
    except ServeError:
        pass
    else:
        assert content.startswith(b"1PSH")
