"""Collect the facts of `hpcsched doctor`. Nothing that hangs can hang it.

Each question has a child process and a deadline. A child that is too late is killed, and is not waited for: a process that
waits in the kernel for a file system cannot end before the file system answers. What a late child has noted is kept.

It changes nothing, but for two files: hpcsched doctor writes and removes a probe on the share (as root or its owner), and copies
the agent to a node that lacks it, as the controller does. It does not judge: see `hpcsched.doctor.tree`.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sqlite3
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hpcsched
from hpcnode.os.surroundings import accounts_by_hash, surroundings
from hpcsched import client, paths
from hpcsched.config.load import Config, load_config
from hpcsched.controller.lock import HOLDER_FILE
from hpcsched.doctor.tree import MAX_ERRORS, Fact, Facts
from hpcsched.errors import HpcschedError
from hpcsched.health import last_change_s, probe_directory
from hpcsched.launch import as_controller, dial_for, ssh_settings
from hpcsched.launch.sshconfig import Hop, route_to
from hpcsched.model.node import NodeSpec

CONFIG_S, ASK_S, NODES_S, VISIT_S = 2.0, 3.0, 4.0, 6.0
DATABASE_S = 2.5  # of the check of its pages; then it is interrupted
MAX_ANSWER = 32 << 20
NODE_NAME_CHARS = 200
LOG_NAME = "hpcschedd.log"
LOG_TAIL_BYTES = 8192
MAX_NAMES = 256
BANNER_BYTES = 255
PR_SET_PDEATHSIG = 1

Note = Callable[..., None]
Question = tuple[float, Callable[[Note], Any]]


# ----- children with deadlines


@dataclass(slots=True)
class Child:
    """A child that answers one question."""

    pid: int
    pipe: int
    until_s: float
    received: bytearray
    is_over: bool = False


def ask(questions: Mapping[str, Question]) -> dict[str, Fact]:
    """Ask all questions at the same time, and return the facts.

    It ends at the latest at the longest deadline. A question is a time limit and a function. Its argument notes what was found
    so far; it may do that often.
    """
    children = {name: _start(limit_s, work) for name, (limit_s, work) in questions.items()}
    while waiting := {child.pipe: child for child in children.values() if not child.is_over}:
        now_s = time.monotonic()
        late = [child for child in waiting.values() if child.until_s <= now_s or len(child.received) > MAX_ANSWER]
        for child in late:
            child.is_over = True
            with suppress(BlockingIOError):
                while data := os.read(child.pipe, 1 << 16):  # what came while we could not run
                    child.received += data
        if late:
            continue
        left_s = min(child.until_s for child in waiting.values()) - now_s
        for pipe in select.select(list(waiting), [], [], left_s)[0]:
            data = os.read(pipe, 1 << 16)
            waiting[pipe].received += data
            waiting[pipe].is_over = not data
    found = {name: _fact(bytes(child.received)) for name, child in children.items()}
    for child in children.values():
        os.close(child.pipe)
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, os.WNOHANG)  # one that waits in the kernel is left to init
    return found


def _start(limit_s: float, work: Callable[[Note], Any]) -> Child:
    ours, theirs = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(theirs)
        os.set_blocking(ours, False)
        return Child(pid, ours, time.monotonic() + limit_s, bytearray())
    try:
        _detach(parent)
        _answer(theirs, work)
    finally:
        os._exit(0)


def _detach(parent: int) -> None:
    """Close the files of the caller: a reader of its output must not wait for this child."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)


def _answer(pipe: int, work: Callable[[Note], Any]) -> None:
    def send(kind: str, value: Any) -> None:
        data = json.dumps((kind, value)).encode()
        data = len(data).to_bytes(4, "big") + data
        while data:
            data = data[os.write(pipe, data) :]

    try:
        send("value", work(lambda **parts: send("parts", parts)))
    except BaseException as error:
        text = (error.strerror if isinstance(error, OSError) and error.strerror else "") or str(error)
        send("error", (type(error).__name__, text[:4000] or type(error).__name__))


def _fact(data: bytes) -> Fact:
    """Return the fact from what our child has sent."""
    parts: dict[str, Any] = {}
    while len(data) >= 4 and len(data) >= 4 + (size := int.from_bytes(data[:4], "big")):
        kind, value = json.loads(data[4 : 4 + size])
        data = data[4 + size :]
        if kind == "value":
            return Fact(value=value, parts=parts)
        if kind == "error":
            return Fact(kind=value[0], error=value[1], parts=parts)
        parts.update(value)
    return Fact(is_late=True, parts=parts)


# ----- which facts are collected


def of_cluster(environ: Mapping[str, str]) -> Facts:
    """Collect the facts of the cluster, as far as they can be seen from here."""
    if environ.get("HPCSCHED_URL"):
        gateway = ask({"gateway": (ASK_S, _gateway)})
        return gateway | (ask({"nodes": (NODES_S, _nodes)}) if gateway["gateway"].is_known else {})
    facts = _config(environ)
    config: Config | None = facts["config"].parts.get("config")
    more: dict[str, Question] = {"controller": (ASK_S, _controller)}
    if config is not None:
        more |= _questions_of_head(config)
        more["names"] = (ASK_S, lambda note: _names(config, note))
    if facts["config"].is_late:
        return facts
    facts |= ask(more | {"nodes": (NODES_S, _nodes), "here": (ASK_S, _here)})
    return facts | {"accounts": Fact(value=accounts_by_hash())}


def of_node(environ: Mapping[str, str], name: str) -> Facts:
    """Collect the facts of the way to one node, and of the node."""
    if environ.get("HPCSCHED_URL"):
        facts = ask({"gateway": (ASK_S, _gateway)})
        if facts["gateway"].is_known:
            facts |= ask({"nodes": (NODES_S, _nodes)})
        return facts | _target(None, facts.get("nodes", Fact(kind="NotAsked")), name)
    facts = _config(environ)
    config: Config | None = facts["config"].parts.get("config")
    if facts["config"].is_late or config is None:
        return facts
    facts |= ask(
        {
            "views": (CONFIG_S, lambda note: _views(note, probe=False)),
            "rights": (CONFIG_S, lambda _note: os.getuid() in (0, config.controller.state_dir.stat().st_uid)),
        }
    )
    facts |= _target(config, facts["views"], name)
    spec = next((spec for spec in config.nodes if spec.name == name), None)
    if spec is None:
        return facts
    more: dict[str, Question] = {"here": (ASK_S, _here)}
    if spec.host != "local":
        more["way"] = (VISIT_S, lambda note: _way(config, spec, note))
    if _text(facts["view"].value, "link") == "up":
        more["nodes"] = (VISIT_S, _nodes)
    elif os.getuid() == 0 or facts["rights"].value:
        more["visit"] = (VISIT_S, lambda note: _visit(config, spec, note))
    facts |= ask(more)
    if "nodes" in more:
        facts |= _target(config, facts["nodes"], name)
    return facts | {"accounts": Fact(value=accounts_by_hash())}


def of_job(environ: Mapping[str, str], reference: str) -> Facts:
    """Collect the facts of a job; those of the cluster if it cannot be asked."""
    questions: dict[str, Question] = {
        "job": (ASK_S, lambda note: _job(reference, note)),
        "why": (ASK_S, lambda _note: client.call("GET", client.job_path(reference, "why"), timeout_s=ASK_S)),
        "errors": (ASK_S, lambda _note: _errors(reference)),
    }
    facts = ask(questions)
    job = facts["job"]
    if not job.is_known and job.kind not in ("NotFoundError", "PermissionDeniedError", "RequestError"):
        return {**facts, **of_cluster(environ)}
    if job.is_known and job.value.get("state") in ("CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING"):
        facts |= ask({"nodes": (NODES_S, _nodes), "here": (ASK_S, _here)})
    return facts


COLLECTORS: Mapping[str, Callable[..., Facts]] = {"cluster": of_cluster, "node": of_node, "job": of_job}


# ----- this machine: configuration, state, share


def _config(environ: Mapping[str, str]) -> dict[str, Fact]:
    """Return the fact of the configuration; its part "config" is a valid configuration."""

    def work(note: Note) -> dict[str, Any]:
        directory = paths.find_config_dir(environ, os.getuid())
        path = directory / paths.CONFIG_FILE
        note(path=str(path))
        if str(directory) != paths.SYSTEM_CONFIG and not environ.get("HPCSCHED_CONFIG"):
            note(hidden=paths.SYSTEM_CONFIG if os.path.exists(f"{paths.SYSTEM_CONFIG}/{paths.CONFIG_FILE}") else "")
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        except FileNotFoundError:
            raise NoConfiguration(str(path)) from None
        config = load_config(directory, environ)
        return {"nodes": [spec.name for spec in config.nodes], "share": config.share}

    fact = ask({"config": (CONFIG_S, work)})["config"]
    if fact.is_known:  # the child has read it in time
        with suppress(HpcschedError):
            fact = fact._replace(parts={**fact.parts, "config": load_config(Path(fact.parts["path"]).parent, environ)})
    return {"config": fact}


class NoConfiguration(Exception):
    """There is no configuration."""


def _owners(config: Config) -> list[int]:
    """Return who may own the files of the controller; the first is the best."""
    try:
        account = config.controller.account()
    except HpcschedError:
        account = None
    uids = [account.pw_uid] if account is not None else []
    return [*uids, os.stat(config.config_dir / paths.CONFIG_FILE).st_uid, 0]


def _questions_of_head(config: Config) -> dict[str, Question]:
    state = config.controller.state_dir
    found: dict[str, Question] = {
        "state": (ASK_S, lambda note: _state(config, note)),
        "database": (ASK_S + DATABASE_S / 2, lambda note: _database(config, note)),
        "holder": (ASK_S, lambda _note: _holder(state)),
        "log": (ASK_S, lambda _note: _last_log_line(state / LOG_NAME)),
        "last_change": (ASK_S, lambda _note: last_change_s(state / paths.DATABASE_FILE)),
    }
    if any(spec.host != "local" and not spec.identity_file for spec in config.nodes):
        found["key"] = (ASK_S, lambda note: _key(config, note))
    if config.share:
        found["share"] = (ASK_S, lambda note: _share(config.share, note))
    return found


def _state(config: Config, note: Note) -> dict[str, Any]:
    path = config.controller.state_dir
    note(path=str(path))
    status, space = path.stat(), os.statvfs(path)
    os.scandir(path).close()  # only its owner may
    return {
        "uid": status.st_uid,
        "owners": _owners(config),
        "read_only": bool(space.f_flag & os.ST_RDONLY),
        "free_mib": space.f_bavail * space.f_frsize >> 20,
        "inodes": space.f_files,
        "inodes_free": space.f_favail,
        "mount": _mount_of(path),
    }


def _mount_of(path: Path) -> str:
    """Return the directory at which the file system of `path` is mounted."""
    real = Path(os.path.realpath(path))
    return str(next((each for each in (real, *real.parents) if os.path.ismount(each)), "/"))


def _database(config: Config, note: Note) -> dict[str, Any]:
    from hpcsched.store.engine import connected_to, damage_in, why_unusable  # SQLAlchemy: not for every command

    path = config.controller.state_dir / paths.DATABASE_FILE
    note(path=str(path))
    if path.stat().st_size == 0:
        return {"is_empty": True}
    os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    with closing(connected_to(path.absolute(), "ro")) as connection:
        unusable = why_unusable(connection)
        if unusable:
            return {"unusable": unusable}
        found: dict[str, Any] = {"id": _cluster_id(connection)}
        with suppress(OSError):
            found["own_id"] = (config.config_dir / paths.CLUSTER_ID_FILE).read_text(encoding="ascii").strip()
        deadline_s = time.monotonic() + DATABASE_S
        connection.set_progress_handler(lambda: time.monotonic() > deadline_s, 10_000)
        try:
            found["damage"] = [" ".join(line.split()) for line in damage_in(connection, "quick_check", 3)]
            found["is_checked"] = True
        except sqlite3.OperationalError as error:
            if "interrupt" not in str(error):
                raise
        return found


def _cluster_id(connection: sqlite3.Connection) -> str:
    from hpcsched.store.store import Store

    return Store(connection).cluster_id()


def _holder(state: Path) -> int:
    """Return the pid of a living controller that has locked the state directory, 0 for none."""
    try:
        holder = json.loads((state / HOLDER_FILE).read_text()[:1000])
        pid = int(holder["pid"])
        if holder["host"] != os.uname().nodename:
            return 0
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return pid if b"hpcsched" in file.read(4096) else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _last_log_line(path: Path) -> str:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_TAIL_BYTES))
        lines = file.read(LOG_TAIL_BYTES).decode("utf-8", "replace").split("\n")
    bad = [line for line in lines if "error" in line.lower()]
    return bad[-1].strip()[:300] if bad else ""


def _key(config: Config, note: Note) -> dict[str, Any]:
    note(path=str(config.launch_key))
    status = config.launch_key.stat()
    return {"mode": stat.S_IMODE(status.st_mode), "uid": status.st_uid, "owners": _owners(config)}


def _share(share: str, note: Note) -> dict[str, Any]:
    note(path=share)
    status, space = os.stat(share), os.statvfs(share)
    free_mib = space.f_bavail * space.f_frsize >> 20
    may_write = os.getuid() in (0, status.st_uid)
    problem = "it is mounted read-only" if space.f_flag & os.ST_RDONLY else ""
    if not problem and may_write and free_mib:
        problem = probe_directory(Path(share))
    return {"free_mib": free_mib, "problem": problem}


def _here(_note: Note) -> dict[str, Any]:
    return surroundings("/")


def _names(config: Config, note: Note) -> dict[str, tuple[str, str]]:
    """Resolve the hosts of nodes that are reached directly."""
    found = {}
    for spec in [spec for spec in config.nodes if spec.host != "local"][:MAX_NAMES]:
        try:
            first = _first_hop(config, spec)
        except HpcschedError:
            continue  # the way says it
        note(stage=first.host)
        why = ""
        try:
            socket.getaddrinfo(first.host, first.port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            why = error.strerror or str(error)
        found[str(spec.name)] = (first.host, why)
    return found


def _first_hop(config: Config, spec: NodeSpec) -> Hop:
    """Return the first server on the route to a node. Raises HpcschedError."""
    with as_controller(config):
        return route_to(spec, ssh_settings(config))[0]


# ----- the controller


class Foreign(Exception):
    """Another account serves the controller's socket."""


def _controller(note: Note) -> dict[str, Any]:
    path = client.socket_path()
    note(socket=path)
    try:
        pid = client.controller_pid()
    except client.NoControllerError:
        raise
    except HpcschedError as error:
        if "Permission denied" in str(error):
            raise PermissionError(str(error)) from None
        if "is served by uid" in str(error):
            raise Foreign(str(error)) from None
        raise
    note(pid=pid, process=_process_state(pid))
    began_s = time.monotonic()
    answer = client.call("GET", "/v1/ping", timeout_s=ASK_S - 0.5, where=path)
    return answer | {"took_s": time.monotonic() - began_s, "own_version": hpcsched.__version__}


def _process_state(pid: int) -> str:
    """Return a process's state as in ps: R S D T Z."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode("ascii")
    except (OSError, IndexError):
        return ""


def _nodes(note: Note) -> list[dict[str, Any]]:
    return _views(note, probe=not client.is_remote())  # a gateway lets nobody have nodes probed


def _views(_note: Note, *, probe: bool) -> list[dict[str, Any]]:
    path = client.query("/v1/nodes", probe=1 if probe else None)
    views: list[dict[str, Any]] = client.call("GET", path, timeout_s=NODES_S)["nodes"]
    return views


def _gateway(note: Note) -> dict[str, Any]:
    from hpcsched.client import https

    endpoint = https.find_endpoint()
    note(stage="name", host=endpoint.host, port=endpoint.port, address=endpoint.address)
    socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    note(stage="port")
    socket.create_connection((endpoint.host, endpoint.port), ASK_S - 0.5).close()
    note(stage="answer")
    return client.call("GET", "/v1/me", timeout_s=ASK_S - 0.5)


# ----- a node


def _target(config: Config | None, views: Fact, name: str) -> dict[str, Fact]:
    """Return what is known about the node `name`: from its file, and from the controller."""
    seen = views.value or []
    view = next((view for view in seen if view.get("name") == name), None)
    spec = next((spec for spec in config.nodes if spec.name == name), None) if config is not None else None
    known = sorted(
        {str(view.get("name")) for view in seen} | {str(spec.name) for spec in (config.nodes if config else ())}
    )
    parts = {"name": name[:NODE_NAME_CHARS], "known": ", ".join(known[:20])}
    target = None
    if spec is not None:
        target = {
            "name": spec.name,
            "host": spec.host,
            "port": spec.port,
            "user": spec.user or os.environ.get("USER", ""),
            "root": spec.root,
            "cpus": spec.cpus,
            "mem_mib": spec.mem_mib,
            "gpus": [gpu.index for gpu in spec.gpus],
        }
    elif view is not None:
        target = {"name": name, "host": "local"}  # the way there is not ours
    return {"target": Fact(value=target, parts=parts), "view": Fact(value=view or {})}


def _text(of: Any, name: str) -> str:
    return str(of.get(name, "")) if isinstance(of, dict) else ""


def _way(config: Config, spec: NodeSpec, note: Note) -> str:
    """Connect to the node, or to its jump host, and return the server's first line."""
    hop = _first_hop(config, spec)
    note(stage="name", host=hop.host, port=hop.port)
    address = socket.getaddrinfo(hop.host, hop.port, type=socket.SOCK_STREAM)[0][4]
    note(stage="port", address=str(address[0]))
    with socket.create_connection((hop.host, hop.port), VISIT_S / 2) as sock:
        note(stage="banner")
        sock.settimeout(VISIT_S / 3)
        said = b""
        while b"\n" not in said and len(said) < BANNER_BYTES:
            more = sock.recv(BANNER_BYTES)
            if not more:
                break
            said += more
        if not said:
            raise ConnectionError("it closed the connection without a word")
        return said.split(b"\n")[0][:BANNER_BYTES].decode("ascii", "replace").strip()


def _visit(config: Config, spec: NodeSpec, note: Note) -> None:
    """Log in to the node as the controller does, and note what its agent says."""
    from hpcnode.wire import protocol
    from hpcsched.cli.admin.node import identity_of
    from hpcsched.launch.bundle import build_bundle
    from hpcsched.launch.pipe import LinkError
    from hpcsched.launch.visit import asking

    bundle = build_bundle()
    note(stage="reading the database")
    identity = identity_of(config, timeout_s=1.0)
    note(stage="starting")
    dial = dial_for(spec, config)
    try:
        with asking(
            spec,
            dial=dial,
            bundle=bundle,
            identity=identity,
            timeout_s=60.0,
            note=lambda stage: note(stage=stage),
        ) as asked:
            welcome = asked.greeting.welcome
            asked_s = time.time()
            said, _ = asked(protocol.Probe(request=1), protocol.Facts)
            times = {"asked_at_s": asked_s, "answered_at_s": time.time()}
            lacks = [str(each[0]) for each in welcome.facts.get("abilities", ()) if not each[1]]
            wanted = [word for word in lacks if word in config.controller.confine]
            view = {"agent_version": welcome.agent_version, "own_agent": bundle.sha256, "not_enforced": wanted}
            note(facts=said.facts | times, view=view | {"fault": welcome.facts.get("fault", "")})
            for what, directory in _directories(config):
                note(stage=f"comparing {directory}", **{what: directory})
                note(**{f"{what}_error": _difference(asked, directory)})
    except HpcschedError as error:
        raise LinkError(str(error)) from None


def _directories(config: Config) -> Iterator[tuple[str, str]]:
    if config.share:
        yield "share", config.share


def _difference(asked: Any, directory: str) -> str:
    """Return why a directory is not the same on the node; "" if it is, or is read-only."""
    from hpcnode.wire import protocol
    from hpcsched.launch.visit import problem_of, question, share_probe

    try:
        with share_probe(directory) as probe:
            compared, _ = asked(
                question(2, directory, probe.path.name, probe.sha256, probe.uid), protocol.ProbeCompared
            )
    except OSError:
        return ""
    return problem_of(directory, same=compared.same, error=compared.error)


# ----- a job


def _job(reference: str, note: Note) -> dict[str, Any]:
    note(name=reference[:NODE_NAME_CHARS])
    jobs = client.call("GET", client.job_path(reference), timeout_s=ASK_S - 0.5)["jobs"]
    order: Sequence[str] = ("FAILED", "OUT_OF_MEMORY", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "PENDING", "RUNNING")
    found: dict[str, Any] = min(
        jobs, key=lambda job: order.index(job["state"]) if job["state"] in order else len(order)
    )
    return found


def _errors(reference: str) -> str:
    """Return the end of the job's error output, or of its output if it has none."""
    for stream in ("err", "out"):
        try:
            chunk = client.fetch_log(
                reference, stream=stream, offset=-MAX_ERRORS, limit_bytes=MAX_ERRORS, timeout_s=2.0
            )
        except HpcschedError:
            continue
        if chunk.data.strip():
            return chunk.data[-MAX_ERRORS:].decode("utf-8", "replace")
    return ""
