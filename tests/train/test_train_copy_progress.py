"""A checkpoint is written while its state is still being copied: never what is not there yet, and never half of it."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import HERE, finish, python, started
from test_train_gradlog import World, assert_alike
from test_train_process_writer import WITH_WAITING, KeptWorld, newest

from hpctrain.checkpoint.chunks import digest
from hpctrain.checkpoint.writing import snapshot
from hpctrain.checkpoint.writing import writer as background
from hpctrain.checkpoint.writing.buffers import BROKEN, FULL, Buffer, CopyProgress, lay_out
from hpctrain.checkpoint.writing.publish import AHEAD, Packer, Wanted, _collect
from hpctrain.errors import PublishError

CHUNK_BYTES = 4096
CHUNKS = 3 * AHEAD


def being_filled() -> Wanted:
    buffer = Buffer(lay_out([("a", "uint8", (CHUNKS * CHUNK_BYTES,))]))
    buffer.copy_progress.begin()
    (slot,) = buffer.layout
    return Wanted(slot=slot, content=buffer.content(slot), copy_progress=buffer.copy_progress)


def test_copied_parts_are_written_before_the_rest_is_copied() -> None:
    wanted = being_filled()
    wanted.copy_progress.reach(2 * AHEAD * CHUNK_BYTES)
    with ThreadPoolExecutor(2) as pool:
        made = Packer(CHUNK_BYTES, 0, pool, frugal=False).run([wanted])
        assert next(made)
        wanted.copy_progress.reach(FULL)
        made.close()


def test_nothing_is_read_before_it_is_there() -> None:
    wanted = being_filled()

    class Copy(CopyProgress):
        """Copies what somebody waits for."""

        def wait(self, until: int) -> None:
            wanted.content[until - CHUNK_BYTES : until] = bytes([until // CHUNK_BYTES]) * CHUNK_BYTES

    with ThreadPoolExecutor(2) as pool:
        (entry,) = _collect(Packer(CHUNK_BYTES, 0, pool).run([replace(wanted, copy_progress=Copy())]), [])
    assert [chunk.hash for chunk in entry.chunks] == [
        digest(bytes([number]) * CHUNK_BYTES) for number in range(1, CHUNKS + 1)
    ]


def test_waiting_for_a_broken_copy_raises_an_error() -> None:
    wanted = being_filled()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wanted.copy_progress.wait, 10)
        wanted.copy_progress.reach(9)
        assert not waiting.done()
        wanted.copy_progress.reach(BROKEN)
        with pytest.raises(PublishError, match="not copied to its end"):
            waiting.result()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.bool])
def test_a_copy_in_stretches_is_the_tensors(monkeypatch: pytest.MonkeyPatch, kind: torch.dtype) -> None:
    monkeypatch.setattr(snapshot, "STRETCH_BYTES", 64)
    monkeypatch.setattr(snapshot, "MOST_STRETCHES", 1 << 20)
    state = {
        "long": (torch.randn(777) > 0).to(kind) if kind is torch.bool else torch.randn(777).to(kind),
        "turned": torch.randn(40, 30).t(),
        "none": torch.zeros(0, 3),
        "one": torch.tensor(5.0),
    }
    there: list[int] = []
    kept = snapshot.TensorSnapshot(snapshot.layout_of(state))
    kept.fill(state, there.append)
    assert all(torch.equal(kept.named()[name], tensor) for name, tensor in state.items())
    assert there == sorted(set(there))
    assert len(there) > 777 * torch.empty(0, dtype=kind).element_size() // 64
    assert max(there) <= kept.layout[-1].at + kept.layout[-1].bytes


def test_a_trainer_that_is_killed_while_it_copies_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    with started([*python(), HERE / "die_in_copy.py", tmp_path], WITH_WAITING) as process:
        ended = finish(process)
    assert ended.status == -signal.SIGKILL, ended.output
    # `finish` has waited for the process that writes as well: it has the same output.
    assert len(list(tmp_path.glob("data-*.bin"))) == 3
    assert newest(tmp_path) == 3
    again = World(tmp_path)
    again.restore()
    whole = World(tmp_path / "whole")
    whole.run(3)
    assert_alike(again, whole)


def test_a_copy_that_fails_costs_its_checkpoint_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = KeptWorld(tmp_path)
    writer = world.writer()
    world.move()
    world.write(writer)

    state = world.tensors()
    too_long = {**state, next(iter(state)): torch.zeros(3, 5).expand(2, 3, 5)}
    monkeypatch.setattr(background, "layout_of", lambda _: snapshot.layout_of(state))
    with pytest.raises(RuntimeError, match="size"):
        writer.begin(too_long, world.facts(), base=True)
    monkeypatch.undo()
    report = writer.wait()
    assert report is not None
    assert "not copied to its end" in (report.error or "")
    world.move()
    assert world.write(writer).error is None
    writer.close()
    again = World(tmp_path)
    again.restore()
    assert_alike(again, world)
