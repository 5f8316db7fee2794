"""The run of the character GPT: a model, an optimizer, a data source and one loop.

Read `run` from top to bottom: this is what a script of one's own looks like.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from hpctrain.data import VOCABULARY, Corpus, Windows, decode, encode, standard_library, windows
from hpctrain.data.dataset import TOKENIZER, Dataset
from hpctrain.data.sources import Tokens
from hpctrain.data.tokenizer import tokenizer_from
from hpctrain.errors import TrainError
from hpctrain.examples.gpt import Gpt, generate
from hpctrain.optim import AdamW
from hpctrain.run import Run, save_model, start

VALIDATION_SAMPLES = 128
PROMPT = "def "


def run(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """This will train on this rank and return the exit status; every rank calls it."""
    with start(options, "chargpt", environ) as here:
        text = tokens_of(here.dataset(options.data)) if options.data else characters_of(shared_corpus(here))
        model = Gpt(text.vocabulary, options.context, options.layers, options.width, options.heads).to(here.device)
        for block in list(model.blocks)[: options.freeze]:
            block.requires_grad_(False)
        optimizer = AdamW(model.named_parameters())
        data = Windows(text.train, options.seed, options.context)
        enough = text.validation is not None and text.validation.size > options.context
        validation = Validation(model, text.validation, here.device) if enough else None
        for batch in here.steps(model, optimizer, validation, data):
            inputs_BT, targets_BT = batch.samples
            batch.backward(mean_loss(model, inputs_BT, targets_BT))
        if here.finished and here.is_first:
            save_model(options.out / "model.pt", model)
            if options.sample > 0:
                print(f"\n--- sample ---\n{sample(model, text, options.sample, options.seed)}\n--- end ---")
            print(f"weights sha256 {here.weights_sha256}")
            print(f"model saved to {options.out / 'model.pt'}", flush=True)
    return here.status


def mean_loss(model: torch.nn.Module, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """The mean loss of the next token."""
    logits_BTV = model(inputs_BT)
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Tokens for training and for validation, and what they mean."""

    train: Tokens
    validation: Tokens | None
    vocabulary: int
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]


def characters_of(corpus: Corpus) -> Text:
    """The characters of the standard library's source."""
    return Text(
        train=corpus.train,
        validation=corpus.validation,
        vocabulary=VOCABULARY,
        encode=lambda text: encode(text.encode()).tolist(),
        decode=decode,
    )


def tokens_of(dataset: Dataset) -> Text:
    """The tokens of a prepared data set."""
    content = dataset.tokenizer()
    if content is None:
        raise TrainError(f"cannot train on {dataset.directory}: it has {dataset.kind}, not tokens of a text")
    tokenizer = tokenizer_from(content, str(dataset.directory / TOKENIZER))
    return Text(
        train=dataset.split("train"),
        validation=dataset.split("validation") if "validation" in dataset.splits else None,
        vocabulary=tokenizer.vocabulary,
        encode=lambda text: tokenizer.encode(text).tolist(),
        decode=tokenizer.decode,
    )


def sample(model: Gpt, text: Text, count: int, seed: int) -> str:
    """Some text that the model writes."""
    return PROMPT + text.decode(generate(model, list(text.encode(PROMPT)), count, seed))


class Validation:
    """The sum of losses over one part of evenly spread validation windows, and their number."""

    def __init__(self, model: Gpt, tokens: Tokens, device: torch.device) -> None:
        self._model, self._tokens, self._device = model, tokens, device

    def __call__(self, part: int, parts: int) -> tuple[float, int]:
        last = self._tokens.size - self._model.context - 1
        starts = np.linspace(0, last, VALIDATION_SAMPLES).astype(np.int64)[part::parts]
        if starts.size == 0:
            return 0.0, 0
        inputs_BT, targets_BT = (
            torch.from_numpy(np.ascontiguousarray(half)).to(self._device)
            for half in windows(self._tokens, starts, self._model.context)
        )
        return float(mean_loss(self._model, inputs_BT, targets_BT)) * starts.size, starts.size


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
