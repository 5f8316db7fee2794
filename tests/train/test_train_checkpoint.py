"""Checkpoints: exact to the bit, whole or not there, fenced, bounded, and the damage named."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import HERE, finish, python, started
from thread_writer import ThreadWriter

from hpctrain.checkpoint import chunks as packing
from hpctrain.checkpoint.manifest import CheckpointFacts, from_bytes
from hpctrain.checkpoint.restore import checkpoint_names, read_chain, restore_newest
from hpctrain.checkpoint.writing import files
from hpctrain.checkpoint.writing.files import Claim, claim
from hpctrain.checkpoint.writing.maker import CheckpointReport
from hpctrain.checkpoint.writing.publish import Retention, RetentionPolicy
from hpctrain.checkpoint.writing.snapshot import layout_of
from hpctrain.env import JobFacts
from hpctrain.errors import DamagedError, MismatchError, NoCheckpointError, PublishError, StaleAttemptError

NO_JOB = JobFacts(job=None, attempt=None, restarts=0)
CHUNK_BYTES = 4096


def state(step: int) -> dict[str, torch.Tensor]:
    """Some tensors of a step: weights that move a little, frozen ones, odd shapes and types."""
    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(37, 91, generator=generator)
    return {
        "model.w": weights + 1e-4 * step,
        "model.frozen": torch.randn(50, 100, generator=generator),
        "model.half": (torch.randn(333, generator=generator) + 1e-2 * step).bfloat16(),
        "model.count": torch.tensor(step),
        "model.mask": torch.tensor([True, False, step % 2 == 0]),
        "model.empty": torch.zeros(0, 3),
        "optim.w": weights.square() * step,
    }


def facts(step: int, attempt: int) -> CheckpointFacts:
    note = {"sampler": {"next_sample": 8 * step}}
    return CheckpointFacts(step=step, attempt=attempt, generation=0, world=2, job=None, written_at_s=0.0, state=note)


def write(
    directory: Path, steps: list[int], base_every: int = 10, keep: int = 9, mine: Claim | None = None
) -> list[CheckpointReport]:
    """Write checkpoints of these steps, standing on what is there."""
    mine = mine or claim(directory, NO_JOB, now_s=0.0)
    restored = restore(directory)
    parent = restored.published if restored else None
    writer = ThreadWriter(
        mine, parent, base_every, Retention(mine, RetentionPolicy(keep=keep)), chunk_bytes=CHUNK_BYTES
    )
    reports = []
    for step in steps:
        writer.begin(state(step), facts(step, mine.attempt))
        reports.append(writer.wait())
    writer.close()
    return reports


def restore(directory: Path, warnings: list[str] | None = None):  # noqa: ANN201
    return restore_newest(directory, layout_of(state(0)), (warnings if warnings is not None else []).append)


def assert_holds(directory: Path, step: int) -> None:
    restored = restore(directory)
    assert restored is not None
    assert restored.published.manifest.facts.step == step
    assert restored.published.manifest.facts.state == {"sampler": {"next_sample": 8 * step}}
    live = {name: torch.zeros_like(tensor) for name, tensor in state(0).items()}
    restored.published.snapshot.pour(live)
    for name, tensor in state(step).items():
        assert torch.equal(live[name], tensor), name


def data_file(directory: Path, name: str) -> Path:
    return directory / from_bytes(name, (directory / f"{name}.json").read_bytes()).data[0].file


def flip_byte(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


# ---- exactness


@given(
    pairs=st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)), min_size=1, max_size=200),
    item_bytes=st.sampled_from([1, 2, 4, 8, 16]),
)
@settings(deadline=None)
def test_packing_is_exact_for_any_bits(pairs: list[tuple[int, int]], item_bytes: int) -> None:
    now = b"".join(a.to_bytes(8, "little") for a, _ in pairs)
    before = b"".join(b.to_bytes(8, "little") for _, b in pairs)
    for parent in (None, before, now):
        how, stored = packing.pack(memoryview(now), item_bytes, memoryview(parent) if parent else None)
        out = bytearray(parent if parent else len(now))
        packing.unpack_into(memoryview(out), how, bytes(stored), item_bytes)
        assert bytes(out) == now


@given(data=st.data(), item_bytes=st.sampled_from([2, 4, 8]))
@settings(deadline=None)
def test_damaged_bytes_are_an_error_or_other_numbers_and_nothing_worse(data: st.DataObject, item_bytes: int) -> None:
    numbers = torch.randn(2000, generator=torch.Generator().manual_seed(1)).view(torch.uint8)
    numbers[3::4] = 63
    how, whole = packing.pack(memoryview(numbers.numpy()), item_bytes, None)
    assert how is packing.Packing.PLANES
    stored = bytearray(whole)
    for at, value in data.draw(st.lists(st.tuples(st.integers(0, len(stored) - 1), st.integers(0, 255)), max_size=4)):
        stored[at] = value
    stored = stored[: data.draw(st.integers(0, len(stored)) | st.just(len(stored)))]
    out = bytearray(len(numbers))
    try:
        packing.unpack_into(memoryview(out), how, stored, item_bytes)
    except DamagedError:
        assert stored != whole
    else:
        assert len(stored) == len(whole)
        assert bytes(out) == numbers.numpy().tobytes() or stored != whole


@given(values=st.lists(st.floats(width=32), min_size=64, max_size=300), nudge=st.integers(-99, 99))
@settings(deadline=None)
def test_a_delta_of_floats_is_exact_with_nan_infinity_and_signed_zero(values: list[float], nudge: int) -> None:
    before = torch.tensor(values)
    now = (before.view(torch.int32) + nudge).view(torch.float32)  # may wrap around: bits, not numbers
    raw_before, raw_now = (memoryview(t.view(torch.uint8).numpy()) for t in (before, now))
    how, stored = packing.pack(raw_now, 4, raw_before)
    assert how is packing.Packing.DELTA
    out = bytearray(raw_before)
    packing.unpack_into(memoryview(out), how, bytes(stored), 4)
    assert bytes(out) == bytes(raw_now)


def test_a_chain_of_increments_restores_every_tensor(tmp_path: Path) -> None:
    reports = write(tmp_path, [1, 2, 3, 4])
    assert [report.kind for report in reports] == ["base", "delta", "delta", "delta"]
    assert [report.error for report in reports] == [None] * 4
    assert_holds(tmp_path, 4)


def test_a_second_life_continues_the_chain(tmp_path: Path) -> None:
    write(tmp_path, [1, 2])
    assert [report.kind for report in write(tmp_path, [3])] == ["delta"]
    assert_holds(tmp_path, 3)
    assert [manifest.name[-4:] for manifest, _ in read_chain(tmp_path, checkpoint_names(tmp_path)[0])] == [
        "0000",
        "0000",
        "0001",
    ]


# ---- size and bounds


def test_chains_are_bounded(tmp_path: Path) -> None:
    kinds = [report.kind for report in write(tmp_path, list(range(1, 8)), base_every=3)]
    assert kinds == ["base", "delta", "delta", "base", "delta", "delta", "base"]


def test_unchanged_chunks_are_not_written_again(tmp_path: Path) -> None:
    write(tmp_path, [1, 2])
    names = checkpoint_names(tmp_path)
    chunks = {entry.name: entry.chunks for entry in read_chain(tmp_path, names[0])[-1][0].tensors}
    assert {chunk.packing for chunk in chunks["model.frozen"]} == {packing.Packing.SAME}
    assert packing.Packing.SAME not in {chunk.packing for chunk in chunks["model.w"]}
    frozen_bytes = 50 * 100 * 4
    base_bytes, delta_bytes = (data_file(tmp_path, name).stat().st_size for name in reversed(names))
    assert delta_bytes < base_bytes - 0.8 * frozen_bytes


def test_a_tensor_with_two_names_is_stored_once_whatever_its_packing(tmp_path: Path) -> None:
    mine = claim(tmp_path, NO_JOB, now_s=0.0)
    writer = ThreadWriter(mine, None, 10, Retention(mine, RetentionPolicy(keep=9)), chunk_bytes=CHUNK_BYTES)
    kinds = ("base", "delta")
    for step in range(2):
        tensor = torch.arange(3000) % 100 * (step + 1)
        tensors = {"model.w": tensor, "model.tied": tensor, "model.other": torch.randn(3000) + step}
        writer.begin(tensors, facts(step, mine.attempt))
        report = writer.wait()
        assert report is not None
        assert (report.error, report.kind) == (None, kinds[step])
    writer.close()
    packings = set()
    for name in checkpoint_names(tmp_path):
        chunks = {entry.name: entry.chunks for entry in read_chain(tmp_path, name)[-1][0].tensors}
        assert chunks["model.tied"] == chunks["model.w"]
        packings |= {chunk.packing for chunk in chunks["model.w"]}
    assert packings == {packing.Packing.PLANES, packing.Packing.DELTA}
    restored = restore_newest(tmp_path, layout_of(tensors), [].append)
    assert restored is not None
    for name, found in restored.published.snapshot.named().items():
        assert torch.equal(found, tensors[name]), name


def test_old_chains_go_in_two_passes_and_the_kept_ones_restore(tmp_path: Path) -> None:
    mine = claim(tmp_path, NO_JOB, now_s=0.0)
    write(tmp_path, list(range(1, 6)), base_every=2, keep=2, mine=mine)  # bases 1, 3, 5
    assert [name for name in os.listdir(tmp_path) if name.endswith(".doomed")], "the first pass only renames"
    assert checkpoint_names(tmp_path)[-1].startswith("step-0000000003")
    assert len(list(tmp_path.glob("data-step-0000000001*"))) == 1
    Retention(mine, RetentionPolicy(keep=2)).sweep()
    assert not list(tmp_path.glob("data-step-0000000001*"))
    assert not list(tmp_path.glob("*.doomed"))
    assert_holds(tmp_path, 5)
    data_file(tmp_path, checkpoint_names(tmp_path)[0]).unlink()
    assert_holds(tmp_path, 4)


def test_leftovers_of_a_dead_writer_are_removed_after_two_passes(tmp_path: Path) -> None:
    claim(tmp_path, NO_JOB, now_s=0.0)
    mine = claim(tmp_path, NO_JOB, now_s=0.0)
    left = [tmp_path / "data-step-0000000009.a0000-0123456789ab.bin", tmp_path / "step-0000000009.a0000.json.0a1b.tmp"]
    ours = tmp_path / "data-step-0000000009.a0001-0123456789ab.bin"
    for path in (*left, ours):
        path.write_bytes(b"half")
    retention = Retention(mine, RetentionPolicy(keep=2))
    assert retention.sweep() == []
    assert sorted(retention.sweep()) == sorted(path.name for path in left)
    assert ours.exists()


# ---- damage


def test_a_damaged_chunk_makes_the_one_before_count_and_is_named(tmp_path: Path) -> None:
    write(tmp_path, [1, 2, 3])
    damaged = data_file(tmp_path, checkpoint_names(tmp_path)[0])
    flip_byte(damaged, damaged.stat().st_size // 2)
    warnings: list[str] = []
    restored = restore(tmp_path, warnings)
    assert restored is not None
    assert restored.damaged == ("step-0000000003.a0000",)
    assert len(warnings) == 1
    assert f"in {damaged.name}" in warnings[0]
    assert "chunk " in warnings[0]
    assert_holds(tmp_path, 2)


def test_a_damaged_base_makes_its_whole_chain_unusable(tmp_path: Path) -> None:
    write(tmp_path, [1, 2, 3, 4], base_every=2)
    flip_byte(data_file(tmp_path, "step-0000000003.a0000"), 100)
    assert_holds(tmp_path, 2)


@pytest.mark.parametrize("keep_bytes", [0, 1, 200])
def test_a_torn_manifest_or_data_file_is_no_checkpoint(tmp_path: Path, keep_bytes: int) -> None:
    write(tmp_path, [1, 2, 3])
    manifest = tmp_path / "step-0000000003.a0000.json"
    os.truncate(manifest, keep_bytes)
    assert_holds(tmp_path, 2)
    os.truncate(data_file(tmp_path, "step-0000000002.a0000"), keep_bytes)
    assert_holds(tmp_path, 1)


def test_an_altered_manifest_is_refused(tmp_path: Path) -> None:
    write(tmp_path, [1, 2])
    path = tmp_path / "step-0000000002.a0000.json"
    body = json.loads(path.read_bytes())
    path.write_bytes(files.to_json(body | {"step": 99}))
    warnings: list[str] = []
    restore(tmp_path, warnings)
    assert "checksum does not match" in warnings[0]
    assert_holds(tmp_path, 1)


def test_a_parent_of_another_chain_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", [1, 2])
    write(tmp_path / "b", [1])
    other = tmp_path / "b" / "step-0000000001.a0000.json"
    (tmp_path / "a" / other.name).write_bytes(other.read_bytes())
    with pytest.raises(DamagedError, match=r"step-0000000001.a0000.json is not the one that step-0000000002"):
        read_chain(tmp_path / "a", "step-0000000002.a0000")


def test_only_damaged_checkpoints_are_an_error_and_none_is_a_new_start(tmp_path: Path) -> None:
    assert restore(tmp_path / "never") is None
    write(tmp_path, [1])
    data_file(tmp_path, "step-0000000001.a0000").unlink()
    with pytest.raises(NoCheckpointError, match="all 1 checkpoints are damaged"):
        restore(tmp_path)


def test_a_checkpoint_of_another_model_is_refused_with_the_first_difference(tmp_path: Path) -> None:
    write(tmp_path, [1])
    other = state(0) | {"model.w": torch.zeros(37, 92)}
    with pytest.raises(
        MismatchError, match=r"this model has 'model.w' float32\[37, 92\], the checkpoint has it as float32\[37, 91\]"
    ):
        restore_newest(tmp_path, layout_of(other), print)


# ---- fencing


def test_a_stale_attempt_publishes_nothing(tmp_path: Path) -> None:
    stale = claim(tmp_path, NO_JOB, now_s=0.0)
    write(tmp_path, [1], mine=stale)
    later = claim(tmp_path, NO_JOB, now_s=0.0)
    assert (stale.attempt, later.attempt) == (0, 1)
    with pytest.raises(StaleAttemptError, match="this is attempt 0, and attempt 1 has taken over"):
        write(tmp_path, [2], mine=stale)
    with pytest.raises(StaleAttemptError):
        Retention(stale, RetentionPolicy(keep=1)).sweep()
    assert checkpoint_names(tmp_path) == ["step-0000000001.a0000"]
    write(tmp_path, [2], mine=later)
    assert_holds(tmp_path, 2)


def test_a_claim_during_the_write_stops_the_publication(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = claim(tmp_path, NO_JOB, now_s=0.0)
    draft = files.write_draft

    def claimed_meanwhile(path: Path, content: bytes) -> Path:
        claim(tmp_path, NO_JOB, now_s=0.0)
        return draft(path, content)

    monkeypatch.setattr(files, "write_draft", claimed_meanwhile)
    with pytest.raises(StaleAttemptError):
        write(tmp_path, [1], mine=stale)
    assert not list(tmp_path.glob("step-*"))


def test_an_older_attempt_of_the_job_that_starts_late_is_refused(tmp_path: Path) -> None:
    assert claim(tmp_path, JobFacts(job="17", attempt=1, restarts=1), now_s=0.0).attempt == 1
    with pytest.raises(StaleAttemptError, match="cannot start attempt 0 of job 17 .*: attempt 1 of it"):
        claim(tmp_path, JobFacts(job="17", attempt=0, restarts=0), now_s=0.0)
    assert claim(tmp_path, JobFacts(job="18", attempt=0, restarts=0), now_s=0.0).attempt == 2
    assert claim(tmp_path, JobFacts(job="18", attempt=7, restarts=7), now_s=0.0).attempt == 7
    again = claim(tmp_path, JobFacts(job="18", attempt=7, restarts=7), now_s=0.0)
    assert again.attempt == 8, "another step of the same attempt may go on"


# ---- a share that fails


def test_an_error_of_close_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing_close(descriptor: int) -> None:
        real_close(descriptor)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    real_close = os.close
    monkeypatch.setattr(files.os, "close", failing_close)
    with pytest.raises(PublishError, match="cannot write .*: Disk quota exceeded"):
        files.write_new(tmp_path / "x", [b"abc"])
    monkeypatch.undo()
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("share", ["direct", "not direct", "short writes", "blocks refused"])
def test_a_file_of_many_blocks_has_the_given_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: str
) -> None:
    real_open, real_write = os.open, os.pwrite

    def opened(path: Path, flags: int, *more: int) -> int:
        if share == "not direct" and flags & files.DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *more)

    def written(descriptor: int, block: memoryview, at: int) -> int:
        if share == "blocks refused" and len(block) == files.BLOCK_BYTES and not refused:
            refused.append(at)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_write(descriptor, block[:3000] if share == "short writes" else block, at)

    refused: list[int] = []
    monkeypatch.setattr(files, "BLOCK_BYTES", 8192)
    monkeypatch.setattr(files.os, "open", opened)
    monkeypatch.setattr(files.os, "pwrite", written)
    pieces = [bytes([number]) * (number * 397 % 20_011) for number in range(1, 40)]
    length = files.write_new(tmp_path / "x", pieces, direct=True)
    assert (tmp_path / "x").read_bytes() == b"".join(pieces)
    assert length == sum(map(len, pieces))
    assert bool(refused) == (share == "blocks refused")


def test_an_error_in_the_middle_of_a_file_ends_it_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, block: memoryview, at: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "BLOCK_BYTES", 8192)
    monkeypatch.setattr(files.os, "pwrite", full)
    with pytest.raises(PublishError, match="No space left"):
        files.write_new(tmp_path / "x", [b"abc" * 99_999] * 9, direct=True)
    assert not (tmp_path / "x").exists()


def test_a_link_whose_reply_was_lost_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_link = os.link

    def linked_but_says_exists(source: Path, target: Path) -> None:
        real_link(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(files.os, "link", linked_but_says_exists)
    files.commit(files.write_draft(tmp_path / "x", b"abc"), tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == b"abc"
    monkeypatch.undo()
    draft = files.write_draft(tmp_path / "x", b"other")
    with pytest.raises(PublishError, match="cannot publish .*: File exists"):
        files.commit(draft, tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == b"abc"


def test_a_share_without_hard_links_still_publishes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(files.os, "link", refuse)
    files.commit(files.write_draft(tmp_path / "x", b"abc"), tmp_path / "x")
    with pytest.raises(PublishError, match="the name is taken"):
        files.commit(files.write_draft(tmp_path / "x", b"other"), tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == b"abc"


def test_a_full_share_costs_a_checkpoint_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = claim(tmp_path, NO_JOB, now_s=0.0)
    writer = ThreadWriter(mine, None, 10, Retention(mine, RetentionPolicy(keep=2)), chunk_bytes=CHUNK_BYTES)
    with monkeypatch.context() as full:
        full.setattr(files.os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
        writer.begin(state(1), facts(1, mine.attempt))
        report = writer.wait()
    assert report is not None
    assert "No space left" in (report.error or "")
    assert writer.last_step == -1
    writer.begin(state(2), facts(2, mine.attempt))
    assert (writer.wait() or report).error is None
    writer.close()
    assert_holds(tmp_path, 2)


def test_a_writer_killed_at_any_file_operation_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    operations = 10  # of one claim and one increment: see the assertion on the last
    with started([*python(), HERE / "die_in_write.py", tmp_path, str(operations)]) as process:
        ended = finish(process)
    told = ended.output.split("\n")[:operations]
    assert told == [f"{n} killed" for n in range(1, operations)] + [f"{operations} survived"], ended.output
    for number in range(1, operations + 1):
        directory = tmp_path / str(number)
        restored = restore(directory)
        assert restored is not None
        assert restored.damaged == (), "a killed writer leaves nothing that looks like a checkpoint and is none"
        assert_holds(directory, restored.published.manifest.facts.step)
        write(directory, [4])
        assert_holds(directory, 4)


def test_no_wide_import_is_needed_to_restore() -> None:
    code = "import hpctrain.checkpoint, sys; print('matplotlib' in sys.modules, 'mpi4py.MPI' in sys.modules)"
    with started([*python(), "-c", code]) as process:
        assert finish(process).output.split() == ["False", "False"]


def test_a_claim_that_an_old_listing_does_not_have_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an NFS client lists a directory until its attributes are a minute old."""
    assert claim(tmp_path, NO_JOB, now_s=0.0).attempt == 0
    looked: list[object] = []

    def listed(directory: object) -> list[str]:
        looked.append(directory)
        assert len(looked) < 10, "it looks again and again"
        return []

    monkeypatch.setattr(files.os, "listdir", listed)
    assert claim(tmp_path, NO_JOB, now_s=0.0).attempt == 1
