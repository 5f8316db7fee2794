"""Tiny random models of each family, as Hugging Face keeps them: config.json, model.safetensors and a trained tokenizer.

`tiny_model(directory, family)` writes one, in milliseconds and without transformers.  The vocabulary has 320 tokens: bytes,
merges, and the special tokens `<s>`, `</s>`, `<|user|>` and `<|assistant|>` that the chat template uses.
"""

from __future__ import annotations

import functools
import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from hpcserve.random_model import BOS, EOS, trained_tokenizer, write_random_model

VOCAB = 320
TEXT = f"the quick brown fox jumps over the lazy dog and serves a model from several nodes {string.printable}"
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
    write_random_model(directory, config, tokenizer(), seed=seed, dtype=torch.float32)
    return directory


@functools.cache
def tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer of the tiny vocabulary."""
    return trained_tokenizer([TEXT], VOCAB)
