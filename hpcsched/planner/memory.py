"""Compute the memory that a language model needs, to train it or to serve it.

All is computed from the numbers of its configuration.

Training: weights and optimizer stay. On top comes the greater of two moments. When the loss is known there are all tensors that
the forward pass keeps for the backward pass, and the logits. When the backward pass ends there are all gradients, and what one
layer keeps. With data parallelism every rank has all of this; ZeRO stage 1 divides the optimizer by the ranks. Serving: weights
and the key-value cache of all tokens that are held at a time.

What a layer keeps per token was counted from the tensors that autograd saves of the families' own code: six hidden vectors
(two norms and the inputs of the projections), queries and attention output, keys and values, and the tensors of the
feed-forward network (four if it is gated, else five). GPT-2 has dropout: masks, and attention weights for each pair of tokens.
With recomputation a layer keeps its input alone, and one layer at a time has all of it.

`Need.peak` is the sum of the tensors at that moment. It is within 10 % of the peak that torch has for the families below
(`python -m tests.bench plan` measures it). A process takes more: `MARGIN` for what the allocator of the C library cannot use
again, and `PROCESS` for Python and torch themselves. Whether a model fits is decided with both.

Pure. Sources: Korthikanti et al., "Reducing activation recomputation in large transformer models" (2022); Rajbhandari et al.,
"ZeRO: memory optimizations toward training trillion parameter models" (2020); config.json of Hugging Face transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from hpcsched.errors import RequestError

MIB = 1 << 20
MARGIN = 1.25  # measured: 1.0 to 1.3 with the allocator of glibc; CUDA's caching allocator takes about 1.1
PROCESS = 400 * MIB
LOGITS = 3  # copies of the logits at the peak: the saved softmax, its gradient, and that of the logits
PREFILL = 512  # tokens of a prompt that go through a layer at a time
BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1.0, "int4": 0.5}
OPTIMIZERS = {"adamw": 8.0, "adamw8bit": 2.0, "sgd-momentum": 4.0, "sgd": 0.0}  # bytes per parameter
MOST = 10**7  # a larger number in a configuration is an error
MOST_PARAMS = 10**14
_COUNT = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)([KMBT]?)", re.IGNORECASE)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The numbers of a decoder: `hidden` and `ffn` are widths, `head_dim` the width of a head.

    `experts`: feed-forward networks per layer (1: dense). `used_experts` of them work on a token.
    `positions`: learned position embeddings. `qk_norm`: queries and keys are normalized. `params`: if it is known.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    gated: bool = True
    tied: bool = False
    experts: int = 1
    used_experts: int = 1
    positions: int = 0
    qk_norm: bool = False
    attention_weights: bool = False  # dropout in attention: the weights of all pairs of tokens are kept
    known_params: int = 0

    @property
    def queries(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Return the width of the keys, which is that of the values."""
        return self.kv_heads * self.head_dim

    @property
    def params(self) -> int:
        """Return the number of parameters, without norms and biases, which count little."""
        if self.known_params:
            return self.known_params
        attention = self.hidden * (2 * self.queries + 2 * self.keys)
        network = (3 if self.gated else 2) * self.hidden * self.ffn * self.experts
        router = self.hidden * self.experts if self.experts > 1 else 0
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2) + self.positions * self.hidden
        return self.layers * (attention + network + router) + embeddings

    @property
    def params_per_token(self) -> int:
        """Return the parameters that work on one token: less than `params` with experts."""
        idle = (3 if self.gated else 2) * self.hidden * self.ffn * (self.experts - self.used_experts)
        return self.params - self.layers * idle


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How a model is trained: `batch` sequences of `sequence` tokens at a time on a rank."""

    batch: int = 1
    sequence: int = 1024
    dtype: str = "fp32"  # of weights and activations; the optimizer then has fp32 weights of its own
    optimizer: str = "adamw"
    recompute: bool = False
    zero_ranks: int = 1  # ranks that share the optimizer (ZeRO stage 1); 1: none

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """How a model is served: `streams` conversations at a time, of up to `context` tokens."""

    streams: int = 1
    context: int = 4096
    dtype: str = "bf16"
    cache_dtype: str = "bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes: `peak` of all tensors at a time, and `parts` by what they are for.

    Not all parts are there at the time of the peak.
    """

    parts: Mapping[str, int]
    peak: int

    @property
    def total(self) -> int:
        """Return what a process needs."""
        return ceil(self.peak * MARGIN) + PROCESS

    @property
    def mib(self) -> int:
        return ceil(self.total / MIB)


def training_need(model: Model, how: Training) -> Need:
    """Return what each rank needs to train `model`."""
    params, size = model.params, BYTES[how.dtype]
    own = 0.0 if how.dtype == "fp32" else 4.0  # fp32 weights beside those of half precision
    weights = gradients = ceil(size * params)
    optimizer = ceil((OPTIMIZERS[how.optimizer] + own) * params / max(1, how.zero_ranks))
    token = size * how.tokens
    layer = ceil(token * kept_per_token(model, how.sequence))
    kept = ceil(token * model.hidden * model.layers) if how.recompute else layer * model.layers
    kept += ceil(token * 4 * model.hidden)  # the last norm and the input of the first layer
    logits = ceil(LOGITS * max(4.0, size) * how.tokens * model.vocab)
    working = layer + ceil(token * working_per_token(model, how.sequence)) if how.recompute else layer
    return Need(
        parts={
            "weights": weights,
            "gradients": gradients,
            "optimizer": optimizer,
            "activations": max(kept, working),
            "logits": logits,
        },
        peak=weights + optimizer + max(kept + logits, kept + working if how.recompute else 0, gradients + working),
    )


def kept_per_token(model: Model, sequence: int) -> float:
    """Return the numbers that one layer keeps of each token for the backward pass."""
    if model.attention_weights:
        attention = 2 * model.hidden + 2 * model.queries + 2 * model.keys + 3 * model.heads * sequence
    else:
        attention = 2 * model.queries + 2 * model.keys + model.heads
    if model.qk_norm:
        attention += 2 * model.queries + 2 * model.keys
    network = (4 if model.gated else 5) * model.ffn * model.used_experts
    return 6 * model.hidden + attention + network


def working_per_token(model: Model, sequence: int) -> float:
    """Return what the backward pass of a layer needs per token beside what was kept."""
    return 3 * model.heads * sequence if model.attention_weights else 0.0


def serving_need(model: Model, how: Serving) -> Need:
    """Return what one whole replica of `model` needs."""
    parts = {
        "weights": ceil(BYTES[how.dtype] * model.params),
        "cache": ceil(2 * model.layers * model.keys * BYTES[how.cache_dtype] * how.streams * how.context),
        "activations": ceil(4 * how.streams * (model.vocab + PREFILL * (4 * model.hidden + 2 * model.ffn))),
    }
    return Need(parts=parts, peak=sum(parts.values()))


# ----- the configuration of a model: config.json, or numbers


# family -> what differs from Llama's names and habits
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"qk_norm": True},
    "gemma": {"tied": True},
    "gemma2": {"tied": True},
    "gemma3_text": {"tied": True, "qk_norm": True},
    "phi3": {},
    "mixtral": {},
    "qwen2_moe": {},
    "qwen3_moe": {"qk_norm": True},
    "gpt2": {"gated": False, "tied": True, "attention_weights": True},
}


def model_from_config(config: object, name: str) -> Model:
    """Return the model that a parsed config.json describes; `name` is for errors.

    Raises: RequestError for an unknown family, a missing number or a number that cannot be.
    """
    if not isinstance(config, dict):
        raise RequestError(f"cannot read the model {name}: config.json is not a JSON object")
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise RequestError(
            f"cannot tell the memory of {name}: the family {str(family)[:40]!r} is not known; known are "
            f"{', '.join(sorted(_FAMILIES))}. Give its numbers instead: --layers, --hidden, --heads, --vocab, --ffn"
        )
    habits = _FAMILIES[family]

    def value(*names: str, default: int | None = None) -> int:
        for each in names:
            if config.get(each) is not None:
                return _positive(config[each], each, name)
        if default is None:
            raise RequestError(f"cannot read the model {name}: config.json has no {names[0]}")
        return default

    hidden = value("hidden_size", "n_embd")
    heads = value("num_attention_heads", "n_head")
    experts = value("num_local_experts", "num_experts", default=1)
    ffn = value(
        "moe_intermediate_size", "intermediate_size", "n_inner", default=4 * hidden if family == "gpt2" else None
    )
    return Model(
        name=name,
        layers=value("num_hidden_layers", "n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=value("num_key_value_heads", default=heads),
        head_dim=value("head_dim", default=max(1, hidden // heads)),
        ffn=ffn,
        vocab=value("vocab_size"),
        gated=habits.get("gated", True),
        tied=bool(config.get("tie_word_embeddings", habits.get("tied", False))),
        experts=experts,
        used_experts=min(experts, value("num_experts_per_tok", default=1)),
        positions=value("n_positions", default=0) if family == "gpt2" else 0,
        qk_norm=habits.get("qk_norm", False),
        attention_weights=bool(habits.get("attention_weights")) and config.get("attn_pdrop", 0.1) != 0,
    )


def read_config(text: str, name: str) -> Model:
    """Return the model of the text of a config.json. Raises RequestError."""
    try:
        return model_from_config(json.loads(text), name)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"cannot read the model {name}: config.json is not JSON ({str(error)[:100]})") from None


def model_from_numbers(
    *, params: str, layers: int, hidden: int, heads: int, kv_heads: int, vocab: int, ffn: int
) -> Model:
    """Return a gated model with these numbers; 0 is "not given".

    Raises: RequestError if neither the parameters nor the numbers that make them are given.
    """
    known = parse_params(params) if params else 0
    if not known and not (layers and hidden and vocab):
        raise RequestError(
            "cannot tell the model: give a directory with config.json, or --params, or --layers, --hidden and --vocab"
        )
    if (
        known and not hidden
    ):  # the usual proportions: 128 times as wide as deep, 12 parameters per layer and width squared
        hidden = max(64, round((known * 128 / 12) ** (1 / 3) / 64) * 64)
    layers = layers or max(1, round((known or 1) / (12 * hidden * hidden)))
    heads = heads or max(1, hidden // 128)
    if hidden % heads:
        raise RequestError(f"cannot divide the width {hidden} among {heads} heads")
    kv_heads = kv_heads or heads
    if heads % kv_heads:
        raise RequestError(f"cannot divide {heads} heads among {kv_heads} pairs of keys and values")
    return Model(
        name=f"{params} parameters" if params else f"{layers} layers of {hidden}",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        ffn=ffn or round(8 * hidden / 3 / 64) * 64 or 64,
        vocab=vocab or 32000,
        known_params=known,
    )


def parse_params(text: str) -> int:
    """Return the number of parameters in ``7B`` or ``350M``. Raises RequestError."""
    match = _COUNT.fullmatch(text.strip())
    found = round(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if not 0 < found <= MOST_PARAMS:
        raise RequestError(f"cannot read the number of parameters {text[:40]!r}: write it as 7B or 350M")
    return found


def _positive(value: object, what: str, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MOST:
        raise RequestError(f"cannot read the model {name}: {what} is {str(value)[:40]}, not a number from 1 to {MOST}")
    return value
