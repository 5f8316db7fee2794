"""Choose the replica for a request, by version, known prompts and load.

Pure, but for what it remembers: which replica had which prompt last, and which version a conversation has. Both are bounded.

Rules: only ready replicas that are not drained get requests. A conversation keeps its version while that has a replica. Of a
version's replicas the one with the longest known beginning of the prompt is chosen, unless it has more than 1.3 times the mean
load; else the one with the fewest requests. Sources: cache-aware routing of SGLang's router, and what went wrong with it:
affinity without a cap on load sends all requests to one replica.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Generic, TypeVar

BLOCK_CHARS = 512  # of a prompt, that is known or not
MOST_BLOCKS = 64
LOAD_CAP = 1.3  # of the mean
FREE_REQUESTS = 1  # above the mean that never count as too much
MAX_KNOWN_BLOCKS = 100_000
MAX_CONVERSATIONS = 20_000

V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    """What the choice knows of a replica. `active`: its requests now."""

    job: int
    version: str
    is_ready: bool
    is_drained: bool = False
    active: int = 0


class RecentMap(Generic[V]):
    """A mapping that forgets what was not used for longest."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[bytes, V] = OrderedDict()

    def get(self, key: bytes) -> V | None:
        """Return the value of a key."""
        return self._kept.get(key)

    def put(self, key: bytes, value: V) -> None:
        """Set a value."""
        self._kept[key] = value
        self._kept.move_to_end(key)
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def __len__(self) -> int:
        return len(self._kept)


class ReplicaChoice:
    """Chooses among the replicas of one service."""

    def __init__(self) -> None:
        self._known: RecentMap[int] = RecentMap(MAX_KNOWN_BLOCKS)
        self._versions: RecentMap[str] = RecentMap(MAX_CONVERSATIONS)

    def choose(
        self,
        replicas: Sequence[ReplicaState],
        weights: Mapping[str, int],
        prompt: Sequence[bytes],
        conversation: bytes,
        *,
        version: str = "",
        without: Collection[int] = (),
    ) -> int | None:
        """Return the job of the replica, None if none can take the request.

        `weights`: percent of new conversations by version; below 0: only requests that name the version. `version`: the one
        that the client names. `without`: replicas that have just failed.
        """
        able = [one for one in replicas if one.is_ready and not one.is_drained and one.job not in without]
        if version:
            able = [one for one in able if one.version == version]
        else:
            able = [one for one in able if weights.get(one.version, 0) >= 0]
        if not able:
            return None
        chosen = version or self._version(able, weights, conversation)
        mine = [one for one in able if one.version == chosen]
        found = self._with_prompt(mine, prompt) or min(mine, key=lambda one: (one.active, one.job))
        for block in prompt:
            self._known.put(block, found.job)
        return found.job

    def _version(self, able: Sequence[ReplicaState], weights: Mapping[str, int], conversation: bytes) -> str:
        there = {one.version for one in able}
        known = self._versions.get(conversation)
        if known is not None and known in there:
            return known
        chosen = drawn({label: weights.get(label, 0) for label in sorted(there)}, conversation)
        self._versions.put(conversation, chosen)
        return chosen

    def _with_prompt(self, replicas: Sequence[ReplicaState], prompt: Sequence[bytes]) -> ReplicaState | None:
        """Return the replica that had the longest beginning last, if its load allows it."""
        by_job = {one.job: one for one in replicas}
        most = LOAD_CAP * sum(one.active for one in replicas) / len(replicas) + FREE_REQUESTS
        for block in reversed(prompt):
            found = by_job.get(self._known.get(block) or 0)
            if found is not None:
                return found if found.active <= most else None
        return None


def drawn(weights: Mapping[str, int], conversation: bytes) -> str:
    """Return a version by weight, always the same one for the same conversation.

    Without any weight, the last version.
    """
    total = sum(max(0, weight) for weight in weights.values())
    if not total:
        return max(weights, key=lambda label: (len(label), label))
    point = int.from_bytes(blake2b(conversation, digest_size=8).digest(), "big") % total
    for label, weight in weights.items():
        point -= max(0, weight)
        if point < 0:
            return label
    raise AssertionError("the weights add up to their total")


def prompt_blocks(text: str, salt: str) -> tuple[bytes, ...]:
    """Return a hash of each beginning of a prompt, block by block, without the rest.

    `salt` is of the user, whose prefixes are in no cache for others.
    """
    digest, found = blake2b(salt.encode(), digest_size=16), []
    for begin in range(0, min(len(text), MOST_BLOCKS * BLOCK_CHARS), BLOCK_CHARS):
        if begin + BLOCK_CHARS > len(text):
            break
        digest.update(text[begin : begin + BLOCK_CHARS].encode("utf-8", "replace"))
        found.append(digest.digest())
    return tuple(found)


def prompt_of(body: Mapping[str, Any]) -> tuple[str, str]:
    """Return the text of a prompt, and its beginning, which tells conversations apart."""
    messages = body.get("messages")
    if isinstance(messages, list):
        texts = [_text_of(message) for message in messages]
        first = next((at for at, message in enumerate(messages) if _role_of(message) == "user"), 0)
        return "\n".join(texts), "\n".join(texts[: first + 1])
    prompt = body.get("prompt", body.get("input", ""))
    text = prompt if isinstance(prompt, str) else "\n".join(_short_json(part) for part in _items(prompt))
    return text, text[:BLOCK_CHARS]


def _items(value: object) -> Iterator[object]:
    yield from value if isinstance(value, list) else [value]


def _role_of(message: object) -> object:
    return message.get("role") if isinstance(message, dict) else None


def _text_of(message: object) -> str:
    if not isinstance(message, dict):
        return ""
    content = message.get("content")
    return f"{message.get('role')}:{content if isinstance(content, str) else _short_json(content)}"


def _short_json(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
