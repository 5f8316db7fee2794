"""Writes a model with random weights, to try serving without a download.

`python -m hpcserve.random_model DIR --layers 12 --width 512`: a Llama, and a tokenizer trained on the topics of Python's help.
What it answers are words without sense, always the same for the same seed. Other programs write a model of any family that is
served with `write_random_model`. Does not know how models are read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

BOS, EOS = 0, 1
SPECIAL = ("<s>", "</s>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HEAD_DIM = 64
VOCABULARY = 2048


def write_random_model(
    directory: Path,
    config: Mapping[str, Any],
    tokenizer: Tokenizer,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> int:
    """Write a model into a new directory; return the number of its weights.

    `config` is the content of config.json, of a family that is served.
    """
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[BOS],
        "eos_token": SPECIAL[EOS],
        "chat_template": TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "tokenizer.json").write_text(tokenizer.to_str())
    tensors = random_tensors(config, seed, dtype)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.numel() for tensor in tensors.values())


def llama_config(*, layers: int, width: int, vocabulary: int = VOCABULARY) -> dict[str, Any]:
    """Return the configuration of a Llama whose heads each have keys and values of their own."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // HEAD_DIM,
        "num_key_value_heads": width // HEAD_DIM,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }


def trained_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Return a byte-level tokenizer of texts that has the tokens of the chat template."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return made


def random_tensors(config: Mapping[str, Any], seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return random weights of a model; large enough that no two tokens are nearly as likely."""
    generator = torch.Generator().manual_seed(seed)
    shapes = gpt2_shapes(config) if config["model_type"] == "gpt2" else rotary_shapes(config)
    base_of_norms = 0.0 if "gemma" in config["model_type"] else 1.0
    tensors = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        values *= 0.3 if len(shape) == 1 else 1.5 / max(shape) ** 0.5
        values += base_of_norms if "norm" in name else 0.0
        tensors[name] = values.to(dtype)
    return tensors


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the model that the options describe; return the exit status."""
    parser = argparse.ArgumentParser(prog="hpcserve.random_model", description="Write a model with random weights.")
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=512, help=f"a multiple of {HEAD_DIM} (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.layers < 1 or options.width < HEAD_DIM or options.width % HEAD_DIM:
        parser.error(f"--layers is from 1, --width a multiple of {HEAD_DIM}")
    config = llama_config(layers=options.layers, width=options.width)
    tokenizer = trained_tokenizer(topics.values(), VOCABULARY)
    try:
        weights = write_random_model(options.directory, config, tokenizer, seed=options.seed)
    except OSError as error:
        parser.error(f"cannot write the model: {error}")
    print(f"{weights} weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
