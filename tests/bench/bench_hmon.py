"""How long a person waits for hmon with 10,000 jobs in the queue: its start, and a key, on a real terminal.

The floor is `python3 -c "import textual.app"` in the same run: no program with textual starts faster.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import termios
import time
import uuid
from pathlib import Path

from hpcsched import client
from hpcsched.loopback.cluster import LocalCluster
from hpcsched.model.codec import spec_to_json
from hpcsched.model.spec import JobSpec
from tests.bench.figures import Figure, from_samples

JOBS, AT_ONCE = 10_000, 1_000
PATIENCE_S = 60.0
KEYS = (b"j", b"\x1b[6~", b"G", b"k", b"g")
FILTER = (b"/", *(bytes([char]) for char in b"noop 99 held"))


def run(quick: bool) -> list[Figure]:
    """Start hmon several times, and press keys on the screen of the queue."""
    with tempfile.TemporaryDirectory() as directory, LocalCluster(Path(directory), ("n1", "n2")) as cluster:
        spec = spec_to_json(
            JobSpec(name="noop", script="#!/bin/sh\n", work_dir=str(cluster.share), stdout="/dev/null", hold=True)
        )
        for _ in range(JOBS // AT_ONCE):
            body = {"request_id": uuid.uuid4().hex, "jobs": [spec] * AT_ONCE}
            client.call("POST", "/v1/submit", body, where=cluster.api_socket)
        floors, starts, keys, filters = [], [], [], []
        for _ in range(5 if quick else 15):
            began_s = time.perf_counter()
            subprocess.run([sys.executable, "-c", "import textual.app"], check=True)
            floors.append(1000 * (time.perf_counter() - began_s))
            start_ms, key_ms, filter_ms = _once(cluster)
            starts.append(start_ms)
            keys += key_ms
            filters += filter_ms
        floor = from_samples("", floors, "ms").value
        return [
            from_samples(
                "hmon's first screen", starts, "ms", bar="<= 600 ms", floor=floor, floor_name="import textual"
            ),
            from_samples("a key at 10,000 jobs", keys, "ms", bar="<= 50 ms"),
            Figure(name="a key, 95 of 100", value=sorted(keys)[int(len(keys) * 0.95)], unit="ms", bar="<= 50 ms"),
            Figure(name="a key, the highest", value=max(keys), unit="ms", bar="<= 50 ms"),
            from_samples("a character of a filter", filters, "ms", bar="<= 50 ms"),
            Figure(name="a character of a filter, the highest", value=max(filters), unit="ms", bar="<= 50 ms"),
        ]


def _once(cluster: LocalCluster) -> tuple[float, list[float], list[float]]:
    """Return how long the start, each key, and each character of a filter took, in milliseconds."""
    here, there = os.openpty()
    termios.tcsetwinsize(there, (24, 80))
    env = {**cluster.env, "TERM": "xterm", "PYTHONUTF8": "1"}
    began_s = time.perf_counter()
    hmon = str(Path(sys.executable).with_name("hmon"))
    with subprocess.Popen([hmon], stdin=there, stdout=there, stderr=there, env=env):
        os.close(there)
        _read_until(here, b"n2")
        start_ms = 1000 * (time.perf_counter() - began_s)
        os.write(here, b"2")
        _read_until(here, b"JobHeldUser")
        keys = [_pressed(here, key) for key in KEYS * 4]
        filters = [_pressed(here, key) for key in FILTER]
        os.write(here, b"\x1b")
        time.sleep(0.5)  # an escape alone is told from a sequence by time
        os.write(here, b"q")
        while select.select([here], [], [], PATIENCE_S)[0]:
            try:
                os.read(here, 65536)
            except OSError:  # it has ended
                break
    os.close(here)
    return start_ms, keys, filters


def _pressed(descriptor: int, key: bytes) -> float:
    """Press a key, and return the milliseconds until the screen changes."""
    time.sleep(0.2)
    while select.select([descriptor], [], [], 0)[0]:
        os.read(descriptor, 65536)
    pressed_s = time.perf_counter()
    os.write(descriptor, key)
    select.select([descriptor], [], [], PATIENCE_S)
    return 1000 * (time.perf_counter() - pressed_s)


def _read_until(descriptor: int, part: bytes) -> None:
    text = b""
    while part not in text:
        if not select.select([descriptor], [], [], PATIENCE_S)[0]:
            raise TimeoutError(f"hmon does not show {part!r}: {text!r}")
        text += os.read(descriptor, 65536)
