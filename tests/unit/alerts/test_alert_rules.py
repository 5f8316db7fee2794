"""Which conditions there are, of which facts; and that each rule is documented and can be switched off."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpcsched.alerts.rules import (
    GPU_IDLE_S,
    INHIBITIONS,
    MAX_LABEL,
    MAX_TEXT,
    WatchedCluster,
    WatchedHead,
    WatchedJob,
    WatchedNode,
    adjusted,
    condition,
    of_cluster,
    of_head,
    of_job,
    of_node,
)
from hpcsched.metrics.findings import Bottleneck, SlowCause
from hpcsched.model.alerting import RULES, AlertSeverity, RuleSettings, limit_text, limits_of
from hpcsched.model.ids import NodeName

ROOT = Path(__file__).parents[3]
SHARE = "/nfs"
LIMITS = limits_of([])
WELL = WatchedNode(name="n1", silent_s=3.0, has_jobs=True)
NOW_S = 1_800_000_000.0
GIB = float(2**30)


def conditions(**values: float) -> dict[str, float]:
    return {key.replace("__", ":"): value for key, value in values.items()}


def test_a_node_that_is_well_has_no_condition() -> None:
    healthy = {
        "node_filesystem_answers:/nfs": 1,
        "node_filesystem_size_bytes:/": 100 * GIB,
        "node_filesystem_free_bytes:/": 50 * GIB,
        "node_filesystem_read_only:/": 1,
        "gpu_throttle:0:heat": 0,
    }
    assert list(of_node(replace(WELL, conditions=healthy, errors={"node_oom_kills_total": 1}), SHARE, LIMITS)) == []


@pytest.mark.parametrize(
    ("facts", "rule", "severity"),
    [
        ({"down_why": "no route"}, "NodeDown", "warning"),
        ({"drops": 4}, "NodeUnsteady", "warning"),
        ({"drained_by": "hhealth", "drained_why": "disk"}, "NodeDrained", "warning"),
        ({"silent_s": 400.0}, "NodeSilent", "warning"),
        ({"slow": "cpu at 70 %"}, "NodeSlow", "warning"),
        ({"conditions": {"gpu_throttle:0:heat": 1}}, "NodeHot", "warning"),
        ({"errors": {"node_throttled_total:core": 500}}, "NodeHot", "warning"),
        ({"conditions": {"node_filesystem_answers:/scratch": 0}}, "FileSystemHangs", "critical"),
        ({"conditions": {"node_filesystem_read_only:/scratch": 1}}, "FileSystemReadOnly", "critical"),
        ({"conditions": {"node_filesystem_free_inodes:/": 3}}, "FileSystemFull", "warning"),
        (
            {"conditions": {"node_filesystem_size_bytes:/": 100 * GIB, "node_filesystem_free_bytes:/": GIB}},
            "FileSystemFull",
            "warning",
        ),
        ({"conditions": {"gpu_driver_answers": 0}}, "GpuDriverHangs", "critical"),
        ({"errors": {"node_ecc_errors_total:uncorrected": 1}}, "MemoryErrors", "critical"),
        ({"errors": {"gpu_ecc_errors_total:0:corrected": 500}}, "MemoryErrors", "warning"),
        ({"errors": {"node_oom_kills_total": 9}}, "OutOfMemory", "warning"),
        ({"errors": {"node_network_errors_total:eth0": 900}}, "NetworkErrors", "warning"),
    ],
)
def test_what_is_wrong_with_a_node_is_one_condition(facts: dict[str, object], rule: str, severity: str) -> None:
    (found,) = of_node(replace(WELL, **facts), SHARE, LIMITS)  # type: ignore[arg-type]
    assert (found.rule, found.severity.value, found.label("node"), found.for_s) == (
        rule,
        severity,
        "n1",
        RULES[rule].for_s,
    )


def test_a_person_who_drains_a_node_is_told_nothing_and_an_idle_node_may_be_hot() -> None:
    hot = {"gpu_throttle:0:heat": 1.0}
    assert list(of_node(replace(WELL, drained_by="ann", drained_why="new fan"), SHARE, LIMITS)) == []
    assert list(of_node(replace(WELL, has_jobs=False, conditions=hot), SHARE, LIMITS)) == []


def test_a_share_that_hangs_is_one_condition_and_not_one_of_each_node() -> None:
    hangs = {"node_filesystem_answers:/nfs": 0.0}
    nodes = [replace(WELL, name=f"n{number}", conditions=hangs) for number in range(1, 4)]
    assert [found for node in nodes for found in of_node(node, SHARE, LIMITS)] == []
    (found,) = of_cluster(WatchedCluster(), nodes, SHARE, LIMITS)
    assert (found.rule, found.text) == ("ShareHangs", "/nfs does not answer on n[1-3]")


def test_most_nodes_down_is_a_condition_of_its_own() -> None:
    nodes = [replace(WELL, name=f"n{number}", down_why="no route" if number < 3 else None) for number in range(5)]
    (found,) = of_cluster(WatchedCluster(), nodes, SHARE, LIMITS)
    assert (found.rule, found.text) == ("MostNodesDown", "3 of 5 nodes are not connected: n[0-2]")
    assert list(of_cluster(WatchedCluster(), nodes[2:], SHARE, LIMITS)) == []
    assert list(of_cluster(WatchedCluster(), nodes[:2], SHARE, LIMITS)) == []  # of two nodes "most" says nothing


@pytest.mark.parametrize(
    ("facts", "rule"),
    [
        (WatchedCluster(backup=(5 * 3600.0, 2 * 3600.0, "")), "BackupOld"),
        (WatchedCluster(backup=(None, 3600.0, "no room")), "BackupOld"),
        (WatchedCluster(backup=(3600.0, 3600.0, "")), None),
        (WatchedCluster(backup=(None, 3600.0, "")), None),
        (WatchedCluster(unplanned=3), "QueueStuck"),
    ],
)
def test_backups_and_the_queue_are_watched(facts: WatchedCluster, rule: str | None) -> None:
    assert [found.rule for found in of_cluster(facts, [], SHARE, LIMITS)] == ([rule] if rule else [])


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (WatchedHead(), None),
        (WatchedHead(controller_silent_s=100.0), ("ControllerSilent", "critical")),
        (WatchedHead(free_mib=500), ("HeadDiskFull", "warning")),
        (WatchedHead(free_mib=5), ("HeadDiskFull", "critical")),
        (WatchedHead(certificate_left_s=30 * 86400.0), None),
        (WatchedHead(certificate_left_s=10 * 86400.0), ("CertificateExpires", "warning")),
        (WatchedHead(certificate_left_s=-5.0), ("CertificateExpires", "critical")),
    ],
)
def test_the_head_is_watched(facts: WatchedHead, said: tuple[str, str] | None) -> None:
    assert [(found.rule, found.severity.value) for found in of_head(facts, LIMITS)] == ([said] if said else [])


def job(*causes: SlowCause, limit_at_s: float | None = None, ends_at_s: float | None = None) -> WatchedJob:
    found = [Bottleneck(cause=cause, node=NodeName("n1"), text="says so", remedy="do this") for cause in causes]
    return WatchedJob(
        display_id="12", key="12.5", uid=7, user="ann", limit_at_s=limit_at_s, ends_at_s=ends_at_s, bottlenecks=found
    )


def test_a_user_is_told_of_waste_and_of_limits_only() -> None:
    assert list(of_job(job(SlowCause.IDLE, SlowCause.ONE_THREAD, SlowCause.DATA_STARVED), NOW_S)) == []
    (waste,) = of_job(job(SlowCause.HELD_EMPTY, SlowCause.GPU_UNUSED), NOW_S)
    assert (waste.rule, waste.uid, waste.told_once, waste.for_s) == ("JobWastes", 7, "12.5.JobWastes", 1800.0)
    (unused,) = of_job(job(SlowCause.GPU_UNUSED), NOW_S)
    assert unused.for_s == GPU_IDLE_S
    (limit,) = of_job(job(SlowCause.MEMORY_LIMIT), NOW_S)
    assert (limit.rule, limit.severity) == ("JobWillHitLimit", AlertSeverity.INFO)


def test_a_training_job_that_is_too_slow_for_its_limit_is_told() -> None:
    (late,) = of_job(job(limit_at_s=NOW_S + 3600, ends_at_s=NOW_S + 7200), NOW_S)
    assert late.rule == "JobWillHitLimit"
    assert "it needs 1:00:00 more" in late.text
    assert list(of_job(job(limit_at_s=NOW_S + 3600, ends_at_s=NOW_S + 3000), NOW_S)) == []


def test_texts_from_outside_are_one_short_line_and_labels_are_cut() -> None:
    made = condition("NodeDown", "a\nb\x1b[31m\u202e" + "x" * 10_000, node="n" * 10_000)
    assert len(made.text) == MAX_TEXT
    assert made.text.isprintable()
    assert len(made.label("node")) == MAX_LABEL


def test_rules_can_be_switched_off_and_every_inhibition_names_rules() -> None:
    every = [condition(rule, "text") for rule in RULES]
    assert len(adjusted(every, [RuleSettings(name="NodeDown", enabled=False)])) == len(RULES) - 1
    assert {name for one in INHIBITIONS for name in (one.source, *one.targets)} <= RULES.keys()


def test_a_rule_lasts_as_long_and_is_as_bad_as_the_configuration_says() -> None:
    change = RuleSettings(name="NodeDown", for_s=3600.0, severity="critical")
    (made,) = adjusted([condition("NodeDown", "text")], [change])
    assert (made.for_s, made.severity) == (3600.0, AlertSeverity.CRITICAL)
    (unused,) = of_job(job(SlowCause.GPU_UNUSED), NOW_S)
    (made,) = adjusted([unused], [RuleSettings(name="JobWastes", for_s=60.0)])
    assert made.for_s == GPU_IDLE_S


def test_a_limit_of_the_configuration_decides() -> None:
    limits = limits_of([RuleSettings(name="FileSystemFull", limit=10.0), RuleSettings(name="NodeUnsteady", limit=2.0)])
    half = {"node_filesystem_size_bytes:/": 100 * GIB, "node_filesystem_free_bytes:/": 5 * GIB}
    node = replace(WELL, conditions=half, drops=2)
    assert list(of_node(node, SHARE, LIMITS)) == []
    assert [found.rule for found in of_node(node, SHARE, limits)] == ["NodeUnsteady", "FileSystemFull"]


def clocks(*ahead_s: float | None) -> list[WatchedNode]:
    return [replace(WELL, name=f"n{number}", clock_ahead_s=one) for number, one in enumerate(ahead_s, 1)]


def test_a_node_whose_clock_is_off_is_told_and_one_without_samples_is_not() -> None:
    (found,) = of_cluster(WatchedCluster(), clocks(0.4, -75.0, None, 59.0), SHARE, LIMITS)
    assert (found.rule, found.label("node"), found.for_s) == ("ClockOff", "n2", 300.0)
    assert found.text == "its clock is 1:15 behind that of the head"


def test_a_step_of_the_heads_clock_is_one_condition_of_the_head() -> None:
    (found,) = of_cluster(WatchedCluster(), clocks(-3600.0, -3599.0, -3601.0), SHARE, LIMITS)
    assert (found.rule, found.labels) == ("ClockOff", ())
    assert found.text == "the clock of the head is 1:00:00 ahead of those of most nodes"
    head, node = of_cluster(WatchedCluster(), clocks(-3600.0, -3599.0, -3601.0, 0.0), SHARE, LIMITS)
    assert (head.labels, node.label("node")) == ((), "n4")


@pytest.mark.parametrize(
    ("value", "unit", "text"), [(60.0, "s", "1m"), (90.0, "s", "90s"), (1024, "MiB", "1024 MiB"), (3, "%", "3 %")]
)
def test_a_limit_is_shown_with_its_unit(value: float, unit: str, text: str) -> None:
    assert limit_text(value, unit) == text


def test_every_rule_is_in_the_manual() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    assert [rule for rule in RULES if f"`{rule}`" not in page] == []
