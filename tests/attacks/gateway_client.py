"""Requests to the controller's socket as the gateway's account, and tokens that an attacker makes."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from other_user import become, python_of

# It runs as another account, with any Python: one request, then the status and the body.
PROGRAM = """
import json, socket, sys
path, head, body = sys.argv[1], sys.argv[2], sys.argv[3].encode()
s = socket.socket(socket.AF_UNIX); s.settimeout(20); s.connect(path)
head = head.replace("\\n", "\\r\\n") + "Host: x\\r\\nConnection: close\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body)
s.sendall(head.encode("latin-1") + body)
data = b""
while (part := s.recv(65536)):
    data += part
sys.stdout.buffer.write(data)
"""
ADDRESS = "192.0.2.9"


class Reply(NamedTuple):
    """An answer: status and JSON body."""

    status: int
    body: dict[str, Any]


def ask(
    path: Path,
    method: str,
    route: str,
    body: object = None,
    headers: dict[str, str] | None = None,
    uid: int | None = None,
) -> Reply:
    """Send a request as `uid` (None: as we are) with these headers."""
    lines = [f"{method} {route} HTTP/1.1", *(f"{name}: {value}" for name, value in (headers or {}).items())]
    text = "" if body is None else json.dumps(body)
    python = python_of(uid if uid is not None else os.geteuid())
    words = [*become(uid if uid is not None else os.geteuid()), python, "-I", "-c", PROGRAM]
    done = subprocess.run([*words, str(path), "\n".join(lines) + "\n", text], capture_output=True, cwd="/", check=True)
    head, _, answer = done.stdout.partition(b"\r\n\r\n")
    return Reply(int(head.split()[1]), json.loads(answer))


def forwarded(token: str = "", **more: str) -> dict[str, str]:
    """Return the headers of a request that the gateway forwards."""
    headers = {"X-Hpcsched-Gateway": ADDRESS, **more}
    return headers | ({"Authorization": f"Bearer {token}"} if token else {})


def part(value: object) -> str:
    """Return a part of a JSON Web Token."""
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def parts_of(token: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return header, claims and signature of a token."""
    head, claims, signature = token.split(".")
    header, values = (json.loads(base64.urlsafe_b64decode(text + "==")) for text in (head, claims))
    return header, values, signature
