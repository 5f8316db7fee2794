"""The root helper of a node, asked by an attacker who has the controller's key and database, and so the agent's account."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import json
import os
import pwd
import random
import socket
import struct
import subprocess
import tempfile
import time
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from waiting import wait_until

from hpcnode import helper

AGENT, ANN, BOB = "daemon", "games", "www-data"  # accounts that every Debian has
PYTHON = "/usr/bin/python3"
START = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("helper", sys.argv[1])
helper = importlib.util.module_from_spec(spec)
spec.loader.exec_module(helper)
base = sys.argv[2]
helper.POLICY, helper.USERS, helper.STATE = base + "/etc/node.json", base + "/etc/users", base + "/state"
helper.JOBS, helper.SOCKET = helper.STATE + "/jobs", base + "/run/helper.sock"
helper.main()
"""
KEYS = {name: Ed25519PrivateKey.generate() for name in (ANN, BOB)}
ENV = {"PATH": "/usr/bin:/bin", "LANG": "C"}


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Node:
    """A node with the helper, and a directory of the attacked user."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.work = base / "work"
        self.policy = {"agent": AGENT, "min_uid": 3, "cluster": "lab", "node": "n1"}
        for folder in ("etc/users", "work"):
            (base / folder).mkdir(parents=True)
        os.chown(self.work, pwd.getpwnam(ANN).pw_uid, -1)
        self.write_policy()
        for name in KEYS:
            self.install_key(name)
        self.start()

    def write_policy(self, **changes: Any) -> None:
        (self.base / "etc" / "node.json").write_text(json.dumps(self.policy | changes))

    def install_key(self, name: str, key: str = "") -> None:
        public = KEYS[key or name].public_key().public_bytes_raw().hex()
        (self.base / "etc" / "users" / f"{name}.pub").write_text(f"hpcsched-ed25519 {public} {name}\n")

    def start(self) -> None:
        with open(self.base / "log", "ab") as log:
            self.process = subprocess.Popen(
                [PYTHON, "-I", "-S", "-c", START, helper.__file__, self.base], stdout=log, stderr=log
            )
        wait_until(lambda: self._answers(), what="the helper")

    def _answers(self) -> bool:
        try:
            self.connect(0).close()
        except OSError:
            return False
        return True

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        (self.base / "run" / "helper.sock").unlink(missing_ok=True)

    def connect(self, uid: int) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(30)
        if uid:
            os.setegid(pwd.getpwnam(AGENT).pw_gid)
            os.seteuid(uid)
        try:
            sock.connect(str(self.base / "run" / "helper.sock"))
        finally:
            if uid:
                os.seteuid(0)
                os.setegid(0)
        return sock

    def order(self, *, marker: str = "ran", key: str = ANN, **changes: Any) -> dict[str, Any]:
        """Return what an honest agent asks for a job of ANN; `marker` is the file that the script makes."""
        script = f'#!/bin/sh\necho "$*" > {marker}; id -u >> {marker}\n'
        request = {
            "v": 1, "cluster": "lab", "uid": pwd.getpwnam(ANN).pw_uid, "user": ANN, "request": os.urandom(8).hex(),
            "script": _sha(script), "args": ["x"], "work_dir": str(self.work), "nodes": [], "steps": False, "starts": 3,
            "env": {name: _sha(value) for name, value in ENV.items()},
            "issued": int(time.time()), "expires": int(time.time()) + 600,
        }  # fmt: skip
        request |= {
            name: value for name, value in changes.items() if name in request and name not in ("user", "args", "script")
        }
        text = json.dumps(request | changes.pop("signed", {}))
        envelope = {"request": text, "signature": KEYS[key].sign(text.encode()).hex()}
        order = {
            "user": ANN, "job": 1, "attempt": 0, "step": "batch", "script": script, "args": ["x"], "argv": ["x"],
            "env": {**ENV, "SLURM_JOB_ID": "1", helper.SIGNED: json.dumps(envelope)}, "work_dir": str(self.work),
            "files": ["/dev/null", "/dev/null", ""], "truncate": [False, False], "umask": 0o22, "limits": [],
        }  # fmt: skip
        return order | {name: value for name, value in changes.items() if name in order}

    def ask(self, order: dict[str, Any] | bytes, uid: int | None = None) -> str:
        """Send an order as the agent does; return how it ended: a status, or the helper's reason."""
        status_read, status_write = os.pipe()
        release_read, release_write = os.pipe()
        data = order if isinstance(order, bytes) else json.dumps(order).encode()
        with self.connect(pwd.getpwnam(AGENT).pw_uid if uid is None else uid) as sock:
            try:
                socket.send_fds(sock, [struct.pack("!I", len(data))], [status_write, release_read])
                sock.sendall(data)
            except OSError:
                pass  # refused before it was read
            os.close(status_write)
            os.close(release_read)
            with contextlib.suppress(BrokenPipeError):
                os.write(release_write, b"x")
            os.close(release_write)
            try:
                answer = sock.recv(4)
            except ConnectionError:
                answer = b""
        with os.fdopen(status_read, "rb") as stream:
            said = stream.read().decode()
        return f"status {struct.unpack('!I', answer)[0]}" if answer and said in ("R", "") else said

    def made(self) -> list[str]:
        return sorted(path.name for path in self.work.iterdir())


@pytest.fixture
def node() -> Iterator[Node]:
    if os.getuid() != 0:
        pytest.skip("NOT TESTED as a plain user: only root can start the helper")
    with tempfile.TemporaryDirectory(prefix="hpc", dir="/run") as directory:
        Path(directory).chmod(0o755)
        made = Node(Path(directory))
        yield made
        assert made.process.poll() is None, "the helper ended"
        made.stop()


def test_what_its_user_has_signed_is_run_as_the_user(node: Node) -> None:
    assert node.ask(node.order()) == "status 0"
    assert (node.work / "ran").read_text().split() == ["x", str(pwd.getpwnam(ANN).pw_uid)]
    assert (node.work / "ran").stat().st_uid == pwd.getpwnam(ANN).pw_uid
    assert list((node.base / "state" / "jobs").iterdir()) == []


def test_a6_a_signature_is_of_no_use_to_another_user_on_another_node_or_cluster(node: Node) -> None:
    assert f"signature is not that of {BOB}" in node.ask(node.order(user=BOB))
    uid = pwd.getpwnam(BOB).pw_uid
    assert "it was signed for uid" in node.ask(node.order(signed={"uid": uid}))
    assert "it was signed for uid" in node.ask(node.order(signed={"user": BOB}))
    assert "signed for other nodes" in node.ask(node.order(nodes=["n2"]))
    assert "signed for cluster 'other'" in node.ask(node.order(cluster="other"))
    assert node.made() == []


def test_a6_a_signature_starts_as_many_attempts_as_were_signed(node: Node) -> None:
    order = node.order(starts=2)
    assert [node.ask({**order, "attempt": attempt}) for attempt in (0, 1)] == ["status 0"] * 2
    assert "started 2 times already" in node.ask({**order, "job": 2})


def test_a7_a_replay_is_refused_now_later_and_after_a_restart(node: Node) -> None:
    order = node.order()
    assert node.ask(order) == "status 0"
    (node.work / "ran").unlink()
    assert "was started here before" in node.ask(order)
    envelope = json.loads(order["env"][helper.SIGNED])
    for other in (
        json.dumps(envelope, indent=1),
        json.dumps({"x": 1, **envelope, "signature": envelope["signature"].upper()}),
    ):
        assert "was started here before" in node.ask({**order, "env": {**order["env"], helper.SIGNED: other}})
    node.stop()
    node.start()
    assert "was started here before" in node.ask(order)
    expired = node.order(issued=int(time.time()) - 3600, expires=int(time.time()) - 1)
    assert "has expired" in node.ask(expired)
    assert "has expired" in node.ask(node.order(issued=int(time.time()) + 3600))
    assert "has expired" in node.ask(node.order(expires=int(time.time()) + 10**9))
    assert node.made() == []


def test_a8_nothing_can_be_added_to_what_was_signed_or_changed_in_it(node: Node) -> None:
    honest = node.order()
    envelope = json.loads(honest["env"][helper.SIGNED])
    text = envelope["request"]
    forged = [
        {**envelope, "request": text + " "},
        {**envelope, "request": text + text},
        {**envelope, "request": text.replace('"starts": 3', '"starts": 3, "starts": 9')},
        {**envelope, "request": text.replace("lab", "lap")},
        {**envelope, "signature": envelope["signature"] + "00"},
        {**envelope, "signature": "00" * 64},
    ]
    texts = [json.dumps(each) for each in forged]
    texts += [json.dumps(envelope) * 2, "", "[]", json.dumps(envelope)[:-1] + f', "request": {json.dumps(text)}}}']
    for each in texts:
        assert "the root helper of this node refused" in node.ask(
            {**honest, "env": {**honest["env"], helper.SIGNED: each}}
        )
    double = json.dumps(text)[1:-1].replace('\\"v\\": 1', '\\"v\\": 1, \\"v\\": 1')
    assert double != text
    assert "a name occurs twice" in node.ask(json.dumps(honest)[:-1].encode() + b', "user": "games"}')
    assert node.made() == []


@pytest.mark.parametrize(
    "change",
    [{"script": "#!/bin/sh\nid > evil\n"}, {"args": ["y"]}, {"work_dir": "/tmp"}],
    ids=["script", "arguments", "directory"],
)
def test_a8_another_script_arguments_or_directory_are_refused(node: Node, change: dict[str, Any]) -> None:
    assert "signed" in node.ask({**node.order(), **change})
    assert node.made() == []


@pytest.mark.parametrize(
    "name", ["LD_PRELOAD", "BASH_ENV", "PATH", "PYTHONPATH", "OMPI_MCA_plm_rsh_agent", "IFS", "LANG"]
)
def test_a8_variables_that_were_not_signed_are_refused(node: Node, name: str) -> None:
    honest = node.order()
    assert f"variable '{name}' is not as it was signed" in node.ask(
        {**honest, "env": {**honest["env"], name: "/tmp/evil"}}
    )
    assert node.made() == []


def test_a8_arguments_of_the_program_are_the_signed_ones(node: Node) -> None:
    node.ask({**node.order(), "argv": ["evil"]})
    assert not node.made() or (node.work / "ran").read_text().split()[0] == "x"


@pytest.mark.parametrize("name", ["root", "nobody", "bin", AGENT, "nosuchuser", "", "games\0", None, 0])
def test_a9_accounts_that_policy_refuses_run_nothing(node: Node, name: Any) -> None:
    if name in ("root", "nobody", "bin", AGENT):
        node.install_key(name, ANN)
        entry = pwd.getpwnam(name)
        order = node.order(signed={"uid": entry.pw_uid, "user": name}, user=name)
    else:
        order = node.order(user=name)
    assert "the root helper of this node refused" in node.ask(order)
    assert node.made() == []


def test_a9_a_list_of_users_is_the_whole_list(node: Node) -> None:
    node.write_policy(users=[BOB])
    assert "does not allow games" in node.ask(node.order())
    node.write_policy(deny_users=[ANN])
    assert "does not allow games" in node.ask(node.order())
    assert node.made() == []


def test_d8_without_a_signature_or_with_another_key_nothing_runs(node: Node) -> None:
    honest = node.order()
    bare = {name: value for name, value in honest["env"].items() if name != helper.SIGNED}
    assert "refused" in node.ask({**honest, "env": bare})
    assert "signature is not that of" in node.ask(node.order(key=BOB))
    (node.base / "etc" / "users" / f"{ANN}.pub").unlink()
    assert "cannot read" in node.ask(honest)
    assert node.made() == []


def test_d8_keys_and_policy_that_others_may_write_are_not_trusted(node: Node) -> None:
    path = node.base / "etc" / "users" / f"{ANN}.pub"
    path.chmod(0o666)
    assert "cannot trust" in node.ask(node.order())
    path.chmod(0o644)
    os.chown(path, pwd.getpwnam(AGENT).pw_uid, -1)
    assert "cannot trust" in node.ask(node.order())
    os.chown(path, 0, -1)
    (node.base / "etc" / "node.json").chmod(0o666)
    node.ask(node.order())
    assert node.made() == []


def test_d8_a_step_needs_its_job_here_or_a_signature_for_steps(node: Node) -> None:
    step = {"step": "0", "argv": ["/bin/sh", "-c", "id > step"], "script": ""}
    assert "the job's script does not run here" in node.ask({**node.order(), **step})
    assert node.made() == []
    assert node.ask({**node.order(steps=True), **step}) == "status 0"
    assert node.made() == ["step"]
    assert "refused" in node.ask({**node.order(steps=True), **step, "user": "root"})


@pytest.mark.parametrize("uid", [65534, 30001])
def test_d8_only_the_agent_s_account_is_listened_to(node: Node, uid: int) -> None:
    (node.base / "run" / "helper.sock").chmod(0o666)
    assert node.ask(node.order(), uid) == ""
    assert node.made() == []


def test_d8_files_are_opened_as_the_user_and_nothing_outside(node: Node) -> None:
    secret = node.base / "secret"
    secret.write_text("root's\n")
    secret.chmod(0o600)
    for files in (
        ["/dev/null", str(secret), ""],
        [str(secret), "/dev/null", ""],
        ["/dev/null", "/etc/cron.d/evil", ""],
    ):
        assert "Permission denied" in node.ask({**node.order(), "files": files})
    assert secret.read_text() == "root's\n"
    assert not os.path.exists("/etc/cron.d/evil")


def test_garbage_does_not_end_the_helper(node: Node) -> None:
    chance, honest = random.Random(7), json.dumps(node.order()).encode()
    for _ in range(60):
        data = bytearray(honest)
        for _ in range(chance.randrange(1, 6)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        node.ask(bytes(data[: chance.choice([len(data), chance.randrange(len(data))])]))
    for data in (b"", b"[" * 100_000, b"{}", b'{"user": {}}', b"\xff" * 100, b'{"user":"games","env":[]}'):
        node.ask(data)
    assert node.ask(node.order(marker="after")) == "status 0"


def test_what_a_task_leaves_behind_is_killed(node: Node) -> None:
    script = "#!/bin/sh\nsetsid sh -c 'trap \"\" TERM HUP; exec sleep 8765432' >/dev/null 2>&1 &\nsleep 0.2\n"
    assert node.ask({**node.order(signed={"script": _sha(script)}), "script": script}) == "status 0"
    assert subprocess.run(["pgrep", "-f", "^sleep 8765432"], capture_output=True).stdout == b""


def test_the_program_has_no_descriptor_of_the_helper(node: Node) -> None:
    script = "#!/bin/sh\nls -l /proc/self/fd > fds\n"
    assert node.ask({**node.order(signed={"script": _sha(script)}), "script": script}) == "status 0"
    assert "pipe" not in (node.work / "fds").read_text()
    assert "socket" not in (node.work / "fds").read_text()


def test_the_helper_is_small() -> None:
    """At most 300 lines of code: docstrings, comments and empty lines are not counted."""
    text = Path(helper.__file__).read_text()
    nodes = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
    ]
    told = {
        line
        for node in nodes
        if ast.get_docstring(node)
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    blank = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {line for token in tokens if token.type not in blank for line in range(token.start[0], token.end[0] + 1)}
    assert len(code - told) <= 300


def test_the_signature_check_agrees_with_another_one() -> None:
    for number in range(40):
        key, text = Ed25519PrivateKey.generate(), os.urandom(number * 7)
        public, signature = key.public_key().public_bytes_raw(), key.sign(text)
        assert helper.verified(public, signature, text)
        at = number % 64
        flipped = signature[:at] + bytes([signature[at] ^ (1 << number % 8)]) + signature[at + 1 :]
        assert not helper.verified(public, flipped, text)
        assert not helper.verified(public, signature, text + b"x")


def test_forms_that_rfc_8032_refuses_are_refused() -> None:
    key, text = Ed25519PrivateKey.generate(), b"text"
    public, signature = key.public_key().public_bytes_raw(), key.sign(b"text")
    order = 2**252 + 27742317777372353535851937790883648493
    s = int.from_bytes(signature[32:], "little")
    assert not helper.verified(public, signature[:32] + (s + order).to_bytes(32, "little"), text)  # malleable
    assert not helper.verified((1).to_bytes(32, "little"), bytes([1]) + bytes(63), text)  # a key of small order
    assert not helper.verified(b"\xff" * 32, signature, text)
    assert not helper.verified(public, b"", text)
    # RFC 8032, section 7.1, test 2
    public = bytes.fromhex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c")
    signature = bytes.fromhex(
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )
    assert helper.verified(public, signature, bytes.fromhex("72"))
