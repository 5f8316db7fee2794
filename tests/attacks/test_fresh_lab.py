"""Four machines that follow docs/lab.md have no findings; faults planted there are named.

The machines share this one's kernel, so what `sysctl` would set is left out, and findings about the kernel are compared with
/proc/sys.
"""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from base64 import urlsafe_b64decode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from machines import Machine, can_make_machines, machines
from waiting import wait_until

from hpcsched.doctor.security import KERNEL_RULES, RULES, Severity

ROOT = Path(__file__).parents[2]
CI = os.environ.get("CI") == "true"
pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or (not CI and not can_make_machines()), reason="NOT TESTED: needs root, namespaces and sshd"
)

USERS = {"ann": 2001, "ben": 2002, "cho": 2003}
NODES = ("gpu1", "gpu2", "old")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", (ROOT / "docs/lab.md").read_text(), re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^([#$]) (.*)\n((?:(?![#$] ).*\n)*)", re.MULTILINE)
# What the machines of the test cannot do, and what the page shows of another day.
NOT_RUN = ("printf 'fs.protected", "echo -kernel", "sysctl", "hctl story 7")
SERVED = "systemctl enable --now hpcsched-gateway"
INFO = {rule.id for rule in RULES.values() if rule.severity is Severity.INFO}


class Lab:
    """The four machines, and the commands of the page so far."""

    def __init__(self, found: dict[str, Machine]) -> None:
        self.machines, self.head = found, found["head"]
        self.typed: list[str] = []

    def prepare(self) -> None:
        """Do what the page takes for granted: accounts, root's logins to nodes, the program."""
        for machine in self.machines.values():
            machine.run(";".join(f"useradd -m -u {uid} -s /bin/bash {user}" for user, uid in USERS.items()))
        self.head.run("ssh-keygen -q -t ed25519 -N '' -f ~/.ssh/id_ed25519")
        key = self.head.run("cat ~/.ssh/id_ed25519.pub").stdout
        for name in NODES:
            public = self.machines[name].run("cat /etc/ssh/ssh_host_ed25519_key.pub").stdout
            self.machines[name].run("cat > ~/.ssh/authorized_keys", given=key)
            self.head.run("cat >> ~/.ssh/known_hosts", given=f"{name}.lab {public}")
        for user in USERS:
            self.head.run(f"install -d -m 700 -o {user} /srv/{user}")
        code = "from pathlib import Path; from other_user import installation; installation(Path('/opt/hpcsched'))"
        path = ":".join(str(ROOT / part) for part in ("", "tests", "workers"))
        made = self.head.run(f'PYTHONPATH={path} {sys.executable} -c "{code}"', check=False)
        if made.returncode:
            pytest.skip(f"NOT TESTED: {made.stdout}{made.stderr}")

    def follow(self, language: str, text: str) -> None:
        """Do what a block of the page says."""
        if language == "toml":
            path = re.fullmatch(r"# (/etc/hpcsched/conf\.d/\w+\.toml)\n", text.splitlines(keepends=True)[0])
            assert path is not None, text
            self.head.run(f"mkdir -p /etc/hpcsched/conf.d; cat > {path[1]}", given=text)
        if language == "console":
            commands = [match for match in COMMAND.findall(text) if not match[1].startswith(NOT_RUN)]
            adding = [line for _, line, _ in commands if line.startswith("hpcsched node add")]
            for prompt, line, shown in commands:
                if [line] == adding[:1]:
                    with ThreadPoolExecutor() as pool:
                        list(pool.map(self.add_node, adding))
                elif line not in adding:
                    self.type("root" if prompt == "#" else "cho", line, shown)

    def add_node(self, line: str) -> None:
        """Add a node at a terminal, at which the host key is confirmed."""
        ours, theirs = pty.openpty()
        os.write(ours, b"y\n")
        words = self.head.words(["sh", "-c", line])
        done = subprocess.run(words, stdin=theirs, capture_output=True, text=True)
        os.close(ours)
        os.close(theirs)
        assert done.returncode == 0, done.stdout + done.stderr
        self.typed.append(line)

    def type(self, user: str, line: str, shown: str) -> None:
        if line == SERVED:  # as the unit does
            words = self.head.words(["setpriv", "--reuid=hpcsched-gateway", "--regid=hpcsched-gateway", "--init-groups",
                                     "hpcsched", "gateway"])  # fmt: skip
            server = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
            assert server.stderr is not None
            assert "ready at https://0.0.0.0:6820" in server.stderr.readline()
            return
        ours = line.replace("sleep 30", "sleep 600")
        folder = "" if user == "root" else f"cd /srv/{user}; "
        done = self.head.run(folder + ours, user, check=False)
        if line == "hctl security":
            return
        fails = "error:" in shown
        assert (done.returncode != 0) == fails, f"{line}\n{done.stdout}{done.stderr}"
        if fails:
            assert " ".join(done.stderr.split()) == " ".join(shown.split())
        self.typed.append(line)

    def report(self) -> tuple[set[tuple[str, str]], list[str]]:
        """Return (id, object) of the faults, and what was not checked."""
        done = self.head.run("hctl security --json", check=False)
        answer = json.loads(done.stdout)
        assert done.returncode == (1 if answer["faults"] else 2 if answer["not_checked"] else 0)
        found = [(one["id"], one["object"]) for one in answer["findings"] if one["severity"] != Severity.INFO]
        assert len(found) == answer["faults"]
        return set(found), answer["not_checked"]

    def kernel_faults(self) -> set[tuple[str, str]]:
        places = ("the head", *NODES)
        return {(rule, at) for name, (rule, least) in KERNEL_RULES.items() if value(name) < least for at in places}


def value(sysctl: str) -> int:
    try:
        return int(Path("/proc/sys", sysctl.replace(".", "/")).read_text())
    except OSError:
        return 9


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with machines(("head", *NODES)) as found:
        lab = Lab(found)
        lab.prepare()
        for language, text in BLOCKS:
            lab.follow(language, text)
        yield lab


def test_f6_a_lab_that_follows_the_guide_has_no_findings(lab: Lab) -> None:
    assert len(lab.typed) >= 25
    assert lab.report() == (lab.kernel_faults(), [])


SETTINGS = """
[controller]
allow_uid_below = 0
confine = ["cpus"]
max_processes = 0
request_rate = 0
seal_key = "/var/lib/hpcsched/seal.key"
[scheduler]
max_jobs = 1000
max_submit_jobs = 1000
[roles]
admins = ["nosuchuser"]
[audit]
syslog = false
sign_every_s = 86400
[gateway]
token_max_age_s = "3000d"
[accounts.open]
users = ["*"]
qos = ["normal", "urgent"]
"""
SSH_CONFIG = "Host gpu1.lab\\n  StrictHostKeyChecking no\\nHost gpu2.lab\\n  Ciphers +aes128-cbc\\n"
TOKEN = "the token that the command prints"
# Commands of root on the head; findings that they lead to. They leave a configuration that can be read.
PLANTED: dict[str, tuple[tuple[str, str], ...]] = {
    "hctl token create --expires=2000d": (("HS-70", TOKEN),),
    "hctl token create --scope=admin --expires=200d": (("HS-72", TOKEN),),
    "touch -d '400 days ago' /etc/hpcsched/id_ed25519": (("HS-12", "/etc/hpcsched/id_ed25519"),),
    "chmod 644 /etc/hpcsched/id_ed25519": (("HS-05", "/etc/hpcsched/id_ed25519"),),
    "cp -p /etc/hpcsched/seal.key /var/lib/hpcsched; chmod 644 /var/lib/hpcsched/seal.key": (
        ("HS-06", "/var/lib/hpcsched/seal.key"),
        ("HS-07", "/var/lib/hpcsched/seal.key"),
    ),
    "chmod 755 /var/lib/hpcsched": (("HS-08", "/var/lib/hpcsched"),),
    "chmod 644 /var/lib/hpcsched/hpcsched.db": (("HS-09", "/var/lib/hpcsched/hpcsched.db"),),
    "chown ann /var/lib/hpcsched/hpcsched.db-wal": (("HS-10", "/var/lib/hpcsched/hpcsched.db-wal"),),
    "chmod 666 /var/lib/hpcsched/hpcschedd.log": (("HS-14", "/var/lib/hpcsched/hpcschedd.log"),),
    "chown ann /var/lib/hpcsched/token-keys.json": (("HS-19", "/var/lib/hpcsched/token-keys.json"),),
    "chmod 644 /etc/hpcsched/gateway.key": (("HS-62", "/etc/hpcsched/gateway.key"),),
    "openssl req -x509 -newkey rsa:1024 -nodes -days 5 -subj /CN=head.lab -keyout k -out /etc/hpcsched/gateway.crt": (
        ("HS-61", "/etc/hpcsched/gateway.crt"),
        ("HS-63", "/etc/hpcsched/gateway.crt"),
    ),
    "sed -i 's/^user = .*/user = \"hpcsched\"/' /etc/hpcsched/conf.d/gateway.toml": (("HS-64", "gateway"),),
    f"install -d /var/lib/hpcsched/.ssh; printf '{SSH_CONFIG}' > /var/lib/hpcsched/.ssh/config": (
        ("HS-21", "gpu1"),
        ("HS-22", "gpu2"),
    ),
    "ssh-keygen -q -t rsa -b 2048 -N '' -f weak; "
    'sed -i "s|^host_key = .*|host_key = \\"$(cut -d" " -f1,2 weak.pub)\\"|" /etc/hpcsched/nodes.d/old.toml': (
        ("HS-20", "old"),
    ),
    'sed -i "s|^host_key = .*|$(grep ^host_key /etc/hpcsched/nodes.d/gpu1.toml)|" /etc/hpcsched/nodes.d/gpu2.toml': (
        ("HS-23", "gpu1,gpu2"),
    ),
    f"cat > /etc/hpcsched/conf.d/zz.toml << '.'{SETTINGS}.\n": (
        ("HS-16", "allow_uid_below"), ("HS-25", "confine"), ("HS-26", "max_processes"), ("HS-30", "urgent"),
        ("HS-31", "open"), ("HS-32", "max_submit_jobs"), ("HS-33", "request_rate"), ("HS-34", "nosuchuser"),
        ("HS-73", "token_max_age_s"), ("HS-81", "[audit]"), ("HS-83", "sign_every_s"),
    ),
}  # fmt: skip
# The controller and the commands refuse these, and so the rest is not looked at.
REFUSED = {
    "chmod 666 /etc/hpcsched/conf.d/accounts.toml": ("HS-01", "/etc/hpcsched/conf.d/accounts.toml"),
    "chown ann /etc/hpcsched/nodes.d/gpu1.toml": ("HS-02", "/etc/hpcsched/nodes.d/gpu1.toml"),
    "chmod 777 /etc": ("HS-03", "/etc"),
    "chown ann /var/lib": ("HS-04", "/var/lib"),
    "chmod 777 /run/hpcsched": ("HS-11", "/run/hpcsched"),
}
LONG_TOKENS = '[gateway]\ntoken_max_age_s = "3000d"\n'
# Commands of root on a node.
PLAIN_KEY = "sed -i 's/^restrict,command=.*\" \\(ssh-ed25519\\)/\\1/' ~/.ssh/authorized_keys"
POLICY = "install -d /etc/hpcsched; echo '{\"allow_root\": true}' > /etc/hpcsched/node.json"
ON_NODES = {
    ("gpu1", PLAIN_KEY): ("HS-13", "gpu1"),
    ("gpu1", POLICY): ("HS-17", "gpu1"),
    ("gpu2", f"{POLICY}; chmod 666 /etc/hpcsched/node.json"): ("HS-18", "gpu2"),
    ("old", "mount -t tmpfs none /proc/bus"): ("HS-24", "old"),  # a new /proc would show the directory again
}
HANG_UP = "kill $(ps axo pid,args | awk '/[s]shd: root@notty/ {print $1}')"
END_AGENT = "kill $(ps axo pid,args | awk '/hpcnode.* agent / && !/awk/ {print $1}')"


def test_f6_thirty_faults_that_are_planted_in_it_are_named(lab: Lab) -> None:
    """The faults of nodes come first: with the others, the controller does not reconnect."""
    wanted = set(ON_NODES.values())
    for node, command in ON_NODES:
        lab.machines[node].run(command)
    lab.machines["gpu1"].run(HANG_UP)
    lab.machines["old"].run(END_AGENT)
    wait_until(lambda: wanted <= lab.report()[0], what="the faults of the nodes")
    lab.head.run("cat > /etc/hpcsched/conf.d/zz.toml; hctl reconfigure", given=LONG_TOKENS)
    for command, planted in PLANTED.items():
        printed = lab.head.run(command).stdout
        wanted |= {(rule, token_id(printed) if at == TOKEN else at) for rule, at in planted}
    found, _ = lab.report()
    assert (found - lab.kernel_faults()) ^ wanted == set()
    lab.head.run("; ".join(REFUSED))
    assert set(REFUSED.values()) <= lab.report()[0]
    assert len({rule for rule, _ in wanted | set(REFUSED.values())}) >= 30


def token_id(token: str) -> str:
    """Return the id that a printed token has in the list of tokens."""
    payload = token.strip().split(".")[1]
    return str(json.loads(urlsafe_b64decode(payload + "==="))["jti"])
