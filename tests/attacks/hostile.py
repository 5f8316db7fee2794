"""A hostile account: floods, large and endless requests, slow reading, from one process with bounded means.

Run as ``python3 hostile.py API_SOCKET STEPS_SOCKET SECONDS``, as the account. It needs the standard library only, and ends by
itself. Prints as JSON how often each attack was made and what the controller answered.
"""

import collections
import contextlib
import json
import resource
import select
import socket
import struct
import sys
import threading
import time

MIB = 1 << 20
HELD = 300  # connections at once to each socket
BODIES = 8
READERS = 40
FRAMES = 20
PAUSE_S = 0.002  # between the steps of an attack: the machine is not what is attacked


class Hostile:
    """One account's attacks, each in a thread."""

    def __init__(self, api: str, steps: str, for_s: float) -> None:
        self.api, self.steps = api, steps
        self.until_s = time.monotonic() + for_s
        self.counts: collections.Counter = collections.Counter()

    def run(self) -> None:
        """Attack until the time is over."""
        attacks = (
            self.connections,
            self.bodies,
            self.readers,
            self.large_json,
            self.arrays,
            self.frames,
            self.requests,
        )
        threads = [threading.Thread(target=self._again, args=(attack,), daemon=True) for attack in attacks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, self.until_s - time.monotonic()) + 5.0)
        print(json.dumps(self.counts))

    def _again(self, attack) -> None:  # type: ignore[no-untyped-def]
        while time.monotonic() < self.until_s:
            try:
                attack()
                self.counts[attack.__name__] += 1
            except OSError as error:
                self.counts[f"{attack.__name__}: {type(error).__name__}"] += 1
            time.sleep(PAUSE_S)

    def _connect(self, path: str) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(10.0)
        sock.connect(path)
        return sock

    @contextlib.contextmanager
    def _many(self, count: int, path: str):  # type: ignore[no-untyped-def]
        with contextlib.ExitStack() as stack:
            yield [stack.enter_context(self._connect(path)) for _ in range(count)]

    def _ask(self, method: str, path: str, body: bytes = b"") -> int:
        """Return the status of the answer, 0 if there was none."""
        with self._connect(self.api) as sock:
            sock.settimeout(60.0)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(_head(method, path, len(body)) + body)
            answer = sock.recv(1 << 16)
            status = int(answer.split()[1]) if answer.startswith(b"HTTP/1.1 ") else 0
        self.counts[f"{path} {status}"] += 1
        return status

    # ----- the attacks

    def connections(self) -> None:
        """Hold connections that say nothing, and make more of them as they are closed."""
        with self._many(HELD, self.api), self._many(HELD, self.steps):
            time.sleep(0.5)

    def bodies(self) -> None:
        """Send bodies of 64 MiB, and end none of them."""
        with self._many(BODIES, self.api) as socks:
            for sock in socks:
                sock.sendall(_head("POST", "/v1/submit", 64 * MIB))
            _trickle(socks, b"x" * MIB, rounds=40)

    def readers(self) -> None:
        """Ask for all there is, and read nothing of it."""
        with self._many(READERS, self.api) as socks:
            for sock in socks:
                sock.sendall(_head("GET", "/v1/jobs?all=1", 0) + _head("GET", "/v1/queue", 0))
            time.sleep(3.0)

    def large_json(self) -> None:
        """Have 20 MiB of lists read."""
        self._ask("POST", "/v1/submit", b'{"request_id":"","jobs":[' + b"[]," * (20 * MIB // 3) + b"[]]}")
        self._ask("POST", "/v1/submit", b'{"request_id":"","jobs":[' + b"{}," * 300_000 + b"{}]}")

    def arrays(self) -> None:
        """Fill the queue with arrays, and empty it again."""
        job = {"name": "x", "script": "#!/bin/sh\n", "work_dir": "/tmp", "hold": True}
        for size in (100_000, 10_000):
            one = dict(job, array={"indices": list(range(size))})
            self._ask("POST", "/v1/submit", json.dumps({"request_id": "", "jobs": [one]}).encode())
        self._ask("POST", "/v1/submit", json.dumps({"request_id": "", "jobs": [job] * 250}).encode())
        self._ask("POST", "/v1/cancel", json.dumps({"jobs": [], "filters": {"state": "PENDING"}}).encode())

    def frames(self) -> None:
        """Send frames to the steps socket that are never complete, or take long to read."""
        with self._many(FRAMES, self.steps) as socks:
            for sock in socks[: FRAMES // 2]:
                sock.sendall(struct.pack("!II", 4 * MIB - 100, 0))
            for sock in socks[FRAMES // 2 :]:
                with contextlib.suppress(OSError):
                    sock.sendall(struct.pack("!II", 8 * MIB, 8 * MIB))
            _trickle(socks, b"[" * (MIB // 4), rounds=15)
        text = b'{"type":"StepRequest","argv":[' + b'"",' * 30_000 + b'""]}'
        for _ in range(20):
            with self._connect(self.steps) as sock:
                sock.sendall(struct.pack("!II", len(text), 0) + text)

    def requests(self) -> None:
        """Ask as often as the controller lets this account, and more often."""
        for _ in range(200):
            self._ask("GET", "/v1/ping")


def _head(method: str, path: str, size: int) -> bytes:
    return f"{method} {path} HTTP/1.1\r\nContent-Length: {size}\r\n\r\n".encode()


def _trickle(socks, data: bytes, rounds: int) -> None:  # type: ignore[no-untyped-def]
    """Send data on all that take it, in turn; those that were closed are left out."""
    for sock in socks:
        sock.setblocking(False)
    alive = list(socks)
    for _ in range(rounds):
        for sock in select.select([], alive, [], 0.5)[1]:
            try:
                sock.send(data)
            except BlockingIOError:
                pass
            except OSError:
                alive.remove(sock)
        if not alive:
            return
        time.sleep(0.01)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, 2048))
    resource.setrlimit(resource.RLIMIT_NPROC, (64, 64))
    Hostile(sys.argv[1], sys.argv[2], float(sys.argv[3])).run()
