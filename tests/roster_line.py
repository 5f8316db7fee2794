"""A member's connection to the roster, as a test speaks it: both ends prove the key, and each line is authenticated."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hpctrain.peers import GUEST, Messages, Proof


class RosterLine:
    """One end of a connection to the roster's server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def prove(self, key: str) -> None:
        mine = Proof(key.encode(), GUEST, encrypted=False)
        self.writer.write(mine.nonce.hex().encode() + b"\n")
        other, proof = map(bytes.fromhex, (await self.reader.readline()).decode().split())
        self.writer.write(mine.of(GUEST, other).hex().encode() + b"\n")
        session = mine.checked(other, proof)
        if session is not None:
            self._messages = Messages(session)

    def say(self, **message: object) -> None:
        self.writer.write(self._messages.wrapped(json.dumps(message).encode()))

    async def hear(self) -> dict[str, Any]:
        line = await self.reader.readline()
        return json.loads(self._messages.unwrapped(line)) if line else {}


async def connected(port: int, key: str) -> RosterLine:
    """Return a connection that has proved the key."""
    line = RosterLine(*await asyncio.open_connection("127.0.0.1", port))
    await line.prove(key)
    return line
