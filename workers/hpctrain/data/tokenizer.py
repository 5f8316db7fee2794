"""Text to tokens and back without loss: byte-level BPE by the package `tokenizers`.

Does not know text files or shards.
Rules: token 0 ends a document; a tokenizer is one JSON file, and a data set has its own copy.
Sources: Sennrich et al., "Neural machine translation of rare words with subword units", 2016; Radford et al., "Language models
are unsupervised multitask learners", 2019 (on bytes).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hpctrain.env import require
from hpctrain.errors import DamagedError, TrainError

END = "<|end|>"
LEAST_VOCABULARY = 257  # all bytes, and the end of a document


class Tokenizer:
    """Converts text to tokens and back."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.vocabulary: int = inner.get_vocab_size()
        self.dtype = np.dtype(np.uint16 if self.vocabulary <= 1 << 16 else np.uint32)

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text, without an end token."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each text."""
        encoded = self._inner.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(one.ids, dtype=self.dtype) for one in encoded]

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text of tokens; ends of documents become empty lines."""
        documents: list[list[int]] = [[]]
        for token in tokens:
            if token == 0:
                documents.append([])
            else:
                documents[-1].append(int(token))
        return "\n\n".join(self._inner.decode(document, skip_special_tokens=False) for document in documents)

    def to_bytes(self) -> bytes:
        """Return the content of the file for `tokenizer_from`."""
        return self._inner.to_str().encode()


def tokenizer_from(content: bytes, name: str) -> Tokenizer:
    """Return the tokenizer in a file's content; `name` appears in error messages.

    Raises:
        DamagedError: it is not a tokenizer, not byte-level, or has another end of documents.
    """
    require("tokenizers")
    import tokenizers  # noqa: PLC0415 (an extra of its own: after the check)

    try:
        inner = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # the package raises bare exceptions
        raise DamagedError(f"cannot use {name}: it is not a tokenizer ({error})") from error
    if inner.token_to_id(END) != 0:
        raise DamagedError(f"cannot use {name}: its token 0 is not {END}, which ends a document")
    return Tokenizer(inner)


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Learn a vocabulary from texts, which are read once.

    Raises:
        TrainError: the vocabulary is too small for all bytes.
    """
    if vocabulary < LEAST_VOCABULARY:
        raise TrainError(f"cannot make a vocabulary of {vocabulary}: bytes alone need {LEAST_VOCABULARY}")
    require("tokenizers")
    from tokenizers import Tokenizer as Inner  # noqa: PLC0415
    from tokenizers import decoders, models, pre_tokenizers, trainers  # noqa: PLC0415

    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return Tokenizer(inner)
