"""The run of the character GPT: a model, an optimizer, a data source and one loop.

Read `run` from top to bottom: this is what a script of one's own looks like.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F

from hpctrain.data import VOCABULARY, Corpus, Sampler, decode, encode, standard_library, windows
from hpctrain.examples.gpt import Gpt, generate
from hpctrain.optim import AdamW
from hpctrain.run import Run, save_model, start

VALIDATION_SAMPLES = 128
PROMPT = "def "


def run(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """This will train on this rank and return the exit status; every rank calls it."""
    with start(options, "chargpt", environ) as here:
        model = Gpt(VOCABULARY, options.context, options.layers, options.width, options.heads).to(here.device)
        for block in list(model.blocks)[: options.freeze]:
            block.requires_grad_(False)
        text = Windows(shared_corpus(here), options.seed, options.context, here.device)
        optimizer = AdamW(model.named_parameters())
        for batch in here.steps(model, optimizer, lambda part, parts: text.validation(model, part, parts)):
            inputs_BT, targets_BT = text.training(batch.low, batch.high)
            batch.backward(mean_loss(model, inputs_BT, targets_BT))
        if here.finished and here.is_first:
            save_model(options.out / "model.pt", model)
            if options.sample > 0:
                print(f"\n--- sample ---\n{sample(model, options.sample, options.seed)}\n--- end ---")
            print(f"weights sha256 {here.weights_sha256}")
            print(f"model saved to {options.out / 'model.pt'}", flush=True)
    return here.status


def mean_loss(model: torch.nn.Module, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """The mean next-character loss."""
    logits_BTV = model(inputs_BT)
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def sample(model: Gpt, count: int, seed: int) -> str:
    """Some text that the model writes."""
    first = [int(token) for token in encode(PROMPT.encode())]
    return PROMPT + decode(generate(model, first, count, seed))


class Windows:
    """Pieces of the corpus: what a model sees, and the same one character on."""

    def __init__(self, corpus: Corpus, seed: int, length: int, device: torch.device) -> None:
        self._corpus, self._device = corpus, device
        self._sampler = Sampler(seed=seed, tokens=corpus.train.size, length=length)

    def training(self, low: int, high: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of the training samples with global indexes [low, high)."""
        return self._at(self._corpus.train, self._sampler.starts(low, high))

    def validation(self, model: torch.nn.Module, part: int, parts: int) -> tuple[float, int]:
        """The sum of losses over this part of evenly spread validation windows, and their number."""
        tokens, length = self._corpus.validation, self._sampler.length
        starts = np.linspace(0, tokens.size - length - 1, VALIDATION_SAMPLES).astype(np.int64)[part::parts]
        if starts.size == 0:
            return 0.0, 0
        return float(mean_loss(model, *self._at(tokens, starts))) * starts.size, starts.size

    def _at(self, tokens: np.ndarray, starts: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        inputs_BT, targets_BT = (
            torch.from_numpy(np.ascontiguousarray(part)).to(self._device)
            for part in windows(tokens, starts, self._sampler.length)
        )
        return inputs_BT, targets_BT


def shared_corpus(here: Run) -> Corpus:
    """This will read the corpus on rank 0 and hand it round, as other hosts may have another Python."""
    corpus = standard_library() if here.is_first else None
    train_size, validation_size, files, digest = here.share(
        lambda: (corpus.train.size, corpus.validation.size, corpus.files, corpus.digest) if corpus else None
    )
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
