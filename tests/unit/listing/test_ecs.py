"""Log records and job events as ECS JSON lines: as ecs-logging writes them, one line each, bounded."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import hpcsched
from hpcsched.controller.logfile import EcsFormatter
from hpcsched.lifecycle.events import EVENTS
from hpcsched.listing.ecs import MAX_TEXT, event_document

SHIPPERS = Path(hpcsched.__file__).parent.parent / "etc" / "log-shippers"
COMMON = ("@timestamp", "log.level", "message", "ecs.version")


def record(text: str = "node %s is down", *args: object, level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord("hpcsched.nodes", level, __file__, 12, text, args or ("n1",), None, "watch")


def line(of: logging.LogRecord) -> dict[str, Any]:
    text = EcsFormatter("hpcschedd").format(of)
    assert "\n" not in text
    assert text.isascii()
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_record_has_the_fields_that_ecs_logging_gives_it() -> None:
    ecs_logging = pytest.importorskip("ecs_logging")
    made = record()
    theirs = json.loads(ecs_logging.StdlibFormatter(exclude_fields=["log.original", "process.thread.id"]).format(made))
    ours = line(made)
    assert tuple(ours)[:4] == COMMON
    assert {name: ours[name] for name in theirs} == theirs
    assert ours["service"] == {"name": "hpcschedd", "version": hpcsched.__version__}


def test_an_exception_is_in_fields_of_its_own() -> None:
    made = record()
    try:
        raise ValueError("no\nsuch node")
    except ValueError:
        made.exc_info = sys.exc_info()
    error = line(made)["error"]
    assert (error["type"], error["message"]) == ("ValueError", "no\nsuch node")
    assert "test_an_exception_is_in_fields" in error["stack_trace"]


@pytest.mark.parametrize(
    "text", ['end\n{"@timestamp": "1970-01-01T00:00:00.000Z"}', "\u2028next", "\x1b[2J", "\udcff", '"}', "%s"]
)
def test_no_text_ends_its_line(text: str) -> None:
    assert line(record("%s", text))["message"] == text


def test_a_long_text_is_cut() -> None:
    assert len(line(record("%s", "x" * 10_000_000))["message"]) == MAX_TEXT + 3


@pytest.mark.parametrize(
    ("text", "args", "labels"),
    [
        ("node %s is down: %s", ("n1", "job 7 of node n9"), {"node": "n1"}),
        ("100 %% of job %d of user %.20s on node %s", (12, "ann", "n3"), {"job_id": "12", "user": "ann", "node": "n3"}),
        ("dropped a message: %s", ("node %s",), None),
    ],
)
def test_a_record_is_labelled_with_what_our_own_text_announces(
    text: str, args: tuple[object, ...], labels: dict[str, str] | None
) -> None:
    assert line(record(text, *args)).get("labels") == labels


def event(kind: str, state: str | None = "RUNNING", user: str | None = "ann") -> dict[str, Any]:
    return {"seq": 7, "at_s": 1_800_000_000.25, "job_id": 12, "kind": kind, "state": state, "user": user}


def test_a_job_event_says_what_happened_to_which_job() -> None:
    found = event_document(event("NodesReleased"), "lab")
    assert found["@timestamp"] == "2027-01-15T08:00:00.250Z"
    assert found["message"] == "job 12 of ann: nodes released; now RUNNING"
    assert found["event"] == {
        "kind": "event", "dataset": "hpcsched.jobs", "action": "job-nodes-released", "id": "7", "sequence": 7,
    }  # fmt: skip
    assert (found["user"], found["labels"]) == ({"name": "ann"}, {"job_id": "12", "state": "RUNNING"})


def test_every_kind_of_event_has_an_action_and_an_end_has_an_outcome() -> None:
    actions = {event_document(event(kind), "lab")["event"]["action"] for kind in EVENTS}
    assert len(actions) == len(EVENTS)
    ends = {
        state: event_document(event("Exited", state), "lab")["event"]["outcome"] for state in ("COMPLETED", "TIMEOUT")
    }
    assert ends == {"COMPLETED": "success", "TIMEOUT": "failure"}
    forgotten = event_document(event("Exited", None, None), "lab")
    assert (forgotten["event"]["outcome"], "user" in forgotten) == ("unknown", False)


@pytest.mark.parametrize("name", ["promtail.yaml", "filebeat.yml", "vector.yaml"])
def test_an_example_for_a_shipper_reads_the_log_and_the_events(name: str) -> None:
    text = (SHIPPERS / name).read_text()
    assert isinstance(yaml.safe_load(text), dict)
    assert "/var/lib/hpcsched/*.log" in text or "lib/hpcsched/*.log" in text
    assert "events" in text


def test_the_labels_of_promtail_are_fields_of_our_lines() -> None:
    stages = yaml.safe_load((SHIPPERS / "promtail.yaml").read_text())["scrape_configs"][0]["pipeline_stages"]
    fields = stages[0]["json"]["expressions"]
    found = line(record()) | {"event": event_document(event("Started"), "lab")["event"]}
    for path in fields.values():
        place: Any = found
        for part in [path.strip('"')] if path.startswith('"') else path.split("."):
            place = place[part]
        assert isinstance(place, str)


def test_vector_runs_the_command_that_streams_events() -> None:
    sources = yaml.safe_load((SHIPPERS / "vector.yaml").read_text())["sources"]
    assert sources["hpcsched_events"]["command"] == ["hctl", "events", "--json", "--follow"]


def of_cluster(about: str, kind: str, name: str, **values: Any) -> dict[str, Any]:
    return {
        "seq": 8,
        "at_s": 1_800_000_000.0,
        "about": about,
        "kind": kind,
        "name": name,
        "text": "",
        "by": "",
    } | values


def test_an_event_of_a_node_names_its_host() -> None:
    found = event_document(of_cluster("node", "NodeDown", "n3", text="no route\nto host"), "lab")
    assert (found["message"], found["log.level"]) == ("node n3: down: no route\nto host", "warning")
    assert (found["host"], found["labels"]) == ({"name": "n3"}, {"node": "n3"})
    assert (found["event"]["dataset"], found["event"]["action"]) == ("hpcsched.nodes", "node-down")


def test_an_alert_has_its_rule_and_labels() -> None:
    labels = {"node": "n3", "mount": "/scratch"}
    fired = of_cluster("alert", "AlertFired", "FileSystemFull", labels=labels, severity="critical", text="1 GiB free")
    found = event_document(fired, "lab")
    assert found["message"] == "alert FileSystemFull n3 /scratch: fired: 1 GiB free"
    assert (found["event"]["kind"], found["event"]["action"]) == ("alert", "alert-fired")
    assert (found["log.level"], found["rule"], found["labels"]) == ("critical", {"name": "FileSystemFull"}, labels)


def test_who_changed_a_reservation_or_the_configuration_is_the_user() -> None:
    made = event_document(of_cluster("reservation", "ReservationCreated", "fan"), "lab")
    assert (made["message"], made["labels"]) == ("reservation fan: created", {"reservation": "fan"})
    read = event_document(of_cluster("configuration", "ConfigurationRead", "", by="root", text="node n3 is new"), "lab")
    assert (read["message"], read["user"]) == ("configuration: read by root: node n3 is new", {"name": "root"})
