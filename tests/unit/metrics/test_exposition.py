"""The text of /metrics, read by the official parsers and by promtool."""

from __future__ import annotations

import math
import os
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_metrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from hpcsched.metrics.exposition import OPEN_METRICS, TEXT, Histogram, Page, content_type_for, number_text
from hpcsched.metrics.series import TABLE, SeriesKind

HOSTILE = 'a"b\\c\nd\u202e\x01é'


def whole_page() -> Page:
    """Return a page with two label sets of every series of the table."""
    page = Page()
    for series in TABLE.values():
        for which in ("x", HOSTILE) if series.labels else ("x",):
            values = [which] * len(series.labels)
            if series.kind is SeriesKind.HISTOGRAM:
                histogram = Histogram(series.buckets)
                histogram.observe(series.buckets[0])
                histogram.observe(series.buckets[-1] * 2)
                page.histogram(series, values, histogram)
            else:
                page.add(series, values, 1)
    return page


def samples(text: str, open_metrics: bool) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = parse_open_metrics(text) if open_metrics else parse_text(text)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def test_both_formats_have_the_same_samples_for_the_official_parsers() -> None:
    page = whole_page()
    plain, opened = samples(page.text(), False), samples(page.text(open_metrics=True), True)
    assert plain == opened
    assert len(plain) > 2 * len(TABLE) - 20
    assert ("hpcsched_node_load1", frozenset({("node", HOSTILE)})) in plain
    kinds = {family.name: (family.type, family.unit) for family in parse_open_metrics(page.text(open_metrics=True))}
    assert kinds["hpcsched_node_cpu_seconds"] == ("counter", "seconds")
    assert kinds["hpcsched_job"] == ("info", "")
    assert kinds["hpcsched_tick_seconds"] == ("histogram", "seconds")


def test_promtool_finds_no_fault() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        assert os.environ.get("CI") != "true", "promtool is missing: apt-get install prometheus"
        pytest.skip("promtool is missing: apt-get install prometheus")
    done = subprocess.run(
        [promtool, "check", "metrics"], input=whole_page().text(), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_a_histogram_counts_each_value_once() -> None:
    found = Histogram((1.0, 10.0))
    for value in (0.5, 1.0, 5.0, 100.0):
        found.observe(value)
    assert found.lines("h", ("p",), ("a",)) == (
        'h_bucket{p="a",le="1.0"} 2\nh_bucket{p="a",le="10.0"} 3\nh_bucket{p="a",le="+Inf"} 4\n'
        'h_sum{p="a"} 106.5\nh_count{p="a"} 4\n'
    )


@given(st.text(), st.floats() | st.integers(-(2**63), 2**63 - 1))
def test_any_label_and_value_come_back(label: str, value: float) -> None:
    # Its parser splits lines at more characters than the format has.
    clean = "".join(one for one in label if one == "\n" or len(f"{one}.".splitlines()) == 1)
    clean = clean.encode("utf-8", "replace").decode()
    page = Page()
    page.add(TABLE["node_load1"], [clean], value)
    for open_metrics in (False, True):
        ((key, found),) = samples(page.text(open_metrics=open_metrics), open_metrics).items()
        assert key == ("hpcsched_node_load1", frozenset({("node", clean)}))
        assert number_text(found) == number_text(float(value)) or found == value


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        ("", TEXT),
        ("*/*", TEXT),
        ("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5", OPEN_METRICS),
    ],
)
def test_the_client_chooses_the_format(accept: str, wanted: str) -> None:
    assert content_type_for(accept) == wanted


def test_infinite_values_are_written_as_prometheus_does() -> None:
    assert [number_text(value) for value in (math.inf, -math.inf, math.nan, 1, 0.5)] == [
        "+Inf",
        "-Inf",
        "NaN",
        "1",
        "0.5",
    ]
