"""One step of all ranks, as the leader describes it.

Which tokens are computed, and where their keys and values are kept.

A fixed binary form, no pickle: header, then for each row its numbers as little-endian 32-bit integers. `from_bytes` checks
lengths, because the bytes come from another node.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from hpcserve.errors import ServeError

BLOCK_POSITIONS = 16  # positions of the KV cache in a block
MAGIC = 0x48535031
HEAD = struct.Struct("<III")  # magic, number of the step, rows
ROW = struct.Struct("<IIIII")  # tokens, start, blocks, logits, flags
HIDDEN = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """The new tokens of one sequence in a step."""

    tokens: tuple[int, ...]
    start: int  # the position of the first of them
    blocks: tuple[int, ...]  # of the sequence, from position 0; position p is in blocks[p // BLOCK_POSITIONS]
    logits: int = 1  # the last positions whose logits are wanted; 0 for a part of a prompt
    hidden: bool = False  # the final hidden states of all tokens are wanted, for embeddings


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardStep:
    """The rows of one step, computed together."""

    number: int
    rows: tuple[StepRow, ...]

    def to_bytes(self) -> bytes:
        """Return the step in the form that ranks exchange."""
        parts = [HEAD.pack(MAGIC, self.number, len(self.rows))]
        for row in self.rows:
            flags = HIDDEN if row.hidden else 0
            parts.append(ROW.pack(len(row.tokens), row.start, len(row.blocks), row.logits, flags))
            parts.append(np.array((*row.tokens, *row.blocks), dtype="<u4").tobytes())
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, content: bytes) -> ForwardStep:
        """Return the step that `to_bytes` wrote.

        Raises:
            ServeError: the bytes are not a step.
        """
        try:
            magic, number, count = HEAD.unpack_from(content)
            if magic != MAGIC:
                raise ServeError("cannot read a step: it has another format")
            at, rows = HEAD.size, []
            for _ in range(count):
                tokens, start, blocks, logits, flags = ROW.unpack_from(content, at)
                numbers = np.frombuffer(content, "<u4", tokens + blocks, at + ROW.size).tolist()
                at += ROW.size + 4 * len(numbers)
                rows.append(
                    StepRow(
                        tokens=tuple(numbers[:tokens]),
                        start=start,
                        blocks=tuple(numbers[tokens:]),
                        logits=logits,
                        hidden=bool(flags & HIDDEN),
                    )
                )
        except (struct.error, ValueError) as error:
            raise ServeError(f"cannot read a step: {error}") from None
        if at != len(content):
            raise ServeError("cannot read a step: bytes are left over")
        return cls(number=number, rows=tuple(rows))
