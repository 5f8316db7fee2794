"""Chunks: exact, small, and damaged ones are refused."""

from __future__ import annotations

import gzip
import json
import random
import struct
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpcsched.metrics import chunks
from hpcsched.metrics.chunks import (
    GREATEST,
    LEAST,
    ChunkError,
    ColumnReader,
    SampleChunk,
    SteppedSeries,
    decode,
    encode,
)

TRACE = Path(__file__).with_name("node_trace.json.gz")
NUMBERS = st.one_of(
    st.integers(-(1 << 70), 1 << 70),
    st.integers(-300, 300),
    st.floats(allow_nan=False),
    st.decimals(-10_000, 10_000, allow_nan=False, places=3).map(float),
    st.none(),
)


@st.composite
def columns_of_a_chunk(draw: st.DrawFn) -> tuple[list[int], list[list[int | float | None]]]:
    count = draw(st.integers(1, 40))
    times = draw(st.lists(st.integers(0, 1 << 45), min_size=count, max_size=count))
    column = st.one_of(
        st.lists(NUMBERS, min_size=count, max_size=count),
        st.lists(st.integers(0, 1 << 20), min_size=count, max_size=count).map(
            lambda some: list(map(sum, _heads(some)))
        ),
        st.lists(st.floats(allow_nan=False), min_size=count, max_size=count),
        st.lists(st.sampled_from([0, 4096, None]), min_size=count, max_size=count),
    )
    return times, draw(st.lists(column, max_size=6))


def _heads(some: list[int]) -> list[list[int]]:
    return [some[: at + 1] for at in range(len(some))]


@settings(max_examples=400, deadline=None)
@given(columns_of_a_chunk())
@example(([1], [[None], [1 << 80], [-0.0], [float("inf")]]))
@example(([3, 2, 1], [[-(1 << 63), (1 << 63) - 1, 0], [1, 2.5, 1 << 60], [0.1, 0.2, 0.30000000000000004]]))
def test_what_is_decoded_is_what_was_encoded(made: tuple[list[int], list[list[int | float | None]]]) -> None:
    times, columns = made
    names = [f"c{place}" for place in range(len(columns))]
    found = decode(encode(times, columns), names)
    assert found.times_ms == times
    assert [found.columns[name] for name in names] == columns


@settings(max_examples=300, deadline=None)
@given(columns_of_a_chunk(), st.data())
def test_a_damaged_chunk_raises_chunk_error_and_nothing_else(made, data: st.DataObject) -> None:
    whole = bytearray(encode(*made))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    for damaged in (bytes(whole), cut):
        try:
            decode(damaged, [f"c{place}" for place in range(len(made[1]))])
        except ChunkError:
            pass


def test_a_chunk_that_would_fill_the_memory_is_refused() -> None:
    bomb = encode(range(1000), [[7, *range(999)]])
    with pytest.raises(ChunkError):
        ColumnReader(bomb[:1] + struct.pack("<I", 1 << 31) + bomb[5:])


def real_columns(rows: int, seed: int = 1) -> tuple[list[int], dict[str, list[int | float]]]:
    """Return rows like those of the recorded machine: its increments, in other order and with jitter.

    The trace has looks at /proc of a machine with two busy cores, one each 10 s.
    """
    trace = json.loads(gzip.decompress(TRACE.read_bytes()))
    looks, names = trace["looks"], trace["columns"]
    chance = random.Random(seed)
    speed = [chance.uniform(0.6, 1.4) for _ in names]
    state, made, at_ms, block = list(looks[0]), [], 1_800_000_000_000, 30
    while len(made) < rows:
        start = chance.randrange(1, len(looks) - block + 1)
        for at in range(start, start + block):
            at_ms += 10_000 + round(chance.gauss(0, 5))
            for place, name in enumerate(names):
                state[place] = _next(name, state[place], looks[at - 1][place], looks[at][place], speed[place], chance)
            made.append((at_ms, *state))
    times, *columns = (list(column) for column in zip(*made[:rows], strict=True))
    return times, dict(zip(names, columns, strict=True))


def _next(name: str, now, before, after, speed: float, chance: random.Random):
    """Return the next value: a counter grows by about what it grew, in its own units; a gauge is as it was, roughly."""
    grown = after - before
    if name.partition(":")[0].endswith("_total"):
        grown *= speed * chance.uniform(0.9, 1.1)
        if isinstance(before, int):
            unit = 512 if "_disk_" in name else 1
            return now + round(grown / unit) * unit
        return round(now + grown, 6 if "pressure" in name else 3 if "busy" in name else 2)
    if isinstance(after, int) and after > 10_000:
        return after + round(chance.uniform(-0.1, 0.1) * grown / 4096) * 4096
    return after


def test_a_sample_of_a_busy_node_takes_at_most_a_byte() -> None:
    times, columns = real_columns(720)
    size = len(encode(times, columns.values()))
    assert size <= 1.0 * len(times) * len(columns), size / len(times) / len(columns)


def test_rows_are_combined_from_counters_and_gauges() -> None:
    times = [0, 10_000, 20_000, 60_000, 70_000]
    columns = {"c_total": [1, 5, None, 9, 4], "g": [1.0, None, 4.0, 7, 7], "n": [None] * 5}
    made = chunks.rolled_up(times, columns, 60_000, lambda name: name.endswith("_total"))
    assert made.times_ms == [20_000, 70_000]
    assert made.columns["c_total"] == [5, 4]
    assert made.columns["g"] == [2.5, 7]
    assert made.columns[GREATEST + "g"] == [4.0, 7]
    assert made.columns[LEAST + "g"] == [1.0, 7]
    assert made.columns["n"] == [None, None]
    again = chunks.rolled_up(made.times_ms, made.columns, 120_000, lambda name: name.endswith("_total"))
    assert again.columns[GREATEST + "g"] == [7]
    assert again.columns[LEAST + "g"] == [1.0]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=60), st.integers(1, 7))
def test_the_mean_of_a_step_is_between_its_extremes(values: list[int], step: int) -> None:
    made = chunks.rolled_up([at * 1000 for at in range(len(values))], {"g": values}, step * 1000, lambda name: False)
    for mean, least, most in zip(
        made.columns["g"], made.columns[LEAST + "g"], made.columns[GREATEST + "g"], strict=True
    ):
        assert least <= mean <= most


def steps_of(values, *, life=None, is_counter=True, of="mean", step_ms=10_000):
    steps = SteppedSeries(0, step_ms, 6, is_counter=is_counter, of=of)
    times = [at * 10_000 for at in range(len(values))]
    for at, (time_ms, value) in enumerate(zip(times, values, strict=True)):
        spans = chunks.spans_of([time_ms], step_ms)
        steps.add(life[at] if life else "", [time_ms], [value], spans)
    return steps.values()


def test_a_counter_that_falls_has_a_gap_and_never_a_negative_rate() -> None:
    assert steps_of([0, 10, 30, 5, 15, 15]) == [None, 1.0, 2.0, None, 1.0, 0.0]


def test_a_counter_of_another_boot_has_a_gap() -> None:
    assert steps_of([0, 10, 30, 40, 50, 60], life="aaabbb") == [None, 1.0, 2.0, None, 1.0, 1.0]


def test_a_gauge_has_its_mean_or_extremes_for_each_step() -> None:
    assert steps_of([1, 3, None, 5, 9, 1], is_counter=False, step_ms=20_000) == [2.0, 5.0, 5.0, None, None, None]
    assert steps_of([1, 3, None, 5, 9, 1], is_counter=False, of="max", step_ms=20_000)[:3] == [3, 5, 9]
    assert steps_of([1, 3, None, 5, 9, 1], is_counter=False, of="min", step_ms=20_000)[:3] == [1, 5, 1]


def test_chunks_are_joined_by_time_with_the_columns_of_all() -> None:
    one = SampleChunk(times_ms=[30, 40], columns={"a": [3, 4]})
    other = SampleChunk(times_ms=[10, 20], columns={"a": [1, 2], "b": [8, 9]})
    found = chunks.joined([one, other])
    assert found.times_ms == [10, 20, 30, 40]
    assert found.columns == {"a": [1, 2, 3, 4], "b": [8, 9, None, None]}


def test_longer_steps_keep_counts_exact_and_round_bytes_and_seconds_down() -> None:
    columns = {"oom_kills_total": [1, 3], "sent_bytes_total:eth0": [5000, 7000], "cpu_seconds_total": [0.1239, 0.5678]}
    made = chunks.rolled_up([0, 10_000], columns, 60_000, lambda name: True)
    assert [made.columns[name] for name in columns] == [[3], [6144], [0.567]]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 1 << 50), st.floats(0, 1e12)), min_size=2, max_size=30))
def test_a_counter_never_falls_by_its_rounding(values: list[int | float]) -> None:
    name = "x_bytes_total" if all(isinstance(value, int) for value in values) else "x_seconds_total"
    made = chunks.rolled_up([at * 1000 for at in range(len(values))], {name: sorted(values)}, 1000, lambda name: True)
    assert made.columns[name] == sorted(made.columns[name])
