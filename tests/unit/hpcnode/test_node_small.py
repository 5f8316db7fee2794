"""Small parts of the node: tokens, file patterns, streams, environments, tables, frames."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import wait_until

import hpcsched
from hpcnode import paths
from hpcnode.agent import command, probe
from hpcnode.agent import probe as speed
from hpcnode.os.account import UserAccount
from hpcnode.shepherd import environment, relay
from hpcnode.shepherd import task as files
from hpcnode.wire import protocol
from hpcnode.wire.protocol import read_token
from hpcsched.errors import ProtocolError
from hpcsched.launch.bundle import build_bundle
from hpcsched.model.ids import LaunchToken

NONCE = "0123456789abcdef" * 2


@given(
    st.one_of(
        st.text(max_size=80),
        st.from_regex(
            r"[0-9a-f]{7,9}\.\d{1,3}\.\d(-\d{1,2})?\.(batch|7|x)\.[A-Za-z0-9_./-]{1,5}\.[0-9a-f]{31,33}\n?",
            fullmatch=True,
        ),
    )
)
def test_both_ends_take_the_same_tokens(text: str) -> None:
    try:
        ours = LaunchToken.parse(text)
    except ProtocolError:
        assert read_token(text) is None
    else:
        theirs = read_token(text)
        assert theirs == (ours.incarnation, ours.job_id, ours.attempt, ours.step, ours.node, ours.nonce, ours.stay)


def test_a_token_has_the_stay_of_its_node_from_the_second_one() -> None:
    first, second = f"feedc0de.12.3.alloc.n1.{NONCE}", f"feedc0de.12.3-1.alloc.n1.{NONCE}"
    assert [str(LaunchToken.parse(text)) for text in (first, second)] == [first, second]
    found = [read_token(text) for text in (first, second)]
    assert [token and token.life for token in found] == [(3, 0), (3, 1)]
    assert read_token(first.replace(".3.", ".3-0.")) is None, "a launch has one name"


def test_a_token_is_a_file_name() -> None:
    for bad in (f"../{NONCE}", f"feedc0de.1.0.batch.../x.{NONCE}", f"feedc0de.1.0.batch.n1.{NONCE}/", "", "."):
        assert read_token(bad) is None
    good = read_token(f"feedc0de.12.3.batch.n-1_a.{NONCE}")
    assert good is not None
    assert good.job == ("feedc0de", 12)


def test_patterns_of_a_task_are_filled() -> None:
    assert files.fill("o-%t-%3t-%n-%N-%%t-%x", 7, 2, "gpu1") == "o-7-007-2-gpu1-%t-%x"


@pytest.mark.parametrize(
    ("pattern", "local_rank", "node_rank", "expected"),
    [
        ("out", 0, 0, True),
        ("out", 1, 0, False),
        ("out", 0, 1, False),
        ("out-%N", 0, 1, True),
        ("out-%n", 1, 1, False),
        ("out-%t", 3, 2, True),
    ],
)
def test_a_shared_file_is_emptied_by_one_task(pattern: str, local_rank: int, node_rank: int, expected: bool) -> None:
    assert files.truncates(pattern, local_rank, node_rank) is expected


class Pipe:
    """An output stream and the end that a task writes to."""

    def __init__(self, limit: int = 1 << 20) -> None:
        read_end, self.write_end = os.pipe()
        os.set_blocking(read_end, False)
        self.stream = relay.OutputStream(0, 1, read_end, limit)

    def write(self, data: bytes) -> None:
        os.write(self.write_end, data)
        self.stream.read()

    def close(self) -> None:
        os.close(self.write_end)
        self.stream.read()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe(limit=10)
    yield pipe
    pipe.stream.end()


def test_output_is_sent_once_and_kept_until_it_is_taken(pipe: Pipe) -> None:
    pipe.write(b"abcdef")
    assert pipe.stream.to_send() == [(0, b"abcdef", False)]
    assert pipe.stream.to_send() == []
    pipe.stream.taken(2)
    pipe.stream.resend()
    assert pipe.stream.to_send() == [(2, b"cdef", False)]
    pipe.write(b"ghijklmnop")
    assert pipe.stream.to_send() == [(6, b"ghijkl", False)]
    assert not pipe.stream.wants_more
    pipe.stream.taken(12)
    assert pipe.stream.wants_more
    pipe.stream.read()
    assert pipe.stream.to_send() == [(12, b"mnop", False)]
    pipe.close()
    assert pipe.stream.to_send() == [(16, b"", True)]
    assert not pipe.stream.all_taken
    pipe.stream.taken(16)
    assert pipe.stream.all_taken


@given(st.lists(st.tuples(st.sampled_from(["write", "send", "take", "resend"]), st.integers(1, 5000)), max_size=60))
def test_a_reader_that_drops_what_it_has_sees_every_byte_once(moves: list[tuple[str, int]]) -> None:
    pipe = Pipe(limit=4096)
    written, have = bytearray(), bytearray()

    def deliver() -> None:
        for offset, data, _eof in pipe.stream.to_send():
            assert offset <= len(have)
            have.extend(data[len(have) - offset :])

    for move, number in moves:
        if move == "write" and pipe.stream.wants_more:
            data = bytes((len(written) + i) % 251 for i in range(number))
            written += data
            pipe.write(data)
        elif move == "send":
            deliver()
        elif move == "take":
            pipe.stream.taken(min(number, len(have)))
        elif move == "resend":
            pipe.stream.resend()
    os.close(pipe.write_end)
    while not pipe.stream.all_taken:
        if not pipe.stream.ended:
            pipe.stream.read()
        deliver()
        pipe.stream.taken(len(have))
    assert have == written


def test_a_window_is_smaller_where_there_are_many_tasks() -> None:
    assert relay.untaken_limit(1) == relay.MAX_UNTAKEN
    assert relay.untaken_limit(1_000_000) == relay.CHUNK
    assert relay.untaken_limit(64) * 64 * 2 <= relay.MAX_STEP_UNTAKEN


def test_input_is_taken_once_in_order_and_within_its_window() -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    stream = relay.InputStream(0, write_end)
    assert stream.add(0, b"abc", False)
    assert stream.add(1, b"bcd", False)
    assert not stream.add(5, b"f", False)
    assert not stream.add(4, b"x" * (relay.INPUT_WINDOW + 1), False)
    assert stream.taken == 0
    assert stream.add(4, b"e", True)
    assert stream.write()
    assert (stream.taken, stream.pipe) == (5, -1)
    assert os.read(read_end, 100) == b"abcde"
    assert stream.add(5, b"more", False)
    assert stream.taken == 9  # a program that reads no more does not block its sender
    os.close(read_end)


def test_the_environment_of_a_task() -> None:
    token = f"feedc0de.1.0.3.n1.{NONCE}"
    launch = protocol.Launch(
        token=token,
        job_id=1,
        attempt=0,
        step="3",
        epoch=1,
        user="ann",
        work_dir="/",
        argv=["true"],
        env={"PATH": "/opt/bin", "USER": "eve", "HPCSCHED_SOCKET": "/evil", "MINE": "1"},
        tasks=protocol.TaskSet(4, 2, 8, 2, 4),
        cpus=1,
        mem_mib=0,
        gpus=[],
    )
    account = UserAccount("ann", 1001, 1001, [], "/home/ann", "/bin/bash")
    shared = environment.step_environment(launch, account, root="/r", socket_path="/r/s", has_gpus=True)
    env = environment.task_environment(shared, launch, 1)
    expected = {
        "PATH": "/r/bin:/opt/bin",
        "USER": "ann",
        "HOME": "/home/ann",
        "HPCSCHED_SOCKET": "/r/s",
        "HPCSCHED_TOKEN": token,
        "CUDA_VISIBLE_DEVICES": "",
        "SLURM_PROCID": "5",
        "HPCSCHED_LOCALID": "1",
        "SLURM_NODEID": "2",
        "SLURM_GTIDS": "4,5",
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "2",
        "MINE": "1",
    }
    assert expected.items() <= env.items()
    batch = protocol.from_json({**protocol.to_json(launch), "step": "batch"})
    assert "RANK" not in environment.task_environment({}, batch, 0)
    without = environment.step_environment(launch, account, root="/r", socket_path="/r/s", has_gpus=False)
    assert "CUDA_VISIBLE_DEVICES" not in without


def seen_gpus(gpus: list[int], **env: str) -> list[str]:
    """Return the visible GPUs of each of two tasks, and its own GPUs."""
    launch = protocol.Launch(
        token="t", job_id=1, attempt=0, step="0", epoch=1, user="", work_dir="/", argv=["x"], env=env,
        tasks=protocol.TaskSet(0, 2, 2, 0, 1), cpus=2, mem_mib=0, gpus=gpus,
    )  # fmt: skip
    account = UserAccount("ann", 1001, 1001, [], "/home/ann", "/bin/bash")
    shared = environment.step_environment(launch, account, root="/r", socket_path="/r/s", has_gpus=True)
    tasks = [environment.task_environment(shared, launch, local_rank) for local_rank in (0, 1)]
    return [f"{task['CUDA_VISIBLE_DEVICES']} own={task.get('HPCSCHED_TASK_GPUS', '')}" for task in tasks]


def test_tasks_see_all_gpus_of_the_step_or_each_its_own() -> None:
    assert seen_gpus([2, 5]) == ["2,5 own=", "2,5 own="]
    assert seen_gpus([2, 5], HPCSCHED_STEP_GPUS_PER_TASK="1") == ["2 own=2", "5 own=5"]
    assert seen_gpus([2, 5, 6, 7], HPCSCHED_STEP_GPUS_PER_TASK="2") == ["2,5 own=2,5", "6,7 own=6,7"]


def test_devices_that_cuda_does_not_know_by_index_go_by_their_names() -> None:
    names = "MIG-aa,MIG-bb"
    assert seen_gpus([0, 1], HPCSCHED_GPU_DEVICES=names) == ["MIG-aa,MIG-bb own=", "MIG-aa,MIG-bb own="]
    each = seen_gpus([0, 1], HPCSCHED_GPU_DEVICES=names, HPCSCHED_STEP_GPUS_PER_TASK="1")
    assert each == ["MIG-aa own=0", "MIG-bb own=1"]


def test_the_table_of_gpus() -> None:
    text = (
        "0, NVIDIA H200, GPU-8a1c, 143771\n"
        "1, NVIDIA GB10, GPU-77aa, [N/A]\n"
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n\n"
    )
    assert probe.parse_gpus(text) == [
        {"index": 0, "name": "NVIDIA H200", "uuid": "GPU-8a1c", "mem_mib": 143771},
        {"index": 1, "name": "NVIDIA GB10", "uuid": "GPU-77aa", "mem_mib": 0},
    ]


def test_defaults_are_not_sent_so_older_versions_can_read_the_message() -> None:
    ended = protocol.StepEnded([0], [0])
    assert protocol.to_json(ended) == {"type": "StepEnded", "codes": [0], "signals": [0]}
    report = protocol.Report(seq=1, token="t", status=protocol.ENDED, at_s=1.5, codes=[0, 3])
    assert protocol.to_json(report) == {
        "type": "Report", "seq": 1, "token": "t", "status": "ended", "at_s": 1.5, "codes": [0, 3],
    }  # fmt: skip
    assert protocol.from_json(protocol.to_json(report)) == report


def test_bundles_that_nothing_runs_from_are_deleted_when_they_are_old(tmp_path: Path) -> None:
    for name in ("hpcnode-aaaa.pyz", "hpcnode-bbbb.pyz", "hpcnode-cccc.pyz", "mine.pyz", "hpcnode-dddd.pyz.tmp"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1000.0, 1000.0))
    os.utime(tmp_path / "hpcnode-cccc.pyz", (1990.0, 1990.0))  # somebody is about to start from it
    running = os.fsencode(tmp_path / "hpcnode-bbbb.pyz")
    assert paths.delete_old_bundles(str(tmp_path), running.__eq__, now_s=2000.0) == ["hpcnode-aaaa.pyz"]
    assert len(list(tmp_path.iterdir())) == 4
    assert set(paths.delete_old_bundles(str(tmp_path), lambda _: False, now_s=3000.0)) == {
        "hpcnode-bbbb.pyz", "hpcnode-cccc.pyz",
    }  # fmt: skip


def test_step_commands_run_from_compiled_modules_beside_the_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tmp_path / "hpcnode-abcd.pyz"
    bundle.write_bytes(build_bundle().data)
    monkeypatch.setattr(paths, "program", lambda: str(bundle))
    program = paths.unpack(str(tmp_path))
    assert paths.unpack(str(tmp_path)) == program
    folder = Path(program).parent
    assert {path.stem.partition(".")[0] for path in folder.glob("__pycache__/*.pyc")} == {
        path.stem for path in folder.glob("*.py")
    }
    paths.write_shims(str(tmp_path), program)
    (folder / "hrun.py").write_text("not Python")  # the compiled one runs, and nobody looks here
    done = subprocess.run(
        [tmp_path / "bin" / "hrun", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"hpcsched {hpcsched.__version__}\n"


def test_modules_of_other_versions_are_deleted_when_nothing_runs_from_them(tmp_path: Path) -> None:
    for name in ("steps-aa-cpython-39", "steps-bb-cpython-311", "steps-cc-cpython-311.77", "spool"):
        (tmp_path / name / "hpcnode").mkdir(parents=True)
        os.utime(tmp_path / name, (1000.0, 1000.0))
    running = os.fsencode(tmp_path / "steps-bb-cpython-311" / "hpcnode")
    gone = ["steps-aa-cpython-39", "steps-cc-cpython-311.77"]
    assert paths.delete_old_steps(str(tmp_path), running.__eq__, now_s=1500.0) == []
    assert paths.delete_old_steps(str(tmp_path), running.__eq__, now_s=2000.0) == gone
    assert sorted(path.name for path in tmp_path.iterdir()) == ["spool", "steps-bb-cpython-311"]


def test_the_list_of_mig_devices() -> None:
    text = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
  MIG 1g.10gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
  MIG 2g.20gb     Device  1: (UUID: MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-11111111-d33d-2b2c-524d-9e3d8d2b8a77)
"""
    assert probe.parse_mig(text) == {
        "GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77": [
            {"profile": "1g.10gb", "uuid": "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"},
            {"profile": "2g.20gb", "uuid": "MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb"},
        ]
    }
    assert probe.parse_mig("No devices found.\n") == {}


def test_the_link_of_the_default_route(tmp_path: Path) -> None:
    routes = tmp_path / "route"
    routes.write_text(
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n"
        "eth1\t0002A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\n"
        "eth0\t00000000\t0102A8C0\t0003\t0\t0\t0\t00000000\n"
    )
    assert speed.link_mbps(str(routes), str(tmp_path)) == 0  # the kernel does not say
    (tmp_path / "eth0").mkdir()
    (tmp_path / "eth0" / "speed").write_text("2500\n")
    assert speed.link_mbps(str(routes), str(tmp_path)) == 2500
    (tmp_path / "eth0" / "speed").write_text("-1\n")
    assert speed.link_mbps(str(routes), str(tmp_path)) == 0


def test_a_speed_is_measured_when_asked_for(tmp_path: Path) -> None:
    assert speed.cpu_speed(rounds=1, round_bytes=1 << 20) > 0
    assert "speed" not in probe.facts(str(tmp_path), {}, (), thorough=False)


def test_messages_are_immutable() -> None:
    address = protocol.Address("n1", 3)
    assert address == protocol.Address(node="n1", stream=3)
    assert hash(address) == hash(protocol.Address("n1", 3))
    assert address != protocol.Address("n1", 4)
    assert protocol.Go("t") != protocol.JobGone("t", 1, 0)
    assert repr(address) == "Address(node='n1', stream=3)"
    with pytest.raises(AttributeError):
        address.stream = 4  # type: ignore[misc]
    with pytest.raises(AttributeError):
        address.strem = 4  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        del address.stream
    assert protocol.changed(address, stream=5) == protocol.Address("n1", 5)
    with pytest.raises(TypeError, match="Address needs stream"):
        protocol.Address("n1")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="takes 2 values, not 3"):
        protocol.Address("n1", 3, 4)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="Address cannot take port"):
        protocol.Address("n1", 3, port=4)  # type: ignore[call-arg]
    first, second = (protocol.Report(seq, "t", protocol.STARTED, 0.0) for seq in (1, 2))
    first.codes.append(1)
    assert second.codes == []


def test_only_fields_of_a_message_are_read() -> None:
    with pytest.raises(protocol.WireError, match="unknown field"):
        protocol.from_json({"type": "Go", "token": "t", "__dict__": {}})
    with pytest.raises(protocol.WireError, match="token is int, not str"):
        protocol.from_json({"type": "Go", "token": 1})


def test_an_agent_has_little_in_memory_that_each_fork_would_copy() -> None:
    package = Path(paths.__file__).parents[1]
    code = "import sys; sys.path.insert(0, sys.argv[1]); import hpcnode.agent.command; print(*sorted(sys.modules), sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(package)], capture_output=True, text=True, check=True
    )
    heavy = {"argparse", "bz2", "hashlib", "hmac", "lzma", "shutil", "subprocess", "threading", "traceback"}
    assert "hpcnode.shepherd.shepherd" in done.stdout.split()
    assert (heavy | {"dataclasses"}).isdisjoint(done.stdout.split())


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--root", "/x", "--cluster", "c"], "missing: --node"),
        (["--root", "/x", "--cluster", "c", "--node"], "unknown option or no value: --node"),
        (["--root", "/x", "--cluster", "c", "--node", "n1", "--idle", "3"], "unknown option or no value: --idle"),
        (["--root", "/x", "--cluster", "c", "--node", "n1", "--idle-s", "soon"], "soon"),
    ],
)
def test_an_agent_refuses_words_that_it_does_not_know(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(words) == 2
    assert why in capsys.readouterr().err


def test_a_tree_is_removed_whole_and_what_it_points_to_stays(tmp_path: Path) -> None:
    (tmp_path / "ours" / "a" / "b").mkdir(parents=True)
    (tmp_path / "ours" / "a" / "hosts").write_text("n1\n")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "kept").touch()
    (tmp_path / "ours" / "way").symlink_to(tmp_path / "theirs")
    paths.remove_tree(str(tmp_path / "ours" / "a"))
    assert not (tmp_path / "ours" / "a").exists()
    paths.remove_tree(str(tmp_path / "ours"))
    paths.remove_tree(str(tmp_path / "ours"))
    assert (tmp_path / "theirs" / "kept").exists()


def test_the_card_is_that_which_leads_to_the_client_of_the_login(tmp_path: Path) -> None:
    device = tmp_path / "lo"
    device.mkdir()
    (device / "address").write_text("52:54:00:12:34:56\n")
    login = {"PATH": "/usr/bin:/bin", "SSH_CONNECTION": "127.0.0.1 5 127.0.0.1 22"}
    for environ, mac in ((login, "52:54:00:12:34:56"), ({"PATH": "/usr/bin:/bin"}, "")):
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE, env=environ) as child:
            wait_until(
                Path(f"/proc/{child.pid}/environ").read_bytes
            )  # exec closes our pipe before it shows the environment
            assert speed.mac_to_peer(child.pid, str(tmp_path)) == mac
            child.stdin.close()  # type: ignore[union-attr]
    assert speed.mac_to_peer(0, str(tmp_path)) == ""


def test_b11_variables_of_a_users_process_do_not_keep_a_nodes_facts_back(tmp_path: Path) -> None:
    """Any process can say that it is of a job of this agent, also of one with a number of 5,000 digits."""
    of_agent = {"PATH": "/usr/bin:/bin", "HPCSCHED_AGENT_ROOT": str(tmp_path)}
    jobs = ("9" * 5000, "7", "\u0667", "-7", "")
    with ExitStack() as ends:
        children = []
        for job in jobs:
            child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, env={**of_agent, "HPCSCHED_JOB_ID": job})
            children.append(ends.enter_context(child))
        found = probe.leftovers((), str(tmp_path))
        assert found == [{"pid": children[1].pid, "job": 7}]
        assert probe.leftovers({7}, str(tmp_path)) == []
