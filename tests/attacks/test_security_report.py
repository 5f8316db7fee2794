"""`hctl security` names each of many faults, planted one by one in an installation, and nothing in one that has none.

The controller's answers are simulated: what it says of tokens, nodes and the audit log, and the kernel's settings. Files, modes,
keys, certificates and configuration are real.
"""

from __future__ import annotations

import datetime
import json
import os
import pwd
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from hpcsched.doctor import security_facts
from hpcsched.doctor.security import RULES, Severity, findings, openssh_faults, table_text
from hpcsched.errors import UnavailableError

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[2]
IS_ROOT = os.geteuid() == 0
DAY_S = 86_400.0
GOOD_KERNEL = {
    "fs/protected_symlinks": 1,
    "fs/protected_hardlinks": 1,
    "fs/protected_fifos": 1,
    "fs/protected_regular": 2,
    "kernel/yama/ptrace_scope": 1,
}
GOOD_SSH = "OpenSSH_9.8p1"


def rsa_key(bits: int) -> str:
    public = rsa.generate_private_key(public_exponent=65537, key_size=bits).public_key()
    return public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


class Installation:
    """A copy of a fresh installation with two nodes, and what its controller says."""

    def __init__(self, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.base, self.top, self.state = base, base / "config", base / "config" / "state"
        self.proc = base / "proc"
        self.patch = monkeypatch
        self.environ = os.environ | {"HPCSCHED_CONFIG": str(self.top), "HOME": str(base)}
        self.now_s = time.time()
        self.is_down = False
        self.pid = os.getpid()
        self.tokens: list[dict[str, Any]] = []
        self.records: list[dict[str, Any]] = []
        said = {"forced_command": True, "kernel": {"fs.protected_symlinks": 1}, "openssh": GOOD_SSH, "policy": {}}
        self.nodes: list[dict[str, Any]] = [{"name": name, "facts": {"security": dict(said)}} for name in ("n1", "n2")]
        for name, value in GOOD_KERNEL.items():
            (self.proc / "sys" / name).parent.mkdir(parents=True, exist_ok=True)
            (self.proc / "sys" / name).write_text(f"{value}\n")
        monkeypatch.setattr(security_facts.client, "call", self.call)
        monkeypatch.setattr(security_facts, "_output", lambda argv, _limit_s: GOOD_SSH if argv[0] == "ssh" else "")
        for variable in ("HPCSCHED_CONFIG", "HOME"):
            monkeypatch.setenv(variable, self.environ[variable])

    def call(self, _method: str, path: str, **_options: object) -> dict[str, Any]:
        if self.is_down:
            raise UnavailableError("the controller does not answer")
        if path == "/v1/ping":
            return {"pid": self.pid}
        kind = path.removeprefix("/v1/").split("?")[0]
        if kind == "audit":
            return {"records": self.records}
        return {"tokens": self.tokens, "nodes": self.nodes}

    def said(self, name: str, value: object) -> None:
        """Have the agent of n1 say something else."""
        self.nodes[0]["facts"]["security"][name] = value

    def add(self, text: str) -> None:
        (self.top / "conf.d").mkdir(exist_ok=True, mode=0o755)
        path = self.top / "conf.d" / "more.toml"
        path.write_text(text)
        path.chmod(0o644)

    def node(self, name: str, key: str, host: str = "192.0.2.1") -> None:
        path = self.top / "nodes.d" / f"{name}.toml"
        path.write_text(f'host = "{host}"\nhost_key = "{key}"\ncpus = 1\nmemory = "1G"\n')
        path.chmod(0o644)

    def token(self, created_days: float, valid_days: float, scope: str = "read") -> None:
        created_s = self.now_s - created_days * DAY_S
        times = {"created_at_s": created_s, "expires_at_s": created_s + valid_days * DAY_S, "revoked_at_s": 0.0}
        self.tokens.append({"id": "t1", "user": "ann", "scopes": [scope], **times})

    def certificate(self, days: tuple[float, float] = (-1, 90), key: Any = None, more: str = "") -> None:
        key = key or ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([])
        begin, end = (datetime.datetime.fromtimestamp(self.now_s + day * DAY_S, datetime.UTC) for day in days)
        shown = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        shown = shown.serial_number(1).not_valid_before(begin).not_valid_after(end)
        (self.base / "tls.crt").write_bytes(shown.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        (self.base / "tls.key").touch(mode=0o600)
        self.add(
            f'[gateway]\nuser = "nobody"\ncertificate = "{self.base}/tls.crt"\nkey = "{self.base}/tls.key"\n{more}'
        )

    def look(self) -> tuple[set[str], list[str]]:
        """Return the ids of the faults, and what was not checked."""
        facts, looking = security_facts.look(self.environ, self.now_s, self.proc)
        return {each.rule.id for each in findings(facts) if each.rule.severity is not Severity.INFO}, looking.unseen


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("fresh")
    environ = os.environ | {"HPCSCHED_CONFIG": str(base / "config"), "HOME": str(base)}
    subprocess.run([BIN / "hpcsched", "init"], env=environ, check=True, capture_output=True)
    if IS_ROOT:  # as init --user leaves it, which a Python in root's home cannot run
        top, daemon = base / "config", pwd.getpwnam("daemon")
        text = (top / "hpcsched.toml").read_text()
        assert '#user = ""' in text
        (top / "hpcsched.toml").write_text(text.replace('#user = ""', 'user = "daemon"', 1))
        for path in (top / "id_ed25519", top / "seal.key", top / "state", *(top / "state").iterdir()):
            os.chown(path, daemon.pw_uid, daemon.pw_gid)
    return base


@pytest.fixture
def made(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installation]:
    tmp_path.chmod(0o755)
    shutil.rmtree(tmp_path)
    subprocess.run(["cp", "-a", fresh, tmp_path], check=True)
    found = Installation(tmp_path, monkeypatch)
    (found.state / "run").mkdir(exist_ok=True, mode=0o755)
    (found.state / "hpcschedd.log").touch(mode=0o600)
    for path in (found.state / "run", found.state / "hpcschedd.log"):
        os.chown(path, found.state.stat().st_uid, found.state.stat().st_gid)
    for name in ("n1", "n2"):
        key = ec.generate_private_key(ec.SECP256R1()).public_key()
        text = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
        found.node(name, text)
    if not IS_ROOT:
        yield found
        return
    with subprocess.Popen(["sleep", "600"], user=found.state.stat().st_uid) as daemon:
        found.pid = daemon.pid
        yield found
        daemon.kill()


def chmod(name: str, mode: int) -> Callable[[Installation], None]:
    return lambda made: (made.base / name).chmod(mode)


def chown(name: str) -> Callable[[Installation], None]:
    return lambda made: os.chown(made.base / name, 30001, 30001)


def setting(text: str) -> Callable[[Installation], None]:
    return lambda made: made.add(text)


def kernel(name: str) -> Callable[[Installation], None]:
    def plant(made: Installation) -> None:
        (made.proc / "sys" / name).write_text("0\n")

    return plant


def old_launch_key(made: Installation) -> None:
    os.utime(made.top / "id_ed25519", (0, made.now_s - 400 * DAY_S))


def seal_key_inside(made: Installation) -> None:
    shutil.move(made.top / "seal.key", made.state / "seal.key")
    made.add('[controller]\nseal_key = "state/seal.key"\n')


def ssh_config(text: str) -> Callable[[Installation], None]:
    def plant(made: Installation) -> None:
        path = made.base / "ssh_config"
        path.write_text(f"Host 192.0.2.*\n  {text}\n")
        path.chmod(0o644)
        made.add(f'[controller]\nssh_config = "{path}"\n')

    return plant


def same_keys(made: Installation) -> None:
    key = rsa_key(3072)
    made.node("n1", key)
    made.node("n2", key, "192.0.2.2")


def lacks_memory(made: Installation) -> None:
    made.nodes[0] |= {
        "not_enforced": ["memory"],
        "abilities": [{"word": "memory", "can": False, "why_not": "no cgroup"}],
    }


def expired(made: Installation) -> None:
    made.certificate((-90, -1))


def weak_tls(made: Installation) -> None:
    made.certificate(key=rsa.generate_private_key(public_exponent=65537, key_size=1024))


def open_tls_key(made: Installation) -> None:
    made.certificate()
    (made.base / "tls.key").chmod(0o644)


def open_gateway(setting: str, mode: int, oidc: bool = True) -> Callable[[Installation], None]:
    """Return what gives the gateway a file that others can use."""

    def plant(made: Installation) -> None:
        section = (
            'url = "https://hpc.example.org"\n[gateway.oidc]\nissuer = "https://login.example.org"\nclient_id = "lab"\n'
            if oidc
            else ""
        )
        (made.base / "folder").mkdir()
        path = made.base / "folder" / "file"
        path.touch()
        path.chmod(mode & 0o777)
        path.parent.chmod(0o777 if mode & 0o1000 else 0o755)
        made.certificate(more=f'{section}{setting} = "{path}"\n')

    return plant


def login(
    issuer: str = "https://login.example.org/realms/lab", secret: bool = True, **more: str
) -> Callable[[Installation], None]:
    """Return what lets users log in at a provider."""

    def plant(made: Installation) -> None:
        path = made.base / "secret"
        path.touch(mode=0o600)
        words = {"issuer": issuer, "client_id": "lab", **({"client_secret": str(path)} if secret else {}), **more}
        section = "".join(f"{name} = {json.dumps(value)}\n" for name, value in words.items())
        made.certificate(more=f'url = "https://hpc.example.org"\n[gateway.oidc]\n{section}')

    return plant


def unsigned(made: Installation) -> None:
    made.records.append({"seq": 1, "at_s": made.now_s - 3600})


def no_copy(made: Installation) -> None:
    (made.state / "audit.heads").touch(0o600)
    made.add("[audit]\nsyslog = false\n")


OPEN_QOS = '[qos.a]\n[qos.b]\npreempt = ["a"]\n[accounts.x]\nusers = ["*"]\nqos = ["b"]\nmax_jobs = 1\n'
EVERYWHERE: dict[str, tuple[str, Callable[[Installation], None]]] = {
    "configuration for all": ("HS-01", chmod("config/hpcsched.toml", 0o666)),
    "node files for all": ("HS-01", chmod("config/nodes.d", 0o777)),
    "directory above for all": ("HS-03", chmod(".", 0o777)),
    "launch key for all": ("HS-05", chmod("config/id_ed25519", 0o644)),
    "sealing key for all": ("HS-06", chmod("config/seal.key", 0o644)),
    "sealing key beside the database": ("HS-07", seal_key_inside),
    "state for all": ("HS-08", chmod("config/state", 0o755)),
    "database for all": ("HS-09", chmod("config/state/hpcsched.db", 0o644)),
    "run directory for all": ("HS-11", chmod("config/state/run", 0o777)),
    "log for all": ("HS-14", chmod("config/state/hpcschedd.log", 0o666)),
    "old launch key": ("HS-12", old_launch_key),
    "weak host key": ("HS-20", lambda made: made.node("n1", rsa_key(2048))),
    "no host key checking": ("HS-21", ssh_config("StrictHostKeyChecking no")),
    "no known hosts": ("HS-21", ssh_config("UserKnownHostsFile /dev/null")),
    "weak ciphers": ("HS-22", ssh_config("Ciphers +aes128-cbc")),
    "weak host key algorithms": ("HS-22", ssh_config("HostKeyAlgorithms ssh-rsa")),
    "cloned machines": ("HS-23", same_keys),
    "old paramiko": ("HS-50", lambda made: made.patch.setattr("paramiko.__version__", "3.3.1")),
    "old sshd on a node": ("HS-51", lambda made: made.said("openssh", "OpenSSH_9.5p1")),
    "expired certificate": ("HS-60", expired),
    "certificate that ends soon": ("HS-61", lambda made: made.certificate((-80, 10))),
    "gateway's key for all": ("HS-62", open_tls_key),
    "weak certificate": ("HS-63", weak_tls),
    "gateway's secret for all": ("HS-62", open_gateway("client_secret", 0o644)),
    "CA of users for all": ("HS-66", open_gateway("client_ca", 0o666, oidc=False)),
    "CA of the provider for all": ("HS-66", open_gateway("ca", 0o666)),
    "keys of the provider for all": ("HS-66", open_gateway("keys", 0o666)),
    "directory of the CA of users for all": ("HS-03", open_gateway("client_ca", 0o1644, oidc=False)),
    "no limit of requests of an address": ("HS-65", lambda made: made.certificate(more="rate = 0\n")),
    "provider of the public": ("HS-67", login("https://accounts.google.com")),
    "provider of the public, any e-mail": ("HS-67", login("https://accounts.google.com", user_claim="email")),
    "users choose their names": ("HS-68", login(user_claim="nickname")),
    "admin sessions by a login": ("HS-74", login(scope="read, admin")),
    "no secret at the provider": ("HS-75", login(secret=False)),
    "eternal token": ("HS-70", lambda made: made.token(1, 36_500)),
    "old token": ("HS-71", lambda made: made.token(400, 36_500)),
    "long admin token": ("HS-72", lambda made: made.token(1, 365, "admin")),
    "tokens may be eternal": ("HS-73", setting('[gateway]\ntoken_max_age_s = "3000d"\n')),
    "unsigned audit log": ("HS-80", unsigned),
    "audit log without a copy": ("HS-81", no_copy),
    "audit log signed daily": ("HS-83", setting("[audit]\nsign_every_s = 86400\n")),
}  # fmt: skip
SHARED: dict[str, tuple[str, Callable[[Installation], None]]] = {
    "another owner of the configuration": ("HS-02", chown("config/nodes.d/n1.toml")),
    "another owner above": ("HS-04", chown(".")),
    "another owner of the database": ("HS-10", chown("config/state/hpcsched.db")),
    "another owner of the launch key": ("HS-19", chown("config/id_ed25519")),
    "key without a command": ("HS-13", lambda made: made.said("forced_command", False)),
    "controller as root": ("HS-15", lambda made: setattr(made, "pid", os.getpid())),
    "jobs of root": ("HS-16", setting("[controller]\nallow_uid_below = 0\n")),
    "policy allows root": ("HS-17", lambda made: made.said("policy", {"allow_root": True})),
    "policy is not root's": ("HS-18", lambda made: made.said("policy_error", "others may write it")),
    "unconfined node": ("HS-24", lacks_memory),
    "confinement off": ("HS-25", setting('[controller]\nconfine = ["cpus"]\n')),
    "no process limit": ("HS-26", setting("[controller]\nmax_processes = 0\n")),
    "open preempting QOS": ("HS-30", setting(OPEN_QOS)),
    "account without limits": ("HS-31", setting('[accounts.x]\nusers = ["*"]\n')),
    "no limit of waiting jobs": ("HS-32", setting("[scheduler]\nmax_jobs = 1000\nmax_submit_jobs = 1000\n")),
    "no limit of requests": ("HS-33", setting("[controller]\nrequest_rate = 0\n")),
    "admin without an account": ("HS-34", setting('[roles]\nadmins = ["nosuchuser"]\n')),
    "symbolic links": ("HS-40", kernel("fs/protected_symlinks")),
    "hard links": ("HS-41", kernel("fs/protected_hardlinks")),
    "FIFOs": ("HS-42", kernel("fs/protected_fifos")),
    "regular files": ("HS-43", kernel("fs/protected_regular")),
    "ptrace": ("HS-44", kernel("kernel/yama/ptrace_scope")),
    "kernel of a node": ("HS-40", lambda made: made.said("kernel", {"fs.protected_symlinks": 0})),
}  # fmt: skip
PLANTED = EVERYWHERE | (SHARED if IS_ROOT else {})


def test_f6_a_fresh_installation_has_no_findings(made: Installation) -> None:
    assert made.look() == (set(), [])
    made.is_down = True
    assert made.look() == (set(), ["controller, tokens, nodes and audit log: the controller does not answer"])


@pytest.mark.parametrize("name", PLANTED)
def test_f6_a_planted_fault_is_named(made: Installation, name: str) -> None:
    rule, plant = PLANTED[name]
    plant(made)
    found, unseen = made.look()
    assert rule in found, unseen


def test_f6_a_gateway_that_follows_the_guide_has_no_findings(made: Installation) -> None:
    made.certificate()
    assert made.look() == (set(), [])


@pytest.mark.parametrize(
    "plant",
    [login(), login("https://accounts.google.com", user_claim="email", user_domain="example.org")],
    ids=["own", "public"],
)
def test_f6_a_login_that_follows_the_guide_has_no_findings(
    made: Installation, plant: Callable[[Installation], None]
) -> None:
    plant(made)
    assert made.look() == (set(), [])


def test_thirty_faults_are_planted() -> None:
    assert len(EVERYWHERE) >= 30
    planted = {rule for rule, _ in (EVERYWHERE | SHARED).values()}
    info = {rule.id for rule in RULES.values() if rule.severity is Severity.INFO}
    assert RULES.keys() - planted - info == {"HS-52", "HS-64"}


def test_pip_audit_is_read_and_its_failure_is_no_finding(made: Installation) -> None:
    answer = (
        'Found 1\n{"dependencies": [{"name": "x", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]}]}'
    )
    made.patch.setattr(security_facts.shutil, "which", lambda _name: "/usr/bin/pip-audit")
    assert made.look() == (set(), [])
    made.patch.setattr(
        security_facts, "_output", lambda argv, _limit_s: answer if "--format=json" in argv else GOOD_SSH
    )
    assert made.look() == ({"HS-52"}, [])


def test_d7_a_hostile_node_cannot_stop_the_report(made: Installation) -> None:
    hostile: tuple[object, ...] = (None, [], "x", 10**30, {"a": []})
    for value in hostile:
        for name in ("forced_command", "kernel", "policy", "policy_error", "openssh"):
            made.said(name, value)
        assert "HS-13" not in made.look()[0]


def test_distributions_that_corrected_openssh_are_known() -> None:
    assert openssh_faults("OpenSSH_9.2p1 Debian-2+deb12u10, OpenSSL 3.0.19") == []
    assert openssh_faults("OpenSSH_9.2p1 Debian-2+deb12u1, OpenSSL 3.0") == ["CVE-2023-48795", "CVE-2024-6387"]
    assert openssh_faults("OpenSSH_9.6p1 Ubuntu-3ubuntu13.5, OpenSSL 3.0") == []
    assert openssh_faults("OpenSSH_8.9p1 Ubuntu-3ubuntu0.7, OpenSSL 3") == ["CVE-2024-6387"]
    assert openssh_faults("OpenSSH_8.4p1, LibreSSL") == ["CVE-2023-48795"]
    assert openssh_faults("OpenSSH_10.0p2") == openssh_faults("") == []


def test_the_man_page_has_the_table() -> None:
    text = (ROOT / "man/hpcsched-security.7").read_text().replace("\\-", "-")
    assert table_text() in text


def test_the_command_without_a_controller(made: Installation) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([BIN / "hctl", "security", *words], env=made.environ, capture_output=True, text=True)

    before = {path: stat.S_IMODE(path.stat().st_mode) for path in made.top.rglob("*")}
    done = run()
    assert "not checked: controller" in done.stdout
    assert done.returncode in (1, 2)  # 1: this machine's kernel
    (made.top / "id_ed25519").chmod(0o644)
    done = run("--json")
    assert done.returncode == 1
    assert '"HS-05"' in done.stdout
    (made.top / "id_ed25519").chmod(0o600)
    assert before == {path: stat.S_IMODE(path.stat().st_mode) for path in made.top.rglob("*")}
