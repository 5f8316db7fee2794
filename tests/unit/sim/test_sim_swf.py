"""Reading traces: what counts, what is left out, and what is refused with its line."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from unit.sim.traces import SMALL

from hpcsched.errors import RequestError
from hpcsched.sim.swf import read_trace, trace_of


def line(**fields: object) -> str:
    """Return a line with these fields (``f4=...``), the others -1."""
    return " ".join(str(fields.get(f"f{at}", -1)) for at in range(1, 19))


def test_a_trace_has_its_jobs_and_the_size_of_its_machine(tmp_path: Path) -> None:
    path = tmp_path / "small.swf.gz"
    path.write_bytes(gzip.compress(SMALL.encode()))
    trace = read_trace(path)
    assert (trace.procs, len(trace.jobs)) == (10, 5)
    assert trace.jobs[0] == (1, 0, 60, 6, 100, 1)


def test_nodes_are_the_size_where_processors_are_not_told() -> None:
    assert trace_of(["; MaxNodes: 256", line(f1=1, f2=0, f4=1, f8=1)], "t").procs == 256


@pytest.mark.parametrize(
    ("header", "procs"),
    [
        ("\ufeff; MaxProcs: 8", 8),
        ("  ;MaxProcs:8", 8),
        ("; maxprocs : 1,152 (of old)", 1152),
        ("; MaxNodes: 4\n; MaxProcs: -1", 4),
        ("; MaxProcs: 16\r\n; Note: MaxProcs: 7\r", 16),
    ],
)
def test_a_header_is_read_however_it_was_written(header: str, procs: int, tmp_path: Path) -> None:
    path = tmp_path / "odd.swf"
    path.write_bytes(f"{header}\n {line(f1=1, f2=0, f4=1, f8=1)}\n".encode())
    trace = read_trace(path)
    assert (trace.procs, len(trace.jobs)) == (procs, 1)


def test_whole_numbers_may_be_written_with_a_point() -> None:
    (one,) = trace_of([line(f1=1, f2="0.5", f4="3.0", f8="2.0", f9="4.0", f12="7.0")], "t").jobs
    assert one == (1, 0.5, 3, 2, 4, 7)


def test_what_is_missing_comes_from_the_next_best_field() -> None:
    (one,) = trace_of([line(f1=1, f2=5, f4=7, f5=3)], "t").jobs
    assert (one.procs, one.asked_s, one.user) == (3, 7, -1)


def test_jobs_that_never_ran_are_left_out_and_counted() -> None:
    trace = trace_of([line(f1=1, f2=0, f4=-1, f8=2), line(f1=2, f2=0, f4=5, f8=0), line(f1=3, f2=0, f4=0, f8=1)], "t")
    assert [job.id for job in trace.jobs] == [3]
    assert trace.never_ran == 2


def test_a_job_that_overran_has_asked_for_what_it_ran() -> None:
    trace = trace_of([line(f1=1, f2=0, f4=90, f8=1, f9=60)], "t")
    assert (trace.jobs[0].asked_s, trace.overran) == (90, 1)


def test_jobs_come_in_the_order_of_submission_and_else_of_the_file() -> None:
    trace = trace_of([line(f1=at, f2=submit, f4=1, f8=1) for at, submit in ((1, 9), (2, 3), (3, 9), (4, 3))], "t")
    assert [job.id for job in trace.jobs] == [2, 4, 1, 3]


def test_the_parts_of_a_job_that_was_swapped_out_are_not_jobs_of_their_own() -> None:
    whole, part = {"f1": 7, "f4": 90, "f8": 2}, {"f1": 7, "f2": -1, "f8": 2}
    lines = [
        line(f2=5, **whole, f11=1),
        line(f4=40, **part, f11=2),
        line(f4=50, **part, f11=3),
        line(f1=8, f2=6, f4=1, f8=1, f11=3),  # of which there is no other line
    ]
    trace = trace_of(lines, "t")
    assert [(job.id, job.run_s) for job in trace.jobs] == [(7, 90), (8, 1)]
    assert trace.parts == 2


def test_one_number_may_be_that_of_several_jobs() -> None:
    trace = trace_of([line(f1=1, f2=at, f4=1, f8=1, f11=status) for at, status in ((0, 1), (1, 0), (2, 5))], "t")
    assert [job.submit_s for job in trace.jobs] == [0, 1, 2]


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ("1 2 3", "it has 3 fields, not 18"),
        (line(f1=1, f2="soon", f4=1, f8=1), "'soon' is not a number"),
        (line(f1=1, f2="nan", f4=1, f8=1), "'nan' is not a number"),
        (line(f1=1, f2=0, f4="1e400", f8=1), "'1e400' is not a number"),
        (line(f1=1, f2=0, f4="9" * 400, f8=1), "'9+' is not a number"),
        (line(f1=1, f2=0, f4="1_000", f8=1), "'1_000' is not a number"),
        (line(f1=1, f2=0, f4=1, f8="４"), "'４' is not a number"),
        (line(f1=1, f2=0, f4=1, f8="two"), "'two' is not a number"),
        (line(f1=1, f2=0, f4=1, f8=1, f18="never"), "'never' is not a number"),
        (line(f1=1, f2=-5, f4=1, f8=1), "before 0"),
    ],
)
def test_a_broken_line_is_named_by_its_number(broken: str, why: str) -> None:
    with pytest.raises(RequestError, match=rf"cannot read line 3 of t\.swf: .*{why}"):
        trace_of(["; MaxProcs: 4", line(f1=1, f2=0, f4=1, f8=1), broken], "t.swf")


def test_what_is_no_file_or_cut_short_is_refused(tmp_path: Path) -> None:
    cut = tmp_path / "cut.swf.gz"
    cut.write_bytes(gzip.compress(SMALL.encode())[:-20])
    for path in (tmp_path / "none.swf", cut):
        with pytest.raises(RequestError, match="cannot read trace"):
            read_trace(path)
