"""What the audit log costs: submissions per second with it, and of a controller that leaves the records out.

Each is a controller of its own with a database on disk, and two connections submit one job a request. Short rounds of
the two alternate, so that both meet the same machine; the figures compare the medians of blocks of rounds.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from hpcsched import client
from hpcsched.errors import HpcschedError
from tests.bench.figures import Figure, from_samples

CONNECTIONS = 2
BLOCK = 40  # rounds: a tick that happens to plan is in some rounds of both, and in no comparison of two alone
JOB = {"name": "j", "script": "#!/bin/sh\n", "work_dir": "/tmp", "begin_at_s": 4_000_000_000}
WITH = "from hpcsched.controller.__main__ import main; main()"
WITHOUT = (
    """
from hpcsched.controller.views import backend
backend.entry_of = lambda *words, **values: None
backend.Transaction.differences = lambda self: ("", {}, {})
backend.Transaction.audit = lambda self, entry: None
backend.Transaction.record_decision = lambda self, source: None
"""
    + WITH
)
NODE = 'host = "127.0.0.1"\nport = 1\ncpus = 1\nmemory = "1G"\nhost_key = "{}"\n'  # nothing answers there
START_S = 30.0
CPUCLOCK_SCHED = 2  # clock_getcpuclockid(3): this, and the complement of the process's id


class Round(NamedTuple):
    """Submissions per second, and the controller's processor time for each."""

    per_s: float
    cpu_ms: float


def run(quick: bool = False) -> list[Figure]:
    """Return the rates of both, and what the log takes from it."""
    count, pairs = (20, 200) if quick else (20, 800)
    with tempfile.TemporaryDirectory(prefix="audit-") as folder:
        with_log, without = Path(folder) / "with", Path(folder) / "without"
        with controller(with_log, WITH) as one, controller(without, WITHOUT) as other:
            rounds: list[tuple[Round, Round]] = []
            for at in range(pairs + 1):
                order = (one, other) if at % 2 else (other, one)
                found = {where: submissions(where, count) for where in order}
                rounds.append((found[one], found[other]))
            assert (records_of_submissions(one), records_of_submissions(other)) == (count * (pairs + 1), 0)
    rounds = rounds[1:]  # the first pair warms up
    rates, work = [(a.per_s, b.per_s) for a, b in rounds], [(a.cpu_ms, b.cpu_ms) for a, b in rounds]
    return [
        from_samples("submissions with the audit log", [with_it for with_it, _ in rates], "/s"),
        from_samples("submissions without it", [without for _, without in rates], "/s"),
        from_samples(
            "fewer with it", [100 * (1 - with_it / without) for with_it, without in in_blocks(rates)], "%", bar="<= 5 %"
        ),
        from_samples("controller's CPU of a submission, with it", [with_it for with_it, _ in work], "ms"),
        from_samples(
            "more than without it", [100 * (with_it / without - 1) for with_it, without in in_blocks(work)], "%"
        ),
    ]


def in_blocks(pairs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the medians of both figures in each block of rounds."""
    blocks = [pairs[at : at + BLOCK] for at in range(0, len(pairs), BLOCK)]
    return [(median(one for one, _ in block), median(other for _, other in block)) for block in blocks]


@contextlib.contextmanager
def controller(base: Path, code: str) -> Iterator[str]:
    """Run a controller with a node that does not answer, and give its socket."""
    base.mkdir()
    environ = os.environ | {"HPCSCHED_CONFIG": str(base / "config"), "HOME": str(base)}
    subprocess.run([Path(sys.executable).parent / "hpcsched", "init"], env=environ, check=True, capture_output=True)
    (base / "config" / "conf.d").mkdir()
    (base / "config" / "conf.d" / "bench.toml").write_text("[controller]\nallow_uid_below = 0\n")
    (base / "config" / "nodes.d" / "n1.toml").write_text(NODE.format(_public_key()))
    words = [sys.executable, "-c", code, "--config", str(base / "config"), "--log-file", str(base / "log")]
    with subprocess.Popen(words, env=environ) as process:
        where = str(base / "config" / "state" / "run" / "api.sock")
        try:
            _wait_for(where)
            yield where
        finally:
            process.terminate()


def submissions(where: str, count: int) -> Round:
    """Submit `count` jobs over all connections."""
    pid = int(client.call("GET", "/v1/ping", where=where)["pid"])
    before_s = cpu_s(pid)
    threads = [threading.Thread(target=_submit, args=(where, count // CONNECTIONS)) for _ in range(CONNECTIONS)]
    started_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took_s = time.perf_counter() - started_s
    return Round(count / took_s, 1000 * (cpu_s(pid) - before_s) / count)


def records_of_submissions(where: str) -> int:
    """Return how many submissions a controller has in its audit log."""
    after, found = 0, 0
    while records := client.call("GET", f"/v1/audit?limit=5000&after={after}", where=where)["records"]:
        found += sum(record["action"] == "submit" for record in records)
        after = records[-1]["seq"]
    return found


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used, in nanoseconds' resolution: /proc counts in ticks."""
    return time.clock_gettime(~pid << 3 | CPUCLOCK_SCHED)


def _submit(where: str, count: int) -> None:
    jobs: Sequence[object] = [JOB]
    for _ in range(count):
        client.call("POST", "/v1/submit", {"request_id": "", "jobs": jobs}, where=where)


def _public_key() -> str:
    key = Ed25519PrivateKey.generate().public_key()
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def _wait_for(where: str) -> None:
    deadline_s = time.monotonic() + START_S
    while True:
        with contextlib.suppress(HpcschedError):
            client.call("GET", "/v1/ping", where=where)
            return
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the controller at {where} does not answer")
        time.sleep(0.05)
