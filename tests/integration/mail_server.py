"""A mail server on the loopback interface that keeps what it gets, and fails as a test asks."""

from __future__ import annotations

import email
import email.policy
import ssl
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiosmtpd", reason="needs aiosmtpd: pip install hpcsched[test]")

from aiosmtpd.controller import Controller  # noqa: E402
from aiosmtpd.smtp import AuthResult  # noqa: E402


class MailServer:
    """The server and its mail. `refusal`: what it says to a recipient, "" takes all.

    `scheme`: smtp, starttls or smtps, with the certificate and key in the file `certificate`. `login`: the account
    and password that it wants.
    """

    def __init__(
        self, port: int, scheme: str = "smtp", certificate: Path | None = None, login: tuple[str, str] | None = None
    ) -> None:
        self.port = port
        self.scheme, self.certificate, self.login = scheme, certificate, login
        self.logins: list[tuple[str, bool]] = []  # who has tried to, and whether it was encrypted
        self.mails: list[EmailMessage] = []
        self.to: list[list[str]] = []
        self.refusal = ""
        self.after_data = ""  # what it says after the mail
        self.asked = 0  # connections that named a recipient
        self._controller: Any = None

    def start(self) -> None:
        self._controller = Controller(self, hostname="127.0.0.1", port=self.port, **self._encryption())
        self._controller.start()

    def _encryption(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.scheme != "smtp":
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            if self.certificate is not None:  # without one every handshake fails
                context.load_cert_chain(self.certificate)
            found = {"tls_context": context} if self.scheme == "starttls" else {"ssl_context": context}
        if self.login is not None:
            found |= {"authenticator": self._log_in, "auth_required": True}
            found["auth_require_tls"] = self.scheme == "starttls"  # of smtps it does not see the encryption
        return found | ({"require_starttls": True} if self.scheme == "starttls" else {})

    def _log_in(self, server: Any, session: Any, envelope: Any, mechanism: str, given: Any) -> AuthResult:
        name, password = given.login.decode(), given.password.decode()
        self.logins.append((name, server.transport.get_extra_info("ssl_object") is not None))
        return AuthResult(success=(name, password) == self.login, handled=False)

    def stop(self) -> None:
        if self._controller is not None:
            self._controller.stop()
        self._controller = None

    async def handle_RCPT(self, server: Any, session: Any, envelope: Any, address: str, options: Any) -> str:  # noqa: N802
        self.asked += 1
        if self.refusal:
            return self.refusal
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:  # noqa: N802
        found = email.message_from_bytes(envelope.content, policy=email.policy.default)
        assert isinstance(found, EmailMessage)
        self.mails.append(found)
        self.to.append(list(envelope.rcpt_tos))
        return self.after_data or "250 OK"

    def subjects(self) -> list[str]:
        return [str(mail["Subject"]) for mail in self.mails]
