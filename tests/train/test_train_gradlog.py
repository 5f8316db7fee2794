"""Increments that are gradients: a restart takes their steps again, to the same bits, or does not believe them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from ranks import HERE, needs_mpi, run_mpi
from thread_writer import ThreadWriter

from hpctrain.checkpoint import replay, restore
from hpctrain.checkpoint import replay as replay_in_memory
from hpctrain.checkpoint.chunks import digest
from hpctrain.checkpoint.encryption import CheckpointKey
from hpctrain.checkpoint.manifest import CheckpointFacts, checkpoint_names, from_bytes
from hpctrain.checkpoint.replay import replay_through
from hpctrain.checkpoint.restore import RestoredCheckpoint, restore_newest
from hpctrain.checkpoint.writing import files, gradient_log
from hpctrain.checkpoint.writing.files import Claim, claim
from hpctrain.checkpoint.writing.gradient_log import GradientLog
from hpctrain.checkpoint.writing.maker import CheckpointReport
from hpctrain.checkpoint.writing.publish import Published, Retention, RetentionPolicy
from hpctrain.checkpoint.writing.snapshot import layout_of
from hpctrain.checkpoint.writing.writer import CheckpointWriter
from hpctrain.env import JobFacts
from hpctrain.errors import NoCheckpointError
from hpctrain.loop import live_tensors
from hpctrain.optim.adamw import AdamW, multiply
from hpctrain.optim.torch_optim import optimizer_for

NO_JOB = JobFacts(job=None, attempt=None, restarts=0)
MAKERS = {
    "ours": lambda model: AdamW(model.named_parameters()),
    "adamw": lambda model: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], amsgrad=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "nadam": lambda model: torch.optim.NAdam([p for p in model.parameters() if p.requires_grad]),
}
WITH_WAITING = {"PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(HERE.parent)]).strip(os.pathsep)}
TINY = HERE / "tiny.py"
EVERY_STEP = ("--checkpoint-every", "1", "--base-every", "100", "--steps", "16", "--patient")


class World:
    """A model that is trained by made-up gradients, and its checkpoints."""

    def __init__(
        self,
        directory: Path,
        kind: str = "ours",
        *,
        bf16: bool = False,
        frozen: bool = False,
        joined: bool = False,
        tied: bool = False,
        key: CheckpointKey | None = None,
    ) -> None:
        torch.manual_seed(3)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(40, 50), torch.nn.BatchNorm1d(50), torch.nn.Linear(50, 60), torch.nn.Linear(60, 2)
        )
        if frozen:
            self.model[2].requires_grad_(False)
        if tied:
            self.model.append(torch.nn.Linear(50, 60))
            self.model[4].weight = self.model[2].weight
        self.optimizer = optimizer_for(self.model, MAKERS[kind](self.model))
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.groups = [self.trained] if joined else [self.trained[2:], self.trained[:2]]
        self.flats = [torch.zeros(sum(p.numel() for p in group)) for group in self.groups]
        for group, flat in zip(self.groups, self.flats, strict=True):
            for parameter, part in zip(group, flat.split([p.numel() for p in group]), strict=True):
                parameter.grad = part.view_as(parameter)
        self.directory, self.bf16, self.step, self.key = directory, bf16, 0, key
        self.warnings: list[str] = []

    def tensors(self) -> dict[str, torch.Tensor]:
        return live_tensors(self.model, self.optimizer)

    def restore(self) -> RestoredCheckpoint | None:
        again = replay_through(self.model, self.optimizer.step, self.tensors, self.warnings.append, self.key)
        restored = restore_newest(self.directory, layout_of(self.tensors()), self.warnings.append, again, self.key)
        if restored is not None:
            restored.pour(self.tensors())
            self.step = restored.published.manifest.facts.step
        return restored

    def writer(self, base_every: int = 100, mine: Claim | None = None, most_bytes: int = 1 << 20) -> CheckpointWriter:
        restored = self.restore()
        mine = mine or claim(self.directory, NO_JOB, now_s=0.0)
        parent = restored.published if restored else None
        writer = self.writer_for(mine, parent, base_every)
        self.log = GradientLog(self.model, self.groups, self.flats, self.step, most_bytes, self.optimizer.settings())
        writer.follow(self.log)
        self.attempt = mine.attempt
        return writer

    def writer_for(self, mine: Claim, parent: Published | None, base_every: int) -> CheckpointWriter:
        retention = Retention(mine, RetentionPolicy(keep=9), key=self.key)
        return ThreadWriter(mine, parent, base_every, retention, chunk_bytes=4096, key=self.key)

    def move(self) -> None:
        self.step += 1
        generator = torch.Generator().manual_seed(self.step)
        for flat in self.flats:
            flat.copy_(torch.randn(flat.shape, generator=generator) * 1e-3)
            if self.bf16:
                flat.copy_(flat.bfloat16())
        self.log.note(self.step, 1e-2 / self.step, 0.37)
        multiply(self.flats, 0.37)
        self.optimizer.step(self.step, 1e-2 / self.step)
        self.model[1].running_mean.add_(self.step)

    def facts(self) -> CheckpointFacts:
        return CheckpointFacts(
            step=self.step,
            attempt=self.attempt,
            generation=0,
            world=1,
            job=None,
            written_at_s=0.0,
            state={"sampler": {"next_sample": self.step}},
        )

    def write(self, writer: CheckpointWriter) -> CheckpointReport:
        writer.begin(None if writer.log_suffices() else self.tensors(), self.facts())
        report = writer.wait()
        assert report is not None
        return report

    def run(self, steps: int, every: int = 1, **options: object) -> list[CheckpointReport]:
        writer = self.writer(**options)
        reports = []
        for number in range(1, steps + 1):
            self.move()
            if number % every == 0:
                reports.append(self.write(writer))
        writer.close()
        return reports


def kinds(reports: list[CheckpointReport]) -> list[str]:
    assert [report.error for report in reports] == [None] * len(reports)
    return [report.kind for report in reports]


def assert_alike(one: World, other: World) -> None:
    assert one.step == other.step
    for name, tensor in one.tensors().items():
        assert torch.equal(tensor, other.tensors()[name]), name


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", MAKERS)
def test_replayed_steps_lead_to_the_same_bits_and_so_do_later_ones(tmp_path: Path, kind: str, frozen: bool) -> None:
    if kind == "sgd" and frozen:
        pytest.skip("SGD is given all parameters here")
    whole = World(tmp_path / "whole", kind, frozen=frozen)
    whole.run(8)
    first = World(tmp_path / "parts", kind, frozen=frozen)
    chosen = "delta" if kind == "sgd" else "gradients"  # with one moment there is less to save
    assert kinds(first.run(5)) == ["base", *[chosen] * 4]
    second = World(tmp_path / "parts", kind, frozen=frozen)
    assert second.restore() is not None
    assert_alike(first, second)
    third = World(tmp_path / "parts", kind, frozen=frozen)
    assert kinds(third.run(3)) == [chosen] * 3
    assert_alike(third, whole)
    assert third.warnings == []


@pytest.mark.parametrize("kind", ["ours", "adamw"])
def test_weights_with_two_names_are_taken_again_under_both_and_not_stored_beside(tmp_path: Path, kind: str) -> None:
    first = World(tmp_path, kind, tied=True)
    assert kinds(first.run(3)) == ["base", "gradients", "gradients"]
    newest = from_bytes(
        checkpoint_names(tmp_path)[0], (tmp_path / f"{checkpoint_names(tmp_path)[0]}.json").read_bytes()
    )
    assert {entry.name for entry in newest.tensors} == {f"model.1.{name}" for name, _ in first.model[1].named_buffers()}
    second = World(tmp_path, kind, tied=True)
    restored = second.restore()
    assert restored is not None
    assert_alike(first, second)
    kept = restored.published.snapshot.named()
    assert torch.equal(kept["model.4.weight"], kept["model.2.weight"])
    assert second.warnings == []


def test_logged_steps_are_replayed_in_place_if_the_layout_is_the_same(tmp_path: Path) -> None:
    first = World(tmp_path)
    first.run(4)
    straight, turned = World(tmp_path), World(tmp_path)
    weight = turned.model[0].weight
    weight.data = weight.data.t().contiguous().t()
    restored = straight.restore()
    assert restored is not None
    assert restored.published.snapshot is None
    assert_alike(first, straight)
    restored = turned.restore()
    assert restored is not None
    assert restored.published.snapshot is not None
    assert_alike(first, turned)


def test_the_smaller_kind_is_chosen_and_printed(tmp_path: Path) -> None:
    single = World(tmp_path / "one").run(3)
    assert kinds(single) == ["base", "gradients", "gradients"]
    assert re.fullmatch(
        r"the gradients of 1 step take 0.0\d MB, the changes about 0.\d\d MB: increments are gradients, \d.\d times less "
        r"than the state",
        single[1].note,
    )
    assert single[2].note == ""
    several = World(tmp_path / "six").run(18, every=6)
    assert kinds(several) == ["base", "delta", "delta"]
    assert "the gradients of 6 steps take" in several[1].note
    assert "increments are changes" in several[1].note


class LongChunksWorld(World):
    """As a `World`, with chunks as long as a run's: what each has beside its numbers does not count."""

    def writer_for(self, mine: Claim, parent: Published | None, base_every: int) -> CheckpointWriter:
        return ThreadWriter(mine, parent, base_every, Retention(mine, RetentionPolicy(keep=9)))


def test_increments_of_gradients_are_as_small_as_they_should_be(tmp_path: Path) -> None:
    """Random numbers have the fractions of real gradients, and the manifest is counted too."""
    sizes = {}
    for name, options in {"fp32": {}, "bf16": {"bf16": True}, "frozen": {"frozen": True}}.items():
        world = LongChunksWorld(tmp_path / name, **options)
        world.run(4)
        state_bytes = sum(tensor.nbytes for tensor in world.tensors().values())
        data = next((tmp_path / name).glob("data-step-0000000004*"))
        sizes[name] = state_bytes / data.stat().st_size
    assert sizes["fp32"] > 3.2
    assert sizes["bf16"] > 6.4
    assert sizes["frozen"] > 3.2


def test_chains_are_bounded_and_each_is_measured_anew(tmp_path: Path) -> None:
    reports = World(tmp_path).run(9, base_every=4)
    assert kinds(reports) == ["base", *["gradients"] * 3, "base", *["gradients"] * 3, "base"]
    assert [bool(report.note) for report in reports] == [False, True, False, False] * 2 + [False]


def test_a_log_that_needs_too_much_memory_is_dropped_and_changes_are_written(tmp_path: Path) -> None:
    world = World(tmp_path)
    step_bytes = sum(flat.nbytes for flat in world.flats)
    writer = world.writer(most_bytes=2 * step_bytes)
    found = []
    for steps in (1, 1, 2, 3, 1):
        for _ in range(steps):
            world.move()
        found.append(world.write(writer).kind)
    writer.close()
    assert found == ["base", "gradients", "gradients", "delta", "gradients"]
    again = World(tmp_path)
    again.restore()
    assert_alike(again, world)


def test_gradients_since_a_checkpoint_that_failed_stand_on_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    writer = world.writer()
    for _ in range(3):
        world.move()
        world.write(writer)
    world.move()
    with monkeypatch.context() as full:
        full.setattr(files.os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        assert "No space left" in (world.write(writer).error or "")
    world.move()
    assert world.write(writer).kind == "delta"
    world.move()
    assert world.write(writer).kind == "gradients"
    writer.close()
    again = World(tmp_path)
    again.restore()
    assert_alike(again, world)


@pytest.mark.parametrize("open_files", [1, 64])
def test_steps_with_another_layout_of_gradients_are_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_files: int
) -> None:
    """As after a restart with another number of ranks, which has other buckets."""
    World(tmp_path).run(4)
    second = World(tmp_path, joined=True)
    assert kinds(second.run(3)) == ["gradients"] * 3
    monkeypatch.setattr(replay_in_memory, "OPEN_FILES", open_files)
    again = World(tmp_path)
    again.restore()
    assert_alike(again, second)
    assert again.warnings == []


def test_a_long_restore_prints_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    World(tmp_path).run(4)
    monkeypatch.setattr(restore, "PROGRESS_EVERY_S", 0.0)
    monkeypatch.setattr(restore, "PROGRESS_LEAST_BYTES", 0)
    again = World(tmp_path)
    again.restore()
    told = [re.sub(r"\d+ MB", "? MB", line) for line in again.warnings]
    assert re.fullmatch(r"reading checkpoint step-0000000004.a0000: \d+ % of \? MB", told[0])
    assert re.fullmatch(r"taking 3 logged steps again: \d+ % of \? MB", told[-1])


def test_a_damaged_gradient_makes_the_step_before_count_and_is_named(tmp_path: Path) -> None:
    before = World(tmp_path)
    before.run(4)
    data = flip(tmp_path, 4)
    after = World(tmp_path)
    restored = after.restore()
    assert restored is not None
    assert after.step == 3
    assert restored.damaged == ("step-0000000004.a0000",)
    assert data.name in after.warnings[0]


def flip(directory: Path, step: int) -> Path:
    """Change a bit in the middle of a checkpoint's data."""
    with (data := next(directory.glob(f"data-step-{step:010d}*"))).open("r+b") as stream:
        stream.seek(data.stat().st_size // 2)
        byte = stream.read(1)
        stream.seek(-1, 1)
        stream.write(bytes([byte[0] ^ 1]))
    return data


@pytest.mark.parametrize("step", [4, 5, 6], ids=["base", "gradients", "the last gradients"])
def test_a_damaged_checkpoint_leaves_nothing_in_live_weights(tmp_path: Path, step: int) -> None:
    before = World(tmp_path / "before")
    before.run(step - 1, base_every=3)
    World(tmp_path / "after").run(6, base_every=3)
    flip(tmp_path / "after", step)
    after = World(tmp_path / "after")
    assert after.restore() is not None
    assert_alike(after, before)


def rewrite(path: Path, change: object) -> None:
    """Change a manifest's log, with a checksum that fits."""
    body = json.loads(path.read_bytes())
    body.pop("checksum")
    change(body["log"])  # type: ignore[operator]
    path.write_bytes(files.to_json(body | {"checksum": digest(files.to_json(body))}) + b"\n")
    assert from_bytes(path.stem, path.read_bytes()).kind == "gradients"


def test_steps_that_lead_elsewhere_on_the_same_device_are_not_believed(tmp_path: Path) -> None:
    World(tmp_path).run(3)
    rewrite(tmp_path / "step-0000000003.a0000.json", lambda log: log["steps"][0].update(lr=0.5))
    world = World(tmp_path)
    world.restore()
    assert world.step == 2
    assert "its logged steps led to other weights than when they were taken first (by up to 0." in world.warnings[0]


def test_on_another_device_the_difference_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    World(tmp_path).run(3)
    rewrite(tmp_path / "step-0000000003.a0000.json", lambda log: log["steps"][0].update(lr=0.5))
    there = {"type": "cuda", "name": "H1", "torch": "9.9"}
    monkeypatch.setattr(replay, "device_facts", lambda model: there)
    world = World(tmp_path)
    world.restore()
    assert world.step == 3
    assert "were taken again on cuda H1 with torch 9.9, first on cpu" in world.warnings[0]


def test_a_log_without_an_optimizer_cannot_be_used(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.run(3)
    (tmp_path / "step-0000000001.a0000.json").rename(tmp_path / "gone")
    with pytest.raises(NoCheckpointError):
        restore_newest(tmp_path, layout_of(world.tensors()), print)
    (tmp_path / "gone").rename(tmp_path / "step-0000000001.a0000.json")
    restored = restore_newest(tmp_path, layout_of(world.tensors()), world.warnings.append)
    assert restored is not None
    assert restored.published.manifest.facts.step == 1
    assert "no optimizer here to replay its steps" in world.warnings[0]


def test_the_probe_sees_one_bit() -> None:
    model = torch.nn.Linear(3, 3)
    before = gradient_log.probe_of(model.state_dict())
    assert gradient_log.difference(before, before) == 0.0
    with torch.no_grad():
        model.weight.view(torch.int32)[0, 0] ^= 1
    assert 0 < gradient_log.difference(before, gradient_log.probe_of(model.state_dict())) < 1e-6


# ---- the whole path


def told(text: str) -> str:
    found = re.search(r"weights sha256 ([0-9a-f]{64})", text)
    assert found, text
    return found[1]


def kinds_in(out: Path) -> list[str]:
    directory = out / "checkpoints"
    return [from_bytes(name, (directory / f"{name}.json").read_bytes()).kind for name in checkpoint_names(directory)]


@pytest.mark.parametrize(
    "more", [(), ("--optimizer", "adamw"), ("--precision", "fp16", "--overflow", "0:7", "--grow", "3")]
)
def test_a_run_that_was_killed_ends_with_the_same_bits(tmp_path: Path, more: tuple[str, ...]) -> None:
    whole = run_mpi(1, TINY, "--out", tmp_path / "whole", *EVERY_STEP, *more, extra=WITH_WAITING)
    assert whole.status == 0, whole.output
    killed = run_mpi(1, TINY, "--out", tmp_path / "killed", *EVERY_STEP, *more, "--die", "0:12", extra=WITH_WAITING)
    assert killed.status != 0
    assert kinds_in(tmp_path / "killed").count("gradients") >= 1, kinds_in(tmp_path / "killed")
    resumed = run_mpi(1, TINY, "--out", tmp_path / "killed", *EVERY_STEP, *more, extra=WITH_WAITING)
    assert "resumed from step" in resumed.output
    assert told(resumed.output) == told(whole.output)


@needs_mpi
@pytest.mark.parametrize("more", [("--zero",), ("--sync", "exact")])
def test_ranks_that_were_killed_end_with_the_same_bits(tmp_path: Path, more: tuple[str, ...]) -> None:
    whole = run_mpi(2, TINY, "--out", tmp_path / "whole", *EVERY_STEP, *more, extra=WITH_WAITING)
    assert whole.status == 0, whole.output
    killed = run_mpi(2, TINY, "--out", tmp_path / "killed", *EVERY_STEP, *more, "--die", "1:12", extra=WITH_WAITING)
    assert killed.status != 0
    assert kinds_in(tmp_path / "killed").count("gradients") >= 1, kinds_in(tmp_path / "killed")
    resumed = run_mpi(2, TINY, "--out", tmp_path / "killed", *EVERY_STEP, *more, extra=WITH_WAITING)
    assert resumed.status == 0, resumed.output
    assert told(resumed.output) == told(whole.output)
