"""Text to token ids and back, by a model's tokenizer.json.

A token is bytes. Text goes out through an incremental UTF-8 decoder, so that half a character is never sent, and the text of a
stream equals the text of a whole answer. Does not know requests or chat. Rules: a token outside the vocabulary has no bytes;
control tokens (`special` in tokenizer.json) have no text unless they are asked for. Supports byte-level tokenizers (GPT-2,
Llama 3, Qwen), those in SentencePiece's way (Llama 2, Mistral, Gemma) and plain ones; refuses others.

Sources: https://huggingface.co/docs/tokenizers
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from hpcserve.errors import InvalidRequest, ModelFileError

MOST_FILE_BYTES = 128 << 20  # Gemma's tokenizer.json has 33 MB
SPACE = "\u2581"  # SentencePiece's mark of a space
CUT = "\ufdd0"  # never a character: where a text that looks like a control token is cut


class TextTokenizer:
    """The tokenizer of a model: encodes text, and knows the bytes of each token."""

    def __init__(self, backend: Tokenizer, *, end_tokens: Collection[int] = ()) -> None:
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.byte_level, self.marks_spaces = _decoder_kind(json.loads(backend.to_str()).get("decoder"))
        self.added = {number: token.content for number, token in backend.get_added_tokens_decoder().items()}
        self.special = frozenset(
            number for number, token in backend.get_added_tokens_decoder().items() if token.special
        )
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.size = max(vocabulary.values(), default=-1) + 1
        self.longest = max(map(len, vocabulary), default=1)  # characters of a token
        self.end_tokens = frozenset(end_tokens)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, directory: Path, vocabulary: int) -> TextTokenizer:
        """Return the tokenizer of a model directory, whose embedding has `vocabulary` rows.

        Raises:
            ModelFileError: it is missing, damaged or larger than the embedding.
        """
        path = directory / "tokenizer.json"
        try:
            if path.stat().st_size > MOST_FILE_BYTES:
                raise ModelFileError(f"cannot read '{path}': it has more than {MOST_FILE_BYTES} bytes")
            backend = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ModelFileError(f"cannot read '{path}': {error}") from None
        except ModelFileError:
            raise
        except Exception as error:  # tokenizers raises bare Exception
            raise ModelFileError(f"cannot read '{path}': {str(error)[:200]}") from None
        made = cls(backend, end_tokens=_end_tokens(directory, backend))
        if made.size > vocabulary:
            raise ModelFileError(
                f"cannot use '{path}': it has token {made.size - 1}, but the model's embedding has {vocabulary} rows"
            )
        return made

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Return the tokens of a text.

        `add_special` adds what the model expects around it, such as BOS.

        Raises:
            InvalidRequest: the text has half of a surrogate pair.
        """
        try:
            # A batch of one: it releases the GIL, which encode() does not.
            return list(self.backend.encode_batch([text], add_special_tokens=add_special)[0].ids)
        except (UnicodeEncodeError, TypeError):
            raise InvalidRequest("cannot read the text: it has half of a surrogate pair; send valid Unicode") from None

    def harmless(self, text: str) -> str:
        """Return a text that `encode_cut` reads without control tokens.

        Such as a user's part of a conversation.
        """
        for number in self.special:
            word = self.added[number]
            if len(word) > 1 and word in text:
                text = text.replace(word, f"{word[0]}{CUT}{word[1:]}")
        return text

    def encode_cut(self, text: str) -> list[int]:
        """Return the tokens of a text that has pieces from `harmless`."""
        return [token for piece in text.split(CUT) if piece for token in self.encode(piece, add_special=False)]

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token; b"" outside the vocabulary."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._read_bytes(token)
        return found

    def _read_bytes(self, token: int) -> bytes:
        if token in self.added:
            return self.added[token].encode()
        text = self.backend.id_to_token(token)
        if text is None:
            return b""
        if self.byte_level:
            return b"".join(BYTE_OF.get(letter, letter.encode()) for letter in text)
        if self.marks_spaces:
            if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
                try:
                    return bytes([int(text[3:5], 16)])
                except ValueError:
                    pass
            text = text.replace(SPACE, " ")
        return text.encode()

    def decode(self, tokens: Iterable[int], *, shown: Collection[int] = ()) -> str:
        """Return the text of tokens; control tokens have none, except those in `shown`."""
        stream = TextStream(self, shown=shown)
        return "".join([*map(stream.push, tokens), stream.finish()])

    def find(self, content: str) -> int | None:
        """Return the token that is exactly this text."""
        number: int | None = self.backend.token_to_id(content)
        return number


class TextStream:
    """Turns tokens into text one by one; holds back the bytes of an unfinished character."""

    __slots__ = ("_decoder", "_shown", "_tokenizer")

    def __init__(self, tokenizer: TextTokenizer, *, shown: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._shown = shown
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Return the text that a token completes."""
        if token in self._tokenizer.special and token not in self._shown:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """Return what is left: the replacement character for half a character."""
        return self._decoder.decode(b"", final=True)


class StopScanner:
    """Finds stop strings in text that comes in pieces; holds back what may become one."""

    __slots__ = ("_held", "_stops", "found")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Return the text that can be sent.

        Sets `found` at the first stop string, whose text is dropped.
        """
        if self.found is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        places = [(text.find(stop), -len(stop), stop) for stop in self._stops if stop in text]
        if places:
            at, _, self.found = min(places)
            self._held = ""
            return text[:at]
        at = len(text) - begun(text, self._stops)
        self._held = text[at:]
        return text[:at]

    def finish(self) -> str:
        """Return the text that was held back."""
        held, self._held = self._held, ""
        return held


def begun(text: str, words: Iterable[str]) -> int:
    """Return how many of the last characters of a text begin one of the words."""
    most = 0
    for word in words:
        for length in range(min(len(word) - 1, len(text)), most, -1):
            if word.startswith(text[-length:]):
                most = length
                break
    return most


def _byte_letters() -> dict[str, bytes]:
    """Return the letter that stands for each byte in byte-level tokenizers.

    Source: GPT-2.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = [*map(chr, printable), *(chr(256 + index) for index in range(len(others)))]
    return {letter: bytes([byte]) for letter, byte in zip(letters, [*printable, *others], strict=True)}


BYTE_OF = _byte_letters()


def _decoder_kind(decoder: dict[str, Any] | None) -> tuple[bool, bool]:
    """Return whether tokens are byte-level letters, and whether they mark spaces.

    Marks of spaces are SentencePiece's.
    """
    steps = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = {step.get("type") for step in steps}
    if unknown := kinds - {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"}:
        raise ModelFileError(f"cannot use tokenizer.json: its decoder '{min(map(str, unknown))}' is not supported")
    return "ByteLevel" in kinds, bool(kinds & {"ByteFallback", "Metaspace", "Replace"})


def _end_tokens(directory: Path, backend: Tokenizer) -> set[int]:
    """Return the tokens that end a text, from all files that name some."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        numbers = read_json(directory / name).get("eos_token_id")
        found |= {number for number in (numbers if isinstance(numbers, list) else [numbers]) if isinstance(number, int)}
    word = read_json(directory / "tokenizer_config.json").get("eos_token")
    number = backend.token_to_id(word_of(word))
    return found if number is None else found | {number}


def word_of(value: Any) -> str:
    """Return the text of a token as tokenizer_config.json gives it.

    That is a text, or an object with `content`.
    """
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def read_json(path: Path) -> dict[str, Any]:
    """Return an object from a file of the model; empty if the file is missing.

    Raises:
        ModelFileError: it is not a JSON object.
    """
    try:
        if path.stat().st_size > MOST_FILE_BYTES:
            raise ModelFileError(f"cannot read '{path}': it has more than {MOST_FILE_BYTES} bytes")
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"cannot read '{path}': {error}") from None
    if not isinstance(content, dict):
        raise ModelFileError(f"cannot read '{path}': it is not a JSON object")
    return content
