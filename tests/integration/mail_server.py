"""A mail server on the loopback interface that keeps what it gets, and fails as a test asks."""

from __future__ import annotations

import email
import email.policy
from email.message import EmailMessage
from typing import Any

import pytest

pytest.importorskip("aiosmtpd", reason="needs aiosmtpd: pip install hpcsched[test]")

from aiosmtpd.controller import Controller  # noqa: E402


class MailServer:
    """The server and its mail. `refusal`: what it says to a recipient, "" takes all."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.mails: list[EmailMessage] = []
        self.to: list[list[str]] = []
        self.refusal = ""
        self.after_data = ""  # what it says after the mail
        self.asked = 0  # connections that named a recipient
        self._controller: Any = None

    def start(self) -> None:
        self._controller = Controller(self, hostname="127.0.0.1", port=self.port)
        self._controller.start()

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
