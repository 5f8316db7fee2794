"""Five hostile accounts against one controller: what others' requests take meanwhile, and what the controller holds."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from hpcsched import client
from hpcsched.loopback.cluster import LocalCluster

ACCOUNTS = (
    65534,
    1,
    2,
    30001,
    30002,
)  # the first may have accounts: what they submit is taken, unless that is forbidden
SYSTEM_PYTHON = "/usr/bin/python3"  # one that every account can run
PINGS_PER_S = 20.0
SUBMISSIONS_PER_S = 2.0
JOB = {"name": "victim", "script": "#!/bin/sh\n", "work_dir": "/tmp", "hold": True}


@dataclass
class Found:
    """What a siege found. Times in seconds."""

    pings: list[float] = field(default_factory=list)
    submissions: list[float] = field(default_factory=list)
    most_rss_mb: float = 0.0
    log_bytes: int = 0
    disk_bytes: int = 0
    same_process: bool = False
    failures: list[str] = field(default_factory=list)
    attacks: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return "\n".join(
            (
                f"ping        {_figures(self.pings)}",
                f"submission  {_figures(self.submissions)}",
                f"RSS         {self.most_rss_mb:.0f} MB at most",
                f"files       {self.disk_bytes / 1e6:.0f} MB at the end, log {self.log_bytes / 1e3:.0f} kB",
                f"exits       {0 if self.same_process else 1}, failed requests of others {self.failures[:3]}",
                f"attacks     {json.dumps(dict(sorted(self.attacks.items())))}",
            )
        )


def percentile(samples: list[float], part: float) -> float:
    """Return the value that this part of the samples is not above."""
    return sorted(samples)[min(len(samples) - 1, int(part * len(samples)))]


def besiege(base: Path, for_s: float) -> Found:
    """Have all accounts attack a controller of one node below `base`, which they can enter, for so long."""
    found = Found()
    with LocalCluster(base, ["n1"], settings={"controller": {"run_dir": str(base / "run")}}) as cluster:
        pid = client.call("GET", "/v1/ping", where=cluster.api_socket)["pid"]
        for one in (pid, 0):  # the controller and whom it serves: what else this machine does is not measured
            os.setpriority(os.PRIO_PROCESS, one, -15)
            _set_autogroup(one or "self", -15)
        hostile = Path(__file__).with_name("hostile.py").read_text()
        words = [str(cluster.api_socket), str(cluster.api_socket.with_name("steps.sock")), str(for_s)]
        attackers = [
            subprocess.Popen(
                [SYSTEM_PYTHON, "-I", "-c", hostile, *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                user=uid,
                group=65534,
                extra_groups=[],
                cwd="/",
                start_new_session=True,  # with an autogroup of its own
                preexec_fn=_lower_priority,
            )
            for uid in ACCOUNTS
        ]
        try:
            _measure(cluster, pid, for_s, found)
            for attacker in attackers:
                said, errors = attacker.communicate(timeout=90)
                assert attacker.returncode == 0, errors.decode()[-2000:]
                found.attacks.update(json.loads(said))
        finally:
            for attacker in attackers:
                attacker.kill()
                attacker.wait()
        found.same_process = client.call("GET", "/v1/ping", where=cluster.api_socket)["pid"] == pid
        found.log_bytes = sum(path.stat().st_size for path in (cluster.config_dir / "state").glob("hpcschedd.log*"))
        found.disk_bytes = sum(path.stat().st_size for path in cluster.config_dir.rglob("*") if path.is_file())
    return found


def _set_autogroup(process: int | str, nice: int) -> None:
    """Set the weight of the session's group: within it alone the priority of a process counts."""
    with contextlib.suppress(OSError):  # the default group has no weight; some kernels have no groups
        Path(f"/proc/{process}/autogroup").write_text(str(nice))


def _lower_priority() -> None:
    os.setpriority(os.PRIO_PROCESS, 0, 5)
    _set_autogroup("self", 5)


def _measure(cluster: LocalCluster, pid: int, for_s: float, found: Found) -> None:
    until_s = time.monotonic() + for_s

    def ask(method: str, path: str, body: dict[str, object] | None, per_s: float, samples: list[float]) -> None:
        while time.monotonic() < until_s:
            began_s = time.monotonic()
            try:
                client.call(method, path, body, where=cluster.api_socket)
            except Exception as error:  # it is what is looked for: told at the end
                found.failures.append(str(error))
            took_s = time.monotonic() - began_s
            samples.append(took_s)
            found.most_rss_mb = max(found.most_rss_mb, _rss_mb(pid))
            time.sleep(max(0.0, 1 / per_s - took_s))

    threads = [
        threading.Thread(target=ask, args=("GET", "/v1/ping", None, PINGS_PER_S, found.pings)),
        threading.Thread(
            target=ask,
            args=("POST", "/v1/submit", {"request_id": "", "jobs": [JOB]}, SUBMISSIONS_PER_S, found.submissions),
        ),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _rss_mb(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:
        return 0.0
    return next((int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmRSS")), 0.0)


def _figures(samples: list[float]) -> str:
    parts = ", ".join(f"p{round(part * 100)} {percentile(samples, part) * 1000:.0f} ms" for part in (0.5, 0.9, 0.99))
    return f"{parts}, max {max(samples) * 1000:.0f} ms, {len(samples)} asked"
