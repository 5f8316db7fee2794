"""Every key of hpcsched.toml and nodes.d/NAME.toml: its kind, default and purpose.

`hpcsched.config.load` reads by this table, and `hpcsched init` writes a commented file from it. Tests compare etc/hpcsched.toml
and man/hpcsched.toml.5 with it. The keys of accounts, users, QOS and limits are in `hpcsched.config.accounts`.

A kind is a function that takes the value from TOML and returns ours, or raises `BadValue` with the expected format.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from hpcnode.os import rlimits
from hpcsched import paths
from hpcsched.errors import ConfigError, RequestError
from hpcsched.model.accounting import PreemptMode, PreemptType
from hpcsched.model.hostlist import expand_hostlist
from hpcsched.model.retention import KeptBackups, retention_of
from hpcsched.model.tariff import Price, price_of
from hpcsched.model.units import nearest, parse_mem_mib, parse_time_s

ALL_NODES = "all"
LOCAL_HOST = "local"  # a node that is the head itself, without SSH
MAX_GPUS = 256
CONFINED = ("cpus", "processes", "gpus", "shm", "tmp", "proc")

# An allow-list for text in a command line or a resolver: nothing starts with a dash.
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}\Z")
USER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@\\-]{0,63}\Z")
_PYTHON = re.compile(r"[A-Za-z0-9_/.][A-Za-z0-9_/.+-]{0,254}\Z")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}\Z")
_GPU = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]{0,62})(?::([0-9]{1,3}))?\Z")
_DEVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9/:._-]{0,99}\Z")
_MAC = re.compile(r"[0-9a-f]{2}(?::[0-9a-f]{2}){5}\Z")
# Of RFC 5321 what needs no quotes; it begins with a letter or digit, so it is never an option.
MAIL_ADDRESS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,63}(?:@[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?)?\Z")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class BadValue(Exception):
    """The key does not accept this value; the text says what it accepts."""


class Missing:
    """The default of a required key."""


REQUIRED = Missing()


@dataclass(frozen=True, slots=True)
class Key:
    """One key. `default` is its TOML value; `shown` replaces it if it depends on other keys."""

    name: str
    kind: Callable[[Any], Any]
    default: Any
    help: str
    shown: str = ""

    @property
    def default_text(self) -> str:
        """Return the default as the file shows it."""
        return self.shown or toml_value(self.default)


def toml_value(value: object) -> str:
    """Return `value` (text, number, boolean or a list) as TOML; JSON's syntax is also TOML's."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def text(value: Any) -> str:
    if not isinstance(value, str) or _CONTROL.search(value):
        raise BadValue("wants a text on one line")
    return value


def word(value: Any) -> str:
    if not isinstance(value, str) or not _WORD.match(value):
        raise BadValue("wants a word of letters, digits and _.- (at most 63)")
    return value


def words(value: Any) -> tuple[str, ...]:
    return tuple(word(item) for item in _list(value))


def resource_limits(value: Any) -> str:
    """Return resource limits: ALL, NONE, or a list in one text."""
    try:
        rlimits.names(text(value))
    except ValueError:
        raise BadValue(f"wants ALL, NONE, or some of {','.join(rlimits.KINDS)}") from None
    return str(value)


def users(value: Any) -> tuple[str, ...]:
    return tuple(user(item) for item in _list(value))


def mac_address(value: Any) -> str:
    """Return the address of a network card in lower case with colons; "": it is not known."""
    address = text(value).lower().replace("-", ":")
    if address and not (_MAC.match(address) and address.strip("0:") and not int(address[:2], 16) & 1):
        raise BadValue('wants the address of a network card as "52:54:00:12:34:56"')
    return address


def moment(value: Any) -> float | None:
    """Return Unix seconds from a local time, None for an empty text."""
    try:
        return datetime.fromisoformat(text(value)).timestamp() if value else None
    except (ValueError, OverflowError):
        raise BadValue('wants a time as "2027-01-20T12:34:00"') from None


def sync_file(value: Any) -> str:
    """Return a file to copy to nodes: its absolute path.

    With ``:`` and another path if it is elsewhere there.
    """
    parts = text(value).split(":")
    if len(parts) > 2 or not all(part.startswith("/") and part == os.path.normpath(part) != "/" for part in parts):
        raise BadValue('wants an absolute path as "/etc/hosts", or two as "/srv/hosts:/etc/hosts"')
    return str(value)


def sync_files(value: Any) -> tuple[str, ...]:
    return tuple(sync_file(item) for item in _list(value))


def privacies(value: Any) -> tuple[str, ...]:
    """Return a list of what `[privacy] hide` may name."""
    kinds = ("jobs", "nodes", "usage", "reservations")
    for item in _list(value):
        if item not in kinds:
            raise BadValue(f"wants a list of {', '.join(kinds)}")
    return tuple(dict.fromkeys(value))


def user(value: Any) -> str:
    if not isinstance(value, str) or not USER_NAME.match(value):
        raise BadValue("wants a user name")
    return value


def host(value: Any) -> str:
    if not isinstance(value, str) or not (_HOST.match(value) or _is_ipv6(value)):
        raise BadValue("wants a host name, an address or a Host of ~/.ssh/config")
    return value


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def python(value: Any) -> str:
    if not isinstance(value, str) or not _PYTHON.match(value):
        raise BadValue("wants the name or path of a Python 3.9 or newer")
    return value


def absolute_path(value: Any) -> str:
    if text(value) and not value.startswith("/"):
        raise BadValue("wants an absolute path")
    return value


def https_address(value: Any) -> str:
    if text(value) and not re.fullmatch(r"https://[A-Za-z0-9.\-\[\]:]+(/[!-~]*)?", value):
        raise BadValue("wants an address that begins with https://")
    return str(value)


def wildcard_host(value: Any) -> str:
    if text(value) and not re.fullmatch(r"\*(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?){2,10}", value):
        raise BadValue('wants the names below a domain, in small letters: "*.jobs.example.org"')
    return str(value)


def web_address(value: Any) -> str:
    if text(value) and not re.fullmatch(r"https?://[A-Za-z0-9.\-\[\]:]+(/[!-~]*)?", value):
        raise BadValue("wants an address that begins with http:// or https://")
    return str(value)


def mail_server(value: Any) -> str:
    if text(value) and not re.fullmatch(r"(smtp|starttls|smtps)://[A-Za-z0-9.\-\[\]:]+", value):
        raise BadValue('wants "smtp://localhost", "starttls://mail.example.org:587" or "smtps://mail.example.org"')
    return str(value)


def mail_address(value: Any) -> str:
    if not isinstance(value, str) or not MAIL_ADDRESS.match(value):
        raise BadValue('wants a mail address as "anna@example.org", or the name of an account')
    return value


def mail_addresses(value: Any) -> tuple[str, ...]:
    return tuple(mail_address(item) for item in _list(value))


def mail_domains(value: Any) -> tuple[str, ...]:
    found = tuple(_list(value))
    if not all(item == "*" or _HOST.match(item) for item in found):
        raise BadValue('wants a list of domains as ["example.org"], or ["*"]')
    return found


def hours(value: Any) -> str:
    if text(value) and not re.fullmatch(r"([01]\d|2[0-3]):[0-5]\d-([01]\d|2[0-3]):[0-5]\d", value):
        raise BadValue('wants hours as "22:00-07:00"')
    return str(value)


def address_or_file(value: Any) -> str:
    return absolute_path(value) if text(value).startswith("/") else web_address(value)


def file_or_variable(value: Any) -> str:
    """Return the absolute path of a file, or a variable of the environment after ``$``."""
    if text(value).startswith("$"):
        if not re.fullmatch(r"\$[A-Za-z_][A-Za-z0-9_]{0,99}", value):
            raise BadValue('wants a variable as "$SMTP_PASSWORD", or an absolute path')
        return str(value)
    return absolute_path(value)


def yes_no(value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadValue("wants true or false")
    return value


def whole(least: int, most: int = 10**9) -> Callable[[Any], int]:
    """Return the kind of whole numbers from `least` to `most`."""

    def kind(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise BadValue(f"wants a whole number from {least} to {most}")
        return value

    return kind


def seconds(least: float = 0.0) -> Callable[[Any], float]:
    """Return the kind of seconds, at least `least`: a number, or a text with a unit as "5m"."""

    def kind(value: Any) -> float:
        if isinstance(value, str) and value[-1:].lower() in ("s", "m", "h", "d"):
            try:
                value = parse_time_s(value, whole_minutes=False)
            except RequestError as error:
                raise BadValue(str(error)) from None
        if type(value) not in (int, float) or not least <= value <= 1e9:
            raise BadValue(f'wants seconds, {least:g} or more, or a text as "5m"')
        return float(value)

    return kind


def text_or_number(value: Any) -> str | float:
    """Return a number, or a text on one line, of which more is known later."""
    return value if type(value) in (int, float) else text(value)


def number(least: float = 0.0, most: float = 1e9) -> Callable[[Any], float]:
    """Return the kind of numbers from `least` to `most`."""

    def kind(value: Any) -> float:
        if type(value) not in (int, float) or not least <= value <= most:
            raise BadValue(f"wants a number, {least:g} or more")
        return float(value)

    return kind


def price(value: Any) -> Price:
    """Return a price that may depend on the hour of the week."""
    try:
        return price_of(value)
    except RequestError as error:
        raise BadValue(f"wants a number, or a table of windows with default: {error}") from None


def time_limit(value: Any) -> int | None:
    """Return seconds from a time in Slurm's notation, None for UNLIMITED."""
    if type(value) is int and value >= 0:
        value = str(value)  # minutes, as in Slurm
    if not isinstance(value, str):
        raise BadValue('wants a time as "1-12:00:00", "36h" or "UNLIMITED"')
    try:
        limit_s = parse_time_s(value)
    except RequestError as error:
        raise BadValue(str(error)) from None
    if limit_s == 0:
        raise BadValue('wants a time above zero, or "UNLIMITED"')
    return limit_s


def memory_mib(value: Any) -> int:
    """Return MiB from a memory size: a text as "64G", or a number of MiB."""
    if type(value) is int and value >= 0:
        value = str(value)
    if not isinstance(value, str):
        raise BadValue('wants a size as "64G", or a number of MiB')
    try:
        return parse_mem_mib(value)
    except RequestError as error:
        raise BadValue(str(error)) from None


def hosts(value: Any) -> tuple[str, ...] | None:
    """Return a list of nodes; None means all nodes."""
    if value == ALL_NODES:
        return None
    names: list[str] = []
    for item in [value] if isinstance(value, str) else _list(value):
        try:
            names += expand_hostlist(item)
        except RequestError as error:
            raise BadValue(str(error)) from None
    if len(set(names)) != len(names):
        raise BadValue("names a node twice")
    return tuple(names)


def gpus(value: Any) -> tuple[str, ...]:
    """Return the type of each GPU, in the order of their indices; ``"a100:4"`` means four."""
    types: list[str] = []
    for item in _list(value):
        match = _GPU.match(item)
        if match is None:
            raise BadValue('wants a list of GPU types as ["a100", "a100"] or ["a100:2"]')
        types += [match.group(1)] * int(match.group(2) or 1)
    if len(types) > MAX_GPUS:
        raise BadValue(f"wants at most {MAX_GPUS} GPUs")
    return tuple(types)


def devices(value: Any) -> tuple[str, ...]:
    """Return a list of devices by CUDA's names: MIG-<uuid>, GPU-<uuid> or an index."""
    found = tuple(_list(value))
    if not all(_DEVICE.match(item) for item in found) or len(set(found)) < len(found):
        raise BadValue('wants a list of devices, each once, as ["MIG-41b36db3-...", "MIG-8d3f5a6e-..."]')
    return found


def confinement(value: Any) -> tuple[str, ...]:
    """Return what a node confines; ["none"] is nothing."""
    found = tuple(_list(value))
    if found == ("none",):
        return ()
    if not found or not set(found) <= set(CONFINED):
        raise BadValue(f'wants a list of {", ".join(CONFINED)}, or ["none"]')
    return found


def device_files(value: Any) -> tuple[str, ...]:
    """Return a list of device files by absolute path."""
    found = tuple(absolute_path(item) for item in _list(value))
    if not all(item.startswith("/dev/") and ".." not in item for item in found):
        raise BadValue('wants a list of device files, as ["/dev/nvidia0", "/dev/nvidia1"]')
    return found


def one_of(*choices: str) -> Callable[[Any], str]:
    """Return the kind of words that accepts only these words."""

    def kind(value: Any) -> str:
        if value not in choices:
            raise BadValue(f"wants one of {', '.join(choices)}")
        return str(value)

    return kind


def some_of(*choices: str) -> Callable[[Any], tuple[str, ...]]:
    """Return the kind of lists that have at least one of these words, and no others."""

    def kind(value: Any) -> tuple[str, ...]:
        found = tuple(_list(value))
        if not found or any(word not in choices for word in found):
            raise BadValue(f"wants a list of some of {', '.join(choices)}")
        return found

    return kind


def optional(kind: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the kind that also accepts "not set": an empty text or 0."""
    return lambda value: None if value in ("", 0) and value is not False else kind(value)


def unless_empty(kind: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the kind that also accepts "not set": an empty text. 0 is a value."""
    return lambda value: None if value == "" else kind(value)


def optional_list(kind: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the kind that also accepts "not set": an empty list."""
    return lambda value: None if value == [] else kind(value)


def backup_targets(value: Any) -> tuple[str, ...]:
    """Return directories here (absolute paths) and elsewhere (ssh://USER@HOST/DIR)."""
    found = tuple(_list(value))
    for item in found:
        if is_remote(item):
            remote_directory(item)
        elif not absolute_path(item):
            raise BadValue("wants absolute paths, or ssh://USER@HOST/DIR")
    return found


class RemoteDirectory(NamedTuple):
    """A directory on another machine that SSH reaches. None: as the SSH configuration says."""

    user: str | None
    host: str
    port: int | None
    path: str


_REMOTE = re.compile(
    r"ssh://(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]*)@)?(?P<host>[A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+\])"
    r"(?::(?P<port>\d{1,5}))?(?P<path>/[^\x00-\x1f\x7f]*)"
)


def is_remote(target: str) -> bool:
    """Return whether the directory of a backup is on another machine."""
    return target.startswith("ssh:")


def remote_directory(value: str) -> RemoteDirectory:
    """Return the parts of ssh://USER@HOST:PORT/DIR. Raises BadValue."""
    found = _REMOTE.fullmatch(value)
    if found is None or not 0 < int(found["port"] or 22) < 65536:
        raise BadValue(f"cannot read {value[:200]!r}: write ssh://USER@HOST/DIR or ssh://USER@HOST:PORT/DIR")
    port = int(found["port"]) if found["port"] else None
    return RemoteDirectory(found["user"], found["host"].strip("[]"), port, found["path"])


def texts(value: Any) -> tuple[str, ...]:
    return tuple(_list(value))


def retention(value: Any) -> KeptBackups:
    """Return the rule which backups are kept."""
    try:
        return retention_of(text(value))
    except RequestError as error:
        raise BadValue(str(error)) from None


def _list(value: Any) -> Iterable[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise BadValue("wants a list of texts")
    return value


# ----- the keys


# fmt: off
CLUSTER = (
    Key("name", word, "cluster",
        "The name of the cluster, which is a part of paths on the nodes. It cannot change while jobs hold nodes."),
    Key("share", absolute_path, "",
        "A directory that all nodes see under this path (NFS, say): for checkpoints and outputs. Empty: none."),
)

CONTROLLER = (
    Key("state_dir", text, "",
        "The database's directory, on a local disk; only the controller's account may read it. Default: /var/lib/hpcsched, for "
        "a plain user ~/.local/state/hpcsched.", shown='"/var/lib/hpcsched"'),
    Key("run_dir", text, "",
        "The sockets' directory. Default: /run/hpcsched, for a plain user $XDG_RUNTIME_DIR/hpcsched; if state_dir is set, the "
        "directory run in it.", shown='"/run/hpcsched"'),
    Key("user", optional(user), "",
        "The account of a controller that serves all users without being root, set by hpcsched init --user. Empty: root, "
        "or your own account."),
    Key("sign_jobs", yes_no, False,
        "Whether users must sign the jobs that they submit, as nodes with the root helper demand; hsub does it with a key of the "
        "user. See hpcsched-helper(8)."),
    Key("log_level", one_of("debug", "info", "warning", "error"), "info",
        "The lowest level of log messages: debug, info, warning or error."),
    Key("log_max_size", memory_mib, "16M",
        "A log file that reaches this size is renamed to NAME.1, and a new one is started (hpcsched up, hpcschedd "
        "--log-file). 0: never."),
    Key("log_files", whole(1, 1000), 5, "How many renamed log files are kept."),
    Key("seal_key", text, paths.SEAL_KEY,
        "The file of the keys that seal the environments of jobs in the database; outside of state_dir, and in no backup. "
        "A relative path is below the directory of hpcsched.toml. See hpcsched seal."),
    Key("ssh_config", text, "~/.ssh/config",
        "The OpenSSH client configuration. Supported: HostName, User, Port, IdentityFile, ProxyJump."),
    Key("connect_timeout_s", seconds(1), 20,
        "Seconds after which an attempt to connect to a node is given up and repeated."),
    Key("heartbeat_s", seconds(0.05), 15, "Seconds between keepalive pings on an idle node connection."),
    Key("node_down_after_s", seconds(0.1), 40,
        "Seconds without an answer after which a node is DOWN. At least twice heartbeat_s."),
    Key("kill_wait_s", seconds(), 30, "Seconds between SIGTERM and SIGKILL when a job is ended."),
    Key("lease_s", seconds(1), 120,
        "Seconds without contact to the controller after which a node ends jobs with --lease=kill, which may then run "
        "elsewhere. A change applies to jobs that start later."),
    Key("min_job_age_s", seconds(), 3600, "Seconds for which hqueue --all shows an ended job. hacct always shows it."),
    Key("propagate", resource_limits, "ALL",
        "Resource limits (ulimit) of the submitting process that are copied to jobs without --propagate: ALL, NONE, or "
        "some of AS,CORE,CPU,DATA,FSIZE,MEMLOCK,NOFILE,NPROC,RSS,STACK. These are soft limits, never above the node's "
        "hard limits."),
    Key("requeue", yes_no, True,
        "Whether jobs without --requeue and --no-requeue are requeued after the loss of a node."),
    Key("requeue_delay_s", seconds(), 5, "The least number of seconds that a requeued job waits."),
    Key("allow_uid_below", whole(0), 1000,
        "Jobs of root and system accounts, whose uid is below this, are refused where agents run as root; so are jobs of "
        "nobody and of locked accounts without a login shell. 0: jobs of all accounts are allowed."),
    Key("confine", confinement, ["cpus", "processes", "gpus", "shm", "proc"],
        "What nodes enforce for each job, if the agent runs as root: cpus (only its cpus), processes (max_processes), "
        "gpus (other GPUs cannot be opened), shm (private /dev/shm and System V and POSIX shared memory, counted as its "
        "memory), proc (other users' processes are hidden), tmp (a private /tmp, deleted at the end). Memory is always "
        "enforced. The file of a node can override it."),
    Key("max_processes", whole(0), 4096,
        "The maximum number of processes and threads of a job on a node, with processes in confine. A job that keeps "
        "forking at the limit is ended. 0: no limit."),
    Key("health_hold", seconds(), "15m",
        "How long a node that hhealth has drained must be well before hhealth resumes it; twice as long with each drain "
        "of the last day, up to 16 times. hctl resume does so at once. 0: it is resumed as soon as it is well."),
    Key("link_drops", whole(0, 100), 5,
        "How often the connection to a node may be lost in half an hour before the node is drained. It is resumed when it has "
        "stayed connected for health_hold, which grows as above. 0: it is never drained for that."),
    Key("prolog", absolute_path, "",
        "A program that each node of a job runs before anything of the job, as the account of its agent. If it fails, the job "
        "starts elsewhere, and the node is drained. Only root and that account may be able to replace it. Empty: none."),
    Key("epilog", absolute_path, "",
        "The same after the job: the node takes other jobs when it has ended. If it fails, the node is drained."),
    Key("prolog_head", absolute_path, "",
        "A program that the controller runs before a job is launched. If it fails, a job with a script is requeued and held, "
        "and any other is cancelled. Empty: none."),
    Key("epilog_head", absolute_path, "",
        "A program that the controller runs after the job has ended. That it fails is logged."),
    Key("prolog_epilog_timeout", seconds(1), 300, "Seconds after which these programs are stopped, and have failed."),
    Key("request_rate", number(), 50,
        "The average number of requests per second that each user may send; many jobs submitted at once count as one "
        "request. Commands over the limit wait and repeat the request. Does not apply to root and the controller's own "
        "account. 0: no limit."),
    Key("request_burst", whole(1, 1_000_000), 500,
        "The number of requests that each user may send at once before request_rate applies."),
    Key("submit_rate", number(), 100,
        "The average number of jobs per second that each user may submit; each task of an array counts. The database keeps all "
        "of them. Does not apply to root and the controller's own account. 0: no limit."),
    Key("submit_burst", whole(1, 100_000_000), 50_000,
        "The number of jobs that each user may submit at once before submit_rate applies."),
)

ROLES = (
    Key("admins", users, [],
        "Users who may do everything, besides root and the controller's own account. 'hctl show roles' shows what each "
        "role may do."),
    Key("operators", users, [],
        "Users who may act on the jobs of all users, drain nodes, change partitions and make reservations."),
    Key("viewers", users, [], "Users who may see everything that users see, but may not submit or change anything."),
    Key("services", users, [],
        "Accounts of programs that watch the cluster. They see all that [privacy] hides, and change nothing."),
    Key("default", one_of("user", "viewer"), "user", "The role of all other users: user or viewer."),
)

PRIVACY = (
    Key("hide", privacies, [],
        "What is hidden from other users, as Slurm's PrivateData: jobs, nodes, usage, reservations. Users then see their "
        "own, coordinators those of their accounts, and the other roles all."),
)

AUDIT = (
    Key("heads", text, "",
        "The file with the signed ends of the audit log. Default: audit.heads in state_dir. Another disk is safer."),
    Key("sign_every_s", seconds(1), 60, "How often the end of the audit log is signed, if it has new records."),
    Key("syslog", yes_no, True, "Whether signed ends also go to the system's log, with facility authpriv."),
)

BACKUP = (
    Key("every", seconds(), 0,
        "How often the controller backs up the cluster, as hpcsched backup does: \"6h\". 0: never. Each backup is read and its "
        "jobs are counted before an old one is deleted."),
    Key("keep", retention, "7d daily, 8w weekly",
        "Which backups are kept: the newest one of each of the last days and weeks, and all of the last 24 hours."),
    Key("to", backup_targets, [],
        "The directories in which it makes them; at least one of them on another disk, or on another machine as "
        "\"ssh://USER@HOST/DIR\", which needs encrypt. They must exist, so that a disk that is not mounted is noticed, and the "
        "controller's account must be able to write or log in there."),
    Key("encrypt", texts, [], "Public keys (age or SSH), or files with them, for which backups are encrypted. Empty: not."),
)

COST = (
    Key("currency", word, "EUR", "The currency of the prices, which hreport shows."),
    Key("cpu_hour", number(), 0, "The price of a cpu for an hour. 0: none."),
    Key("gpu_hour", number(), 0, "The price of a GPU for an hour; shards count as their part of one. 0: none."),
    Key("kwh", price, 0,
        "The price of a kilowatt-hour, of what is measured: a number, or a table with the prices of hours of the week by the "
        "head's clock, {default = 0.31, \"Mo-Fr 22:00-06:00\" = 0.22}. A window over midnight belongs to the day on which it "
        "begins. 0: none."),
    Key("gco2_per_kwh", price, 0,
        "How many grams of CO2 a kilowatt-hour causes: a number, or such a table. 0: not shown."),
)

REPORTS = (
    Key("mail", mail_addresses, [],
        "Who gets the report of hreport on each month by mail, on the first day of the next one; it needs smtp of [alerts]."),
    Key("by", some_of("user", "account", "partition", "node", "month"), ["account", "user"],
        "Its rows: some of user, account, partition, node and month."),
)

LOG = (
    Key("format", one_of("text", "ecs"), "text",
        "How the controller, the gateway and the agents of the nodes write their logs: text, or ecs: one JSON object on each "
        "line, in the Elastic Common Schema, for log shippers. It applies when controller and gateway start, and to agents when "
        "they are connected."),
)

METRICS = (
    Key("interval_s", seconds(), 10,
        "How often each node sends what it and its jobs use (at least every 0.5 s). 0: never; then /metrics has only what the "
        "controller knows by itself."),
    Key("jobs", yes_no, True, "Whether nodes look at the processes of each job, and /metrics shows running jobs."),
    Key("max_jobs", whole(0, 10_000), 200, "How many running jobs /metrics shows: those that have run for longest."),
    Key("history", yes_no, True,
        "Whether samples are kept for hctl metrics, by a process of its own, in metrics.db in state_dir."),
    Key("keep_samples", seconds(3600), "2d", "How long samples are kept as they came."),
    Key("keep_minutes", seconds(86400), "14d", "How long their minutes are kept: means and extremes, and the ends of counters."),
    Key("retention", seconds(86400), "400d", "How long quarters of an hour are kept, of the series that a year is judged by."),
    Key("max_size", memory_mib, "1G",
        "The most that metrics.db takes; the oldest rows go first. 50 nodes with 75 series each take 210 MB."),
    Key("remote_write", web_address, "",
        "The address of a server that takes samples by Prometheus' remote write: \"http://127.0.0.1:9090/api/v1/write\". "
        "Empty: none."),
    Key("remote_write_token", absolute_path, "", "A file with the bearer token for that server. Empty: none."),
)

ALERTS = (
    Key("on", yes_no, True,
        "Whether the cluster is watched for what hctl alerts rules lists, by a process of its own with its state in alerts.db in "
        "state_dir."),
    Key("interval", seconds(0.1), "10s", "How often it looks."),
    Key("smtp", mail_server, "",
        "The mail server: \"smtp://localhost\"; \"starttls://HOST:587\" and \"smtps://HOST\" are encrypted, with a certificate "
        "that the system trusts. Empty: no mail is sent, also not that of hsub --mail-type."),
    Key("smtp_user", text, "", "The account at the mail server. Empty: none."),
    Key("smtp_password", file_or_variable, "",
        "A file with its password, that only the controller's account can read (chmod 600), or a variable of the controller's "
        "environment: \"$SMTP_PASSWORD\"."),
    Key("mail_from", optional(mail_address), "", "The sender of the mail. Empty: hpcsched@ and the name of this machine."),
    Key("mail_domain", text, "",
        "The domain of mail to users: with example.org, mail for user anna goes to anna@example.org. Empty: to anna, whom the "
        "mail server must know."),
    Key("mail_domains", mail_domains, [],
        "Other domains to which users may have mail sent with --mail-user. [\"*\"]: all; then any user can have this machine "
        "send mail to anybody."),
    Key("mail_to", mail_addresses, [], "Who gets the alerts by mail, besides the receivers below."),
    Key("tell_users", yes_no, True,
        "Whether users get a mail, once a job, if it holds nodes or GPUs and does not use them, or will reach a limit. "
        "--mail-type=NONE refuses it."),
    Key("quiet", hours, "", "Hours in which only critical alerts are told, as \"22:00-07:00\". Empty: none."),
    Key("watchdog", web_address, "",
        "An address that is asked every 5 minutes while the controller works: of a service elsewhere that tells you when that "
        "ends."),
)

RECEIVER = (
    Key("kind", one_of("mail", "webhook", "slack", "mattermost", "matrix", "ntfy", "command", "alertmanager"), REQUIRED,
        "What it is. webhook gets the JSON of Alertmanager (version 4); alertmanager is a server of that program, which then "
        "decides who is told; command is a program that gets JSON on its standard input.", shown='"webhook"'),
    Key("address", address_or_file, "",
        "Its address, or a file that has it (a secret, as that of a Slack webhook). Of Matrix: "
        "https://HOST/_matrix/client/v3/rooms/ROOM/send/m.room.message; of ntfy: https://ntfy.sh/TOPIC."),
    Key("token", absolute_path, "", "A file with the bearer token that it wants. Empty: none."),
    Key("to", mail_addresses, [], "The addresses, of mail."),
    Key("command", texts, [], "The program with its arguments, of command. No shell is used."),
    Key("least", one_of("info", "warning", "critical"), "info", "The lowest severity that it gets."),
    Key("resolved", yes_no, True, "Whether it is told when an alert is over."),
)

ALERT_RULE = (
    Key("enabled", yes_no, True, "Whether the rule is applied."),
    Key("for", unless_empty(seconds()), "",
        "How long what is wrong must last before it is told: \"10m\". Empty: as hctl alerts rules shows."),
    Key("severity", unless_empty(one_of("info", "warning", "critical")), "", "How bad it is. Empty: as the rule says."),
    Key("limit", text_or_number, "",
        "The number that decides, of rules that have one: \"90s\" of ClockOff, \"2G\" of HeadDiskFull, 5 (percent) of "
        "FileSystemFull. Empty: as hctl alerts rules shows."),
)

RULE_LIMITS: dict[str, Callable[[Any], Any]] = {"s": seconds(), "MiB": memory_mib, "%": number(), "": number()}

SYNC = (
    Key("files", sync_files, [],
        "Files of the head that hpcsched node sync copies to the nodes: \"/etc/hosts\", or \"/srv/nodes/hosts:/etc/hosts\" if it "
        "has another path there."),
    Key("run", text, "", "The command that hpcsched node sync runs on nodes on which a file was changed."),
)

POWER = (
    Key("suspend_after", seconds(), 0,
        "How long a node has been idle when it is switched off to save power: \"30m\". A job that needs it switches it on again. "
        "0: never."),
    Key("suspend_command", text, "systemctl poweroff",
        "The command that switches a node off. The agent runs it there, as its own account, if nothing else runs on the node."),
    Key("suspend_program", absolute_path, "",
        "A program on the head that is run instead, with the node's name: for a management board, or a switchable socket."),
    Key("resume_program", absolute_path, "",
        "A program on the head that switches a node on, with its name. It may be run again. Empty: Wake-on-LAN, with mac of the "
        "node's file."),
    Key("suspend_timeout", seconds(1), "2m",
        "How long a node takes at most to switch itself off. It must be longer than node_down_after_s."),
    Key("resume_timeout", seconds(1), "10m",
        "How long a node takes at most to come back. One that takes longer is DOWN, and its jobs start elsewhere."),
    Key("min_on", seconds(), "30m",
        "How long a node stays on at least after it was switched on, so that short jobs do not switch it off and on."),
    Key("budget_watts", number(), 0,
        "What all nodes may take together. Their idle_watts are taken off first; of the rest, a job counts its cpus' part of "
        "peak_watts above idle_watts, and gpu_watts of its GPUs. A job that would exceed it waits (PowerNotAvail). Groups of "
        "nodes may have budgets of their own: [power.circuits.NAME]. 0: no budget."),
)

CIRCUIT = (
    Key("watts", number(1), REQUIRED, "What the nodes of the circuit may take together, as budget_watts.", shown="2000"),
    Key("nodes", hosts, REQUIRED, "The nodes of the circuit: a host list. A node may be in several.", shown='"n[1-4]"'),
)

SCHEDULER = (
    Key("policy", one_of("easy", "easy-sjbf", "default", "conservative", "slurm-like", "fifo"), "easy",
        "When a job may start ahead of others. easy: if it does not delay the first job in the queue (EASY backfill); "
        "easy-sjbf: the same, short limits first; slurm-like, conservative: if it delays none of the first 100, or 1000; "
        "default: short expected run times first, except before jobs that have waited long; fifo: never."),
    Key("wait_guard", number(), 0.9,
        "For policy default: small jobs start ahead of all others until a job has waited this fraction of the longest "
        "wait under EASY backfill. A larger value lowers the mean slowdown under heavy load, but lengthens the longest "
        "wait."),
    Key("default_time_limit", time_limit, "UNLIMITED",
        "The time limit of jobs without --time in partitions without default_time. Backfill needs time limits."),
    Key("age_max_s", seconds(1), 604800, "The age in seconds at which a job has the full weight of age."),
    Key("favor_small", yes_no, False, "Whether small jobs get the weight of size, instead of large ones."),
    Key("small_relative_to_time", yes_no, False,
        "Whether size is cpus divided by the time limit in minutes, so that short jobs count as large."),
    Key("accrue_always", yes_no, False,
        "Whether a job's age counts from its submission, instead of only while it waits for resources."),
    Key("max_switch_wait", seconds(), 300,
        "Seconds that a job with --switches=N waits for nodes on N switches, unless it gives a time. Then it may use more "
        "switches."),
    Key("max_array_size", whole(1), 10000, "The maximum number of tasks of an array."),
    Key("max_jobs", whole(1), 100000, "The maximum number of waiting and running jobs."),
    Key("max_scripts_per_user", memory_mib, "64M",
        "The maximum total size of the scripts of a user's waiting and running jobs; equal scripts count once. Also the "
        "maximum of environments, arguments and command lines, less 8 KiB for each job, of jobs that the controller "
        "remembers."),
    Key("max_submit_jobs", optional(whole(1)), 0,
        "The maximum number of waiting and running jobs of a user; each task of an array counts. Does not apply to root, "
        "the controller's own account, and users or accounts with their own max_submit_jobs. 0: a tenth of max_jobs."),
    Key("preempt_type", one_of(*PreemptType), "none",
        "Which waiting jobs may preempt running jobs: none; qos: jobs whose QOS lists that of the running job in preempt; "
        "partition: jobs of a partition with a higher priority_tier, on nodes of both partitions."),
    Key("preempt_mode", one_of(*PreemptMode), "requeue",
        "What happens to a preempted job, unless its QOS sets another mode: requeue; cancel; checkpoint: it gets SIGTERM "
        "(or the signal of its --signal), has time to save its state, and is requeued; suspend: it is stopped; off: it is "
        "not preempted."),
    Key("preempt_grace_time_s", seconds(), 60,
        "Seconds that a job has to save its state with preempt_mode checkpoint, and an elastic job to give nodes back "
        "before all of it is preempted, unless its QOS sets another time."),
    Key("preempt_exempt_time_s", seconds(), 0,
        "Seconds after its start in which a job is not preempted, unless its QOS sets another time."),
)

WEIGHTS = (
    Key("age", whole(0), 1000, "Weight of the time that a job has waited, as a fraction of age_max_s."),
    Key("partition", whole(0), 1000, "Weight of the partition's priority_job_factor."),
    Key("size", whole(0), 0, "Weight of the fraction of all nodes and cpus that a job requests."),
    Key("fairshare", whole(0), 10000, "Weight of fair share: users with little recent usage come first."),
    Key("qos", whole(0), 10000, "Weight of the priority of the job's quality of service."),
    Key("assoc", whole(0), 1000, "Weight of the priority of the user or the account."),
)

PARTITION = (
    Key("nodes", hosts, ALL_NODES, 'Its nodes: "all", or a host list as "n[1-4],gpu1".'),
    Key("default", yes_no, False, "Whether this is the partition of jobs without --partition."),
    Key("up", yes_no, True, "Whether its jobs may start."),
    Key("max_time", time_limit, "UNLIMITED", "The maximum time limit of a job."),
    Key("default_time", optional(time_limit), "",
        "The time limit of jobs without --time. Empty: the scheduler's default_time_limit."),
    Key("priority_tier", whole(0), 1, "Jobs of a higher tier start before all jobs of lower tiers."),
    Key("default_mem_per_cpu", optional(memory_mib), "",
        "Memory per cpu of jobs that request none. Empty: an equal part of the node's memory."),
    Key("max_nodes", optional(whole(1)), 0, "The maximum number of nodes of a job. 0: no limit."),
    Key("keep_on", whole(0), 0, "How many of its nodes stay on when others are switched off to save power: see [power]."),
)

NODE = (
    Key("host", host, REQUIRED,
        'Host name, address or a Host of ~/.ssh/config. "local": this machine, without SSH.', shown='"192.0.2.7"'),
    Key("port", optional(whole(1, 65535)), 0, "SSH port. 0: from ~/.ssh/config, else 22."),
    Key("user", optional(user), "", "SSH account. Empty: from ~/.ssh/config, else your own."),
    Key("identity_file", optional(text), "",
        "The only private key that is tried. Empty: the launch key that init made, then OpenSSH's defaults."),
    Key("host_key", text, "",
        'The node\'s public host key. Required unless host is "local".', shown='"ssh-ed25519 AAAA..."'),
    Key("cpus", whole(1, 65536), REQUIRED, "The number of cpus for jobs.", shown="8"),
    Key("memory", memory_mib, REQUIRED, "The memory for jobs.", shown='"64G"'),
    Key("gpus", gpus, [],
        'The type of each GPU by index: ["a100", "a100"], or ["a100:2"]. For a MIG device, its profile: ["1g.10gb:7"].'),
    Key("gpu_shards", whole(1, 1000), 1,
        "The number of shards of each GPU for jobs with --gres=shard:N. The jobs share its memory, and nothing separates "
        "them. 1: GPUs are not shared."),
    Key("gpu_devices", devices, [],
        'The name of each GPU of `gpus` for CUDA_VISIBLE_DEVICES, if it is not its index: "MIG-..." or "GPU-...".'),
    Key("gpu_files", device_files, [],
        'The device file of each GPU of `gpus`, for confine = ["gpus"]. Empty: those of the NVIDIA driver.'),
    Key("confine", optional_list(confinement), [],
        "What this node enforces, instead of confine of hpcsched.toml: the same words, or none. Empty: as in hpcsched.toml."),
    Key("features", words, [],
        "Features for --constraint. hpcsched node bench adds those that it measured: see hpcsched(8)."),
    Key("partitions", words, [], "Partitions of this node, in addition to those whose `nodes` name it."),
    Key("root", absolute_path, "",
        "The agent's directory on the node, on a local disk. Empty: chosen by the agent. Like the node's address, user "
        "and host key, it cannot change while jobs hold the node."),
    Key("python", python, "python3", "The Python on the node, 3.9 or newer."),
    Key("weight", whole(0), 1, "Nodes with a lower weight are used first."),
    Key("speed", number(), 0,
        "The speed of a cpu relative to other nodes, measured by hpcsched node probe. Jobs with --hint=synchronous get "
        "nodes of similar speed. A later hpcsched node bench counts instead. 0: not known."),
    Key("link_mbps", whole(0), 0,
        "The bandwidth of the network in Mbit/s, measured by hpcsched node probe --links or node bench --links, or else "
        "nominal. Jobs with --hint=comm_bound prefer nodes with clearly faster networks. 0: not known."),
    Key("tmp_disk", memory_mib, 0,
        "The size of the file system for temporary files, for --tmp. 0: not known, and --tmp does not exclude the node."),
    Key("mac", mac_address, "",
        "The address of the network card that leads to the head, for hpcsched node wake; found by hpcsched node add and probe."),
    Key("added", moment, "", "When hpcsched node add has added the node, for hpcsched node impact."),
    Key("formerly", words, [],
        "Earlier names of the node, set by hpcsched node rename. The controller moves the node's state, reservations and "
        "waiting jobs that name it from these names to the present one."),
    Key("suspend_after", unless_empty(seconds()), "",
        "As suspend_after of [power], for this node. 0: the node stays on. Empty: as in [power]."),
    Key("idle_watts", number(), 0,
        "The power of the idle node without its GPUs. That much goes to jobs by their cpus, the rest of its energy by processor "
        "time. 0: not known."),
    Key("peak_watts", number(), 0,
        "Its power without GPUs when all cpus are busy. If the node has no meter, its energy is estimated from these two. 0: it "
        "is not estimated, and counts nothing of budget_watts of [power]."),
    Key("gpu_watts", number(), 0, "The power limit of each of its GPUs, for budget_watts of [power]. 0: not known."),
)

SWITCH = (
    Key("nodes", hosts, REQUIRED,
        "The nodes that are connected to the switch: a host list, or a list of host lists.", shown='"n[1-4]"'),
)

GATEWAY = (
    Key("user", optional(user), "",
        "The account of hpcsched gateway, which serves the API to the network. It needs no rights at all. Empty: the "
        "controller's own account, if that is not root."),
    Key("address", host, "127.0.0.1", "The address at which the gateway listens; 0.0.0.0 or :: for all networks."),
    Key("port", whole(1, 65535), 6820, "The port of the gateway."),
    Key("url", text, "",
        'The public address of the gateway, for links: "https://head.example.org:6820". Empty: from host name and port.'),
    Key("job_hosts", wildcard_host, "",
        'The host names at which browsers reach what jobs serve, each job at one of its own: "*.jobs.example.org". The name '
        "server has the address of the gateway for them, and the certificate covers them. Empty: only through a tunnel of ssh, "
        "as job-12.localhost."),
    Key("certificate", absolute_path, "", "The gateway's TLS certificate with its chain, a PEM file.",
        shown='"/etc/hpcsched/gateway.crt"'),
    Key("key", absolute_path, "", "The private key of the certificate, a PEM file that only root or the gateway can read.",
        shown='"/etc/hpcsched/gateway.key"'),
    Key("client_ca", absolute_path, "",
        "A PEM file with the CAs of client certificates for services. Empty: no client certificates."),
    Key("token_max_age_s", seconds(60), "366d", "The longest time for which a token may be valid."),
    Key("session_s", seconds(60), "12h", "The lifetime of a browser session."),
    Key("rate", number(), 50, "How many requests per second a token, or an address without one, may send. 0: no limit."),
    Key("burst", whole(1, 1_000_000), 500, "The number of requests that it may send at once before rate applies."),
    Key("connections_per_address", whole(1, 100_000), 64, "How many connections one address may have."),
    Key("max_connections", whole(1, 1_000_000), 4000, "How many connections all addresses may have."),
)

OIDC = (
    Key("issuer", https_address, "",
        "The address of the OpenID Connect provider where users log in, exactly as its issuer value. Empty: no such login."),
    Key("client_id", text, "", "The name under which the provider knows the gateway."),
    Key("client_secret", absolute_path, "",
        "A file with the secret of the gateway at the provider, that only root or the gateway can read. Empty: a public client."),
    Key("user_claim", word, "preferred_username",
        "The claim of an id token that is the name of the account on the head. Choose one that the provider gives to one person "
        "for ever, and that users cannot change. email counts only if email_verified is true."),
    Key("user_domain", text, "",
        "The domain after the @ that the claim must have, and that is removed: with example.org, anna@example.org is "
        "anna. Empty: the claim is the name."),
    Key("scope", text, "read,submit,manage", "What a session allows: some of read,submit,manage,metrics,serve,admin."),
    Key("ca", absolute_path, "", "A PEM file with the CAs of the provider's certificate. Empty: those of the system."),
    Key("keys", absolute_path, "",
        "A file with the provider's public keys (a JSON Web Key Set). Empty: the controller fetches them from the provider."),
)
# fmt: on

SECTIONS = {
    "cluster": CLUSTER,
    "controller": CONTROLLER,
    "roles": ROLES,
    "privacy": PRIVACY,
    "audit": AUDIT,
    "backup": BACKUP,
    "cost": COST,
    "reports": REPORTS,
    "log": LOG,
    "metrics": METRICS,
    "alerts": ALERTS,
    "sync": SYNC,
    "power": POWER,
    "scheduler": SCHEDULER,
    "scheduler.weights": WEIGHTS,
    "gateway": GATEWAY,
    "gateway.oidc": OIDC,
}

# ----- check one table of a TOML file against its allowed keys, and fill in the defaults


def values_of(path: Path, where: str, table: Any, keys: Sequence[Key], also: Sequence[str] = ()) -> dict[str, Any]:
    """Return the value of every key of `keys`, from `table` or by default."""
    table = table_of(path, where, table)
    refuse_unknown(path, where, table, (*(key.name for key in keys), *also), kind="key")
    values = {}
    for key in keys:
        given = table.get(key.name, key.default)
        if given is REQUIRED:
            raise ConfigError(f"cannot use {path}: {where} lacks the key {key.name!r}: {key.help}")
        try:
            values[key.name] = key.kind(given)
        except BadValue as error:
            raise ConfigError(f"cannot use {path}: {where} {key.name} = {given!r}: {error}") from None
    return values


def table_of(path: Path, where: str, table: Any) -> Mapping[str, Any]:
    """Return `table`; raise ConfigError if it is not a table."""
    if not isinstance(table, dict):
        raise ConfigError(f"cannot use {path}: {where} is {table!r}, and should be a table")
    return table


def refuse_unknown(path: Path, where: str, table: Mapping[str, Any], known: Sequence[str], *, kind: str) -> None:
    """Raise ConfigError for the first name in `table` that is not `known`."""
    for name in table:
        if name not in known:
            raise ConfigError(
                f"cannot use {path}: {where} has the unknown {kind} {name!r}{nearest(name, known)}; "
                f"known are {', '.join(known)}"
            )
