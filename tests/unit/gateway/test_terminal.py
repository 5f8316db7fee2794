"""The screen of a terminal in the browser: what a job prints is hostile, and only texts and styles leave it."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyte")
pytest.importorskip("wsproto")

from hpcsched.gateway import terminal
from hpcsched.gateway.terminal import MAX_COLUMNS, MAX_ROWS, SequenceReader, TerminalScreen, Typed, drawable, read_typed

# What moves, scrolls or erases, marks on characters, a text that fills lines.
STEPS = (
    b"a", b"bcdefgh", b"\r\n", b"\n", b"\t", b"\x08", "\u0301".encode(), "\u4e2d".encode(), b"\x1b[A", b"\x1b[3;4H", b"\x1b[1;8H",
    b"\x1b[2;1H", b"\x1b[K", b"\x1b[1K", b"\x1b[J", b"\x1b[2J", b"\x1b[L", b"\x1b[M", b"\x1b[2P", b"\x1b[2@", b"\x1b[3X",
    b"\x1bM", b"\x1bD", b"\x1b[2;4r", b"\x1b[?25l", b"\x1b[?25h", b"\x1b[?5h", b"\x1b[?5l", b"\x1b[7m", b"\x1b[0m", b"\x1b7",
    b"\x1b8", b"\x1bc", b"\x1b[?7l", b"\x1b[4h",
)  # fmt: skip


def drawn(data: bytes, rows: int = 4, columns: int = 20) -> list[str]:
    """Return the lines of a screen after output, in pieces of each size."""
    found = []
    for size in (1, 3, len(data) or 1):
        screen = TerminalScreen(rows, columns)
        for begin in range(0, len(data), size):
            list(screen.tokens(data[begin : begin + size]))
        rows_of = screen.changes()["rows"]
        found.append(["".join(text for text, _ in rows_of[str(y)]).rstrip() for y in range(rows)])
    assert found[0] == found[1] == found[2]
    return found[0]


def test_text_colours_and_the_cursor_are_shown() -> None:
    screen = TerminalScreen(3, 20)
    list(screen.tokens("a\x1b[1;31mré\x1b[0m\r\n\x1b[44mb\x1b[0m".encode()))
    assert screen.changes() == {
        "size": 3,
        "rows": {"0": [["a", ""], ["ré", "bold fg-red"]], "1": [["b", "bg-blue"], [" ", " cursor"]], "2": []},
        "application": False,
    }
    assert screen.changes() == {}
    list(screen.tokens(b"\x1b[1;1Hx"))
    assert set(screen.changes()["rows"]) == {"0", "1"}


def test_a_character_costs_the_lines_around_it_and_not_the_whole_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = TerminalScreen(MAX_ROWS, MAX_COLUMNS)
    screen.changes()
    looked: list[int] = []
    runs_of = terminal._runs
    monkeypatch.setattr(terminal, "_runs", lambda *of: looked.append(of[1]) or runs_of(*of))
    list(screen.tokens(b"\x1b[50;1Hx"))
    assert set(screen.changes()["rows"]) == {"0", "49"}
    assert sorted(looked) == [0, 49]


@given(st.lists(st.sampled_from(STEPS), max_size=40))
def test_the_changes_add_up_to_the_screen(steps: list[bytes]) -> None:
    """A browser that gets each change sees what one sees that gets the screen at the end."""
    screen, whole = TerminalScreen(5, 8), TerminalScreen(5, 8)
    seen = screen.changes()["rows"]
    for step in steps:
        list(screen.tokens(step))
        seen |= screen.changes().get("rows", {})
        list(whole.tokens(step))
    assert seen == whole.changes()["rows"]


@pytest.mark.parametrize(
    "sequence",
    [
        "\x1b]0;title\x07",
        "\x1b]52;c;aGVsbG8=\x07",
        "\x1b]8;;https://evil.example\x1b\\",
        "\x9d52;c;x\x9c",
        "\x1bPq#0;2;0;0;0\x1b\\",
        "\x1b_G payload\x1b\\",
        "\x1b^private\x1b\\",
        "\x1b[>4;2m",
        "\x1b[?2004h",
        "\x1b[38:2::1:2:3m",
        "\x1b[1 q",
        "\x1b(0",
        "\x1b=",
        "\x1b[" + "9" * 70,
        "\x1b[99999999999999A",
        "\x1b[1;2;3;4;5B",
        "\x1b[?5;6n",
        "\x00\x07\x7f",
        "\u202e\u2066\u200b\ufeff",
    ],
)
def test_what_is_no_picture_is_dropped(sequence: str) -> None:
    line = "\r\n".join(drawn(f"a{sequence}b".encode()))
    assert line.startswith("ab") or sequence.endswith("9")
    assert "evil" not in line
    assert "payload" not in line


def test_broken_utf8_and_html_are_texts() -> None:
    assert drawn(b"\xff<img src=x onerror=alert(1)>"[:20])[0].startswith("\ufffd<img src=x")


def test_endless_sequences_and_marks_take_no_memory() -> None:
    screen = TerminalScreen(24, 80)
    tracemalloc.start()
    for piece in (b"\x1b]52;c;" + b"a" * 500_000, b"\x1b\\", b"\x1b7" * 3_000, b"\x1b[" + b"1;" * 100_000):
        list(screen.tokens(piece))
    list(screen.tokens(("e" + "\u0301" * 30_000).encode()))
    list(screen.tokens(("\x1b[D" + "\u0301" * 2).encode() * 1_000))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 8 << 20
    assert all(len(text) < 1000 for runs in screen.changes()["rows"].values() for text, _ in runs)
    assert drawable("e" + "\u0301" * 9) == "e\u0301\u0301"


def test_the_job_is_told_where_the_cursor_is_and_nothing_else() -> None:
    screen = TerminalScreen(24, 80)
    list(screen.tokens(b"\x1b[3;4H\x1b[6n"))
    assert screen.take_answers() == "\x1b[3;4R"
    list(screen.tokens(b"\x1b[21t\x1b]10;?\x07\x1bP$qm\x1b\\"))
    assert screen.take_answers() == ""


def test_a_reader_keeps_no_more_than_the_beginning_of_a_sequence() -> None:
    reader = SequenceReader()
    assert list(reader.feed(b"\x1b")) == []
    assert list(reader.feed(b"[3")) == []
    assert list(reader.feed(b"1mred")) == ["\x1b[31m", "red"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "1",
        '{"keys":1}',
        '{"size":[1]}',
        '{"size":[1,"2"]}',
        '{"size":[1e9,80]}',
        '{"size":[true,80]}',
        "[" * 9000,
    ],
)
def test_a_browser_says_keys_or_a_size(text: str) -> None:
    with pytest.raises((ValueError, RecursionError)):
        read_typed(text)


def test_sizes_are_bounded() -> None:
    assert read_typed(json.dumps({"keys": "ls\r"})) == Typed("ls\r")
    assert read_typed(json.dumps({"size": [MAX_ROWS, MAX_COLUMNS]})) == Typed("", MAX_ROWS, MAX_COLUMNS)
    for size in ([MAX_ROWS + 1, 80], [24, MAX_COLUMNS + 1], [-1, 80]):
        with pytest.raises(ValueError):
            read_typed(json.dumps({"size": size}))
