"""Read, check and write the configuration: hpcsched.toml and nodes.d/*.toml.

It is one frozen value. Files are written with comments.

The keys are those of `hpcsched.config.keys`. Every error is a ConfigError with the file, the key
and the expected value. A file is trusted only if no other user could write it: see `_read_trusted`.

It does not know what the values are used for, and contacts no node.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import pwd
import re
import shlex
import stat
import struct
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from hpcnode.os.trust import way_to
from hpcnode.wire import gate
from hpcsched import paths
from hpcsched.auth.authorize import HIDEABLE, AccessPolicy, Role
from hpcsched.config.accounts import (
    ACCOUNT,
    ALL_PARTITION,
    ALL_SECTIONS,
    ALL_WEIGHTS,
    QOS,
    TABLES,
    USER,
    accounting_of,
    check_partitions,
    limits_from,
)
from hpcsched.config.keys import (
    ALERT_RULE,
    ALERTS,
    AUDIT,
    BACKUP,
    CIRCUIT,
    CLUSTER,
    CONTROLLER,
    COST,
    GATEWAY,
    LOCAL_HOST,
    LOG,
    METRICS,
    NODE,
    OIDC,
    POWER,
    PRIVACY,
    RECEIVER,
    REPORTS,
    ROLES,
    RULE_LIMITS,
    SCHEDULER,
    SWITCH,
    SYNC,
    BadValue,
    Key,
    is_remote,
    refuse_unknown,
    table_of,
    toml_value,
    values_of,
)
from hpcsched.errors import ConfigError
from hpcsched.model.accounting import Accounting
from hpcsched.model.alerting import RULES, RuleSettings, limit_text
from hpcsched.model.ids import NODE_NAME, NodeName
from hpcsched.model.node import Circuit, Gpu, NodeSpec, Partition, PartitionState
from hpcsched.model.retention import KeptBackups
from hpcsched.model.tariff import Tariff
from hpcsched.model.units import nearest

# ----- [topology.switches.NAME] of hpcsched.toml: the switch of each node, for compact placement
# One level: each node is on one switch, and all switches are at the same distance. Source:
# topology.conf(5), topology/tree.


def on_their_switches(path: Path, topology: Any, nodes: Sequence[NodeSpec]) -> tuple[NodeSpec, ...]:
    """Return `nodes`, each with its switch from the table `topology`. Raises ConfigError."""
    table = table_of(path, "[topology]", topology)
    refuse_unknown(path, "[topology]", table, ("switches",), kind="table")
    switches = table_of(path, "[topology.switches]", table.get("switches", {}))
    switch_of = _switches(path, switches)
    known = {node.name for node in nodes}
    for name, switch in switch_of.items():
        if name not in known:
            raise ConfigError(
                f"cannot use {path}: [topology.switches.{switch}] names the node {name!r}, which has no file in nodes.d"
            )
    return tuple(replace(node, switch=switch_of.get(node.name, "")) for node in nodes)


def _switches(path: Path, switches: Mapping[str, Any]) -> dict[str, str]:
    switch_of: dict[str, str] = {}
    for switch, table in switches.items():
        where = f"[topology.switches.{switch}]"
        if not NODE_NAME.match(switch):
            raise ConfigError(
                f"cannot use {path}: {switch!r} is not a name of a switch: letters, digits, _ and -, at most 63"
            )
        for name in values_of(path, where, table, SWITCH)["nodes"] or ():
            if switch_of.setdefault(name, switch) != switch:
                raise ConfigError(
                    f"cannot use {path}: {where} names the node {name!r}, which hangs on {switch_of[name]}"
                )
    return switch_of


MAX_FILE_BYTES = 4 << 20
_HEADER = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(?:#.*)?$")
_KEY = re.compile(r"\s*([A-Za-z0-9_.-]+)\s*=")
_IN_THE_MAIN_FILE = (("controller", "state_dir"), ("controller", "run_dir"))
HOST_KEY_TYPES = (
    "ssh-ed25519",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "ssh-rsa",  # the name of the key; its signatures use SHA-2
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """[controller]; see `hpcsched.config.keys.CONTROLLER` for each."""

    state_dir: Path
    run_dir: Path
    user: str | None
    sign_jobs: bool
    log_level: str
    log_max_size: int  # MiB
    log_files: int
    seal_key: Path
    ssh_config: Path
    connect_timeout_s: float
    heartbeat_s: float
    node_down_after_s: float
    kill_wait_s: float
    lease_s: float
    min_job_age_s: float
    propagate: str  # kinds of resource limits, as `hpcnode.os.rlimits.names` reads them
    requeue: bool
    requeue_delay_s: float
    allow_uid_below: int
    confine: tuple[str, ...]
    max_processes: int
    health_hold: float
    link_drops: int
    prolog: str
    epilog: str
    prolog_head: str
    epilog_head: str
    prolog_epilog_timeout: float
    request_rate: float
    request_burst: int
    submit_rate: float
    submit_burst: int

    def account(self) -> pwd.struct_passwd | None:
        """Return the account of a controller that serves all users and is not root, else None.

        Raises ConfigError if this machine has no such account.
        """
        if self.user is None:
            return None
        try:
            return pwd.getpwnam(self.user)
        except KeyError:
            raise ConfigError(
                f"cannot run the controller as {self.user!r}, which is user in [controller]: this machine has no such "
                f"account; make it: useradd --system --home-dir /var/lib/hpcsched --shell /usr/sbin/nologin {self.user}"
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSettings:
    """[metrics]; see `hpcsched.config.keys.METRICS` for each."""

    interval_s: float = 10.0
    jobs: bool = True
    max_jobs: int = 200
    history: bool = True
    keep_samples: float = 2 * 86400.0  # seconds
    keep_minutes: float = 14 * 86400.0
    retention: float = 400 * 86400.0
    max_size: int = 1024  # MiB
    remote_write: str = ""
    remote_write_token: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverSettings:
    """[alerts.receivers.NAME]; see `hpcsched.config.keys.RECEIVER` for each."""

    name: str
    kind: str
    address: str = ""
    token: str = ""
    to: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    least: str = "info"
    resolved: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertSettings:
    """[alerts]; see `hpcsched.config.keys.ALERTS` for each.

    `receivers`: `mail_to` is the first.
    """

    on: bool = True
    interval: float = 10.0  # seconds
    rules: tuple[RuleSettings, ...] = ()
    smtp: str = ""
    smtp_user: str = ""
    smtp_password: str = ""
    mail_from: str | None = None
    mail_domain: str = ""
    mail_domains: tuple[str, ...] = ()
    mail_to: tuple[str, ...] = ()
    tell_users: bool = True
    quiet: str = ""
    watchdog: str = ""
    receivers: tuple[ReceiverSettings, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSettings:
    """[sync]"""

    files: tuple[str, ...] = ()
    run: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSettings:
    """[power]; see `hpcsched.config.keys.POWER` for each. Times in seconds."""

    suspend_after: float = 0.0
    suspend_command: str = "systemctl poweroff"
    suspend_program: str = ""
    resume_program: str = ""
    suspend_timeout: float = 120.0
    resume_timeout: float = 600.0
    min_on: float = 1800.0
    budget_watts: float = 0.0  # 0: there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSettings:
    """[reports]; see `hpcsched.config.keys.REPORTS` for each."""

    mail: tuple[str, ...] = ()
    by: tuple[str, ...] = ("account", "user")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupSettings:
    """[backup]; see `hpcsched.config.keys.BACKUP` for each."""

    every: float = 0.0  # seconds
    keep: KeptBackups = KeptBackups(7, 8)
    to: tuple[str, ...] = ()
    encrypt: tuple[str, ...] = ()

    @property
    def is_on(self) -> bool:
        return bool(self.every and self.to)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSettings:
    """[audit]. `heads` "": the file `audit.heads` in the state directory."""

    heads: str
    sign_every_s: float
    syslog: bool


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
    wait_guard: float
    default_time_limit: int | None  # seconds; None: no limit
    age_max_s: float
    favor_small: bool
    small_relative_to_time: bool
    accrue_always: bool
    max_switch_wait: float  # seconds
    max_array_size: int
    max_jobs: int
    max_scripts_per_user: int  # MiB
    max_submit_jobs: int | None  # None: a tenth of max_jobs
    preempt_type: str
    preempt_mode: str
    preempt_grace_time_s: float
    preempt_exempt_time_s: float
    weights: Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class OidcSettings:
    """[gateway.oidc]; see `hpcsched.config.keys.OIDC` for each."""

    issuer: str
    client_id: str
    client_secret: str
    user_claim: str
    user_domain: str
    scope: str
    ca: str
    keys: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """[gateway]; see `hpcsched.config.keys.GATEWAY` for each."""

    user: str | None
    address: str
    port: int
    url: str
    job_hosts: str
    certificate: str
    key: str
    client_ca: str
    token_max_age_s: float
    session_s: float
    rate: float
    burst: int
    connections_per_address: int
    max_connections: int
    oidc: OidcSettings
    log_format: str = "text"  # or "ecs": of [log]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFile:
    """The content of one file of nodes.d."""

    spec: NodeSpec
    partitions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole configuration. `share` is "" if there is none."""

    config_dir: Path
    name: str
    share: str
    controller: ControllerSettings
    scheduler: SchedulerSettings
    gateway: GatewaySettings
    partitions: tuple[Partition, ...]
    accounting: Accounting
    nodes: tuple[NodeSpec, ...]
    access: AccessPolicy
    audit: AuditSettings
    metrics: MetricsSettings = MetricsSettings()
    alerts: AlertSettings = AlertSettings()
    sync: SyncSettings = SyncSettings()
    backup: BackupSettings = BackupSettings()
    cost: Tariff = Tariff()
    reports: ReportSettings = ReportSettings()
    log_format: str = "text"  # or "ecs"
    power: PowerSettings = PowerSettings()
    circuits: tuple[Circuit, ...] = ()

    @property
    def launch_key(self) -> Path:
        """Return the path of the private key, made by `hpcsched init`, for login to the nodes."""
        return self.config_dir / paths.LAUNCH_KEY

    @property
    def api_socket(self) -> Path:
        return self.controller.run_dir / paths.API_SOCKET

    @property
    def steps_socket(self) -> Path:
        return self.controller.run_dir / paths.STEPS_SOCKET


def load_config(
    config_dir: Path,
    environ: Mapping[str, str] | None = None,
    *,
    without: str = "",
    edited: Mapping[Path, str] | None = None,
) -> Config:
    """Return the configuration of `config_dir`, as if the node `without` had no file.

    `edited`: texts that count instead of the files of these paths, which need not exist. Raises ConfigError.
    """
    edited = edited or {}
    config_dir = config_dir.absolute()
    path = config_dir / paths.CONFIG_FILE
    if not path.exists():
        raise ConfigError(f"cannot read {path}: it does not exist; make it with: hpcsched init")
    _refuse_open_directory(config_dir)
    files = [(path, _parse(path, _read_trusted(path))), *_extra_files(config_dir)]
    files = [(path, _parse(path, edited[path]) if path in edited else tables) for path, tables in files]
    nodes_dir = config_dir / paths.NODES_DIR
    changed = [node_from(path, _parse(path, text)) for path, text in edited.items() if path.parent == nodes_dir]
    gone = {without, *(node.spec.name for node in changed)}
    nodes = [*(node for node in load_nodes(config_dir) if node.spec.name not in gone), *changed]
    given = os.environ if environ is None else environ
    tables = _merged(files)
    try:
        return build_config(tables, nodes, config_dir=config_dir, environ=given)
    except ConfigError as error:
        culprit = _first_bad(files, nodes, config_dir, given)
        raise ConfigError(str(error).replace(str(path), str(culprit), 1)) from None


def load_gateway(config_dir: Path) -> GatewaySettings:
    """Return the section [gateway] alone: the gateway may not read node files.

    Raises ConfigError.
    """
    path = config_dir / paths.CONFIG_FILE
    if not path.exists():
        raise ConfigError(f"cannot read {path}: it does not exist; make it with: hpcsched init")
    _refuse_open_directory(config_dir)
    tables = _merged([(path, _parse(path, _read_trusted(path))), *_extra_files(config_dir)])
    return replace(_gateway(path, tables.get("gateway", {})), log_format=_log_format(path, tables))


def _log_format(path: Path, tables: Mapping[str, Any]) -> str:
    return str(values_of(path, "[log]", tables.get("log", {}), LOG)["format"])


def _gateway(path: Path, table: Any) -> GatewaySettings:
    table = dict(table_of(path, "[gateway]", table))
    oidc = OidcSettings(**values_of(path, "[gateway.oidc]", table.pop("oidc", {}), OIDC))
    settings = GatewaySettings(**values_of(path, "[gateway]", table, GATEWAY, also=("oidc",)), oidc=oidc)
    if oidc.issuer and not (oidc.client_id and settings.url.startswith("https://")):
        raise ConfigError(
            f"cannot use {path}: login at an issuer needs client_id of [gateway.oidc], and url of [gateway] with the address to "
            "which the issuer sends users back, https://..."
        )
    return settings


def _extra_files(config_dir: Path) -> list[tuple[Path, Mapping[str, Any]]]:
    """Return the files of conf.d.

    They may have all keys of hpcsched.toml except the location of the controller.
    """
    directory = config_dir / paths.EXTRA_DIR
    if not directory.is_dir():
        return []
    _refuse_open_directory(directory)
    files = [(path, _parse(path, _read_trusted(path))) for path in sorted(directory.glob("*.toml"))]
    for path, tables in files:
        for table, key in _IN_THE_MAIN_FILE:
            if isinstance(tables.get(table), dict) and key in tables[table]:
                raise ConfigError(
                    f"cannot use {path}: [{table}] {key} must be in {paths.CONFIG_FILE}, where commands look for it"
                )
    return files


def _merged(files: Sequence[tuple[Path, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the merged tables of all files. Raises ConfigError for a key that two files set."""
    merged: dict[str, Any] = {}
    setters: dict[tuple[str, ...], Path] = {}
    for path, tables in files:
        _merge(merged, tables, path, (), setters)
    return merged


def _merge(
    into: dict[str, Any],
    tables: Mapping[str, Any],
    path: Path,
    above: tuple[str, ...],
    setters: dict[tuple[str, ...], Path],
) -> None:
    for name, value in tables.items():
        key = (*above, name)
        if isinstance(value, dict) and isinstance(into.get(name, {}), dict):
            _merge(into.setdefault(name, {}), value, path, key, setters)
        elif name in into:
            where = f"[{'.'.join(above)}] {name}" if above else name
            first = setters.get(key, path)
            raise ConfigError(f"cannot use {path}: {where} is set in {first} already; remove one of the two")
        else:
            into[name] = value
            setters[key] = path


def _first_bad(
    files: Sequence[tuple[Path, Mapping[str, Any]]],
    nodes: Sequence[NodeFile],
    config_dir: Path,
    environ: Mapping[str, str],
) -> Path:
    """Return the first file with which the configuration is invalid."""
    for count, (path, _) in enumerate(files, 1):
        try:
            build_config(_merged(files[:count]), nodes, config_dir=config_dir, environ=environ)
        except ConfigError:
            return path
    return files[0][0]


_KNOWN_TABLES = (
    "cluster",
    "controller",
    "roles",
    "privacy",
    "audit",
    "metrics",
    "alerts",
    "sync",
    "power",
    "backup",
    "cost",
    "reports",
    "log",
    "scheduler",
    "gateway",
    "partitions",
    "topology",
    *TABLES,
)


def build_config(
    tables: Mapping[str, Any], nodes: Sequence[NodeFile], *, config_dir: Path, environ: Mapping[str, str]
) -> Config:
    """Return the configuration from the parsed `tables` of hpcsched.toml and `nodes`.

    Raises ConfigError.
    """
    path = config_dir / paths.CONFIG_FILE
    refuse_unknown(path, "the file", tables, _KNOWN_TABLES, kind="table")
    cluster = values_of(path, "[cluster]", tables.get("cluster", {}), CLUSTER)
    partitions = _partitions(path, tables.get("partitions", {}), nodes)
    accounting = accounting_of(path, tables)
    check_partitions(path, accounting, partitions)
    controller = _controller(path, tables.get("controller", {}), environ)
    _refuse_own_machine(config_dir, controller, nodes)
    power = _power(path, tables.get("power", {}), controller)
    return Config(
        config_dir=config_dir,
        name=cluster["name"],
        share=cluster["share"],
        controller=controller,
        scheduler=_scheduler(path, tables.get("scheduler", {})),
        gateway=_gateway(path, tables.get("gateway", {})),
        partitions=partitions,
        accounting=accounting,
        nodes=on_their_switches(path, tables.get("topology", {}), [node.spec for node in nodes]),
        access=_access(path, tables, accounting),
        audit=AuditSettings(**values_of(path, "[audit]", tables.get("audit", {}), AUDIT)),
        metrics=MetricsSettings(**values_of(path, "[metrics]", tables.get("metrics", {}), METRICS)),
        alerts=_alerts(path, tables.get("alerts", {})),
        sync=SyncSettings(**values_of(path, "[sync]", tables.get("sync", {}), SYNC)),
        backup=_backup(path, tables.get("backup", {})),
        cost=Tariff(**values_of(path, "[cost]", tables.get("cost", {}), COST)),
        reports=_reports(path, tables),
        log_format=_log_format(path, tables),
        power=power,
        circuits=_circuits(
            path, power.budget_watts, tables.get("power", {}).get("circuits", {}), [node.spec for node in nodes]
        ),
    )


def _backup(path: Path, table: Any) -> BackupSettings:
    settings = BackupSettings(**values_of(path, "[backup]", table, BACKUP))
    if not settings.encrypt and any(map(is_remote, settings.to)):
        raise ConfigError(
            f"cannot use {path}: [backup] to names another machine, and a backup has keys and job scripts: name public keys "
            "in encrypt"
        )
    return settings


def _reports(path: Path, tables: Mapping[str, Any]) -> ReportSettings:
    settings = ReportSettings(**values_of(path, "[reports]", tables.get("reports", {}), REPORTS))
    if settings.mail and not table_of(path, "[alerts]", tables.get("alerts", {})).get("smtp"):
        raise ConfigError(f"cannot use {path}: [reports] mail needs smtp of [alerts], the mail server")
    return settings


MAIL_TO = "mail_to"  # the name of the receiver that this key makes
MAX_RECEIVERS = 50


def _alerts(path: Path, table: Any) -> AlertSettings:
    table = dict(table_of(path, "[alerts]", table))
    named = table_of(path, "[alerts.receivers]", table.pop("receivers", {}))
    changed = table_of(path, "[alerts.rules]", table.pop("rules", {}))
    values = values_of(path, "[alerts]", table, ALERTS, also=("receivers", "rules"))
    refuse_unknown(path, "[alerts.rules]", changed, tuple(RULES), kind="rule")
    if len(named) > MAX_RECEIVERS:
        raise ConfigError(f"cannot use {path}: [alerts.receivers] has {len(named)}, and at most {MAX_RECEIVERS} may be")
    receivers = [_receiver(path, name, receiver, values["smtp"]) for name, receiver in named.items()]
    if values["mail_to"]:
        receivers.insert(0, ReceiverSettings(name=MAIL_TO, kind="mail", to=values["mail_to"]))
    if values["mail_to"] and not values["smtp"]:
        raise ConfigError(f"cannot use {path}: [alerts] mail_to needs smtp, the mail server")
    is_encrypted = values["smtp"].startswith(("starttls://", "smtps://"))
    if values["smtp_user"] and not (is_encrypted and values["smtp_password"]):
        raise ConfigError(
            f"cannot use {path}: [alerts] smtp_user needs smtp_password, and smtp with starttls:// or smtps://, so that the "
            "password is not sent in clear text"
        )
    rules = tuple(_alert_rule(path, name, rule) for name, rule in changed.items())
    return AlertSettings(**values, rules=rules, receivers=tuple(receivers))


def _alert_rule(path: Path, name: str, table: Any) -> RuleSettings:
    where = f"[alerts.rules.{name}]"
    values = values_of(path, where, table, ALERT_RULE)
    given, limit = values["limit"], RULES[name].limit
    if given == "":
        value = None
    elif limit is None:
        raise ConfigError(f"cannot use {path}: {where} limit = {given!r}: this rule has no limit")
    else:
        try:
            value = float(RULE_LIMITS[limit.unit](given))
        except BadValue as error:
            raise ConfigError(f"cannot use {path}: {where} limit = {given!r}: {error}") from None
        if not limit.least <= value <= limit.most:
            least, most = limit_text(limit.least, limit.unit), limit_text(limit.most, limit.unit)
            raise ConfigError(f"cannot use {path}: {where} limit = {given!r}: wants {least} to {most}")
    return RuleSettings(
        name=name, enabled=values["enabled"], for_s=values["for"], severity=values["severity"], limit=value
    )


def _receiver(path: Path, name: str, table: Any, smtp: str) -> ReceiverSettings:
    where = f"[alerts.receivers.{name}]"
    if not NODE_NAME.match(name) or name == MAIL_TO:
        raise ConfigError(
            f"cannot use {path}: {name!r} is not a name of a receiver: letters, digits, _ and -, at most 63"
        )
    made = ReceiverSettings(name=name, **values_of(path, where, table, RECEIVER))
    needs = {"mail": "to", "command": "command"}.get(made.kind, "address")
    if not getattr(made, needs):
        raise ConfigError(f"cannot use {path}: {where} of kind {made.kind} needs {needs}")
    if made.kind == "mail" and not smtp:
        raise ConfigError(f"cannot use {path}: {where} needs smtp of [alerts], the mail server")
    if made.kind == "command" and not made.command[0].startswith("/"):
        raise ConfigError(f"cannot use {path}: {where} command must begin with an absolute path")
    return made


def _power(path: Path, table: Any, controller: ControllerSettings) -> PowerSettings:
    settings = PowerSettings(**values_of(path, "[power]", table, POWER, also=("circuits",)))
    try:
        words = shlex.split(settings.suspend_command)
    except ValueError as error:
        raise ConfigError(f"cannot use {path}: [power] suspend_command: {error}") from None
    if not words and not settings.suspend_program:
        raise ConfigError(f"cannot use {path}: [power] needs suspend_command or suspend_program")
    if table and settings.suspend_timeout <= controller.node_down_after_s:
        raise ConfigError(
            f"cannot use {path}: [power] suspend_timeout = {settings.suspend_timeout:g} is not longer than node_down_after_s = "
            f"{controller.node_down_after_s:g}, after which a node counts as switched off"
        )
    return settings


def _circuits(path: Path, whole_watts: float, circuits: Any, nodes: Sequence[NodeSpec]) -> tuple[Circuit, ...]:
    """Return the circuits, the one of all nodes first. Raises ConfigError."""
    found = [Circuit(budget_watts=whole_watts)] if whole_watts else []
    for name, circuit in table_of(path, "[power.circuits]", circuits).items():
        where = f"[power.circuits.{name}]"
        if not NODE_NAME.match(name):
            raise ConfigError(
                f"cannot use {path}: {name!r} is not a name of a circuit: letters, digits, _ and -, at most 63"
            )
        values = values_of(path, where, circuit, CIRCUIT)
        found.append(Circuit(name=name, budget_watts=values["watts"], nodes=values["nodes"] or ()))
    for one in found:
        where = f"[power.circuits.{one.name}]" if one.name else "[power]"
        if unknown := set(one.nodes).difference(node.name for node in nodes):
            raise ConfigError(
                f"cannot use {path}: {where} names the node {min(unknown)!r}, which has no file in nodes.d"
            )
        idle = sum(node.idle_watts for node in nodes if one.feeds(node.name))
        if idle >= one.budget_watts:
            raise ConfigError(
                f"cannot use {path}: {where} allows {one.budget_watts:g} W, and its nodes take {idle:g} W when they are idle, so "
                "that no job could start"
            )
    return tuple(found)


def _access(path: Path, tables: Mapping[str, Any], accounting: Accounting) -> AccessPolicy:
    roles = values_of(path, "[roles]", tables.get("roles", {}), ROLES)
    hide = values_of(path, "[privacy]", tables.get("privacy", {}), PRIVACY)["hide"]
    named: dict[str, str] = {}
    for role in ("admins", "operators", "viewers", "services"):
        for user in roles[role]:
            if named.setdefault(user, role) != role:
                raise ConfigError(f"cannot use {path}: [roles] names {user!r} in {named[user]} and in {role}; keep one")
    return AccessPolicy(
        **roles | {"default": Role(roles["default"])},
        hidden=frozenset(HIDEABLE[kind] for kind in hide),
        coordinators=accounting.coordinators(),
    )


def _refuse_own_machine(config_dir: Path, controller: ControllerSettings, nodes: Sequence[NodeFile]) -> None:
    """Raise ConfigError for a node whose jobs would all run as the controller's account."""
    for node in nodes:
        if controller.user is not None and node.spec.host == LOCAL_HOST:
            raise ConfigError(
                f"cannot use {config_dir / paths.NODES_DIR / node.spec.name}.toml: host = {LOCAL_HOST!r}, and jobs of all users "
                f"would run there as {controller.user}, the account of the controller; reach this machine through SSH: "
                f"hpcsched node remove {node.spec.name}; hpcsched node add root@localhost"
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
    """Return the content of the file nodes.d/NAME.toml. Raises ConfigError."""
    return node_from(path, _parse(path, _read_trusted(path)))


def node_from(path: Path, table: Mapping[str, Any]) -> NodeFile:
    """Return the node of a parsed file, with the file's name. Raises ConfigError."""
    name = path.stem
    if not NODE_NAME.match(name):
        raise ConfigError(f"cannot use {path}: {name!r} is not a node name: letters, digits, _ and -, at most 63")
    values = values_of(path, "the file", table, NODE)
    if values["host"] != LOCAL_HOST:
        _check_host_key(path, values["host_key"])
    different = {
        "name": NodeName(name),
        "host_key": " ".join(values["host_key"].split()[:2]),
        "mem_mib": values["memory"],
        "gpus": _gpus(path, values),
        "tmp_mib": values["tmp_disk"],
    }
    spec = NodeSpec(**_of_fields(NodeSpec, values) | different)
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
        "seal_key": paths.absolute(values["seal_key"], config_dir),
        "ssh_config": paths.absolute(_below_home(values["ssh_config"], values["user"]), config_dir),
    }
    return ControllerSettings(**values)


def _below_home(text: str, user: str | None) -> str:
    """Return `text` with ``~`` replaced by the home of the controller's account."""
    with contextlib.suppress(KeyError):
        if user is not None and text.startswith("~/"):
            return pwd.getpwnam(user).pw_dir + text[1:]
    return text


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
        raise ConfigError(f"cannot use {path}: {name!r} is not a partition name: letters, digits, _ and -, at most 63")
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
    different = {
        "name": name,
        "nodes": (*(NodeName(node) for node in listed), *joined),
        "state": PartitionState.UP if values["up"] else PartitionState.DOWN,
        "max_time_s": values["max_time"],
        "default_time_s": values["default_time"],
        "default_mem_per_cpu_mib": values["default_mem_per_cpu"],
        "limits": limits_from(values),
    }
    return Partition(**_of_fields(Partition, values) | different)


def _of_fields(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `values` that are fields of the class, under the same name."""
    return {field.name: values[field.name] for field in fields(kind) if field.name in values}


def _check_host_key(path: Path, text: str) -> None:
    parts = text.split()
    advice = "write it as in known_hosts, without the name; hpcsched node add does it"
    if len(parts) < 2 or parts[0] not in HOST_KEY_TYPES:
        raise ConfigError(f"cannot use {path}: host_key = {text[:80]!r} is not an SSH host key; {advice}")
    try:
        blob = base64.b64decode(parts[1], validate=True)
        (size,) = struct.unpack_from("!I", blob)
    except (binascii.Error, struct.error):
        raise ConfigError(f"cannot use {path}: host_key is damaged: its base64 cannot be read; {advice}") from None
    if blob[4 : 4 + size] != parts[0].encode():
        raise ConfigError(f"cannot use {path}: host_key is damaged: it says {parts[0]} and holds another; {advice}")


def _parse(path: Path, text: str) -> Mapping[str, Any]:
    try:
        values = tomllib.loads(text)
        gate.check_value(values)
    except RecursionError:
        raise ConfigError(f"cannot read {path}: it is nested too deep") from None
    except ValueError as error:  # TOMLDecodeError, GateError, and int()'s error for thousands of digits
        raise ConfigError(f"cannot read {path}: {_given_twice(text, str(error)) or error}") from None
    return values


def _given_twice(text: str, error: str) -> str:
    """Return the two lines of the TOML `text` with the same key, and the remedy.

    "" if `error` is a different one.
    """
    match = re.search(r"\(at line (\d+), ", error)
    lines = text.splitlines()
    at = int(match[1]) if match is not None else len(lines) + 1
    if at > len(lines):
        return ""
    header = _HEADER.match(lines[at - 1])
    if header is not None:
        earlier = _header_lines(lines[: at - 1], header[1])
        advice = f"put the keys that follow line {at} below line {{}}, or into a file of {paths.EXTRA_DIR}/"
        return (
            f"line {at} has [{header[1]}], and line {earlier} has it already; {advice.format(earlier)}"
            if earlier
            else ""
        )
    key = _KEY.match(lines[at - 1])
    begin = next((number for number in range(at - 1, 0, -1) if _HEADER.match(lines[number - 1])), 0)
    for number in range(begin + 1, at) if key is not None else ():
        other = _KEY.match(lines[number - 1])
        if other is not None and key is not None and other[1] == key[1]:
            return f"line {at} sets {key[1]}, and line {number} sets it already; remove one of the two"
    return ""


def _header_lines(lines: Sequence[str], name: str) -> int:
    """Return the line number of the header of that table, 0 if there is none."""
    for number, line in enumerate(lines, 1):
        header = _HEADER.match(line)
        if header is not None and header[1] == name:
            return number
    return 0


def _read_trusted(path: Path) -> str:
    """Return the text of `path`, if only root, its owner and this user could have written it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not block us
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"cannot read {path}: it is not a regular file")
        _refuse_writable(path, status)
        if path.is_symlink():  # who may write there chooses the file
            _refuse_open_directory(path.resolve().parent)
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"cannot read {path}: it is longer than {MAX_FILE_BYTES >> 20} MiB")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {path}: it is not UTF-8 (byte {error.start})") from None


def _refuse_open_directory(path: Path) -> None:
    """Check that others can neither write the directory nor put another one in its place."""
    way = list(way_to(path.absolute()))
    for at, status in way[:-1]:
        if not (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX):  # what is ours there stays
            _refuse_writable(Path(at), status)
    _refuse_writable(*way[-1])


def _refuse_writable(path: str | Path, status: os.stat_result) -> None:
    """Check one file, directory or link; the mode of a link says nothing."""
    if not stat.S_ISLNK(status.st_mode):
        _refuse_writable_mode(path, status)
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"cannot trust {path}: it belongs to uid {status.st_uid}, not to root or to its reader, uid {os.geteuid()}"
        )


def _refuse_writable_mode(path: str | Path, status: os.stat_result) -> None:
    if status.st_mode & stat.S_IWOTH:
        raise ConfigError(f"cannot trust {path}: everybody may write it; run: chmod o-w {path}")
    if os.geteuid() == 0 and status.st_mode & stat.S_IWGRP and status.st_gid != 0:
        raise ConfigError(f"cannot trust {path}: its group may write it; run: chmod g-w {path}")


# ----- hpcsched.toml and nodes.d/NAME.toml as text: every key with its meaning and default
# Only the chosen keys are set. The text comes from `hpcsched.config.keys`, so files that `hpcsched init` writes,
# etc/hpcsched.toml and the accepted keys never differ.


_HEAD = """\
# The configuration of hpcsched: see hpcsched.toml(5). Nodes have files of their own in nodes.d/.
#
# Every key is here with its default; what is commented out need not be there. The controller reads
# the files when it starts and when it is told to: hpcsched node add does that, and hctl reconfigure.
"""
_PARTITION_HEAD = """
# Partitions: [partitions.NAME] for each. Without any there is one, "main", with all nodes.
"""
_ACCOUNT_HEAD = """
# Accounts, users, QOS and licences: [accounts.NAME], [users.NAME], [qos.NAME] for each, and [licenses]. Without any
# everyone has an equal share and no limits. To set one, take the "# " away.
#
"""
_NAMED = {"accounts.physics": ACCOUNT, "users.anna": USER, "qos.high": QOS}
_LICENSES = """
[licenses]
# How many of each licence all jobs may have at once, as hsub --licenses asks for them: NAME = COUNT.
#matlab = 4
"""
_RECEIVERS = """
# Who else gets the alerts: [alerts.receivers.NAME] for each. hctl alerts test NAME tries it. To set one, take the "# " away.
#
"""
_ALERT_RULES = """
# What is different about a rule of alerts: [alerts.rules.NAME] for each. hctl alerts rules shows all, and what applies. To
# change one, take the "# " away.
#
"""
_CIRCUITS = """
# Circuits with budgets of their own: [power.circuits.NAME] for each. To set one, take the "# " away.
#
"""
_TOPOLOGY = """
# Which nodes hang on which switch: [topology.switches.NAME] for each. A job on several nodes gets them on as few switches as
# can be. Without any, the links that hpcsched node bench --links has measured count. To set one, take the "# " away.
#
"""
# Sections with a name of their own: PREFIX.NAME.
_NAMED_SECTIONS = {
    "partitions": ALL_PARTITION,
    "accounts": ACCOUNT,
    "users": USER,
    "qos": QOS,
    "topology.switches": SWITCH,
    "alerts.receivers": RECEIVER,
    "alerts.rules": ALERT_RULE,
    "power.circuits": CIRCUIT,
}
_MAIN = "partitions.main"
_NODE_HEAD = """\
# The node {name} of hpcsched: see hpcsched.toml(5). What is commented out need not be there.

"""


def render_config(chosen: Mapping[str, Mapping[str, object]]) -> str:
    """Return hpcsched.toml with the `chosen` values set, and all other keys as comments.

    `chosen` maps section -> key -> value.

    Raises: ConfigError: a section or a key that the file cannot have.
    """
    more = [_chosen_section(name, values) for name, values in chosen.items() if name not in {*ALL_SECTIONS, _MAIN}]
    parts = [_HEAD]
    for section, keys in ALL_SECTIONS.items():
        parts.append("\n" + _section(section, keys, chosen.get(section, {})))
    parts.append(_PARTITION_HEAD)
    parts.append(_section(_MAIN, ALL_PARTITION, chosen.get(_MAIN, {})))
    parts.append(_ACCOUNT_HEAD + "\n".join(_commented(_section(*item, {})) for item in _NAMED.items()))
    parts.append(_commented(_LICENSES))
    parts.append(_RECEIVERS + _commented(_section("alerts.receivers.chat", RECEIVER, {})))
    parts.append(_ALERT_RULES + _commented(_section("alerts.rules.ClockOff", ALERT_RULE, {})))
    parts.append(_CIRCUITS + _commented(_section("power.circuits.rack1", CIRCUIT, {})))
    parts.append(_TOPOLOGY + _commented(_section("topology.switches.s1", SWITCH, {})))
    return "".join([*parts, *more])


def _chosen_section(name: str, values: Mapping[str, object]) -> str:
    """Return the section `name` with only its `values`."""
    if name != "licenses":
        keys = _NAMED_SECTIONS.get(name.rpartition(".")[0])
        if keys is None:
            known = ", ".join([*ALL_SECTIONS, "licenses", *(f"{prefix}.NAME" for prefix in _NAMED_SECTIONS)])
            raise ConfigError(f"cannot write section [{name}]: the sections are {known}")
        _refuse_unknown_keys(name, keys, values)
    return "".join([f"\n[{name}]\n", *(f"{key} = {toml_value(value)}\n" for key, value in values.items())])


def _refuse_unknown_keys(name: str, keys: Sequence[Key], values: Mapping[str, object]) -> None:
    unknown = values.keys() - {key.name for key in keys}
    if unknown:
        raise ConfigError(f"cannot write {min(unknown)!r} in section [{name}]: there is no such key")


def _section(name: str, keys: Sequence[Key], chosen: Mapping[str, object]) -> str:
    _refuse_unknown_keys(name, keys, chosen)
    return f"[{name}]\n" + "\n".join(_entries(keys, chosen))


def _commented(text: str) -> str:
    return "".join(f"# {line}".rstrip() + "\n" for line in text.splitlines())


def default_config() -> str:
    """Return the content of etc/hpcsched.toml."""
    return render_config({"partitions.main": {"nodes": "all", "default": True}})


def render_node(name: str, chosen: Mapping[str, object]) -> str:
    """Return nodes.d/`name`.toml with the `chosen` values set, and all other keys as comments."""
    return _NODE_HEAD.format(name=name) + "\n".join(_entries(NODE, chosen))


def _entries(keys: Sequence[Key], chosen: Mapping[str, object]) -> Iterator[str]:
    for key in keys:
        lines = textwrap.wrap(key.help, 98)
        entry = (
            f"{key.name} = {toml_value(chosen[key.name])}"
            if key.name in chosen
            else f"#{key.name} = {key.default_text}"
        )
        yield "".join(f"# {line}\n" for line in lines) + entry + "\n"
