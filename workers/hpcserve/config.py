"""The shape of a model, as its config.json describes it.

Families: Llama 2 and 3, Mistral, Qwen2, Qwen3 and its mixture of experts, GPT-2, Gemma 2 and 3 (text).  A family becomes
switches (`ModelConfig`), so that model.py has one decoder and no names of families.
Does not know weights or their files.
Rules: nothing from the directory is executed (`auto_map` is ignored).  Each number is bounded.  What is not supported is
refused, with what is supported; a key that changes the result is never ignored.
Sources: the configuration classes of transformers 5.23.
"""

from __future__ import annotations

import enum
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcserve.errors import ModelFileError

CONFIG_NAME = "config.json"
CONFIG_LIMIT_BYTES = 4 << 20
MOST_LAYERS = 1024
MOST_EXPERTS = 1024
LARGEST_DIMENSION = 1 << 20
LARGEST_VOCABULARY = 1 << 22
LONGEST_CONTEXT_TOKENS = 1 << 24
DEFAULT_THETA = 10_000.0
GEMMA3_THETA = 1_000_000.0
GEMMA3_PATTERN = 6  # every sixth layer sees the whole context
SLIDING, FULL = "sliding_attention", "full_attention"

log = logging.getLogger(__name__)


class ModelFamily(enum.StrEnum):
    """A family of models, by its `model_type`."""

    LLAMA = "llama"
    MISTRAL = "mistral"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    QWEN3_MOE = "qwen3_moe"
    GPT2 = "gpt2"
    GEMMA2 = "gemma2"
    GEMMA3 = "gemma3_text"


ARCHITECTURES = {
    "LlamaForCausalLM": ModelFamily.LLAMA,
    "MistralForCausalLM": ModelFamily.MISTRAL,
    "Qwen2ForCausalLM": ModelFamily.QWEN2,
    "Qwen3ForCausalLM": ModelFamily.QWEN3,
    "Qwen3MoeForCausalLM": ModelFamily.QWEN3_MOE,
    "GPT2LMHeadModel": ModelFamily.GPT2,
    "Gemma2ForCausalLM": ModelFamily.GEMMA2,
    "Gemma3ForCausalLM": ModelFamily.GEMMA3,
}


class Activation(enum.StrEnum):
    """The function between the two matrices of an FFN."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"


ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}


class NormKind(enum.StrEnum):
    """How hidden states are normalised."""

    RMS = "rms"
    RMS_PLUS_ONE = "rms_plus_one"  # the stored weight is the difference from 1
    LAYER = "layer"


class StoredKind(enum.StrEnum):
    """The numbers that the files have for matrices."""

    FLOAT = "float"
    INT8 = "int8"
    INT4 = "int4"


class RopeKind(enum.StrEnum):
    """How the angles of rotary positions are stretched."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSettings:
    """Rotary positions of a layer."""

    kind: RopeKind = RopeKind.DEFAULT
    theta: float = DEFAULT_THETA
    factor: float = 1.0
    low_factor: float = 1.0
    high_factor: float = 4.0
    original_tokens: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a model.

    `ffn` is the width of an FFN, or of each expert.  `windows` and `ropes` have an entry for each layer; a window of None is
    the whole context, a rope of None means learned positions.
    """

    family: ModelFamily
    hidden: int
    layers: int
    heads: int
    kv_groups: int
    head_dim: int
    ffn: int
    vocab: int
    context_tokens: int
    eps: float
    norm: NormKind
    activation: Activation
    tied: bool
    windows: tuple[int | None, ...]
    ropes: tuple[RopeSettings | None, ...]
    score_scale: float
    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    embedding_scale: float = 1.0
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    experts: int = 0
    experts_per_token: int = 0
    normalize_experts: bool = False
    stored: StoredKind = StoredKind.FLOAT
    eos_tokens: tuple[int, ...] = ()
    bos_token: int | None = None

    @property
    def heads_of_group(self) -> int:
        """The number of query heads that share keys and values."""
        return self.heads // self.kv_groups

    @property
    def learned_positions(self) -> bool:
        """Whether a table of positions is added to the embeddings."""
        return self.ropes[0] is None


def read_config(directory: Path) -> ModelConfig:
    """Return the shape of the model in a directory.

    Raises:
        ModelFileError: config.json is missing, damaged or describes an unsupported model.
    """
    path = directory / CONFIG_NAME
    values = json_of(path, CONFIG_LIMIT_BYTES)
    if not isinstance(values, dict):
        raise ModelFileError(f"cannot read {str(path)!r}: it is not a JSON object")
    try:
        return parse_config(values)
    except ModelFileError as error:
        raise ModelFileError(f"cannot serve {str(directory)!r}: {error}") from None


def json_of(path: Path, limit_bytes: int) -> Any:
    """Return the value that a JSON file of a model has.

    Raises:
        ModelFileError: the file cannot be read, is too large or is not JSON.
    """
    try:
        with path.open("rb") as file:
            content = file.read(limit_bytes + 1)
        if len(content) > limit_bytes:
            raise ModelFileError(f"cannot read {str(path)!r}: it is larger than {limit_bytes} bytes")
        return json.loads(content)
    except OSError as error:
        raise ModelFileError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"cannot read {str(path)!r}: it is not JSON ({error})") from None


def parse_config(values: Mapping[str, Any]) -> ModelConfig:
    """Return the shape that the values of a config.json describe.

    Raises:
        ModelFileError: a value is missing, impossible or not supported.
    """
    family = _family(values)
    if "auto_map" in values:
        log.warning("the model's own code (auto_map of config.json) is ignored: %s is built in", family)
    if values.get("quantization_config"):
        raise ModelFileError("quantization_config is not supported; use the original model and 'hserve quantize'")
    fields = _Fields(values)
    config = _gpt2(fields) if family is ModelFamily.GPT2 else _rotary_model(family, fields)
    _check(config)
    return config


def _family(values: Mapping[str, Any]) -> ModelFamily:
    names = values.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    if name is None:
        try:
            return ModelFamily(values.get("model_type", ""))
        except ValueError:
            name = f"model_type {values.get('model_type')!r}"
    if name not in ARCHITECTURES:
        raise ModelFileError(f"{name} is not supported; supported are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


class _Fields:
    """The values of a config.json, checked as they are taken."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value as it is; null counts as missing."""
        value = self.values.get(name)
        return default if value is None else value

    def number(self, name: str, default: int | None = None, *, most: int = LARGEST_DIMENSION) -> int:
        """Return a whole number from 1 to `most`."""
        value = self.get(name, default)
        if value is None:
            raise ModelFileError(f"{name} is missing in {CONFIG_NAME}")
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise ModelFileError(f"{name} of {CONFIG_NAME} is {value!r}; it has to be a whole number from 1 to {most}")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        """Return a finite number above 0."""
        value = self.get(name, default)
        if value is None:
            raise ModelFileError(f"{name} is missing in {CONFIG_NAME}")
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
            raise ModelFileError(f"{name} of {CONFIG_NAME} is {value!r}; it has to be a number above 0")
        return float(value)

    def optional_real(self, name: str) -> float | None:
        """Return a finite number above 0, or None."""
        return None if self.get(name) is None else self.real(name)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return true or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ModelFileError(f"{name} of {CONFIG_NAME} is {value!r}; it has to be true or false")
        return value

    def activation(self, *names: str) -> Activation:
        """Return the function that the first given key names."""
        value = next((self.get(name) for name in names if self.get(name) is not None), None)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise ModelFileError(f"activation {value!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[value]

    def tokens(self, name: str) -> tuple[int, ...]:
        """Return the ids of a key that has one, several or none."""
        value = self.get(name, [])
        ids = value if isinstance(value, list) else [value]
        if len(ids) > 1000 or not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
            raise ModelFileError(f"{name} of {CONFIG_NAME} is {value!r}; it has to be a token id, or a list of them")
        return tuple(ids)

    def stored(self) -> StoredKind:
        """Return the numbers of the files, which `hserve quantize` writes down."""
        ours = self.get("hpcserve", {})
        kind = str(ours.get("weights", StoredKind.FLOAT) if isinstance(ours, dict) else ours)
        try:
            return StoredKind(kind)
        except ValueError:
            raise ModelFileError(f"hpcserve.weights {kind!r} is not supported; supported are int8 and int4") from None


def _gpt2(fields: _Fields) -> ModelConfig:
    hidden = fields.number("n_embd")
    heads = fields.number("n_head")
    layers = fields.number("n_layer", most=MOST_LAYERS)
    if hidden % heads:
        raise ModelFileError(f"n_embd {hidden} has to be a multiple of n_head {heads}")
    for name, usual in (("scale_attn_by_inverse_layer_idx", False), ("scale_attn_weights", True)):
        if fields.flag(name, default=usual) is not usual:
            raise ModelFileError(f"{name} {not usual} is not supported")
    return ModelConfig(
        family=ModelFamily.GPT2,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_groups=heads,
        head_dim=hidden // heads,
        ffn=fields.number("n_inner", 4 * hidden),
        vocab=fields.number("vocab_size", most=LARGEST_VOCABULARY),
        context_tokens=fields.number("n_positions", most=LONGEST_CONTEXT_TOKENS),
        eps=fields.real("layer_norm_epsilon", 1e-5),
        norm=NormKind.LAYER,
        activation=fields.activation("activation_function"),
        tied=fields.flag("tie_word_embeddings", default=True),
        windows=(None,) * layers,
        ropes=(None,) * layers,
        score_scale=(hidden // heads) ** -0.5,
        gated=False,
        qkv_bias=True,
        out_bias=True,
        ffn_bias=True,
        stored=fields.stored(),
        eos_tokens=fields.tokens("eos_token_id"),
        bos_token=next(iter(fields.tokens("bos_token_id")), None),
    )


def _rotary_model(family: ModelFamily, fields: _Fields) -> ModelConfig:
    gemma = family in (ModelFamily.GEMMA2, ModelFamily.GEMMA3)
    moe = family is ModelFamily.QWEN3_MOE
    hidden = fields.number("hidden_size")
    heads = fields.number("num_attention_heads")
    head_dim = fields.number("head_dim", 256 if gemma else hidden // heads)
    types = _layer_types(family, fields, fields.number("num_hidden_layers", most=MOST_LAYERS))
    window = fields.number("sliding_window", most=LONGEST_CONTEXT_TOKENS) if SLIDING in types else None
    bias = fields.flag("attention_bias")
    if gemma and fields.flag("use_bidirectional_attention"):
        raise ModelFileError("use_bidirectional_attention is not supported")
    return ModelConfig(
        family=family,
        hidden=hidden,
        layers=len(types),
        heads=heads,
        kv_groups=fields.number("num_key_value_heads", heads),
        head_dim=head_dim,
        ffn=fields.number("moe_intermediate_size" if moe else "intermediate_size"),
        vocab=fields.number("vocab_size", most=LARGEST_VOCABULARY),
        context_tokens=fields.number("max_position_embeddings", most=LONGEST_CONTEXT_TOKENS),
        eps=fields.real("rms_norm_eps", 1e-6),
        norm=NormKind.RMS_PLUS_ONE if gemma else NormKind.RMS,
        activation=fields.activation("hidden_activation", "hidden_act"),
        tied=fields.flag("tie_word_embeddings", default=gemma),
        windows=tuple(window if kind == SLIDING else None for kind in types),
        ropes=tuple(_rope(family, fields, kind) for kind in types),
        score_scale=fields.real("query_pre_attn_scalar", 256.0) ** -0.5 if gemma else head_dim**-0.5,
        qkv_bias=family is ModelFamily.QWEN2 or bias,
        out_bias=bias,
        ffn_bias=family is ModelFamily.LLAMA and fields.flag("mlp_bias"),
        qk_norm=family in (ModelFamily.QWEN3, ModelFamily.QWEN3_MOE, ModelFamily.GEMMA3),
        post_norms=gemma,
        embedding_scale=math.sqrt(hidden) if gemma else 1.0,
        attention_softcap=fields.optional_real("attn_logit_softcapping") if gemma else None,
        logit_softcap=fields.optional_real("final_logit_softcapping") if gemma else None,
        stored=fields.stored(),
        eos_tokens=fields.tokens("eos_token_id"),
        bos_token=next(iter(fields.tokens("bos_token_id")), None),
        **(_experts(fields) if moe else {}),
    )


def _experts(fields: _Fields) -> dict[str, Any]:
    if fields.get("mlp_only_layers", []) != [] or fields.number("decoder_sparse_step", 1) != 1:
        raise ModelFileError("layers without experts among layers with experts are not supported")
    name = "num_local_experts" if fields.get("num_local_experts") is not None else "num_experts"
    experts = fields.number(name, most=MOST_EXPERTS)
    return {
        "experts": experts,
        "experts_per_token": fields.number("num_experts_per_tok", most=experts),
        "normalize_experts": fields.flag("norm_topk_prob"),
    }


def _layer_types(family: ModelFamily, fields: _Fields, layers: int) -> list[str]:
    """Return for each layer whether it sees a window or the whole context."""
    given = fields.get("layer_types")
    if given is not None:
        if not isinstance(given, list) or len(given) != layers or any(one not in (SLIDING, FULL) for one in given):
            raise ModelFileError(f"layer_types is {given!r}; it has to be {layers} times {SLIDING} or {FULL}")
        return given
    if family is ModelFamily.GEMMA2:
        return [FULL if index % 2 else SLIDING for index in range(layers)]
    if family is ModelFamily.GEMMA3:
        name = "sliding_window_pattern" if fields.get("sliding_window_pattern") else "_sliding_window_pattern"
        pattern = fields.number(name, GEMMA3_PATTERN)
        return [SLIDING if (index + 1) % pattern else FULL for index in range(layers)]
    if family is ModelFamily.MISTRAL:
        return [SLIDING if fields.get("sliding_window") is not None else FULL] * layers
    if family is ModelFamily.LLAMA or not fields.flag("use_sliding_window"):
        return [FULL] * layers
    first = 0 if family is ModelFamily.QWEN3_MOE else fields.number("max_window_layers", 28)
    return [SLIDING if index >= first else FULL for index in range(layers)]


def _rope(family: ModelFamily, fields: _Fields, layer_type: str) -> RopeSettings:
    """Return a layer type's rotary positions, from `rope_scaling` or `rope_parameters`."""
    given = fields.get("rope_parameters")
    if given is None:
        given = dict(_object("rope_scaling", fields.get("rope_scaling", {})))
        theta = fields.real("rope_theta", GEMMA3_THETA if family is ModelFamily.GEMMA3 else DEFAULT_THETA)
        if family is ModelFamily.GEMMA3 and layer_type == SLIDING:
            given, theta = {}, fields.real("rope_local_base_freq", DEFAULT_THETA)
        given.setdefault("rope_theta", theta)
    given = _object("rope_parameters", given)
    if layer_type in given:
        given = _object(layer_type, given[layer_type])
    if given.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelFileError("partial_rotary_factor is not supported")
    rope = _Fields(given)
    theta = rope.real("rope_theta", fields.real("rope_theta", DEFAULT_THETA))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in ("default", "dynamic"):  # dynamic angles are the default ones within the context
        return RopeSettings(theta=theta)
    if kind == "linear":
        return RopeSettings(kind=RopeKind.LINEAR, theta=theta, factor=rope.real("factor"))
    if kind != "llama3":
        raise ModelFileError(f"rope type {kind!r} is not supported; supported are default, linear, dynamic, llama3")
    low, high = rope.real("low_freq_factor"), rope.real("high_freq_factor")
    if high <= low:
        raise ModelFileError(f"high_freq_factor {high} has to be above low_freq_factor {low}")
    return RopeSettings(
        kind=RopeKind.LLAMA3,
        theta=theta,
        factor=rope.real("factor"),
        low_factor=low,
        high_factor=high,
        original_tokens=rope.number("original_max_position_embeddings", most=LONGEST_CONTEXT_TOKENS),
    )


def _object(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ModelFileError(f"{name} of {CONFIG_NAME} is {value!r}; it has to be an object")
    return value


def _check(config: ModelConfig) -> None:
    """Check that numbers fit each other."""
    if config.heads % config.kv_groups:
        raise ModelFileError(
            f"{config.heads} attention heads cannot be divided into {config.kv_groups} key-value heads: "
            "num_attention_heads has to be a multiple of num_key_value_heads"
        )
    if config.head_dim % 2 and not config.learned_positions:
        raise ModelFileError(f"head_dim {config.head_dim} has to be an even number")
    if config.heads * config.head_dim > LARGEST_DIMENSION:
        raise ModelFileError(f"{config.heads} heads of {config.head_dim} are more than {LARGEST_DIMENSION}")
