"""Decide which alerts there are, and who is told of them when.

    (none) --condition--> pending --`for_s` over--> firing --clear for the hold--> resolved --old--> (none)
                             |                        ^--------`for_s` over again-------+
                             +--clear--> (none)

Pure: conditions, silences and the time go in, messages come out. The whole state is in the tables of an
`AlertBook`, which the child of the controller writes to disk in the same transaction as the messages.

Rules:
- A condition must be seen for `for_s`. Time without looks (the child was down, the clock was set) does
  not count, neither for it nor against it.
- A firing alert is resolved when it was clear for `HOLD_S`. If it fires again within `FLAP_S`, the hold
  is `LONG_HOLD_S`. So a node that is lost again and again gives at most four messages in any hour.
- Alerts of a rule are told together, to each receiver at most once in `GROUP_S`, and never while the
  message before waits for its delivery. What happens meanwhile is in the next one: nothing is lost.
- A silenced or inhibited alert is not told. If it still fires afterwards, it is told then.
- A firing alert is told again each `REPEAT_S`.

Sources: Alertmanager's grouping, inhibition and silences
(https://prometheus.io/docs/alerting/latest/alertmanager/); the hold against flapping is netdata's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import NamedTuple

from hpcsched.model.alerting import AlertSeverity

HOLD_S, LONG_HOLD_S = 900.0, 3600.0
FLAP_S = 6 * 3600.0
GROUP_S = 600.0
REPEAT_S = 86_400.0
KEPT_S = 86_400.0  # resolved alerts stay in the list
LONGEST_GAP_S = 120.0  # between two looks; a longer time does not count
MOST_ALERTS = 5_000
MOST_SILENCES = 1_000
MOST_FIRINGS = 16  # of an alert that are remembered


ORDER = tuple(AlertSeverity)


class AlertPhase(StrEnum):
    PENDING = "pending"
    FIRING = "firing"
    RESOLVED = "resolved"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertCondition:
    """Something that is wrong now. `labels` tell which one it is of its rule.

    With `uid` it is about a job of this user, who alone is told, once for each key of `told_once`.
    """

    rule: str
    labels: tuple[tuple[str, str], ...] = ()
    severity: AlertSeverity
    text: str
    remedy: str = ""
    for_s: float = 0.0
    uid: int | None = None
    user: str = ""
    account: str = ""
    mail_to: str = ""  # as the job says; "": to the user
    told_once: str = ""

    @property
    def fingerprint(self) -> str:
        """Return what names the alert: equal for the same rule and labels."""
        parts = (self.rule, *(part for label in sorted(self.labels) for part in label))
        return hashlib.blake2b("\0".join(parts).encode("utf-8", "replace"), digest_size=8).hexdigest()

    def label(self, name: str) -> str:
        """Return the value of a label; ``rule`` and ``user`` are labels too. "": it has none."""
        own = {"rule": self.rule, "user": self.user}
        return own[name] if name in own else next((value for key, value in self.labels if key == name), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A condition over time. `condition` is as it was seen last.

    `is_due`: it has fired and was not kept quiet. `quiet`: why nobody is told of it now.
    """

    condition: AlertCondition
    phase: AlertPhase
    since_s: float
    fired_at_s: float | None = None
    clear_since_s: float | None = None
    ended_at_s: float | None = None
    firings_s: tuple[float, ...] = ()  # of the last `FLAP_S`
    is_due: bool = False
    quiet: str = ""
    again_since_s: float | None = None  # of a resolved alert: the condition is back since then

    @property
    def fingerprint(self) -> str:
        return self.condition.fingerprint

    @property
    def shown_phase(self) -> AlertPhase:
        """Return the phase for people: a resolved alert whose condition is back is pending."""
        return self.phase if self.again_since_s is None else AlertPhase.PENDING


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """Alerts whose labels match all of `matchers` are not told until then.

    A matcher is a label and patterns as of file names, one of which must match.
    """

    id: int
    matchers: tuple[tuple[str, tuple[str, ...]], ...]
    from_s: float
    until_s: float
    by: str
    why: str = ""

    def matches(self, condition: AlertCondition) -> bool:
        """Return whether the silence is about this condition."""
        return all(
            any(fnmatchcase(condition.label(label), pattern) for pattern in patterns)
            for label, patterns in self.matchers
        )


class Inhibition(NamedTuple):
    """An alert of `source` keeps those of `targets` quiet that have the same `equal` labels.

    Without `targets` it is every other rule.
    """

    source: str
    targets: tuple[str, ...]
    equal: tuple[str, ...]


class Told(NamedTuple):
    """What a receiver was told last of an alert: of which firing, and when."""

    fired_at_s: float
    phase: AlertPhase
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscriber:
    """Who gets messages of which alerts."""

    name: str
    least: AlertSeverity = AlertSeverity.INFO
    resolved: bool = True  # whether ends are told


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """A message about alerts of one rule: those with news, and how many fire in all."""

    receiver: str
    rule: str
    at_s: float
    alerts: tuple[Alert, ...]
    firing: int
    is_reminder: bool = False


@dataclass(slots=True)
class AlertBook:
    """All alerts, and what was told of them. `told`: by receiver and fingerprint.

    `sent_s`: the last message by receiver and rule. `waiting`: messages that are not delivered.
    """

    alerts: dict[str, Alert] = field(default_factory=dict)
    told: dict[tuple[str, str], Told] = field(default_factory=dict)
    sent_s: dict[tuple[str, str], float] = field(default_factory=dict)
    waiting: set[tuple[str, str]] = field(default_factory=set)
    looked_at_s: float | None = None
    left_out: int = 0  # conditions of the last look above `MOST_ALERTS`

    # ----- a look

    def look(
        self,
        conditions: Iterable[AlertCondition],
        now_s: float,
        *,
        silences: Sequence[Silence] = (),
        quiet_nodes: Mapping[str, str] | None = None,
        inhibitions: Sequence[Inhibition] = (),
    ) -> None:
        """Take what is wrong now.

        `quiet_nodes`: why nobody is told of alerts of a node, for drains and maintenance.
        """
        self._skip_gap(now_s)
        seen = self._bounded(conditions)
        for fingerprint, condition in seen.items():
            self.alerts[fingerprint] = _seen(self.alerts.get(fingerprint), condition, now_s)
        others = {key: _not_seen(alert, now_s) for key, alert in self.alerts.items() if key not in seen}
        self.alerts |= {key: alert for key, alert in others.items() if alert is not None}
        gone = {key for key, alert in others.items() if alert is None}
        if gone:
            self.alerts = {key: alert for key, alert in self.alerts.items() if key not in gone}
            self.told = {key: told for key, told in self.told.items() if key[1] not in gone}
        self._keep_quiet(now_s, silences, quiet_nodes or {}, inhibitions)

    def _skip_gap(self, now_s: float) -> None:
        """Move all times that are measured by the time that passed without looks."""
        last_s, self.looked_at_s = self.looked_at_s, now_s
        if last_s is None:
            return
        gap_s = now_s - last_s
        lost_s = gap_s if gap_s < 0 or gap_s > LONGEST_GAP_S else 0.0
        if lost_s:
            self.alerts = {key: _moved(alert, lost_s) for key, alert in self.alerts.items()}
        if gap_s < 0:
            self.told = {key: told._replace(at_s=told.at_s + lost_s) for key, told in self.told.items()}
            self.sent_s = {key: at_s + lost_s for key, at_s in self.sent_s.items()}

    def _bounded(self, conditions: Iterable[AlertCondition]) -> dict[str, AlertCondition]:
        """Return the conditions by fingerprint: known ones first, then the most severe."""
        every = {condition.fingerprint: condition for condition in conditions}
        self.left_out = max(0, len(every) - MOST_ALERTS)
        if not self.left_out:
            return every
        order = sorted(every, key=lambda key: (key not in self.alerts, -ORDER.index(every[key].severity)))
        return {key: every[key] for key in order[:MOST_ALERTS]}

    def _keep_quiet(
        self,
        now_s: float,
        silences: Sequence[Silence],
        quiet_nodes: Mapping[str, str],
        inhibitions: Sequence[Inhibition],
    ) -> None:
        """Note why nobody is told of an alert, and which ones are due to be told."""
        active = [silence for silence in silences if silence.from_s <= now_s < silence.until_s]
        sources = _sources(self.alerts.values(), inhibitions)
        for fingerprint, alert in self.alerts.items():
            if alert.phase is AlertPhase.RESOLVED:
                continue
            quiet = _why_quiet(alert.condition, active, quiet_nodes, inhibitions, sources)
            is_due = alert.is_due or (alert.phase is AlertPhase.FIRING and not quiet)
            if (quiet, is_due) != (alert.quiet, alert.is_due):
                self.alerts[fingerprint] = replace(alert, quiet=quiet, is_due=is_due)

    # ----- messages

    def digests(
        self, subscribers: Sequence[Subscriber], now_s: float, *, is_quiet_hour: bool = False, most: int = 64
    ) -> list[Digest]:
        """Return at most so many messages that are due, and note them as sent.

        In quiet hours only critical alerts are told.
        """
        made: list[Digest] = []
        for subscriber in subscribers:
            groups: dict[str, list[Alert]] = {}
            for alert in self.alerts.values():
                if alert.condition.uid is None and self._is_for(subscriber, alert, is_quiet_hour=is_quiet_hour):
                    groups.setdefault(alert.condition.rule, []).append(alert)
            for rule, alerts in groups.items():
                if len(made) < most and (digest := self._digest(subscriber, rule, alerts, now_s)) is not None:
                    made.append(digest)
        return made

    def _is_for(self, subscriber: Subscriber, alert: Alert, *, is_quiet_hour: bool) -> bool:
        severity = alert.condition.severity
        if not alert.is_due or ORDER.index(severity) < ORDER.index(subscriber.least):
            return False
        return severity is AlertSeverity.CRITICAL or not is_quiet_hour

    def _digest(self, subscriber: Subscriber, rule: str, alerts: Sequence[Alert], now_s: float) -> Digest | None:
        key = (subscriber.name, rule)
        if key in self.waiting or now_s - self.sent_s.get(key, float("-inf")) < GROUP_S:
            return None
        firing = [alert for alert in alerts if alert.phase is AlertPhase.FIRING and not alert.quiet]
        news = [alert for alert in alerts if self._is_news(subscriber, alert)]
        told = [self.told[subscriber.name, alert.fingerprint].at_s for alert in firing if alert not in news]
        is_reminder = not news and bool(told) and now_s - max(told) >= REPEAT_S
        if not news and not is_reminder:
            return None
        chosen = firing if is_reminder else news
        for alert in chosen:
            self.told[subscriber.name, alert.fingerprint] = Told(alert.fired_at_s or now_s, alert.phase, now_s)
        self.sent_s[key] = now_s
        self.waiting.add(key)
        return Digest(
            receiver=subscriber.name,
            rule=rule,
            at_s=now_s,
            alerts=tuple(chosen),
            firing=len(firing),
            is_reminder=is_reminder,
        )

    def _is_news(self, subscriber: Subscriber, alert: Alert) -> bool:
        told = self.told.get((subscriber.name, alert.fingerprint))
        before = told.phase if told is not None and told.fired_at_s == alert.fired_at_s else None
        if alert.phase is AlertPhase.FIRING:
            return before is None and not alert.quiet
        return alert.phase is AlertPhase.RESOLVED and subscriber.resolved and before is not AlertPhase.RESOLVED

    def of_owners(self) -> list[Alert]:
        """Return the alerts about jobs of which their users are to be told."""
        return [
            alert
            for alert in self.alerts.values()
            if alert.condition.uid is not None and alert.phase is AlertPhase.FIRING and alert.is_due
        ]

    def delivered(self, receiver: str, rule: str) -> None:
        """Note that the last message of the rule has reached the receiver, or was given up."""
        self.waiting.discard((receiver, rule))

    def keep_only(self, receivers: Iterable[str]) -> None:
        """Forget what was told to receivers that are not there any more."""
        kept = set(receivers)
        self.told = {key: told for key, told in self.told.items() if key[0] in kept}
        self.sent_s = {key: at_s for key, at_s in self.sent_s.items() if key[0] in kept}
        self.waiting = {key for key in self.waiting if key[0] in kept}


def _seen(alert: Alert | None, condition: AlertCondition, now_s: float) -> Alert:
    """Return the alert after its condition was seen."""
    if alert is None:
        alert = Alert(condition=condition, phase=AlertPhase.PENDING, since_s=now_s)
    elif alert.condition != condition or alert.clear_since_s is not None:
        alert = replace(alert, condition=condition, clear_since_s=None)
    if alert.phase is AlertPhase.RESOLVED and alert.again_since_s is None:
        alert = replace(alert, again_since_s=now_s)
    since_s = alert.since_s if alert.again_since_s is None else alert.again_since_s
    if alert.phase is AlertPhase.FIRING or now_s - since_s < condition.for_s:
        return alert
    recent = tuple(at_s for at_s in alert.firings_s if now_s - at_s < FLAP_S)
    firings_s = (*recent, now_s)[-MOST_FIRINGS:]
    return Alert(condition=condition, phase=AlertPhase.FIRING, since_s=since_s, fired_at_s=now_s, firings_s=firings_s)


def _not_seen(alert: Alert, now_s: float) -> Alert | None:
    """Return the alert after its condition was not seen; None: it is forgotten."""
    match alert.phase:
        case AlertPhase.PENDING:
            return None
        case AlertPhase.FIRING:
            since_s = now_s if alert.clear_since_s is None else alert.clear_since_s
            hold_s = LONG_HOLD_S if len(alert.firings_s) > 1 else HOLD_S
            if now_s - since_s >= hold_s:
                return replace(alert, phase=AlertPhase.RESOLVED, clear_since_s=None, ended_at_s=now_s, quiet="")
            return alert if alert.clear_since_s is not None else replace(alert, clear_since_s=since_s)
        case AlertPhase.RESOLVED:
            if now_s - (alert.ended_at_s or now_s) >= KEPT_S:
                return None
            return alert if alert.again_since_s is None else replace(alert, again_since_s=None)


def _moved(alert: Alert, by_s: float) -> Alert:
    """Return the alert with the times that are measured moved, if they are not over."""
    if alert.phase is AlertPhase.PENDING:
        return replace(alert, since_s=alert.since_s + by_s)
    if alert.clear_since_s is not None:
        return replace(alert, clear_since_s=alert.clear_since_s + by_s)
    if alert.again_since_s is not None:
        return replace(alert, again_since_s=alert.again_since_s + by_s)
    return alert


def _sources(alerts: Iterable[Alert], inhibitions: Sequence[Inhibition]) -> set[tuple[str, tuple[str, ...]]]:
    """Return the inhibiting rules that have an alert now, each with the values of its labels.

    An alert that is pending inhibits too: its consequences come first otherwise.
    """
    rules = {inhibition.source: inhibition.equal for inhibition in inhibitions}
    return {
        (alert.condition.rule, tuple(map(alert.condition.label, rules[alert.condition.rule])))
        for alert in alerts
        if alert.shown_phase is not AlertPhase.RESOLVED and alert.condition.rule in rules
    }


def _why_quiet(
    condition: AlertCondition,
    silences: Sequence[Silence],
    quiet_nodes: Mapping[str, str],
    inhibitions: Sequence[Inhibition],
    sources: Collection[tuple[str, tuple[str, ...]]],
) -> str:
    """Return why nobody is told of this condition now; "": people are told."""
    for silence in silences:
        if silence.matches(condition):
            return f"silence {silence.id} by {silence.by}"
    if why := quiet_nodes.get(condition.label("node")):
        return why
    for inhibition in inhibitions:
        applies = condition.rule in inhibition.targets if inhibition.targets else condition.rule != inhibition.source
        values = tuple(map(condition.label, inhibition.equal))
        if applies and (inhibition.source, values) in sources:
            return f"because of {inhibition.source}"
    return ""
