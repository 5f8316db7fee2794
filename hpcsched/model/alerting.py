"""The rules of alerts: severity, duration and limit, and what the administrator changed.

Pure. `hpcsched.alerts.rules` applies the table to the facts; `hpcsched.config.load` reads
``[alerts.rules.NAME]`` by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

MINUTE_S, HOUR_S, DAY_S = 60.0, 3600.0, 86_400.0


class AlertSeverity(StrEnum):
    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


INFO, WARNING, CRITICAL = AlertSeverity


class RuleLimit(NamedTuple):
    """The number that decides. `unit`: ``s``, ``MiB``, ``%`` or "" for a count."""

    value: float
    unit: str
    least: float
    most: float


class AlertRule(NamedTuple):
    """A rule. Its severity may be lower or higher in a single case."""

    severity: AlertSeverity
    for_s: float
    meaning: str
    limit: RuleLimit | None = None


_SILENT = RuleLimit(5 * MINUTE_S, "s", 10, DAY_S)
_DROPS = RuleLimit(4, "", 1, 1000)
_CLOCK = RuleLimit(MINUTE_S, "s", 2, DAY_S)
_FULL = RuleLimit(3, "%", 0.1, 90)
_KILLS = RuleLimit(4, "", 1, 1000)
_BACKUPS = RuleLimit(2, "", 1, 1000)
_HEAD = RuleLimit(1024, "MiB", 1, 1 << 30)
_EXPIRES = RuleLimit(14 * DAY_S, "s", HOUR_S, 365 * DAY_S)
_MOST = RuleLimit(50, "%", 1, 99)

RULES: dict[str, AlertRule] = {
    "NodeDown": AlertRule(WARNING, 5 * MINUTE_S, "a node is not connected, and was not switched off to save power"),
    "MostNodesDown": AlertRule(
        CRITICAL, 2 * MINUTE_S, "most nodes are not connected: the network of the head, or its power", _MOST
    ),
    "NodeUnsteady": AlertRule(WARNING, 0.0, "the connection to a node was lost several times in half an hour", _DROPS),
    "NodeDrained": AlertRule(WARNING, 0.0, "a check has drained a node"),
    "NodeSilent": AlertRule(WARNING, 5 * MINUTE_S, "a node is connected and sends no samples", _SILENT),
    "NodeSlow": AlertRule(WARNING, 0.0, "a node is slower than its class or than before, by hpcsched node bench"),
    "NodeHot": AlertRule(WARNING, 10 * MINUTE_S, "a node with jobs is slowed down for heat"),
    "ClockOff": AlertRule(WARNING, 5 * MINUTE_S, "the clock of a node differs from that of the head", _CLOCK),
    "ShareHangs": AlertRule(CRITICAL, 2 * MINUTE_S, "the share does not answer on some nodes"),
    "FileSystemHangs": AlertRule(CRITICAL, 2 * MINUTE_S, "a file system of a node does not answer"),
    "FileSystemFull": AlertRule(WARNING, 10 * MINUTE_S, "a file system of a node has little space, or few inodes", _FULL),
    "FileSystemReadOnly": AlertRule(CRITICAL, 5 * MINUTE_S, "a file system of a node is read-only"),
    "MemoryErrors": AlertRule(CRITICAL, 0.0, "memory of a node or of a GPU is faulty"),
    "OutOfMemory": AlertRule(WARNING, 0.0, "a node kills processes for lack of memory: so many in an hour", _KILLS),
    "NetworkErrors": AlertRule(WARNING, 10 * MINUTE_S, "a network link of a node is faulty"),
    "GpuDriverHangs": AlertRule(CRITICAL, 2 * MINUTE_S, "the GPU driver of a node does not answer"),
    "BackupOld": AlertRule(CRITICAL, 15 * MINUTE_S, "no scheduled backup was made for so many intervals", _BACKUPS),
    "QueueStuck": AlertRule(CRITICAL, 10 * MINUTE_S, "jobs wait, and no plan says what for"),
    "PowerOverBudget": AlertRule(
        CRITICAL, 5 * MINUTE_S, "the nodes of a circuit take more than its budget, by their meters"
    ),
    "HeadDiskFull": AlertRule(WARNING, 10 * MINUTE_S, "the disk of the controller's database is full", _HEAD),
    "CertificateExpires": AlertRule(WARNING, 0.0, "the certificate of the gateway expires soon", _EXPIRES),
    "ControllerSilent": AlertRule(CRITICAL, 2 * MINUTE_S, "the controller runs and does nothing"),
    "JobWastes": AlertRule(
        INFO, 30 * MINUTE_S, "a job holds nodes or GPUs and does not use them; told to its user"
    ),
    "JobWillHitLimit": AlertRule(INFO, 0.0, "a job will reach its limit of time or memory; told to its user"),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSettings:
    """[alerts.rules.NAME]; None: as in `RULES`."""

    name: str
    enabled: bool = True
    for_s: float | None = None
    severity: str | None = None
    limit: float | None = None

    @property
    def changed(self) -> list[str]:
        """Return the keys that the configuration sets."""
        values = {"for": self.for_s, "severity": self.severity, "limit": self.limit}
        return ([] if self.enabled else ["enabled"]) + [key for key, value in values.items() if value is not None]


def limits_of(settings: Iterable[RuleSettings]) -> Mapping[str, float]:
    """Return the limit of each rule that has one."""
    limits = {name: rule.limit.value for name, rule in RULES.items() if rule.limit is not None}
    return limits | {one.name: one.limit for one in settings if one.limit is not None}


def limit_text(value: float, unit: str) -> str:
    """Return a limit for people and as hpcsched.toml takes it."""
    if unit != "s":
        return f"{value:g} {unit}".rstrip()
    size, letter = next(
        (size, letter)
        for size, letter in ((DAY_S, "d"), (HOUR_S, "h"), (MINUTE_S, "m"), (1.0, "s"))
        if value % size == 0 or size == 1.0
    )
    return f"{value / size:g}{letter}"
