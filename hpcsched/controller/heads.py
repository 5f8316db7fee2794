"""The steps socket on the head: step commands (hrun) of people here, each connection one stream.

Frames of hpcnode.protocol, both ways; who asks is what the kernel says of the connection.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path

from hpcnode import protocol
from hpcsched.api.identity import peer_uid
from hpcsched.controller.opening import listening_socket
from hpcsched.controller.stepping import Stepping
from hpcsched.controller.stepstate import HEAD

log = logging.getLogger("hpcsched.heads")

READ_BYTES = 256 << 10
MAX_UNSENT_BYTES = 16 << 20  # of a command that reads too slowly: then it is cut off


class HeadStreams:
    """The connections to the steps socket."""

    def __init__(self) -> None:
        self.stepping: Stepping | None = None
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._last_stream = 0
        self._server: asyncio.Server | None = None

    async def serve(self, path: Path, mode: int) -> None:
        """Listen at `path`. Raises ConfigError if that cannot be done."""
        self._server = await asyncio.start_unix_server(self._connected, sock=listening_socket(path, mode))

    async def close(self) -> None:
        """Stop listening and cut all connections."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers.values():
            writer.close()

    def reply(self, stream: int, message: protocol.Message, blob: bytes) -> None:
        """Send to the command on `stream`, if it is still there."""
        writer = self._writers.get(stream)
        if writer is None:
            return
        writer.write(protocol.encode(message, blob))
        if writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            log.warning("cutting off a step command that does not read what it asked for")
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock: socket.socket = writer.get_extra_info("socket")
        uid = peer_uid(sock)
        self._last_stream += 1
        stream = self._last_stream
        self._writers[stream] = writer
        framer = protocol.Framer()
        try:
            while data := await reader.read(READ_BYTES):
                for message, blob in framer.feed(data):
                    self._take(stream, uid, message, blob)
        except (protocol.WireError, ConnectionError) as error:
            log.info("a step command of uid %d was cut off: %s", uid, error)
        finally:
            del self._writers[stream]
            writer.close()
            if self.stepping is not None:
                self.stepping.on_stream_closed((HEAD, stream))

    def _take(self, stream: int, uid: int, message: protocol.Message, blob: bytes) -> None:
        if isinstance(message, protocol.Ping):  # as agents answer it themselves
            self.reply(stream, protocol.Pong(message.request), b"")
            return
        if self.stepping is None:
            return
        said = protocol.FromStream(stream=stream, uid=uid, job_id=0, attempt=0, message=protocol.to_json(message))
        self.stepping.on_from_stream(HEAD, said, blob)
