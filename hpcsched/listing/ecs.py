"""Log lines and events in the Elastic Common Schema: one JSON object on a line.

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


def words_of(kind: str) -> str:
    """Return a kind of events as words with dashes: ``NodesReleased`` is ``nodes-released``."""
    return "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in kind).strip("-")


def node_of_event(event: Json) -> str:
    """Return the node of an event of `/v1/events`, "" if it is of none."""
    return str(event["name"] if event["about"] == "node" else event.get("labels", {}).get("node", ""))


def event_sentence(event: Json) -> str:
    """Return what happened, of an event of `/v1/events`, in words."""
    words = words_of(event["kind"])
    if event.get("about", "job") == "job":
        owner = f" of {event['user']}" if event.get("user") else ""
        state = f"; now {event['state']}" if event.get("state") else ""
        return f"job {event['job_id']}{owner}: {words.replace('-', ' ')}{state}"
    what = words.removeprefix(f"{event['about']}-").replace("-", " ")
    where = "".join(f" {value}" for value in event.get("labels", {}).values())
    name = f" {event['name']}" if event["name"] else ""
    by = f" by {event['by']}" if event["by"] else ""
    return f"{event['about']}{name}{where}: {what}{by}" + (f": {event['text']}" if event["text"] else "")


def event_document(event: Json, cluster: str) -> Json:
    """Return an event of `/v1/events` as a document.

    The number of the event identifies it, because a reader may get it twice.
    """
    about = event.get("about", "job")
    if about == "job":
        return job_event_document(event, cluster)
    words = words_of(event["kind"])
    labels = {name: str(value) for name, value in event.get("labels", {}).items()}
    node = node_of_event(event)
    named = {about: event["name"]} if about in ("node", "reservation") else {}
    return {
        **ecs_head(event["at_s"], _level(event), event_sentence(event)),
        "event": {
            "kind": "alert" if about == "alert" else "event",
            "dataset": f"hpcsched.{about}s",
            "action": words if words.startswith(about) else f"{about}-{words}",
            "id": str(event["seq"]),
            "sequence": event["seq"],
        },
        "service": {"name": "hpcschedd", "node": {"name": cluster}},
        **({"host": {"name": node}} if node else {}),
        **({"rule": {"name": event["name"]}} if about == "alert" else {}),
        **({"user": {"name": event["by"]}} if event["by"] else {}),
        "labels": {**labels, **named},
    }


def _level(event: Json) -> str:
    if event["kind"] == "AlertFired":
        return str(event.get("severity", "warning"))
    return "warning" if event["kind"] in ("NodeDown", "NodeDrained", "PowerUpFailed", "PowerDownFailed") else "info"


def job_event_document(event: Json, cluster: str) -> Json:
    """Return an event of a job as a document."""
    state, user, words = event["state"], event.get("user"), words_of(event["kind"])
    outcome = {"outcome": _OUTCOMES.get(state or "", "unknown")} if words == "exited" else {}
    return {
        **ecs_head(event["at_s"], "info", event_sentence(event)),
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
