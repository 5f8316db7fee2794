"""Send letters: by mail, to addresses of the web, or to a program.

Each kind of receiver is one function; it returns if the receiver has the letter, and raises SendError if
not. `is_final`: no later try would succeed. All of it blocks, for a limited time, so that a thread of
its own does it. No redirect is followed, no shell is used, and answers are read up to a limit.

Sources: smtplib; https://www.rfc-editor.org/rfc/rfc5321 (4xx: try again, 5xx: never); Alertmanager's
notifiers, for the statuses that are tried again.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import smtplib
import ssl
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from hpcnode.os.trust import check_path
from hpcsched.alerts import messages
from hpcsched.alerts.messages import Letter, Sender
from hpcsched.config.load import AlertSettings, ReceiverSettings

TIMEOUT_S = 20.0  # of one read, write or connection
PROGRAM_S = 60.0
MAX_SECRET_BYTES = 16_384
MAX_ANSWER_BYTES = 4_096
MAX_WHY = 300


class SendError(Exception):
    """The receiver does not have the letter."""

    def __init__(self, why: str, *, is_final: bool = False) -> None:
        super().__init__(why[:MAX_WHY])
        self.is_final = is_final


# ----- mail


def send_mail(letter: Letter, to: Sequence[str], settings: AlertSettings, sender: Sender) -> None:
    """Send a letter to addresses. Raises SendError."""
    message = messages.mail_of(letter, sender, to)
    try:
        server = _connected(settings)
        try:
            refused = server.send_message(message, sender.mail_from, list(to))
            with suppress(OSError, smtplib.SMTPException):  # it has the mail
                server.quit()
        finally:
            server.close()
    except smtplib.SMTPRecipientsRefused as error:
        raise SendError(_recipients(error.recipients), is_final=_are_final(error.recipients)) from None
    except smtplib.SMTPAuthenticationError as error:
        raise SendError(
            f"the mail server refuses the login of {settings.smtp_user}: {error.smtp_code} {_text(error.smtp_error)}"
        ) from None
    except ssl.SSLCertVerificationError as error:
        raise SendError(
            f"the certificate of the mail server {settings.smtp} is not trusted: {error.verify_message}; nothing was sent"
        ) from None
    except smtplib.SMTPResponseException as error:
        why = f"the mail server answers {error.smtp_code}: {_text(error.smtp_error)}"
        is_letter = isinstance(error, smtplib.SMTPDataError) and error.smtp_code >= 500
        raise SendError(why, is_final=is_letter) from None
    except (OSError, smtplib.SMTPException, ValueError) as error:
        raise SendError(f"cannot reach the mail server {settings.smtp}: {error}") from None
    if refused and len(refused) == len(to):
        raise SendError(_recipients(refused), is_final=_are_final(refused))


def _connected(settings: AlertSettings) -> smtplib.SMTP:
    """Return a connection to the mail server, logged in.

    If the settings say so it is encrypted, or there is none.

    Raises SendError, OSError, SMTPException.
    """
    url = urlsplit(settings.smtp)
    host = url.hostname or "localhost"
    password = _password(settings.smtp_password) if settings.smtp_user else ""
    server: smtplib.SMTP
    if url.scheme == "smtps":
        server = smtplib.SMTP_SSL(host, url.port or 465, timeout=TIMEOUT_S, context=ssl.create_default_context())
    else:
        server = smtplib.SMTP(host, url.port or (587 if url.scheme == "starttls" else 25), timeout=TIMEOUT_S)
    try:
        if url.scheme == "starttls":
            server.starttls(context=ssl.create_default_context())
        if settings.smtp_user:
            server.login(settings.smtp_user, password)
    except BaseException:
        server.close()
        raise
    return server


def _recipients(refused: dict[str, tuple[int, bytes]]) -> str:
    code, text = next(iter(refused.values()))
    return f"the mail server refuses {', '.join(list(refused)[:3])}: {code} {_text(text)}"


def _are_final(refused: dict[str, tuple[int, bytes]]) -> bool:
    return all(code >= 500 for code, _ in refused.values())


def _text(text: bytes | str) -> str:
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)


def _password(place: str) -> str:
    """Return the password in a file, or in a variable of the environment as ``$NAME``.

    Raises SendError.
    """
    try:
        if not place.startswith("$"):
            return _secret(place)
        password = os.environ.get(place[1:], "").strip()
    except (OSError, ValueError) as error:
        raise SendError(f"cannot read the password {place}: {error}") from None
    if not password:
        raise SendError(f"cannot read the password: the environment of the controller has no {place[1:]}")
    return password


def _secret(path: str) -> str:
    """Return the content of a file with a password or token, which others cannot read.

    Raises OSError, ValueError.
    """
    with Path(path).open("rb") as stream:
        if os.fstat(stream.fileno()).st_mode & 0o027:
            raise ValueError(f"others can read or write it; run: chmod 600 {path}")
        secret = stream.read(MAX_SECRET_BYTES).decode("ascii").strip()
    if not secret:
        raise ValueError("it is empty")
    return secret


# ----- addresses of the web


def address_of(receiver: ReceiverSettings) -> str:
    """Return the address of a receiver, which may be in a file. Raises SendError."""
    if not receiver.address.startswith("/"):
        return receiver.address
    try:
        address = _secret(receiver.address)
    except (OSError, ValueError) as error:
        raise SendError(f"cannot read {receiver.address}: {error}") from None
    if not address.startswith(("https://", "http://")):
        raise SendError(f"cannot use {receiver.address}: it does not have an address of the web")
    return address


def _headers(receiver: ReceiverSettings) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "User-Agent": "hpcsched"}
    if receiver.token:
        try:
            headers["Authorization"] = f"Bearer {_secret(receiver.token)}"
        except (OSError, ValueError) as error:
            raise SendError(f"cannot read {receiver.token}: {error}") from None
    return headers


def request(method: str, address: str, body: bytes, headers: dict[str, str]) -> None:
    """Send a request; return if the answer is a success. Raises SendError.

    The address is not in the error, because it may be a secret.
    """
    url = urlsplit(address)
    try:
        connection: http.client.HTTPConnection
        if url.scheme == "https":
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(url.netloc, timeout=TIMEOUT_S, context=context)
        else:
            connection = http.client.HTTPConnection(url.netloc, timeout=TIMEOUT_S)
        try:
            connection.request(method, (url.path or "/") + (f"?{url.query}" if url.query else ""), body, headers)
            response = connection.getresponse()
            status, answer = response.status, response.read(MAX_ANSWER_BYTES).decode("utf-8", "replace")
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise SendError(f"cannot reach {url.hostname}: {error}") from None
    if not 200 <= status < 300:
        raise SendError(f"{url.hostname} answers with status {status}: {messages.one_line(answer, 200)}")


def _post(receiver: ReceiverSettings, payload: Any, address: str, method: str = "POST") -> None:
    request(method, address, json.dumps(payload).encode(), _headers(receiver))


def _ntfy(receiver: ReceiverSettings, letter: Letter) -> None:
    address = address_of(receiver)
    url = urlsplit(address)
    _post(receiver, messages.ntfy_payload(letter, address), f"{url.scheme}://{url.netloc}/")


def _matrix(receiver: ReceiverSettings, letter: Letter) -> None:
    """Send an event; the same id twice is one event, so nothing is doubled."""
    number = "".join(char if char.isalnum() else "-" for char in letter.id)[:120]
    _post(receiver, messages.matrix_payload(letter), f"{address_of(receiver).rstrip('/')}/{number}", "PUT")


# ----- a program


def run_program(command: Sequence[str], letter: Letter) -> None:
    """Run a program with the letter as JSON on its standard input. Raises SendError."""
    body = json.dumps(
        {"subject": letter.subject, "lines": letter.lines, "alerts": json.loads(letter.payload or "null")}
    ).encode()
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TZ") if name in os.environ}
    try:
        check_path(command[0], os.geteuid())
        done = subprocess.run(
            list(command),
            input=body,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd="/",
            env=environment,
            timeout=PROGRAM_S,
            start_new_session=True,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SendError(f"cannot run {command[0]}: {error}") from None
    if done.returncode:
        why = done.stderr[-MAX_WHY:].decode("utf-8", "replace").strip()
        raise SendError(f"{command[0]} ended with status {done.returncode}: {messages.one_line(why, 200)}")


# ----- any receiver


def send(letter: Letter, receiver: ReceiverSettings, settings: AlertSettings, sender: Sender) -> None:
    """Send a letter to a receiver. Raises SendError."""
    match receiver.kind:
        case "mail":
            send_mail(letter, receiver.to, settings, sender)
        case "command":
            run_program(receiver.command, letter)
        case "slack":
            _post(receiver, messages.slack_payload(letter), address_of(receiver))
        case "mattermost":
            _post(receiver, messages.mattermost_payload(letter), address_of(receiver))
        case "matrix":
            _matrix(receiver, letter)
        case "ntfy":
            _ntfy(receiver, letter)
        case _:
            request("POST", address_of(receiver), letter.payload.encode(), _headers(receiver))


def post_to_alertmanager(receiver: ReceiverSettings, alerts: list[dict[str, Any]]) -> None:
    """Post all alerts to an Alertmanager. Raises SendError."""
    _post(receiver, alerts, f"{address_of(receiver).rstrip('/')}/api/v2/alerts")


# ----- threads


class SendOutcome(NamedTuple):
    """What became of a piece of work; `why` "": it is done."""

    courier: str
    ticket: int
    why: str
    is_final: bool


class Courier:
    """A thread that does one piece of work at a time, so that a slow receiver delays no other.

    `told` gets the outcome, in the thread.
    """

    def __init__(self, name: str, told: Callable[[SendOutcome], None]) -> None:
        self.name = name
        self._told = told
        self._work: queue.SimpleQueue[tuple[int, Callable[[], None]]] = queue.SimpleQueue()
        self.is_busy = False
        self._thread = threading.Thread(target=self._run, name=f"alerts-{name}", daemon=True)
        self._thread.start()

    def do(self, ticket: int, work: Callable[[], None]) -> None:
        """Begin a piece of work; the courier must be free."""
        self.is_busy = True
        self._work.put((ticket, work))

    def _run(self) -> None:
        while True:
            ticket, work = self._work.get()
            why, is_final = "", False
            try:
                work()
            except SendError as error:
                why, is_final = str(error), error.is_final
            except Exception as error:  # a letter must not end the thread
                why, is_final = f"cannot send it: {error!r:.200}", True
            with suppress(OSError):
                self._told(SendOutcome(self.name, ticket, why, is_final))
