"""Tell alerts and job mail, as a child of the controller, with its state in `alerts.db`.

The controller asks over a socket (`hpcsched.child`): it says what is wrong now and which job mail is due,
and gets an answer when that is on disk. The process ends when the socket is closed.

Rules:
- The state of the alerts, what was told, and the letters are written in one transaction. A kill at any
  moment loses no letter. A letter is deleted when its receiver has it; a kill between these two sends
  it again, with the same Message-ID.
- A letter is tried again after `RETRIES_S`, for `LONGEST_S`. Each receiver has a thread of its own.
- Job mail is known by its key, so the controller may give it again at any time.
- A user with more than `MAILS_OF_USER` mails in an hour gets further ones together.

A database that cannot be written now (disk full, locked) is tried again; the controller keeps its mail
until then. A damaged one is put aside. One of a newer version stays as it is, and nothing is told.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import select
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hpcsched.alerts import messages, rules, sending
from hpcsched.alerts.jobmail import JobMail
from hpcsched.alerts.messages import AlertServiceSettings, Letter
from hpcsched.alerts.rules import WatchedHead
from hpcsched.alerts.sending import Courier, SendOutcome
from hpcsched.alerts.state import (
    KEPT_S,
    MOST_SILENCES,
    Alert,
    AlertBook,
    AlertCondition,
    AlertPhase,
    Digest,
    Silence,
    Subscriber,
    Told,
)
from hpcsched.child import ControllerSocket, main_of
from hpcsched.config.load import MAIL_TO, ReceiverSettings
from hpcsched.errors import NotFoundError, RequestError, UnavailableError
from hpcsched.model.alerting import AlertSeverity, limits_of
from hpcsched.model.codec import value_from_json, value_to_json
from hpcsched.store.alerts import LONGEST_PAUSE_S, AlertDatabase, NewLetter, WaitingLetter
from hpcsched.store.engine import OtherDatabaseError, is_damage

Json = dict[str, Any]

RETRIES_S = (60.0, 300.0, LONGEST_PAUSE_S)  # the last one again and again
LONGEST_S = 3 * 86_400.0  # a letter is tried
MAIL_KEPT_S = 8 * 86_400.0  # keys of job mail
MAIL_PAST_S = 2 * 86_400.0  # older job mail is not sent
MAILS_OF_USER, HOUR_S = 20, 3600.0
COLLECT_S = 600.0
MOST_LETTERS_OF_USER = 200
MOST_LETTERS = 20_000
MOST_REFUSED = 1_000  # addresses that are not allowed, of which the log says something
MOST_NEWS, NEWS_AT_ONCE = 10_000, 200  # alerts that fired or ended, for the controller
MOST_LINES = 100  # of mails that are sent together
SYNC_S, LASTS_S = 60.0, 600.0  # alerts are posted to an Alertmanager, and last there without that
WATCHDOG_S = 300.0
HEAD_S = 60.0  # between looks at the disk and the certificate
RETRY_S = 15.0
LOOK_S = 1.0
MOST_LOOK_S = 60.0  # between two judgements, whether the controller says something or not
END_S = 4.0  # letters on their way at the end
LOCK_S = 6.0  # longer than that
JOBS = "(users)"  # the courier and the receiver of mail to users; no receiver of the configuration has this name
REPORT = "(report)"  # what its letter is about, in the place of a user
WATCHDOG = "(watchdog)"
LOCK_FILE = "alerts.lock"
MAX_CERTIFICATE_BYTES = 1 << 20
Say = Callable[[str, str], None]


@dataclass(slots=True)
class ReceiverState:
    """How sending to a receiver goes."""

    why: str = ""  # the last try failed
    failing_since_s: float | None = None
    sent_s: float | None = None
    sent: int = 0


class AlertKeeper:
    """The alerts and letters, in memory and in the database. Nothing here sends or waits.

    Its methods raise sqlite3.Error, OSError or OtherDatabaseError if the database cannot be used.
    """

    def __init__(self, settings: AlertServiceSettings, say: Say) -> None:
        self.settings = settings
        self._say = say
        self._database: AlertDatabase | None = None
        self._lock: int | None = None
        self._saved: dict[str, dict[str, object]] = {}
        self.book = AlertBook()
        self.silences: dict[int, Silence] = {}
        self.began_s = 0.0  # of the database: older job mail is not sent
        self.states: dict[str, ReceiverState] = {}
        self.dropped = 0  # letters
        self.news: dict[str, Json] = {}  # alerts that fired or ended, until the controller has them
        self._refused: set[str] = set()  # addresses that are not allowed, which was said

    # ----- the database

    def database(self, now_s: float) -> AlertDatabase:
        """Return the database, which this process alone writes."""
        if self._database is None:
            path = Path(self.settings.database)
            if self._lock is None:
                self._lock = _locked(path.with_name(LOCK_FILE))
            opened = AlertDatabase(path)
            try:
                self._load(opened, now_s)
            except BaseException:
                opened.close()
                raise
            self._database = opened
        return self._database

    def _load(self, database: AlertDatabase, now_s: float) -> None:
        """Read the state that an earlier process has left."""
        book = AlertBook()
        read = {kind: database.load(kind) for kind in ("alert", "told", "sent", "silence", "look")}
        book.alerts = {key: value_from_json(Alert, json.loads(data)) for key, (_, data) in read["alert"].items()}
        for key, (_, data) in read["told"].items():
            fired_at_s, phase, at_s = json.loads(data)
            book.told[_pair(key)] = Told(fired_at_s, AlertPhase(phase), at_s)
        book.sent_s = {_pair(key): at_s for key, (at_s, _) in read["sent"].items()}
        book.waiting = {key for key in database.waiting() if key[0] != JOBS}
        book.looked_at_s = next((at_s for at_s, _ in read["look"].values()), None)
        self.book = book
        self.news = {key: json.loads(data) for key, (_, data) in database.load("news").items()}
        silences = [value_from_json(Silence, json.loads(data)) for _, data in read["silence"].values()]
        self.silences = {one.id: one for one in silences}
        self._saved = {kind: dict.fromkeys(read[kind]) for kind in ("alert", "told", "sent", "silence")}
        begun = database.load("begun")
        self.began_s = begun["database"][0] if begun else now_s
        if not begun:
            with database.change():
                database.put("begun", [("database", now_s, "")])

    def put_aside(self) -> str:
        """Rename a damaged database; return what was done in words. An earlier one is replaced."""
        self.close()
        path = Path(self.settings.database)
        aside = path.with_name(path.name + ".damaged")
        try:
            path.replace(aside)
            for end in ("-wal", "-shm"):
                path.with_name(path.name + end).unlink(missing_ok=True)
        except OSError as error:
            return f"it could not be put aside: {error.strerror}"
        return f"it is now {aside.name}, and a new one is begun"

    def close(self) -> None:
        """Close the database."""
        if self._database is not None:
            with contextlib.suppress(sqlite3.Error):
                self._database.close()
            self._database = None

    def _save(self, database: AlertDatabase, now_s: float) -> None:
        """Write what has changed of the state, in a transaction."""
        book = self.book
        self._save_kind(database, "alert", book.alerts, now_s, value_to_json)
        self._save_kind(database, "told", {"\t".join(key): told for key, told in book.told.items()}, now_s, list)
        self._save_kind(
            database, "silence", {str(key): one for key, one in self.silences.items()}, now_s, value_to_json
        )
        sent = {"\t".join(key): at_s for key, at_s in book.sent_s.items()}
        known = self._saved["sent"]
        database.put("sent", [(key, at_s, "") for key, at_s in sent.items() if known.get(key) != at_s])
        database.drop("sent", known.keys() - sent.keys())
        self._saved["sent"] = dict(sent)
        database.put("look", [("last", now_s, "")])

    def _save_kind(
        self,
        database: AlertDatabase,
        kind: str,
        values: Mapping[str, object],
        now_s: float,
        as_json: Callable[[Any], Any],
    ) -> None:
        known = self._saved[kind]
        changed = [
            (key, now_s, json.dumps(as_json(value))) for key, value in values.items() if known.get(key) is not value
        ]
        database.put(kind, changed)
        database.drop(kind, known.keys() - values.keys())
        self._saved[kind] = dict(values)

    @contextlib.contextmanager
    def _change(self, now_s: float) -> Iterator[AlertDatabase]:
        """Run the block and write the state in one transaction; if it fails, read the state again."""
        database = self.database(now_s)
        try:
            with database.change():
                yield database
                self._save(database, now_s)
        except BaseException:
            self.close()
            raise

    # ----- what the controller says

    def look(
        self,
        conditions: Sequence[AlertCondition],
        quiet_nodes: Mapping[str, str],
        now_s: float,
        known_news: Iterable[str] = (),
    ) -> None:
        """Take what is wrong now, and keep the letters that are due.

        `known_news`: the controller has these.
        """
        alerts = self.settings.alerts
        with self._change(now_s) as database:
            before = dict(self.book.alerts)
            database.drop("news", [key for key in known_news if self.news.pop(key, None) is not None])
            self.silences = {number: one for number, one in self.silences.items() if one.until_s > now_s - KEPT_S}
            self.book.keep_only(one.name for one in alerts.receivers)
            self.book.look(
                rules.adjusted(conditions, alerts.rules),
                now_s,
                silences=list(self.silences.values()),
                quiet_nodes=quiet_nodes,
                inhibitions=rules.INHIBITIONS,
            )
            self._keep_news(database, before, now_s)
            for digest in self.book.digests(
                self._subscribers(), now_s, is_quiet_hour=is_quiet_hour(alerts.quiet, now_s)
            ):
                database.add(self._new_letter(digest, now_s))
            if alerts.tell_users and alerts.smtp:
                for alert in self.book.of_owners():
                    self._tell_owner(database, alert, now_s)

    def _keep_news(self, database: AlertDatabase, before: Mapping[str, Alert], now_s: float) -> None:
        """Keep for the controller which alerts have fired or ended in this look."""
        for key, alert in self.book.alerts.items():
            known = before.get(key)
            if known is alert or alert.phase is AlertPhase.PENDING:
                continue
            fired = alert.phase is AlertPhase.FIRING and (known is None or known.fired_at_s != alert.fired_at_s)
            ended = alert.phase is AlertPhase.RESOLVED and known is not None and known.phase is AlertPhase.FIRING
            number = f"{key}.{alert.phase.value}.{alert.fired_at_s}"
            if (fired or ended) and len(self.news) < MOST_NEWS:
                self.news[number] = _news_of(alert, now_s)
                database.put("news", [(number, now_s, json.dumps(self.news[number]))])

    def _subscribers(self) -> list[Subscriber]:
        return [
            Subscriber(name=one.name, least=AlertSeverity(one.least), resolved=one.resolved)
            for one in self.settings.alerts.receivers
            if one.kind != "alertmanager"
        ]

    def _new_letter(self, digest: Digest, now_s: float) -> NewLetter:
        letter = messages.letter_of(digest, self.settings.sender)
        payload = messages.webhook_payload(digest, self.settings.sender)
        return NewLetter(
            digest.receiver, digest.rule, now_s, now_s, _letter_text(replace(letter, payload=json.dumps(payload)))
        )

    def _tell_owner(self, database: AlertDatabase, alert: Alert, now_s: float) -> None:
        condition = alert.condition
        key = condition.told_once
        if database.has("mail", key):
            return
        to = self._addresses(condition.mail_to, condition.user)
        database.put("mail", [(key, now_s, "")])
        if to:
            letter = messages.letter_to_owner(alert, self.settings.sender, now_s, to)
            self._keep_mail(database, letter, condition.user, now_s)

    def _addresses(self, mail_to: str, user: str) -> tuple[str, ...]:
        """Return where mail of a job goes; say once that an address is not allowed."""
        alerts = self.settings.alerts
        found = messages.addresses_of(mail_to, user, alerts.mail_domain, alerts.mail_domains)
        if not found and alerts.smtp and mail_to not in self._refused and len(self._refused) < MOST_REFUSED:
            self._refused.add(mail_to)
            self._say("warning", f"no mail to {mail_to[:80]!r} of user {user}: see mail_domains of [alerts]")
        return found

    def take_mail(self, mails: Sequence[JobMail], now_s: float) -> None:
        """Keep the letters of job mail that is not known yet."""
        self.began_s = min(self.began_s, now_s)  # the clock may have been set back
        with self._change(now_s) as database:
            for mail in mails:
                if mail.at_s < max(self.began_s, now_s - MAIL_PAST_S) or database.has("mail", mail.key):
                    continue
                database.put("mail", [(mail.key, now_s, "")])
                to = self._addresses(mail.mail_to, mail.user)
                if to and self.settings.alerts.smtp:
                    letter = messages.letter_of_job(mail, self.settings.sender, to)
                    self._keep_mail(database, letter, mail.user, now_s)

    def take_report(self, question: Json, now_s: float) -> Json:
        """Keep the letter of a report; without one, say whether it is due. Each is sent once."""
        key = str(question["key"])
        database = self.database(now_s)
        is_due = question["ended_at_s"] > self.began_s and not database.has("report", key)
        if is_due and "letter" in question:
            letter = value_from_json(Letter, question["letter"])
            with self._change(now_s) as database:
                database.put("report", [(key, now_s, "")])
                database.add(NewLetter(JOBS, REPORT, now_s, now_s, _letter_text(letter)))
        return {"due": is_due}

    def _keep_mail(self, database: AlertDatabase, letter: Letter, user: str, now_s: float) -> None:
        """Keep a letter to a user; one of many is put together with others."""
        times_s = [at_s for at_s in self._mailed(database, user) if 0 <= now_s - at_s < HOUR_S]
        if len(times_s) < MAILS_OF_USER:
            database.put("mailed", [(user, now_s, json.dumps([*times_s, now_s]))])
            database.add(NewLetter(JOBS, user, now_s, now_s, _letter_text(letter)))
            return
        known = database.open_letter(JOBS, user)
        if known is not None:
            database.fill(known.id, _letter_text(_with_more(_letter_from(known.data), letter)))
            return
        waiting = database.waiting()
        if waiting.get((JOBS, user), 0) >= MOST_LETTERS_OF_USER or sum(waiting.values()) >= MOST_LETTERS:
            self.dropped += 1
            return
        together = replace(
            letter, id=f"many.{user}.{now_s:.0f}", thread=f"many.{user}", lines=(letter.subject,), is_end=False
        )
        together = replace(together, subject=f"{self.settings.cluster} several messages about your jobs")
        database.add(NewLetter(JOBS, user, now_s, now_s + COLLECT_S, _letter_text(together), open=1))

    def _mailed(self, database: AlertDatabase, user: str) -> list[float]:
        found = database.load_one("mailed", user)
        return [float(at_s) for at_s in json.loads(found)] if found else []  # float: of our own database

    def tidy(self, now_s: float) -> None:
        """Forget what was told long ago, and letters to receivers that are gone."""
        names = {JOBS, *(one.name for one in self.settings.alerts.receivers)}
        with self._change(now_s) as database:
            database.drop_old("mail", now_s - MAIL_KEPT_S)
            database.drop_old("mailed", now_s - HOUR_S)
            for receiver in {receiver for receiver, _ in database.waiting()} - names:
                database.drop_letters_to(receiver)
                self._say(
                    "warning", f"deleted the messages for {receiver}, which is not in [alerts.receivers] any more"
                )

    # ----- silences

    def silence(self, asked: Json, now_s: float) -> Json:
        """Make a silence. `asked` has its matchers, its end, who made it and why."""
        if len(self.silences) >= MOST_SILENCES:
            raise RequestError(f"cannot silence: there are {MOST_SILENCES} silences already; end some")
        made = Silence(
            id=max(self.silences, default=0) + 1,
            matchers=tuple((str(label), tuple(map(str, patterns))) for label, patterns in asked["matchers"]),
            from_s=now_s,
            until_s=float(asked["until_s"]),  # float: the controller has checked it
            by=asked["by"],
            why=asked["why"],
        )
        with self._change(now_s):
            self.silences[made.id] = made
        return {"id": made.id, "alerts": sum(made.matches(alert.condition) for alert in self.book.alerts.values())}

    def end_silence(self, number: int, now_s: float) -> Json:
        """End a silence. Raises NotFoundError."""
        known = self.silences.get(number)
        if known is None or known.until_s <= now_s:
            raise NotFoundError(f"cannot end silence {number}: there is no such one; see hctl silence")
        with self._change(now_s):
            self.silences[number] = replace(known, until_s=now_s)
        return {"id": number}

    # ----- letters

    def next_letter(self, receiver: str, now_s: float) -> WaitingLetter | None:
        """Return the first letter to a receiver that is due; nothing is added to it any more."""
        database = self.database(now_s)
        found = database.next_letter(receiver, now_s)
        if found is not None and found.open:
            with database.change():
                database.shut(found.id)
        return found

    def settle(self, sent: WaitingLetter, outcome: SendOutcome, now_s: float) -> None:
        """Note what became of a letter: it is delivered, given up, or tried again later."""
        state = self.states.setdefault(sent.receiver, ReceiverState())
        is_old = now_s - sent.at_s > LONGEST_S
        with self._change(now_s) as database:
            if outcome.why and not is_old and not (outcome.is_final and sent.receiver == JOBS):
                database.put_off(sent.id, now_s + RETRIES_S[min(sent.tries, len(RETRIES_S) - 1)])
            else:
                database.done(sent.id)
                self.book.delivered(sent.receiver, sent.about)
        if outcome.why:
            gives_up = is_old or (outcome.is_final and sent.receiver == JOBS)
            self.dropped += gives_up
            if state.why != outcome.why or gives_up:
                kept = "it is given up" if gives_up else "it is tried again"
                self._say("warning", f"cannot send a message to {sent.receiver}: {outcome.why}; {kept}")
            state.why, state.failing_since_s = outcome.why, state.failing_since_s or now_s
            return
        if state.why:
            self._say("info", f"messages reach {sent.receiver} again")
        state.why, state.failing_since_s, state.sent_s = "", None, now_s
        state.sent += 1

    # ----- answers

    def view(self, now_s: float) -> Json:
        """Return alerts, silences and receivers, for `hctl alerts`."""
        waiting: dict[str, int] = {}
        for (receiver, _), count in self.database(now_s).waiting().items():
            waiting[receiver] = waiting.get(receiver, 0) + count
        names = {one.name: one.kind for one in self.settings.alerts.receivers}
        if self.settings.alerts.smtp:
            names[JOBS] = "mail"
        return {
            "alerts": [_alert_view(alert) for alert in self.book.alerts.values()],
            "left_out": self.book.left_out,
            "silences": [value_to_json(one) for one in self.silences.values() if one.until_s > now_s],
            "receivers": [
                {
                    "name": name,
                    "kind": kind,
                    "waiting": waiting.get(name, 0),
                    **_state_view(self.states.get(name, ReceiverState())),
                }
                for name, kind in names.items()
            ],
            "dropped": self.dropped,
        }


def _locked(path: Path) -> int:
    """Return the locked file; wait a little for the child of a controller that was killed.

    Raises BlockingIOError if another process keeps it.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until_s = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except OSError:
            if time.monotonic() >= until_s:
                os.close(lock)
                raise
        time.sleep(0.1)


def _state_view(state: ReceiverState) -> Json:
    return {"why": state.why, "failing_since_s": state.failing_since_s, "sent_s": state.sent_s, "sent": state.sent}


def _news_of(alert: Alert, now_s: float) -> Json:
    """Return what the controller needs to record that an alert has fired or ended."""
    condition = alert.condition
    return {
        "kind": "AlertFired" if alert.phase is AlertPhase.FIRING else "AlertResolved",
        "name": condition.rule,
        "at_s": now_s,
        "text": condition.text,
        "labels": dict(condition.labels),
        "severity": condition.severity.value,
        "uid": condition.uid,
        "user": condition.user,
        "account": condition.account,
    }


def _alert_view(alert: Alert) -> Json:
    condition = alert.condition
    return {
        "rule": condition.rule,
        "labels": dict(condition.labels),
        "fingerprint": alert.fingerprint,
        "severity": condition.severity.value,
        "phase": alert.shown_phase.value,
        "since_s": alert.since_s if alert.again_since_s is None else alert.again_since_s,
        "fired_at_s": alert.fired_at_s,
        "ended_at_s": alert.ended_at_s,
        "text": condition.text,
        "remedy": condition.remedy,
        "quiet": alert.quiet,
        "uid": condition.uid,
        "user": condition.user,
        "account": condition.account,
    }


def _pair(key: str) -> tuple[str, str]:
    first, _, second = key.partition("\t")
    return first, second


def _letter_text(letter: Letter) -> str:
    return json.dumps(value_to_json(letter))


def _letter_from(text: str) -> Letter:
    return value_from_json(Letter, json.loads(text))


def _with_more(letter: Letter, other: Letter) -> Letter:
    """Return a letter with one more line; those that do not fit are counted in the last line."""
    lines = letter.lines
    if len(lines) < MOST_LINES:
        return replace(letter, lines=(*lines, other.subject))
    last = lines[-1]
    left_out = int(last.split()[1]) if len(lines) > MOST_LINES else 0  # int: our own line, below
    return replace(letter, lines=(*lines[:MOST_LINES], f"and {left_out + 1} more: hacct"))


def is_quiet_hour(hours: str, now_s: float) -> bool:
    """Return whether the time is in hours as ``22:00-07:00``, of the local time; "" has none."""
    begin, _, end = hours.partition("-")
    now = time.strftime("%H:%M", time.localtime(now_s))
    if begin <= end:
        return bool(hours) and begin <= now < end
    return now >= begin or now < end


# ----- the process


@dataclass(slots=True)
class _OnTheWay:
    """What a courier does now: a letter, or the test of a question."""

    letter: WaitingLetter | None = None
    question: int | None = None


class AlertService:
    """Carries out what the controller asks, and has the letters sent."""

    def __init__(
        self,
        connection: ControllerSocket,
        *,
        clock: Callable[[], float] = time.time,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection = connection
        self._clock, self._monotonic_s = clock, monotonic_s
        self.keeper: AlertKeeper | None = None
        self._conditions: list[AlertCondition] = []
        self._quiet_nodes: dict[str, str] = {}
        self._heard_s: float | None = None  # monotonic: when the controller said what is wrong
        self._looked_s = float("-inf")
        self._head: list[AlertCondition] = []
        self._head_s = self._tidy_s = self._watchdog_s = self._try_again_s = float("-inf")
        self._synced_s: dict[str, float] = {}
        self._trouble = ""
        self._couriers: dict[str, Courier] = {}
        self._busy: dict[str, _OnTheWay] = {}
        self._tickets = 0
        self._outcomes: deque[SendOutcome] = deque()
        self.waker, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    # ----- what comes from the controller

    def take(self, message: Sequence[Any]) -> None:
        """Carry out one message."""
        kind, *rest = message
        if kind == "settings":
            settings = value_from_json(AlertServiceSettings, rest[0])
            if self.keeper is None:
                self.keeper = AlertKeeper(settings, self._connection.say)
            self.keeper.settings = settings
        elif kind == "ask" and self.keeper is not None:
            question = json.loads(rest[1])
            if question["ask"] == "test":
                self._test(self.keeper, rest[0], question["receiver"])
            else:
                self._connection.answer(rest[0], question, partial(self._answer, self.keeper, question))

    def _answer(self, keeper: AlertKeeper, question: Json) -> Json:
        """Return the answer to a question when what it says is on disk."""
        now_s = self._clock()
        try:
            match question["ask"]:
                case "look":
                    self._conditions = [value_from_json(AlertCondition, one) for one in question["conditions"]]
                    self._quiet_nodes = dict(question["quiet_nodes"])
                    self._heard_s = self._monotonic_s()
                    self._look(keeper, now_s, question.get("known_news", ()))
                    return {"news": dict(itertools.islice(keeper.news.items(), NEWS_AT_ONCE))}
                case "mail":
                    keeper.take_mail([value_from_json(JobMail, one) for one in question["mails"]], now_s)
                    return {}
                case "report":
                    return keeper.take_report(question, now_s)
                case "silence":
                    made = keeper.silence(question, now_s)
                    self._look(keeper, now_s)
                    return made
                case "end-silence":
                    ended = keeper.end_silence(question["id"], now_s)
                    self._look(keeper, now_s)
                    return ended
                case _:
                    return keeper.view(now_s)
        except (sqlite3.Error, OSError, OtherDatabaseError) as error:
            raise UnavailableError(f"cannot use {keeper.settings.database}: {self._failed(keeper, error)}") from None

    def _look(self, keeper: AlertKeeper, now_s: float, known_news: Iterable[str] = ()) -> None:
        """Judge what the controller said last, and what is seen here."""
        now_mono_s, limits = self._monotonic_s(), limits_of(keeper.settings.alerts.rules)
        heard_s = now_mono_s if self._heard_s is None else self._heard_s
        if now_mono_s - self._head_s >= HEAD_S:
            self._head_s, self._head = now_mono_s, list(rules.of_head(head_facts(keeper.settings, now_s), limits))
        silent_s = max(0.0, now_mono_s - heard_s - keeper.settings.alerts.interval)
        silent = list(rules.of_head(WatchedHead(controller_silent_s=silent_s), limits))
        keeper.look([*self._conditions, *self._head, *silent], self._quiet_nodes, now_s, known_news)
        self._looked_s = now_mono_s
        if self._trouble:
            self._connection.say("info", "the database of alerts can be used again")
            self._trouble = ""

    def _failed(self, keeper: AlertKeeper, error: Exception) -> str:
        """Log why the database cannot be used, once. Put a damaged one aside."""
        why = "another process has it open" if isinstance(error, BlockingIOError) else str(error)[:300]
        keeper.close()
        if isinstance(error, sqlite3.Error) and is_damage(error):
            why = f"it is damaged: {why}; {keeper.put_aside()}"
        else:
            self._try_again_s = self._monotonic_s() + RETRY_S
        if why != self._trouble:
            self._connection.say("error", f"cannot use the database of alerts {keeper.settings.database}: {why}")
        self._trouble = why
        return why

    # ----- now and then

    def work(self) -> None:
        """Look again if the controller is silent, and send what is due."""
        keeper, now_s, now_mono_s = self.keeper, self._clock(), self._monotonic_s()
        if keeper is None:
            return
        with contextlib.suppress(BlockingIOError):
            os.read(self.waker, 4096)
        try:
            self._settle(keeper, now_s)
            if now_mono_s < self._try_again_s:
                return
            if self._heard_s is not None and now_mono_s - self._looked_s >= min(
                MOST_LOOK_S, 3 * keeper.settings.alerts.interval
            ):
                self._look(keeper, now_s)
            if now_mono_s - self._tidy_s >= HOUR_S:
                self._tidy_s = now_mono_s
                keeper.tidy(now_s)
            self._send_due(keeper, now_s)
        except (sqlite3.Error, OSError, OtherDatabaseError) as error:
            self._failed(keeper, error)
        self._sync(keeper, now_s)
        self._ping(keeper)

    def _send_due(self, keeper: AlertKeeper, now_s: float) -> None:
        """Give each free courier the next letter of its receiver."""
        receivers = {one.name: one for one in keeper.settings.alerts.receivers if one.kind != "alertmanager"}
        for name in (JOBS, *receivers):
            if name in self._busy or (name == JOBS and not keeper.settings.alerts.smtp):
                continue
            found = keeper.next_letter(name, now_s)
            if found is not None:
                letter = _letter_from(found.data)
                self._give(name, _OnTheWay(letter=found), _work_of(letter, receivers.get(name), keeper.settings))

    def _give(self, name: str, what: _OnTheWay, work: Callable[[], None]) -> None:
        courier = self._couriers.get(name)
        if courier is None:
            courier = self._couriers[name] = Courier(name, self._told)
        self._tickets += 1
        self._busy[name] = what
        courier.do(self._tickets, work)

    def _told(self, outcome: SendOutcome) -> None:
        """Take an outcome, in the thread of its courier, and wake the process."""
        self._outcomes.append(outcome)
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake, b"x")

    def _settle(self, keeper: AlertKeeper, now_s: float) -> None:
        while self._outcomes:
            outcome = self._outcomes[0]
            what = self._busy.get(outcome.courier)
            if what is not None and what.letter is not None:
                keeper.settle(what.letter, outcome, now_s)
            elif what is not None and what.question is not None:
                self._connection.answer(what.question, {}, partial(_tested, outcome))
            elif outcome.courier != WATCHDOG:
                self._note_sync(keeper, outcome, now_s)
            self._busy.pop(outcome.courier, None)
            self._outcomes.popleft()

    def _test(self, keeper: AlertKeeper, number: int, name: str) -> None:
        """Send a message to a receiver at once; the question is answered when that is over."""
        settings = keeper.settings
        receiver = next((one for one in settings.alerts.receivers if one.name == name), None)
        if receiver is None or name in self._busy:
            self._connection.answer(number, {}, partial(_no_test, name, settings, is_busy=name in self._busy))
            return
        now_s = self._clock()
        letter = messages.letter_of_test(name, settings.sender, now_s)
        letter = replace(letter, payload=json.dumps(messages.test_payload(name, settings.sender, now_s)))
        work = _work_of(letter, receiver, settings)
        if receiver.kind == "alertmanager":
            work = partial(sending.post_to_alertmanager, receiver, [])
        self._give(name, _OnTheWay(question=number), work)

    def _sync(self, keeper: AlertKeeper, now_s: float) -> None:
        """Post all alerts to each Alertmanager, again and again: it forgets them otherwise."""
        now_mono_s = self._monotonic_s()
        for receiver in keeper.settings.alerts.receivers:
            name = receiver.name
            is_due = now_mono_s - self._synced_s.get(name, float("-inf")) >= SYNC_S
            if receiver.kind == "alertmanager" and is_due and name not in self._busy and self._heard_s is not None:
                self._synced_s[name] = now_mono_s
                chosen = _for_alertmanager(keeper.book, receiver, now_s)
                alerts = messages.alertmanager_alerts(chosen, keeper.settings.sender, now_s, LASTS_S)
                self._give(name, _OnTheWay(), partial(sending.post_to_alertmanager, receiver, alerts))

    def _note_sync(self, keeper: AlertKeeper, outcome: SendOutcome, now_s: float) -> None:
        state = keeper.states.setdefault(outcome.courier, ReceiverState())
        if outcome.why and not state.why:
            self._connection.say("warning", f"cannot post alerts to {outcome.courier}: {outcome.why}; trying again")
        state.why = outcome.why
        state.failing_since_s = (state.failing_since_s or now_s) if outcome.why else None
        if not outcome.why:
            state.sent_s, state.sent = now_s, state.sent + 1

    def _ping(self, keeper: AlertKeeper) -> None:
        """Ask the watchdog's address, if the controller works."""
        address, now_mono_s = keeper.settings.alerts.watchdog, self._monotonic_s()
        if not address or WATCHDOG in self._busy or now_mono_s - self._watchdog_s < WATCHDOG_S:
            return
        if self._heard_s is not None and now_mono_s - self._heard_s < max(60.0, 3 * keeper.settings.alerts.interval):
            self._watchdog_s = now_mono_s
            self._give(WATCHDOG, _OnTheWay(), partial(sending.request, "GET", address, b"", {"User-Agent": "hpcsched"}))

    def finish(self) -> None:
        """Wait a little for letters on their way, so that they are not sent again."""
        until_s = self._monotonic_s() + END_S
        while self._busy and (left_s := until_s - self._monotonic_s()) > 0:
            select.select([self.waker], [], [], left_s)
            with contextlib.suppress(BlockingIOError):
                os.read(self.waker, 4096)
            if self.keeper is not None:
                with contextlib.suppress(sqlite3.Error, OSError, OtherDatabaseError):
                    self._settle(self.keeper, self._clock())
        if self.keeper is not None:
            self.keeper.close()


def _work_of(letter: Letter, receiver: ReceiverSettings | None, settings: AlertServiceSettings) -> Callable[[], None]:
    """Return what sends a letter; without a receiver it goes to the addresses in it."""
    if receiver is None:
        return partial(sending.send_mail, letter, letter.to, settings.alerts, settings.sender)
    return partial(sending.send, letter, receiver, settings.alerts, settings.sender)


def _for_alertmanager(book: AlertBook, receiver: ReceiverSettings, now_s: float) -> list[Alert]:
    """Return the alerts that an Alertmanager should know: firing, or just over."""
    order = list(AlertSeverity)
    least = order.index(AlertSeverity(receiver.least))
    return [
        alert
        for alert in book.alerts.values()
        if alert.condition.uid is None
        and alert.is_due
        and order.index(alert.condition.severity) >= least
        and (
            (alert.phase is AlertPhase.FIRING and not alert.quiet)
            or (alert.phase is AlertPhase.RESOLVED and now_s - (alert.ended_at_s or 0.0) < HOUR_S)
        )
    ]


def _tested(outcome: SendOutcome) -> Json:
    if outcome.why:
        raise UnavailableError(f"cannot send a test to {outcome.courier}: {outcome.why}")
    return {"receiver": outcome.courier}


def _no_test(name: str, settings: AlertServiceSettings, *, is_busy: bool) -> Json:
    if is_busy:
        raise UnavailableError(f"cannot test {name[:60]!r}: a message is on its way to it; try again")
    names = ", ".join(one.name for one in settings.alerts.receivers) or "none"
    hint = f"; {MAIL_TO} is that of the key {MAIL_TO}" if MAIL_TO in names else ""
    raise NotFoundError(
        f"cannot test {name[:60]!r}: there is no such receiver in [alerts.receivers]; there are: {names}{hint}"
    )


def head_facts(settings: AlertServiceSettings, now_s: float) -> WatchedHead:
    """Look at the disk of the database and at the gateway's certificate."""
    state_dir = str(Path(settings.database).parent)
    free_mib: int | None = None
    with contextlib.suppress(OSError):
        space = os.statvfs(state_dir)
        free_mib = space.f_bavail * space.f_frsize >> 20
    left_s: float | None = None
    if settings.certificate:
        from cryptography import x509  # only a gateway needs it

        with contextlib.suppress(OSError, ValueError):
            data = Path(settings.certificate).read_bytes()[:MAX_CERTIFICATE_BYTES]
            left_s = x509.load_pem_x509_certificate(data).not_valid_after_utc.timestamp() - now_s
    return WatchedHead(
        free_mib=free_mib, state_dir=state_dir, certificate_left_s=left_s, certificate=settings.certificate
    )


def run(connection: ControllerSocket, ended: Callable[[], bool]) -> None:
    """Serve the controller until it is gone, or this process is told to end."""
    service = AlertService(connection)
    try:
        while not ended():
            for message in connection.messages(LOOK_S, [service.waker]):
                service.take(message)
            service.work()
    except (EOFError, ConnectionError):
        pass
    service.finish()


if __name__ == "__main__":
    main_of(run)
