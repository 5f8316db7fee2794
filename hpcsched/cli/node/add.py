"""`hpcsched node add`: pins the host key of a machine, detects its resources, and writes its file.

Rule: the file is written only if the node was reached exactly as the controller will reach it.
"""

from __future__ import annotations

import ipaddress
import os
import pwd
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from hpcsched import client, paths
from hpcsched.cli.admin.init import write_file
from hpcsched.config.kinds import LOCAL_HOST, BadValue, host, user
from hpcsched.config.load import Config, node_from
from hpcsched.config.template import render_node
from hpcsched.errors import ConfigError, RequestError, UnavailableError
from hpcsched.launch import dial_for, ssh_settings
from hpcsched.launch.bundle import build_bundle
from hpcsched.launch.greeting import ControllerIdentity
from hpcsched.launch.hostkeys import fingerprint, spelled
from hpcsched.launch.pipe import Abort
from hpcsched.launch.ssh import peek_host_key
from hpcsched.launch.visit import Visit, visit
from hpcsched.listing.text import clean
from hpcsched.model.ids import NODE_NAME, NodeName
from hpcsched.model.node import OURSELVES, NodeSpec
from hpcsched.model.units import format_mem
from hpcsched.shareprobe import share_probe
from hpcsched.store.engine import current_epoch, incarnation, open_read_only
from hpcsched.store.store import Store

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
    text = render_node(name, {key: value for key, value in keys.items() if value not in ((), [])})
    final = node_from(path, tomllib.loads(text))
    _check_partitions(config, final.partitions)
    for line in describe(final.spec, found, config.share):
        click.echo(line)
    write_file(path, text)
    click.echo(f"wrote {path}")
    return found


def parse_target(text: str) -> SshTarget:
    """Return the parts of ``[user@]host[:port]``; an IPv6 address with a port is in brackets."""
    match = _TARGET.match(text)
    advice = "write user@host or user@host:port, or local for this machine"
    if match is None:
        raise RequestError(f"cannot read {text[:100]!r}: {advice}")
    try:
        its_host = host(match["host"].strip("[]"))
        its_user = user(match["user"]) if match["user"] is not None else None
    except BadValue as error:
        raise RequestError(f"cannot read {text[:100]!r}: it {error}; {advice}") from None
    return SshTarget(user=its_user, host=its_host, port=int(match["port"]) if match["port"] else None)


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


def identity_of(config: Config) -> ControllerIdentity:
    """Return the controller's identity: from itself, or from the database if it is down."""
    try:
        running = client.call("GET", "/v1/ping")
        if running["cluster"] == config.name:
            return ControllerIdentity(cluster=config.name, incarnation=running["incarnation"], epoch=running["epoch"])
    except UnavailableError:
        pass
    path = config.controller.state_dir / paths.DATABASE_FILE
    if not path.exists():
        raise ConfigError(f"cannot find the database {path}: run hpcsched init first")
    database = open_read_only(path)
    try:
        return ControllerIdentity(cluster=config.name, incarnation=incarnation(database), epoch=current_epoch(database))
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
