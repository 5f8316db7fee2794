"""Grammars: each mask allows only tokens that keep to the JSON schema, and hostile schemas are refused."""

from __future__ import annotations

import contextlib
import json
import random

import pytest

pytest.importorskip("llguidance")

from small_tokenizers import byte_level

from hpcserve.api.tools import call_schema, either
from hpcserve.errors import InvalidRequest
from hpcserve.grammar import Grammar

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["a", "value"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
VOCABULARY = 384  # more than the tokenizer has, as embeddings are padded


def test_a_random_walk_through_the_masks_satisfies_the_schema() -> None:
    tokenizer = byte_level()
    grammar, chance = Grammar(tokenizer, VOCABULARY), random.Random(1)
    for _ in range(10):
        state, tokens = grammar.start(SCHEMA), []
        while (token := chance.choice(state.mask().nonzero()[0].tolist())) not in tokenizer.end_tokens:
            assert state.accept(token)
            tokens.append(token)
        answer = json.loads(tokenizer.decode(tokens))
        assert answer["name"] in ("a", "value")
        assert 0 <= answer["count"] <= 99


def test_a_mask_has_the_width_of_the_embedding_and_no_padding_token() -> None:
    tokenizer = byte_level()
    mask = Grammar(tokenizer, VOCABULARY).start({"type": "string"}).mask()
    assert mask.shape == (VOCABULARY,)
    assert not mask[tokenizer.size :].any()


def test_a_token_that_does_not_fit_is_not_accepted() -> None:
    tokenizer = byte_level()
    state = Grammar(tokenizer, VOCABULARY).start(SCHEMA)
    assert not state.accept(tokenizer.encode("x")[0])


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "unknown"}, "cannot use the JSON schema"),
        ({"enum": ["x" * 70_000]}, "more than"),
        ({"$ref": "http://localhost/schema.json"}, "cannot use the JSON schema"),
        ({"type": "string", "pattern": "(a"}, "cannot use the JSON schema"),
    ],
    ids=["type", "size", "remote", "pattern"],
)
def test_a_schema_that_cannot_be_followed_is_refused(schema: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        Grammar(byte_level(), VOCABULARY).start(schema)


ITSELF = {
    "type": "object",
    "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "kind": {"$ref": "#/definitions/kind"}},
    "required": ["next", "kind"],
    "additionalProperties": False,
    "definitions": {"kind": {"enum": ["a"]}},
}


def tool(name: str, parameters: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_parameters_that_refer_to_themselves_keep_their_meaning_in_a_call() -> None:
    tokenizer = byte_level()
    schema = either({"type": "integer"}, call_schema([tool("w", ITSELF), tool("v", {"type": "object"})], several=False))
    text = '{"name":"w","arguments":{"next":{"next":null,"kind":"a"},"kind":"a"}}'
    for said, fits in (
        (text, True),
        ("7", True),
        (text.replace('"a"', '"b"'), False),
        (text.replace("null", "7"), False),
    ):
        tokens = tokenizer.encode(said, add_special=False)
        assert (Grammar(tokenizer, VOCABULARY).start(schema).accepts(tokens) == len(tokens)) == fits


@pytest.mark.parametrize("wrong", [["x"], 5, {"A": 5}], ids=["list", "number", "definition"])
def test_definitions_that_are_no_schemas_are_no_fault_of_the_server(wrong: object) -> None:
    with contextlib.suppress(InvalidRequest):
        schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": wrong}
        Grammar(byte_level(), VOCABULARY).start(call_schema([tool("w", schema)], several=True))


def test_a_schema_nested_too_deep_is_refused() -> None:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(40):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InvalidRequest, match="nested"):
        Grammar(byte_level(), VOCABULARY).start(schema)
