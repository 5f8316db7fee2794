"""A GPT that learns to write Python from the standard library's source, or `--data`.

    python -m hpctrain.examples.chargpt --out run                      one process
    mpirun -n 2 python -m hpctrain.examples.chargpt --out run          two ranks, our ring
    torchrun --nproc-per-node 2 -m hpctrain.examples.chargpt --out run two ranks, Gloo or NCCL

    python -m hpctrain.data text --out texts --vocabulary 4096 FILE...  tokens of your own text, and then
    mpirun -n 2 python -m hpctrain.examples.chargpt --out run --data texts --stage /var/tmp

Run it again with the same --out to continue from the last checkpoint.  Exit status: 0 the training is finished, 75 stopped by
SIGTERM or SIGUSR1 with a checkpoint (queue the job again), 1 an error, 2 a wrong option.
A model, an optimizer, a data source and one loop: read `run` from top to bottom, your own script looks like this.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.env import require_or_exit

require_or_exit("chargpt", "torch", "numpy", "blake3", "numcodecs")

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from hpctrain.data import VOCABULARY, Corpus, Windows, decode, encode, standard_library, windows
from hpctrain.data.dataset import TOKENIZER, Dataset
from hpctrain.data.prepare import tokenizer_from
from hpctrain.data.sources import Tokens
from hpctrain.errors import TrainError
from hpctrain.optim.adamw import AdamW
from hpctrain.options import add_options, positive
from hpctrain.run import Run, start


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the options say, and return the exit status."""
    options = parse(arguments)
    return run(options, os.environ)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the options; a wrong one ends the program with status 2."""
    parser = argparse.ArgumentParser(
        prog="chargpt", description="Train a character-level GPT on the Python standard library's source."
    )
    add_options(parser, lr=4e-3, warmup=20, schedule="cosine", clip=1.0)
    _add_model(parser)
    options = parser.parse_args(arguments)
    if options.width % options.heads:
        parser.error(f"--width {options.width} cannot be divided among --heads {options.heads}")
    return options


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--data", type=Path, metavar="DIR", help="tokens made by `python -m hpctrain.data text` (default: characters)"
    )
    group.add_argument("--layers", type=positive, default=4, help="(%(default)s)")
    group.add_argument("--width", type=positive, default=128, help="(%(default)s)")
    group.add_argument("--heads", type=positive, default=4, help="(%(default)s)")
    group.add_argument(
        "--context", type=positive, default=64, help="length of the context in characters or tokens (%(default)s)"
    )
    group.add_argument(
        "--freeze", type=int, default=0, metavar="N", help="do not train the first N blocks (%(default)s)"
    )
    group.add_argument(
        "--sample", type=int, default=400, metavar="N", help="characters or tokens to write at the end (%(default)s)"
    )


# ----- a small GPT: token and position embeddings, blocks of attention and MLP, tied output
# Shapes: B samples, T positions, C width, H heads, V vocabulary.
# Sources: Radford et al., "Language models are unsupervised multitask learners", 2019; Karpathy's nanochat for the style
# (RMS norm without weights, no biases, squared ReLU).


class TransformerBlock(nn.Module):
    """Attention to earlier positions, then an MLP, both added to the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attended = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        """Return the output of one block; the shape stays (B, T, C)."""
        x_BTC = x_BTC + self._attend(norm(x_BTC))
        return x_BTC + self.down(F.relu(self.up(norm(x_BTC))).square())

    def _attend(self, x_BTC: torch.Tensor) -> torch.Tensor:
        B, T, C = x_BTC.shape
        q_BHTD, k_BHTD, v_BHTD = (
            part.view(B, T, self.heads, -1).transpose(1, 2) for part in self.qkv(x_BTC).split(C, dim=2)
        )
        y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
        return self.attended(y_BHTD.transpose(1, 2).reshape(B, T, C))


class Gpt(nn.Module):
    """Predicts each next token."""

    def __init__(self, vocabulary: int, context: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.context = context
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(layers))
        self._init_weights(layers)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Return logits (B, T, V) for the token after each position."""
        x_BTC = self.token(tokens_BT) + self.position.weight[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return F.linear(norm(x_BTC), self.token.weight)

    def _init_weights(self, layers: int) -> None:
        """Scale weights so that the stream keeps its size and tokens are equally likely."""
        for name, parameter in self.named_parameters():
            deep = name.endswith(("attended.weight", "down.weight"))
            nn.init.normal_(parameter, std=0.04 / (math.sqrt(2 * layers) if deep else 1))


def norm(x_BTC: torch.Tensor) -> torch.Tensor:
    """Scale each position's vector to unit mean square."""
    return F.rms_norm(x_BTC, (x_BTC.shape[-1],))


@torch.no_grad()
def generate(model: Gpt, start: list[int], count: int, seed: int, temperature: float = 0.7) -> list[int]:
    """Continue `start` by `count` tokens, drawn by a separate generator."""
    generator = torch.Generator().manual_seed(seed)
    device = model.token.weight.device
    tokens = list(start)
    for _ in range(count):
        window_1T = torch.tensor([tokens[-model.context :]], device=device)
        odds_V = torch.softmax(model(window_1T)[0, -1].float().cpu() / temperature, dim=-1)
        tokens.append(int(torch.multinomial(odds_V, 1, generator=generator)))
    return tokens[len(start) :]


VALIDATION_SAMPLES = 128
PROMPT = "def "


def run(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Train on this rank, and return the exit status; every rank calls it."""
    with start(options, "chargpt", environ) as here:
        text = tokens_of(here.dataset(options.data)) if options.data else characters_of(shared_corpus(here))
        model = Gpt(text.vocabulary, options.context, options.layers, options.width, options.heads).to(here.device)
        for block in list(model.blocks)[: options.freeze]:
            block.requires_grad_(False)
        optimizer = AdamW(model.named_parameters())
        data = Windows(text.train, options.seed, options.context)
        held_out = text.validation
        validation = None
        if held_out is not None and held_out.size > options.context:
            validation = Validation(model, held_out, here.device, options.context)
        for batch in here.steps(model, optimizer, validation, data):
            inputs_BT, targets_BT = batch.samples
            batch.backward(mean_loss(model, inputs_BT, targets_BT))
        if here.finished and here.is_first:
            if options.sample > 0:
                print(f"\n--- sample ---\n{sample(model, text, options.sample, options.seed)}\n--- end ---")
            print(f"weights sha256 {here.weights_sha256}", flush=True)
    return here.status


def mean_loss(model: torch.nn.Module, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of the next token."""
    logits_BTV = model(inputs_BT)
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSource:
    """Tokens for training and validation, and their decoding."""

    train: Tokens
    validation: Tokens | None
    vocabulary: int
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]


def characters_of(corpus: Corpus) -> TextSource:
    """Return the characters of the standard library's source."""
    return TextSource(
        train=corpus.train,
        validation=corpus.validation,
        vocabulary=VOCABULARY,
        encode=lambda text: encode(text.encode()).tolist(),
        decode=decode,
    )


def tokens_of(dataset: Dataset) -> TextSource:
    """Return the tokens of a prepared data set."""
    content = dataset.tokenizer()
    if content is None:
        raise TrainError(f"cannot train on {dataset.directory}: it has {dataset.kind}, not tokens of a text")
    tokenizer = tokenizer_from(content, str(dataset.directory / TOKENIZER))
    return TextSource(
        train=dataset.split("train"),
        validation=dataset.split("validation") if "validation" in dataset.splits else None,
        vocabulary=tokenizer.vocabulary,
        encode=lambda text: tokenizer.encode(text).tolist(),
        decode=tokenizer.decode,
    )


def sample(model: Gpt, text: TextSource, count: int, seed: int) -> str:
    """Return a text that the model writes."""
    return PROMPT + text.decode(generate(model, list(text.encode(PROMPT)), count, seed))


class Validation:
    """Returns the sum of losses over a part of the validation windows, and their number."""

    def __init__(self, model: nn.Module, tokens: Tokens, device: torch.device, context: int) -> None:
        self._model, self._tokens, self._device, self._context = model, tokens, device, context

    def __call__(self, part: int, parts: int) -> tuple[float, int]:
        last = self._tokens.size - self._context - 1
        starts = np.linspace(0, last, VALIDATION_SAMPLES).astype(np.int64)[part::parts]
        if starts.size == 0:
            return 0.0, 0
        inputs_BT, targets_BT = (
            torch.from_numpy(np.ascontiguousarray(half)).to(self._device)
            for half in windows(self._tokens, starts, self._context)
        )
        return float(mean_loss(self._model, inputs_BT, targets_BT)) * starts.size, starts.size


def shared_corpus(here: Run) -> Corpus:
    """Read the corpus on rank 0 for all ranks; other hosts may have another Python."""
    corpus = standard_library() if here.is_first else None
    facts: Any = here.share(
        lambda: (corpus.train.size, corpus.validation.size, corpus.files, corpus.digest) if corpus else None
    )
    train_size, validation_size, files, digest = facts
    if corpus is None:
        corpus = Corpus(
            train=np.empty(train_size, np.uint8),
            validation=np.empty(validation_size, np.uint8),
            files=files,
            digest=digest,
        )
    for part in (corpus.train, corpus.validation):
        here.comm.broadcast(torch.from_numpy(part))
    return corpus


if __name__ == "__main__":
    sys.exit(main())
