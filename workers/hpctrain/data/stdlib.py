"""The text that every machine has: the source of Python's own standard library, character by character.

Files come in a fixed order; printable ASCII is tokens.  Does not know samples or ranks.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpctrain.errors import TrainError

SKIPPED_DIRECTORIES = frozenset(
    [
        "__pycache__",
        "dist-packages",
        "encodings",
        "idlelib",
        "lib-dynload",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
    ]
)
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127)) + "\x7f"
UNKNOWN = len(CHARACTERS) - 1
VOCABULARY = len(CHARACTERS)
VALIDATION_SHARE = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Tokens for training and for validation, and a hash by which ranks compare what they have."""

    train: np.ndarray
    validation: np.ndarray
    files: int
    digest: str


def standard_library(root: Path | None = None, limit_bytes: int = 8 << 20) -> Corpus:
    """This will read the standard library's source; every twentieth file or so is kept for validation.

    The whole files that come first in a fixed shuffled order are taken, up to `limit_bytes`.

    Raises:
        TrainError: there is not enough text at `root`.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    files = total_bytes = 0
    for key, path in sorted((_name_hash(path, root), path) for path in _sources(root)):
        text = path.read_bytes()
        if total_bytes + len(text) > limit_bytes:
            break
        parts[int(key[:8], 16) % VALIDATION_SHARE == 0].append(text)
        files, total_bytes = files + 1, total_bytes + len(text)
    train, validation = (encode(b"\n".join(part)) for part in parts)
    if min(train.size, validation.size) < 1 << 14:
        raise TrainError(f"cannot train on the standard library: {root} holds only {total_bytes} bytes of source")
    digest = hashlib.blake2b(train.tobytes() + validation.tobytes(), digest_size=16).hexdigest()
    return Corpus(train=train, validation=validation, files=files, digest=digest)


def encode(text: bytes) -> np.ndarray:
    """This will turn text into tokens (uint8): a tab becomes a blank, what is not printable ASCII one token."""
    table = np.full(256, UNKNOWN, dtype=np.uint8)
    for token, character in enumerate(CHARACTERS):
        table[ord(character)] = token
    table[ord("\t")] = CHARACTERS.index(" ")
    return table[np.frombuffer(text, dtype=np.uint8)]


def decode(tokens: Sequence[int] | np.ndarray) -> str:
    """This will turn tokens into text."""
    return "".join(CHARACTERS[token] for token in tokens)


def _sources(root: Path) -> Iterator[Path]:
    for path in root.rglob("*.py"):
        if not SKIPPED_DIRECTORIES.intersection(path.relative_to(root).parts):
            yield path


def _name_hash(path: Path, root: Path) -> str:
    return hashlib.blake2b(path.relative_to(root).as_posix().encode(), digest_size=16).hexdigest()
