"""Judges a model by a text: perplexity, the exponential of the mean loss of a token.

The text is cut into windows of the same length; each token but the first of a window counts. Perplexities of models with the
same tokenizer can be compared if text and window are the same. Does not know how models are made smaller.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcserve.config import StoredKind, read_config
from hpcserve.errors import ServeError
from hpcserve.kernels import WeightKind
from hpcserve.model import DecoderModel, whole_part
from hpcserve.steps import BLOCK_POSITIONS, ForwardStep, StepRow
from hpcserve.tokens import TextTokenizer
from hpcserve.weights import WeightFiles

WINDOW_TOKENS = 512
MOST_TEXT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TextScore:
    """How well a model predicts a text."""

    perplexity: float
    tokens: int


def perplexity(directory: Path, text: str, kind: WeightKind | None = None, *, most_tokens: int = 8192) -> TextScore:
    """Return how well the model of a directory predicts the first tokens of a text.

    Raises:
        ServeError: the model cannot be read, or the text is too short.
    """
    model = whole_model(directory, kind)
    tokens = text_tokens(directory, model, text, most_tokens)
    loss = count = 0.0
    for window, hidden, step in windows(model, tokens):
        targets = torch.tensor(window[1:])
        loss += float(F.cross_entropy(model.logits(hidden, step)[:-1], targets, reduction="sum"))
        count += len(targets)
    return TextScore(perplexity=math.exp(min(loss / count, 700.0)), tokens=int(count))


def whole_model(directory: Path, kind: WeightKind | None = None) -> DecoderModel:
    """Return the model of a directory in this process, by default as its files are stored.

    Raises:
        ServeError: it cannot be read.
    """
    config = read_config(directory)
    if kind is None:
        kind = WeightKind.BF16 if config.stored is StoredKind.FLOAT else WeightKind(config.stored)
    with WeightFiles(directory) as files:
        return DecoderModel(config, files, whole_part(config), kind)


def text_tokens(directory: Path, model: DecoderModel, text: str, most: int) -> list[int]:
    """Return the first tokens of a text.

    Raises:
        ServeError: there are fewer than two.
    """
    tokenizer = TextTokenizer.load(directory, model.config.vocab)
    tokens = tokenizer.encode(text[: 16 * most], add_special=False)[:most]
    if len(tokens) < 2:
        raise ServeError("cannot judge the model: the text has fewer than 2 tokens; name a longer one with --text")
    return tokens


def windows(model: DecoderModel, tokens: Sequence[int]) -> Iterator[tuple[Sequence[int], Tensor, ForwardStep]]:
    """Yield windows of the tokens, each with the model's final hidden states and its step."""
    length = min(WINDOW_TOKENS, model.config.context_tokens)
    blocks = -(-length // BLOCK_POSITIONS)
    model.allocate(blocks)
    for start in range(0, len(tokens), length):
        window = tokens[start : start + length]
        if len(window) < 2:
            return
        row = StepRow(tokens=tuple(window), start=0, blocks=tuple(range(blocks)), logits=len(window))
        step = ForwardStep(number=0, rows=(row,))
        yield window, model.forward(step, None), step


def read_text(path: Path | None) -> str:
    """Return a text to judge models by; without a path, the source of a module of Python.

    Raises:
        ServeError: it cannot be read.
    """
    try:
        with Path(path or argparse_source()).open("rb") as file:
            return file.read(MOST_TEXT_BYTES).decode(errors="replace")
    except OSError as error:
        raise ServeError(f"cannot read '{path}': {error.strerror}") from None


def argparse_source() -> str:
    """Return the file of a long module of the standard library."""
    import argparse  # noqa: PLC0415 (the module is the text)

    return argparse.__file__
