"""Feature expressions: ``--constraint="a&(b|c)"``, read once and asked of many nodes.

An expression is kept as a postfix tuple (``("a", "b", "c", "|", "&")``): flat, hashable, and read and evaluated without
recursion, so that a hostile one costs no more than its length. Knows nothing of nodes or jobs. Syntax: sbatch(1),
--constraint; counts (``[a*2&b*1]``) are refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from hpcsched.errors import RequestError

Expression = tuple[str, ...]

MAX_CHARS = 2048

_TOKEN = re.compile(r"\s*([A-Za-z0-9_.:=+-]+|[&|()])")
_BINDS = {"&": 2, "|": 1}


def parse_features(text: str) -> Expression:
    """Return the expression that `text` spells; empty for empty text. Raises RequestError where it is not one."""
    if len(text) > MAX_CHARS:
        raise RequestError(f"cannot use constraint of {len(text)} characters: the longest is {MAX_CHARS}")
    if "[" in text or "*" in text:
        raise RequestError(f"cannot use constraint {text!r}: counts of features ([a*2&b*1]) are not supported")
    return _postfix(_tokens(text), text)


def matches(expression: Expression, features: Collection[str]) -> bool:
    """Say whether a node with these `features` satisfies `expression`."""
    stack: list[bool] = []
    for token in expression:
        if token in _BINDS:
            right, left = stack.pop(), stack.pop()
            stack.append(left and right if token == "&" else left or right)
        else:
            stack.append(token in features)
    return stack[-1] if stack else True


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    at, end = 0, len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None:
            raise RequestError(
                f"cannot read constraint {text!r}: {text[at:].lstrip()[0]!r} is none of feature names, & | ( and )"
            )
        tokens.append(match.group(1))
        at = match.end()
    return tokens


def _postfix(tokens: list[str], text: str) -> Expression:
    """Order operators after their operands (Dijkstra's shunting yard); `&` binds closer than `|`."""
    out: list[str] = []
    waiting: list[str] = []
    operand_next = True
    for token in tokens:
        if operand_next != (token not in (*_BINDS, ")")):
            raise RequestError(f"cannot read constraint {text!r}: {token!r} is out of place")
        if token == "(":
            waiting.append(token)
        elif token == ")":
            _unwind(out, waiting, 0)
            if not waiting:
                raise RequestError(f"cannot read constraint {text!r}: a ) without its (")
            waiting.pop()
        elif token in _BINDS:
            _unwind(out, waiting, _BINDS[token])
            waiting.append(token)
            operand_next = True
        else:
            out.append(token)
            operand_next = False
    if operand_next and tokens:
        raise RequestError(f"cannot read constraint {text!r}: it ends where a feature should follow")
    if "(" in waiting:
        raise RequestError(f"cannot read constraint {text!r}: a ( without its )")
    return (*out, *reversed(waiting))


def _unwind(out: list[str], waiting: list[str], binding: int) -> None:
    while waiting and waiting[-1] != "(" and _BINDS[waiting[-1]] >= binding:
        out.append(waiting.pop())
