"""The child that tells alerts: nothing is lost or doubled, whatever receivers, disk, clock and process do."""

from __future__ import annotations

import itertools
import json
import os
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from certificates import write_certificate
from gateway_server import free_port
from mail_server import MailServer
from waiting import wait_until

from hpcsched.alerts import rules, sending
from hpcsched.alerts.__main__ import LOCK_FILE, MAILS_OF_USER, RETRIES_S, RETRY_S, AlertService
from hpcsched.alerts.jobmail import JobMail
from hpcsched.alerts.messages import AlertServiceSettings, Letter
from hpcsched.alerts.rules import WatchedJob
from hpcsched.alerts.state import HOLD_S, AlertCondition
from hpcsched.config.load import AlertSettings, ReceiverSettings
from hpcsched.errors import UnavailableError
from hpcsched.metrics.findings import Bottleneck, SlowCause
from hpcsched.model.codec import value_to_json
from hpcsched.model.ids import NodeName
from hpcsched.store.engine import Statement

START_S = 1_800_000_000.0


class Connection:
    """The socket to the controller: what the child says and answers."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.answers: dict[int, Any] = {}

    def say(self, level: str, text: str) -> None:
        self.said.append(text)

    def answer(self, number: int, question: Any, found: Any) -> None:
        try:
            self.answers[number] = found()
        except Exception as error:
            self.answers[number] = error


class Web(BaseHTTPRequestHandler):
    """A receiver of the web; `status`: of its answers."""

    got: ClassVar[list[tuple[str, str, dict[str, str], Any]]] = []
    status: ClassVar[int] = 200

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        type(self).got.append((self.command, self.path, dict(self.headers), json.loads(body) if body else None))
        self.send_response(self.status)
        if self.status == 302:
            self.send_header("Location", "file:///etc/passwd")
        self.end_headers()

    do_PUT = do_GET = do_POST  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def web() -> Iterator[str]:
    Web.got, Web.status = [], 200
    server = ThreadingHTTPServer(("127.0.0.1", 0), Web)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def mail() -> Iterator[MailServer]:
    server = MailServer(free_port())
    server.start()
    yield server
    server.stop()


class Child:
    """The service in this process, on a clock that the test moves. `again` kills it and starts another."""

    def __init__(self, directory: Path, settings: AlertSettings) -> None:
        self.directory, self.settings = directory, settings
        self.now_s = START_S
        self.number = 0
        self.connection = Connection()
        self.service = self.started()

    def started(self) -> AlertService:
        made = AlertService(self.connection, clock=lambda: self.now_s, monotonic_s=lambda: self.now_s)  # type: ignore[arg-type]
        settings = AlertServiceSettings(
            alerts=self.settings, database=str(self.directory / "alerts.db"), cluster="lab", host="head.lab"
        )
        made.take(("settings", value_to_json(settings)))
        return made

    def again(self) -> None:
        """Forget all that is in memory, as a kill does."""
        keeper = self.service.keeper
        assert keeper is not None
        keeper.close()
        if keeper._lock is not None:
            os.close(keeper._lock)
        self.service = self.started()

    def end(self) -> None:
        """Give back what the service holds, when nothing is on its way."""
        wait_until(lambda: len(self.service._outcomes) >= len(self.service._busy), what="the couriers")
        keeper = self.service.keeper
        assert keeper is not None
        keeper.close()
        for fd in (keeper._lock, self.service.waker, self.service._wake):
            if fd is not None:
                os.close(fd)

    def ask(self, **question: Any) -> Any:
        self.number += 1
        self.service.take(("ask", self.number, json.dumps(question)))
        found = self.connection.answers[self.number]
        if isinstance(found, Exception):
            raise found
        return found

    def look(self, *conditions: AlertCondition, quiet: dict[str, str] | None = None) -> None:
        self.ask(ask="look", conditions=[value_to_json(one) for one in conditions], quiet_nodes=quiet or {})

    def live(self, seconds: float, *conditions: AlertCondition) -> None:
        """Look every ten seconds, and send what is due."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.look(*conditions)
            self.settle()
            self.now_s += 10.0

    def settle(self) -> None:
        """Let the couriers do what is due now."""
        self.service.work()
        wait_until(lambda: not self._is_busy(), what="the couriers")

    def _is_busy(self) -> bool:
        self.service.work()
        return bool(self.service._busy)


def drained(node: str = "n1") -> AlertCondition:
    return rules.condition("NodeDrained", "drained by hhealth: disk: full", node=node)


def ended(number: int, *, user: str = "ann", to: str = "", at_s: float = START_S, subject: str = "Ended") -> JobMail:
    return JobMail(
        key=f"{number}.0.1.end",
        at_s=at_s,
        job=str(number),
        user=user,
        mail_to=to,
        subject=f"Job_id={number} Name=fit {subject}",
        lines=("It used 50% of its CPUs",),
        is_end=True,
    )


def child_with(directory: Path, mail: MailServer | None, *receivers: ReceiverSettings, **values: Any) -> Child:
    smtp = {"smtp": f"smtp://127.0.0.1:{mail.port}", "mail_domain": "lab.org"} if mail is not None else {}
    return Child(directory, AlertSettings(receivers=receivers, **smtp | values))


def to_admin() -> ReceiverSettings:
    return ReceiverSettings(name="mail_to", kind="mail", to=("root@lab.org",))


def give(child: Child, *mails: JobMail) -> None:
    child.ask(ask="mail", mails=[value_to_json(mail) for mail in mails])
    child.settle()


def test_a_mail_of_an_alert_has_the_headers_of_a_machine_and_a_thread(tmp_path: Path, mail: MailServer) -> None:
    child = child_with(tmp_path, mail, to_admin())
    child.live(20, drained())
    child.live(1000)
    assert mail.subjects() == ["[lab] 1 firing: NodeDrained n1", "[lab] 1 resolved: NodeDrained n1"]
    first, second = mail.mails
    assert mail.to == [["root@lab.org"]] * 2
    assert (first["Auto-Submitted"], first["List-Id"]) == ("auto-generated", "<alerts.lab.head.lab>")
    assert first["From"] == "hpcsched@head.lab"
    assert first["References"] == second["References"]
    assert first["Message-ID"] != second["Message-ID"]
    assert "drained by hhealth: disk: full" in first.get_content()


def test_a_mail_server_that_is_down_for_an_hour_loses_and_doubles_nothing(tmp_path: Path, mail: MailServer) -> None:
    child = child_with(tmp_path, mail, to_admin())
    mail.stop()
    give(child, *(ended(number) for number in range(5)))
    child.live(1800, drained("n1"))
    child.again()
    child.live(1800, drained("n1"), drained("n2"))
    assert "cannot reach the mail server" in child.ask(ask="view")["receivers"][0]["why"]
    mail.start()
    child.live(3 * RETRIES_S[-1], drained("n1"), drained("n2"))
    subjects = sorted(mail.subjects())
    assert [subject for subject in subjects if "Job_id" in subject] == [
        f"lab Job_id={n} Name=fit Ended" for n in range(5)
    ]
    assert [subject for subject in subjects if "Job_id" not in subject] == [
        "[lab] 1 firing: NodeDrained n1",
        "[lab] 1 firing: NodeDrained n2",
    ]
    assert child.ask(ask="view")["receivers"][0]["why"] == ""


def test_job_mail_that_is_given_again_is_sent_once(tmp_path: Path, mail: MailServer) -> None:
    child = child_with(tmp_path, mail)
    give(child, ended(1))
    child.again()
    give(child, ended(1), ended(2))
    give(child, ended(2))
    assert mail.subjects() == ["lab Job_id=1 Name=fit Ended", "lab Job_id=2 Name=fit Ended"]
    assert mail.to == [["ann@lab.org"]] * 2
    assert "It used 50% of its CPUs" in mail.mails[0].get_content()


def test_jobs_from_before_the_first_start_are_not_told(tmp_path: Path, mail: MailServer) -> None:
    child = child_with(tmp_path, mail)
    give(child, ended(1, at_s=START_S - 60), ended(2))
    assert mail.subjects() == ["lab Job_id=2 Name=fit Ended"]


def test_a_kill_between_two_letters_sends_each_once(tmp_path: Path, mail: MailServer) -> None:
    child = child_with(tmp_path, mail)
    mails = [ended(number, user=f"u{number % 7}") for number in range(60)]
    for at in range(0, 60, 6):
        child.ask(ask="mail", mails=[value_to_json(one) for one in mails[at : at + 6]])
        child.again()
        child.settle()
    wait_until(lambda: len(mail.mails) >= 60 or child.settle())
    assert len({str(one["Message-ID"]) for one in mail.mails}) == len(mail.mails) == 60


def test_a_user_with_many_mails_gets_the_others_together(tmp_path: Path, mail: MailServer) -> None:
    child = child_with(tmp_path, mail)
    give(child, *(ended(number) for number in range(150)), ended(999, user="bob"))
    child.settle()
    wait_until(lambda: child.settle() or len(mail.mails) == MAILS_OF_USER + 1)
    child.now_s += 700
    child.settle()
    assert len(mail.mails) == MAILS_OF_USER + 2
    lines = mail.mails[-1].get_content().splitlines()
    assert "several messages" in mail.subjects()[-1]
    assert lines[0] == f"lab Job_id={MAILS_OF_USER} Name=fit Ended"
    assert lines[-1] == f"and {150 - MAILS_OF_USER - 100} more: hacct"


@pytest.mark.parametrize(
    ("mail_to", "domains", "to"),
    [
        ("", (), ["ann@lab.org"]),
        ("bob", (), ["bob@lab.org"]),
        ("ann@LAB.org", (), ["ann@LAB.org"]),
        ("ann@other.org", (), None),
        ("ann@other.org", ("other.org",), ["ann@other.org"]),
        ("x@evil.net,ann@lab.org", (), ["ann@lab.org"]),
        ("x@evil.net", ("*",), ["x@evil.net"]),
        ("-oX@lab.org", ("*",), None),
        ("a@lab.org\nBcc: b@lab.org", ("*",), None),
        ("a@lab.org> <b@evil.net", ("*",), None),
    ],
)
def test_users_have_mail_sent_to_allowed_domains_only(
    tmp_path: Path, mail: MailServer, mail_to: str, domains: tuple[str, ...], to: list[str] | None
) -> None:
    child = child_with(tmp_path, mail, mail_domains=domains)
    give(child, ended(1, to=mail_to), ended(2, to=mail_to))
    assert mail.to == ([] if to is None else [to, to])
    assert len(child.connection.said) == (1 if to is None else 0)  # it is said once


@pytest.mark.parametrize(
    "name",
    [
        "a\nBcc: x@evil.net\n\nbody",
        "a\r\n.\r\nMAIL FROM:<x>",
        "\x1b]8;;http://evil\x07x",
        "\u202efdp",
        "\udc80",
        "é" * 9000,
        "=?utf-8?q?x?=",
    ],
)
def test_a_hostile_name_stays_text_in_a_subject(tmp_path: Path, mail: MailServer, name: str) -> None:
    child = child_with(tmp_path, mail, to_admin())
    give(child, ended(1, subject=name))
    child.live(10, rules.condition("NodeDrained", name, node=name))
    assert len(mail.mails) == 2
    for one in mail.mails:
        assert one["Bcc"] is None
        assert len(str(one["Subject"])) <= 200
        assert not set("\n\r\x1b\u202e") & set(str(one["Subject"]))
    assert mail.to == [["ann@lab.org"], ["root@lab.org"]]


def test_a_refused_address_is_given_up_and_a_greylist_is_waited_for(tmp_path: Path, mail: MailServer) -> None:
    child = child_with(tmp_path, mail)
    mail.refusal = "550 5.1.1 no such user"
    give(child, ended(1))
    assert "no such user; it is given up" in child.connection.said[-1]
    mail.refusal = "451 4.7.1 greylisted, come back"
    give(child, ended(2))
    asked = mail.asked
    mail.refusal = ""
    child.settle()
    assert (mail.asked, mail.mails) == (asked, [])
    child.now_s += RETRIES_S[0]
    child.settle()
    assert mail.subjects() == ["lab Job_id=2 Name=fit Ended"]


SECRET = "correct horse"


class Encrypted:
    """A mail server that encrypts and wants a login, and a child that sends to it."""

    def __init__(self, directory: Path, scheme: str, *, name: str = "localhost", offers: str = "") -> None:
        self.certificate = write_certificate(directory, name)
        self.server = MailServer(free_port(), offers or scheme, self.certificate, login=("lab", SECRET))
        self.password = directory / "password"
        self.password.write_text(SECRET + "\n")
        self.password.chmod(0o600)
        self.server.start()
        smtp = {"smtp": f"{scheme}://localhost:{self.server.port}", "smtp_user": "lab"}
        self.child = child_with(directory, None, **smtp, smtp_password=str(self.password), mail_domain="lab.org")

    def why(self) -> str:
        """Return why no mail was sent."""
        assert self.server.mails == []
        found = self.child.ask(ask="view")["receivers"][-1]
        assert found["waiting"] == 1
        assert SECRET not in json.dumps([found, self.child.connection.said])
        return str(found["why"])


@pytest.fixture
def encrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Encrypted]]:
    """Return what makes such a server, whose certificate the system trusts."""
    made: list[Encrypted] = []

    def make(scheme: str, *, trusted: bool = True, **values: str) -> Encrypted:
        made.append(Encrypted(tmp_path, scheme, **values))
        monkeypatch.setenv("SSL_CERT_FILE", str(made[-1].certificate) if trusted else os.devnull)
        return made[-1]

    yield make
    for one in made:
        one.server.stop()


SCHEMES = pytest.mark.parametrize("scheme", ["starttls", "smtps"])


@SCHEMES
def test_mail_is_sent_encrypted_and_with_a_login(encrypted: Callable[..., Encrypted], scheme: str) -> None:
    lab = encrypted(scheme)
    give(lab.child, ended(1), ended(2))
    assert lab.server.subjects() == ["lab Job_id=1 Name=fit Ended", "lab Job_id=2 Name=fit Ended"]
    assert lab.server.logins == [("lab", True)] * 2


@SCHEMES
def test_a_server_that_is_not_trusted_gets_neither_password_nor_mail(
    encrypted: Callable[..., Encrypted], scheme: str
) -> None:
    lab = encrypted(scheme, trusted=False)
    give(lab.child, ended(1))
    assert "is not trusted: self-signed certificate; nothing was sent" in lab.why()
    assert lab.server.logins == []


@SCHEMES
def test_a_certificate_of_another_name_is_not_trusted(encrypted: Callable[..., Encrypted], scheme: str) -> None:
    lab = encrypted(scheme, name="mail.example.org")
    give(lab.child, ended(1))
    assert "is not trusted: Hostname mismatch" in lab.why()
    assert lab.server.logins == []


@pytest.mark.parametrize(
    ("scheme", "offers", "said"),
    [
        ("starttls", "smtp", "STARTTLS extension not supported"),
        ("smtps", "smtp", "cannot reach the mail server"),
        ("starttls", "smtps", "cannot reach the mail server"),
    ],
)
def test_mail_never_falls_back_to_plain_text(
    encrypted: Callable[..., Encrypted], monkeypatch: pytest.MonkeyPatch, scheme: str, offers: str, said: str
) -> None:
    monkeypatch.setattr(sending, "TIMEOUT_S", 0.5)  # one of the pairs waits for the other side to begin
    lab = encrypted(scheme, offers=offers)
    give(lab.child, ended(1))
    assert said.lower() in lab.why().lower()
    assert lab.server.logins == []


def test_a_broken_starttls_is_waited_for(encrypted: Callable[..., Encrypted]) -> None:
    lab = encrypted("starttls")
    lab.server.stop()
    lab.server.certificate = None  # every handshake fails
    lab.server.start()
    give(lab.child, ended(1))
    assert "cannot reach the mail server starttls://localhost" in lab.why()
    lab.server.stop()
    lab.server.certificate = lab.certificate
    lab.server.start()
    lab.child.now_s += RETRIES_S[0]
    lab.child.settle()
    assert lab.server.subjects() == ["lab Job_id=1 Name=fit Ended"]


@SCHEMES
def test_a_wrong_password_is_said_and_the_right_one_is_read_again(
    encrypted: Callable[..., Encrypted], scheme: str
) -> None:
    lab = encrypted(scheme)
    lab.password.write_text("wrong battery")
    give(lab.child, ended(1))
    assert "the mail server refuses the login of lab: 535" in lab.why()
    assert "battery" not in json.dumps([lab.child.ask(ask="view"), lab.child.connection.said])
    lab.password.write_text(SECRET)
    lab.child.now_s += RETRIES_S[0]
    lab.child.settle()
    assert lab.server.subjects() == ["lab Job_id=1 Name=fit Ended"]


def test_a_password_that_others_can_read_is_not_used(encrypted: Callable[..., Encrypted]) -> None:
    lab = encrypted("starttls")
    lab.password.chmod(0o644)
    give(lab.child, ended(1))
    assert f"others can read or write it; run: chmod 600 {lab.password}" in lab.why()
    assert lab.server.logins == []


def test_a_password_may_be_in_the_environment(
    encrypted: Callable[..., Encrypted], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = encrypted("starttls")
    settings = replace(lab.child.settings, smtp_password="$LAB_MAIL")  # noqa: S106 - a name
    lab.child.settings = settings
    lab.child.again()
    give(lab.child, ended(1))
    assert "the environment of the controller has no LAB_MAIL" in lab.why()
    monkeypatch.setenv("LAB_MAIL", SECRET)
    lab.child.now_s += RETRIES_S[0]
    lab.child.settle()
    assert lab.server.logins == [("lab", True)]
    assert lab.server.subjects() == ["lab Job_id=1 Name=fit Ended"]


def test_a_mail_that_the_server_does_not_want_is_given_up_and_the_next_is_sent(
    tmp_path: Path, mail: MailServer
) -> None:
    child = child_with(tmp_path, mail)
    mail.after_data = "554 5.7.1 looks like spam"
    give(child, ended(1))
    assert "looks like spam; it is given up" in child.connection.said[-1]
    mail.after_data = ""
    give(child, ended(2))
    assert mail.subjects()[-1] == "lab Job_id=2 Name=fit Ended"
    assert child.ask(ask="view")["dropped"] == 1


def test_a_silent_mail_server_delays_no_other_receiver(tmp_path: Path, web: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        smtp = f"smtp://127.0.0.1:{silent.getsockname()[1]}"
        hook = ReceiverSettings(name="hook", kind="webhook", address=web)
        child = Child(tmp_path, AlertSettings(smtp=smtp, receivers=(to_admin(), hook)))
        child.look(drained())
        child.service.work()
        wait_until(lambda: child.service.work() or Web.got)
        assert "mail_to" in child.service._busy


def test_a_webhook_gets_alertmanagers_payload(tmp_path: Path, web: str) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    token.chmod(0o600)
    hook = ReceiverSettings(name="hook", kind="webhook", address=f"{web}/x?y=1", token=str(token))
    child = child_with(tmp_path, None, hook)
    child.live(10, drained("n1"), drained("n2"))
    (method, path, headers, body), *others = Web.got
    assert (method, path, headers["Authorization"], others) == ("POST", "/x?y=1", "Bearer secret", [])
    assert {key: body[key] for key in ("version", "status", "receiver", "groupLabels", "truncatedAlerts")} == {
        "version": "4",
        "status": "firing",
        "receiver": "hook",
        "groupLabels": {"alertname": "NodeDrained"},
        "truncatedAlerts": 0,
    }
    assert [alert["labels"]["node"] for alert in body["alerts"]] == ["n1", "n2"]
    assert body["commonLabels"] == {"alertname": "NodeDrained", "severity": "warning", "cluster": "lab"}
    assert body["alerts"][0]["endsAt"] == "0001-01-01T00:00:00Z"
    assert body["alerts"][0]["startsAt"] == "2027-01-15T08:00:00.000Z"


@pytest.mark.parametrize("status", [500, 404, 302, 429])
def test_a_webhook_that_fails_is_tried_again_and_no_redirect_is_followed(tmp_path: Path, web: str, status: int) -> None:
    child = child_with(tmp_path, None, ReceiverSettings(name="hook", kind="webhook", address=web))
    Web.status = status
    child.live(600, drained())
    assert len(Web.got) == 3  # at once, after a minute, after five more
    Web.status = 200
    child.live(2 * RETRIES_S[-1], drained())
    assert len(Web.got) == 4
    assert f"answers with status {status}" in child.connection.said[0]
    assert child.ask(ask="view")["receivers"][0] | {"sent_s": 0} == {
        "name": "hook", "kind": "webhook", "waiting": 0, "why": "", "failing_since_s": None, "sent_s": 0, "sent": 1,
    }  # fmt: skip


def test_chats_get_their_own_formats_in_which_nobody_is_called(tmp_path: Path, web: str) -> None:
    names = ("slack", "mattermost", "matrix", "ntfy")
    receivers = [ReceiverSettings(name=kind, kind=kind, address=f"{web}/{kind}") for kind in names]
    child = child_with(tmp_path, None, *receivers)
    child.live(10, rules.condition("NodeDrained", "@all <!channel> ```x``` & @here", node="n1"))
    got = {path: (method, body) for method, path, _, body in Web.got}
    slack, mattermost = got["/slack"][1]["text"], got["/mattermost"][1]["text"]
    assert "&lt;!channel&gt;" in slack
    assert "@all" not in slack + mattermost
    assert mattermost.count("```") == 2
    (matrix,) = [path for path in got if path.startswith("/matrix/")]
    assert (got[matrix][0], got[matrix][1]["msgtype"]) == ("PUT", "m.notice")
    assert (got["/"][1]["topic"], got["/"][1]["priority"]) == ("ntfy", 4)
    assert got["/"][1]["title"] == "[lab] 1 firing: NodeDrained n1"


def test_an_address_may_be_in_a_file_and_is_in_no_message(tmp_path: Path, web: str) -> None:
    secret = tmp_path / "address"
    secret.write_text(f"{web}/services/T0/SECRET\n")
    secret.chmod(0o600)
    child = child_with(tmp_path, None, ReceiverSettings(name="chat", kind="slack", address=str(secret)))
    Web.status = 500
    child.live(10, drained())
    assert Web.got[0][1] == "/services/T0/SECRET"
    assert "SECRET" not in "".join(child.connection.said) + json.dumps(child.ask(ask="view"))


def test_a_command_gets_json_and_its_words_are_no_shells(tmp_path: Path) -> None:
    program, out = tmp_path / "tell", tmp_path / "out"
    program.write_text(f'#!/bin/sh\ncat > "{out}"\nprintf "%s\\n" "$@" > "{out}.words"\n')
    program.chmod(0o755)
    command = (str(program), "$(touch X)", "a b")
    child = child_with(tmp_path, None, ReceiverSettings(name="run", kind="command", command=command))
    child.live(10, rules.condition("NodeDrained", "$(touch X); `id`", node="n1"))
    told = json.loads(out.read_text())
    assert told["subject"] == "[lab] 1 firing: NodeDrained n1"
    assert told["alerts"]["alerts"][0]["annotations"]["summary"] == "$(touch X); `id`"
    assert Path(f"{out}.words").read_text().splitlines() == list(command[1:])
    assert not list(tmp_path.glob("**/X"))


def test_a_command_that_fails_or_could_be_replaced_is_not_run_or_tried_again(tmp_path: Path) -> None:
    program = tmp_path / "tell"
    program.write_text("#!/bin/sh\necho no >&2\nexit 3\n")
    program.chmod(0o755)
    child = child_with(tmp_path, None, ReceiverSettings(name="run", kind="command", command=(str(program),)))
    child.live(10, drained())
    assert f"{program} ended with status 3: no; it is tried again" in child.connection.said[0]
    program.chmod(0o777)
    child.live(120, drained())
    assert "cannot run" in child.connection.said[-1]


def wasteful(cause: SlowCause = SlowCause.MEMORY_LIMIT) -> AlertCondition:
    found = Bottleneck(
        cause=cause, node=NodeName("n1"), text="uses 95 % of the 4G it holds", remedy="ask for more memory"
    )
    facts = WatchedJob(display_id="12", key="12.0", uid=1000, user="ann", bottlenecks=[found])
    (made,) = rules.of_job(facts, START_S)
    return made


def test_a_user_is_told_once_of_a_limit_that_will_be_hit(tmp_path: Path, mail: MailServer) -> None:
    child = child_with(tmp_path, mail, to_admin())
    child.live(30, wasteful())
    child.again()
    child.live(3000)
    child.live(3000, wasteful())
    assert mail.to == [["ann@lab.org"]]
    assert mail.subjects()[0].startswith("lab Job_id=12 JobWillHitLimit: memory limit on n1: uses 95 %")
    assert "ask for more memory" in mail.mails[0].get_content()


def test_what_fired_and_ended_is_told_the_controller_until_it_has_it(tmp_path: Path) -> None:
    child = child_with(tmp_path, None)

    def news(*known: str) -> dict[str, Any]:
        asked = {"conditions": [value_to_json(one) for one in wrong], "quiet_nodes": {}, "known_news": known}
        found: dict[str, Any] = child.ask(ask="look", **asked)["news"]
        return found

    wrong = [drained()]
    fired = news()
    assert [(one["kind"], one["name"], one["labels"]) for one in fired.values()] == [
        ("AlertFired", "NodeDrained", {"node": "n1"})
    ]
    child.again()
    assert news() == fired  # after a kill, too
    assert news(*fired) == {}
    wrong = []
    child.live(HOLD_S + 20)
    (ended_key,) = news()
    assert news()[ended_key]["kind"] == "AlertResolved"
    assert news(ended_key, "of another database") == {}


def test_the_report_of_a_month_is_mailed_once(tmp_path: Path, mail: MailServer) -> None:
    child = child_with(tmp_path, mail)
    asked = {"ask": "report", "key": "2027-01", "ended_at_s": START_S + 86_400}
    letter = Letter(
        id="report.2027-01", at_s=START_S, subject="use", lines=("a", "b"), to=("h@lab.org",), html="<p>a</p>"
    )
    assert child.ask(**asked) == {"due": True}
    mail.refusal = "451 4.7.1 come back"
    for _ in range(3):
        child.ask(**asked, letter=value_to_json(letter))
        child.settle()
        child.again()
    assert child.ask(**asked) == {"due": False}
    mail.refusal = ""
    child.now_s += RETRIES_S[0]
    child.settle()
    child.now_s += 30 * 86_400
    child.live(20)
    assert (mail.subjects(), mail.to) == (["use"], [["h@lab.org"]])
    assert [part.get_content_type() for part in mail.mails[0].walk()] == [
        "multipart/alternative", "text/plain", "text/html",
    ]  # fmt: skip
    assert child.ask(**asked) == {"due": False}


def test_a_month_that_was_over_before_the_first_start_is_not_reported(tmp_path: Path, mail: MailServer) -> None:
    child = child_with(tmp_path, mail)
    assert child.ask(ask="report", key="2026-12", ended_at_s=START_S - 1) == {"due": False}


def test_a_silence_outlives_the_process_and_ends_by_itself(tmp_path: Path, mail: MailServer) -> None:
    child = child_with(tmp_path, mail, to_admin())
    question = {"matchers": [["node", ["n*"]]], "until_s": START_S + 600, "by": "root", "why": "fan"}
    made = child.ask(ask="silence", **question)
    child.live(300, drained())
    child.again()
    assert [alert["quiet"] for alert in child.ask(ask="view")["alerts"]] == ["silence 1 by root"]
    assert mail.mails == []
    child.again()
    child.now_s += 400  # it ends while the process is down
    child.live(20, drained())
    assert mail.subjects() == ["[lab] 1 firing: NodeDrained n1"]
    assert made == {"id": 1, "alerts": 0}


def test_a_test_says_what_became_of_it(tmp_path: Path, web: str) -> None:
    child = child_with(tmp_path, None, ReceiverSettings(name="hook", kind="webhook", address=web))
    child.service.take(("ask", 900, json.dumps({"ask": "test", "receiver": "hook"})))
    child.settle()
    assert child.connection.answers[900] == {"receiver": "hook"}
    assert Web.got[0][3]["alerts"][0]["labels"]["alertname"] == "Test"
    Web.status = 403
    child.service.take(("ask", 901, json.dumps({"ask": "test", "receiver": "hook"})))
    child.settle()
    assert "answers with status 403" in str(child.connection.answers[901])
    child.service.take(("ask", 902, json.dumps({"ask": "test", "receiver": "x"})))
    assert "there is no such receiver in [alerts.receivers]; there are: hook" in str(child.connection.answers[902])


def test_a_watchdog_is_asked_while_the_controller_speaks(tmp_path: Path, web: str) -> None:
    child = child_with(tmp_path, None, watchdog=f"{web}/alive")
    child.live(600)
    assert [path for _, path, _, _ in Web.got] == ["/alive"] * 2
    for _ in range(90):
        child.now_s += 10
        child.settle()
    assert len(Web.got) == 3
    assert [alert["rule"] for alert in child.ask(ask="view")["alerts"] if alert["phase"] == "firing"] == [
        "ControllerSilent"
    ]


def test_a_damaged_database_is_put_aside_and_one_of_another_program_is_not(tmp_path: Path, mail: MailServer) -> None:
    path = tmp_path / "alerts.db"
    path.write_bytes(b"this is no database" * 1000)
    child = child_with(tmp_path, mail, to_admin())
    with pytest.raises(Exception, match="it is damaged"):
        child.look(drained())
    child.live(20, drained())
    assert (len(mail.mails), path.with_name("alerts.db.damaged").exists()) == (1, True)
    child.again()
    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA application_id = 7")
    with pytest.raises(Exception, match="another program"):
        child.look(drained())
    assert path.exists()


def test_a_full_disk_loses_nothing(tmp_path: Path, mail: MailServer, monkeypatch: pytest.MonkeyPatch) -> None:
    child = child_with(tmp_path, mail)
    give(child, ended(1))
    keeper = child.service.keeper
    assert keeper is not None
    limit = keeper.database(child.now_s)._connection.execute("PRAGMA page_count").fetchone()[0]
    keeper.database(child.now_s)._connection.execute(f"PRAGMA max_page_count = {limit}")
    many = [ended(number, user=f"u{number}") for number in range(2, 60)]
    with pytest.raises(Exception, match="full"):
        child.ask(ask="mail", mails=[value_to_json(one) for one in many])
    child.again()  # there is room again
    give(child, *many)
    wait_until(lambda: child.settle() or len(mail.mails) == 59)
    assert len({str(one["Message-ID"]) for one in mail.mails}) == 59


def test_a_database_of_a_newer_version_stays_as_it_is(tmp_path: Path, mail: MailServer) -> None:
    child = child_with(tmp_path, mail, to_admin())
    child.look()
    child.again()
    path = tmp_path / "alerts.db"
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    before = path.read_bytes()
    for _ in range(3):
        with pytest.raises(UnavailableError, match="99"):
            child.look(drained())
        child.settle()
        child.now_s += RETRY_S
    assert (path.read_bytes(), mail.mails) == (before, [])
    assert len(child.connection.said) == 1


def test_a_clock_that_is_set_back_a_day_delays_no_mail(tmp_path: Path, mail: MailServer) -> None:
    child = child_with(tmp_path, mail, to_admin())
    mail.refusal = "451 4.7.1 come back"
    give(child, ended(1))
    child.live(30, drained("n1"))
    mail.refusal = ""
    child.now_s -= 86_400
    child.live(20, drained("n1"))
    give(child, ended(2, at_s=child.now_s))
    child.live(700, drained("n1"), drained("n2"))
    assert sorted(mail.subjects()) == [
        "[lab] 1 firing: NodeDrained n1",
        "[lab] 1 firing: NodeDrained n2",
        "lab Job_id=1 Name=fit Ended",
        "lab Job_id=2 Name=fit Ended",
    ]


class Killed(BaseException):
    """The process is gone."""


def test_a_kill_inside_each_write_loses_nothing(
    tmp_path: Path, mail: MailServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [0]

    def dying(write: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise Killed
            return write(*given)

        return run

    for name in ("run", "run_many"):
        monkeypatch.setattr(Statement, name, dying(getattr(Statement, name)))
    for at in itertools.count(1):
        directory = tmp_path / str(at)
        directory.mkdir()
        mail.mails.clear()
        child = child_with(directory, mail, to_admin())
        child.look()
        left[0] = at
        for _ in range(3):  # what the controller says again after a kill
            try:
                child.look(drained())
                give(child, ended(1), ended(2))
            except Killed:
                child.end()
                child.service = child.started()
        was_killed, left[0] = left[0] <= 0, 0
        child.live(20, drained())
        sent = {str(one["Message-ID"]): str(one["Subject"]) for one in mail.mails}
        assert sorted(sent.values()) == [
            "[lab] 1 firing: NodeDrained n1",
            "lab Job_id=1 Name=fit Ended",
            "lab Job_id=2 Name=fit Ended",
        ], at
        assert len(mail.mails) <= 5, at  # one of each receiver may be doubled, with the same Message-ID
        child.end()
        if not was_killed:
            break
    assert at > 10


def test_a_webhook_that_never_answers_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/hook"
        child = child_with(tmp_path, None, ReceiverSettings(name="hook", kind="webhook", address=address))
        child.live(20, drained())
    found = child.ask(ask="view")["receivers"][0]
    assert (found["waiting"], found["why"]) == (1, "cannot reach 127.0.0.1: timed out")


def test_two_processes_do_not_share_a_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcsched.alerts.__main__.LOCK_S", 0.0)
    first = child_with(tmp_path, None)
    first.look()
    second = child_with(tmp_path, None)
    with pytest.raises(Exception, match="another process has it open"):
        second.look()
    assert (tmp_path / LOCK_FILE).exists()


def test_ten_thousand_alerts_at_once_are_one_message(tmp_path: Path, mail: MailServer) -> None:
    child = child_with(tmp_path, mail, to_admin())
    child.look(*(drained(f"n{number}") for number in range(10_000)))
    child.settle()
    (one,) = mail.mails
    assert len(one.get_content()) < 10_000
    assert "... and 4980 more" in one.get_content()
