"""The process that writes checkpoints: it has what was copied, whatever becomes of the trainer."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

import pytest
import torch
from ranks import HERE, finish, python, started
from test_train_gradlog import NO_JOB, World, assert_alike, kinds
from waiting import PATIENCE_S, wait_until

from hpctrain.checkpoint.manifest import checkpoint_names
from hpctrain.checkpoint.writing.buffers import Buffer, BufferChannel, lay_out
from hpctrain.checkpoint.writing.files import Claim, claim
from hpctrain.checkpoint.writing.publish import Published, RetentionPolicy
from hpctrain.checkpoint.writing.writer import ProcessWriter
from hpctrain.errors import StaleAttemptError

WITH_WAITING = {"PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(HERE.parent)]).strip(os.pathsep)}


class KeptWorld(World):
    """As a `World`, but with a process that writes."""

    def writer_for(self, mine: Claim, parent: Published | None, base_every: int) -> ProcessWriter:
        return ProcessWriter(mine, parent, base_every, RetentionPolicy(keep=9), chunk_bytes=4096)


def newest(directory: Path) -> int:
    return int(checkpoint_names(directory)[0][5:15])


def test_a_written_checkpoint_restores_to_the_same_bits_and_the_chain_continues(tmp_path: Path) -> None:
    whole = World(tmp_path / "whole")
    whole.run(8)
    first = KeptWorld(tmp_path / "kept")
    assert kinds(first.run(5, base_every=4)) == ["base", "gradients", "gradients", "gradients", "base"]
    second = KeptWorld(tmp_path / "kept")
    assert kinds(second.run(3, base_every=4)) == ["gradients"] * 3
    assert_alike(second, whole)
    again = World(tmp_path / "kept")
    again.restore()
    assert_alike(again, whole)


def test_the_process_finds_its_modules_where_the_trainer_finds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script may have put the directory of hpctrain into sys.path, and nobody into PYTHONPATH."""
    mark = tmp_path / "mark"
    (tmp_path / "sitecustomize.py").write_text(f"open({str(mark)!r}, 'a').close()\n")
    monkeypatch.syspath_prepend(tmp_path)
    world = KeptWorld(tmp_path / "kept")
    world.run(1)
    assert mark.exists()


def test_a_later_attempt_ends_a_run_with_a_writing_process(tmp_path: Path) -> None:
    world = KeptWorld(tmp_path)
    writer = world.writer()
    world.move()
    world.write(writer)
    claim(tmp_path, NO_JOB, now_s=0.0)
    world.move()
    with pytest.raises(StaleAttemptError):
        world.write(writer)
    writer.close()


def test_a_killed_writing_process_costs_its_checkpoint_and_the_next_is_a_base(tmp_path: Path) -> None:
    world = KeptWorld(tmp_path)
    writer = world.writer()
    for _ in range(3):
        world.move()
        world.write(writer)
    os.kill(writer.pid, signal.SIGKILL)
    world.move()
    report = world.write(writer)
    assert "has ended with status -9; another one is started" in (report.error or "")
    world.move()
    assert world.write(writer).kind == "base"
    world.move()
    assert world.write(writer).kind == "gradients"
    writer.close()
    again = World(tmp_path)
    again.restore()
    assert_alike(again, world)


def test_a_killed_trainer_leaves_its_last_copy_to_be_published(tmp_path: Path) -> None:
    """Right after the copy, long before it can be on the share."""
    with started([*python(), HERE / "die_after_copy.py", tmp_path], WITH_WAITING) as process:
        ended = finish(process)
    assert ended.status == -signal.SIGKILL, ended.output
    wait_until(lambda: newest(tmp_path) == 4, PATIENCE_S, "the last copy's publication")
    again = World(tmp_path)
    again.restore()
    assert again.step == 4
    whole = World(tmp_path / "whole")
    whole.run(4)
    assert_alike(again, whole)


def test_the_writing_process_does_not_load_torch(tmp_path: Path) -> None:
    """Neither its modules do, nor what it is told."""
    world = KeptWorld(tmp_path)
    writer = world.writer()
    for _ in range(2):
        world.move()
        world.write(writer)
    assert "libtorch" not in Path(f"/proc/{writer.pid}/maps").read_text()
    writer.close()


def test_buffers_are_sent_once_and_are_the_same_memory_at_both_ends() -> None:
    one, other = (BufferChannel(end) for end in socket.socketpair())
    layout = lay_out([("a", "float32", (3,))])
    buffers = [Buffer(layout) for _ in range(150)]
    got: list[object] = []
    reader = threading.Thread(target=lambda: got.extend(other.receive() for _ in range(2)))
    reader.start()
    one.send({"all": buffers})
    one.send(buffers[7])
    reader.join()
    there = got[0]["all"]  # type: ignore[index]
    assert got[1] is there[7]
    buffers[149].content(layout[0])[:4] = b"abcd"
    assert bytes(there[149].content(layout[0])[:4]) == b"abcd"
    one.close()
    with pytest.raises(EOFError):
        other.receive()
    other.close()


def test_an_empty_state_has_a_buffer() -> None:
    assert Buffer(()).bytes == 0
    assert torch.frombuffer(Buffer(()).shared, dtype=torch.uint8).numel() == 1
