"""The process that owns the demo's cluster, and removes it when the demo ends.

The demo starts it as `python -m hpcsched.demo.keeper SETTINGS` and talks to it in lines of JSON through pipes (`Keeper`).
When its stdin ends, or on SIGTERM, it stops controller and nodes and removes their directory; after `keep` it stays until
`stop_kept` ends it. It runs in a session of its own, so that Ctrl-C reaches only the demo. It does not know the story.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
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
Server = Literal["auto", "sshd", "embedded"]


def demo_cluster(base: Path, server: Server = "auto") -> LocalCluster:
    """Return the demo's cluster below `base`, not started."""
    return LocalCluster(base, server=server, settings=SETTINGS)


# ----- the demo's side


class ClusterKeeper:
    """Starts the keeper's process and sends it requests, one at a time."""

    def __init__(self, base: Path, server: Server) -> None:
        self._base, self._log = base, base / LOG
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "hpcsched.demo.keeper", json.dumps({"base": str(base), "server": server})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )

    def ask(self, action: str, *arguments: str) -> Json:
        """Have `action` done and return its result. Raises UnavailableError."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        line = b""
        try:
            stdin.write(json.dumps([action, *arguments]).encode() + b"\n")
            stdin.flush()
            if not select.select([stdout], [], [], ANSWER_S)[0]:
                raise UnavailableError(f"cannot {action}: no answer from the cluster's keeper within {ANSWER_S:g} s")
            line = stdout.readline()
        except (BrokenPipeError, ValueError):
            pass
        if not line:
            raise UnavailableError(f"cannot {action}: the cluster's keeper has ended (see {self._log})")
        answer: Json = json.loads(line)
        if "error" in answer:
            raise UnavailableError(answer["error"])
        return answer

    def end(self) -> None:
        """Have everything stopped and removed (unless kept), and wait for that.

        Raises UnavailableError.
        """
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
                f"cannot remove {self._base} cleanly: its keeper did not end within {END_S:g} s and was killed"
            ) from None


def stop_kept(base: Path) -> None:
    """End a cluster that was kept, and remove its directory.

    Raises RequestError if there is none.
    """
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
    if (base / MARK).exists():  # the keeper was killed, and the nodes with it: the controller may still run
        end_cluster(demo_cluster(base))


def _started(pid: int) -> str | None:
    """Return the start time of a process, in ticks; None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            fields = stream.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == b"Z" else fields[19].decode()


# ----- the keeper's side


Identity = tuple[int, str | None]  # pid and start time in ticks


def end_cluster(cluster: LocalCluster, controller: Identity | None = None) -> None:
    """Stop the cluster and remove its directory; report failures on stderr.

    Afterwards kill `controller` if it still runs: it may not answer, or its files may be gone.
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
    """Return the process that answers as the controller, None if there is none."""
    try:
        pid = int(cluster.api("GET", "/v1/ping")["pid"])
    except HpcschedError:
        return None
    return pid, _started(pid)


class _Service:
    """The requests that the keeper understands."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self.is_kept = False
        self.controller: Identity | None = None  # the last one started

    def answer(self, line: bytes) -> Json:
        """Do what one request asks for and return its result."""
        try:
            return self._do(*json.loads(line))
        except (HpcschedError, OSError, subprocess.TimeoutExpired) as error:
            return {"error": str(error)}

    def _do(self, action: str, node: str = "") -> Json:
        cluster, machines = self._cluster, self._cluster.machines
        match action:
            case "machines":
                server = cluster.start_machines().server
                cluster.write_config()
                return {"server": server}
            case "up":
                cluster.up()
                self.controller = _controller(cluster)
            case "connect":
                cluster.wait_for_nodes()
            case "power_off" if machines is not None:
                count = len(machines.processes(node))
                machines.power_off(node)
                return {"killed": count}
            case "power_on" if machines is not None:
                machines.power_on(node)
            case "kill_controller":
                pid = int(cluster.api("GET", "/v1/ping")["pid"])
                os.kill(pid, signal.SIGKILL)
                return {"pid": pid}
            case "keep":
                self.is_kept = True
            case _:
                return {"error": f"cannot {action}: unknown, or the nodes have not been started"}
        return {}


class _Ended(BaseException):
    """SIGTERM came."""


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
        (cluster.base / MARK).write_text(json.dumps({"pid": os.getpid(), "started": _started(os.getpid())}))
        with contextlib.suppress(BrokenPipeError):
            for line in sys.stdin.buffer:
                sys.stdout.buffer.write(json.dumps(service.answer(line)).encode() + b"\n")
                sys.stdout.buffer.flush()
        while service.is_kept:
            signal.pause()
    except _Ended:
        pass
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_cluster(cluster, service.controller)


if __name__ == "__main__":
    main()
