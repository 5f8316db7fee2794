"""Feature expressions such as ``--constraint="a&(b|c)"``: a parser and an evaluator.

An expression is a postfix tuple (``("a", "b", "c", "|", "&")``). It is flat and hashable, and is parsed and evaluated without
recursion, so the cost of a hostile expression is limited by its length. A constraint is an expression that every node must
satisfy, and optionally a condition on all nodes together: a number of nodes of some kinds (``[a*2&b*1]``, ``a*2``), or all
nodes of one kind (``[a|b|c]``). Errors contain the position in the text. There is no "not" operator.

Knows nothing of nodes or jobs. Syntax: sbatch(1), --constraint.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hpcsched.errors import RequestError

Expression = tuple[str, ...]

MAX_CHARS = 2048
MAX_KINDS = 16  # in brackets

_TOKEN = re.compile(r"\s*([A-Za-z0-9_.:=+-]+|[&|()\[\]*])")
_BINDS = {"&": 2, "|": 1}
_CLOSES = {"(": ")", "[": "]"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """The kinds of nodes that a job needs.

    Each node satisfies `every`, all nodes satisfy the same one of `alike`, and a number of nodes satisfies each of `counts`.
    """

    every: Expression = ()
    alike: tuple[Expression, ...] = ()
    counts: tuple[tuple[Expression, int], ...] = ()


class _Token(NamedTuple):
    text: str
    at: int  # its place in the text, from 1


def parse_constraint(text: str) -> Constraint:
    """Return the constraint in `text`.

    Raises: RequestError, with the position, if it is malformed.
    """
    if not text:
        return Constraint()
    tokens = _tokens(text)
    if not any(token.text in "[*" for token in tokens):
        return Constraint(every=_postfix(tokens, text))
    parts = _split(tokens, "&", text)
    if len(parts) > 1:
        _refuse_bare_alternatives(parts, text)
    read = [(part[0], _read_part(part, text)) for part in parts]
    every = _all_of([constraint.every for _, constraint in read if constraint.every])
    counts = tuple([count for _, constraint in read for count in constraint.counts])
    return Constraint(every=every, alike=_only_alike(read, len(counts), text), counts=counts)


def _only_alike(read: Sequence[tuple[_Token, Constraint]], counts: int, text: str) -> tuple[Expression, ...]:
    """Return the alternatives of the only part that has them.

    Raises: RequestError if two parts have alternatives, if alternatives are combined with counts, or if there are too many.
    """
    found = [(first, constraint.alike) for first, constraint in read if constraint.alike]
    if len(found) > 1:
        raise _wrong(text, found[1][0], "brackets with | a second time")
    alike = found[0][1] if found else ()
    if max(len(alike), counts) > MAX_KINDS:
        raise RequestError(f"cannot read constraint {text!r}: it names more than {MAX_KINDS} kinds of nodes")
    if alike and counts:
        raise RequestError(f"cannot read constraint {text!r}: [a|b] and counts exclude each other")
    return alike


def _refuse_bare_alternatives(parts: Sequence[Sequence[_Token]], text: str) -> None:
    """Reject a ``|`` outside parentheses and brackets if there are several `parts`.

    Raises: RequestError.
    """
    for part in parts:
        if len(_split(part, "|", text)) > 1:
            bar = next(token for token in part if token.text == "|")
            raise _wrong(text, bar, "beside counts and brackets it needs parentheses around it")


def _read_part(part: list[_Token], text: str) -> Constraint:
    """Return one part of a constraint: brackets, a count, or an expression for every node."""
    if part[0].text == "[" and part[-1].text == "]":
        inside = part[1:-1]
        if not inside:
            raise _wrong(text, part[0], "brackets with nothing in them")
        kinds = _split(inside, "|", text)
        if len(kinds) == 1:
            return Constraint(counts=tuple([_counted(kind, text) for kind in _split(inside, "&", text)]))
        return Constraint(alike=tuple([_postfix(kind, text) for kind in kinds]))
    if len(part) > 1 and part[-2].text == "*":
        return Constraint(counts=(_counted(part, text),))
    return Constraint(every=_postfix(part, text))


def parse_features(text: str) -> Expression:
    """Return the expression in `text`, which applies to each node separately.

    It is empty for empty text. Raises: RequestError, with the position, if it is malformed or has counts or brackets.
    """
    tokens = _tokens(text)
    for token in tokens:
        if token.text in "[]*":
            raise _wrong(text, token, "counts and brackets cannot be used here")
    return _postfix(tokens, text)


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


def _tokens(text: str) -> list[_Token]:
    if len(text) > MAX_CHARS:
        raise RequestError(f"cannot use constraint of {len(text)} characters: the longest is {MAX_CHARS}")
    tokens: list[_Token] = []
    at, end = 0, len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None:
            at += len(text[at:]) - len(text[at:].lstrip())
            why = (
                "there is no 'not', exclude nodes by --exclude"
                if text[at] == "!"
                else "it is not a feature name or one of & | ( ) [ ] *"
            )
            raise _wrong(text, _Token(text[at], at + 1), why)
        tokens.append(_Token(match.group(1), match.start(1) + 1))
        at = match.end()
    return tokens


def _split(tokens: Sequence[_Token], operator: str, text: str) -> list[list[_Token]]:
    """Return the parts of `tokens` between the `operator`s outside parentheses and brackets."""
    parts: list[list[_Token]] = [[]]
    expected: list[str] = []
    for token in tokens:
        if token.text in _CLOSES:
            if token.text == "[" and expected:
                raise _wrong(text, token, "brackets do not go into brackets or parentheses")
            expected.append(_CLOSES[token.text])
        elif token.text in (")", "]") and (not expected or expected.pop() != token.text):
            raise _wrong(text, token, f"it closes no {'(' if token.text == ')' else '['}")
        if token.text == operator and not expected:
            parts.append([])
        else:
            parts[-1].append(token)
    if expected:
        raise RequestError(
            f"cannot read constraint {text!r}: a {'(' if expected[-1] == ')' else '['} without its {expected[-1]}"
        )
    for part in parts:
        if not part:
            raise RequestError(f"cannot read constraint {text!r}: one side of a {operator} is empty")
    return parts


def _counted(tokens: list[_Token], text: str) -> tuple[Expression, int]:
    """Return the kind and the count of ``a*2`` or ``(a&b)*2``."""
    if len(tokens) < 3 or tokens[-2].text != "*":
        raise _wrong(text, tokens[0], "say how many nodes of it, as a*2, or give alternatives for all nodes, as [a|b]")
    count = tokens[-1].text
    if not (count.isascii() and count.isdigit()) or not 1 <= int(count) <= 10**6:
        raise _wrong(text, tokens[-1], "it is not a number of nodes")
    kind = tokens[:-2]
    if len(kind) > 1 and (kind[0].text != "(" or kind[-1].text != ")"):
        raise _wrong(text, tokens[-2], "a count goes with one feature, or with several in parentheses")
    return _postfix(kind, text), int(count)


def _all_of(expressions: Sequence[Expression]) -> Expression:
    """Return the expression that is true if all of `expressions` are."""
    joined: Expression = expressions[0] if expressions else ()
    for expression in expressions[1:]:
        joined = (*joined, *expression, "&")
    return joined


def _postfix(tokens: Sequence[_Token], text: str) -> Expression:
    """Order operators after their operands (Dijkstra's shunting yard).

    `&` binds closer than `|`.
    """
    out: list[str] = []
    waiting: list[str] = []
    operand_next = True
    for token in tokens:
        if token.text in "[]*":
            raise _wrong(text, token, "counts and brackets are joined to the rest by &, not in parentheses or beside |")
        if operand_next != (token.text not in (*_BINDS, ")")):
            raise _wrong(text, token, "it is out of place")
        if token.text == "(":
            waiting.append("(")
        elif token.text == ")":
            _unwind(out, waiting, 0)
            if not waiting:
                raise _wrong(text, token, "a ) without its (")
            waiting.pop()
        elif token.text in _BINDS:
            _unwind(out, waiting, _BINDS[token.text])
            waiting.append(token.text)
            operand_next = True
        else:
            out.append(token.text)
            operand_next = False
    if operand_next and tokens:
        raise RequestError(f"cannot read constraint {text!r}: it ends where a feature should follow")
    if "(" in waiting:
        raise RequestError(f"cannot read constraint {text!r}: a ( without its )")
    return (*out, *reversed(waiting))


def _unwind(out: list[str], waiting: list[str], binding: int) -> None:
    while waiting and waiting[-1] != "(" and _BINDS[waiting[-1]] >= binding:
        out.append(waiting.pop())


def _wrong(text: str, token: _Token, why: str) -> RequestError:
    return RequestError(f"cannot read constraint {text!r}: {token.text!r} (character {token.at}): {why}")
