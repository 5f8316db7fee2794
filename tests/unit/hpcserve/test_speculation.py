"""Guesses of the next tokens."""

from __future__ import annotations

from hpcserve.speculation import MOST_GUESSES, PAUSE_TOKENS, RepeatGuesser


def test_what_followed_the_last_tokens_earlier_is_guessed() -> None:
    assert RepeatGuesser().guess([1, 2, 3, 4, 5, 9, 1, 2, 3], 3) == (4, 5, 9)
    assert len(RepeatGuesser().guess([1, 2, 3, 4, 5, 9, 1, 2, 3], 100)) == MOST_GUESSES
    assert RepeatGuesser().guess([7, 1, 2, 1, 2, 1, 2], 5) == (1, 2, 1, 2, 1)
    assert RepeatGuesser().guess([1, 2, 3, 4, 5], 3) == ()
    assert RepeatGuesser().guess([1, 2, 1, 2], 0) == ()
    assert RepeatGuesser().guess([7], 3) == ()


def test_the_longest_end_counts_and_of_equal_ones_the_latest() -> None:
    assert RepeatGuesser().guess([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3], 1) == (7,)
    assert RepeatGuesser().guess([4, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3], 1) == (8,)


def test_tokens_that_were_added_since_are_known() -> None:
    guesser, tokens = RepeatGuesser(), [1, 2, 3]
    assert guesser.guess(tokens, 2) == ()
    tokens += [4, 1, 2]
    assert guesser.guess(tokens, 2) == (3, 4)


def test_mostly_wrong_guesses_stop_for_a_while() -> None:
    guesser, tokens = RepeatGuesser(), [1, 2] * 8
    for _ in range(10):
        guesser.judge(4, 0, len(tokens))
    assert guesser.guess(tokens, 4) == ()
    tokens += [1, 2] * (PAUSE_TOKENS // 2)
    assert guesser.guess(tokens, 4) == (1, 2, 1, 2)
    for _ in range(10):
        guesser.judge(4, 4, len(tokens))
    assert guesser.guess(tokens, 4) != ()
