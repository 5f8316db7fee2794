"""`hpcsched node rename OLD NEW`: give a node another name.

The node's file says its earlier names (`formerly`), and the controller moves what it keeps by name
when it reads the file: see `hpcsched.controller.nodes.edits`. So the command only changes files, in
an order in which it can be run again after a crash between any two steps:

1. the controller drains the node, if it is free of jobs;
2. the file of the node gets `formerly`, and `root` with the directory of its agent, which stays;
3. the files of partitions and switches name the new name;
4. the file of the node is renamed;
5. the controller reads all files, and resumes the node.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path

import click

from hpcsched import client, paths
from hpcsched.cli.admin.bench import node
from hpcsched.cli.admin.init import write_file
from hpcsched.cli.admin.node import look_at, with_keys
from hpcsched.config.keys import toml_value
from hpcsched.config.load import Config, load_config, load_node
from hpcsched.controller.lock import StateLock
from hpcsched.errors import ConfigError, HpcschedError, NotFoundError, RequestError, UnavailableError
from hpcsched.launch import as_controller
from hpcsched.listing.text import clean
from hpcsched.model.hostlist import compress_hostlist, expand_hostlist
from hpcsched.model.ids import NODE_NAME
from hpcsched.model.node import OURSELVES, NodeSpec
from hpcsched.model.units import nearest
from hpcsched.paths import find_config_dir
from hpcsched.sched.sentences import plural
from hpcsched.store.engine import open_read_only
from hpcsched.store.store import Store

MOST_FORMER = 8  # names that a file keeps
_HEADER = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(?:#.*)?$")
_NODES_KEY = re.compile(r"\s*nodes\s*=")
_LISTS_OF_NODES = re.compile(r"(?:partitions|topology\.switches)\.")
_LITERAL = re.compile(r"\"([^\"\\\n]*)\"|'([^'\n]*)'")


@node.command()
@click.argument("former", metavar="OLD")
@click.argument("name", metavar="NEW")
def rename(former: str, name: str) -> None:
    """Give a node another name: in the files, reservations, triggers and waiting jobs.

    Past jobs keep the old name. Run it again if it was interrupted.
    """
    config_dir = find_config_dir(os.environ, os.getuid())
    plan = plan_rename(config_dir, former, name)
    running = _begin(plan)
    try:
        for step in steps_of(plan):
            step()
        if running:
            answer = client.call("POST", "/v1/reconfigure", {})
    except HpcschedError as error:
        if isinstance(error, ConfigError):
            _write_back(plan)
        raise
    click.echo(f"{former} is called {name} now: {plan.path_of(name)}")
    if not running:
        click.echo("the controller is not running; it moves the node's state at its start: hpcsched up")
        return
    client.call("POST", "/v1/nodes/resume", {"nodes": name, "only_by": OURSELVES})
    for line in answer["changed"]:
        click.echo(clean(f"controller: {line}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RenamePlan:
    """What is to be written.

    `is_moved`: the file has the new name already, by an earlier call.
    """

    config: Config  # with the new name
    former: str
    name: str
    is_moved: bool
    node_text: str
    texts: dict[Path, tuple[str, str]]  # of the other files: before and after

    def path_of(self, name: str) -> Path:
        """Return the file of the node of that name."""
        return self.config.config_dir / paths.NODES_DIR / f"{name}.toml"


def plan_rename(config_dir: Path, former: str, name: str) -> RenamePlan:
    """Return what to write, checked as a whole. Raises HpcschedError."""
    if not NODE_NAME.match(name):
        raise RequestError(f"cannot name a node {name[:60]!r}: letters, digits, _ and -, at most 63")
    nodes_dir = config_dir / paths.NODES_DIR
    old, new = nodes_dir / f"{former}.toml", nodes_dir / f"{name}.toml"
    is_moved = not old.exists() and new.exists() and former in load_node(new).spec.formerly
    if not is_moved and not (NODE_NAME.match(former) and old.exists()):
        known = sorted(path.stem for path in nodes_dir.glob("*.toml"))
        raise NotFoundError(
            f"cannot rename {former[:60]!r}: there is no node of that name{nearest(former, known)}; there are: "
            f"{', '.join(known) or 'none'}"
        )
    if not is_moved and new.exists():
        raise RequestError(f"cannot rename {former} to {name}: there is a node {name} already, see {new}")
    texts = {}
    for path in (config_dir / paths.CONFIG_FILE, *sorted((config_dir / paths.EXTRA_DIR).glob("*.toml"))):
        before = path.read_text(encoding="utf-8")
        after = with_node_renamed(before, former, name)
        if after != before:
            texts[path] = (before, after)
    edited = {path: after for path, (_, after) in texts.items()}
    node_text = (new if is_moved else old).read_text(encoding="utf-8")
    if not is_moved:
        spec = load_node(old).spec
        earlier = [each for each in dict.fromkeys((*spec.formerly, former)) if each != name]
        node_text = with_keys(node_text, {"formerly": earlier[-MOST_FORMER:]})
        node_text = node_text.replace(f"# The node {former} of hpcsched:", f"# The node {name} of hpcsched:", 1)
        try:
            config = load_config(config_dir, without=former, edited={**edited, new: node_text})
        except ConfigError as error:
            raise ConfigError(f"cannot rename {former} to {name}: {error}") from None
        if not spec.root:
            node_text = with_keys(node_text, {"root": _agent_root(config, spec)})
    else:
        config = load_config(config_dir, edited=edited)
    return RenamePlan(config=config, former=former, name=name, is_moved=is_moved, node_text=node_text, texts=texts)


def _agent_root(config: Config, spec: NodeSpec) -> str:
    """Return the directory of the agent, which would get another default.

    Raises UnavailableError.
    """
    try:
        found = look_at(replace(config, share=""), spec).facts.get("root")
    except UnavailableError as error:
        raise UnavailableError(
            f"cannot rename {spec.name}: the directory of its agent depends on its name, and the node does not say which it "
            f"is ({error}). Try again when it answers, or write root = into its file"
        ) from None
    if not isinstance(found, str) or not found.startswith("/"):
        raise UnavailableError(
            f"cannot rename {spec.name}: its agent does not say its directory; write root = into its file"
        )
    return found


def with_node_renamed(text: str, former: str, name: str) -> str:
    """Return hpcsched.toml with another name in the nodes of partitions and switches.

    Comments stay.
    """
    lines, section, at = text.splitlines(keepends=True), "", 0
    while at < len(lines):
        header = _HEADER.match(lines[at].rstrip("\n"))
        if header is not None:
            section = header[1]
        elif _NODES_KEY.match(lines[at]) and _LISTS_OF_NODES.match(section):
            end = _end_of_value(lines, at)
            lines[at:end] = [_LITERAL.sub(lambda match: _renamed_literal(match, former, name), "".join(lines[at:end]))]
        at += 1
    return "".join(lines)


def _end_of_value(lines: list[str], at: int) -> int:
    """Return the number of the line after the value that begins in line `at`."""
    for end in range(at + 1, len(lines) + 1):
        try:
            tomllib.loads("".join(lines[at:end]))
        except tomllib.TOMLDecodeError:
            continue
        return end
    return at + 1


def _renamed_literal(match: re.Match[str], former: str, name: str) -> str:
    try:
        names = expand_hostlist(match[1] if match[1] is not None else match[2])
    except RequestError:
        return match[0]
    if former not in names:
        return match[0]
    return toml_value(compress_hostlist([name if each == former else each for each in names]))


def _begin(plan: RenamePlan) -> bool:
    """Make sure that no job holds the node, and that none gets it.

    Return whether the controller runs.
    """
    try:
        views = client.call("GET", "/v1/nodes")["nodes"]
    except client.NoControllerError:
        _check_database(plan)
        return False
    for view in views:
        if view["name"] == plan.former:
            _refuse_jobs(plan, [str(job) for job in view["jobs"]])
            client.call("POST", "/v1/nodes/remove", {"nodes": plan.former, "force": False})
    return True


def _check_database(plan: RenamePlan) -> None:
    """Fail if jobs hold the node, or if the database knows another node of the new name."""
    state_dir = plan.config.controller.state_dir
    database = state_dir / paths.DATABASE_FILE
    if not database.exists():
        return
    with as_controller(plan.config):
        lock = StateLock(state_dir)
        lock.acquire(datetime.now().isoformat(sep=" ", timespec="seconds"), f"rename node {plan.former}")
        try:
            with closing(Store(open_read_only(database))) as store:
                _refuse_jobs(plan, [str(job) for job in store.held_on(plan.former)])
                if plan.name in store.load_nodes() and not plan.is_moved:
                    raise RequestError(
                        f"cannot rename {plan.former} to {plan.name} without the controller: an earlier node had that name, and "
                        "only the controller can forget it: hpcsched up"
                    )
        finally:
            lock.release()


def _refuse_jobs(plan: RenamePlan, jobs: list[str]) -> None:
    if jobs:
        shown = ", ".join(jobs[:5]) + (" ..." if len(jobs) > 5 else "")
        raise RequestError(
            f"cannot rename {plan.former}: it holds {plural(len(jobs), 'job')} ({shown}). Let them end: "
            f"hctl drain {plan.former} rename; then try again, and resume it: hctl resume {plan.name}"
        )


def steps_of(plan: RenamePlan) -> list[Callable[[], None]]:
    """Return the changes of files, in order. After any of them the command can be run again."""
    old, new = plan.path_of(plan.former), plan.path_of(plan.name)

    def move() -> None:
        os.rename(old, new)
        _sync(old.parent)

    texts: list[Callable[[], None]] = [partial(write_file, path, after) for path, (_, after) in plan.texts.items()]
    return texts if plan.is_moved else [partial(write_file, old, plan.node_text), *texts, move]


def _write_back(plan: RenamePlan) -> None:
    """Restore the old names: the controller has refused the new ones."""
    if plan.is_moved:
        return
    old, new = plan.path_of(plan.former), plan.path_of(plan.name)
    if new.exists():
        os.rename(new, old)
    for path, (before, _) in plan.texts.items():
        write_file(path, before)
    client.call("POST", "/v1/nodes/resume", {"nodes": plan.former, "only_by": OURSELVES})


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
