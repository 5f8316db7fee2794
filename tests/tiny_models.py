"""Tiny random models of each family, as Hugging Face keeps them: config.json, model.safetensors and a trained tokenizer.

`tiny_model(directory, family)` writes one, in milliseconds and without transformers.  The vocabulary has 320 tokens: bytes,
merges, and the special tokens `<s>`, `</s>`, `<|user|>` and `<|assistant|>` that the chat template uses.
"""

from __future__ import annotations

import functools
import json
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

VOCAB = 320
BOS, EOS = 0, 1
SPECIAL = ("<s>", "</s>", "<|user|>", "<|assistant|>")
TEXT = f"the quick brown fox jumps over the lazy dog and serves a model from several nodes {string.printable}"
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ROTARY = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 24, "tie_word_embeddings": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**ROTARY, "architectures": ["LlamaForCausalLM"]},
    "llama3": {**ROTARY, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_scaling": LLAMA3_ROPE},
    "mistral": {**ROTARY, "architectures": ["MistralForCausalLM"], "sliding_window": 24},
    "qwen2": {**ROTARY, "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3": {**ROTARY, "architectures": ["Qwen3ForCausalLM"], "head_dim": 24},
    "qwen3_moe": {
        **ROTARY,
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": VOCAB,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
        "n_inner": 96,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    },
    "gemma2": {
        **ROTARY,
        **GEMMA,
        "architectures": ["Gemma2ForCausalLM"],
        "sliding_window": 24,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        **ROTARY,
        **GEMMA,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
    },
}


def tiny_model(directory: Path, family: str = "llama", *, seed: int = 0, **changes: Any) -> Path:
    """Write a tiny random model of a family into a new directory; `changes` are values of config.json."""
    config = {"model_type": family, **FAMILIES[family], **changes}
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(random_tensors(config, seed), directory / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(directory)
    return directory


def write_tokenizer(directory: Path) -> None:
    """Write the tokenizer and its chat template."""
    (directory / "tokenizer.json").write_text(tokenizer().to_str())
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[BOS],
        "eos_token": SPECIAL[EOS],
        "chat_template": TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


@functools.cache
def tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer of the tiny vocabulary."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([TEXT], trainer)
    return made


def random_tensors(config: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """Return random weights of a model; large enough that no two tokens are nearly as likely."""
    generator = torch.Generator().manual_seed(seed)
    shapes = gpt2_shapes(config) if config["model_type"] == "gpt2" else rotary_shapes(config)
    return {
        name: torch.randn(shape, generator=generator) * (0.3 if len(shape) == 1 else 1.5 / max(shape) ** 0.5)
        + (1.0 if "norm" in name and "gemma" not in config["model_type"] else 0.0)
        for name, shape in shapes.items()
    }


def gpt2_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a GPT-2 model."""
    width, inner = config["n_embd"], config["n_inner"]
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (config["vocab_size"], width),
        "transformer.wpe.weight": (config["n_positions"], width),
    }
    for layer in range(config["n_layer"]):
        base = f"transformer.h.{layer}."
        for name, pair in {
            "attn.c_attn": (width, 3 * width),
            "attn.c_proj": (width, width),
            "mlp.c_fc": (width, inner),
            "mlp.c_proj": (inner, width),
        }.items():
            shapes |= {f"{base}{name}.weight": pair, f"{base}{name}.bias": pair[1:]}
        for name in ("ln_1", "ln_2"):
            shapes |= {f"{base}{name}.weight": (width,), f"{base}{name}.bias": (width,)}
    return shapes | {"transformer.ln_f.weight": (width,), "transformer.ln_f.bias": (width,)}


def rotary_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a model of another family."""
    width, kind = config["hidden_size"], config["model_type"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], width)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], width)
    for layer in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer}."
        shapes |= {base + name: shape for name, shape in attention_shapes(config).items()}
        norms = ["input", "post_attention"] + ["pre_feedforward", "post_feedforward"] * kind.startswith("gemma")
        shapes |= {f"{base}{name}_layernorm.weight": (width,) for name in norms}
        inner, parts = config["intermediate_size"], [""]
        if kind == "qwen3_moe":
            inner, parts = config["moe_intermediate_size"], [f"experts.{n}." for n in range(config["num_experts"])]
            shapes[f"{base}mlp.gate.weight"] = (config["num_experts"], width)
        for part in parts:
            shapes |= {f"{base}mlp.{part}{name}_proj.weight": (inner, width) for name in ("gate", "up")}
            shapes[f"{base}mlp.{part}down_proj.weight"] = (width, inner)
    return shapes | {"model.norm.weight": (width,)}


def attention_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a layer's attention."""
    width, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    widths = {"q": queries, "k": keys, "v": keys}
    shapes: dict[str, tuple[int, ...]] = {
        f"self_attn.{letter}_proj.weight": (rows, width) for letter, rows in widths.items()
    }
    if config["model_type"] == "qwen2":
        shapes |= {f"self_attn.{letter}_proj.bias": (rows,) for letter, rows in widths.items()}
    if config["model_type"] in ("qwen3", "qwen3_moe", "gemma3_text"):
        shapes |= {f"self_attn.{letter}_norm.weight": (head,) for letter in "qk"}
    return shapes | {"self_attn.o_proj.weight": (width, queries)}
