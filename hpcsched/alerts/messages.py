"""Write alerts and job mail as text, as mail, and as JSON of chats and Alertmanager.

Pure. Nothing that a user, a node or a job says can change what a message is: texts are one line without
control characters (`hpcsched.alerts.rules.one_line`), lists are cut, mentions of chats do not work.

Sources: Alertmanager's webhook, version 4, and API v2
(https://prometheus.io/docs/alerting/latest/configuration/#webhook_config; /api/v2/openapi.yaml);
https://api.slack.com/reference/surfaces/formatting; https://docs.ntfy.sh/publish/#publish-as-json;
Matrix client-server API, m.room.message; RFC 5322, RFC 3834 (Auto-Submitted), RFC 2919 (List-Id).
"""

from __future__ import annotations

import email
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email import policy
from email.message import EmailMessage
from email.utils import format_datetime
from typing import Any
from urllib.parse import urlsplit

from hpcsched.alerts.jobmail import JobMail
from hpcsched.alerts.rules import one_line
from hpcsched.alerts.state import Alert, AlertPhase, Digest
from hpcsched.config.keys import MAIL_ADDRESS
from hpcsched.config.load import AlertSettings
from hpcsched.listing.text import date_text
from hpcsched.model.alerting import AlertSeverity

Json = dict[str, Any]

MOST_SHOWN = 20  # alerts in a text
MOST_IN_PAYLOAD = 100
MOST_LINES = 120
MAX_SUBJECT = 200
MAX_HEADER = 500  # of RFC 5322 998
MOST_ADDRESSES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """A message to one receiver. `id` stays the same however often it is sent.

    `thread`: equal for messages about the same thing. `to`: addresses, of mail. `payload`: JSON of Alertmanager.
    """

    id: str
    at_s: float
    subject: str
    lines: tuple[str, ...]
    thread: str = ""
    to: tuple[str, ...] = ()
    severity: AlertSeverity = AlertSeverity.INFO
    is_end: bool = False  # what it tells is over
    payload: str = ""
    html: str = ""  # of mail: the same as a page


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """Who sends: the cluster, the address of its pages (""), and the sender's mail address."""

    cluster: str
    url: str = ""
    mail_from: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertServiceSettings:
    """What the child of the controller needs to know.

    `database`: its path. `certificate`: the gateway's; "": none.
    """

    alerts: AlertSettings
    database: str
    cluster: str
    url: str = ""
    certificate: str = ""
    host: str = "localhost"

    @property
    def sender(self) -> Sender:
        mail_from = self.alerts.mail_from or f"hpcsched@{self.host}"
        return Sender(cluster=self.cluster, url=self.url, mail_from=mail_from)


# ----- alerts in words


def alert_line(alert: Alert) -> str:
    """Return an alert in one line: which, since when, and what is wrong."""
    condition = alert.condition
    where = ", ".join(value for _, value in condition.labels)
    when = f"{date_text(alert.ended_at_s)} over" if alert.phase is AlertPhase.RESOLVED else date_text(alert.since_s)
    return f"{condition.rule}{f' {where}' if where else ''} [{condition.severity.value}] {when}: {condition.text}"


def _names(alerts: Iterable[Alert]) -> str:
    named = [next((value for _, value in alert.condition.labels), "") for alert in alerts]
    shown = ", ".join(dict.fromkeys(name for name in named[:5] if name))
    return f" {shown}{' ...' if len(named) > 5 else ''}" if shown else ""


def letter_of(digest: Digest, sender: Sender) -> Letter:
    """Return the message of a digest, for receivers of any kind."""
    firing = [alert for alert in digest.alerts if alert.phase is AlertPhase.FIRING]
    over = [alert for alert in digest.alerts if alert.phase is AlertPhase.RESOLVED]
    counts = Counter(alert.phase.value for alert in digest.alerts)
    words = ", ".join(f"{count} {phase}" for phase, count in counts.items())
    again = "still " if digest.is_reminder else ""
    subject = f"[{sender.cluster}] {again}{words}: {digest.rule}{_names(firing or over)}"
    lines = [line for alert in digest.alerts[:MOST_SHOWN] for line in _lines_of(alert)]
    if len(digest.alerts) > MOST_SHOWN:
        lines.append(f"... and {len(digest.alerts) - MOST_SHOWN} more: hctl alerts")
    lines += [
        "",
        f"{digest.firing} alerts of {digest.rule} fire now. hctl silence rule={digest.rule} 2h WHY silences them.",
    ]
    severities = [alert.condition.severity for alert in digest.alerts]
    return Letter(
        id=f"{digest.rule}.{digest.at_s:.0f}",
        at_s=digest.at_s,
        subject=one_line(subject, MAX_SUBJECT),
        lines=tuple(lines),
        thread=digest.rule,
        severity=max(severities, key=list(AlertSeverity).index),
        is_end=not firing,
    )


def _lines_of(alert: Alert) -> list[str]:
    line = alert_line(alert)
    is_over = alert.phase is AlertPhase.RESOLVED
    return [line] if is_over or not alert.condition.remedy else [line, f"    -> {alert.condition.remedy}"]


def letter_of_job(mail: JobMail, sender: Sender, to: tuple[str, ...]) -> Letter:
    """Return the message of a job's mail."""
    return Letter(
        id=mail.key,
        at_s=mail.at_s,
        subject=one_line(f"{sender.cluster} {mail.subject}", MAX_SUBJECT),
        lines=tuple(one_line(line, 1000) for line in mail.lines[:MOST_LINES]),
        thread=f"job{mail.job}",
        to=to,
        is_end=mail.is_end,
    )


def letter_to_owner(alert: Alert, sender: Sender, now_s: float, to: tuple[str, ...]) -> Letter:
    """Return what the user of a job is told of it, once."""
    condition = alert.condition
    job = condition.label("job")
    return Letter(
        id=condition.told_once,
        at_s=now_s,
        subject=one_line(f"{sender.cluster} Job_id={job} {condition.rule}: {condition.text}", MAX_SUBJECT),
        lines=(condition.text, f"-> {condition.remedy}", "", f"hwhy --slow {job} shows more. This is told once."),
        thread=f"job{job}",
        to=to,
        severity=condition.severity,
    )


def letter_of_test(receiver: str, sender: Sender, now_s: float) -> Letter:
    """Return the message of `hctl alerts test`."""
    text = f"hctl alerts test {receiver}: messages of cluster {sender.cluster} reach this receiver."
    return Letter(id=f"test.{now_s:.3f}", at_s=now_s, subject=f"[{sender.cluster}] test", lines=(text,), thread="test")


# ----- mail


def addresses_of(text: str, user: str, domain: str, allowed: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses of a job's ``--mail-user``; none of it that is not allowed.

    A name gets the domain. An address must be of that domain, or of one in `allowed` (``*``: of any).
    """
    found = []
    for word in (text or user).split(",")[:MOST_ADDRESSES]:
        address = word.strip()
        if not MAIL_ADDRESS.match(address):
            continue
        name, at, own = address.partition("@")
        own = own.lower()
        if not at:
            found.append(f"{name}@{domain}" if domain else name)
        elif own == domain.lower() or "*" in allowed or own in (one.lower() for one in allowed):
            found.append(address)
    return tuple(dict.fromkeys(found))


def mail_of(letter: Letter, sender: Sender, to: Sequence[str]) -> EmailMessage:
    """Return the letter as a mail. A thread has the mails about the same thing."""
    host = sender.mail_from.partition("@")[2] or "localhost"
    cluster = re.sub(r"[^A-Za-z0-9.-]", "-", sender.cluster)
    subject = one_line(letter.subject, MAX_SUBJECT)
    # A folded subject begins with a blank; only that of encoded words must be folded.
    message = EmailMessage(policy.SMTP.clone(max_line_length=MAX_HEADER) if subject.isascii() else policy.SMTP)
    message["From"] = sender.mail_from
    message["To"] = ", ".join(to)
    message["Subject"] = subject
    message["Date"] = format_datetime(datetime.fromtimestamp(letter.at_s, UTC))
    message["Message-ID"] = f"<{_id_part(letter.id)}.{cluster}@{host}>"
    message["References"] = f"<{_id_part(letter.thread)}.{cluster}@{host}>"
    message["List-Id"] = f"<alerts.{cluster}.{host}>"
    message["Auto-Submitted"] = "auto-generated"
    if letter.severity is AlertSeverity.CRITICAL:
        message["Importance"] = "high"
    message.set_content("\n".join(letter.lines) + "\n")
    if letter.html:
        message.add_alternative(letter.html, subtype="html")
    return message


def letter_of_report(mail: str, name: str, now_s: float, to: Sequence[str]) -> Letter:
    """Return the letter with a report that hreport has written as a mail."""
    message = email.message_from_string(mail, policy=policy.default)
    text, page = message.get_body(("plain",)), message.get_body(("html",))
    if text is None or page is None:
        raise ValueError("it is not a mail with a text and a page")
    return Letter(
        id=name,
        at_s=now_s,
        subject=str(message["Subject"]),
        lines=tuple(text.get_content().rstrip("\n").split("\n")),
        thread="report",
        to=tuple(to),
        html=page.get_content(),
    )


def _id_part(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]", "-", text)[:120]


# ----- Alertmanager


def moment_text(at_s: float | None) -> str:
    """Return a time as JSON has it (RFC 3339); that of Go's zero time for None."""
    if at_s is None:
        return "0001-01-01T00:00:00Z"
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def labels_of(alert: Alert, cluster: str) -> dict[str, str]:
    """Return the labels of an alert as Prometheus has them."""
    condition = alert.condition
    return {
        "alertname": condition.rule,
        "severity": condition.severity.value,
        "cluster": cluster,
        **dict(condition.labels),
    }


def _annotations(alert: Alert) -> dict[str, str]:
    found = {"summary": alert.condition.text, "remedy": alert.condition.remedy}
    return {name: text for name, text in found.items() if text}


def webhook_payload(digest: Digest, sender: Sender) -> Json:
    """Return the body that Alertmanager sends to a webhook, version 4."""
    shown = digest.alerts[:MOST_IN_PAYLOAD]
    every = [labels_of(alert, sender.cluster) for alert in shown]
    common = {key: value for key, value in every[0].items() if all(one.get(key) == value for one in every)}
    return {
        "version": "4",
        "groupKey": f'{{}}:{{alertname="{digest.rule}"}}',
        "truncatedAlerts": len(digest.alerts) - len(shown),
        "status": "firing" if any(alert.phase is AlertPhase.FIRING for alert in shown) else "resolved",
        "receiver": digest.receiver,
        "groupLabels": {"alertname": digest.rule},
        "commonLabels": common,
        "commonAnnotations": {},
        "externalURL": sender.url,
        "alerts": [
            {
                "status": "firing" if alert.phase is AlertPhase.FIRING else "resolved",
                "labels": labels,
                "annotations": _annotations(alert),
                "startsAt": moment_text(alert.fired_at_s),
                "endsAt": moment_text(alert.ended_at_s),
                "generatorURL": sender.url,
                "fingerprint": alert.fingerprint,
            }
            for alert, labels in zip(shown, every, strict=True)
        ],
    }


def alertmanager_alerts(alerts: Sequence[Alert], sender: Sender, now_s: float, lasts_s: float) -> list[Json]:
    """Return the body for the API of an Alertmanager: all alerts that fire, or are over.

    One that fires ends by itself after `lasts_s`, if it is not posted again: nobody says so if the head is dead.
    """
    return [
        {
            "labels": labels_of(alert, sender.cluster),
            "annotations": _annotations(alert),
            "startsAt": moment_text(alert.fired_at_s),
            "endsAt": moment_text(now_s + lasts_s if alert.phase is AlertPhase.FIRING else alert.ended_at_s),
            **({"generatorURL": sender.url} if sender.url else {}),
        }
        for alert in alerts
    ]


def test_payload(receiver: str, sender: Sender, now_s: float) -> Json:
    """Return a webhook's body for `hctl alerts test`: of no alert that exists."""
    labels = {"alertname": "Test", "severity": AlertSeverity.INFO.value, "cluster": sender.cluster}
    one = {
        "status": "firing",
        "labels": labels,
        "annotations": {"summary": "hctl alerts test"},
        "startsAt": moment_text(now_s),
        "endsAt": moment_text(None),
        "generatorURL": sender.url,
        "fingerprint": "0" * 16,
    }
    head = {"version": "4", "groupKey": "{}:{}", "truncatedAlerts": 0, "status": "firing", "receiver": receiver}
    same = {"groupLabels": {}, "commonLabels": labels, "commonAnnotations": {}, "externalURL": sender.url}
    return head | same | {"alerts": [one]}


# ----- chats


_MARKS = {AlertSeverity.CRITICAL: "[!!]", AlertSeverity.WARNING: "[!]", AlertSeverity.INFO: "[i]"}
_PRIORITIES = {AlertSeverity.CRITICAL: 5, AlertSeverity.WARNING: 4, AlertSeverity.INFO: 3}
_TAGS = {
    AlertSeverity.CRITICAL: "rotating_light",
    AlertSeverity.WARNING: "warning",
    AlertSeverity.INFO: "information_source",
}


def chat_text(letter: Letter) -> str:
    """Return the letter as the text of a chat, in which no word calls anybody."""
    mark = "[ok]" if letter.is_end else _MARKS[letter.severity]
    text = "\n".join((f"{mark} {letter.subject}", *letter.lines))
    return text.replace("@", "@\u200b")  # a mention ends at a blank without width


def slack_payload(letter: Letter) -> Json:
    """Return the body for an incoming webhook of Slack."""
    escaped = chat_text(letter).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return {"text": escaped, "mrkdwn": False}


def mattermost_payload(letter: Letter) -> Json:
    """Return the body for an incoming webhook of Mattermost: a block without formats."""
    return {"text": "```\n" + chat_text(letter).replace("```", "'''") + "\n```"}


def matrix_payload(letter: Letter) -> Json:
    """Return the event for a room of Matrix."""
    return {"msgtype": "m.notice", "body": chat_text(letter)}


def ntfy_payload(letter: Letter, address: str) -> Json:
    """Return the body for ntfy; the topic is the path of the address."""
    severity = AlertSeverity.INFO if letter.is_end else letter.severity
    return {
        "topic": urlsplit(address).path.strip("/"),
        "title": letter.subject,
        "message": "\n".join(letter.lines)[:3500],
        "priority": _PRIORITIES[severity],
        "tags": ["white_check_mark" if letter.is_end else _TAGS[severity]],
    }
