"""A fuzzer of all four entrances: the API's socket, the steps' socket, an agent's socket, and a node's connection.

`Campaign` runs a cluster of its own with one real node (n1) and a hostile one (n8, the only one of the default partition, so
that what is submitted runs nowhere), and counts requests, exits, new kinds of faults, memory and how long another client
waits. ``python -m tests.attacks.fuzz --minutes 60 --seed 1`` goes on until it finds something; `make fuzz` is that.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from hpcsched.config.load import render_node
from hpcsched.errors import HpcschedError
from hpcsched.loopback.cluster import LocalCluster
from hpcsched.model.codec import spec_to_json
from hpcsched.model.spec import JobSpec
from tests.attacks.grammar import Grammar

ROOT = Path(__file__).parents[2]
ANSWER_S = 30.0  # one that takes longer is a finding
BATCH = 200  # requests before another entrance has its turn
_FAULT = re.compile(r"fault ([0-9a-f]{8}): (cannot .*)")
_BAD = ("Traceback (most recent call last)", "node n1 is down", "Exception in callback", "Fatal error")


class Finding(Exception):
    """The controller or an agent has done what no request may make it do."""


@dataclass
class Tally:
    """What a campaign has come to."""

    requests: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    pings_s: list[float] = field(default_factory=list)
    most_rss_mib: int = 0

    def text(self) -> str:
        """Return it in lines for people."""
        waits = sorted(self.pings_s) or [0.0]
        p50, p99 = (waits[min(len(waits) - 1, int(len(waits) * part))] * 1000 for part in (0.5, 0.99))
        entrances = ", ".join(f"{name} {count}" for name, count in sorted(self.requests.items()))
        answers = ", ".join(f"{status}: {count}" for status, count in sorted(self.statuses.items()))
        return (
            f"requests: {sum(self.requests.values())} ({entrances})\nanswers: {answers}\n"
            f"controller's RSS at most: {self.most_rss_mib} MiB\n"
            f"another client's ping: p50 {p50:.1f} ms, p99 {p99:.1f} ms, most {waits[-1] * 1000:.1f} ms, {len(waits)} pings"
        )


class Campaign:
    """A cluster under attack."""

    def __init__(self, base: Path, seed: int) -> None:
        self.seed = seed
        self.tally = Tally()
        self.base = base
        self.cluster = LocalCluster(
            base,
            ("n1",),
            cpus=8,
            settings={
                "partitions.main": {"nodes": "n8", "default": True},
                "partitions.real": {"nodes": "n1"},
                "scheduler": {"max_jobs": 3000},
            },
        )
        self._rounds = 0
        self._log_at = 0
        self._stop = threading.Event()
        self._pinger = threading.Thread(target=self._ping)

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.cluster.stop()
            raise
        self._pinger.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._pinger.join()
        self.cluster.stop()

    def _start(self) -> None:
        cluster = self.cluster
        machines = cluster.start_machines()
        self.said = self.base / "said"
        self.said.touch()
        words = [sys.executable, "-m", "tests.attacks.hostile_node", str(self.seed), str(self.said), "20000"]
        paths = os.pathsep.join([str(ROOT), str(ROOT / "workers")])
        program = self.base / "evil"
        program.write_text(f"#!/bin/sh\ncd {self.base} && PYTHONPATH={paths} exec {' '.join(words)}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        values = cluster.node_values(machines.nodes["n1"])
        values |= {"python": str(program), "root": str(self.base / "nodes" / "n8")}
        nodes = cluster.config_dir / "nodes.d"
        nodes.mkdir(mode=0o755, parents=True)
        cluster.config_dir.chmod(0o755)
        (nodes / "n8.toml").write_text(render_node("n8", values))
        cluster.write_config()
        cluster.up()
        self.pid = cluster.api("GET", "/v1/ping")["pid"]
        self.work_dir = self.base / "a" / "b" / "c"
        self.work_dir.mkdir(parents=True)
        self._wait_for("n1", 60.0)
        spec = JobSpec(
            name="real",
            script="#!/bin/sh\nsleep 100000\n",
            work_dir=str(self.work_dir),
            partition="real",
            stdout="/dev/null",
        )
        made = cluster.api("POST", "/v1/submit", {"request_id": "", "jobs": [spec_to_json(spec)]})
        self.job_id = int(made["jobs"][0]["job_id"])
        deadline_s = time.monotonic() + 60
        while cluster.api("GET", f"/v1/job/{self.job_id}")["jobs"][0]["state"] != "RUNNING":
            if time.monotonic() > deadline_s:
                raise Finding("the job on the real node does not start")
            time.sleep(0.05)
        self.agent_socket = next(Path(machines.nodes["n1"].root / "agent").rglob("agent.sock"))
        self.log = next(cluster.base.rglob("hpcschedd.log"))
        self.steps_socket = cluster.api_socket.with_name("steps.sock")

    def _wait_for(self, name: str, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while True:
            nodes = {node["name"]: node for node in self.cluster.api("GET", "/v1/nodes")["nodes"]}
            if nodes[name]["link"] == "up":
                return
            if time.monotonic() > deadline_s:
                raise Finding(f"node {name} does not answer: {nodes[name]['link_why']}")
            time.sleep(0.05)

    # ----- the attack

    def round(self) -> None:
        """Attack each entrance once, and look what came of it. Raises Finding."""
        self._rounds += 1
        jobs = [str(self.job_id + at) for at in (1, 2, 3, 5, 8, 13, 50, 200)]
        grammar = Grammar(self.seed * 1_000_003 + self._rounds, jobs, work_dir=str(self.work_dir))
        self._api(grammar, BATCH)
        self._frames(grammar, "steps", self.steps_socket, BATCH)
        self._frames(grammar, "agent", self.agent_socket, BATCH // 2)
        self.look()
        if self._rounds % 10 == 0:
            self._call("POST", "/v1/cancel", b'{"jobs":[],"filters":{"state":"PENDING"}}')

    def _api(self, grammar: Grammar, count: int) -> None:
        connection: _Http | None = None
        last = b""
        for _ in range(count):
            last, plain = grammar.http()
            self.tally.requests["api"] += 1
            connection = connection or _Http(self.cluster.api_socket)
            try:
                status = connection.ask(last, is_whole=plain)
            except TimeoutError:
                raise Finding(f"no answer within {ANSWER_S:g} s to {last[:2000]!r}") from None
            except OSError:
                status = 0
            self.tally.statuses[status] += 1
            if status == 500:
                raise Finding(f"status 500 to {last[:3000]!r}:\n{self.new_log()}")
            if status == 0 or not plain:
                connection.close()
                connection = None
        if connection is not None:
            connection.close()

    def _frames(self, grammar: Grammar, name: str, path: Path, count: int) -> None:
        """Say `count` messages, several of them on each connection."""
        said = 0
        while said < count:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(ANSWER_S)
                try:
                    sock.connect(str(path))
                    for _ in range(grammar.random.randrange(1, 6)):
                        blob = b"b" * 20 if grammar.random.random() < 0.2 else b""
                        sock.sendall(grammar.frame(grammar.step_message(self.job_id), blob))
                        said += 1
                        self.tally.requests[name] += 1
                    if grammar.random.random() < 0.3:
                        sock.settimeout(0.02)
                        sock.recv(1 << 16)
                except TimeoutError:
                    pass
                except (BrokenPipeError, ConnectionResetError):
                    said += 1  # it was cut off for what it had said
                except OSError as error:
                    raise Finding(f"cannot connect to {name}: {error}") from None

    def _call(self, method: str, path: str, body: bytes) -> None:
        connection = _Http(self.cluster.api_socket)
        try:
            connection.ask(
                f"{method} {path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body, is_whole=True
            )
        finally:
            connection.close()

    # ----- what came of it

    def new_log(self) -> str:
        """Return what the controller has logged since the last look."""
        with open(self.log, "rb") as file:
            file.seek(self._log_at)
            data = file.read()
        self._log_at += len(data)
        return data.decode("utf-8", "replace")

    def look(self) -> None:
        """Raise Finding if the controller has ended, has failed at something, or has lost its real node."""
        self.tally.requests["node"] = self.said.stat().st_size
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            raise Finding(f"the controller has ended:\n{self.new_log()[-8000:]}") from None
        rss = re.search(r"VmHWM:\s+(\d+) kB", status)
        if rss is None or "State:\tZ" in status:
            raise Finding(f"the controller has ended:\n{self.new_log()[-8000:]}")
        self.tally.most_rss_mib = max(self.tally.most_rss_mib, int(rss[1]) >> 10)
        log = self.new_log()
        if _FAULT.search(log) or any(bad in log for bad in _BAD):
            at = min(log.find(bad) for bad in (*_BAD, "fault ") if bad in log)
            raise Finding(f"in the controller's log:\n{log[max(0, at - 500) : at + 6000]}")
        for path in self.agent_socket.parent.glob("log*"):
            text = path.read_text(errors="replace")
            if "Traceback" in text:
                raise Finding(f"in the agent's log:\n{text[max(0, text.index('Traceback') - 500) :][:6000]}")

    def attack_as(self, uids: list[int]) -> list[int]:
        """Have each of these accounts attack the API and the steps' socket in a process of its own; return their pids."""
        pids = []
        for number, uid in enumerate(uids):
            pid = os.fork()
            if pid == 0:
                try:
                    os.setgroups([])
                    os.setresgid(uid, uid, uid)
                    os.setresuid(uid, uid, uid)
                    self._attack_without_end(number)
                finally:
                    os._exit(1)
            pids.append(pid)
        return pids

    def _attack_without_end(self, number: int) -> None:
        jobs = [str(self.job_id + at) for at in range(5)]
        for count in range(1 << 30):
            grammar = Grammar(self.seed * 7_000_003 + number * 1_000_003 + count, jobs, work_dir=str(self.work_dir))
            try:
                self._api(grammar, 50)
                self._frames(grammar, "steps", self.steps_socket, 20)
            except (Finding, OSError):  # told to wait, or cut off; a fault shows in the log, which the parent reads
                time.sleep(0.1)
            with open(self.base / f"said-{number}", "w") as file:
                file.write(str(sum(self.tally.requests.values())))

    def _ping(self) -> None:
        """Ask as another client does, and note how long the answer takes."""
        request = b"GET /v1/ping HTTP/1.1\r\n\r\n"
        connection = None
        while not self._stop.wait(0.02):
            started_s = time.perf_counter()
            try:
                connection = connection or _Http(self.cluster.api_socket)
                connection.ask(request, is_whole=True)
            except OSError:
                connection = None
                continue
            self.tally.pings_s.append(time.perf_counter() - started_s)


class _Http:
    """A connection to the API that stays."""

    def __init__(self, path: Path) -> None:
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.settimeout(ANSWER_S)
        self._sock.connect(str(path))
        self._data = b""

    def close(self) -> None:
        self._sock.close()

    def ask(self, request: bytes, *, is_whole: bool) -> int:
        """Send a request and return the status of the answer; 0 if the connection ended. Raises OSError, TimeoutError."""
        self._sock.sendall(request)
        if not is_whole:
            self._sock.shutdown(socket.SHUT_WR)
        head = self._until(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 "):
            return 0
        length = re.search(rb"Content-Length: (\d+)", head)
        size = int(length[1]) if length else 0
        while len(self._data) < size:
            if not self._more():
                return 0
        self._data = self._data[size:]
        return int(head[9:12])

    def _until(self, mark: bytes) -> bytes:
        while mark not in self._data:
            if not self._more():
                return b""
        found, _, self._data = self._data.partition(mark)
        return found

    def _more(self) -> bool:
        part = self._sock.recv(1 << 20)
        self._data += part
        return bool(part)


def main() -> int:
    """Run a campaign; exit status 1 after a finding."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--accounts", type=int, default=0, help="so many others attack as well (as root only)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
        Path(directory).chmod(0o755)
        with Campaign(Path(directory), given.seed) as campaign:
            until_s = time.monotonic() + given.minutes * 60
            for number in range(given.accounts):
                said = campaign.base / f"said-{number}"
                said.touch()
                os.chown(said, 60_001 + number, -1)
            pids = campaign.attack_as([60_001 + number for number in range(given.accounts)])
            said_s = 0.0
            try:
                while time.monotonic() < until_s:
                    campaign.round()
                    if time.monotonic() - said_s > 60:
                        said_s = time.monotonic()
                        print(campaign.tally.text(), flush=True)
            except Finding as finding:
                print(f"seed {given.seed}: {finding}\n{campaign.tally.text()}")
                return 1
            except HpcschedError as error:
                print(f"seed {given.seed}: {error}\n{campaign.tally.text()}")
                return 1
            finally:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                for number in range(given.accounts):
                    said = campaign.base / f"said-{number}"
                    campaign.tally.requests[f"account {number + 1}"] = int(said.read_text() or 0)
            print(f"nothing found\n{campaign.tally.text()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
