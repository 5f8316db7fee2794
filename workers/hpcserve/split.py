"""The parts of a model that ranks hold, as values.

A `ModelSplit` is a list of stages; a stage is a list of parts, one for each of its ranks. Ranks are numbered stage by stage. The
parts of a stage have the same layers, and together all KV groups, FFN columns and vocabulary rows, in order, without gaps.
A part may have no KV groups, or no FFN columns: a slow node gets less. Does not know speeds or memory: `plan` chooses.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpcserve.errors import ServeError


@dataclass(frozen=True, slots=True)
class Span:
    """The whole numbers from `start` up to, not including, `stop`."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """The weights of one rank: its layers, and of them KV groups, FFN columns, vocabulary."""

    layers: Span
    kv_groups: Span
    ffn: Span
    vocab: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSplit:
    """The parts of all ranks, by stage."""

    stages: tuple[tuple[ModelPart, ...], ...]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(map(len, self.stages))

    def place(self, rank: int) -> tuple[int, int]:
        """Return the stage of a rank, and its number within the stage."""
        for stage, parts in enumerate(self.stages):
            if rank < len(parts):
                return stage, rank
            rank -= len(parts)
        raise IndexError(rank)

    def part(self, rank: int) -> ModelPart:
        """Return the part of a rank."""
        stage, place = self.place(rank)
        return self.stages[stage][place]

    def to_json(self) -> list[list[list[list[int]]]]:
        """Return the spans of all parts as JSON values."""
        return [
            [
                [[span.start, span.stop] for span in (part.layers, part.kv_groups, part.ffn, part.vocab)]
                for part in stage
            ]
            for stage in self.stages
        ]

    @classmethod
    def from_json(cls, value: object) -> ModelSplit:
        """Return the split that `to_json` wrote.

        Raises:
            ServeError: the value is not a split.
        """
        try:
            stages = [[[Span(int(start), int(stop)) for start, stop in part] for part in stage] for stage in value]  # type: ignore[attr-defined]
            return cls(
                stages=tuple(
                    tuple(ModelPart(layers=a, kv_groups=b, ffn=c, vocab=d) for a, b, c, d in stage) for stage in stages
                )
            )
        except (TypeError, ValueError):
            raise ServeError("cannot read a split of the model: it has another form") from None

    def check(self, *, layers: int, kv_groups: int, ffn: int, vocab: int) -> None:
        """Check that the parts together are the whole model.

        Raises:
            ServeError: something is missing or held twice.
        """
        if not self.stages or not all(self.stages):
            raise ServeError("cannot split the model: a stage has no rank")
        whole(layers, [stage[0].layers for stage in self.stages], "layers")
        for stage in self.stages:
            if any(part.layers != stage[0].layers for part in stage):
                raise ServeError("cannot split the model: ranks of one stage have different layers")
            whole(kv_groups, [part.kv_groups for part in stage], "KV groups")
            whole(ffn, [part.ffn for part in stage], "FFN columns")
            whole(vocab, [part.vocab for part in stage], "vocabulary")


def whole(length: int, spans: Sequence[Span], name: str) -> None:
    """Check that spans follow each other from 0 to `length`.

    Raises:
        ServeError: there is a gap or an overlap.
    """
    ends = [0, *(span.stop for span in spans)]
    if (
        [span.start for span in spans] != ends[:-1]
        or ends[-1] != length
        or any(span.stop < span.start for span in spans)
    ):
        raise ServeError(f"cannot split the model: parts of its {length} {name} overlap or are missing: {list(spans)}")


def spans_of(widths: Sequence[int]) -> list[Span]:
    """Return spans of these widths, one after the other, from 0."""
    ends = list(itertools.accumulate(widths, initial=0))
    return [Span(start, stop) for start, stop in itertools.pairwise(ends)]


def even(length: int, count: int) -> list[int]:
    """Return `count` widths that differ by at most 1, whose sum is `length`."""
    return [length // count + (index < length % count) for index in range(count)]
