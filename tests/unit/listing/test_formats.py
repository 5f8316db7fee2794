"""Formats: percent signs, long names, own names; widths, sides, suffixes, times."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))

from fake_api import NOW_S, ended, job, running, task

from hpcsched.commands.queue import DEFAULT_COLUMNS
from hpcsched.errors import UsageError
from hpcsched.listing.formats import Look, format_lines, relative_text
from hpcsched.listing.jobs import detail_lines, index_ranges, memory_asked, memory_in_all
from hpcsched.listing.queue import FIELDS, make_listing, parse_format, parse_long_format, queue_text, row_of

LOOK = Look(NOW_S)


def shown(text: str, *jobs: dict, long: bool = False, header: bool = False) -> list[str]:
    cells = parse_long_format(text) if long else parse_format(text)
    return format_lines(cells, jobs, LOOK, header=header)


def test_all_columns_have_bars_between_them() -> None:
    header, line = shown("%all", running(), header=True)
    assert header.split("|")[:2] == ["ACCOUNT", "TRES_PER_NODE"]
    assert len(header.split("|")) == len(line.split("|")) == len([field for field in FIELDS if field.letter])
    assert header.split("|")[-1] == "WORK_DIR"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("%i", "11"),
        ("%5i|", "11   |"),
        ("%.5i|", "   11|"),
        ("%.1i|", "1|"),
        ('{"id": %A, "j": "%j"}', '{"id": 11, "j": "train"}'),
        ("%i<><> %t<><>", "11<><> R<><>"),
        (" %A|%a|%T|%C", " 11|(null)|RUNNING|8"),
        ("%i\x1f%j\x1f%u", "11\x1ftrain\x1fann"),
        (r"%i\x1f%j", r"11\x1ftrain"),
        ("100%% of %M", "100% of 6:40"),
        ("%N %B %R", "n[1-2] n1 n[1-2]"),
        ("%m %b %l %L %D", "4G gres/gpu:1 1:00:00 53:20 2"),
    ],
)
def test_percent_signs(text: str, line: str) -> None:
    assert shown(text, running()) == [line]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("JobArrayID", "11".ljust(20)),
        ("jobid:5,STATECOMPACT:.4", "11      R"),
        ("jobid:###turm###,name:###turm###", "11###turm###train###turm###"),
        ("Account:\x1f,JobID:\x1f", "(null)\x1f11\x1f"),
        ("tres-per-node,nodelist:10,username:8,jobid:4", "gres/gpu:1".ljust(20) + "n[1-2]    ann     11  "),
        ("tres-alloc:|", "cpu=8,mem=8G,node=2,billing=8,gres/gpu=2|"),
        ("MaxNodes:6|,StateCompact:3", "N/A   |R  "),
    ],
)
def test_long_names(text: str, line: str) -> None:
    assert shown(text, running(), long=True) == [line]


def test_a_header_is_fitted_like_the_column() -> None:
    assert shown("%.9i %4P|", running(), header=True) == ["    JOBID PART|", "       11 main|"]
    assert shown("JobArrayID:4,Reason:7", running(), long=True, header=True) == ["JOBIREASON ", "11  None   "]


@pytest.mark.parametrize("text", ["%?", "%", "%12", "%.5"])
def test_a_letter_that_there_is_not_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no such column"):
        parse_format(text)


def test_a_long_name_that_there_is_not_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean jobid"):
        parse_long_format("jobbid")


def test_every_letter_of_squeue_is_there() -> None:
    letters = {field.letter for field in FIELDS if field.letter}
    assert letters == set("aAbBcCdDeEfFgGhHiIjJkKlLmMnNoOpPqQrRStTuUvVwWxXyYzZ")
    longs = [long for field in FIELDS for long in field.longs]
    assert len(longs) == len(set(longs))


def test_c8_a_name_cannot_add_a_line() -> None:
    assert shown("%j", running(name="a\nb\x1b[31m")) == ["a?b?[31m"]
    assert shown("%j", running(name="\x9b31m\x85\u2028\u202etxt")) == ["?31m???txt"]  # 8-bit escape, line ends, RTL


@pytest.mark.parametrize(
    ("style", "text"),
    [("", "2027-01-15T07:53:20"), ("standard", "2027-01-15T07:53:20"), ("relative", "07:53:20"), ("%s", "1799999600"),
     ("%d.%m. %H:%M", "15.01. 07:53")],
)  # fmt: skip
def test_times_as_slurm_time_format_says(style: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    assert format_lines(parse_format("%S"), [running()], Look(NOW_S, style), header=False) == [text]
    monkeypatch.undo()
    time.tzset()


def test_relative_times_name_the_nearer_days() -> None:
    day = 86_400
    assert relative_text(NOW_S - day, NOW_S).startswith("Ystday ")
    assert relative_text(NOW_S + day, NOW_S).startswith("Tomorr ")
    assert len(relative_text(NOW_S + 3 * day, NOW_S)) == 9
    assert relative_text(NOW_S + 30 * day, NOW_S).split()[1] in ("Feb",)


# ----- the queue


def lines(order: str, *jobs: dict, text: str = "%i", **layout: bool) -> list[str]:
    listing = make_listing(text, long=False, order=order, **{"header": False, **layout})
    return queue_text([row_of(one, listing, LOOK) for one in jobs], listing, LOOK).splitlines()


def test_a_line_for_several_tasks_of_an_array_has_their_indices() -> None:
    tasks = task(20, 0) | {"folded": "[0-2,5%2]"}
    assert lines("", tasks, running()) == ["11", "20_[0-2,5%2]"]
    assert lines("", tasks, text="%F %K %A") == ["20 0-2,5%2 20"]
    assert index_ranges([5, 1, 2, 3, 9, 8]) == "1-3,5,8-9"


def test_a_table_is_as_wide_as_it_needs_to_be_and_has_its_states_colours() -> None:
    jobs = [running(5, name="a"), job(1234, name="longer", state="FAILED")]
    layout = {"text": "id,name,state", "fit": True}
    assert lines("", *jobs, **layout, header=True) == [
        "JOBID   NAME   STATE",
        "    5      a RUNNING",
        " 1234 longer  FAILED",
    ]
    assert lines("", *jobs, **layout, colour=True) == [
        "\x1b[32m   5      a RUNNING\x1b[0m",
        "\x1b[31m1234 longer  FAILED\x1b[0m",
    ]
    assert lines("", *jobs, text="%i|%j", fit=True) == ["5|a", "1234|longer"]


def test_running_jobs_may_come_first_then_pending_then_ended_ones() -> None:
    assert lines("phase", ended(4), job(7), running(5), job(6)) == ["5", "6", "7", "4"]
    assert lines("-user,phase", ended(4), job(7, user="zoe"), running(5)) == ["7", "5", "4"]


def test_the_order_is_squeues_those_that_wait_before_those_that_run() -> None:
    jobs = [running(5), job(6, priority=10), job(7, priority=90), ended(4)]
    assert lines("P,t,-p", *jobs) == ["7", "6", "5", "4"]


@pytest.mark.parametrize(
    ("order", "found"),
    [("i", "5 6 10"), ("-i", "10 6 5"), ("-V", "10 6 5"), ("S", "6 10 5"), ("-M", "5 6 10"), ("-id", "10 6 5"),
     ("D,-i", "6 5 10")],
)  # fmt: skip
def test_the_order_that_is_asked_for(order: str, found: str) -> None:
    jobs = [
        job(5, expected_start_s=None, submitted_at_s=NOW_S - 30, elapsed_s=0.0) | {"elapsed_s": 99.0},
        job(6, submitted_at_s=NOW_S - 20, expected_start_s=NOW_S + 5, num_nodes=1),
        job(10, submitted_at_s=NOW_S - 10, expected_start_s=NOW_S + 50),
    ]
    jobs[0]["num_nodes"] = 1
    assert lines(order, *jobs) == found.split()


def test_an_order_that_there_is_not_is_refused() -> None:
    with pytest.raises(UsageError, match="Invalid sort specification: nope"):
        make_listing("%i", long=False, order="nope")


def test_the_long_list_says_when() -> None:
    listing = make_listing("%i", long=False, order="", header=True, dated=True)
    assert queue_text([], listing, LOOK).splitlines()[1:] == ["JOBID"]


def test_memory_is_shown_as_it_was_asked_for_and_of_the_whole_job() -> None:
    waiting, runs = (
        job() | {"mem_per_cpu_mib": 100, "mem_mib": None},
        running() | {"mem_per_cpu_mib": 100, "mem_mib": 800},
    )
    for one in (waiting, runs):
        assert (memory_asked(one), memory_in_all(one)) == ("100M", "800M")
    assert (memory_asked(running()), memory_in_all(running())) == ("4G", "8G")
    assert (memory_asked(job()), memory_in_all(job())) == ("4G", "8G")
    assert (memory_asked(job(mem_mib=None)), memory_in_all(job(mem_mib=None))) == ("0", "0")


def test_what_an_earlier_attempt_of_a_training_said_is_marked_and_has_no_end() -> None:
    told = {
        "at_s": NOW_S - 9, "attempt": 0, "step": 1155, "total_steps": 1500, "loss": 1.5, "samples_per_s": 900.0,
        "steps_per_s": 9.0, "ends_at_s": NOW_S + 30, "checkpoint_step": 1150, "checkpoint_at_s": NOW_S - 20, "goodput": 0.9,
        "note": "",
    }  # fmt: skip

    def line(attempt: int) -> str:
        one = running(training=told, attempt=attempt)
        (found,) = [text.strip() for text in detail_lines(one, NOW_S) if text.strip().startswith("training")]
        return " ".join(found.split())

    assert "step 1155 of 1500, loss 1.5, 900 samples/s, goodput 90.0%, done at" in line(0)
    assert line(1) == "training step 1155 of 1500, of attempt 0 (attempt 1 has not reported yet), goodput 90.0%"


@pytest.mark.parametrize("width", [60, 70, 80, 90, 120, 0])
def test_a_table_is_no_wider_than_the_terminal(width: int) -> None:
    listing = make_listing(DEFAULT_COLUMNS, long=False, order="", header=True, fit=True, width=width)
    jobs = [
        running(id=123_456, name="a-name-that-is-too-long-for-most", node_list="gpu[1-4]", time_limit_s=360_000),
        job(id=123_457, name="short", partition="main", expected_start_s=NOW_S + 600),
    ]
    text = queue_text([row_of(one, listing, LOOK) for one in jobs], listing, LOOK)
    assert all(len(line) <= (width or 200) for line in text.splitlines()), text
    header, runs, waits = text.splitlines()
    assert {"JOBID", "NAME", "USER", "ST", "TIME", "NODELIST(REASON)"} <= set(header.split())
    if width >= 80 or not width:
        assert {"LIMIT", "ETA"} <= set(header.split())
        assert "4-04:00:00" in runs
        assert time.strftime("%m-%dT%H:%M", time.localtime(NOW_S + 600)) in waits
    if not width:
        assert {"PARTITION", "NODES"} <= set(header.split())
        assert "a-name-that-is-too-long-for-most" in runs


def test_a_table_without_jobs_or_headers_is_not_cut() -> None:
    listing = make_listing(DEFAULT_COLUMNS, long=False, order="", header=True, fit=True, width=20)
    assert queue_text([], listing, LOOK).startswith("JOBID PARTITION")
    listing = make_listing(DEFAULT_COLUMNS, long=False, order="", header=False, fit=True, width=40)
    (line,) = queue_text([row_of(running(), listing, LOOK)], listing, LOOK).splitlines()
    assert len(line) <= 40
