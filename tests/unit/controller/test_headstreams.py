"""The steps socket on the head."""

from __future__ import annotations

import asyncio
from pathlib import Path

from waiting import PATIENCE_S

from hpcnode import protocol
from hpcsched.controller.heads import HeadStreams


def test_a_step_command_hears_that_the_controller_is_there(tmp_path: Path) -> None:
    async def ask() -> list[tuple[protocol.Message, bytes]]:
        heads = HeadStreams()
        await heads.serve(tmp_path / "steps.sock", 0o600)
        reader, writer = await asyncio.open_unix_connection(tmp_path / "steps.sock")
        writer.write(protocol.encode(protocol.Ping(7)))
        answer = await asyncio.wait_for(reader.read(1 << 16), PATIENCE_S)
        writer.close()
        await heads.close()
        return list(protocol.Framer().feed(answer))

    assert asyncio.run(ask()) == [(protocol.Pong(7), b"")]
