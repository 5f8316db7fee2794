"""A real agent on this machine, as root and as a plain user: launches, reports, refusals, epochs, its own end."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import struct
import time
from pathlib import Path

import pytest
from agent_client import (
    AS_ROOT,
    INCARNATION,
    Controller,
    NodeUnderTest,
    StepCommand,
    from_stream,
    launch_of,
    new_token,
    running_node,
    script_of,
)
from waiting import PATIENCE_S, wait_until

from hpcnode.agent.step_commands import UNPARSED_BYTES, bounds
from hpcnode.wire import protocol


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_a_script_runs_and_its_end_is_reported_until_it_is_acknowledged(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    token = controller.launch(
        "until [ -e go ]; do sleep 0.01; done; echo $1 from $PWD; echo bad >&2; exit 7",
        argv=["hello"],
        token=new_token(),
        work_dir=str(work),
        stdout="out",
    )
    started = controller.wait_status(token, protocol.STARTED)
    (work / "go").touch()
    ended = controller.final(token)
    assert (ended.status, ended.codes, ended.signals, ended.timed_out) == (protocol.ENDED, [7], [0], False)
    assert ended.seq > started.seq
    assert ended.pid == started.pid > 0
    assert lines(work / "out") == [f"hello from {work}", "bad"]
    controller.close()
    again = Controller(node)
    assert [(r["token"], r["status"], r["codes"]) for r in again.welcome.inventory] == [(token, protocol.ENDED, [7])]
    again.send(protocol.Ack([r["seq"] for r in again.welcome.inventory]))
    wait_until(lambda: not (node.root / "spool" / token).exists(), what="the entry to go")
    again.close()
    assert Controller(node).welcome.inventory == []


def test_a_program_killed_by_a_signal_is_reported_with_it(node: NodeUnderTest) -> None:
    controller = Controller(node)
    ended = controller.final(controller.launch("kill -SEGV $$"))
    assert (ended.codes, ended.signals) == ([0], [signal.SIGSEGV])


def test_a6_a_launch_of_an_earlier_attempt_is_refused_while_a_later_one_runs(node: NodeUnderTest, work: Path) -> None:
    """The job was requeued: the launch was never delivered, or somebody has kept it."""
    controller = Controller(node)
    later = controller.launch("touch later; exec sleep 600", token=new_token(attempt=1), work_dir=str(work))
    wait_until((work / "later").exists)
    for step in ("batch", "0"):
        early = new_token(attempt=0, step=step)
        what = {"argv": ["touch", "early"]} if step == "0" else {}
        controller.launch("touch early", token=early, work_dir=str(work), **what)
        assert controller.final(early).status == protocol.REVOKED
    assert not (work / "early").exists()
    controller.wait_status(later, protocol.STARTED)


def test_g2_a_token_launched_often_runs_once(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    token = new_token()
    launch = launch_of(token, stdout=str(work / "marker"), append=True)
    for _ in range(5):
        controller.send(launch, script_of("echo ran"))
    ended = controller.final(token)
    controller.send(launch, script_of("echo ran"))
    assert wait_until(lambda: controller.pump(0.1) and controller.reports(token)[-1].seq > ended.seq)
    assert controller.reports(token)[-1].status == protocol.ENDED
    controller.ack(controller.reports(token)[-1])
    wait_until(lambda: not (node.root / "spool" / token).exists())
    controller.messages.clear()
    controller.send(launch, script_of("echo ran"))
    assert controller.final(token).status == protocol.REVOKED
    node.kill()
    node.start()
    late = Controller(node)
    late.send(launch, script_of("echo ran"))
    assert late.final(token).status == protocol.REVOKED
    assert lines(work / "marker") == ["ran"]


def test_a_revoked_token_never_runs(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    token = new_token()
    controller.send(protocol.EndStep(token, 1.0, "cancelled"))
    assert controller.final(token).status == protocol.REVOKED
    controller.messages.clear()
    controller.launch(f"echo ran >> {work}/marker", token=token)
    assert controller.final(token).status == protocol.REVOKED
    node.kill()
    node.start()
    again = Controller(node)
    assert [r["status"] for r in again.welcome.inventory] == [protocol.REVOKED]
    again.launch(f"echo ran >> {work}/marker", token=token)
    report = again.final(token)
    assert report.status == protocol.REVOKED
    again.ack(report)
    wait_until(lambda: not (node.root / "spool" / token).exists())
    again.messages.clear()
    again.launch(f"echo ran >> {work}/marker", token=token)
    assert again.final(token).status == protocol.REVOKED
    assert lines(work / "marker") == []


def test_an_ended_job_leaves_nothing_and_none_of_its_launches_start_later(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    batch = controller.launch("sleep 100", token=new_token(job=3, attempt=2))
    step = controller.launch(argv=["sleep", "100"], token=new_token(job=3, attempt=2, step="0"))
    other = controller.launch("sleep 100", token=new_token(job=4))
    for token in (batch, step, other):
        controller.wait_status(token, protocol.STARTED)
    controller.send(protocol.EndJob(INCARNATION, 3, 2, 5.0))
    controller.wait(lambda m: m == protocol.JobGone(INCARNATION, 3, 2))
    assert controller.final(batch).signals == [signal.SIGTERM]
    assert controller.final(step).signals == [signal.SIGTERM]
    for attempt in (1, 2):
        late = controller.launch(f"echo ran >> {work}/marker", token=new_token(job=3, attempt=attempt))
        assert controller.final(late).status == protocol.REVOKED
    fresh = controller.launch(f"echo ran >> {work}/marker", token=new_token(job=3, attempt=3))
    assert controller.final(fresh).status == protocol.ENDED
    assert lines(work / "marker") == ["ran"]
    assert controller.reports(other)[-1].status == protocol.STARTED


def test_an_older_attempt_is_gone_before_a_newer_one_starts(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    old = controller.launch("trap '' TERM; echo $$ > pid; sleep 100", token=new_token(job=5), work_dir=str(work))
    controller.wait_status(old, protocol.STARTED)
    wait_until(lambda: lines(work / "pid"))
    new = controller.launch("kill -0 $(cat pid) && echo both", token=new_token(job=5, attempt=1), work_dir=str(work))
    assert controller.final(new).codes != [0]
    assert controller.final(old).signals == [signal.SIGKILL]


def test_what_cannot_run_is_refused_with_the_reason(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    (work / "dir").mkdir()
    cases = {
        "or leave this node out (-x NODE)": {"work_dir": str(work / "missing")},
        "cannot open output file": {"stdout": str(work / "dir")},
        "cannot open input file": {"stdin": str(work / "no-input")},
        "no such account": {"user": "nobody-by-this-name"},
    }
    if node.user:
        cases["is not root"] = {"user": "daemon"}
        cases["Permission denied"] = {"work_dir": "/root"}
    for why, fields in cases.items():
        token = controller.launch("echo ran", **fields)
        report = controller.final(token)
        assert (report.status, why in report.why) == (protocol.REFUSED, True), (why, report)
        controller.messages.clear()
        controller.launch("echo ran", token=token, stdout=str(work / "marker"))
        assert controller.final(token).status == protocol.REFUSED
    assert not (work / "marker").exists()


def test_missing_programs_end_as_with_srun_and_say_so(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    token = controller.launch(argv=["no-such-program"], stdout=str(work / "out"))
    ended = controller.final(token)
    assert (ended.status, ended.codes) == (protocol.ENDED, [2])
    assert "cannot execute no-such-program" in ended.why
    assert ended.unexecuted
    assert "cannot execute no-such-program" in lines(work / "out")[0]
    token = new_token()
    controller.send(launch_of(token, stdout=str(work / "out2")), b"#!/no/such/python3 -u\n")
    missing = controller.final(token)
    assert (missing.codes, missing.unexecuted) == ([2], True)
    assert not controller.final(controller.launch("exit 2")).unexecuted
    assert lines(work / "out2")[0].endswith(": its interpreter /no/such/python3 is not on this node")


def test_output_directories_are_made_and_patterns_filled(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    token = controller.launch(
        argv=["sh", "-c", "echo $SLURM_PROCID $LOCAL_RANK $WORLD_SIZE $HPCSCHED_NODEID"],
        tasks=protocol.TaskSet(first_rank=4, count=3, total=9, node_rank=1, nnodes=3),
        work_dir=str(work),
        stdout="new/dir/%N-%2t-%n.out",
    )
    assert controller.final(token).codes == [0, 0, 0]
    assert sorted(p.name for p in (work / "new/dir").iterdir()) == ["n1-04-1.out", "n1-05-1.out", "n1-06-1.out"]
    assert lines(work / "new/dir/n1-05-1.out") == ["5 1 9 1"]


def test_output_is_truncated_once_or_appended_to(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    for append, expected in ((False, 3), (True, 6), (False, 3)):
        token = controller.launch(
            argv=["echo", "line"],
            tasks=protocol.TaskSet(0, 3, 3, 0, 1),
            stdout=str(work / "out"),
            append=append,
        )
        assert controller.final(token).codes == [0, 0, 0]
        assert lines(work / "out") == ["line"] * expected


def test_b3_a_fifo_without_a_reader_does_not_block_the_launch(node: NodeUnderTest, work: Path) -> None:
    os.mkfifo(work / "fifo")
    (work / "fifo").chmod(0o666)
    controller = Controller(node)
    report = controller.final(controller.launch("echo hi", stdout=str(work / "fifo")))
    assert (report.status, "fifo" in report.why) == (protocol.REFUSED, True)


@pytest.mark.skipif(not AS_ROOT, reason="needs root")
def test_b2_a_root_agent_runs_jobs_as_their_user_with_no_more_rights(place: Path, work: Path) -> None:
    with running_node(place / "node") as node:
        controller = Controller(node)
        token = controller.launch(
            "cat /proc/self/status; id -G; touch made; cat $0 | head -1; ls -l /proc/self/fd",
            user="nobody",
            work_dir=str(work),
            stdout="out",
        )
        assert controller.final(token).status == protocol.ENDED
        text = (work / "out").read_text()
        for line in ("Uid:\t65534\t65534\t65534\t65534", "Gid:\t65534\t65534\t65534\t65534", "NoNewPrivs:\t1"):
            assert line in text
        for name in ("CapInh", "CapPrm", "CapEff"):
            assert f"{name}:\t0000000000000000" in text
        assert "\n65534\n" in text
        assert "#!/bin/sh" in text
        assert [line.split()[-3] for line in text.splitlines() if " -> " in line] == ["0", "1", "2", "3"]  # 3: ls's own
        assert (work / "made").stat().st_uid == 65534
        assert (work / "out").stat().st_uid == 65534
        victim = place / "victim"
        victim.write_text("secret")
        (work / "link").symlink_to(victim)
        report = controller.final(controller.launch("echo x", user="nobody", work_dir=str(work), stdout="link"))
        assert (report.status, victim.read_text()) == (protocol.REFUSED, "secret")


def test_g3_an_older_controller_is_refused_and_a_newer_one_takes_over(node: NodeUnderTest, work: Path) -> None:
    first = Controller(node, epoch=5)
    second = Controller(node, epoch=5)
    assert isinstance(first.wait(lambda m: isinstance(m, protocol.Goodbye)), protocol.Goodbye)
    stale = Controller(node, epoch=4)
    assert isinstance(stale.welcome, protocol.Goodbye)
    assert "epoch 5" in stale.welcome.why
    token = new_token()
    second.send(launch_of(token, epoch=4), script_of(f"echo ran >> {work}/marker"))  # a late command of the old one
    second.send(protocol.Ping(1))
    second.wait(lambda m: m == protocol.Pong(1))
    assert second.reports(token) == []
    node.kill()
    node.start()
    assert isinstance(Controller(node, epoch=4).welcome, protocol.Goodbye)
    assert isinstance(Controller(node, epoch=6).welcome, protocol.Welcome)
    assert not (work / "marker").exists()


def test_a_visitor_asks_beside_the_controller_and_may_do_nothing_else(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node, epoch=5)
    visitor = Controller(node, epoch=5, visit=True)
    assert visitor.welcome.node == node.node
    assert _facts(visitor)["cpus"] == len(os.sched_getaffinity(0))
    visitor.send(launch_of(new_token(), epoch=5), script_of(f"echo ran >> {work}/marker"))
    refused = visitor.wait(lambda m: isinstance(m, protocol.Goodbye))
    assert refused.why == "a visitor cannot say Launch"
    assert isinstance(Controller(node, epoch=4, visit=True).welcome, protocol.Goodbye)
    controller.send(protocol.Ping(1))
    controller.wait(lambda m: m == protocol.Pong(1))
    assert not any(isinstance(m, protocol.Goodbye) for m, _ in controller.messages)
    assert isinstance(Controller(node, epoch=9, visit=True).welcome, protocol.Welcome)
    assert isinstance(Controller(node, epoch=5).welcome, protocol.Welcome)  # the visitor's epoch is not the node's
    assert not (work / "marker").exists()


def test_g3_of_two_controllers_on_copies_of_a_database_one_is_refused(node: NodeUnderTest) -> None:
    first = Controller(node, epoch=5, start="a" * 16)
    other = Controller(node, epoch=5, start="b" * 16)
    assert isinstance(other.welcome, protocol.Goodbye)
    assert "another controller of epoch 5 on a copy of the database" in other.welcome.why
    first.send(protocol.Ping(1))
    first.wait(lambda m: m == protocol.Pong(1))
    node.kill()
    node.start()
    assert isinstance(Controller(node, epoch=5, start="b" * 16).welcome, protocol.Goodbye)
    assert isinstance(Controller(node, epoch=5, start="a" * 16).welcome, protocol.Welcome)
    assert isinstance(Controller(node, epoch=6, start="b" * 16).welcome, protocol.Welcome)


def test_g8_a_restored_database_is_new_and_the_old_one_is_refused(node: NodeUnderTest) -> None:
    assert isinstance(Controller(node, epoch=9).welcome, protocol.Welcome)
    restored = secrets.token_hex(8)
    assert isinstance(Controller(node, epoch=1, incarnation=restored).welcome, protocol.Welcome)
    old = Controller(node, epoch=10)
    assert isinstance(old.welcome, protocol.Goodbye)
    assert restored in old.welcome.why


DAMAGED = {
    "no JSON": lambda path: path.write_bytes(b"\0" * 4096),
    "cut off": lambda path: os.truncate(path, 10),
    "deep": lambda path: path.write_bytes(b'{"former":' + b"[" * 200_000),
    "another form": lambda path: path.write_text('{"incarnation":["x"],"epoch":"7","former":5,"start":{}}'),
    "out of range": lambda path: path.write_text('{"incarnation":"x","epoch":-1e999,"former":[],"start":""}'),
    "huge": lambda path: os.truncate(path, 1 << 36),
    "a FIFO": lambda path: (path.unlink(), os.mkfifo(path)),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "a device": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_g8_an_agent_with_damaged_epochs_starts_says_so_and_runs_nothing_twice(
    node: NodeUnderTest, work: Path, damage: str
) -> None:
    before = Controller(node, epoch=7)
    token = new_token()
    launch = launch_of(token, stdout=str(work / "marker"), append=True, epoch=7)
    before.send(launch, script_of("echo ran"))
    assert before.final(token).status == protocol.ENDED
    node.kill()
    DAMAGED[damage](node.root / "epochs")
    node.start()
    assert node.said == "ready\n"
    after = Controller(node, epoch=8)
    if damage == "a directory":
        assert "cannot write to the spool" in after.welcome.why
    else:
        assert isinstance(after.welcome, protocol.Welcome)
        after.send(protocol.changed(launch, epoch=8), script_of("echo ran"))
        assert after.final(token).status == protocol.ENDED
        assert isinstance(Controller(node, epoch=7).welcome, protocol.Goodbye)
    assert lines(work / "marker") == ["ran"]
    assert f"cannot read {node.root}/epochs" in (node.root / "log").read_text()


def test_only_the_agents_own_account_may_be_its_controller(place: Path) -> None:
    if not AS_ROOT:
        pytest.skip("needs root")
    with running_node(place / "node") as node:
        said = _as_nobody(node, protocol.encode(protocol.Hello(protocol.VERSION, "c", INCARNATION, 99, "n1")))
        assert b"may not control this agent" in said
        assert isinstance(Controller(node, epoch=1).welcome, protocol.Welcome)


def _as_nobody(node: NodeUnderTest, data: bytes) -> bytes:
    """Send a frame to the agent as another user, and return its answer."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setresuid(65534, 65534, 65534)
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(PATIENCE_S)
        sock.connect(str(node.socket))
        sock.sendall(data)
        answer = b""
        while part := sock.recv(65536):
            answer += part
        os.write(write_end, answer)
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as file:
        answer = file.read()
    os.waitpid(pid, 0)
    return answer


@pytest.mark.parametrize(
    "bad",
    [
        struct.pack("!II", 1 << 31, 0),
        struct.pack("!II", 0, 1 << 31),
        struct.pack("!II", 2, 0) + b"[]",
        struct.pack("!II", 100_000, 0) + b"[" * 100_000,
        struct.pack("!II", 9, 0) + b'{"type":}',
        protocol.encode(protocol.Pong(1)),
        protocol.encode(protocol.Ack([1])),
        struct.pack("!II", 8 << 20, 0) + b" " * (8 << 20),
    ],
)
def test_what_is_not_of_the_protocol_closes_that_connection_only(bad: bytes, place: Path) -> None:
    with running_node(place / "node") as node:
        controller = Controller(node)
        stranger = Controller(node, greet=False)
        try:
            stranger.sock.sendall(bad)
        except OSError:
            pass  # it was closed while we spoke
        wait_until(lambda: stranger.pump(0.1) or stranger.closed, what="the stranger's connection to close")
        wait_until(lambda: stranger.pump(0.1) is False and stranger.closed)
        assert controller.final(controller.launch("true")).codes == [0]


def test_a_bad_frame_of_the_controller_ends_its_connection_but_no_job(node: NodeUnderTest) -> None:
    controller = Controller(node)
    token = controller.launch("sleep 100")
    controller.wait_status(token, protocol.STARTED)
    controller.sock.sendall(struct.pack("!II", 2, 0) + b"[]")
    controller.wait(lambda m: isinstance(m, protocol.Goodbye))
    again = Controller(node)
    assert [r["status"] for r in again.welcome.inventory] == [protocol.STARTED]


def test_an_idle_agent_ends_and_one_with_a_job_stays(place: Path, work: Path) -> None:
    with running_node(place / "node", idle_s=0.3) as node:
        controller = Controller(node)
        token = controller.launch("while [ ! -e go ]; do sleep 0.05; done", work_dir=str(work))
        controller.wait_status(token, protocol.STARTED)
        controller.close()
        agent = node.agent
        assert agent is not None
        stays_until_s = time.monotonic() + 0.8
        wait_until(lambda: agent.poll() is not None or time.monotonic() > stays_until_s)
        assert agent.poll() is None
        (work / "go").touch()
        wait_until(lambda: agent.poll() is not None, what="the agent to end")
        assert agent.returncode == 0
        assert not node.socket.exists()
        node.start()
        assert [r["status"] for r in Controller(node).welcome.inventory] == [protocol.ENDED]


def test_one_agent_for_each_root(node: NodeUnderTest) -> None:
    first = node.agent
    node.start()
    assert "another one holds" in node.said
    node.agent = first
    assert isinstance(Controller(node).welcome, protocol.Welcome)


def test_facts_and_files(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    for source in (controller.welcome.facts, _facts(controller)):
        assert source["cpus"] == len(os.sched_getaffinity(0))
        assert source["mem_mib"] > 100
        assert source["gpus"] == [] or source["gpus"][0]["index"] == 0
        assert source["is_root"] == (AS_ROOT and not node.user)
    (work / "log").write_text("0123456789")
    asked = {
        (0, 100): (b"0123456789", 0),
        (4, 3): (b"456", 4),
        (-3, 100): (b"789", 7),
        (50, 10): (b"", 50),
    }
    for number, ((offset, limit), expected) in enumerate(asked.items()):
        controller.send(protocol.ReadFile(number, "", str(work / "log"), offset, limit))
        answer, blob = _file(controller, number)
        assert (blob, answer.offset, answer.size, answer.error) == (*expected, 10, "")
    for number, path in enumerate((str(work / "none"), "/dev/zero", str(work)), start=10):
        controller.send(protocol.ReadFile(number, "", path, 0, 10))
        assert path in _file(controller, number)[0].error


def test_files_below_a_directory_are_read_without_following_links(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    (work / "job" / "sub").mkdir(parents=True)
    (work / "secret").write_text("secret")
    (work / "job" / "sub" / "a").write_text("0123")
    (work / "job" / "out").symlink_to(work)
    (work / "job" / "key").symlink_to(work / "secret")
    (work / "job" / os.fsdecode(b"\xff")).write_text("odd")
    os.mkfifo(work / "job" / "pipe")
    beneath = str(work / "job")

    def listed(path: str, after: str = "", limit: int = 100) -> protocol.FileList:
        controller.send(protocol.ListFiles(1, "", beneath, path, after, limit))
        found = controller.wait(lambda m: isinstance(m, protocol.FileList))
        controller.messages[:] = [one for one in controller.messages if not isinstance(one[0], protocol.FileList)]
        return found

    whole = listed("")
    assert [(name, kind) for name, kind, _, _ in whole.files] == [
        ("\\xff", "other"), ("key", "link"), ("out", "link"), ("pipe", "other"), ("sub", "directory")
    ]  # fmt: skip
    assert listed("sub").files[0][:3] == ("a", "file", 4)
    first = listed("", limit=2)
    assert first.more
    assert [name for name, *_ in listed("", first.files[-1][0]).files] == ["out", "pipe", "sub"]
    for path in ("out", "..", "sub/../..", "/etc", "out/job", "sub/a", "none"):
        assert listed(path).error, path
    controller.send(protocol.ReadFile(20, "", "sub/a", 1, 2, beneath))
    assert _file(controller, 20)[1] == b"12"
    for number, path in enumerate(
        ("key", "out/secret", "../secret", str(work / "secret"), "", "sub", "pipe"), start=21
    ):
        controller.send(protocol.ReadFile(number, "", path, 0, 10, beneath))
        answer, blob = _file(controller, number)
        assert (bool(answer.error), blob) == (True, b""), path


def _facts(controller: Controller) -> dict[str, object]:
    controller.send(protocol.Probe(77))
    return controller.wait(lambda m: isinstance(m, protocol.Facts) and m.request == 77).facts


def _file(controller: Controller, number: int) -> tuple[protocol.FileData, bytes]:
    controller.wait(lambda m: isinstance(m, protocol.FileData) and m.request == number)
    return next((m, b) for m, b in controller.messages if isinstance(m, protocol.FileData) and m.request == number)


def test_a_launch_that_is_not_what_its_token_says_is_refused(node: NodeUnderTest) -> None:
    controller = Controller(node)
    token = new_token(job=8)
    controller.send(launch_of(token, job_id=9), script_of("true"))
    assert controller.final(token).status == protocol.REFUSED
    for bad in ("../../etc", "x" * 300, f"{INCARNATION}.1.0.batch.other.{'0' * 32}"):
        controller.send(protocol.changed(launch_of(new_token()), token=bad), script_of("true"))
    no_shebang = new_token()
    controller.send(launch_of(no_shebang), b"echo hi")
    assert "#!" in controller.final(no_shebang).why
    assert sorted(os.listdir(node.root)) == sorted(
        ["agent.lock", "agent.sock", "bin", "epochs", "jobs", "log", "seq", "spare", "spool", "streams"]
    )


@pytest.mark.parametrize(
    ("given", "umask"), [("0002", "0002"), ("77", "0077"), ("", "0022"), ("0o2", "0022"), ("7777", "0022")]
)
def test_tasks_have_the_submitters_umask(given: str, umask: str, node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    env = {"PATH": "/usr/bin:/bin", **({"SLURM_UMASK": given} if given else {})}
    show = f"umask > {work}/umask; echo ${{SLURM_UMASK-unset}} >> {work}/umask"
    for script, fields in (("", {"argv": ["sh", "-c", show]}), (show, {})):
        assert controller.final(controller.launch(script, env=env, **fields)).codes == [0]
        assert lines(work / "umask") == [umask, given if fields and given else "unset"]


def test_the_environment_is_the_controllers_and_the_nodes(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    token = controller.launch(
        argv=["env"],
        stdout=str(work / "env"),
        env={"PATH": "/usr/bin:/bin", "MINE": "a b\nc", "HOME": "/wrong"},
        gpus=[1, 3],
    )
    assert controller.final(token).codes == [0]
    env = dict(line.split("=", 1) for line in lines(work / "env") if "=" in line)
    assert env["MINE"] == "a b"
    assert env["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert env["HPCSCHED_SOCKET"] == str(node.socket)
    assert env["PATH"] == f"{node.root}/bin:/usr/bin:/bin"
    assert env["HOME"] != "/wrong"
    assert "HPCNODE_SIMULATED" not in env
    assert (env["RANK"], env["WORLD_SIZE"]) == ("0", "1")
    assert json.loads((node.root / "epochs").read_text())["epoch"] == 1


def _frame(text: bytes) -> bytes:
    return struct.pack("!II", len(text), 0) + text


HUGE = b"9" * 400
BAD_FRAMES = (
    b'{"type":[]}',
    b'{"type":{}}',
    b'{"type":' + b"[" * 900 + b"]" * 900 + b"}",
    b'{"type":"Progress","job_id":1,"step":' + HUGE + b"}",
    b'{"type":"Progress","job_id":1,"step":1,"loss":' + HUGE + b"}",
    b'{"type":"Progress","job_id":' + HUGE + b',"step":1}',
    b'{"type":"Failure","job_id":1,"rank":0,"ranks":' + HUGE + b',"text":""}',
    b'{"type":"Failure","job_id":1,"rank":0,"ranks":1,"text":"","age_s":' + HUGE + b"}",
)


@pytest.mark.parametrize("text", BAD_FRAMES, ids=lambda text: text[:24].decode())
def test_a_bad_frame_ends_its_connection_and_not_the_agent(node: NodeUnderTest, text: bytes) -> None:
    controller = Controller(node)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect(str(node.socket))
        sock.sendall(_frame(text))
        said = b""
        while data := sock.recv(1 << 16):
            said += data
    assert b"Goodbye" in said
    controller.send(protocol.Ping(7))
    controller.wait(lambda m: m == protocol.Pong(7))
    assert node.agent is not None
    assert node.agent.poll() is None


def test_a_bad_frame_of_the_controller_ends_its_connection_and_not_the_agent(node: NodeUnderTest) -> None:
    controller = Controller(node)
    token = controller.launch("sleep 100")
    controller.wait_status(token, protocol.STARTED)
    controller.sock.sendall(_frame(BAD_FRAMES[0]))
    controller.wait(lambda m: isinstance(m, protocol.Goodbye))
    again = Controller(node)
    assert [(r["token"], r["status"]) for r in again.welcome.inventory] == [(token, protocol.STARTED)]
    assert node.agent is not None
    assert node.agent.poll() is None


def test_a_refused_step_command_is_not_kept_by_the_agent(node: NodeUnderTest) -> None:
    controller = Controller(node)
    step = StepCommand(node, job_id=0)
    said = from_stream(controller, protocol.StepRequest)
    ended = protocol.StepEnded([], [], "cannot start a step: no")
    controller.send(protocol.ToStream(said.stream, protocol.to_json(ended)))
    step.wait(lambda m: m == ended)
    assert wait_until(lambda: not step.pump(0.1) and step.closed, what="the agent to close it")


def test_d2_connections_and_unfinished_frames_of_an_account_are_bounded(node: NodeUnderTest) -> None:
    controller = Controller(node)
    most = bounds().connections
    frame = protocol.encode(protocol.Input("t", 0, 0, False), b"x" * (2 << 20))
    with contextlib.ExitStack() as stack:
        socks = []
        for _ in range(most + 20):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            sock.connect(str(node.socket))
            sock.settimeout(PATIENCE_S)
            socks.append(sock)
        assert socks[0].recv(1) == b""  # silent longest, closed for the last ones
        for sock in socks[-12:]:
            with contextlib.suppress(ConnectionError):
                sock.sendall(frame[:-1])
        ended = [sock for sock in socks[-12:] if _is_over(sock)]
        assert 12 - UNPARSED_BYTES // len(frame) <= len(ended) < 12
    controller.send(protocol.Ping(7))
    controller.wait(lambda m: m == protocol.Pong(7))


def _is_over(sock: socket.socket) -> bool:
    """Return whether the agent has ended the connection, on which a frame was sent that is not complete."""
    sock.settimeout(0.5)
    try:
        while sock.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


def test_samples_of_node_and_jobs_come_as_long_as_a_controller_wants_them(node: NodeUnderTest) -> None:
    controller = Controller(node)
    token = controller.launch("while :; do :; done", token=new_token(job=5, attempt=2))
    controller.wait_status(token, protocol.STARTED)
    claim = controller.launch("", token=new_token(job=6, step="alloc"))
    controller.wait_status(claim, protocol.CLAIMED)
    controller.send(protocol.SampleEvery(0.5))
    first = controller.wait(lambda m: isinstance(m, protocol.Sample))
    assert {"node_load1", "node_cpu_seconds_total:user", "node_memory_available_bytes"} <= set(first.columns)
    assert len(first.values) == len(first.columns)
    cpu = 2 + first.job_columns.index("job_cpu_seconds_total")
    busy = controller.wait(
        lambda m: isinstance(m, protocol.Sample) and any(row[:2] == [5, 2] and row[cpu] > 0.1 for row in m.jobs)
    )
    (row,) = [row for row in busy.jobs if row[0] == 5]
    processes = 2 + first.job_columns.index("job_processes")
    assert row[processes] == 1
    assert [row[processes] for row in busy.jobs if row[0] == 6] == [0]  # it holds the node and runs nothing
    assert row[2 + first.job_columns.index("job_memory_bytes")] > 1 << 16
    controller.send(protocol.EndStep(token, 0.0, "cancelled"))
    assert controller.final(token).usage["cpu_user_s"] >= row[cpu] * 0.5
    controller.send(protocol.SampleEvery(0.0))
    controller.send(protocol.Ping(77))
    controller.wait(lambda m: m == protocol.Pong(77))
    controller.close()
