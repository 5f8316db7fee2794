"""Chooses tokens from logits, for all rows of a step.

By temperature, top-k, top-p, min-p, penalties, biases and masks.

Knows no requests and no steps. Rules: the random number of a token depends on the seed and on its position alone, so that a
stream that is continued elsewhere has the same tokens. A row's token does not depend on the other rows. Without temperature
the most likely token is taken; rows that want nothing else are chosen together. Log probabilities are the model's own, before
anything that changes the choice. Logits that are not numbers are not an exception of the step: their row has no token.

Sources: OpenAI's API (penalties on generated tokens); Keskar et al. 2019 (repetition penalty, on all tokens); Salmon et al. 2011
(Philox).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hpcserve.errors import InvalidRequest
from hpcserve.requests import SamplingSettings

GREEDY_BELOW = 1e-5  # a temperature at which the second token's probability is 0 in practice
HOTTEST = 1e30  # temperatures above make all tokens equally likely, as this one does
LIKELY = (1e-2, 1e-4, 1e-6)  # parts of the largest chance: less likely tokens are looked at only if these are too few
MOST_LOGPROBS = 128
MOST_BIASES = 1024
LARGEST_BIAS = 1e4  # more changes no choice


class TokenMask(Protocol):
    """Says which tokens may follow, for one sequence."""

    def mask(self) -> Any:
        """Return the tokens that may follow: an array of booleans, not longer than the vocabulary."""

    def accept(self, token: int) -> object:
        """Continue behind this token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDraw:
    """What is chosen from one row of logits, and by what."""

    settings: SamplingSettings
    seed: int
    position: int  # of the token in the sequence
    prompt: Mapping[int, int] = field(default_factory=dict)  # how often each token occurs; for penalties
    generated: Mapping[int, int] = field(default_factory=dict)
    allowed: Any = None  # a mask; None: all tokens
    logprobs: int | None = None  # the most likely tokens to be returned

    @property
    def is_plain(self) -> bool:
        """The most likely token is wanted, and nothing else."""
        return (
            self.logprobs is None and self.allowed is None and is_greedy(self.settings) and not changes(self.settings)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenToken:
    """A token, and its log probability if that was wanted."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def check_settings(settings: SamplingSettings, vocabulary: int) -> None:
    """Check that tokens can be chosen so.

    Raises:
        InvalidRequest: a value is out of range.
    """
    bounds = {
        "temperature": (0.0, math.inf),
        "top_p": (0.0, 1.0),
        "top_k": (0, math.inf),
        "min_p": (0.0, 1.0),
        "presence_penalty": (-1e4, 1e4),
        "frequency_penalty": (-1e4, 1e4),
        "repetition_penalty": (1e-4, 1e4),
    }
    for name, (least, most) in bounds.items():
        value = getattr(settings, name)
        if not least <= value <= most or not math.isfinite(value):
            raise InvalidRequest(
                f"cannot choose tokens: {name} must be from {least:g} to {most:g}, not {value!r}", param=name
            )
    if len(settings.logit_bias) > MOST_BIASES:
        raise InvalidRequest(f"cannot choose tokens: logit_bias has over {MOST_BIASES} tokens", param="logit_bias")
    for token, bias in settings.logit_bias.items():
        if not 0 <= token < vocabulary or math.isnan(bias):
            raise InvalidRequest(
                f"cannot choose tokens: logit_bias gives token {token!r} the bias {bias!r};"
                f" tokens are from 0 to {vocabulary - 1}, biases are numbers",
                param="logit_bias",
            )


def is_greedy(settings: SamplingSettings) -> bool:
    """Return whether the most likely token is always taken."""
    return settings.temperature < GREEDY_BELOW or settings.top_k == 1


def has_penalties(settings: SamplingSettings) -> bool:
    """Return whether the choice depends on which tokens occurred before."""
    return bool(settings.presence_penalty or settings.frequency_penalty or settings.repetition_penalty != 1)


def changes(settings: SamplingSettings) -> bool:
    """Return whether logits are changed before the choice."""
    return has_penalties(settings) or bool(settings.logit_bias)


def uniform(seed: int, position: int) -> float:
    """Return the random number, 0 <= x < 1, of a position."""
    bits = np.random.Philox(key=seed % 2**64, counter=position).random_raw()
    return float(int(bits) >> 11) * 2.0**-53


def choose(logits: Tensor, draws: Sequence[TokenDraw]) -> list[ChosenToken | None]:
    """Choose a token from each row of logits.

    Args:
        logits: [rows, vocabulary], float32; not changed.
        draws: one for each row.

    Returns:
        None for a row in which a number is infinite or not a number, or in which no token is allowed.
    """
    if not draws:
        return []
    largest, likeliest = logits.max(dim=-1)
    usable = torch.isfinite(largest).tolist()
    chosen: list[ChosenToken | None] = [
        ChosenToken(token=token) if good else None for token, good in zip(likeliest.tolist(), usable, strict=True)
    ]
    rows = [row for row, draw in enumerate(draws) if usable[row] and not draw.is_plain]
    if not rows:
        return chosen
    own = logits[rows]  # a copy
    for place, row in enumerate(rows):
        change(own[place], draws[row])
    for row, token in zip(rows, draw_tokens(own, [draws[row] for row in rows]), strict=True):
        chosen[row] = None if token is None else ChosenToken(token=token)
    return with_logprobs(logits, draws, chosen)


def with_logprobs(
    logits: Tensor, draws: Sequence[TokenDraw], chosen: Sequence[ChosenToken | None]
) -> list[ChosenToken | None]:
    """Return the chosen tokens, those of rows that want it with their log probabilities."""
    found = list(chosen)
    wanted = [(row, token.token, draws[row].logprobs or 0) for row, token in enumerate(chosen) if token is not None]
    wanted = [(row, token, count) for row, token, count in wanted if draws[row].logprobs is not None]
    if not wanted:
        return found
    rows, tokens, counts = zip(*wanted, strict=True)
    for row, token, (logprob, top) in zip(rows, tokens, score(logits[list(rows)], tokens, counts), strict=True):
        found[row] = ChosenToken(token=token, logprob=logprob, top=top)
    return found


def change(logits: Tensor, draw: TokenDraw) -> None:
    """Apply penalties, biases and the mask of a row to its logits, in place."""
    settings = draw.settings
    if settings.repetition_penalty != 1 and (draw.prompt or draw.generated):
        index = torch.tensor(sorted({*draw.prompt, *draw.generated}), device=logits.device)
        found = logits[index]
        logits[index] = torch.where(found > 0, found / settings.repetition_penalty, found * settings.repetition_penalty)
    if draw.generated and (settings.presence_penalty or settings.frequency_penalty):
        index = torch.tensor(list(draw.generated), device=logits.device)
        counts = torch.tensor(list(draw.generated.values()), dtype=logits.dtype, device=logits.device)
        logits[index] -= settings.presence_penalty + settings.frequency_penalty * counts
    if settings.logit_bias:
        index = torch.tensor(list(settings.logit_bias), device=logits.device)
        bounded = [max(-LARGEST_BIAS, min(bias, LARGEST_BIAS)) for bias in settings.logit_bias.values()]
        logits[index] += torch.tensor(bounded, dtype=logits.dtype, device=logits.device)
    if draw.allowed is not None:
        allowed = torch.as_tensor(draw.allowed, dtype=torch.bool, device=logits.device)[: len(logits)]
        logits[: len(allowed)].masked_fill_(~allowed, -math.inf)
        logits[len(allowed) :] = -math.inf


def draw_tokens(logits: Tensor, draws: Sequence[TokenDraw]) -> list[int | None]:
    """Return a token for each row of changed logits; None if none is allowed.

    Row by row: a vocabulary is long enough for torch, and no row depends on the others.
    """
    largest, likeliest = logits.max(dim=-1)
    tokens: list[int | None] = []
    for row, (draw, most, token) in enumerate(zip(draws, largest.tolist(), likeliest.tolist(), strict=True)):
        if not math.isfinite(most):
            tokens.append(None)
        elif is_greedy(draw.settings):
            tokens.append(token)
        else:
            # Relative to the largest: a temperature near 0 or of 1e30 leaves chances, not infinities.
            scaled = (logits[row] - most).div_(min(draw.settings.temperature, HOTTEST))
            tokens.append(drawn(scaled, draw.settings, uniform(draw.seed, draw.position)))
    return tokens


def drawn(scaled: Tensor, settings: SamplingSettings, number: float) -> int:
    """Return a token among those that top-k, top-p and min-p leave.

    Args:
        scaled: of all tokens, the logarithms of their chances as parts of the largest.
        number: which token, 0 <= number < 1.
    """
    has_most = 0 < settings.top_k < len(scaled)
    chances = scaled.exp()
    if has_most:
        tokens = torch.topk(scaled, settings.top_k)[1]
        values = chances[tokens]
    elif settings.top_p < 1 or settings.min_p > 0:
        tokens = likely(chances, settings)
        values, order = chances[tokens].sort(descending=True, stable=True)
        tokens = tokens[order]
    else:
        return pick(chances, number)
    sums = values.cumsum(dim=0, dtype=torch.float64)
    total = sums[-1] if has_most else chances.sum(dtype=torch.float64)
    keep = (sums - values < settings.top_p * total) & (values >= settings.min_p)
    keep[0] = True
    return int(tokens[pick(values * keep, number)])


def likely(chances: Tensor, settings: SamplingSettings) -> Tensor:
    """Return tokens among which are all that top-p and min-p leave.

    They are few, so that they can be sorted.
    """
    enough = settings.top_p * chances.sum(dtype=torch.float64)
    for least in LIKELY:
        found = (chances >= max(least, settings.min_p)).nonzero()[:, 0]
        if least <= settings.min_p or chances[found].sum(dtype=torch.float64) > enough:
            return found
    return torch.arange(len(chances), device=chances.device)


def pick(chances: Tensor, number: float) -> int:
    """Return the place at which the sum of the chances passes a part of their total."""
    sums = chances.cumsum(dim=0, dtype=torch.float64)
    place = int(torch.searchsorted(sums, number * sums[-1], right=True))
    return place if place < len(chances) else int(chances.nonzero()[-1])  # rounding can lead past the end


def score(
    logits: Tensor, tokens: Sequence[int], counts: Sequence[int]
) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """Return the log probability of a token of each row, and the most likely tokens."""
    logprobs = torch.log_softmax(logits, dim=-1)
    own = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    values, indices = torch.topk(logprobs, min(max(counts), logits.shape[-1]))
    tops = [tuple(zip(*row, strict=True)) for row in zip(indices.tolist(), values.tolist(), strict=True)]
    return [(logprob, top[:count]) for logprob, top, count in zip(own, tops, counts, strict=True)]
