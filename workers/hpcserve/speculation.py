"""Guesses of the next tokens: what followed the last tokens earlier follows again.

The step that verifies the guesses computes them all at once; a guess counts only if it is the token that would have been chosen
without it, so the text is the same. Knows tokens, not models. Rules: the longest repeated end decides, the latest occurrence of
it first; a sequence whose guesses are mostly wrong gets none for a while.

Source: prompt lookup decoding (Saxena 2023).
"""

from __future__ import annotations

from collections.abc import Sequence

LENGTHS = (4, 3, 2)  # of the ends that are looked up, in tokens
MOST_GUESSES = 6
LEAST_RIGHT = 0.4  # part of the guesses; below that verifying costs more than it gains
WEIGHT = 0.25  # of a new guess's result
PAUSE_TOKENS = 64  # without guesses, after too many were wrong


class RepeatGuesser:
    """The guesses for one sequence."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}  # where a run of tokens last ended, not counting the sequence's end
        self._known = 0  # tokens whose ends are in it
        self._right = 1.0  # a moving average
        self._paused_until = 0

    def guess(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """Return at most `most` tokens that may follow."""
        if len(tokens) < self._paused_until or most < 1:
            return ()
        self._learn(tokens)
        for length in LENGTHS:
            end = self._ends.get(tuple(tokens[-length:])) if len(tokens) > length else None
            if end is not None:
                period = len(tokens) - end  # what is guessed past the end repeats, too
                return tuple(tokens[end + index % period] for index in range(min(most, MOST_GUESSES)))
        return ()

    def judge(self, guessed: int, right: int, length: int) -> None:
        """Record how many guesses were right; `length` is the sequence's."""
        if not guessed:
            return
        self._right += WEIGHT * (right / guessed - self._right)
        if self._right < LEAST_RIGHT:
            self._right = 1.0
            self._paused_until = length + PAUSE_TOKENS

    def _learn(self, tokens: Sequence[int]) -> None:
        for end in range(max(1, self._known), len(tokens)):
            for length in LENGTHS:
                if length <= end:
                    self._ends[tuple(tokens[end - length : end])] = end
        self._known = len(tokens)
