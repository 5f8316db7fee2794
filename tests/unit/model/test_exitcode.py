"""What exit codes mean, in words."""

from __future__ import annotations

import pytest

from hpcsched.model.job import exit_words, signal_of


@pytest.mark.parametrize(
    ("code", "signum", "words"),
    [
        (0, 0, ""),
        (1, 0, ""),
        (137, 0, "killed by SIGKILL; perhaps memory ran out: see MaxRSS in hacct and --mem"),
        (0, 9, "killed by SIGKILL; perhaps memory ran out: see MaxRSS in hacct and --mem"),
        (139, 0, "killed by SIGSEGV; it used memory that is not its own"),
        (143, 0, "killed by SIGTERM"),
        (127, 0, "a command in it was not found"),
        (75, 0, "it asks to be queued again; that needs --requeue"),
        (128, 0, ""),
        (255, 0, ""),
        (0, 64, "killed by SIGRTMAX"),
        (0, 99, "killed by signal 99"),
    ],
)
def test_an_exit_status_in_words(code: int, signum: int, words: str) -> None:
    assert exit_words(code, signum) == words


def test_the_signal_of_an_exit_code() -> None:
    assert [signal_of(137, 0), signal_of(0, 11), signal_of(1, 0), signal_of(255, 0)] == [9, 11, 0, 0]
