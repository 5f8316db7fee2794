"""Between the hosts of a training run nothing is unpickled, and a stranger is not taken for a rank."""

from __future__ import annotations

import ast
import os
import pickle
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from hpctrain.errors import TrainError
from hpctrain.peers import GUEST, HOST, Messages, Proof, Session, prove_as_guest, prove_as_host, tunnel
from hpctrain.values import decode, encode

ROOT = Path(__file__).parents[2]
KEY = b"k" * 32
# Two processes of one program and user on one host, over a socket pair; a name of an exception; and a user's own function, in a
# file of that user, for that user's own job.
PICKLES = {
    "hpcsched/client/functions.py": {"pickle", "cloudpickle"},
    "hpcsched/client/runner.py": {"pickle", "cloudpickle"},
    "workers/hpctrain/checkpoint/writing/buffers.py": {"pickle"},
    "workers/hpctrain/examples/finetune.py": {"pickle"},
}
FORBIDDEN_MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle", "joblib"}
# Lower-case methods of mpi4py and object collectives of torch.distributed pickle.
FORBIDDEN_CALLS = {
    "allgather", "bcast", "gather", "scatter", "alltoall", "allreduce", "isend", "irecv", "sendrecv", "reduce_scatter",
    "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list", "recv_object_list",
}  # fmt: skip
ALLOWED_CALLS = {
    ("workers/hpctrain/elastic/__main__.py", "gather"),  # asyncio
    ("workers/hpcserve/api/answers.py", "gather"),  # the same
    ("workers/hpcserve/api/app.py", "gather"),
    ("workers/hpcserve/api/choices.py", "gather"),
    ("workers/hpcserve/sampling.py", "gather"),  # of a tensor
    ("workers/hpctrain/comm/elastic_group.py", "allreduce"),  # of tensors, by Gloo
    ("hpcsched/model/frozen.py", "exec"),  # of our own text
    ("workers/hpcnode/wire/message.py", "eval"),  # the same
}


def faults_of(path: Path) -> list[str]:
    """Return the uses of pickle, eval or collectives that pickle."""
    name, found = str(path.relative_to(ROOT)), []
    for node in ast.walk(ast.parse(path.read_text())):
        modules: set[str] = set()
        if isinstance(node, ast.Import):
            modules = {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules = {str(node.module).partition(".")[0]}
        found += [
            f"{name}:{node.lineno}: import {one}" for one in modules & FORBIDDEN_MODULES - PICKLES.get(name, set())
        ]
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            is_dist = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") in (
                "dist",
                "distributed",
            )
            is_run = called in ("eval", "exec") and isinstance(node.func, ast.Name)
            is_collective = called in FORBIDDEN_CALLS and not name.startswith("hpcsched/")
            if (is_run or is_collective) and (name, called) not in ALLOWED_CALLS:
                found.append(f"{name}:{node.lineno}: {called}")
            if called == "all_gather_object" and is_dist:
                found.append(f"{name}:{node.lineno}: dist.{called}")
            if called == "load" and getattr(getattr(node.func, "value", None), "id", "") == "torch":
                safe = [
                    word
                    for word in node.keywords
                    if word.arg == "weights_only" and getattr(word.value, "value", 0) is True
                ]
                found += [] if safe else [f"{name}:{node.lineno}: torch.load without weights_only=True"]
    return found


def test_d3_nothing_in_the_tree_unpickles_what_another_host_sent() -> None:
    files = [path for top in ("hpcsched", "workers") for path in (ROOT / top).rglob("*.py")]
    assert len(files) > 300
    assert [fault for path in files for fault in faults_of(path)] == []


@pytest.mark.parametrize(
    "text", ["import pickle", "x.bcast(1)", "dist.all_gather_object(a, b)", "torch.load(f)", "eval(x)"]
)
def test_d3_the_gate_finds_each_kind(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "a.py").write_text(text)
    assert len(faults_of(tmp_path / "a.py")) == 1


class Boom:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch /tmp/hpctrain-was-here",)


def test_d3_a_rank_that_sends_a_program_is_refused() -> None:
    for content in (
        pickle.dumps(Boom()),
        b'{"class":["Popen",{}]}',
        b'{"class":["Offer",{"x":1}]}',
        b"[" * 10_000,
        b'{"a":1}',
        b"\xff",
    ):
        with pytest.raises(TrainError, match="cannot read what another rank sent"):
            decode(content)
    with pytest.raises(TrainError, match="cannot send a value of type"):
        encode(Boom())
    assert not Path("/tmp/hpctrain-was-here").exists()


def test_d3_values_come_back_as_they_were() -> None:
    value = {"a": [1, 2.5, None, True, (b"x\xff", Path("/a"))], 3: float("inf"), (1, 2): "\udcff"}
    assert decode(encode(value)) == value
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert (decode(encode(array)) == array).all()


def pair(host_key: bytes = KEY, guest_key: bytes = KEY, *, encrypted: bool = False) -> tuple[Session | None, ...]:
    """Return what both ends of a connection make of each other."""
    sessions: list[Session | None] = [None, None]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        guest = socket.create_connection(listener.getsockname())
        host, _ = listener.accept()
    for end in (host, guest):
        end.settimeout(5)

    def greet() -> None:
        sessions[0] = prove_as_host(host, host_key, encrypted=encrypted)
        host.close()

    thread = threading.Thread(target=greet)
    thread.start()
    sessions[1] = prove_as_guest(guest, guest_key, encrypted=encrypted)
    guest.close()
    thread.join()
    return tuple(sessions)


def test_d3_only_an_end_with_the_key_is_accepted() -> None:
    first, second = pair()
    assert first is not None
    assert second is not None
    assert first.key == second.key
    assert pair(guest_key=b"other") == (None, None)
    assert pair(host_key=b"") == (None, None)


def test_a7_a_recorded_proof_is_refused() -> None:
    guest, host = Proof(KEY, GUEST, encrypted=False), Proof(KEY, HOST, encrypted=False)
    recorded = guest.of(GUEST, host.nonce)
    assert host.checked(guest.nonce, recorded) is not None
    again = Proof(KEY, HOST, encrypted=False)
    assert again.checked(guest.nonce, recorded) is None
    assert again.checked(guest.nonce, again.of(HOST, guest.nonce)) is None, "its own proof, sent back"
    assert Proof(KEY, HOST, encrypted=True).checked(guest.nonce, recorded) is None, "not talked out of encryption"


@pytest.mark.parametrize("encrypted", [False, True])
def test_a8_an_altered_repeated_or_missing_message_is_refused(encrypted: bool) -> None:
    host, guest = Proof(KEY, HOST, encrypted=encrypted), Proof(KEY, GUEST, encrypted=encrypted)
    mine = host.checked(guest.nonce, guest.of(GUEST, host.nonce))
    theirs = guest.checked(host.nonce, host.of(HOST, guest.nonce))
    assert mine is not None
    assert theirs is not None
    sender, lines = Messages(mine), [b'{"step":1}', b'{"step":2}']
    sent = [sender.wrapped(line) for line in lines]
    receiver = Messages(theirs)
    assert [receiver.unwrapped(line) for line in sent] == lines
    assert (b"step" in sent[0]) is not encrypted
    middle = len(sent[0]) // 2
    other = b"B" if sent[0][middle : middle + 1] == b"A" else b"A"
    for forged in (sent[1], sent[0][:-5] + b"\n", sent[0][:middle] + other + sent[0][middle + 1 :], b"\n", lines[0]):
        with pytest.raises(ValueError, match="not authentic"):
            Messages(theirs).unwrapped(forged)
    with pytest.raises(ValueError, match="not authentic"):
        Messages(mine).unwrapped(sent[0])  # sent back to its sender
    receiver = Messages(theirs)
    receiver.unwrapped(sent[0])
    with pytest.raises(ValueError, match="not authentic"):
        receiver.unwrapped(sent[0])


def test_c7_bulk_data_is_encrypted_on_request_and_an_altered_record_is_detected() -> None:
    ends = [Session(KEY, role, True) for role in (HOST, GUEST)]
    (near, wire), (other_wire, far) = socket.socketpair(), socket.socketpair()
    left, right = tunnel(near, ends[0]), tunnel(far, ends[1])
    secret = b"gradient " * 100_000
    seen = bytearray()
    threading.Thread(target=left.sendall, args=(secret,), daemon=True).start()

    def relay(limit: int) -> None:
        while len(seen) < limit:
            part = wire.recv(1 << 16)
            seen.extend(part)
            other_wire.sendall(part)

    thread = threading.Thread(target=relay, args=(len(secret),), daemon=True)
    thread.start()
    got = bytearray()
    while len(got) < len(secret):
        got += right.recv(1 << 20)
    assert got == secret
    thread.join()
    assert b"gradient" not in seen
    left.sendall(b"more")
    record = bytearray(wire.recv(1 << 16))
    record[-1] ^= 1
    other_wire.sendall(record)
    assert right.recv(1) == b"", "broken, and nothing of it was delivered"


def test_c7_without_the_package_encryption_says_what_is_missing() -> None:
    code = (
        "import sys; sys.modules['cryptography'] = None\nfrom hpctrain.peers import encryption_wanted\n"
        "encryption_wanted({'HPCTRAIN_ENCRYPT': '1'})"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT / "workers")}
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert "pip install cryptography" in told.stderr
