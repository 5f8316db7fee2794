"""Parse the JSON bodies of requests without delaying other clients for long.

A small body is parsed at once. Larger ones are parsed one after the other for each account. A body
of more than `LARGE_BYTES`, or with very many values, is checked and split into its jobs by a
separate process (`splitbody`). This process parses the parts, with breaks. Threads would not help:
the JSON parser holds the GIL from a body's first byte to its last.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Any

from hpcsched.api import splitbody
from hpcsched.api.connection_limits import Breaks, Turns
from hpcsched.errors import RequestError, UnavailableError

SMALL_BYTES = 16 << 10
LARGE_BYTES = 1 << 20
MANY_VALUES = 100_000  # they are parsed within about 10 ms
MAX_VALUES = 1_000_000
MAX_VALUES_OF_PART = 250_000
AT_ONCE = 2  # of all accounts
PATIENCE_S = 30.0


class Bodies:
    """Parses bodies; `parse` makes an object from JSON text, or raises RequestError."""

    def __init__(self, parse: Callable[[bytes], Any], max_jobs: int) -> None:
        self._parse = parse
        self._max_jobs = max_jobs
        self._turns = Turns(1, AT_ONCE)
        self._here = asyncio.Semaphore(1)

    async def read(self, uid: int, body: bytes) -> Any:
        """Return the parsed body of the account `uid`. Raises RequestError, UnavailableError."""
        if len(body) <= SMALL_BYTES:
            return self._parse(body)
        async with self._turns.turn(uid):
            if len(body) <= LARGE_BYTES and body.count(b",") + body.count(b"[") + body.count(b"{") <= MANY_VALUES:
                async with self._here:
                    await asyncio.sleep(0)
                    return self._parse(body)
            out = await asyncio.to_thread(self._split, body)
            return await self._joined(out)

    def _split(self, body: bytes) -> int:
        """Return an open file with the parts of the body."""
        given = os.memfd_create("body")
        out = os.memfd_create("parts")
        try:
            _write(given, body)
            numbers = (MAX_VALUES, MAX_VALUES_OF_PART, self._max_jobs)
            done = subprocess.run(
                [sys.executable, "-I", "-S", splitbody.__file__, *map(str, numbers)],
                stdin=given,
                stdout=out,
                stderr=subprocess.PIPE,
                timeout=PATIENCE_S,
                check=False,
                cwd="/",
                env={},
            )
            if done.returncode == 1:
                why = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
                raise RequestError(f"cannot read the request: {why[:300]}")
            if done.returncode:
                raise RequestError(f"cannot read the request: it takes too long or too much memory ({len(body)} bytes)")
        except subprocess.TimeoutExpired:
            os.close(out)
            raise RequestError(f"cannot read the request: it takes more than {PATIENCE_S:g} s") from None
        except OSError as error:
            os.close(out)
            raise UnavailableError(f"cannot read the request: {error.strerror}; try again") from None
        except RequestError:
            os.close(out)
            raise
        finally:
            os.close(given)
        return out

    async def _joined(self, out: int) -> Any:
        """Return the object whose parts are in the file."""
        with closing(os.fdopen(out, "rb")) as file:
            file.seek(0)
            breaks = Breaks()
            parts = []
            while length := file.read(splitbody.LENGTH.size):
                parts.append(self._parse(file.read(splitbody.LENGTH.unpack(length)[0])))
                if breaks.due():
                    await breaks.take()
        found, *jobs = parts
        return {**found, "jobs": jobs} if jobs else found


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
