"""Log lines and job events in the Elastic Common Schema: one JSON object on a line.

Elastic, Loki, Vector and others read it. Source: the ECS logging specification (github.com/elastic/ecs-logging), version 1.6.0,
which the package ecs-logging implements; `@timestamp`, `log.level` and `message` come first, and `ecs.version` is not nested.
Texts that are too long are cut, so that a line has at most about 64 KiB.
"""

from __future__ import annotations

import json
import time

TYPE_CHECKING = False  # for type checkers; importing typing takes a tenth of a command's start
if TYPE_CHECKING:
    from typing import Any

    Json = dict[str, Any]

ECS_VERSION = "1.6.0"
MAX_TEXT = 32_768
_OUTCOMES = {"COMPLETED": "success", "FAILED": "failure", "TIMEOUT": "failure", "OUT_OF_MEMORY": "failure",
             "NODE_FAIL": "failure", "DEADLINE": "failure"}  # fmt: skip


def ecs_line(document: Json) -> str:
    """Return the document as one line, in ASCII: no character of a text can end it."""
    return json.dumps(document, separators=(",", ":"), default=str)


def ecs_head(at_s: float, level: str, message: str) -> Json:
    """Return the first fields of a document; others follow."""
    millis = int(at_s * 1000)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(millis // 1000))
    return {
        "@timestamp": f"{stamp}.{millis % 1000:03d}Z",
        "log.level": level,
        "message": cut_text(message),
        "ecs.version": ECS_VERSION,
    }


def cut_text(text: str) -> str:
    """Return a text of at most `MAX_TEXT` characters."""
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "..."


def job_event_document(event: Json, cluster: str) -> Json:
    """Return an event of `/v1/events` as a document.

    The number of the event identifies it, because a reader may get it twice.
    """
    state, user = event["state"], event.get("user")
    words = "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in event["kind"]).strip("-")
    owner = f" of {user}" if user else ""
    message = f"job {event['job_id']}{owner}: {words.replace('-', ' ')}" + (f"; now {state}" if state else "")
    outcome = {"outcome": _OUTCOMES.get(state or "", "unknown")} if words == "exited" else {}
    return {
        **ecs_head(event["at_s"], "info", message),
        "event": {
            "kind": "event",
            "dataset": "hpcsched.jobs",
            "action": f"job-{words}",
            "id": str(event["seq"]),
            "sequence": event["seq"],
            **outcome,
        },
        "service": {"name": "hpcschedd", "node": {"name": cluster}},
        **({"user": {"name": user}} if user else {}),
        "labels": {"job_id": str(event["job_id"]), **({"state": state} if state else {})},
    }
