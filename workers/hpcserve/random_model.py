"""Writes a model with random weights, to try serving without a download.

`python -m hpcserve.random_model DIR --layers 12 --width 512`: a Llama, and a tokenizer trained on the topics of Python's help.
What it answers are words without sense, always the same for the same seed. Does not know how models are read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<s>", "</s>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HEAD_DIM = 64


def write_random_model(directory: Path, *, layers: int, width: int, vocabulary: int = 2048, seed: int = 0) -> int:
    """Write a model into a new directory; return the number of its weights."""
    directory.mkdir(parents=True)
    config = {
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
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer_settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
        "chat_template": TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_settings))
    (directory / "tokenizer.json").write_text(trained_tokenizer(vocabulary).to_str())
    numbers = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) == 1
        else (torch.randn(shape, generator=numbers) / shape[1] ** 0.5).to(torch.bfloat16)
        for name, shape in shapes(config)
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.numel() for tensor in tensors.values())


def shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of all tensors."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        yield name, (config["vocab_size"], width)
    yield "model.norm.weight", (width,)
    for layer in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{base}{name}.weight", (width,)
        for letter in "qkvo":
            yield f"{base}self_attn.{letter}_proj.weight", (width, width)
        for name in ("gate", "up"):
            yield f"{base}mlp.{name}_proj.weight", (inner, width)
        yield f"{base}mlp.down_proj.weight", (width, inner)


def trained_tokenizer(vocabulary: int) -> Tokenizer:
    """Return a byte-level tokenizer of words of Python's help."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(topics.values(), trainer)
    return made


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
    try:
        weights = write_random_model(options.directory, layers=options.layers, width=options.width, seed=options.seed)
    except OSError as error:
        parser.error(f"cannot write the model: {error}")
    print(f"{weights} weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
