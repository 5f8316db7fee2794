"""`hpcsched node sync`: copy declared files to nodes, and run a declared command there.

Files and command come from the command line or from [sync] of the configuration. First all nodes
are compared with this machine and the differences are shown; nothing is changed before the user
agrees. Answers are shown once for all nodes with the same one.

Everything runs over SSH with the caller's own key, as `hpcsched rolling` does. So the caller needs
the rights there; besides, a running controller must agree, and records it in its audit log.
"""

from __future__ import annotations

import base64
import grp
import hashlib
import json
import os
import pwd
import shlex
import stat
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

import click

from hpcnode.os.trust import check_path
from hpcnode.wire import gate
from hpcsched import client
from hpcsched.api.identity import user_name
from hpcsched.auth.authorize import Identity, authorize_root
from hpcsched.cli.admin.rename import node
from hpcsched.cli.admin.rolling import NodeFailedError, Orders, RemoteShell
from hpcsched.cli.output import print_json
from hpcsched.config.keys import BadValue, sync_file
from hpcsched.config.load import Config, load_config
from hpcsched.errors import NotFoundError, RequestError
from hpcsched.listing.text import clean, columns
from hpcsched.model.hostlist import compress_hostlist, expand_hostlist
from hpcsched.model.units import nearest, parse_time_s
from hpcsched.paths import find_config_dir
from hpcsched.sched.sentences import plural

AT_ONCE = 16
MOST_FILES = 64
MOST_FILE_BYTES = 16 << 20
MOST_BYTES = 64 << 20
SHOWN_CHARACTERS = 64 << 10  # of the output of a node
MOST_WORDS = 300  # characters of what a node says of a file
COMPARE_S = 120.0
MARK = "\002hpcsync\003 "


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncFile:
    """A file of this machine, as it is to be at `path` on the nodes."""

    path: str
    data: bytes
    mode: int
    user: str
    group: str

    @property
    def order(self) -> dict[str, Any]:
        """Return what a node compares."""
        digest = hashlib.sha256(self.data).hexdigest()
        own = {"path": self.path, "mode": self.mode, "user": self.user, "group": self.group}
        return own | {"size": len(self.data), "sha256": digest}


@dataclass(slots=True)
class NodeSync:
    """What was found and done on one node. `status`: of the command; None: it was not run."""

    error: str = ""
    differences: dict[str, str] = field(default_factory=dict)  # by path
    errors: dict[str, str] = field(default_factory=dict)
    is_written: bool = False
    status: int | None = None
    output: str = ""

    @property
    def has_failed(self) -> bool:
        """Return whether anything there went wrong."""
        return bool(self.error or self.errors or self.status)


@node.command()
@click.argument("nodes", required=False, default="")
@click.option("--file", "files", metavar="FILE[:DEST]", multiple=True, help="Copy this file, to DEST or the same path.")
@click.option(
    "--run", "command", metavar="COMMAND", default=None, help="Run this on nodes on which a file was changed."
)
@click.option("--always", is_flag=True, help="Run the command on all nodes.")
@click.option("--dry-run", is_flag=True, help="Show what differs, and change nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--limit", metavar="TIME", default="10m", show_default=True, help="How long the command may take.")
@click.option("--user", metavar="NAME", default="", help="Log in as this user. Default: the node's.")
@click.option("--identity", metavar="FILE", default="", help="Private key for the login. Default: yours.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; needs --yes or --dry-run.")
def sync(
    nodes: str, files: tuple[str, ...], command: str | None, always: bool, dry_run: bool, yes: bool, **options: Any
) -> int:
    """Copy files to NODES, by default all, and run a command there.

    Without --file and --run it takes those of [sync] in the configuration.
    """
    config, as_json = load_config(find_config_dir(os.environ, os.getuid())), bool(options["as_json"])
    limit_s = parse_time_s(str(options["limit"]), whole_minutes=False) or COMPARE_S
    if not files and command is None:
        files, command = config.sync.files, config.sync.run
    wanted, command = read_files(files), command or ""
    if not wanted and not command:
        raise RequestError("cannot sync nothing: give --file or --run, or files and run of [sync] in hpcsched.toml")
    if as_json and not (yes or dry_run):
        raise RequestError("cannot ask with --json: say --yes or --dry-run")
    names = _names(config, nodes)
    shell = RemoteShell(config, Orders(command=(), user=options["user"], identity=options["identity"]))
    work = _Work(shell, wanted, command, always or not wanted, limit_s)
    found = work.on_all(names, work.compare)
    if not as_json:
        _show_differences(found, wanted)
    todo = work.to_do(found)
    if todo and not dry_run:
        _agree(config, todo, wanted, command, yes=yes)
        work.on_all(todo, work.change, found)
    if as_json:
        print_json({"version": 1, "nodes": {name: _as_json(one) for name, one in found.items()}})
    else:
        _show_results(found, dry_run=dry_run)
    return 1 if any(one.has_failed for one in found.values()) else 0


def read_files(texts: Iterable[str]) -> list[SyncFile]:
    """Return the files of this machine. Raises RequestError."""
    found: dict[str, SyncFile] = {}
    for text in texts:
        try:
            source, _, target = sync_file(text).partition(":")
        except BadValue as error:
            raise RequestError(f"cannot sync {text[:100]!r}: it {error}") from None
        target = target or source
        if target in found:
            raise RequestError(f"cannot sync two files to {target}")
        found[target] = _read(source, target)
    if len(found) > MOST_FILES or sum(len(file.data) for file in found.values()) > MOST_BYTES:
        raise RequestError(f"cannot sync so much: at most {MOST_FILES} files of {MOST_BYTES >> 20} MiB in all")
    return list(found.values())


def _read(source: str, target: str) -> SyncFile:
    try:
        fd = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise RequestError(f"cannot read {source}: {error.strerror}") from None
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise RequestError(f"cannot sync {source}: it is not a regular file")
        _check_source(source, status)
        data = file.read(MOST_FILE_BYTES + 1)
    if len(data) > MOST_FILE_BYTES:
        raise RequestError(f"cannot sync {source}: it is longer than {MOST_FILE_BYTES >> 20} MiB; put it on the share")
    return SyncFile(
        path=target,
        data=data,
        mode=stat.S_IMODE(status.st_mode),
        user=_name_of(pwd.getpwuid, status.st_uid),
        group=_name_of(grp.getgrgid, status.st_gid),
    )


def _check_source(source: str, status: os.stat_result) -> None:
    """Check that only its owner could replace what root installs on the nodes.

    Raises RequestError.
    """
    if os.geteuid() != 0:
        return
    try:
        is_same = os.path.samestat(os.stat(check_path(source, status.st_uid)), status)
    except OSError as error:
        raise RequestError(f"cannot sync {source}: {error}") from None
    if not is_same:
        raise RequestError(f"cannot sync {source}: it was replaced while it was read; try again")


def _name_of(find: Callable[[int], Any], number: int) -> str:
    try:
        return str(find(number)[0])
    except KeyError:
        return str(number)


def _names(config: Config, text: str) -> list[str]:
    known = [str(spec.name) for spec in config.nodes]
    names = list(dict.fromkeys(expand_hostlist(text))) if text else known
    for name in names:
        if name not in known:
            raise NotFoundError(f"cannot sync {name[:60]!r}: there is no node of that name{nearest(name, known)}")
    if not names:
        raise NotFoundError("cannot sync: there are no nodes yet")
    return names


def _agree(config: Config, names: Sequence[str], wanted: Sequence[SyncFile], command: str, *, yes: bool) -> None:
    """Ask the user, then the controller. Raises RequestError or PermissionDeniedError."""
    if not yes:
        if not sys.stdin.isatty():
            raise RequestError("cannot change nodes unasked: look at the differences, then say --yes")
        what = f"Change {compress_hostlist(names)}" + (f", and run {command!r} there" if command else "")
        if not click.confirm(clean(f"{what}?")):
            raise RequestError("nothing was changed")
    files = {file.path: hashlib.sha256(file.data).hexdigest() for file in wanted}
    try:
        client.call("POST", "/v1/nodes/sync", {"nodes": list(names), "files": files, "command": command})
    except client.NoControllerError:
        user = user_name(os.getuid())
        caller = Identity(uid=os.getuid(), user=user, role=config.access.role_of(user))
        authorize_root(caller, config.config_dir.stat().st_uid, "change nodes while the controller is not running")


class _Work:
    """Compares and changes nodes, some at a time."""

    def __init__(
        self, shell: RemoteShell, wanted: Sequence[SyncFile], command: str, always: bool, limit_s: float
    ) -> None:
        self._shell, self._wanted = shell, wanted
        self._command, self._always, self._limit_s = command, always, limit_s
        self._stop = threading.Event()

    def on_all(
        self, names: Sequence[str], work: Callable[[str, NodeSync], None], found: dict[str, NodeSync] | None = None
    ) -> dict[str, NodeSync]:
        """Do `work` on the nodes at the same time; a node that fails fails alone."""
        found = {name: NodeSync() for name in names} if found is None else found

        def one(name: str) -> None:
            try:
                work(name, found[name])
            except NodeFailedError as error:
                found[name].error = str(error)

        try:
            with ThreadPoolExecutor(AT_ONCE) as threads:
                list(threads.map(one, names))
        except KeyboardInterrupt:
            self._stop.set()
            raise
        return found

    def to_do(self, found: Mapping[str, NodeSync]) -> list[str]:
        """Return the nodes on which something is to be done."""
        runs = bool(self._command) and self._always
        return [name for name, one in found.items() if not one.has_failed and (one.differences or runs)]

    def compare(self, name: str, found: NodeSync) -> None:
        """Note the differences of a node. Raises NodeFailedError."""
        if self._wanted:
            found.differences, found.errors = self._ask(name, self._wanted, write=False)

    def change(self, name: str, found: NodeSync) -> None:
        """Replace what differs on a node, and run the command. Raises NodeFailedError."""
        files = [file for file in self._wanted if file.path in found.differences]
        if files:
            _, found.errors = self._ask(name, files, write=True)
            found.is_written = len(found.errors) < len(files)
        if self._command and not found.errors and (files or self._always):
            found.status, found.output = self._run(name, self._command, b"", self._limit_s)
            if found.status is None:
                raise NodeFailedError("the connection was lost while the command ran")

    def _ask(self, name: str, files: Sequence[SyncFile], *, write: bool) -> tuple[dict[str, str], dict[str, str]]:
        """Return by path what differs on the node, and what went wrong there.

        Raises NodeFailedError.
        """
        order = {"write": write, "files": [file.order for file in files]}
        data = json.dumps(order).encode() + b"\n" + b"".join(file.data for file in files if write)
        status, output = self._run(name, _program(self._shell.spec(name).python), data, COMPARE_S)
        _, mark, line = output.rpartition(MARK)
        try:
            answers = gate.read_json(line.partition("\n")[0].encode()) if mark else None
            pairs = [(str(one["difference"])[:MOST_WORDS], str(one["error"])[:MOST_WORDS]) for one in answers or ()]
        except (ValueError, TypeError, KeyError):
            pairs = []
        if len(pairs) != len(files):
            last = clean(output.strip()[-200:]) or "nothing"
            raise NodeFailedError(f"it did not compare its files (status {status}); it said: {last}")
        differ = {file.path: pair[0] for file, pair in zip(files, pairs, strict=True) if pair[0]}
        return differ, {file.path: pair[1] for file, pair in zip(files, pairs, strict=True) if pair[1]}

    def _run(self, name: str, command: str, data: bytes, limit_s: float) -> tuple[int | None, str]:
        with tempfile.TemporaryDirectory(prefix="hpcsched-sync") as directory:
            output = Path(directory) / "output"
            status = self._shell.run(name, command, limit_s, output, self._stop, stdin=data)
            text = output.read_bytes().decode("utf-8", "replace")
        return status, text.partition("\n")[2][-SHOWN_CHARACTERS:]  # without the command


def _program(python: str) -> str:
    """Return the command that compares and writes files on a node."""
    trust = package_files("hpcnode.os").joinpath("trust.py").read_text(encoding="utf-8")
    source = package_files("hpcsched.launch").joinpath("put_files.py").read_text(encoding="utf-8")
    own = "".join(line for line in source.splitlines(keepends=True) if not line.startswith("from hpcnode."))
    packed = base64.b64encode(zlib.compress((trust + own).encode(), 9)).decode("ascii")
    return f"{shlex.quote(python)} -I -S -c " + shlex.quote(
        f'import base64,zlib;exec(zlib.decompress(base64.b64decode("{packed}")))'
    )


def _show_differences(found: Mapping[str, NodeSync], wanted: Sequence[SyncFile]) -> None:
    rows = []
    for file in wanted:
        by_text = _grouped({name: one.differences.get(file.path, "") for name, one in found.items() if not one.error})
        rows += [[clean(file.path), compress_hostlist(names), clean(text)] for text, names in by_text.items() if text]
    if rows:
        click.echo(columns(["FILE", "NODES", "DIFFERENCE"], rows), nl=False)
    same = [name for name, one in found.items() if not (one.error or one.errors or one.differences)]
    if same and wanted:
        click.echo(f"{plural(len(same), 'node')} with the same files: {compress_hostlist(same)}")


def _show_results(found: Mapping[str, NodeSync], *, dry_run: bool) -> None:
    written = [name for name, one in found.items() if one.is_written]
    if written:
        click.echo(f"changed: {compress_hostlist(written)}")
    elif dry_run:
        click.echo("nothing was changed (--dry-run)")
    said = {name: f"status {one.status}\n{one.output}" for name, one in found.items() if one.status is not None}
    for text, names in _grouped(said).items():
        status, _, output = text.partition("\n")
        rule = "-" * 15
        click.echo(f"{rule}\n{compress_hostlist(names)} ({len(names)}), {status}\n{rule}")
        for line in output.splitlines():
            click.echo(clean(line))
    for name, one in found.items():
        for path, why in one.errors.items():
            click.echo(clean(f"! {name}: {path}: {why}"), err=True)
        if one.error:
            click.echo(clean(f"! {name}: {one.error}"), err=True)


def _grouped(texts: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the nodes by text, the most frequent text first."""
    groups: dict[str, list[str]] = {}
    for name, text in texts.items():
        groups.setdefault(text, []).append(name)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def _as_json(one: NodeSync) -> dict[str, Any]:
    names = ("error", "differences", "errors", "is_written", "status", "output")
    return {name: getattr(one, name) for name in names}
