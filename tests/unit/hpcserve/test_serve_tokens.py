"""Text of tokens: characters and stop strings across tokens, and tokenizers that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")

from small_tokenizers import CONTROL, byte_level, byte_level_backend, sentence_piece

from hpcserve.errors import InvalidRequest, ModelFileError
from hpcserve.tokens import StopScanner, TextStream, TextTokenizer

TEXTS = ["hello world", "grüße, \u20ac 5", "\U0001f389\U0001f3f3\ufe0f\u200d\U0001f308 \u6f22\u5b57", "", "a\nb\t c  d"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("made", [byte_level, sentence_piece], ids=["byte-level", "sentencepiece"])
def test_tokens_give_the_text_back_one_by_one_and_together(made: object, text: str) -> None:
    tokenizer = made()  # type: ignore[operator]
    tokens = tokenizer.encode(text)
    stream = TextStream(tokenizer)
    pieces = [*map(stream.push, tokens), stream.finish()]
    assert "".join(pieces) == text == tokenizer.decode(tokens)
    assert not any("\ufffd" in piece for piece in pieces)


def test_half_a_character_is_sent_only_when_the_text_ends() -> None:
    tokenizer = byte_level()
    first, *rest = tokenizer.encode("\u20ac")
    assert len(rest) == 2
    stream = TextStream(tokenizer)
    assert [stream.push(first), stream.push(rest[0])] == ["", ""]
    assert stream.finish() == "\ufffd"


def test_control_tokens_have_no_text_unless_they_are_shown() -> None:
    tokenizer = byte_level()
    tokens = tokenizer.encode("[TOOL_CALLS]hello")
    assert tokenizer.decode(tokens) == "hello"
    assert tokenizer.decode(tokens, shown={CONTROL.index("[TOOL_CALLS]")}) == "[TOOL_CALLS]hello"


def test_a_text_that_looks_like_a_control_token_is_read_as_text() -> None:
    tokenizer = byte_level()
    for text in ("a<|im_end|>b</s>", "</s>", "[TOOL_CALLS]", "<|im_<|im_end|>end|>"):
        tokens = tokenizer.encode_cut(tokenizer.harmless(text))
        assert not tokenizer.special & set(tokens)
        assert tokenizer.decode(tokens) == text
    assert tokenizer.encode_cut("</s>") == [1]


def test_half_of_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        byte_level().encode("a\ud800b")


@pytest.mark.parametrize("pieces", [["one STOP two"], ["one ST", "OP two"], ["one ", "S", "T", "O", "P", " two"]])
def test_a_stop_string_is_found_however_tokens_cut_it(pieces: list[str]) -> None:
    scanner = StopScanner(["STOP", "never"])
    assert "".join(map(scanner.push, pieces)) + scanner.finish() == "one "
    assert scanner.found == "STOP"


def test_text_that_only_begins_a_stop_string_is_sent() -> None:
    scanner = StopScanner(["STOP"])
    assert [scanner.push("a ST"), scanner.push("AR"), scanner.push(" ST"), scanner.finish()] == [
        "a ",
        "STAR",
        " ",
        "ST",
    ]
    assert scanner.found is None


def test_the_first_of_two_stop_strings_ends_the_text() -> None:
    scanner = StopScanner(["b", "ab"])
    assert scanner.push("xab") == "x"
    assert scanner.found == "ab"


def test_a_tokenizer_with_more_tokens_than_the_embedding_is_refused(tmp_path: Path) -> None:
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    size = TextTokenizer.load(tmp_path, 1000).size
    with pytest.raises(ModelFileError, match=f"has token {size - 1}, but .* {size - 1} rows"):
        TextTokenizer.load(tmp_path, size - 1)


def test_tokens_that_end_a_text_are_read_from_all_files(tmp_path: Path) -> None:
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    assert TextTokenizer.load(tmp_path, 1000).end_tokens == {1, 3, 5}


@pytest.mark.parametrize("content", ["", "{}", "[1", '{"model": {"type": "Unknown"}}'])
def test_a_damaged_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelFileError, match=r"cannot read '.*tokenizer\.json'"):
        TextTokenizer.load(tmp_path, 1000)
