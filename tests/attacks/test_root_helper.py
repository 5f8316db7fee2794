"""The root helper of a node, asked by an attacker who has the controller's key and database, and so the agent's account."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import os
import pwd
import random
import socket
import struct
import subprocess
import tempfile
import time
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
helper.SOCKET = base + "/run/helper.sock"
helper.main()
"""
KEYS = {name: Ed25519PrivateKey.generate() for name in (ANN, BOB)}
ENV = {"PATH": "/usr/bin:/bin", "LANG": "C"}


def _sha(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


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
        """Return what an honest agent asks for a job of ANN; `marker` is the file that the script makes.

        `changes` are made to the order, those in `signed` to what ANN has signed.
        """
        script = f'#!/bin/sh\necho "$*" > {marker}; id -u >> {marker}\n'
        request = {
            "v": 2, "cluster": "lab", "uid": pwd.getpwnam(ANN).pw_uid, "user": ANN, "request": os.urandom(16).hex(),
            "script": _sha(script), "args": _sha(["x"]), "work_dir": _sha(str(self.work)), "umask": _sha(0o22),
            "environment": _sha(ENV), "files": ["/dev/null", f"{self.work}/slurm-%.out", f"{self.work}/slurm-%.out"],
            "nodes": [], "tasks": [], "steps_s": 0, "attempts": 3, "once": False,
            "issued": int(time.time()), "expires": int(time.time()) + 600,
        }  # fmt: skip
        text = json.dumps(request | changes.pop("signed", {}))
        envelope = {"request": text, "signature": KEYS[key].sign(text.encode()).hex()}
        order = {
            "user": ANN, "job": 1, "attempt": 0, "step": "batch", "script": script, "args": ["x"], "argv": ["x"],
            "env": {**ENV, "SLURM_JOB_ID": "1", helper.SIGNED: json.dumps(envelope)}, "work_dir": str(self.work),
            "files": ["/dev/null", "/dev/null", ""], "truncate": [False, False], "umask": 0o22, "limits": [],
        }  # fmt: skip
        return order | changes

    def step(self, argv: list[str], **changes: Any) -> dict[str, Any]:
        """Return what an honest agent asks for a step that ANN has signed on the head."""
        signed = {"argv": _sha(argv), "args": _sha([])} | changes.pop("signed", {})
        order = self.order(signed=signed, **changes) | {"step": "0", "script": "", "args": [], "argv": argv}
        order["env"]["SLURM_PROCID"] = "0"
        return order

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

    def runs_a_script(self) -> bool:
        try:
            return any((self.base / "state" / "jobs").iterdir())
        except PermissionError:  # another thread connects as the agent just now
            return False

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


def with_env(order: dict[str, Any], **env: str | None) -> dict[str, Any]:
    """Return the order with other variables; None: without that one."""
    changed = {**order["env"], **env}
    return {**order, "env": {name: value for name, value in changed.items() if value is not None}}


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
    assert "signed for other nodes than n1" in node.ask(node.order(signed={"nodes": ["n2"]}))
    assert "its cluster is 'other'" in node.ask(node.order(signed={"cluster": "other"}))
    assert node.made() == []
    assert node.ask(node.order(signed={"nodes": ["n2", "n1"]})) == "status 0"


def test_a6_a_signature_serves_the_first_job_that_it_is_used_for(node: Node) -> None:
    order = node.order()
    assert node.ask(order) == "status 0"
    assert "it has served job 1, and serves no other" in node.ask({**order, "job": 2})
    assert node.ask({**order, "attempt": 1}) == "status 0"


def test_a6_each_task_of_an_array_starts_and_no_other_one(node: Node) -> None:
    order = node.order(signed={"tasks": [[1, 2], [5, 5]]})

    def task(number: str, job: int, array: str = "7") -> str:
        return node.ask({**with_env(order, SLURM_ARRAY_JOB_ID=array, SLURM_ARRAY_TASK_ID=number), "job": job})

    assert [task("1", 7), task("2", 8), task("5", 9)] == ["status 0"] * 3
    assert "started here before" in task("2", 8)
    assert "started here before" in task("2", 10)
    assert "task 3 of the array was not signed" in task("3", 10)
    assert "it has served job 7, and serves no other" in task("5", 9, "9")
    assert "refused" in task("../../5", 9)
    assert "refused" in node.ask(order)


@pytest.mark.parametrize(("once", "later"), [(False, "status 0"), (True, "started here before")])
def test_a6_a_later_attempt_than_was_signed_is_refused(node: Node, once: bool, later: str) -> None:
    order = node.order(signed={"attempts": 2, "once": once})
    assert node.ask(order) == "status 0"
    assert later in node.ask({**order, "attempt": 1})
    assert "attempt 2 was not signed" in node.ask({**order, "attempt": 2})


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
        assert "was started here before" in node.ask(with_env(order, **{helper.SIGNED: other}))
    node.stop()
    node.start()
    assert "was started here before" in node.ask(order)
    assert node.made() == []


def test_a7_signing_again_allows_no_start_that_was_made(node: Node) -> None:
    number = {"request": "ab" * 16}
    assert node.ask(node.order(signed=number)) == "status 0"
    later = node.order(signed=number | {"attempts": 23, "expires": int(time.time()) + 9999})
    assert "was started here before" in node.ask(later)
    assert node.ask({**later, "attempt": 22}) == "status 0"


def test_a7_before_its_time_and_after_it_a_signature_is_refused(node: Node) -> None:
    now_s = int(time.time())
    for signed, why in (
        ({"issued": now_s - 3600, "expires": now_s - 1}, "has expired; renew it on the head: hctl sign 1"),
        ({"issued": now_s + 3600, "expires": now_s + 7200}, "is not valid yet"),
        ({"expires": now_s + 10**9}, "it was signed for longer than"),
        ({"expires": float("nan")}, "refused"),
        ({"expires": "9" * 20}, "refused"),
    ):
        assert why in node.ask(node.order(signed=signed))
    assert node.made() == []


def test_a8_nothing_can_be_added_to_what_was_signed_or_changed_in_it(node: Node) -> None:
    honest = node.order()
    envelope = json.loads(honest["env"][helper.SIGNED])
    text = envelope["request"]
    forged = [
        {**envelope, "request": text + " "},
        {**envelope, "request": text + text},
        {**envelope, "request": text.replace('"attempts": 3', '"attempts": 3, "attempts": 9')},
        {**envelope, "request": text.replace("lab", "lap")},
        {**envelope, "signature": envelope["signature"] + "00"},
        {**envelope, "signature": "00" * 64},
        {**envelope, "signature": ""},
    ]
    texts = [json.dumps(each) for each in forged]
    texts += [json.dumps(envelope) * 2, "", "[]", json.dumps(envelope)[:-1] + f', "request": {json.dumps(text)}}}']
    for each in texts:
        assert "the root helper of this node refused" in node.ask(with_env(honest, **{helper.SIGNED: each}))
    assert "a name occurs twice" in node.ask(json.dumps(honest)[:-1].encode() + b', "user": "games"}')
    assert node.made() == []


@pytest.mark.parametrize(
    "change",
    [{"script": "#!/bin/sh\nid > evil\n"}, {"args": ["y"]}, {"work_dir": "/tmp"}, {"umask": 0}],
    ids=["script", "args", "work_dir", "umask"],
)
def test_a8_another_script_arguments_directory_or_umask_are_refused(node: Node, change: dict[str, Any]) -> None:
    assert f"the {next(iter(change))} is not what was signed" in node.ask({**node.order(), **change})
    assert node.made() == []


@pytest.mark.parametrize(
    "name",
    ["LD_PRELOAD", "BASH_ENV", "PATH", "PYTHONPATH", "OMPI_MCA_plm_rsh_agent", "IFS", "LANG", "HPCSCHED_SIGNED_SALT",
     "SLURM_PROLOG", "SLURM_TASK_EPILOG", "HPCSCHED_TASK_PROLOG", "SLURM_BCAST"],
)  # fmt: skip
def test_a8_variables_that_were_not_signed_are_refused(node: Node, name: str) -> None:
    why = "the environment is not what was signed"
    assert why in node.ask(with_env(node.order(), **{name: "/tmp/evil"}))
    assert why in node.ask(with_env(node.order(), LANG=None))
    assert node.made() == []


def test_a8_files_that_were_not_signed_are_refused(node: Node) -> None:
    victim = node.work / "precious"
    victim.write_text("data\n")
    os.chown(victim, pwd.getpwnam(ANN).pw_uid, -1)
    out = f"{node.work}/slurm-12.out"
    for files in (
        ["/dev/null", str(victim), ""],
        ["/dev/null", out, str(victim)],
        [str(victim), out, ""],
        ["/dev/null", f"{node.work}/slurm-/../precious.out", ""],
        ["/dev/null", out, "", str(victim)],
        ["/dev/null", None, ""],
    ):
        node.ask({**node.order(), "files": files, "truncate": [True] * 3})
        assert victim.read_text() == "data\n"
    for path in list(node.work.iterdir()):
        path.unlink()
    assert node.ask({**node.order(), "files": ["/dev/null", out, ""]}) == "status 0"


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
    assert "it is not signed" in node.ask(with_env(honest, **{helper.SIGNED: None}))
    assert "signature is not that of" in node.ask(node.order(key=BOB))
    (node.base / "etc" / "users" / f"{ANN}.pub").unlink()
    assert f"No such file or directory: '{node.base}/etc/users/{ANN}.pub'" in node.ask(honest)
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
    order = node.order(signed={"steps_s": 60})
    assert node.ask({**order, **step}) == "status 0"
    assert node.ask({**order, **step}) == "status 0"
    assert node.made() == ["step"]
    assert "it has served job 1, and serves no other" in node.ask({**order, **step, "job": 2})
    assert "refused" in node.ask({**order, **step, "user": "root"})
    assert node.ask(order) == "status 0"


def test_d8_steps_of_a_signed_script_end_with_its_last_possible_run(node: Node) -> None:
    step = {"step": "0", "argv": ["/bin/sh", "-c", "id > step"], "script": ""}
    times = {"issued": int(time.time()) - 100, "expires": int(time.time()) - 50}
    assert "has expired" in node.ask({**node.order(signed=times | {"steps_s": 40}), **step})
    assert node.made() == []
    assert node.ask({**node.order(signed=times | {"steps_s": 90}), **step}) == "status 0"


def test_d8_a_step_beside_its_script_needs_no_signature_and_none_after_it(node: Node) -> None:
    script = "#!/bin/sh\nwhile [ ! -e go ]; do sleep 0.01; done\n"
    job = node.order(signed={"script": _sha(script)}) | {"script": script}
    step = {**with_env(job, **{helper.SIGNED: None}), "step": "0", "argv": ["/bin/touch", "go"]}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answer = pool.submit(node.ask, job)
        wait_until(node.runs_a_script, what="the script")
        assert "not signed" in node.ask({**step, "job": 2, "argv": ["/bin/touch", "evil"]})
        assert "not signed" in node.ask({**step, "attempt": 1, "argv": ["/bin/touch", "evil"]})
        assert "refused" in node.ask({**step, "user": BOB, "argv": ["/bin/touch", "evil"]})
        wait_until(lambda: node.ask(step) == "status 0", what="the step")
        assert answer.result() == "status 0"
    assert node.made() == ["go"]
    assert "not signed" in node.ask({**step, "argv": ["/bin/touch", "evil"]})


def test_d8_a_step_that_was_signed_on_the_head_runs_once_for_each_rank(node: Node) -> None:
    step = node.step(["/bin/sh", "-c", "id -u > step$SLURM_PROCID"])
    assert node.ask(step) == "status 0"
    assert node.ask(with_env(step, SLURM_PROCID="1")) == "status 0"
    assert node.made() == ["step0", "step1"]
    assert "rank.1 of job 1.0 was started here before" in node.ask(with_env(step, SLURM_PROCID="1"))
    assert "it has served job 1.0, and serves no other" in node.ask({**step, "step": "1"})
    assert "it has served job 1.0, and serves no other" in node.ask({**step, "job": 2})
    assert "refused" in node.ask({**step, "step": "0/../../x"})
    assert "the argv is not what was signed" in node.ask(node.step(["id"]) | {"argv": ["evil"]})
    assert "environment is not what was signed" in node.ask(with_env(node.step(["id"]), LD_PRELOAD="/tmp/evil"))
    assert "refused" in node.ask({**node.step(["id"]), "step": "batch", "script": "#!/bin/sh\nid > evil\n"})
    assert node.made() == ["step0", "step1"]


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
        assert "Permission denied" in node.ask({**node.order(signed={"files": files}), "files": files})
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
    assert len(Path(helper.__file__).read_text().splitlines()) <= 300


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
    assert not helper.verified(b"\xff" * 32, signature, text)
    for part in (b"", signature[:63], signature + b"\0", bytes(64)):
        assert not helper.verified(public, part, text)
    for part in (b"", public[:31], public + b"\0"):
        assert not helper.verified(part, signature, text)
    # RFC 8032, section 7.1, test 2
    public = bytes.fromhex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c")
    signature = bytes.fromhex(
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )
    assert helper.verified(public, signature, bytes.fromhex("72"))
