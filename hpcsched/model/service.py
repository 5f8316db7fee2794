"""Services: models that are served by jobs of the queue.

A *service* has a name, which is the model's name in OpenAI's API, and versions. Each *replica* is one job of its owner. A
*rollout* brings in a new version beside the present one. Knows no jobs: `hpcsched.sched.replicas` decides which to start and end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from hpcsched.errors import RequestError

MAX_SERVICES = 200  # in all
MAX_SERVICES_PER_USER = 20
MAX_REPLICAS = 64
MAX_SPEC_BYTES = 128 << 10  # of a version's job, as JSON
MAX_MODEL_CHARS = 1_000
MAX_CHECKS = 100  # prompts of a rollout
MAX_CHECKS_BYTES = 64 << 10
MAX_OLD_VERSIONS = 3  # kept besides those in use, for their names
MAX_USED_ROWS = 10_000  # what users asked, in one report of the gateway
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}\Z")


class Audience(StrEnum):
    """Who may ask the model: its owner, the users of its account, or all users."""

    OWNER = "owner"
    ACCOUNT = "account"
    ALL = "all"


class RolloutStage(StrEnum):
    STARTING = "starting"  # the first new replicas are not ready yet
    CHECKING = "checking"  # the prompts are sent to a new replica
    CANARY = "canary"  # a part of the requests goes to the new version
    WIDENING = "widening"  # it has all new conversations; its other replicas start


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceVersion:
    """A version: its label (v1, v2 ...), the model's path, and the job of a replica as JSON."""

    label: str
    model: str
    spec: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceReplica:
    """The job of a replica. `drained_at_s`: since then it gets no new requests; 0: not."""

    job_id: int
    version: str
    made_at_s: float
    drained_at_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """The change from the version `before` to `label`.

    `canary`: percent of the requests that the new version gets until it is judged. `max_errors`: the largest part of its answers
    that may be errors; `max_ttft`: how many times as long its first token may take as that of the version before.
    """

    label: str
    before: str
    stage: RolloutStage
    stage_at_s: float
    began_at_s: float
    canary: int = 10
    max_errors: float = 0.01
    max_ttft: float = 1.3
    checks: tuple[str, ...] = ()  # JSON of requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A service. Its replicas number `least` to `most`; `wanted` are wanted now.

    `current`: the version of new replicas, unless a rollout says otherwise. `failures`: replicas in succession that ended before
    they were ready. `retry_at_s`: no replica is submitted before.
    """

    name: str
    uid: int
    user: str
    account: str = ""
    audience: Audience = Audience.OWNER
    least: int = 1
    most: int = 1
    wanted: int = 1
    current: str = "v1"
    versions: tuple[ServiceVersion, ...] = ()
    made: int = 1  # versions so far
    replicas: tuple[ServiceReplica, ...] = ()
    rollout: Rollout | None = None
    last_rollout: str = ""  # what became of it, in words
    failures: int = 0
    retry_at_s: float = 0.0
    problem: str = ""  # why replicas are missing, in words
    made_at_s: float = 0.0

    def version(self, label: str) -> ServiceVersion:
        """Return the version of this label. Raises KeyError."""
        for version in self.versions:
            if version.label == label:
                return version
        raise KeyError(label)


def check_service_name(name: object) -> str:
    """Return the name of a service. Raises RequestError."""
    if not isinstance(name, str) or not _NAME.match(name):
        raise RequestError(
            f"cannot name a service {str(name)[:80]!r}: use 1 to 63 lower-case letters, digits, '.', '_' and '-', "
            "with a letter or digit first"
        )
    return name


def read_replicas(text: str) -> tuple[int, int]:
    """Return the least and most replicas of a text such as ``1-3``. Raises RequestError."""
    least, dash, most = text.partition("-")
    parts = [least, most] if dash else [least, least]
    if not all(part.isascii() and part.isdigit() and len(part) < 4 for part in parts):
        raise RequestError(f"cannot read the number of replicas {text[:40]!r}: write it as 2 or as 1-3")
    found = int(parts[0]), int(parts[1])  # int: three digits
    if not 0 <= found[0] <= found[1] <= MAX_REPLICAS or not found[1]:
        raise RequestError(f"cannot use {text[:40]} replicas: the most is 1 to {MAX_REPLICAS}, the least 0 to the most")
    return found
