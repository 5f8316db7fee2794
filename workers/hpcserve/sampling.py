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
CANDIDATES = 1024  # the most likely tokens, which are sorted first; all are sorted only if these are too few
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
    """Return a token for each row of changed logits; None if none is allowed."""
    largest, likeliest = logits.max(dim=-1)
    tokens: list[int | None] = [
        token if math.isfinite(most) else None for token, most in zip(likeliest.tolist(), largest.tolist(), strict=True)
    ]
    random = [row for row, draw in enumerate(draws) if tokens[row] is not None and not is_greedy(draw.settings)]
    if not random:
        return tokens
    # From the largest logit on, in doubles: a temperature near 0 or of 1e30 leaves probabilities, not infinities.
    temperatures = torch.tensor([[draws[row].settings.temperature] for row in random], dtype=torch.float64)
    scaled = (logits[random].double() - largest[random, None].double()) / temperatures.to(logits.device)
    whole = [place for place, row in enumerate(random) if not truncates(draws[row].settings, logits.shape[-1])]
    if whole:
        numbers = [uniform(draws[random[place]].seed, draws[random[place]].position) for place in whole]
        for place, index in zip(whole, pick(torch.softmax(scaled[whole], dim=-1), numbers), strict=True):
            tokens[random[place]] = index
    for place in sorted(set(range(len(random))) - set(whole)):
        draw = draws[random[place]]
        tokens[random[place]] = truncated(scaled[place], draw.settings, uniform(draw.seed, draw.position))
    return tokens


def truncates(settings: SamplingSettings, vocabulary: int) -> bool:
    """Return whether unlikely tokens are left out."""
    return settings.top_p < 1 or settings.min_p > 0 or 0 < settings.top_k < vocabulary


def truncated(scaled: Tensor, settings: SamplingSettings, number: float) -> int:
    """Return a token of a row among those that top-k, top-p and min-p leave."""
    vocabulary = len(scaled)
    most = min(settings.top_k or vocabulary, vocabulary)
    total = torch.logsumexp(scaled, dim=-1)
    count = min(most, CANDIDATES)
    while True:
        values, tokens = torch.topk(scaled, count)
        if settings.top_k:  # the rest is left out before top-p counts
            total = torch.logsumexp(values[:most], dim=-1) if count == most else total
        chances = torch.exp(values - total)
        sums = chances.cumsum(dim=-1)
        enough = float(sums[-1]) >= settings.top_p or float(chances[-1]) < settings.min_p * float(chances[0])
        if count == most or (enough and not settings.top_k):
            break
        count = most
    keep = (sums - chances < settings.top_p) & (chances >= settings.min_p * chances[0])
    keep[0] = True
    (index,) = pick((chances * keep)[None], [number])
    return int(tokens[index])


def pick(chances: Tensor, numbers: Sequence[float]) -> list[int]:
    """Return the place in each row at which the sum of chances passes its number.

    Numbers are parts, 0 to 1, of the row's total."""
    sums = chances.cumsum(dim=-1)
    aims = torch.tensor([[number] for number in numbers], dtype=sums.dtype, device=sums.device) * sums[:, -1:]
    places = torch.searchsorted(sums, aims, right=True)
    # Rounding may lead past the end, or onto a token of chance 0 there.
    last = torch.where(chances > 0, torch.arange(chances.shape[-1], device=sums.device), 0).amax(dim=-1, keepdim=True)
    return [int(place) for place in torch.minimum(places, last)[:, 0]]


def score(
    logits: Tensor, tokens: Sequence[int], counts: Sequence[int]
) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """Return the log probability of a token of each row, and the most likely tokens."""
    logprobs = torch.log_softmax(logits, dim=-1)
    own = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    values, indices = torch.topk(logprobs, min(max(counts), logits.shape[-1]))
    tops = [tuple(zip(*row, strict=True)) for row in zip(indices.tolist(), values.tolist(), strict=True)]
    return [(logprob, top[:count]) for logprob, top, count in zip(own, tops, counts, strict=True)]
