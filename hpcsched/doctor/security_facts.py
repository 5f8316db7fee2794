"""Collect the facts of `hctl security`.

They are from files, this machine, and the controller if it answers.

Everything is bounded: the number of files, the size of answers, the time of programs. Nothing is changed. What cannot be looked
at is returned as text, with the reason. It does not judge: see `hpcsched.doctor.security`.
"""

from __future__ import annotations

import grp
import json
import os
import pwd
import re
import shutil
import stat
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import dsa, ec, rsa

from hpcsched import client, paths
from hpcsched.config.keys import CONTROLLER
from hpcsched.config.load import Config, OidcSettings, load_config
from hpcsched.doctor.security import (
    KERNEL_RULES,
    USER_NAMESPACES,
    AccountFacts,
    CertificateFacts,
    NodeFacts,
    OidcFacts,
    PathFacts,
    PathPart,
    SecurityFacts,
    SettingsFacts,
    TokenFacts,
)
from hpcsched.errors import HpcschedError
from hpcsched.launch.sshconfig import read_ssh_config
from hpcsched.model.accounting import EVERYBODY, NO_LIMITS
from hpcsched.model.node import NodeSpec
from hpcsched.store.audit_heads import HEADS_FILE, KEY_FILE

MAX_FILES = 10_000
MAX_BYTES = 1 << 20
PROGRAM_S = 10.0
PIP_AUDIT_S = 60.0
ASK_S = 60.0
AUTHORITY_KEY = "ca_ed25519"
LOG_NAME = "hpcschedd.log"
TOKEN_KEYS = "token-keys.json"


class Looking:
    """The facts so far, and what could not be looked at."""

    def __init__(self, config_dir: Path, now_s: float, proc: Path) -> None:
        self.config_dir = config_dir
        self.now_s = now_s
        self.proc = proc
        self.unseen: list[str] = []  # a failure: what, why
        self.skipped: list[str] = []  # not a failure
        self.found: dict[str, PathFacts] = {}

    def path(self, path: Path, part: PathPart, owners: tuple[int, ...]) -> None:
        """Look at a file, if it is there."""
        try:
            status = os.stat(path)
        except FileNotFoundError:
            return
        except OSError as error:
            self.unseen.append(f"{path}: {error.strerror}")
            return
        private = _is_private(status, owners)
        self.found.setdefault(str(path), PathFacts(str(path), part, status.st_mode, status.st_uid, owners, private))

    def above(self, path: Path, owners: tuple[int, ...]) -> None:
        """Look at the directories above a path."""
        for parent in path.parents:
            self.path(parent, PathPart.ABOVE, (0, *owners))

    def listed(self, directory: Path, pattern: str) -> list[Path]:
        """Return the files of a directory; none if it cannot be read."""
        try:
            return sorted(islice((path for path in directory.iterdir() if path.match(pattern)), MAX_FILES))
        except FileNotFoundError:
            return []
        except OSError as error:
            self.unseen.append(f"{directory}: {error.strerror}")
            return []


def _is_private(status: os.stat_result, owners: tuple[int, ...]) -> bool:
    """Return whether a file's group is root's, or of an account that may own the file alone."""
    if status.st_gid == 0:
        return True
    try:
        group = grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    return any(_is_group_of(group, uid) for uid in {status.st_uid, *owners})


def _is_group_of(group: grp.struct_group, uid: int) -> bool:
    """Return whether a group is an account's own: of its name, without other members."""
    try:
        account = pwd.getpwuid(uid)
    except KeyError:
        return False
    own = account.pw_gid == group.gr_gid and account.pw_name == group.gr_name
    return own and set(group.gr_mem) <= {account.pw_name}


def look(environ: Mapping[str, str], now_s: float, proc: Path = Path("/proc")) -> tuple[SecurityFacts, Looking]:
    """Return the facts, and with them what could not be looked at."""
    looking = Looking(paths.find_config_dir(environ, os.getuid()), now_s, proc)
    file = looking.config_dir / paths.CONFIG_FILE
    config: Config | None = None
    try:
        owner = file.stat().st_uid
        config = load_config(looking.config_dir, environ)
    except (HpcschedError, OSError) as error:
        owner = os.getuid()
        looking.unseen.append(f"configuration: {error}")
    facts = SecurityFacts(now_s=now_s, config_file=str(file), is_shared=owner == 0)
    facts = _with_files(facts, looking, config, owner)
    facts = _with_this_machine(facts, looking)
    if config is not None:
        facts = replace(facts, settings=_settings(config), nodes=_nodes(config, looking))
        facts = _with_gateway(facts, config, looking)
        facts = _with_controller(facts, config, looking)
    return facts, looking


# ----- files


def _with_files(facts: SecurityFacts, looking: Looking, config: Config | None, owner: int) -> SecurityFacts:
    own = (owner,) if owner == 0 else (owner, 0)
    top = looking.config_dir
    looking.path(top, PathPart.CONFIG, own)
    extra = (*looking.listed(top / paths.NODES_DIR, "*.toml"), *looking.listed(top / paths.EXTRA_DIR, "*.toml"))
    for path in (top / paths.CONFIG_FILE, top / paths.NODES_DIR, top / paths.EXTRA_DIR, top / "node.json", *extra):
        looking.path(path, PathPart.CONFIG, own)
    looking.above(top / paths.CONFIG_FILE, own)
    daemon = own
    if config is not None and (account := _account_uid(config, looking)) is not None:
        daemon = (account, 0)
    state = config.controller.state_dir if config is not None else paths.default_state_dir(top, os.environ)
    run = config.controller.run_dir if config is not None else paths.default_run_dir(top, os.environ)
    seal = config.controller.seal_key if config is not None else top / paths.SEAL_KEY
    launch = top / paths.LAUNCH_KEY
    keys = [launch, top / AUTHORITY_KEY, state / KEY_FILE, state / TOKEN_KEYS]
    keys += [Path(node.identity_file).expanduser() for node in config.nodes if node.identity_file] if config else []
    for path in keys:
        looking.path(path, PathPart.KEY, daemon)
    looking.path(seal, PathPart.SEAL_KEY, daemon)
    looking.path(state, PathPart.STATE, daemon)
    for path in looking.listed(state, f"{paths.DATABASE_FILE}*"):
        looking.path(path, PathPart.DATABASE, daemon)
    for path in (*looking.listed(state, f"{LOG_NAME}*"), _heads(config, state)):
        looking.path(path, PathPart.LOG, daemon)
    looking.path(run, PathPart.RUN, daemon)
    for path in (state, run, seal):
        looking.above(path, daemon)
    if config is not None:
        looking.path(config.controller.ssh_config, PathPart.CONFIG, daemon)
        _look_at_gateway(looking, config, daemon)
    made = _changed_s(launch)
    return replace(
        facts,
        paths=tuple(looking.found.values()),
        state_dir=str(state),
        seal_key=str(seal),
        log_file=str(state / LOG_NAME),
        launch_key=(str(launch), made) if made is not None else None,
        ssh_config=str(config.controller.ssh_config) if config is not None else "",
    )


def _look_at_gateway(looking: Looking, config: Config, daemon: tuple[int, ...]) -> None:
    gateway, oidc = config.gateway, config.gateway.oidc
    if not gateway.certificate:
        return
    owners = (*_uids(gateway.user), *daemon)
    parts = {
        PathPart.TLS_KEY: (gateway.key, oidc.client_secret),
        PathPart.TRUST: (gateway.client_ca, oidc.ca, oidc.keys),
    }
    for part, names in parts.items():
        for path in map(Path, filter(None, names)):
            looking.path(path, part, owners)
            looking.above(path, owners)


def _account_uid(config: Config, looking: Looking) -> int | None:
    try:
        account = config.controller.account()
    except HpcschedError as error:
        looking.unseen.append(str(error))
        return None
    return account.pw_uid if account is not None else None


def _uids(user: str | None) -> tuple[int, ...]:
    try:
        return (pwd.getpwnam(user).pw_uid,) if user else ()
    except KeyError:
        return ()


def _heads(config: Config | None, state: Path) -> Path:
    return Path(config.audit.heads) if config is not None and config.audit.heads else state / HEADS_FILE


def _changed_s(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _tail(path: Path) -> str:
    """Return the end of a regular file. A link, a FIFO or a missing file is empty."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    with open(descriptor, "rb") as stream:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return ""
        stream.seek(max(0, status.st_size - MAX_BYTES))
        return stream.read(MAX_BYTES).decode("utf-8", "replace")


# ----- this machine


def _with_this_machine(facts: SecurityFacts, looking: Looking) -> SecurityFacts:
    import paramiko

    kernel = {}
    for name in (*KERNEL_RULES, USER_NAMESPACES):
        text = _tail_of_proc(looking.proc / "sys" / name.replace(".", "/"))
        if text.isdigit():
            kernel[name] = int(text)
    mounts = [line.split() for line in _tail_of_proc(looking.proc / "mounts").splitlines()]
    options = [row[3] for row in mounts if len(row) > 3 and row[1] == "/proc" and row[2] == "proc"]
    return replace(
        facts,
        kernel=kernel,
        proc_is_hidden="hidepid=" in options[0] and "hidepid=0" not in options[0] if options else None,
        paramiko=str(paramiko.__version__),
        openssh=_output(["ssh", "-V"], PROGRAM_S).strip()[:200],
        advisories=tuple(_advisories(looking)),
    )


def _tail_of_proc(path: Path) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read(MAX_BYTES).strip()
    except OSError:
        return ""


def _output(argv: list[str], limit_s: float) -> str:
    """Return what a program prints, on both its outputs.

    "" if it is not there or takes too long.
    """
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout[: 16 * MAX_BYTES].decode("utf-8", "replace")


def _advisories(looking: Looking) -> Iterator[tuple[str, str, str, str]]:
    program = shutil.which("pip-audit")
    if program is None:
        looking.skipped.append("advisories about Python packages: pip-audit is not installed")
        return
    argv = [program, "--format=json", "--progress-spinner=off", "--path", sysconfig.get_paths()["purelib"]]
    text = _output(argv, PIP_AUDIT_S)
    start = text.find("{")
    try:
        answer, _ = json.JSONDecoder().raw_decode(text[start:] if start >= 0 else "")
        for item in answer["dependencies"]:
            if flaws := item.get("vulns"):
                ids = ", ".join(str(flaw["id"]) for flaw in flaws)
                corrected = str(flaws[-1].get("fix_versions", [""])[-1:] and (flaws[-1]["fix_versions"] or [""])[-1])
                yield str(item["name"]), str(item["version"]), ids, corrected
    except (ValueError, KeyError, TypeError, IndexError):
        looking.skipped.append("advisories about Python packages: pip-audit gave no answer")


# ----- configuration


def _settings(config: Config) -> SettingsFacts:
    accounting = config.accounting
    access = config.access
    named = (*access.admins, *access.operators, *access.viewers, *access.services)
    default_confine = next(key.default for key in CONTROLLER if key.name == "confine")
    return SettingsFacts(
        allow_uid_below=config.controller.allow_uid_below,
        confine=tuple(config.controller.confine),
        default_confine=tuple(default_confine),
        max_processes=config.controller.max_processes,
        request_rate=config.controller.request_rate,
        max_jobs=config.scheduler.max_jobs,
        max_submit_jobs=config.scheduler.max_submit_jobs,
        accounts=tuple(_account_facts(config)),
        preempting_qos=tuple(qos.name for qos in accounting.qos if qos.preempt),
        unknown_in_roles=tuple(user for user in named if not _uids(user)),
        hides=bool(access.hidden),
        audit_syslog=config.audit.syslog,
        audit_sign_every_s=config.audit.sign_every_s,
        token_max_age_s=config.gateway.token_max_age_s,
        gateway_rate=config.gateway.rate,
        oidc=_oidc_facts(config.gateway.oidc),
    )


def _oidc_facts(oidc: OidcSettings) -> OidcFacts | None:
    if not oidc.issuer:
        return None
    scopes = tuple(part.strip() for part in oidc.scope.split(","))
    return OidcFacts(oidc.issuer, oidc.user_claim, oidc.user_domain, scopes, has_secret=bool(oidc.client_secret))


def _account_facts(config: Config) -> Iterator[AccountFacts]:
    accounting = config.accounting
    for account in accounting.accounts:
        if not account.users:
            continue
        above, qos, is_limited = account, account.qos, account.limits != NO_LIMITS
        while above.parent and (parent := accounting.account(above.parent)) is not None:
            above, is_limited, qos = parent, is_limited or parent.limits != NO_LIMITS, qos or parent.qos
        rules = [accounting.rules(user) for user in account.users]
        is_limited = is_limited or all(rule is not None and rule.limits != NO_LIMITS for rule in rules)
        yield AccountFacts(account.name, is_limited, EVERYBODY in account.users, qos)


def _nodes(config: Config, looking: Looking) -> tuple[NodeFacts, ...]:
    try:
        ssh = read_ssh_config(config.controller.ssh_config)
    except HpcschedError as error:
        looking.unseen.append(str(error))
        ssh = None
    found = []
    for spec in config.nodes:
        options = dict(ssh.lookup(spec.host)) if ssh is not None and spec.host_key else {}
        flat = {name: value if isinstance(value, str) else " ".join(value) for name, value in options.items()}
        bits = _bits_of(spec, looking)
        found.append(
            NodeFacts(name=spec.name, host=spec.host, host_key=spec.host_key, host_key_bits=bits, ssh_options=flat)
        )
    return tuple(found)


def _bits_of(spec: NodeSpec, looking: Looking) -> int | None:
    if not spec.host_key.startswith("ssh-rsa "):
        return None
    try:
        key = serialization.load_ssh_public_key(spec.host_key.encode())
    except (ValueError, TypeError) as error:
        looking.unseen.append(f"host key of {spec.name}: {error}")
        return None
    return key.key_size if isinstance(key, rsa.RSAPublicKey) else None


def _with_gateway(facts: SecurityFacts, config: Config, looking: Looking) -> SecurityFacts:
    if not config.gateway.certificate:
        return facts
    path = config.gateway.certificate
    try:
        with open(path, "rb") as stream:
            shown = x509.load_pem_x509_certificate(stream.read(MAX_BYTES))
    except (OSError, ValueError) as error:
        looking.unseen.append(f"{path}: {error}")
        return facts
    key = shown.public_key()
    kind = "RSA" if isinstance(key, rsa.RSAPublicKey) else "DSA" if isinstance(key, dsa.DSAPublicKey) else ""
    kind = "EC" if isinstance(key, ec.EllipticCurvePublicKey) else kind or "Ed25519"
    hashed = shown.signature_hash_algorithm
    own = config.gateway.user is not None and config.gateway.user != config.controller.user
    times = shown.not_valid_before_utc.timestamp(), shown.not_valid_after_utc.timestamp()
    bits = int(getattr(key, "key_size", 256))
    return replace(facts, certificate=CertificateFacts(path, *times, (kind, bits), hashed.name if hashed else "", own))


# ----- the controller and the nodes


def _ask(looking: Looking, what: str, path: str) -> dict[str, Any]:
    try:
        return dict(client.call("GET", path, timeout_s=ASK_S))
    except HpcschedError as error:
        looking.unseen.append(f"{what}: {error}")
        return {}


def _with_controller(facts: SecurityFacts, config: Config, looking: Looking) -> SecurityFacts:
    ping = _ask(looking, "controller, tokens, nodes and audit log", "/v1/ping")
    if not ping:
        is_root = facts.is_shared and config.controller.user is None
        return replace(facts, controller_uid=0 if is_root else None)
    try:
        uid: int | None = os.stat(f"/proc/{int(ping['pid'])}").st_uid
    except (OSError, ValueError):
        uid = None
    tokens = _ask(looking, "tokens", client.query("/v1/tokens", user="*")).get("tokens", ())
    views = _ask(looking, "nodes", "/v1/nodes?probe=1").get("nodes", ())
    by_name = {str(view.get("name")): view for view in views}
    return replace(
        facts,
        controller_uid=uid,
        tokens=tuple(_token(one) for one in tokens if not one["revoked_at_s"] and one["expires_at_s"] > facts.now_s),
        nodes=tuple(_with_report(node, by_name.get(node.name, {}), looking) for node in facts.nodes),
        **_audit_facts(config, looking),
    )


def _token(one: Mapping[str, Any]) -> TokenFacts:
    return TokenFacts(str(one["id"]), str(one["user"]), tuple(one["scopes"]), one["created_at_s"], one["expires_at_s"])


def _with_report(node: NodeFacts, view: Mapping[str, Any], looking: Looking) -> NodeFacts:
    """Return the node with what its agent says, as far as it can be understood."""
    lacks = {str(word) for word in view.get("not_enforced") or ()}
    whys = [(str(a["word"]), str(a["why_not"])) for a in view.get("abilities") or () if a["word"] in lacks]
    facts = view.get("facts")
    said = facts.get("security") if isinstance(facts, dict) else None
    if not isinstance(said, dict):
        looking.unseen.append(f"node {node.name}: its agent does not answer")
        return replace(node, not_enforced=tuple(whys))
    policy, kernel, forced = said.get("policy"), said.get("kernel"), said.get("forced_command")
    return replace(
        node,
        not_enforced=tuple(whys),
        forced_command=forced if isinstance(forced, bool) and node.host != "local" else None,
        policy=policy if isinstance(policy, dict) else None,
        policy_error=str(said.get("policy_error") or "")[:300],
        kernel={
            name: value for name, value in (kernel if isinstance(kernel, dict) else {}).items() if type(value) is int
        },
        openssh=re.sub(r"[^ -~]", "?", str(said.get("openssh") or ""))[:200],
    )


def _audit_facts(config: Config, looking: Looking) -> dict[str, Any]:
    """Return when the first record was made that is not signed, and where the signed ends are."""
    state = config.controller.state_dir
    heads = _heads(config, state)
    seq = 0
    for line in _tail(heads).splitlines()[-1:]:
        try:
            seq = int(json.loads(line)["seq"])
        except (ValueError, KeyError, TypeError):
            looking.unseen.append(f"{heads}: its last line is not a signed end")
    records = _ask(looking, "audit log", f"/v1/audit?after={seq}&limit=1").get("records", ())
    try:
        beside: bool | None = heads.parent.stat().st_dev == state.stat().st_dev
    except OSError:
        beside = None
    return {
        "unsigned_since_s": float(records[0]["at_s"]) if records else None,
        "heads_beside_database": beside,
    }
