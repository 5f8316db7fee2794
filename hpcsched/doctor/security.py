"""The rules of `hctl security`: facts about an installation in, findings out.

Pure. `RULES` has each finding's id, severity, reason, remedy and controls; `findings` judges. An id never gets another meaning.
A finding of severity INFO is not a fault, but a fact that an admin may want to know. Unknown facts are None, and are not judged.

Many rules are only for installations that serve several users. A cluster of one account needs protection only
from other accounts of the machine.

Sources: NIST SP 800-53 revision 5; CIS Controls version 8 (safeguards); Debian DSA-5586 and DSA-5724, Ubuntu USN-6560 and
USN-6859 (versions that have corrections of later OpenSSH).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple
from urllib.parse import urlsplit

DAY_S = 86_400.0
YEAR_S = 366 * DAY_S


class Severity(StrEnum):
    """How bad a finding is. INFO is not a fault."""

    CRITICAL = "critical"
    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"
    INFO = "info"


class Rule(NamedTuple):
    """A kind of finding. `fix` has {at}, {path} or other words that the finding fills in."""

    id: str
    severity: Severity
    title: str
    why: str
    fix: str
    nist: str
    cis: str


_C, _H, _M, _L, _I = Severity
_EDIT = "; then run: hctl reconfigure"

# fmt: off
# ruff: noqa: E501 - a row of the table is read as one
RULES = {rule.id: rule for rule in (
    Rule("HS-01", _C, "configuration that others can write", "Its writer chooses the nodes, the admins and the code that runs there.",
         "chmod go-w {path}", "AC-6 CM-5", "3.3"),
    Rule("HS-02", _C, "configuration of another account", "Its owner can replace it, whatever its mode is.",
         "chown {owner} {path}", "AC-6 CM-5", "3.3"),
    Rule("HS-03", _H, "directory above that others can write", "Who can write it can replace what is below it.",
         "chmod go-w {path}", "AC-3 CM-5", "3.3"),
    Rule("HS-04", _H, "directory above of another account", "Its owner can replace what is below it.",
         "chown {owner} {path}", "AC-3 CM-5", "3.3"),
    Rule("HS-05", _C, "private key that others can read or write", "Its reader can log in to nodes, sign the audit log, or make tokens' signatures.",
         "chmod 600 {path}", "IA-5 SC-12", "3.3"),
    Rule("HS-06", _C, "sealing key that others can read or write", "With a copy of the database it opens the environments of jobs.",
         "chmod 600 {path}", "SC-12 SC-28", "3.11"),
    Rule("HS-07", _M, "sealing key beside the database", "A copy of the state directory then has the key of what is sealed in it.",
         "mv {path} {elsewhere}   # and set seal_key in [controller]", "SC-12 SC-28", "3.11"),
    Rule("HS-08", _H, "state directory that others can enter", "It has scripts and output paths of all users, and keys.",
         "chmod 700 {path}", "AC-3 SC-28", "3.3"),
    Rule("HS-09", _H, "database that others can read or write", "It has the jobs and scripts of all users; its writer runs what he likes.",
         "chmod 600 {path}", "AC-3 SC-28", "3.3"),
    Rule("HS-10", _H, "state of another account", "Its owner can replace the database and the keys.",
         "chown {owner} {path}", "AC-3 AC-6", "3.3"),
    Rule("HS-11", _C, "run directory that others can write, or own", "Who can write it can answer commands instead of the controller.",
         "chown {owner} {path}; chmod go-w {path}", "AC-3 SC-23", "3.3"),
    Rule("HS-12", _M, "launch key older than a year", "An old key has had more time to be copied.",
         "mv {path} {path}.old; mv {path}.pub {path}.pub.old; hpcsched init --force   # then hpcsched key, on each node",
         "IA-5(1) SC-12", "5.2"),
    Rule("HS-13", _H, "node on which the launch key runs any command", "A stolen key is then a shell of the agent's account, often root.",
         "hpcsched key   # put this line into ~/.ssh/authorized_keys on {at} instead of the key alone", "AC-6 AC-17", "5.4"),
    Rule("HS-14", _M, "log file that others can write", "Traces of an attack can be removed or invented.",
         "chmod go-w {path}", "AU-9", "8.1"),
    Rule("HS-15", _H, "controller that runs as root", "A fault in it then gives root on the head. It needs no privilege.",
         "useradd --system --home-dir /var/lib/hpcsched --shell /usr/sbin/nologin hpcsched   # then see ACCOUNT in hpcschedd(8)",
         "AC-6(2) AC-6(5)", "5.4"),
    Rule("HS-16", _H, "jobs of root and system accounts are allowed", "A job of root is root on every node that it gets.",
         "set allow_uid_below = 1000 in [controller] of {path}" + _EDIT, "AC-6(1) AC-6(10)", "5.4"),
    Rule("HS-17", _M, "node policy that allows root or system accounts", "A stolen controller can then start jobs as them.",
         "set \"allow_root\": false and \"min_uid\": 1000 in /etc/hpcsched/node.json on {at}", "AC-6(1) AC-6(10)", "5.4"),
    Rule("HS-18", _H, "node policy that cannot be used", "Nothing runs on the node, or the policy is not what its admin wrote.",
         "chown root:root /etc/hpcsched/node.json; chmod 644 /etc/hpcsched/node.json   # on {at}", "CM-5 CM-6", "4.1"),
    Rule("HS-19", _H, "private key of another account", "Its owner can read it and log in to the nodes.",
         "chown {owner} {path}", "IA-5 SC-12", "3.3"),
    Rule("HS-20", _M, "weak host key", "RSA of less than 3072 bits is below 128 bits of security.",
         "ssh-keygen -A   # on {at}; then here: hpcsched node rekey {at}", "SC-12 SC-13", "3.10"),
    Rule("HS-21", _H, "host key checking that is turned off", "Another machine can then take the place of this one for logins by ssh, and of jump hosts.",
         "remove StrictHostKeyChecking no and UserKnownHostsFile /dev/null for {at} from {path}", "IA-3 SC-8", "3.10"),
    Rule("HS-22", _M, "weak algorithms for SSH", "SHA-1, CBC, DSA and RC4 can be attacked.",
         "remove {options} for {at} from {path}", "SC-8 SC-13", "3.10"),
    Rule("HS-23", _M, "machines with the same host key", "They are clones: each can take the place of the other.",
         "rm /etc/ssh/ssh_host_*; ssh-keygen -A   # on all but one of {at}; then here: hpcsched node rekey NAME", "IA-3 SC-12", "4.1"),
    Rule("HS-24", _H, "node that cannot confine jobs as configured", "A job there can take the resources of others, or see them.",
         "hctl show node {at}   # says what it lacks; or say in its file what it confines: confine = [...]", "SC-6 SC-39", "4.1"),
    Rule("HS-25", _L, "confinement that is turned off", "A job can take the resources of others on its node, or see their processes.",
         "remove confine from {path}" + _EDIT, "SC-6 SC-39", "4.1"),
    Rule("HS-26", _M, "no limit of processes per job", "A fork bomb takes the node from others.",
         "set max_processes = 4096 in [controller] of {path}" + _EDIT, "SC-5 SC-6", "4.1"),
    Rule("HS-30", _M, "preempting QOS that is open to everybody", "Each user can take the place of running jobs.",
         "remove {at} from qos of the account with users = [\"*\"] in {path}" + _EDIT, "AC-6 SC-6", "3.3"),
    Rule("HS-31", _L, "account without limits", "Its users can take the whole cluster for as long as they like.",
         "set max_jobs, max_wall or grp_tres in [accounts.{at}] of {path}" + _EDIT, "SC-5 SC-6", "4.1"),
    Rule("HS-32", _M, "no limit of waiting jobs per user", "One user can fill the queue, and all others are refused.",
         "remove max_submit_jobs from [scheduler] of {path}" + _EDIT, "SC-5", "4.1"),
    Rule("HS-33", _M, "no limit of requests per user", "One user can take the controller's time from the others.",
         "remove request_rate from [controller] of {path}" + _EDIT, "SC-5", "4.1"),
    Rule("HS-34", _M, "role for an account that does not exist", "Who gets an account of that name gets the role.",
         "remove {at} from [roles] of {path}" + _EDIT, "AC-2", "5.1"),
    Rule("HS-35", _I, "users see jobs, nodes and usage of others", "Names of jobs and users may tell more than they should.",
         "set hide = [\"jobs\", \"usage\"] in [privacy] of {path}" + _EDIT, "AC-3 AC-4", "3.3"),
    Rule("HS-40", _M, "symbolic links are followed in shared directories", "Other users' links in /tmp can lead programs of root elsewhere.",
         "echo fs.protected_symlinks=1 >> /etc/sysctl.d/60-hpcsched.conf; sysctl --system   # on {at}", "CM-6 SI-16", "4.1"),
    Rule("HS-41", _M, "hard links to files of others", "Programs of root can be led to files of others.",
         "echo fs.protected_hardlinks=1 >> /etc/sysctl.d/60-hpcsched.conf; sysctl --system   # on {at}", "CM-6 SI-16", "4.1"),
    Rule("HS-42", _L, "FIFOs of others are opened in shared directories", "A user can get data that a program writes to /tmp.",
         "echo fs.protected_fifos=1 >> /etc/sysctl.d/60-hpcsched.conf; sysctl --system   # on {at}", "CM-6 SI-16", "4.1"),
    Rule("HS-43", _L, "files of others are opened in shared directories", "A user can get data that a program writes to /tmp.",
         "echo fs.protected_regular=1 >> /etc/sysctl.d/60-hpcsched.conf; sysctl --system   # on {at}", "CM-6 SI-16", "4.1"),
    Rule("HS-44", _L, "processes can trace other processes of their user", "One broken program reads the keys of all programs of its user.",
         "echo kernel.yama.ptrace_scope=1 >> /etc/sysctl.d/60-hpcsched.conf; sysctl --system   # on {at}", "CM-6 SC-39", "4.1"),
    Rule("HS-45", _I, "processes of others can be seen on the head", "Command lines may have secrets. In jobs, confine has proc.",
         "mount -o remount,hidepid=invisible /proc", "AC-3 AC-4", "3.3"),
    Rule("HS-46", _I, "users can make user namespaces on the head", "They reach more of the kernel's code. Containers of users need them.",
         "sysctl -w user.max_user_namespaces=0   # if no user needs containers", "CM-7", "4.8"),
    Rule("HS-50", _H, "paramiko with known vulnerabilities", "Before 3.4: CVE-2023-48795 (Terrapin).",
         "pip install --upgrade 'paramiko>=3.4'", "RA-5 SI-2", "7.4"),
    Rule("HS-51", _M, "OpenSSH with known vulnerabilities", "Its distribution, or OpenSSH, has a corrected version.",
         "apt-get update && apt-get install --only-upgrade openssh-server openssh-client   # on {at}; or dnf upgrade openssh", "RA-5 SI-2", "7.3"),
    Rule("HS-52", _H, "Python package with known vulnerabilities", "pip-audit knows advisories about the installed version.",
         "pip install --upgrade '{upgrade}'", "RA-5 SI-2", "7.4"),
    Rule("HS-60", _H, "gateway certificate that is not valid now", "Users learn to ignore warnings, or are kept out.",
         "replace {path}, and restart hpcsched gateway", "SC-17 SC-23", "3.10"),
    Rule("HS-61", _M, "gateway certificate that expires soon", "In less than 21 days users are kept out.",
         "replace {path}, and restart hpcsched gateway", "SC-17 SC-23", "3.10"),
    Rule("HS-62", _C, "key of the gateway that others can read or write", "Its reader can take the place of the gateway.",
         "chown {owner} {path}; chmod 600 {path}", "SC-12 SC-23", "3.10"),
    Rule("HS-63", _M, "weak key or signature of the gateway's certificate", "RSA below 2048 bits, curves below 256 bits and SHA-1 can be attacked.",
         "make a new key and certificate: openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout gateway.key -out gateway.csr",
         "SC-12 SC-13", "3.10"),
    Rule("HS-64", _M, "gateway with the controller's account", "What the network reaches can then read the launch key and the database.",
         "useradd --system --shell /usr/sbin/nologin hpcsched-gateway   # and set user in [gateway] of {path}", "AC-6 SC-39", "4.1"),
    Rule("HS-65", _M, "no limit of requests to the gateway", "One address of the network can take its time from all users.",
         "remove rate from [gateway] of {path}, and restart hpcsched gateway", "SC-5", "4.1"),
    Rule("HS-66", _C, "certificates that the gateway trusts, and others can write", "Their writer can log in as any user.",
         "chown {owner} {path}; chmod go-w {path}", "SC-17 SC-23", "3.10"),
    Rule("HS-67", _H, "provider at which anybody can register", "Strangers choose their names there, and so the accounts that they log in to.",
         "set user_claim = \"email\" and user_domain to your domain in [gateway.oidc] of {path}" + _EDIT, "AC-2 IA-2 IA-8", "6.7"),
    Rule("HS-68", _H, "accounts named by a claim that users may choose", "Who takes the name of another account gets its sessions.",
         "set user_claim in [gateway.oidc] of {path} to a claim that only the provider's admins change" + _EDIT, "IA-2 IA-4", "6.7"),
    Rule("HS-69", _I, "accounts named by preferred_username", "OpenID does not promise that it is of one person, and at some providers users change it.",
         "ask the provider; else set user_claim in [gateway.oidc] of {path} to another claim" + _EDIT, "IA-2 IA-4", "6.7"),
    Rule("HS-70", _M, "token that is valid for more than a year", "A copy of it works for as long.",
         "hctl token revoke {at}; hctl token create --expires=30d", "IA-5(1)", "5.3"),
    Rule("HS-71", _L, "token older than a year", "It may be in more places than its user remembers.",
         "hctl token revoke {at}; hctl token create --expires=30d", "IA-5(1)", "5.3"),
    Rule("HS-72", _M, "admin token that is valid for more than 90 days", "A copy of it administers the cluster for as long.",
         "hctl token revoke {at}; hctl token create --scope=admin --expires=12h", "AC-6(5) IA-5(1)", "5.4"),
    Rule("HS-73", _M, "tokens may be valid for more than a year", "A copy of one works for as long.",
         "remove token_max_age_s from [gateway] of {path}", "IA-5(1)", "5.3"),
    Rule("HS-74", _M, "login at a provider that gives the scope admin", "A page or program that gets hold of an admin's browser session administers the cluster.",
         "remove admin from scope in [gateway.oidc] of {path}" + _EDIT, "AC-6(5) IA-2(1)", "5.4"),
    Rule("HS-75", _L, "gateway without a secret at the provider", "Another program can present itself to the provider as the gateway. PKCE alone protects the login.",
         "set client_secret in [gateway.oidc] of {path} to a file with the secret, and restart hpcsched gateway", "IA-3 IA-9", "6.7"),
    Rule("HS-80", _H, "audit log that is not signed", "Records after the last signed end can be removed without a trace.",
         "hctl audit verify; grep 'cannot sign' {path}", "AU-9(3) AU-10", "8.1"),
    Rule("HS-81", _M, "signed ends of the audit log on this disk alone", "Who has the head can replace the log and its proof together.",
         "set syslog = true in [audit] of {path}" + _EDIT, "AU-9(2)", "8.9"),
    Rule("HS-82", _I, "signed ends of the audit log beside the database", "A copy on another file system survives more; better on another machine.",
         "set heads in [audit] of {path} to a file on another file system", "AU-9(2)", "8.9"),
    Rule("HS-83", _M, "audit log that is signed seldom", "Until it is signed, its end can be removed without a trace.",
         "remove sign_every_s from [audit] of {path}" + _EDIT, "AU-9(3) AU-10", "8.1"),
)}
# fmt: on


class PathPart(StrEnum):
    """What a file or directory is to the installation."""

    CONFIG = "configuration"
    ABOVE = "directory above"
    KEY = "private key"
    SEAL_KEY = "sealing key"
    STATE = "state directory"
    DATABASE = "database"
    RUN = "run directory"
    LOG = "log"
    TLS_KEY = "key of the gateway"
    TRUST = "certificates that the gateway trusts"


class PathFacts(NamedTuple):
    """A file or directory. `group_is_private`: the group has no other member than the owner."""

    path: str
    part: PathPart
    mode: int
    uid: int
    owners: tuple[int, ...]  # the uids that may own it; the first is the best
    group_is_private: bool = False

    @property
    def others_may(self) -> int:
        """Return the permission bits of all accounts but the owner, as rwx of others."""
        group = 0 if self.group_is_private else self.mode >> 3
        return (group | self.mode) & 0o7


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """A node.

    `forced_command`: whether the line of authorized_keys started the agent; None: not known.
    """

    name: str
    host: str
    host_key: str = ""
    host_key_bits: int | None = None  # of RSA
    ssh_options: Mapping[str, str] = field(default_factory=dict)  # lower case names
    forced_command: bool | None = None
    policy: Mapping[str, object] | None = None
    policy_error: str = ""
    not_enforced: tuple[tuple[str, str], ...] = ()  # what, why
    kernel: Mapping[str, int] = field(default_factory=dict)
    openssh: str = ""


class AccountFacts(NamedTuple):
    """An account with users.

    `is_limited`: by itself, an account above it, or the rules of each of its users.
    """

    name: str
    is_limited: bool
    is_open: bool  # users = ["*"]
    qos: tuple[str, ...]


class TokenFacts(NamedTuple):
    """A credential that is valid now."""

    id: str
    user: str
    scopes: tuple[str, ...]
    created_at_s: float
    expires_at_s: float


class OidcFacts(NamedTuple):
    """The login at an OpenID provider."""

    issuer: str
    user_claim: str
    user_domain: str
    scopes: tuple[str, ...]
    has_secret: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsFacts:
    """The configuration, as far as rules need it."""

    allow_uid_below: int
    confine: tuple[str, ...]
    default_confine: tuple[str, ...]
    max_processes: int
    request_rate: float
    max_jobs: int
    max_submit_jobs: int | None
    accounts: tuple[AccountFacts, ...] = ()
    preempting_qos: tuple[str, ...] = ()
    unknown_in_roles: tuple[str, ...] = ()
    hides: bool = False
    audit_syslog: bool = True
    audit_sign_every_s: float = 60.0
    token_max_age_s: float = YEAR_S
    gateway_rate: float = 1.0
    oidc: OidcFacts | None = None


class CertificateFacts(NamedTuple):
    """The gateway's certificate. `key`: its kind and size in bits."""

    path: str
    not_before_s: float
    not_after_s: float
    key: tuple[str, int]
    signature_hash: str
    own_account: bool  # the gateway has another account than the controller


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityFacts:
    """An installation. None: not known, or not there."""

    now_s: float
    config_file: str
    is_shared: bool  # it serves several users
    state_dir: str = ""
    ssh_config: str = ""
    seal_key: str = ""
    launch_key: tuple[str, float] | None = None  # path, time of its last change
    log_file: str = ""
    paths: tuple[PathFacts, ...] = ()
    controller_uid: int | None = None
    settings: SettingsFacts | None = None
    nodes: tuple[NodeFacts, ...] = ()
    kernel: Mapping[str, int] = field(default_factory=dict)
    proc_is_hidden: bool | None = None
    paramiko: str = ""
    openssh: str = ""
    advisories: tuple[tuple[str, str, str, str], ...] = ()  # package, version, ids, corrected version
    certificate: CertificateFacts | None = None
    tokens: tuple[TokenFacts, ...] = ()
    unsigned_since_s: float | None = None  # time of the first record after the last signed end
    heads_beside_database: bool | None = None


def finding_json(rule: Any, at: str, detail: str, fix: str) -> dict[str, object]:
    """Return a finding as an object of the JSON of `hctl security` and `hpcsched doctor`.

    `rule` has the id, the severity, the title and the reason.
    """
    return {
        "id": rule.id,
        "severity": rule.severity.value,
        "title": rule.title,
        "object": at,
        "detail": detail,
        "why": rule.why,
        "fix": fix,
    }


class SecurityFinding(NamedTuple):
    """What is wrong, with what, and how to correct it."""

    rule: Rule
    at: str
    detail: str
    fix: str

    def as_json(self) -> dict[str, object]:
        """Return the finding as an object of the command's JSON."""
        return finding_json(*self) | {"nist": self.rule.nist.split(), "cis": self.rule.cis.split()}


def findings(facts: SecurityFacts) -> list[SecurityFinding]:
    """Return all findings, the worst first."""
    order = list(Severity)
    found = [finding for judge in _JUDGES for finding in judge(facts)]
    return sorted(found, key=lambda finding: (order.index(finding.rule.severity), finding.rule.id, finding.at))


def table_text() -> str:
    """Return the table of rules, as the man page has it."""
    rows = [("ID", "SEVERITY", "NIST 800-53", "CIS V8", "FINDING")]
    rows += [(rule.id, rule.severity.value, rule.nist, rule.cis, rule.title) for rule in RULES.values()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines) + "\n"


def _found(rule_id: str, at: str, detail: str, **words: str) -> SecurityFinding:
    rule = RULES[rule_id]
    given = {"at": at, "path": at} | words
    fix = re.sub(
        r"\{(\w+)\}", lambda match: shlex.quote(given[match[1]]) if match[1] == "path" else given[match[1]], rule.fix
    )
    return SecurityFinding(rule, at, detail, fix)


# ----- files: what others may do (as bits of rwx), and who may own them

_READ_OR_WRITE, _WRITE, _ANY = 0o6, 0o2, 0o7
_OPEN_RULES = {
    PathPart.CONFIG: ("HS-01", _WRITE),
    PathPart.ABOVE: ("HS-03", _WRITE),
    PathPart.KEY: ("HS-05", _READ_OR_WRITE),
    PathPart.SEAL_KEY: ("HS-06", _READ_OR_WRITE),
    PathPart.STATE: ("HS-08", _ANY),
    PathPart.DATABASE: ("HS-09", _READ_OR_WRITE),
    PathPart.RUN: ("HS-11", _WRITE),
    PathPart.LOG: ("HS-14", _WRITE),
    PathPart.TLS_KEY: ("HS-62", _READ_OR_WRITE),
    PathPart.TRUST: ("HS-66", _WRITE),
}
_OWNER_RULES = {
    PathPart.CONFIG: "HS-02",
    PathPart.ABOVE: "HS-04",
    PathPart.KEY: "HS-19",
    PathPart.SEAL_KEY: "HS-19",
    PathPart.STATE: "HS-10",
    PathPart.DATABASE: "HS-10",
    PathPart.RUN: "HS-11",
    PathPart.LOG: "HS-10",
    PathPart.TLS_KEY: "HS-19",
    PathPart.TRUST: "HS-66",
}
_STICKY = 0o1000


def _files(facts: SecurityFacts) -> Iterator[SecurityFinding]:
    for item in facts.paths:
        words = {"owner": str(item.owners[0])}
        rule, forbidden = _OPEN_RULES[item.part]
        is_sticky = item.part is PathPart.ABOVE and item.mode & _STICKY
        if item.others_may & forbidden and not is_sticky:
            yield _found(rule, item.path, f"its mode is {item.mode & 0o7777:04o}", **words)
        if item.uid not in item.owners:
            yield _found(_OWNER_RULES[item.part], item.path, f"it belongs to uid {item.uid}", **words)
    if facts.seal_key and facts.state_dir and f"{facts.seal_key}/".startswith(f"{facts.state_dir}/"):
        elsewhere = facts.config_file.rpartition("/")[0] or "/"
        yield _found("HS-07", facts.seal_key, f"it is in {facts.state_dir}", elsewhere=elsewhere)


# ----- keys, accounts, policies


def _keys(facts: SecurityFacts) -> Iterator[SecurityFinding]:
    if facts.launch_key is not None and facts.now_s - facts.launch_key[1] > YEAR_S:
        path, made_s = facts.launch_key
        yield _found("HS-12", path, f"it is {(facts.now_s - made_s) / DAY_S:.0f} days old")
    if facts.is_shared and facts.controller_uid == 0:
        yield _found("HS-15", "controller", "its uid is 0")


def _node_policies(facts: SecurityFacts) -> Iterator[SecurityFinding]:
    for node in facts.nodes if facts.is_shared else ():
        if node.forced_command is False:
            yield _found("HS-13", node.name, "its sshd ran the command that the controller asked for")
        if node.policy_error:
            yield _found("HS-18", node.name, node.policy_error)
        if node.policy is not None and node.policy.get("allow_root") is True:
            yield _found("HS-17", node.name, "allow_root is true")
        least = node.policy.get("min_uid") if node.policy is not None else None
        if isinstance(least, int) and least < 1000:
            yield _found("HS-17", node.name, f"min_uid is {least}")


# ----- SSH

_WEAK = re.compile(
    r"(?:^|[,+^ ])(ssh-dss|ssh-rsa|[a-z0-9-]*-cbc|arcfour[0-9]*|hmac-(?:md5|sha1)[a-z0-9@.-]*|[a-z0-9-]*-sha1)(?=[,@ ]|$)"
)
_ALGORITHMS = (
    "ciphers",
    "macs",
    "kexalgorithms",
    "hostkeyalgorithms",
    "pubkeyacceptedalgorithms",
    "pubkeyacceptedkeytypes",
)


def _ssh(facts: SecurityFacts) -> Iterator[SecurityFinding]:
    machines: dict[str, dict[str, str]] = {}
    for node in facts.nodes:
        if node.host_key_bits is not None and node.host_key_bits < 3072:
            yield _found("HS-20", node.name, f"RSA of {node.host_key_bits} bits")
        options = node.ssh_options
        off = [f"StrictHostKeyChecking {options['stricthostkeychecking']}"] if _is_off(options) else []
        off += ["UserKnownHostsFile /dev/null"] if "/dev/null" in options.get("userknownhostsfile", "").split() else []
        if off:
            yield _found("HS-21", node.name, " and ".join(off), path=facts.ssh_config)
        weak = [
            name
            for name in _ALGORITHMS
            if not options.get(name, "").startswith("-") and _WEAK.search(options.get(name, ""))
        ]
        if weak:
            detail = ", ".join(f"{name} {options[name]}" for name in weak)
            yield _found("HS-22", node.name, detail, options=" and ".join(weak), path=facts.ssh_config)
        if node.host_key:
            machines.setdefault(node.host_key, {}).setdefault(node.host, node.name)
    for names in (list(hosts.values()) for hosts in machines.values() if len(hosts) > 1):
        yield _found("HS-23", ",".join(names), f"{len(names)} hosts show one key")


def _is_off(options: Mapping[str, str]) -> bool:
    return options.get("stricthostkeychecking", "").lower() in ("no", "off")


# ----- confinement and limits


def _limits(facts: SecurityFacts) -> Iterator[SecurityFinding]:
    settings, path = facts.settings, facts.config_file
    if settings is None or not facts.is_shared:
        return
    if settings.allow_uid_below == 0:
        yield _found("HS-16", "allow_uid_below", "it is 0", path=path)
    if missing := sorted(set(settings.default_confine) - set(settings.confine)):
        yield _found("HS-25", "confine", f"it lacks {', '.join(missing)}", path=path)
    if settings.max_processes == 0:
        yield _found("HS-26", "max_processes", "it is 0", path=path)
    if settings.request_rate == 0:
        yield _found("HS-33", "request_rate", "it is 0", path=path)
    if settings.max_submit_jobs is not None and settings.max_submit_jobs >= settings.max_jobs:
        detail = f"it is {settings.max_submit_jobs}, and max_jobs is {settings.max_jobs}"
        yield _found("HS-32", "max_submit_jobs", detail, path=path)
    for account in settings.accounts:
        if not account.is_limited:
            yield _found("HS-31", account.name, "neither it nor an account above it has a limit", path=path)
        for qos in set(account.qos) & set(settings.preempting_qos) if account.is_open else ():
            yield _found("HS-30", qos, f"the account {account.name} of all users has it", path=path)
    for user in settings.unknown_in_roles:
        yield _found("HS-34", user, "this machine has no such account", path=path)
    if not settings.hides:
        yield _found("HS-35", "[privacy]", "hide is empty", path=path)


def _confinement(facts: SecurityFacts) -> Iterator[SecurityFinding]:
    for node in facts.nodes if facts.is_shared else ():
        if node.not_enforced:
            yield _found("HS-24", node.name, "; ".join(f"{what}: {why}" for what, why in node.not_enforced))


# ----- kernel and versions

KERNEL_RULES = {  # sysctl: the rule, and the least good value
    "fs.protected_symlinks": ("HS-40", 1),
    "fs.protected_hardlinks": ("HS-41", 1),
    "fs.protected_fifos": ("HS-42", 1),
    "fs.protected_regular": ("HS-43", 1),
    "kernel.yama.ptrace_scope": ("HS-44", 1),
}
USER_NAMESPACES = "user.max_user_namespaces"


def _kernel(facts: SecurityFacts) -> Iterator[SecurityFinding]:
    if not facts.is_shared:  # the settings of the machine are its admin's
        return
    for at, values in (("the head", facts.kernel), *((node.name, node.kernel) for node in facts.nodes)):
        for name, (rule, least) in KERNEL_RULES.items():
            if name in values and values[name] < least:
                yield _found(rule, at, f"{name} is {values[name]}")
    if facts.proc_is_hidden is False:
        yield _found("HS-45", "the head", "/proc is mounted without hidepid")
    if facts.kernel.get(USER_NAMESPACES, 0) > 0:
        yield _found("HS-46", "the head", f"{USER_NAMESPACES} is {facts.kernel[USER_NAMESPACES]}")


def _versions(facts: SecurityFacts) -> Iterator[SecurityFinding]:
    version = tuple(int(part) for part in re.findall(r"\d+", facts.paramiko)[:2])
    if version and version < (3, 4):
        yield _found("HS-50", "paramiko", f"version {facts.paramiko}")
    for at, text in (("the head", facts.openssh), *((node.name, node.openssh) for node in facts.nodes)):
        if known := openssh_faults(text):
            yield _found("HS-51", at, f"{text}: {', '.join(known)}")
    for package, installed, ids, corrected in facts.advisories:
        upgrade = f"{package}>={corrected}" if corrected else package
        yield _found("HS-52", package, f"version {installed}: {ids}", upgrade=upgrade)


class _SshFault(NamedTuple):
    """A vulnerability of OpenSSH before `corrected`.

    `backports`: the first corrected revision of a distribution.
    """

    cve: str
    first: tuple[int, int]
    corrected: tuple[int, int]
    backports: Mapping[tuple[str, str], tuple[int, ...]]


_FAULTS = (
    _SshFault("CVE-2023-48795", (0, 0), (9, 6), {
        ("9.2p1", "Debian"): (2, 12, 2), ("8.4p1", "Debian"): (5, 11, 3), ("8.2p1", "Ubuntu"): (4, 0, 10),
        ("8.9p1", "Ubuntu"): (3, 0, 5), ("9.0p1", "Ubuntu"): (1, 8, 6), ("9.3p1", "Ubuntu"): (1, 3, 1),
    }),
    _SshFault("CVE-2024-6387", (8, 5), (9, 8), {
        ("9.2p1", "Debian"): (2, 12, 3), ("8.9p1", "Ubuntu"): (3, 0, 10), ("9.3p1", "Ubuntu"): (1, 3, 6),
        ("9.6p1", "Ubuntu"): (3, 13, 3),
    }),
)  # fmt: skip


def openssh_faults(text: str) -> list[str]:
    """Return the known vulnerabilities of an OpenSSH, from the text of ``ssh -V``."""
    match = re.match(r"OpenSSH_(\d+)\.(\d+)(p\d+)?(?:\s+(Debian|Ubuntu)-(\S+?)(?:,|\s|$))?", text)
    if match is None:
        return []
    version = int(match[1]), int(match[2])
    release = f"{match[1]}.{match[2]}{match[3] or ''}", match[4] or ""
    # 3ubuntu0.13 is revision 3, 0.13; 2+deb12u3 is 2, 12.3.
    revision = tuple(int(number) for number in re.findall(r"\d+", match[5] or ""))
    return [
        fault.cve
        for fault in _FAULTS
        if fault.first <= version < fault.corrected
        and not (release in fault.backports and revision >= fault.backports[release])
    ]


# ----- gateway, tokens, audit log

SOON_S = 21 * DAY_S
LATE_S = 600.0  # a record that is not signed after so long
_LEAST_BITS = {"RSA": 2048, "DSA": 1 << 30, "EC": 256}


def _gateway(facts: SecurityFacts) -> Iterator[SecurityFinding]:
    shown = facts.certificate
    if shown is not None:
        left_s = shown.not_after_s - facts.now_s
        if left_s <= 0 or shown.not_before_s > facts.now_s:
            when = "it has expired" if left_s <= 0 else "it is not valid yet"
            yield _found("HS-60", shown.path, when)
        elif left_s < SOON_S:
            yield _found("HS-61", shown.path, f"it expires in {left_s / DAY_S:.0f} days")
        kind, bits = shown.key
        if bits < _LEAST_BITS.get(kind, 0) or shown.signature_hash in ("sha1", "md5"):
            yield _found(
                "HS-63", shown.path, f"{kind} of {bits} bits, signed with {shown.signature_hash or 'its own hash'}"
            )
        if facts.is_shared and not shown.own_account:
            yield _found("HS-64", "gateway", "it runs as the controller does", path=facts.config_file)
        if facts.settings is not None and facts.settings.gateway_rate == 0:
            yield _found("HS-65", "gateway", "rate is 0", path=facts.config_file)
    if facts.settings is not None and facts.settings.token_max_age_s > YEAR_S:
        detail = f"token_max_age_s is {facts.settings.token_max_age_s / DAY_S:.0f} days"
        yield _found("HS-73", "token_max_age_s", detail, path=facts.config_file)


# Providers of the public: who has an account there is not known to the site.
_PUBLIC_PROVIDERS = frozenset(
    ("accounts.google.com", "appleid.apple.com", "gitlab.com", "orcid.org", "cilogon.org", "www.facebook.com")
    + ("id.twitch.tv", "www.linkedin.com", "api.login.yahoo.com", "www.paypal.com", "login.salesforce.com")
    + ("token.actions.githubusercontent.com", "oauth.telegram.org", "account.apple.com", "slack.com")
)
_PUBLIC_TENANT = "9188040d-6c67-4c5b-b112-36a304b66dad"  # Microsoft's personal accounts
# Standard claims of OpenID Connect Core, 5.1, that a user sets as in a profile.
_CHOSEN_CLAIMS = frozenset(
    ("name", "given_name", "family_name", "middle_name", "nickname", "profile")
    + ("picture", "website", "phone_number", "locale", "zoneinfo")
)


def _oidc(facts: SecurityFacts) -> Iterator[SecurityFinding]:
    oidc = facts.settings.oidc if facts.settings is not None else None
    if oidc is None:
        return
    at, path = "[gateway.oidc]", facts.config_file
    is_public = urlsplit(oidc.issuer).hostname in _PUBLIC_PROVIDERS or _PUBLIC_TENANT in oidc.issuer
    if is_public and oidc.user_claim != "sub" and not (oidc.user_claim == "email" and oidc.user_domain):
        yield _found("HS-67", at, f"issuer is {oidc.issuer!r}, user_claim is {oidc.user_claim!r}", path=path)
    if oidc.user_claim in _CHOSEN_CLAIMS:
        yield _found("HS-68", at, f"user_claim is {oidc.user_claim!r}", path=path)
    elif oidc.user_claim == "preferred_username":
        yield _found("HS-69", at, "the provider decides who may change it", path=path)
    if "admin" in oidc.scopes:
        yield _found("HS-74", at, f"scope is {','.join(oidc.scopes)!r}", path=path)
    if not oidc.has_secret:
        yield _found("HS-75", at, "client_secret is empty", path=path)


def _tokens(facts: SecurityFacts) -> Iterator[SecurityFinding]:
    for token in facts.tokens:
        valid_s = token.expires_at_s - token.created_at_s
        whose = f"of {token.user}, scopes {','.join(token.scopes)}"
        if valid_s > YEAR_S:
            yield _found("HS-70", token.id, f"{whose}, valid for {valid_s / DAY_S:.0f} days")
        elif "admin" in token.scopes and valid_s > 90 * DAY_S:
            yield _found("HS-72", token.id, f"{whose}, valid for {valid_s / DAY_S:.0f} days")
        if facts.now_s - token.created_at_s > YEAR_S:
            yield _found("HS-71", token.id, f"{whose}, {(facts.now_s - token.created_at_s) / DAY_S:.0f} days old")


def _audit(facts: SecurityFacts) -> Iterator[SecurityFinding]:
    settings, path = facts.settings, facts.config_file
    if settings is None:
        return
    if (
        facts.unsigned_since_s is not None
        and facts.now_s - facts.unsigned_since_s > LATE_S + 2 * settings.audit_sign_every_s
    ):
        detail = f"its first record that is not signed is {(facts.now_s - facts.unsigned_since_s) / 60:.0f} min old"
        yield _found("HS-80", "audit log", detail, path=facts.log_file or path)
    if settings.audit_sign_every_s > 3600:
        yield _found("HS-83", "sign_every_s", f"it is {settings.audit_sign_every_s:.0f} s", path=path)
    if facts.heads_beside_database:
        if not settings.audit_syslog:
            yield _found(
                "HS-81", "[audit]", "syslog is false, and heads is on the file system of the database", path=path
            )
        else:
            yield _found("HS-82", "[audit]", "they also go to the system's log", path=path)


# fmt: off
_JUDGES = (
    _files, _keys, _node_policies, _ssh, _limits, _confinement, _kernel, _versions, _gateway, _oidc, _tokens, _audit,
)
# fmt: on
