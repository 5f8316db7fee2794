"""The process that owns the demo's cluster, so that nothing is left whatever happens to the one that shows it.

The demo starts it as `python -m hpcsched.demo.keeper SETTINGS` and talks to it in lines of JSON over its stdin and stdout
(`Keeper`). When its stdin ends, or on SIGTERM, it stops the controller and the nodes and removes their directory; only
after `keep` it goes on without anyone, until `stop_kept` ends it.

It does not know the story; it is in a session of its own, so that Ctrl-C is for the demo alone.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from hpcsched.errors import HpcschedError, RequestError, UnavailableError
from hpcsched.loopback.cluster import LocalCluster

MARK = "keeper.json"
LOG = "keeper.log"
ANSWER_S = 120.0
END_S = 60.0
SETTINGS = {
    "controller": {
        "heartbeat_s": 1,
        "node_down_after_s": 3,
        "connect_timeout_s": 5,
        "kill_wait_s": 3,
        "requeue_delay_s": 1,
    }
}

Json = dict[str, Any]


def demo_cluster(base: Path, server: Literal["auto", "sshd", "embedded"] = "auto") -> LocalCluster:
    """Return the demo's cluster below `base`, not started."""
    return LocalCluster(base, server=server, settings=SETTINGS)


# ----- the demo's end


class Keeper:
    """Starts the process and asks it to do things. Used from one thread at a time, but for `end`."""

    def __init__(self, base: Path, server: Literal["auto", "sshd", "embedded"]) -> None:
        self._base = base
        self._log = base / LOG
        self._lock = threading.Lock()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "hpcsched.demo.keeper", json.dumps({"base": str(base), "server": server})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )

    def ask(self, action: str, *arguments: str) -> Json:
        """Have `action` done and return what came of it. Raises UnavailableError."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            try:
                self._process.stdin.write(json.dumps([action, *arguments]).encode() + b"\n")
                self._process.stdin.flush()
            except (BrokenPipeError, ValueError):
                raise UnavailableError(f"cannot {action}: the cluster's keeper has ended (see {self._log})") from None
            if not select.select([self._process.stdout], [], [], ANSWER_S)[0]:
                raise UnavailableError(f"cannot {action}: no answer of the cluster's keeper within {ANSWER_S:g} s")
            line = self._process.stdout.readline()
        if not line:
            raise UnavailableError(f"cannot {action}: the cluster's keeper has ended (see {self._log})")
        answer: Json = json.loads(line)
        if "error" in answer:
            raise UnavailableError(answer["error"])
        return answer

    def end(self) -> None:
        """Have everything stopped and removed (unless `keep` was asked for), and wait for it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the nodes end with their owner
            self._process.wait()
            end_cluster(demo_cluster(self._base))
            raise UnavailableError(
                f"cannot tidy up {self._base} in order: its keeper did not end within {END_S:g} s and was killed"
            ) from None

    def keep(self) -> None:
        """Leave the cluster up, whatever becomes of this process."""
        self.ask("keep")


def stop_kept(base: Path) -> None:
    """End a cluster that was kept, and remove its directory. Raises RequestError if there is none."""
    try:
        mark = json.loads((base / MARK).read_text())
        pid, started = int(mark["pid"]), str(mark["started"])
    except (OSError, ValueError, KeyError):
        raise RequestError(f"cannot stop a demo in {base}: there is none (no {MARK} there)") from None
    if _started(pid) == started:
        os.kill(pid, signal.SIGTERM)
        deadline_s = time.monotonic() + END_S
        while _started(pid) == started:
            if time.monotonic() > deadline_s:
                raise UnavailableError(f"cannot stop the demo in {base}: process {pid} does not end; see {base / LOG}")
            time.sleep(0.05)
    if (base / MARK).exists():  # its keeper was killed, and the nodes with it: the controller may be there still
        end_cluster(demo_cluster(base))


def _started(pid: int) -> str | None:
    """Return when the process was started, in ticks; None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            fields = stream.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == b"Z" else fields[19].decode()


# ----- the keeper's end


Identity = tuple[int, str | None]  # pid and start in ticks


def end_cluster(cluster: LocalCluster, controller: Identity | None = None) -> None:
    """Stop all of the cluster and remove its directory; what cannot be done is said on stderr.

    `controller` is killed if it is there after that: it may not answer, or its files may be gone.
    """
    controller = _controller(cluster) or controller
    try:
        cluster.stop()
    except (HpcschedError, OSError, subprocess.TimeoutExpired) as error:
        print(f"cannot stop all of the cluster: {error}", file=sys.stderr, flush=True)
    if controller is not None and _started(controller[0]) == controller[1] is not None:
        os.kill(controller[0], signal.SIGKILL)
    shutil.rmtree(cluster.base, ignore_errors=True)


def _controller(cluster: LocalCluster) -> Identity | None:
    """Return which process answers as the controller, None if none does."""
    try:
        pid = int(cluster.api("GET", "/v1/ping")["pid"])
    except HpcschedError:
        return None
    return pid, _started(pid)


class _Service:
    """What the demo may ask for."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self.kept = False
        self.controller: Identity | None = None  # the last one that was started

    def machines(self) -> Json:
        nodes = self._cluster.start_machines()
        self._cluster.write_config()
        return {"server": nodes.server, "own_hostnames": all(node.own_hostname for node in nodes.nodes.values())}

    def up(self) -> Json:
        self._cluster.up()
        self.controller = _controller(self._cluster)
        return {}

    def connect(self) -> Json:
        self._cluster.wait_for_nodes()
        return {}

    def power_off(self, name: str) -> Json:
        assert self._cluster.machines is not None
        count = len(self._cluster.machines.processes(name))
        self._cluster.machines.power_off(name)
        return {"killed": count}

    def power_on(self, name: str) -> Json:
        assert self._cluster.machines is not None
        self._cluster.machines.power_on(name)
        return {"boot_id": self._cluster.machines.boot_id(name)}

    def kill_controller(self) -> Json:
        pid = int(self._cluster.api("GET", "/v1/ping")["pid"])
        os.kill(pid, signal.SIGKILL)
        return {"pid": pid}

    def keep(self) -> Json:
        self.kept = True
        return {}

    def answer(self, line: bytes) -> Json:
        """Return what comes of one request."""
        action, *arguments = json.loads(line)
        actions: dict[str, Callable[..., Json]] = {
            "machines": self.machines,
            "up": self.up,
            "connect": self.connect,
            "power_off": self.power_off,
            "power_on": self.power_on,
            "kill_controller": self.kill_controller,
            "keep": self.keep,
        }
        try:
            return actions[action](*arguments)
        except (HpcschedError, OSError, subprocess.TimeoutExpired) as error:
            return {"error": str(error)}


class _Ended(BaseException):
    """SIGTERM came."""


def _serve(service: _Service) -> None:
    for line in sys.stdin.buffer:
        answer = json.dumps(service.answer(line)).encode() + b"\n"
        try:
            sys.stdout.buffer.write(answer)
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            break
    while service.kept:
        signal.pause()


def main() -> None:
    """Own the cluster that the argument describes until stdin ends or SIGTERM comes."""

    def on_sigterm(signum: int, frame: object) -> None:
        raise _Ended

    signal.signal(signal.SIGTERM, on_sigterm)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    settings = json.loads(sys.argv[1])
    cluster = demo_cluster(Path(settings["base"]), settings["server"])
    service = _Service(cluster)
    try:
        mark = {"pid": os.getpid(), "started": _started(os.getpid())}
        (cluster.base / MARK).write_text(json.dumps(mark))
        _serve(service)
    except _Ended:
        pass
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_cluster(cluster, service.controller)


if __name__ == "__main__":
    main()
