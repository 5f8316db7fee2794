"""Which tokens may come next so that a text satisfies a JSON schema, by llguidance.

`Grammar` belongs to a tokenizer; `start` makes the state of one sequence, whose `mask` the sampler applies before each choice.
Does not know logits. Rules: a schema comes from a client, so its size, depth, and the work of each mask are bounded; nothing is
ever fetched for a `$ref`.

Sources: https://github.com/guidance-ai/llguidance
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from hpcserve.errors import InvalidRequest
from hpcserve.tokens import TextTokenizer

MOST_SCHEMA_BYTES = 64 << 10
MOST_SCHEMA_DEPTH = 32
LIMITS = LLParserLimits(max_grammar_size=100_000, max_lexer_states=50_000, step_max_items=50_000, verbose_errors=False)


class Grammar:
    """Makes states of sequences for one tokenizer.

    Its vocabulary is padded to `vocabulary` tokens.
    """

    def __init__(self, tokenizer: TextTokenizer, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._trie: LLTokenizer | None = None
        self._lock = threading.Lock()

    def start(self, schema: Mapping[str, Any]) -> GrammarState:
        """Return the state of a sequence before its first token.

        Raises:
            InvalidRequest: the schema is not supported, or too large.
        """
        text = schema_text(schema)
        try:
            grammar = LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_flexible": False})
            matcher = LLMatcher(self._made_trie(), grammar, log_level=0, limits=LIMITS)
        except (ValueError, RuntimeError) as error:
            raise InvalidRequest(f"cannot use the JSON schema: {str(error)[:300]}") from None
        if matcher.is_error():
            raise InvalidRequest(f"cannot use the JSON schema: {matcher.get_error()[:300]}")
        return GrammarState(matcher)

    def _made_trie(self) -> LLTokenizer:
        """Return llguidance's tokenizer, which is made at the first use: it takes a second."""
        with self._lock:
            if self._trie is None:
                wrapper = TokenizerWrapper(TokenTable(self._tokenizer, self._vocabulary))
                ends = sorted(self._tokenizer.end_tokens) or [self._vocabulary - 1]
                self._trie = LLTokenizer(wrapper, n_vocab=self._vocabulary, eos_token=ends)
            return self._trie


class GrammarState:
    """What may follow in one sequence."""

    __slots__ = ("_matcher",)

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def mask(self) -> npt.NDArray[np.bool_]:
        """Return which tokens of the vocabulary may come next.

        When the text is complete, these are the end tokens alone.

        Raises:
            InvalidRequest: the schema needs too much work.
        """
        allowed = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8) != 0
        if self._matcher.is_error():
            raise InvalidRequest(f"cannot follow the JSON schema: {self._matcher.get_error()[:300]}")
        return allowed

    def accept(self, token: int) -> bool:
        """Move past a token that was chosen; False if it does not fit."""
        return bool(self._matcher.consume_token(token))

    def accepts(self, tokens: list[int]) -> int:
        """Return how many of these tokens could follow, one after the other."""
        return int(self._matcher.validate_tokens(tokens))

    @property
    def is_complete(self) -> bool:
        """Whether the text satisfies the schema and nothing can be added."""
        return bool(self._matcher.is_stopped())


class TokenTable:
    """The tokens of a vocabulary as llguidance wants them."""

    def __init__(self, tokenizer: TextTokenizer, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocabulary)]
        self.eos_token_id = min(tokenizer.end_tokens, default=vocabulary - 1)
        self.bos_token_id = None
        self.special_token_ids = sorted(tokenizer.special | tokenizer.end_tokens)

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the tokens of a text."""
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        return self._tokenizer.encode(text, add_special=False)


def schema_text(schema: Mapping[str, Any]) -> str:
    """Return a schema as JSON, within bounds.

    Raises:
        InvalidRequest: it is too large or too deep.
    """
    if not within_depth(schema, MOST_SCHEMA_DEPTH):
        raise InvalidRequest(f"cannot use the JSON schema: it is nested more than {MOST_SCHEMA_DEPTH} deep")
    text = json.dumps(schema)
    if len(text) > MOST_SCHEMA_BYTES:
        raise InvalidRequest(f"cannot use the JSON schema: it has more than {MOST_SCHEMA_BYTES} bytes")
    return text


def within_depth(value: Any, depth: int) -> bool:
    """Return whether objects and arrays are nested at most `depth` deep."""
    level = [value]
    for _ in range(depth + 1):
        level = [inner for inner in level if isinstance(inner, Mapping | list)]
        if not level:
            return True
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, Mapping) else outer)]
    return False
