"""The table of series follows the naming rules, and what a hostile node sends is bounded."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hpcnode.wire import protocol
from hpcsched.metrics import series
from hpcsched.metrics.series import PREFIX, SAMPLED, TABLE, Group, NodeSample, SampleReader, SeriesKind, read_column
from hpcsched.model.ids import NodeName

NODE = NodeName("n1")
COLUMNS = ["node_load1", "node_network_receive_bytes_total:eth0"]


def read(reader: SampleReader, jobs: list[list[Any]] | None = None, **fields: Any) -> NodeSample | None:
    sample = protocol.from_json(protocol.to_json(protocol.Sample(jobs=jobs or [], **fields)))
    assert isinstance(sample, protocol.Sample)
    return reader.read(sample, "boot-1", 100.0, lambda job_id, attempt: (job_id, attempt) == (7, 0))


def test_names_follow_the_rules_of_prometheus() -> None:
    for one in TABLE.values():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", one.name)
        assert one.name.endswith("_total") == (one.kind is SeriesKind.COUNTER), one.name
        assert one.name.endswith("_info") == (one.kind is SeriesKind.INFO), one.name
        assert bool(one.buckets) == (one.kind is SeriesKind.HISTOGRAM), one.name
        if one.unit:
            assert one.name.removesuffix("_total").endswith("_" + one.unit), one.name
        assert one.help.endswith("."), one.name
        assert one.full_name.startswith((PREFIX, "process_"))


def test_a_sample_is_decoded_and_columns_are_sent_once() -> None:
    reader = SampleReader(NODE)
    first = read(reader, columns=COLUMNS, values=[0.5, 2**53 + 1])
    second = read(reader, values=[None, 2**53 + 2])
    assert first is not None
    assert second is not None
    assert first.known() == {"node_load1": 0.5, "node_network_receive_bytes_total:eth0": 2**53 + 1}
    assert second.known() == {"node_network_receive_bytes_total:eth0": 2**53 + 2}  # absent, not 0
    assert second.columns is first.columns
    assert (first.node, first.boot_id, first.received_at_s) == (NODE, "boot-1", 100.0)
    assert reader.rejected == 0


def test_rows_of_jobs_that_are_not_there_are_dropped() -> None:
    reader = SampleReader(NODE)
    sample = read(
        reader,
        columns=["node_load1"],
        values=[1.0],
        job_columns=["job_processes"],
        jobs=[[7, 0, 3], [7, 1, 3], [8, 0, 3], [7, 0], ["7", 0, 3], [True, 0, 3]],
    )
    assert sample is not None
    assert [(row.job_id, row.attempt, row.values) for row in sample.jobs] == [(7, 0, (3,))]
    assert reader.rejected == 5


@pytest.mark.parametrize("value", ["1", [1], {}, True, 2**63 - 1, -(2**63), 1e300, -1.0])
def test_a_value_that_is_impossible_is_absent(value: Any) -> None:
    reader = SampleReader(NODE)
    sample = read(reader, columns=COLUMNS, values=[value, 5])
    assert sample is not None
    assert sample.values == (None, 5)
    assert reader.rejected == 1


@pytest.mark.parametrize("value", [-273.0, 0.0, 511.0, 512])
def test_a_broken_sensor_is_absent(value: float) -> None:
    sample = read(SampleReader(NODE), columns=["node_temperature_celsius:cpu"], values=[value])
    assert sample is not None
    assert sample.values == (None,)


def test_unknown_columns_are_ignored_and_the_others_kept() -> None:
    reader = SampleReader(NODE)
    names = ["evil", "node_load1", "job_processes", "tick_seconds", "node_load1", "node_load1:x", COLUMNS[1]]
    sample = read(reader, columns=names, values=[1, 2, 3, 4, 5, 6, 7])
    assert sample is not None
    assert sample.known() == {"node_load1": 2, COLUMNS[1]: 7}
    assert reader.rejected == 5


def test_a_million_columns_are_refused_and_the_node_may_begin_again() -> None:
    reader = SampleReader(NODE)
    assert read(reader, columns=["node_load1"] * 10**6, values=[1] * 10**6) is None
    assert read(reader, values=[1] * 10**6) is None
    assert "more than" in reader.why or "columns" in reader.why
    assert read(reader, columns=["node_load1"], values=[1]) is not None


def test_a_sample_of_another_length_is_refused() -> None:
    reader = SampleReader(NODE)
    assert read(reader, values=[1]) is None  # no columns yet
    assert read(reader, columns=["node_load1"], values=[]) is None
    assert read(reader, values=[1]) is not None


def test_label_values_are_cut_and_cleaned() -> None:
    column = read_column("node_filesystem_size_bytes:/a:b\n\ud800\u202e" + "x" * 200, SAMPLED)
    assert column is not None
    (label,) = column.labels
    assert len(label) == series.MAX_LABEL
    assert label.startswith("/a:b\ufffd\ufffd")
    assert read_column("node_network_receive_bytes_total:" + "x" * 10**4, SAMPLED) is None
    two = read_column("node_pressure_seconds_total:cpu:some", SAMPLED)
    assert two is not None
    assert two.labels == ("cpu", "some")
    assert two.key == "node_pressure_seconds_total:cpu:some"
    assert read_column("node_load1", frozenset({Group.JOB})) is None


@pytest.mark.parametrize(
    ("before", "after", "seconds", "same_boot", "wanted"),
    [(10, 30, 10.0, True, 2.0), (30, 10, 10.0, True, None), (10, 30, 10.0, False, None), (10, 30, 0.0, True, None)],
)
def test_a_reset_is_a_gap(before: int, after: int, seconds: float, same_boot: bool, wanted: float | None) -> None:
    assert series.rate(before, after, seconds, same_boot) == wanted
