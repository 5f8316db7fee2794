"""`hpcsched rolling -- COMMAND`: run a command on nodes in turn, each without jobs.

A node is drained, its jobs end, the command runs there, it may be rebooted, it is checked, and it is
resumed. The first failure ends the roll: that node stays drained. A node that a waiting job cannot do
without is taken last, when the job has run.

The progress is written after every step, so that `--continue` goes on where a roll has ended. The
command may then run a second time on a node where its end was not seen. Commands run over SSH with
the caller's own key, never with the launch key, which is made for starting agents.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

import click

from hpcnode.os.trust import check_path
from hpcsched import client
from hpcsched.cli.admin.node import measured_slow
from hpcsched.cli.output import print_json
from hpcsched.config.keys import LOCAL_HOST
from hpcsched.config.load import Config, load_config
from hpcsched.errors import ConflictError, HpcschedError, NotFoundError, RequestError, UnavailableError
from hpcsched.launch import ssh_settings
from hpcsched.launch.pipe import Abort, LinkError
from hpcsched.listing.text import clean, columns
from hpcsched.model.hostlist import compress_hostlist, expand_hostlist
from hpcsched.model.node import Link, NodeSpec
from hpcsched.model.units import UNLIMITED_S, nearest, parse_time_s
from hpcsched.paths import find_config_dir
from hpcsched.sched.place.feasible import never_fits
from hpcsched.sched.sentences import plural
from hpcsched.sched.snapshot import PendingJob, Snapshot, allows, snapshot_from_json

LOOK_S = 1.0
MOST_OUTPUT_BYTES = 16 << 20  # of one node that are kept
READ_BYTES = 65536
WHY = "rolling"  # the first word of the reason of our drains
REBOOT = "systemctl reboot || reboot"

Json = dict[str, Any]


class Phase(StrEnum):
    """Where a node is in the roll."""

    TO_DO = "to do"
    DRAINING = "draining"
    RUNNING = "running"
    REBOOTING = "rebooting"
    CHECKING = "checking"
    DONE = "done"
    FAILED = "failed"
    LEFT_OUT = "left out"


OPEN = (Phase.TO_DO, Phase.DRAINING, Phase.RUNNING, Phase.REBOOTING, Phase.CHECKING)


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What is done to each node. Times in seconds."""

    command: tuple[str, ...]
    at_once: int = 1
    max_failures: int = 1
    wait_s: float | None = None  # for the jobs of a node
    requeue: bool = False
    reboot: str = ""  # the command that reboots a node; "": it is not rebooted
    limit_s: float = 3600.0  # of the command
    boot_s: float = 900.0
    check: str = ""
    bench: bool = False
    user: str = ""
    identity: str = ""


@dataclass
class NodeProgress:
    """One node of the roll."""

    phase: Phase = Phase.TO_DO
    why: str = ""
    boot_id: str = ""  # before the reboot
    kernel: str = ""  # before the reboot


@dataclass
class Roll:
    """A roll and its progress."""

    orders: Orders
    nodes: dict[str, NodeProgress] = field(default_factory=dict)

    def in_phase(self, *phases: Phase) -> list[str]:
        """Return the nodes that are in one of the phases."""
        return [name for name, node in self.nodes.items() if node.phase in phases]


class NodeFailedError(HpcschedError):
    """A step has failed on a node; the text says which."""


class StoppedError(HpcschedError):
    """The roll ends, and the node is neither done nor failed."""


# ----- the choice of the next node


def next_node(candidates: Iterable[str], snapshot: Snapshot) -> tuple[str | None, dict[str, str]]:
    """Return the candidate whose jobs end first, and the waiting jobs that need others.

    A node is needed if a waiting job could start on the usable nodes, and without this one never.
    """
    needed: dict[str, str] = {}
    free: list[tuple[float, str]] = []
    ends_s: dict[str, float] = {}
    for job in snapshot.running:
        for share in job.shares:
            end_s = job.ends_at_s if job.ends_at_s is not None else float("inf")
            ends_s[share.node] = max(ends_s.get(share.node, 0.0), end_s)
    for name in candidates:
        job_id = next((job.display_id for job in snapshot.pending if _needs(job, name, snapshot)), None)
        if job_id is None:
            free.append((ends_s.get(name, 0.0), name))
        else:
            needed[name] = job_id
    return min(free)[1] if free else None, needed


def _needs(job: PendingJob, name: str, snapshot: Snapshot) -> bool:
    """Return whether the job can start somewhere, in each partition only with this node."""
    possible = []
    for view in (job, *job.others):
        partition = snapshot.partitions.get(view.partition)
        if partition is None:
            continue
        shape, mine = view.request.shape, set(partition.nodes)
        nodes = [node for node in snapshot.nodes if node.name in mine and node.usable and allows(shape, node)]
        if not never_fits(shape, nodes):
            possible.append(never_fits(shape, [node for node in nodes if node.name != name]))
    return bool(possible) and all(possible)


# ----- progress on disk


class RollFile:
    """The directory with the progress and the output of each node.

    One process at a time uses it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self._path = self.directory / "roll.json"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes out. Raises ConflictError if one is at work."""
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_directory()
            lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            why = error.strerror or f"{error}. Or name another directory: --state DIR"
            raise RequestError(f"cannot keep the progress in {self.directory}: {why}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConflictError(
                "cannot begin: another 'hpcsched rolling' is at work here; see hpcsched rolling --status"
            ) from None
        else:
            yield
        finally:
            os.close(lock)

    def _check_directory(self) -> None:
        """Raise PermissionError if others could write what --continue runs on the nodes.

        Users may share the directories above with their own group; root may not.
        """
        status = os.stat(self.directory)
        if os.geteuid() == 0:
            check_path(self.directory, 0)
        elif status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise PermissionError(f"others may write there; run: chmod 700 {self.directory}")

    def read(self) -> Roll | None:
        """Return the last roll, None if there was none. Raises RequestError for a damaged file."""
        try:
            self._check_directory()
            found = json.loads(self._path.read_bytes())
            orders = Orders(**{**found["orders"], "command": tuple(found["orders"]["command"])})
            nodes = {
                str(name): NodeProgress(
                    Phase(node["phase"]), str(node["why"]), str(node["boot_id"]), str(node.get("kernel", ""))
                )
                for name, node in found["nodes"].items()
            }
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise RequestError(
                f"cannot read the progress in {self._path} ({error}); look which nodes are drained (hinfo -R), resume them, "
                "and delete the file"
            ) from None
        return Roll(orders, nodes)

    def write(self, roll: Roll) -> None:
        """Replace the file. It is whole after a crash."""
        data = {"version": 1, "orders": asdict(roll.orders), "nodes": {n: asdict(p) for n, p in roll.nodes.items()}}
        temporary = self._path.with_suffix(".new")
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as file:
            json.dump(data, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path)

    def output_of(self, name: str) -> Path:
        """Return the file with what the commands of a node printed."""
        return self.directory / f"{name}.out"


# ----- commands on a node


class RemoteShell:
    """Runs commands on nodes: over SSH, or here if the node is this machine."""

    def __init__(self, config: Config, orders: Orders) -> None:
        self._specs: dict[str, NodeSpec] = {spec.name: spec for spec in config.nodes}
        self._settings = replace(ssh_settings(config), launch_key=None)
        self._orders = orders

    def spec(self, name: str) -> NodeSpec:
        """Return how the node is reached, as the caller."""
        spec, orders = self._specs[name], self._orders
        return replace(spec, user=orders.user or spec.user, identity_file=orders.identity or spec.identity_file)

    def run(
        self, name: str, command: str, limit_s: float, output: Path, stop: threading.Event, stdin: bytes = b""
    ) -> int | None:
        """Run the command and append what it prints to `output`.

        Return its status, None if the connection was lost. Raises NodeFailedError after `limit_s` or without a login.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        with open(os.open(output, flags, 0o600), "wb") as file:
            file.write(f"$ {command}\n".encode())
            file.flush()
            spec = self.spec(name)
            run = _run_here if spec.host == LOCAL_HOST else self._run_there
            return run(spec, command, time.monotonic() + limit_s, _Kept(file), stop, stdin)

    def _run_there(
        self, spec: NodeSpec, command: str, until_s: float, kept: _Kept, stop: threading.Event, stdin: bytes
    ) -> int | None:
        import paramiko  # slow to import, and not needed for --status

        from hpcsched.launch.ssh import close_all, connect

        try:
            transports = connect(spec, self._settings, Abort(), lambda stage: None)
        except LinkError as error:
            raise NodeFailedError(f"cannot log in: {error}") from None
        try:
            channel = transports[-1].open_session(timeout=self._settings.timeout_s)
            channel.set_combine_stderr(True)
            channel.settimeout(LOOK_S)
            channel.exec_command(command)
            while stdin:
                _check_time(until_s, stop)
                with suppress(socket.timeout):
                    stdin = stdin[channel.send(stdin[:READ_BYTES]) :]
            channel.shutdown_write()
            while True:
                _check_time(until_s, stop)
                with suppress(socket.timeout):
                    data = channel.recv(READ_BYTES)
                    if not data:
                        break
                    kept.write(data)
            channel.status_event.wait(LOOK_S)
            return channel.exit_status if channel.exit_status >= 0 else None
        except (paramiko.SSHException, EOFError, OSError):
            return None
        finally:
            close_all(transports)


def _run_here(
    spec: NodeSpec, command: str, until_s: float, kept: _Kept, stop: threading.Event, stdin: bytes
) -> int | None:
    with (
        _file_of(stdin) as given,
        subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK_S / 10)
                while data := process.stdout.read(READ_BYTES):
                    kept.write(data)
                if process.returncode is not None:
                    return process.returncode
                _check_time(until_s, stop)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # what the shell has started too
            raise


def _file_of(data: bytes) -> IO[bytes]:
    """Return a file without a name, with this content."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(data)
    file.seek(0)
    return file


class _Kept:
    """The output file of a node, up to a size."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._left = MOST_OUTPUT_BYTES

    def write(self, data: bytes) -> None:
        self._file.write(data[: self._left])
        self._file.flush()
        self._left -= len(data[: self._left])


def _check_time(until_s: float, stop: threading.Event) -> None:
    if stop.is_set():
        raise StoppedError("the roll was stopped")
    if time.monotonic() > until_s:
        raise NodeFailedError("the command takes too long (--limit)")


# ----- the roll


class Roller:
    """Takes nodes through the phases."""

    def __init__(self, roll: Roll, file: RollFile, shell: RemoteShell, say: Callable[[str], None]) -> None:
        self._roll, self._file, self._shell, self._say = roll, file, shell, say
        self._orders = roll.orders
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._errors: list[BaseException] = []
        self._told: dict[str, str] = {}

    def run(self) -> None:
        """Roll until all nodes are done, too many have failed, or Ctrl-C."""
        threads: dict[str, threading.Thread] = {}
        begun = self._roll.in_phase(Phase.DRAINING, Phase.RUNNING, Phase.REBOOTING, Phase.CHECKING)
        try:
            while not self._stop.is_set():
                threads = {name: thread for name, thread in threads.items() if thread.is_alive()}
                failed = len(self._roll.in_phase(Phase.FAILED))
                ends = failed >= self._orders.max_failures or bool(self._errors)
                if ends or not (begun or self._roll.in_phase(Phase.TO_DO)):
                    break
                if len(threads) < self._orders.at_once:
                    name = begun.pop() if begun else self._next()
                    if name is not None:
                        threads[name] = threading.Thread(target=self._take, args=(name,))
                        threads[name].start()
                        continue
                self._stop.wait(LOOK_S)
        except KeyboardInterrupt:
            self._stop.set()
            raise
        finally:
            for thread in threads.values():
                thread.join()
        if self._errors:
            raise self._errors[0]

    def _next(self) -> str | None:
        """Return the next node, drained, or None: there is none now."""
        todo = self._roll.in_phase(Phase.TO_DO)
        views = {view["name"]: view for view in client.call("GET", "/v1/nodes")["nodes"]}
        for name in todo:
            why = _why_left_out(views.get(name))
            if why:
                self._note(name, Phase.LEFT_OUT, why)
        todo = self._roll.in_phase(Phase.TO_DO)
        snapshot, _ = snapshot_from_json(client.call("GET", "/v1/snapshot")["snapshot"])
        chosen, needed = next_node(todo, snapshot)
        if chosen is None:
            for other, job in needed.items():
                if self._told.get(other) != job:
                    self._told[other] = job
                    self._say(f"{other}: not taken now, because job {job} waits for it")
            return None
        self._note(chosen, Phase.DRAINING)  # first: a drained node without a note would look like somebody else's
        client.call("POST", "/v1/nodes/drain", {"nodes": chosen, "why": f"{WHY}: {self._shown()}"})
        return chosen

    def _shown(self) -> str:
        text = shlex.join(self._orders.command)
        return text if len(text) <= 60 else text[:57] + "..."

    def _take(self, name: str) -> None:
        """Take the node through its phases, from where it is."""
        try:
            self._through(name)
        except StoppedError:
            self._say(f"{name}: stopped while {self._roll.nodes[name].phase}; it is still drained")
        except NodeFailedError as error:
            self._fail(name, str(error))
        except Exception as error:  # of this thread: the main thread raises it
            self._errors.append(error)

    def _fail(self, name: str, why: str) -> None:
        with suppress(HpcschedError):  # it is drained already; the reason is for others
            client.call("POST", "/v1/nodes/drain", {"nodes": name, "why": f"{WHY}: {why}"[:200]})
        self._note(name, Phase.FAILED, why)

    def _through(self, name: str) -> None:
        node, orders = self._roll.nodes[name], self._orders
        if node.phase is Phase.DRAINING:
            self._drained(name)
            self._note(name, Phase.RUNNING)
        if node.phase is Phase.RUNNING:
            node.boot_id = self._view(name)["boot_id"]
            node.kernel = self._kernel(name) if orders.reboot else ""
            self._command(name, shlex.join(orders.command), orders.limit_s, "the command")
            self._note(name, Phase.REBOOTING if orders.reboot else Phase.CHECKING)
        if node.phase is Phase.REBOOTING:
            view = self._view(name)
            if view["boot_id"] == node.boot_id and view["link"] == Link.UP:  # also if a killed roll has only noted it
                self._command(name, orders.reboot, orders.boot_s, "the command that reboots it")
            self._until(
                lambda: self._view(name)["boot_id"] != node.boot_id,
                orders.boot_s,
                "it has not booted again (--boot-limit)",
            )
            self._note(name, Phase.CHECKING)
        if node.phase is Phase.CHECKING:
            self._checked(name)
            client.call("POST", "/v1/nodes/resume", {"nodes": name})
            self._note(name, Phase.DONE)

    def _drained(self, name: str) -> None:
        """Wait until no job holds the node."""
        if not self._view(name)["drained"]:  # a roll that ended between its note and the drain
            client.call("POST", "/v1/nodes/drain", {"nodes": name, "why": f"{WHY}: {self._shown()}"})
        jobs = self._view(name)["jobs"]
        if jobs:
            words = "requeued" if self._orders.requeue else "waited for"
            self._say(f"{name}: {plural(len(jobs), 'job')} {words}: {', '.join(map(str, jobs[:8]))}")
        if jobs and self._orders.requeue:
            answer = client.call("POST", "/v1/requeue", {"jobs": [str(job) for job in jobs]})
            for refused in answer.get("errors", []):
                self._say(f"{name}: {refused}; it is waited for")
        self._until(lambda: not self._view(name)["jobs"], self._orders.wait_s, "its jobs have not ended (--wait)")

    def _command(self, name: str, command: str, limit_s: float, what: str) -> None:
        output = self._file.output_of(name)
        status = self._shell.run(name, command, limit_s, output, self._stop)
        if status is None and not self._orders.reboot:
            raise NodeFailedError(f"the connection was lost while {what} ran; see {output}")
        if status:
            raise NodeFailedError(f"{what} ended with status {status}; see {output}")

    def _checked(self, name: str) -> None:
        """Wait until the node answers, and try it. Raises NodeFailedError."""
        self._until(
            lambda: self._view(name)["link"] == Link.UP, self._orders.boot_s, "it does not answer (--boot-limit)"
        )
        before = self._roll.nodes[name].kernel
        if self._orders.reboot and before:
            now = self._kernel(name)
            self._say(f"{name}: rebooted, kernel {f'still {now}' if now == before else f'{before} -> {now}'}")
        if self._orders.check:
            self._command(name, self._orders.check, self._orders.limit_s, "the check")
        if self._orders.bench:
            try:
                slow = measured_slow(name)
            except HpcschedError as error:
                raise NodeFailedError(str(error)) from None
            if slow:
                raise NodeFailedError(f"{slow}; see hpcsched node bench --show {name}")
        view = self._view(name)
        # A roll that was killed after it had resumed the node, or an administrator, may have resumed it.
        if view["drained"] and not view["drained_why"].startswith(WHY):
            raise NodeFailedError(f"it was drained by {view['drained_by']} meanwhile: {view['drained_why']}")

    def _view(self, name: str) -> Json:
        """Return the node as the controller sees it; wait while there is no controller."""
        said = False
        while True:
            try:
                views = client.call("GET", "/v1/nodes")["nodes"]
                break
            except UnavailableError as error:
                if not said:
                    self._say(f"waiting for the controller: {error}")
                said = True
            if self._stop.wait(LOOK_S):
                raise StoppedError("the roll was stopped")
        found = next((view for view in views if view["name"] == name), None)
        if found is None:
            raise NodeFailedError("it has been removed from the cluster")
        return dict(found)

    def _kernel(self, name: str) -> str:
        """Return the version of the node's kernel, "" if it does not say."""
        with suppress(HpcschedError):  # it is only shown
            for view in client.call("GET", client.query("/v1/nodes", probe=1))["nodes"]:
                if view["name"] == name:
                    return str((view.get("facts") or {}).get("kernel", ""))[:80]
        return ""

    def _until(self, holds: Callable[[], bool], limit_s: float | None, why: str) -> None:
        until_s = None if limit_s is None else time.monotonic() + limit_s
        while not holds():
            if until_s is not None and time.monotonic() > until_s:
                raise NodeFailedError(why)
            if self._stop.wait(LOOK_S):
                raise StoppedError("the roll was stopped")

    def _note(self, name: str, phase: Phase, why: str = "") -> None:
        with self._lock:
            node = self._roll.nodes[name]
            node.phase, node.why = phase, why
            self._file.write(self._roll)
        self._say(f"{name}: {phase}" + (f": {why}" if why else ""))


def _why_left_out(view: Mapping[str, Any] | None) -> str:
    """Return why a node is not taken, "" if it is."""
    if view is None:
        return "it has been removed from the cluster"
    if view["drained"]:
        return f"it is drained already, by {view['drained_by']}: {view['drained_why']}"
    return "" if view["link"] == Link.UP else f"it does not answer: {view['link_why']}"


# ----- the command


def _time(text: str | None) -> float | None:
    return None if text is None else parse_time_s(text, whole_minutes=False)


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("command", metavar="-- COMMAND [ARGUMENT...]", nargs=-1)
@click.option("--nodes", "hosts", metavar="HOSTS", default="", help="Nodes: n[1-3],m7. Default: all that are up.")
@click.option("--at-once", metavar="N", type=click.IntRange(1, 64), default=1, show_default=True, help="Nodes at once.")
@click.option(
    "--max-failures",
    metavar="N",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Failed nodes that end it.",
)
@click.option("--wait", metavar="TIME", help="How long a node's jobs are waited for. Default: without limit.")
@click.option("--requeue", is_flag=True, help="Requeue the jobs of a node instead of waiting for their end.")
@click.option("--reboot", is_flag=True, help="Reboot each node after the command; its boot id must change.")
@click.option("--reboot-command", metavar="COMMAND", default=REBOOT, show_default=True, help="How a node is rebooted.")
@click.option("--limit", metavar="TIME", default="1h", show_default=True, help="How long the command may take.")
@click.option("--boot-limit", metavar="TIME", default="15m", show_default=True, help="How long a boot may take.")
@click.option("--check", metavar="COMMAND", default="", help="Run this on the node at the end; it must succeed.")
@click.option("--bench", is_flag=True, help="Measure the node at the end; it must be as fast as before.")
@click.option("--user", metavar="NAME", default="", help="Log in as this user. Default: the node's.")
@click.option("--identity", metavar="FILE", default="", help="Private key for the login. Default: yours.")
@click.option(
    "--state", metavar="DIR", help="Where progress and output are kept. Default: ~/.local/state/hpcsched/NAME."
)
@click.option("--continue", "goes_on", is_flag=True, help="Go on with a roll that has ended before all were done.")
@click.option("--status", is_flag=True, help="Show the last roll, and do nothing.")
@click.option("--json", "as_json", is_flag=True, help="With --status: print JSON.")
def rolling(
    command: tuple[str, ...], state: str | None, goes_on: bool, status: bool, as_json: bool, **options: Any
) -> int:
    """Run COMMAND on nodes in turn: drain, run, reboot, check, resume.

    It stops at the first node that fails, which stays drained.
    """
    config = load_config(find_config_dir(os.environ, os.getuid()))
    file = RollFile(Path(state) if state else _default_directory(config.name))
    if status:
        return _show(file.read(), as_json)
    with file.held():
        roll = _resumed(file, command) if goes_on else _begun(file, config, command, options)
        file.write(roll)
        try:
            Roller(roll, file, RemoteShell(config, roll.orders), lambda line: click.echo(clean(line))).run()
        except (KeyboardInterrupt, HpcschedError):
            _say_how_to_go_on(roll)
            raise
        return _result(roll)


def _default_directory(cluster: str) -> Path:
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "hpcsched" / f"rolling-{cluster}"


def _begun(file: RollFile, config: Config, command: Sequence[str], options: Mapping[str, Any]) -> Roll:
    """Return a new roll. Raises RequestError, NotFoundError or ConflictError."""
    if not command:
        raise RequestError("cannot roll without a command: hpcsched rolling -- apt-get -y upgrade")
    last = file.read()
    if last is not None and last.in_phase(*OPEN):
        raise ConflictError(
            f"cannot begin: the last roll ({shlex.join(last.orders.command)}) has not ended on "
            f"{compress_hostlist(last.in_phase(*OPEN))}: go on with --continue, or delete {file.directory} and resume its nodes"
        )
    views = client.call("GET", "/v1/nodes")["nodes"]
    known = [view["name"] for view in views]
    hosts = str(options["hosts"])
    names = list(dict.fromkeys(expand_hostlist(hosts))) if hosts else [v["name"] for v in views if v["link"] == Link.UP]
    for name in names:
        if name not in known or name not in {spec.name for spec in config.nodes}:
            raise NotFoundError(f"cannot roll over {name[:60]!r}: there is no node of that name{nearest(name, known)}")
    if options["reboot"] and any(spec.host == LOCAL_HOST for spec in config.nodes if spec.name in names):
        raise RequestError("cannot reboot this machine: a node is the head itself; name the others with --nodes")
    orders = Orders(
        command=tuple(command),
        at_once=options["at_once"],
        max_failures=options["max_failures"],
        wait_s=_time(options["wait"]),
        requeue=options["requeue"],
        reboot=options["reboot_command"] if options["reboot"] else "",
        limit_s=_time(options["limit"]) or UNLIMITED_S,
        boot_s=_time(options["boot_limit"]) or UNLIMITED_S,
        check=options["check"],
        bench=options["bench"],
        user=options["user"],
        identity=options["identity"],
    )
    return Roll(orders, {name: NodeProgress() for name in names})


def _resumed(file: RollFile, command: Sequence[str]) -> Roll:
    """Return the last roll, with its failed nodes to do again. Raises RequestError."""
    roll = file.read()
    if roll is None or not roll.in_phase(*OPEN, Phase.FAILED):
        raise RequestError("cannot go on: no roll has ended before all were done")
    if command:
        raise RequestError("cannot change the command of a roll: say --continue without one")
    for name in roll.in_phase(Phase.FAILED):
        roll.nodes[name] = NodeProgress(Phase.DRAINING)
    return roll


def _result(roll: Roll) -> int:
    """Say how the roll has ended, and return the exit status."""
    done, failed, rest = (roll.in_phase(phase) for phase in (Phase.DONE, Phase.FAILED, Phase.TO_DO))
    left = roll.in_phase(Phase.LEFT_OUT)
    click.echo(f"{len(done)} of {plural(len(roll.nodes), 'node')} done" + (f", {len(left)} left out" if left else ""))
    for name in failed:
        click.echo(clean(f"! {name} has failed and stays drained: {roll.nodes[name].why}"), err=True)
        click.echo(f"  mend it, then: hpcsched rolling --continue, or give it back: hctl resume {name}", err=True)
    if rest:
        click.echo(f"  not begun: {compress_hostlist(rest)}", err=True)
    return 1 if failed or rest else 0


def _say_how_to_go_on(roll: Roll) -> None:
    drained = [name for name in roll.in_phase(*OPEN) if roll.nodes[name].phase is not Phase.TO_DO]
    if drained:
        click.echo(f"still drained: {compress_hostlist(drained)}", err=True)
    click.echo("to go on: hpcsched rolling --continue", err=True)


def _show(roll: Roll | None, as_json: bool) -> int:
    if as_json:
        nodes = {} if roll is None else {name: asdict(node) for name, node in roll.nodes.items()}
        print_json({"version": 1, "command": [] if roll is None else list(roll.orders.command), "nodes": nodes})
    elif roll is None:
        click.echo("No roll has been begun.")
    else:
        click.echo(clean(f"command: {shlex.join(roll.orders.command)}"))
        rows = [[clean(name), node.phase.value, clean(node.why)] for name, node in roll.nodes.items()]
        click.echo(columns(["NODE", "PHASE", "WHY"], rows), nl=False)
    return 0
