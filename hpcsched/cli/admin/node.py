"""`hpcsched node add | rekey | list | probe | remove`: the nodes of the cluster.

Each node has one file in nodes.d/.

Rules:
- `add` pins the host key of a machine, detects its resources, and writes its file only if the node was reached exactly as the
  controller will reach it.
- `rekey` writes the file after a login with the new host key, and restores it if the controller rejects the change.
- `probe` changes only the measured keys; the rest of the file, including comments, is unchanged.
- `remove` frees the node of jobs, then deletes its file, always in this order. A running controller frees the node: it refuses,
  ends jobs, or fences the node. Without a controller, the database has the jobs on the node, and records the admin's decision
  for the next start.
"""

from __future__ import annotations

import ipaddress
import os
import pwd
import re
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from hpcnode.wire.protocol import BENCH_DEADLINES_S
from hpcsched import client, paths
from hpcsched.api.identity import user_name
from hpcsched.cli.admin.drift import drift_of
from hpcsched.cli.admin.impact import MOST_DAYS, history_days, impact_json, impact_of, impact_text, promise_line
from hpcsched.cli.admin.init import write_file
from hpcsched.cli.admin.plan import cluster_past
from hpcsched.cli.output import print_json
from hpcsched.config.keys import LOCAL_HOST, BadValue, host, mac_address, toml_value, user
from hpcsched.config.load import Config, load_config, node_from, render_node
from hpcsched.controller.lock import StateLock
from hpcsched.errors import ConfigError, HpcschedError, NotFoundError, RequestError, UnavailableError
from hpcsched.health import Status, check_node
from hpcsched.launch import as_controller, dial_for, ssh_settings
from hpcsched.launch.bundle import build_bundle
from hpcsched.launch.hostkeys import fingerprint, spelled
from hpcsched.launch.link import ControllerIdentity
from hpcsched.launch.pipe import Abort
from hpcsched.launch.ssh import peek_host_key
from hpcsched.launch.visit import Peer, Visit, link_rates, share_probe, transfer_mbps, visit
from hpcsched.listing.text import clean, columns, date_text
from hpcsched.metrics.bench import run_from_json, slow_tests
from hpcsched.model.hostlist import compress_hostlist
from hpcsched.model.ids import NODE_NAME, NodeName
from hpcsched.model.node import OURSELVES, TESTING, Link, NodeSpec, address_of
from hpcsched.model.units import format_mem, nearest, parse_time_s
from hpcsched.planner.capacity import DAY_S
from hpcsched.sched.sentences import plural
from hpcsched.store.engine import current_epoch, incarnation, open_database, open_read_only, start_id
from hpcsched.store.store import Store


@click.group()
def node() -> None:
    """Add, rekey, list, probe and remove nodes."""


@node.command()
@click.argument("target", metavar="[USER@]HOST[:PORT]")
@click.option("--name", metavar="NAME", help="Name of the node. Default: the first label of the host name.")
@click.option("--identity", metavar="FILE", help="Private key for the login, instead of the launch key.")
@click.option("--cpus", metavar="N", type=click.IntRange(1), help="Number of CPUs for jobs. Default: all.")
@click.option("--memory", metavar="SIZE", help="Memory for jobs, for example 64G. Default: all.")
@click.option(
    "--gpus", metavar="TYPE[:N],...", help="GPUs of the node, in the order of their indices. Default: as detected."
)
@click.option("--features", metavar="WORD,...", help="Features that jobs can request with --constraint.")
@click.option("--partition", metavar="NAME,...", help="Partitions for the node, in addition to those that list it.")
@click.option(
    "--root", metavar="DIR", help="Directory of the agent on the node, on a local disk. Default: chosen by the agent."
)
@click.option("--python", metavar="PATH", help="Python on the node, 3.9 or newer. Default: python3.")
@click.option("--weight", metavar="N", type=click.IntRange(0), help="Nodes with a lower weight are used first.")
@click.option(
    "--accept-fingerprint", metavar="SHA256:...", help="Accept the host key with this fingerprint, and no other."
)
@click.option("--yes", is_flag=True, help="Accept any host key.")
@click.option(
    "--burn-in", metavar="TIME", help="Test it for so long, for example 10m; it gets jobs when it has passed."
)
def add(
    target: str, name: str | None, accept_fingerprint: str | None, yes: bool, burn_in: str | None, **options: Any
) -> None:
    """Add a machine: pin its host key, detect its resources, and write its file.

    HOST can also be a Host of ~/.ssh/config, or "local" for this machine without SSH.
    """
    given = {
        "identity_file": os.path.abspath(options["identity"]) if options["identity"] else None,
        "cpus": options["cpus"],
        "memory": options["memory"],
        "gpus": _words(options["gpus"]),
        "features": _words(options["features"]),
        "partitions": _words(options["partition"]),
        "root": options["root"],
        "python": options["python"],
        "weight": options["weight"],
    }
    wanted = NodeOptions(name=name, given=given, yes=yes, fingerprint=accept_fingerprint)
    where = parse_target(target)
    limit_s = _burn_in_s(burn_in)
    config = _config()
    if limit_s:
        client.call("GET", "/v1/ping")  # without a controller nothing is added
    add_node(config, where, wanted)
    final = name or default_name(where)
    if limit_s:
        client.call("POST", "/v1/reconfigure", {"testing": [final]})
        burn_in_node(final, limit_s)
    else:
        _notify_controller()
        for line in still_drained(config, final):
            click.echo(line)
    try:
        line = promise_line(final)
    except client.NoControllerError:
        return
    except HpcschedError as error:
        line = f"! its impact on waits is not known: {clean(str(error))}"
    if line:
        click.echo(line)


@node.command()
@click.argument("name")
@click.option(
    "--accept-fingerprint", metavar="SHA256:...", help="Accept the host key with this fingerprint, and no other."
)
@click.option("--yes", is_flag=True, help="Accept any host key.")
def rekey(name: str, accept_fingerprint: str | None, yes: bool) -> None:
    """Pin the new host key of a reinstalled machine; the rest of its file is unchanged."""
    config, options = _config(), NodeOptions(name=name, given={}, yes=yes, fingerprint=accept_fingerprint)
    spec = next((spec for spec in config.nodes if spec.name == name), None)
    if spec is None:
        there = ", ".join(spec.name for spec in config.nodes) or "none"
        raise NotFoundError(f"cannot rekey {name[:60]!r}: there is no node of that name; there are: {there}")
    if spec.host == LOCAL_HOST:
        raise RequestError(f"cannot rekey {name}: it is this machine, without SSH")
    key = pin(config, replace(spec, host_key=""), options)
    if key == spec.host_key:
        click.echo(f"{name} has the pinned host key: nothing has changed")
        return
    look_at(config, replace(spec, host_key=key))
    path = config.config_dir / paths.NODES_DIR / f"{name}.toml"
    before = path.read_text(encoding="utf-8")
    text = with_keys(before, {"host_key": key})
    node_from(path, tomllib.loads(text))
    write_file(path, text)
    try:
        client.call("POST", "/v1/reconfigure", {})
    except client.NoControllerError:
        click.echo("the controller is not running; it reads this at its start: hpcsched up")
    except HpcschedError:
        write_file(path, before)
        raise
    click.echo(f"wrote {path}")


@node.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print the nodes as JSON.")
def list_(as_json: bool) -> None:
    """Show the configured nodes with the state that the controller reports."""
    config = _config()
    states = _states()
    rows = [
        {
            "name": spec.name,
            "host": spec.host,
            "port": spec.port,
            "user": spec.user,
            "cpus": spec.cpus,
            "mem_mib": spec.mem_mib,
            "gpus": [gpu.type for gpu in spec.gpus],
            "partitions": [partition.name for partition in config.partitions if spec.name in partition.nodes],
            "state": states.get(spec.name, "unknown"),
        }
        for spec in config.nodes
    ]
    if as_json:
        print_json({"version": 1, "nodes": rows})
        return
    if not rows:
        click.echo("There are no nodes yet; add one with: hpcsched node add user@host")
        return
    headers = ["NAME", "HOST", "CPUS", "MEMORY", "GPUS", "PARTITIONS", "STATE"]
    click.echo(columns(headers, [_row(row) for row in rows], right=(2, 3)), nl=False)


@node.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("--links", is_flag=True, help="Measure the network between the nodes instead.")
def probe(names: tuple[str, ...], links: bool) -> None:
    """Measure speed, network and temporary disk of nodes again, and update their files.

    Measure idle nodes: jobs that are running change the result.
    """
    config = _config()
    if links:
        probe_links(config, names)
    else:
        for name in names:
            probe_node(config, name)
    _notify_controller()


@node.command()
@click.argument("names", metavar="[NAME...]", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print the differences as JSON.")
def drift(names: tuple[str, ...], as_json: bool) -> None:
    """Show in what nodes of one kind differ: system, drivers, limits, users, mounts.

    Exits with 1 if there are differences.
    """
    answer = client.call("GET", "/v1/nodes?probe=1")
    views = answer["nodes"]
    for name in names:
        if name not in {view["name"] for view in views}:
            near = nearest(name, [view["name"] for view in views])
            raise NotFoundError(f"cannot compare {name[:60]!r}: there is no node of that name{near}")
    views = [view for view in views if not names or view["name"] in names]
    asked = [view for view in views if view.get("facts")]
    silent = [view["name"] for view in views if not view.get("facts")]
    found = drift_of(asked)
    if as_json:
        drifts = [{**one._asdict(), "text": one.text} for one in found]
        print_json({"version": 1, "compared": [view["name"] for view in asked], "silent": silent, "drift": drifts})
    else:
        rows = [[clean(word) for word in (one.what, one.kind, one.text)] for one in found]
        if rows:
            click.echo(columns(["WHAT", "NODES OF KIND", "DIFFERENCE"], rows), nl=False)
        else:
            click.echo(f"{plural(len(asked), 'node')} compared: no differences")
        if silent:
            click.echo(f"not compared, because they do not answer: {compress_hostlist(silent)}", err=True)
    if found:
        raise SystemExit(1)


@node.command()
@click.argument("name")
@click.option("--since", metavar="TIME", default="7d", show_default=True, help="The last days that count.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def impact(name: str, since: str, as_json: bool) -> None:
    """Show the waits before and after a node was added.

    The days since are also replayed without it.
    """
    spec = next((spec for spec in _config().nodes if spec.name == name), None)
    if spec is None:
        raise NotFoundError(f"cannot judge {name[:60]!r}: there is no node of that name")
    days = (parse_time_s(since, whole_minutes=False) or 0) / DAY_S
    if not 0 < days <= MOST_DAYS:
        raise RequestError(f"cannot judge {since[:40]!r}: give a time of at most a year, for example --since 14d")
    past = cluster_past(history_days(time.time(), spec.added, days))
    found = impact_of(past, name, spec.added, days)
    if as_json:
        print_json({"version": 1, **impact_json(found)})
    else:
        click.echo(impact_text(found), nl=False)


@node.command()
@click.argument("name")
@click.option("--force", is_flag=True, help="Remove the node even if it holds jobs; they are ended.")
def remove(name: str, force: bool) -> None:
    """Remove a node from the cluster. Nothing is deleted on the machine itself."""
    config = _config()
    path = config.config_dir / paths.NODES_DIR / f"{name}.toml"
    running = _known_to_controller()
    if name not in [spec.name for spec in config.nodes] and name not in (running or ()):
        if running is not None and _free(config, name, force=force):
            return  # its file was deleted by hand while it held jobs
        there = ", ".join(spec.name for spec in config.nodes) or "none"
        raise NotFoundError(f"cannot remove {name[:60]!r}: there is no node of that name; there are: {there}")
    load_config(config.config_dir, without=name)  # a partition may list it
    if running is None:
        _note_for_next_start(config, name, force=force)
        path.unlink(missing_ok=True)
        click.echo(f"removed {path}")
        click.echo("the controller is not running; it reads this at its start: hpcsched up")
        return
    _free(config, name, force=force)
    _delete(path, name)
    click.echo(f"removed {path}")
    click.echo("controller notified")


def _config() -> Config:
    return load_config(paths.find_config_dir(os.environ, os.getuid()))


def _words(text: str | None) -> list[str] | None:
    return None if text is None else [word.strip() for word in text.split(",") if word.strip()]


def _row(row: dict[str, Any]) -> list[str]:
    host = row["host"] if row["port"] is None else f"{row['host']}:{row['port']}"
    where = host if row["user"] is None else f"{row['user']}@{host}"
    words = [row["name"], where, str(row["cpus"]), format_mem(row["mem_mib"]), ",".join(row["gpus"]) or "-"]
    return [*words, ",".join(row["partitions"]) or "-", row["state"].lower()]


def _states() -> dict[str, str]:
    try:
        return {view["name"]: view["state"] for view in client.call("GET", "/v1/nodes")["nodes"]}
    except UnavailableError:
        return {}


def _notify_controller(*, err: bool = False) -> None:
    try:
        client.call("POST", "/v1/reconfigure", {})
    except UnavailableError:
        click.echo("the controller is not running; it reads this at its start: hpcsched up", err=err)
    else:
        click.echo("controller notified", err=err)


SAME_RATE = 0.1  # rates that differ by less are not written again, because the node is connected again then
VISIT_S = 60.0
CLOCK_OFF_S = 2.0
FIRST_USER, NOBODY = 1000, 65534  # uids of ordinary users
_TARGET = re.compile(
    r"(?:(?P<user>[^@]+)@)?(?P<host>\[[^]]+\]|[^:\[\]]+|[0-9A-Fa-f:]+:[0-9A-Fa-f:]*)(?::(?P<port>\d+))?\Z"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SshTarget:
    """The parts of ``user@host:port``."""

    user: str | None
    host: str
    port: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """The options of the command line; `given` are keys of the node's file."""

    name: str | None
    given: Mapping[str, Any]
    yes: bool
    fingerprint: str | None


def add_node(config: Config, target: SshTarget, options: NodeOptions) -> Visit:
    """Add the node, and print each step and finding.

    Raises HpcschedError; then nothing was written.
    """
    name = default_name(target) if options.name is None else options.name
    path = config.config_dir / paths.NODES_DIR / f"{name}.toml"
    _refuse_double(config, target, name)
    keys = {"host": target.host, "port": target.port, "user": target.user} | dict(options.given)
    keys = {key: value for key, value in keys.items() if value not in (None, (), [])}
    spec = _provisional(path, keys)
    if target.host != LOCAL_HOST:
        keys["host_key"] = pin(config, spec, options)
        spec = replace(spec, host_key=keys["host_key"])
    found = look_at(config, spec)
    if found.facts.get("python_for_all") and "python" not in keys:
        keys["python"] = found.facts[
            "python_for_all"
        ]  # the account's own Python is in a directory that users cannot enter
        found = look_at(config, replace(spec, python=keys["python"]))
    keys = {"cpus": found.facts["cpus"], "memory": format_mem(found.facts["mem_mib"])} | keys
    if "gpus" not in keys:
        keys |= gpu_keys(found.facts.get("gpus", []))
    keys = measured_keys(found.facts) | keys
    keys["partitions"] = list(keys.get("partitions", ()))
    keys["added"] = date_text(time.time())
    text = render_node(name, {key: value for key, value in keys.items() if value not in ((), [])})
    final = node_from(path, tomllib.loads(text))
    _check_partitions(config, final.partitions)
    for line in describe(final.spec, found, config.share):
        click.echo(line)
    _forget_name(config, name)
    write_file(path, text)
    click.echo(f"wrote {path}")
    return found


def _forget_name(config: Config, name: str) -> None:
    """Take the name of a new node out of `formerly` of the others.

    They would claim its state when it is removed.
    """
    for spec in config.nodes:
        if name in spec.formerly:
            path = config.config_dir / paths.NODES_DIR / f"{spec.name}.toml"
            left = [each for each in spec.formerly if each != name]
            write_file(path, with_keys(path.read_text(encoding="utf-8"), {"formerly": left}))


def parse_target(text: str) -> SshTarget:
    """Return the parts of ``[user@]host[:port]``; an IPv6 address with a port is in brackets."""
    match = _TARGET.match(text)
    advice = "write user@host or user@host:port, or local for this machine"
    if match is None:
        raise RequestError(f"cannot read {text[:100]!r}: {advice}")
    try:
        host_name = host(match["host"].strip("[]"))
        login = user(match["user"]) if match["user"] is not None else None
    except BadValue as error:
        raise RequestError(f"cannot read {text[:100]!r}: it {error}; {advice}") from None
    return SshTarget(user=login, host=host_name, port=int(match["port"]) if match["port"] else None)


def default_name(target: SshTarget) -> str:
    """Return the default name: the first label of the host name, or the address with dashes."""
    try:
        ipaddress.ip_address(target.host)
        name = re.sub(r"[^0-9A-Za-z]+", "-", target.host).strip("-")
    except ValueError:
        name = target.host.split(".")[0]
    if not NODE_NAME.match(name):
        raise RequestError(f"cannot name a node {name!r}: letters, digits, _ and - only; choose one with --name")
    return name


def _refuse_double(config: Config, target: SshTarget, name: str) -> None:
    if not NODE_NAME.match(name):
        raise RequestError(f"cannot name a node {name!r}: letters, digits, _ and -, at most 63")
    for node in config.nodes:
        if node.name == name:
            raise RequestError(
                f"cannot add {name}: there is a node of that name ({node.host}); choose one with --name, or, if "
                f"that machine was set up anew: hpcsched node rekey {name}"
            )
        if (node.host, node.port) == (target.host, target.port) and target.host != LOCAL_HOST:
            raise RequestError(f"cannot add {target.host} as {name}: it is the node {node.name} already")


def _check_partitions(config: Config, names: tuple[str, ...]) -> None:
    known = [partition.name for partition in config.partitions]
    for name in names:
        if name not in known:
            raise RequestError(f"cannot add it to partition {name!r}: there are {', '.join(known)}")


def _provisional(path: Path, keys: Mapping[str, Any]) -> NodeSpec:
    """Return the node from the command line, with placeholders for values that need a visit."""
    spec = node_from(path, {"cpus": 1, "memory": 1} | dict(keys) | {"host": LOCAL_HOST}).spec
    return replace(spec, host=str(keys["host"]), name=NodeName(path.stem))


def pin(config: Config, spec: NodeSpec, options: NodeOptions) -> str:
    """Print the host key of the machine, and return it if it is accepted."""
    with as_controller(config):
        key = peek_host_key(spec, ssh_settings(config), Abort())
    shown = fingerprint(key)
    click.echo(f"{spec.name} ({spec.host}) shows the host key {key.get_name()} {shown}")
    if options.fingerprint is not None:
        if options.fingerprint != shown:
            raise RequestError(
                f"cannot trust {spec.host}: its host key is {shown}, not {options.fingerprint} as you said"
            )
    elif not options.yes:
        _ask(spec, key.get_name(), shown)
    return spelled(key)


def _ask(spec: NodeSpec, key_type: str, shown: str) -> None:
    kind = key_type.removeprefix("ssh-").split("-")[0]
    click.echo(f"  to print it on that machine: ssh-keygen -lf /etc/ssh/ssh_host_{kind}_key.pub")
    if not sys.stdin.isatty():
        raise RequestError(
            f"cannot trust {spec.host} unasked: if that is its key, say so with --accept-fingerprint {shown}"
        )
    if not click.confirm("Is it the same?"):
        raise RequestError(f"cannot trust {spec.host}: you rejected its key {shown}")


def look_at(config: Config, spec: NodeSpec) -> Visit:
    """Visit the node, and check whether it has the share and the home directories of users."""
    with ExitStack() as files:
        probe = home = None
        if config.share:
            try:
                probe = files.enter_context(share_probe(config.share))
            except OSError as error:
                raise ConfigError(f"cannot write to the share {config.share}: {error.strerror}") from None
        directory = users_home()
        if directory and spec.host != LOCAL_HOST:
            with suppress(OSError):  # this command does not report a read-only or full home
                home = files.enter_context(share_probe(directory))
        return visit(
            spec,
            dial=dial_for(spec, config),
            bundle=build_bundle(),
            identity=identity_of(config),
            timeout_s=VISIT_S,
            probe=probe,
            home=home,
        )


# ----- burn-in: a new node gets no jobs until it has passed its tests again and again

LONGEST_BURN_IN_S = 7 * 86400
CONNECT_S = 60.0
LOOK_S = 0.3


def _burn_in_s(text: str | None) -> int:
    """Return how long to test, 0 for not at all. Raises RequestError."""
    if text is None:
        return 0
    seconds = parse_time_s(text, whole_minutes=False)
    if not seconds or seconds > LONGEST_BURN_IN_S:
        raise RequestError(f"cannot test for {text[:40]!r}: give a time from 1s to 7d, for example --burn-in 10m")
    return seconds


def burn_in_node(name: str, limit_s: float) -> None:
    """Measure and check the drained node until the time is over, then resume it.

    Raises HpcschedError: it has not passed, and is still drained.
    """
    click.echo(f"{name}: TESTING for {limit_s:g} s; it gets no jobs until it has passed (hctl resume {name} ends this)")
    until_s, rounds = time.monotonic() + limit_s, 0
    try:
        _await_link(name)
        while not rounds or time.monotonic() < until_s:
            why = _failure_of(name)
            if why:
                raise UnavailableError(why)
            rounds += 1
    except HpcschedError as error:
        why = clean(str(error))
        with suppress(HpcschedError):  # the reason is for others; it is drained already
            if _drained_for_test(name):
                client.call("POST", "/v1/nodes/drain", {"nodes": name, "why": f"{TESTING} failed: {why}"[:200]})
        raise UnavailableError(
            f"{name} has NOT passed its burn-in, and gets no jobs: {why}. After the repair: hpcsched node bench {name} "
            f"&& hctl resume {name}"
        ) from None
    if not _drained_for_test(name):
        click.echo(f"{name} has passed {plural(rounds, 'round')}; somebody else drained or resumed it meanwhile")
        return
    client.call("POST", "/v1/nodes/resume", {"nodes": name})
    click.echo(f"{name} has passed its burn-in ({plural(rounds, 'round')}), and gets jobs")


def _view_of(name: str, query: str = "") -> dict[str, Any]:
    views = client.call("GET", f"/v1/nodes{query}")["nodes"]
    found: dict[str, Any] | None = next((view for view in views if view["name"] == name), None)
    if found is None:
        raise NotFoundError(f"{name} was removed meanwhile")
    return found


def _drained_for_test(name: str) -> bool:
    view = _view_of(name)
    return bool(view["drained"]) and str(view["drained_why"]).startswith(TESTING)


def _await_link(name: str) -> None:
    until_s = time.monotonic() + CONNECT_S
    while (view := _view_of(name))["link"] != Link.UP:
        if time.monotonic() > until_s:
            raise UnavailableError(f"it does not answer: {view['link_why']}")
        time.sleep(LOOK_S)


def measured_slow(name: str, *, confirmed: bool = False) -> str:
    """Measure the node once; return which tests are slow, "" for none. Raises HpcschedError.

    With `confirmed`, only tests that were slow in two runs count.
    """
    body = {"node": name, "how": "quick"}
    client.call("POST", "/v1/nodes/bench", body, timeout_s=BENCH_DEADLINES_S["quick"] + VISIT_S)
    runs = [run_from_json(view) for view in client.call("GET", "/v1/benches")["benches"]]
    slow = [one for one in slow_tests(name, runs) if one.confirmed or not confirmed]
    words = ", ".join(f"{one.test} is {1 - one.part:.0%} below {one.usual:.4g}" for one in slow)
    return f"it is slow: {words}" if words else ""


def _failure_of(name: str) -> str:
    """Measure and check the node once; return what is wrong, "" for nothing."""
    if slow := measured_slow(name, confirmed=True):
        return slow
    checks = check_node(_view_of(name, "?probe=1"), time.time())
    failed = [f"{check.name}: {check.text}" for check in checks if check.status in (Status.CRITICAL, Status.UNKNOWN)]
    return "; ".join(failed[:3])


def users_home() -> str:
    """Return a sample home directory: our own, or for root that of the first ordinary user."""
    uid = os.getuid()
    if uid:
        return os.path.expanduser("~")
    for entry in sorted(pwd.getpwall(), key=lambda entry: entry.pw_uid):
        if FIRST_USER <= entry.pw_uid < NOBODY and os.path.isdir(entry.pw_dir):
            return entry.pw_dir
    return ""


def still_drained(config: Config, name: str) -> Iterator[str]:
    """Yield a line if the node was drained when it was removed, and still is."""
    try:
        views = [view for view in client.call("GET", "/v1/nodes")["nodes"] if view["name"] == name]
        drained = [(view["drained_by"], view["drained_why"]) for view in views if view["drained"]]
    except UnavailableError:
        path = config.controller.state_dir / paths.DATABASE_FILE
        if not path.exists():
            return
        with closing(Store(open_read_only(path))) as store:
            row = store.load_nodes().get(name)
        drained = [(row.drained_by, row.drained_why)] if row is not None and row.drained else []
    for by, why in drained:
        if by != OURSELVES:
            yield f"! {name} is still drained, by {clean(by)}: {clean(why)}. It gets jobs after: hctl resume {name}"


def identity_of(config: Config, timeout_s: float = client.TIMEOUT_S) -> ControllerIdentity:
    """Return the controller's identity: from itself, or from the database if it is down.

    Raises ConfigError.
    """
    try:
        running = client.call("GET", "/v1/ping", timeout_s=timeout_s)
        if running["cluster"] == config.name:
            known = {name: running[name] for name in ("incarnation", "epoch")}
            return ControllerIdentity(cluster=config.name, **known, start=running.get("start", ""))
    except HpcschedError:  # also if it answers rubbish
        pass
    path = config.controller.state_dir / paths.DATABASE_FILE
    if not path.exists():
        raise ConfigError(f"cannot find the database {path}: run hpcsched init first")
    database = open_read_only(path)
    try:
        return ControllerIdentity(
            cluster=config.name,
            incarnation=incarnation(database),
            epoch=current_epoch(database),
            start=start_id(database),
        )
    finally:
        database.close()


def describe(spec: NodeSpec, found: Visit, share: str) -> Iterator[str]:
    """Yield the findings about a visited node; problems are marked with ``!``."""
    facts = found.facts
    yield f"  cpus     {spec.cpus}" + _of(spec.cpus, facts["cpus"])
    yield f"  memory   {format_mem(spec.mem_mib)}" + _of(spec.mem_mib, facts["mem_mib"], " MiB")
    yield f"  GPUs     {', '.join(gpu.type for gpu in spec.gpus) or 'none'}"
    if spec.speed:
        link = f", network of {spec.link_mbps} Mbit/s" if spec.link_mbps else ""
        yield f"  speed    {spec.speed:g}{link} (for --hint=synchronous and comm_bound)"
    yield f"  disk     {facts.get('disk_free_mib', 0) / 1024:.1f} GiB free in {facts.get('root', 'its root')}"
    yield f"  system   {facts.get('hostname', '?')}, Linux {facts.get('kernel', '?')}, Python {facts.get('python', '?')}"
    runs_as = "every user's jobs, as that user" if facts.get("is_root") else "all jobs as that account"
    yield f"  account  {facts.get('user', '?')}: runs {runs_as}"
    yield from _describe_python(facts)
    off_s = abs(found.clock_ahead_s)
    mark = "!" if off_s > CLOCK_OFF_S + found.clock_error_s else " "
    yield f"{mark} clock    {off_s:.1f} s {'ahead of' if found.clock_ahead_s > 0 else 'behind'} this machine's"
    if share:
        yield f"! share    {found.share_error}" if found.share_error else f"  share    {share} is the same there"
    if found.home_error:
        yield f"! home     {users_home()} is not the same there ({found.home_error}): jobs submitted from there"
        yield "           start on other nodes; use --chdir with a directory that all nodes have, or a share"


def _describe_python(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the Python chosen for jobs that run as their users, and whether they can run it."""
    path, closed = facts.get("python_path"), facts.get("python_closed")
    if not path:
        return
    yield f"! python   {path}: users cannot run it" if closed else f"  python   {path}, which all users can run"
    if closed:
        yield f'           ({closed} is closed to them): hrun in their jobs fails with "Permission denied".'
        yield "           Add the node with --python=PATH of one that they can run, or open that directory: chmod o+x"


def measured_keys(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the measured keys of a node's file; unknown values are left out."""
    found = {"speed": facts.get("speed"), "link_mbps": facts.get("link_mbps")}
    with suppress(BadValue):  # a node may say anything
        found["mac"] = mac_address(facts.get("mac", ""))
    if facts.get("tmp_total_mib"):
        found["tmp_disk"] = format_mem(facts["tmp_total_mib"])
    return {key: value for key, value in found.items() if value}


def gpu_keys(gpus: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the keys of a node's file for the detected GPUs.

    A GPU with MIG is listed as its devices.
    """
    types, devices = [], []
    for gpu in gpus:
        for device in gpu.get("mig", []):
            types.append(device["profile"])
            devices.append(device["uuid"])
        if not gpu.get("mig"):
            types.append(gpu_type(gpu["name"]))
            devices.append(gpu["uuid"])
    return {"gpus": types} | ({"gpu_devices": devices} if any(gpu.get("mig") for gpu in gpus) else {})


def gpu_type(name: str) -> str:
    """Return the short type of a GPU, such as ``a100``, from the name in its driver."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    for number, word in enumerate(words):
        if any(char.isdigit() for char in word):
            if word.isdigit() and number:
                word = words[number - 1] + word  # RTX 3090
            following = words[number + 1] if number + 1 < len(words) else ""
            return word + (following if following in ("ti", "super") else "")
    return "gpu"


def _of(given: int, there: int, unit: str = "") -> str:
    return "" if given == there else f" (it has {there}{unit})"


def probe_node(config: Config, name: str) -> None:
    """Measure the node `name`, print and write the results.

    Raises HpcschedError; then its file is unchanged.
    """
    spec = _node_to_measure(config, name)
    facts = look_at(config, spec).facts
    if spec.link_mbps:
        facts.pop("link_mbps", None)  # a measured or configured value is better than the nominal one
    _write_measured(config, name, measured_keys(facts))


def probe_links(config: Config, names: Sequence[str]) -> None:
    """Measure the network of the nodes `names`, print and write the results.

    Raises HpcschedError.

    Failed transfers are printed; a node without a successful one keeps the value in its file, and the command fails at the end.
    """
    named = list(dict.fromkeys(_node_to_measure(config, name).name for name in names))
    others = [spec.name for spec in config.nodes if spec.name not in named]
    if len(named) == 1 and not others:
        raise RequestError(f"cannot measure the network of {named[0]}: there is no other node to send to it")
    peers = {spec.name: Peer(spec=spec, dial=dial_for(spec, config), address=address_of(spec)) for spec in config.nodes}
    bundle, identity = build_bundle(), identity_of(config)

    def measure(giver: NodeName, taker: NodeName) -> int:
        try:
            rate = transfer_mbps(peers[giver], peers[taker], bundle, identity)
        except UnavailableError as error:
            click.echo(f"! {giver} to {taker}: {error}", err=True)
            return 0
        click.echo(f"  {giver} to {taker}: {rate} Mbit/s")
        return rate

    rates = link_rates(named, others, measure)
    for name, rate in rates.items():
        _write_measured(config, name, {"link_mbps": rate})
    if silent := [name for name in named if name not in rates]:
        raise UnavailableError(f"cannot measure the network of {', '.join(silent)}: no transfer went through")


def write_link_rates(rates: Mapping[str, float]) -> None:
    """Write rates that have changed into the nodes' files, and notify the controller.

    A change of less than `SAME_RATE` does not count. Each changed file is named on standard error.
    """
    config = _config()
    known = {str(spec.name): spec.link_mbps for spec in config.nodes}
    changed = {name: round(rate) for name, rate in rates.items() if name in known and round(rate) > 0}
    changed = {name: rate for name, rate in changed.items() if abs(rate - known[name]) > SAME_RATE * known[name]}
    for name, rate in changed.items():
        _write_measured(config, name, {"link_mbps": rate}, err=True)
    if changed:
        _notify_controller(err=True)


def _node_to_measure(config: Config, name: str) -> NodeSpec:
    spec = next((spec for spec in config.nodes if spec.name == name), None)
    if spec is None:
        raise NotFoundError(f"cannot measure {name}: there is no node of that name")
    return spec


def _write_measured(config: Config, name: str, found: Mapping[str, Any], *, err: bool = False) -> None:
    path = config.config_dir / paths.NODES_DIR / f"{name}.toml"
    text = with_keys(path.read_text(), found)
    node_from(path, tomllib.loads(text))
    write_file(path, text)
    click.echo(f"{name}: " + ", ".join(f"{key} = {toml_value(value)}" for key, value in found.items()), err=err)


def with_keys(text: str, keys: Mapping[str, Any]) -> str:
    """Return the TOML `text` with `keys` set, replacing their lines, even commented ones."""
    for key, value in keys.items():
        line = f"{key} = {toml_value(value)}"
        text, count = re.subn(rf"(?m)^#?{key} *=.*$", line.replace("\\", r"\\"), text, count=1)
        if not count:
            text = text.rstrip("\n") + f"\n{line}\n"
    return text


ENDING_S = 30.0  # beyond the grace period of jobs
ASK_EVERY_S = 0.3


def _known_to_controller() -> list[str] | None:
    """Return the nodes of the controller, None if it is not running."""
    try:
        return [view["name"] for view in client.call("GET", "/v1/nodes")["nodes"]]
    except client.NoControllerError:
        return None


def _free(config: Config, name: str, *, force: bool) -> bool:
    """Have the controller free the node of jobs, and wait for that.

    Return whether there were any.
    """
    deadline_s = time.monotonic() + config.controller.kill_wait_s + ENDING_S
    printed = ""
    held = False
    while True:
        answer = client.call("POST", "/v1/nodes/remove", {"nodes": name, "force": force})
        for line in answer["became"]:
            click.echo(clean(line))
        held = held or bool(answer["became"] or answer["ending"])
        if not answer["ending"]:
            return held
        waiting = f"waiting for jobs to end on {name}: {', '.join(answer['ending'][:10])}"
        if waiting != printed:
            click.echo(clean(waiting))
            printed = waiting
        if time.monotonic() > deadline_s:
            raise UnavailableError(
                f"cannot remove node {name}: it is still ending its jobs; its file is there as before, and it gets no new "
                "jobs. Try again, or switch the machine off first"
            )
        time.sleep(ASK_EVERY_S)


def _delete(path: Path, name: str) -> None:
    """Delete the file and notify the controller; restore the file if the controller refuses."""
    aside = path.with_suffix(".removed")
    there = path.exists()
    if there:
        os.replace(path, aside)
    try:
        client.call("POST", "/v1/reconfigure", {})
    except HpcschedError:
        if there:
            os.replace(aside, path)
        client.call("POST", "/v1/nodes/resume", {"nodes": name, "only_by": "hpcschedd"})
        raise
    aside.unlink(missing_ok=True)


def _note_for_next_start(config: Config, name: str, *, force: bool) -> None:
    """Fail if the node holds jobs.

    With `force`, record that the next controller fences the node.
    """
    state_dir = config.controller.state_dir
    database = state_dir / paths.DATABASE_FILE
    if not database.exists():
        return
    with as_controller(config), ExitStack() as held:
        lock = StateLock(state_dir)
        lock.acquire(datetime.now().isoformat(sep=" ", timespec="seconds"), f"remove node {name}")
        held.callback(lock.release)
        with closing(Store(open_database(database))) as store:
            jobs = [str(job_id) for job_id in store.held_on(name)]
            if jobs and not force:
                raise RequestError(
                    f"cannot remove node {name}: {len(jobs)} jobs are held there ({', '.join(jobs[:5])}). Start the "
                    f"controller (hpcsched up) and let them end (hctl drain {name} WHY); or give them up with the node: "
                    f"hpcsched node remove --force {name}"
                )
            if jobs:
                store.give_up(name, user_name(os.getuid()))
    if jobs:
        click.echo(f"the next controller gives up the jobs on the node: {', '.join(jobs[:10])}")
