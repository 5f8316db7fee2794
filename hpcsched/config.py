"""The configuration: hpcsched.toml and nodes.d/*.toml, read once, checked wholly and handed down as one frozen value.

The keys are those of `hpcsched.config_keys`. Whatever is wrong is a ConfigError that names the file, the key and what
would be right. Who could write a file decides whether it is believed: see `_read_trusted`.

It does not know what the values are used for, and asks no node anything.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
import struct
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcsched import paths
from hpcsched.config_account_keys import ALL_PARTITION, ALL_WEIGHTS
from hpcsched.config_accounts import TABLES, accounting_of, check_partitions, limits_from
from hpcsched.config_keys import CLUSTER, CONTROLLER, NODE, SCHEDULER
from hpcsched.config_kinds import LOCAL_HOST
from hpcsched.config_tables import refuse_unknown, table_of, values_of
from hpcsched.config_topology import on_their_switches
from hpcsched.errors import ConfigError
from hpcsched.model.accounting import Accounting
from hpcsched.model.ids import NODE_NAME, NodeName
from hpcsched.model.nearest import nearest
from hpcsched.model.node import NodeSpec, Partition
from hpcsched.model.resources import Gpu

MAX_FILE_BYTES = 4 << 20
HOST_KEY_TYPES = (
    "ssh-ed25519",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "ssh-rsa",  # the name of the key; what it signs with is SHA-2
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """[controller]; see `config_keys.CONTROLLER` for each."""

    state_dir: Path
    run_dir: Path
    log_level: str
    admins: tuple[str, ...]
    ssh_config: Path
    connect_timeout_s: float
    heartbeat_s: float
    node_down_after_s: float
    kill_wait_s: float
    lease_s: float
    min_job_age_s: float
    requeue: bool
    requeue_delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """[scheduler.weights]"""

    age: int
    partition: int
    size: int
    fairshare: int
    qos: int
    assoc: int
    tres: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """[scheduler]"""

    policy: str
    default_time_limit: int | None  # seconds; None: no limit
    age_max_s: float
    favor_small: bool
    small_relative_to_time: bool
    accrue_always: bool
    max_switch_wait: float  # seconds
    max_array_size: int
    max_jobs: int
    preempt_type: str
    preempt_mode: str
    preempt_grace_time_s: float
    preempt_exempt_time_s: float
    weights: Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFile:
    """What one file of nodes.d says."""

    spec: NodeSpec
    partitions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All of it. `share` is "" if there is none."""

    config_dir: Path
    name: str
    share: str
    controller: ControllerSettings
    scheduler: SchedulerSettings
    partitions: tuple[Partition, ...]
    accounting: Accounting
    nodes: tuple[NodeSpec, ...]

    @property
    def launch_key(self) -> Path:
        """The private key that `hpcsched init` made for logging in to the nodes."""
        return self.config_dir / paths.LAUNCH_KEY

    @property
    def api_socket(self) -> Path:
        return self.controller.run_dir / paths.API_SOCKET

    @property
    def steps_socket(self) -> Path:
        return self.controller.run_dir / paths.STEPS_SOCKET


def load_config(config_dir: Path, environ: Mapping[str, str] | None = None) -> Config:
    """Return the configuration of the directory `config_dir`. Raises ConfigError."""
    config_dir = config_dir.absolute()
    path = config_dir / paths.CONFIG_FILE
    if not path.exists():
        raise ConfigError(f"cannot read {path}: it does not exist; make it with: hpcsched init")
    _refuse_open_directory(config_dir)
    tables = _parse(path, _read_trusted(path))
    nodes = load_nodes(config_dir)
    return build_config(tables, nodes, config_dir=config_dir, environ=os.environ if environ is None else environ)


def build_config(
    tables: Mapping[str, Any], nodes: Sequence[NodeFile], *, config_dir: Path, environ: Mapping[str, str]
) -> Config:
    """Return the configuration that the parsed `tables` of hpcsched.toml and `nodes` make. Raises ConfigError."""
    path = config_dir / paths.CONFIG_FILE
    known = ("cluster", "controller", "scheduler", "partitions", "topology", *TABLES)
    refuse_unknown(path, "the file", tables, known, kind="table")
    cluster = values_of(path, "[cluster]", tables.get("cluster", {}), CLUSTER)
    partitions = _partitions(path, tables.get("partitions", {}), nodes)
    accounting = accounting_of(path, tables)
    check_partitions(path, accounting, partitions)
    return Config(
        config_dir=config_dir,
        name=cluster["name"],
        share=cluster["share"],
        controller=_controller(path, tables.get("controller", {}), environ),
        scheduler=_scheduler(path, tables.get("scheduler", {})),
        partitions=partitions,
        accounting=accounting,
        nodes=on_their_switches(path, tables.get("topology", {}), [node.spec for node in nodes]),
    )


def load_nodes(config_dir: Path) -> tuple[NodeFile, ...]:
    """Return the nodes of `config_dir`/nodes.d, by name. Raises ConfigError."""
    nodes_dir = config_dir / paths.NODES_DIR
    if not nodes_dir.is_dir():
        return ()
    _refuse_open_directory(nodes_dir)
    return tuple(
        load_node(path) for path in sorted(nodes_dir.glob("*.toml"), key=lambda path: natural_order(path.stem))
    )


def load_node(path: Path) -> NodeFile:
    """Return what the file nodes.d/NAME.toml says. Raises ConfigError."""
    return node_from(path, _parse(path, _read_trusted(path)))


def node_from(path: Path, table: Mapping[str, Any]) -> NodeFile:
    """Return the node of a parsed file, named as the file is. Raises ConfigError."""
    name = path.stem
    if not NODE_NAME.match(name):
        raise ConfigError(f"cannot use {path}: {name!r} is no node name: letters, digits, _ and -, at most 63")
    values = values_of(path, "the file", table, NODE)
    if values["host"] != LOCAL_HOST:
        _check_host_key(path, values["host_key"])
    spec = NodeSpec(
        name=NodeName(name),
        host=values["host"],
        port=values["port"],
        user=values["user"],
        identity_file=values["identity_file"],
        host_key=" ".join(values["host_key"].split()[:2]),
        cpus=values["cpus"],
        mem_mib=values["memory"],
        gpus=_gpus(path, values),
        features=values["features"],
        root=values["root"],
        python=values["python"],
        weight=values["weight"],
        speed=values["speed"],
        link_mbps=values["link_mbps"],
        tmp_mib=values["tmp_disk"],
    )
    return NodeFile(spec=spec, partitions=values["partitions"])


def _gpus(path: Path, values: Mapping[str, Any]) -> tuple[Gpu, ...]:
    types, devices = values["gpus"], values["gpu_devices"] or ("",) * len(values["gpus"])
    if len(devices) != len(types):
        raise ConfigError(f"cannot use {path}: gpu_devices names {len(devices)} devices, and gpus has {len(types)}")
    return tuple(
        Gpu(index=index, type=kind, shards=values["gpu_shards"], device=device)
        for index, (kind, device) in enumerate(zip(types, devices, strict=True))
    )


def natural_order(name: str) -> tuple[str, int, str]:
    """Return a sort key that puts n2 before n10."""
    prefix = name.rstrip("0123456789")
    digits = name[len(prefix) :]
    return prefix, int(digits or -1), name


def _controller(path: Path, table: Any, environ: Mapping[str, str]) -> ControllerSettings:
    values = values_of(path, "[controller]", table, CONTROLLER)
    config_dir = path.parent
    if values["state_dir"]:
        state_dir = paths.absolute(values["state_dir"], config_dir)
        run_dir = state_dir / "run"
    else:
        state_dir = paths.default_state_dir(config_dir, environ)
        run_dir = paths.default_run_dir(config_dir, environ)
    if values["run_dir"]:
        run_dir = paths.absolute(values["run_dir"], config_dir)
    if values["node_down_after_s"] < 2 * values["heartbeat_s"]:
        raise ConfigError(
            f"cannot use {path}: [controller] node_down_after_s = {values['node_down_after_s']:g} is less than twice "
            f"heartbeat_s = {values['heartbeat_s']:g}"
        )
    values |= {
        "state_dir": state_dir,
        "run_dir": run_dir,
        "ssh_config": paths.absolute(values["ssh_config"], config_dir),
    }
    return ControllerSettings(**values)


def _scheduler(path: Path, table: Any) -> SchedulerSettings:
    table = dict(table_of(path, "[scheduler]", table))
    weights = table.pop("weights", {})
    values = values_of(path, "[scheduler]", table, SCHEDULER, also=("weights",))
    return SchedulerSettings(weights=Weights(**values_of(path, "[scheduler.weights]", weights, ALL_WEIGHTS)), **values)


def _partitions(path: Path, tables: Any, nodes: Sequence[NodeFile]) -> tuple[Partition, ...]:
    tables = table_of(path, "[partitions]", tables) or {"main": {"default": True}}
    for node in nodes:
        for name in node.partitions:
            if name not in tables:
                raise ConfigError(
                    f"cannot use {path.parent / paths.NODES_DIR / node.spec.name}.toml: there is no partition {name!r}"
                    f"{nearest(name, tuple(tables))}; there are {', '.join(tables)}"
                )
    partitions = [_partition(path, name, table, nodes) for name, table in tables.items()]
    defaults = [partition.name for partition in partitions if partition.default]
    if len(defaults) > 1:
        raise ConfigError(f"cannot use {path}: more than one partition has default = true: {', '.join(defaults)}")
    return tuple(partitions)


def _partition(path: Path, name: str, table: Any, nodes: Sequence[NodeFile]) -> Partition:
    where = f"[partitions.{name}]"
    if not NODE_NAME.match(name):
        raise ConfigError(f"cannot use {path}: {name!r} is no partition name: letters, digits, _ and -, at most 63")
    values = values_of(path, where, table, ALL_PARTITION)
    known = tuple(node.spec.name for node in nodes)
    listed = known if values["nodes"] is None else values["nodes"]
    for node in listed:
        if node not in known:
            raise ConfigError(
                f"cannot use {path}: {where} names the node {node!r}, which has no file in {paths.NODES_DIR}"
                f"{nearest(node, known)}; add it with: hpcsched node add"
            )
    joined = (node.spec.name for node in nodes if name in node.partitions and node.spec.name not in listed)
    if values["max_time"] is not None and (values["default_time"] or 0) > values["max_time"]:
        raise ConfigError(f"cannot use {path}: {where} has a default_time above its max_time")
    return Partition(
        name=name,
        nodes=(*(NodeName(node) for node in listed), *joined),
        default=values["default"],
        up=values["up"],
        max_time_s=values["max_time"],
        default_time_s=values["default_time"],
        priority_tier=values["priority_tier"],
        priority_job_factor=values["priority_job_factor"],
        allow_accounts=values["allow_accounts"],
        allow_qos=values["allow_qos"],
        default_mem_per_cpu_mib=values["default_mem_per_cpu"],
        max_nodes=values["max_nodes"],
        billing=values["billing"],
        limits=limits_from(values),
    )


def _check_host_key(path: Path, text: str) -> None:
    parts = text.split()
    advice = "write it as in known_hosts, without the name; hpcsched node add does it"
    if len(parts) < 2 or parts[0] not in HOST_KEY_TYPES:
        raise ConfigError(f"cannot use {path}: host_key = {text[:80]!r} is no SSH host key; {advice}")
    try:
        blob = base64.b64decode(parts[1], validate=True)
        (size,) = struct.unpack_from("!I", blob)
    except (binascii.Error, struct.error):
        raise ConfigError(f"cannot use {path}: host_key is damaged: its base64 cannot be read; {advice}") from None
    if blob[4 : 4 + size] != parts[0].encode():
        raise ConfigError(f"cannot use {path}: host_key is damaged: it says {parts[0]} and holds another; {advice}")


def _parse(path: Path, text: str) -> Mapping[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def _read_trusted(path: Path) -> str:
    """Return the text of `path`, if nobody but root, its owner and this user could have written it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not hold us up
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"cannot read {path}: it is no regular file")
        _refuse_writable(path, status)
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"cannot read {path}: it is longer than {MAX_FILE_BYTES >> 20} MiB")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {path}: it is not UTF-8 (byte {error.start})") from None


def _refuse_open_directory(path: Path) -> None:
    _refuse_writable(path, os.stat(path))


def _refuse_writable(path: Path, status: os.stat_result) -> None:
    if status.st_mode & stat.S_IWOTH:
        raise ConfigError(f"cannot trust {path}: everybody may write it; run: chmod o-w {path}")
    if os.geteuid() == 0 and status.st_mode & stat.S_IWGRP and status.st_gid != 0:
        raise ConfigError(f"cannot trust {path}: its group may write it; run: chmod g-w {path}")
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"cannot trust {path}: it belongs to uid {status.st_uid}, not to root or to its reader, uid {os.geteuid()}"
        )
