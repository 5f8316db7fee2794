"""A small Llama that learns to write your text, and can be served afterwards.

    python -m hpctrain.data text --out texts --vocabulary 4096 FILE...     tokens of a text
    mpirun -n 2 python -m hpctrain.examples.llama --out run --data texts   two ranks train
    mkdir small && python -m hpctrain.checkpoint export run small/model.safetensors
    python -m hpcserve run small                                           serves it

The weights have Hugging Face's names, and config.json and the tokenizer are in OUT/model: an export to a file named
model.safetensors brings them along.  Run it again with the same --out to continue.  Exit statuses are those of chargpt.
Sources: Touvron et al., "Llama 2", 2023: RMS norm, rotary positions, gated FFN, grouped queries.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpctrain.env import require_or_exit

require_or_exit("llama", "torch", "numpy", "blake3", "numcodecs", "tokenizers")

import torch
import torch.nn.functional as F
from torch import nn

from hpctrain.checkpoint.writing.files import write_draft
from hpctrain.data import Windows
from hpctrain.data.prepare import END
from hpctrain.examples.chargpt import Validation, mean_loss, tokens_of
from hpctrain.optim.adamw import AdamW
from hpctrain.options import add_options, positive
from hpctrain.run import start

THETA = 10_000.0
EPS = 1e-6


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the options say, and return the exit status."""
    parser = argparse.ArgumentParser(prog="llama", description="Train a small Llama on tokens of a text.")
    add_options(parser, lr=2e-3, warmup=50, schedule="cosine", clip=1.0)
    group = parser.add_argument_group("model")
    group.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="tokens made by `python -m hpctrain.data text`"
    )
    group.add_argument("--layers", type=positive, default=6, help="(%(default)s)")
    group.add_argument("--width", type=positive, default=256, help="(%(default)s)")
    group.add_argument("--heads", type=positive, default=8, help="(%(default)s)")
    group.add_argument("--groups", type=positive, default=4, help="groups of heads that share keys (%(default)s)")
    group.add_argument("--context", type=positive, default=256, help="length of the context in tokens (%(default)s)")
    options = parser.parse_args(arguments)
    if options.width % (2 * options.heads) or options.heads % options.groups:
        parser.error("--width needs to be a multiple of twice --heads, and --heads one of --groups")
    return run(options)


# ----- the model; shapes: B samples, T positions, C width, H heads, G groups, D width of a head, V vocabulary


class LlamaAttention(nn.Module):
    """Attention to earlier positions, by rotated queries and keys."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.q_proj = nn.Linear(width, heads * self.size, bias=False)
        self.k_proj = nn.Linear(width, groups * self.size, bias=False)
        self.v_proj = nn.Linear(width, groups * self.size, bias=False)
        self.o_proj = nn.Linear(heads * self.size, width, bias=False)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        """Return the output; the shape stays (B, T, C)."""
        B, T, _ = x_BTC.shape
        q_BHTD, k_BGTD, v_BGTD = (
            made(x_BTC).view(B, T, -1, self.size).transpose(1, 2) for made in (self.q_proj, self.k_proj, self.v_proj)
        )
        y_BHTD = F.scaled_dot_product_attention(
            rotated(q_BHTD),
            rotated(k_BGTD).repeat_interleave(self.heads // self.groups, 1),
            v_BGTD.repeat_interleave(self.heads // self.groups, 1),
            is_causal=True,
        )
        out: torch.Tensor = self.o_proj(y_BHTD.transpose(1, 2).reshape(B, T, -1))
        return out


def rotated(x_BHTD: torch.Tensor) -> torch.Tensor:
    """Return queries or keys turned by their positions."""
    length, size = x_BHTD.shape[-2:]
    turns = THETA ** (-torch.arange(0, size, 2, device=x_BHTD.device) / size)
    angles_TD = (torch.arange(length, device=x_BHTD.device)[:, None] * turns).repeat(1, 2)
    left, right = x_BHTD.chunk(2, -1)
    return x_BHTD * angles_TD.cos() + torch.cat((-right, left), -1) * angles_TD.sin()


class LlamaFfn(nn.Module):
    """The gated FFN."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        """Return the output; the shape stays (B, T, C)."""
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x_BTC)) * self.up_proj(x_BTC))
        return out


class LlamaLayer(nn.Module):
    """Attention, then the FFN, both added to the residual stream."""

    def __init__(self, width: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(width, EPS)
        self.self_attn = LlamaAttention(width, heads, groups)
        self.post_attention_layernorm = nn.RMSNorm(width, EPS)
        self.mlp = LlamaFfn(width, inner)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        """Return the output of one layer; the shape stays (B, T, C)."""
        x_BTC = x_BTC + self.self_attn(self.input_layernorm(x_BTC))
        out: torch.Tensor = x_BTC + self.mlp(self.post_attention_layernorm(x_BTC))
        return out


class LlamaModel(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
        self.embed_tokens = nn.Embedding(config["vocab_size"], width)
        self.layers = nn.ModuleList(LlamaLayer(width, heads, groups, inner) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(width, EPS)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.04 / (math.sqrt(2 * len(self.layers)) if deep else 1))

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Return the hidden states (B, T, C)."""
        x_BTC = self.embed_tokens(tokens_BT)
        for layer in self.layers:
            x_BTC = layer(x_BTC)
        out: torch.Tensor = self.norm(x_BTC)
        return out


class Llama(nn.Module):
    """Predicts each next token; the output has the embedding's weights."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.model = LlamaModel(config)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Return logits (B, T, V) for the token after each position."""
        return F.linear(self.model(tokens_BT), self.model.embed_tokens.weight)


def config_of(options: argparse.Namespace, vocabulary: int) -> dict[str, Any]:
    """Return the model's config.json, as Hugging Face has it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": options.width,
        "intermediate_size": -(-8 * options.width // 3 // 32) * 32,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.groups,
        "max_position_embeddings": options.context,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": 0,
        "bos_token_id": None,
    }


def write_description(folder: Path, config: dict[str, Any], tokenizer: bytes) -> None:
    """Write what a model has besides weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {
        "config.json": json.dumps(config, indent=2).encode(),
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": json.dumps({"eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}).encode(),
    }.items():
        os.replace(write_draft(folder / name, content), folder / name)


def run(options: argparse.Namespace) -> int:
    """Train on this rank, and return the exit status; every rank calls it."""
    with start(options, "llama", os.environ) as here:
        dataset = here.dataset(options.data)
        text = tokens_of(dataset)
        config = config_of(options, text.vocabulary)
        if here.is_first:
            write_description(options.out / "model", config, dataset.tokenizer() or b"")
        model = Llama(config).to(here.device)
        held_out = text.validation
        validation = None
        if held_out is not None and held_out.size > options.context:
            validation = Validation(model, held_out, here.device, options.context)
        data = Windows(text.train, options.seed, options.context)
        for batch in here.steps(model, AdamW(model.named_parameters()), validation, data):
            inputs_BT, targets_BT = batch.samples
            batch.backward(mean_loss(model, inputs_BT, targets_BT))
        if here.finished and here.is_first:
            print(f"weights sha256 {here.weights_sha256}", flush=True)
    return here.status


if __name__ == "__main__":
    sys.exit(main())
