"""What part of a run's time went into steps that count, over interruptions and restarts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from test_train_checkpoint import write

from hpctrain.metrics import BLOCK_BYTES, MetricsFile, read_backwards, read_metrics
from hpctrain.reporter import Goodput, ProcessorEnergy, RunRecord, resume_goodput


def life(path: Path, goodput: Goodput, steps: range, *, from_s: float, step_s: float = 1.0) -> None:
    """Steps of `step_s` each, one after another."""
    file = MetricsFile(path)
    for at, step in enumerate(steps, 1):
        now_s = from_s + at * step_s
        file.write({"step": step, "time": now_s} | goodput.step(step_s, now_s))
    file.close()


def test_steps_that_have_to_be_taken_again_counted_for_nothing(tmp_path: Path) -> None:
    """Ten steps, a night in the queue's time, and on from the checkpoint of step 6."""
    path = tmp_path / "metrics.jsonl"
    first = resume_goodput(read_backwards(path), 0, interrupted=True, began_at_s=1000.0)
    assert (first.began_at_s, first.interruptions, first.lost_steps) == (1000.0, 0, 0)
    life(path, first, range(1, 11), from_s=1000.0)
    again = resume_goodput(read_backwards(path), 6, interrupted=True, began_at_s=1030.0)
    assert (again.began_at_s, again.useful_s, again.interruptions, again.lost_steps) == (1000.0, 6.0, 1, 4)
    life(path, again, range(7, 15), from_s=1030.0)
    line = list(read_metrics(path))[10]
    assert (line["step"], line["interrupted_s"], line["lost_steps"]) == (7, 21.0, 4)
    last = list(read_metrics(path))[-1]
    assert (last["useful_s"], last["goodput"]) == (14.0, pytest.approx(14 / 38, abs=1e-4))
    assert "interrupted_s" not in last
    assert again.describe(1038.0) == "goodput: 36.8%, 14.0 s of steps in 38.0 s; interrupted 1 times, 4 steps lost"


def test_ranks_that_come_and_go_in_an_orderly_way_interrupt_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    life(path, resume_goodput(read_backwards(path), 0, interrupted=True, began_at_s=0.0), range(1, 4), from_s=0.0)
    account = resume_goodput(read_backwards(path), 3, interrupted=False, began_at_s=99.0)
    assert (account.useful_s, account.interruptions, account.lost_steps, account.last_at_s) == (3.0, 0, 0, None)


def test_everything_is_lost_without_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    life(path, resume_goodput(read_backwards(path), 0, interrupted=True, began_at_s=0.0), range(1, 4), from_s=0.0)
    account = resume_goodput(read_backwards(path), 0, interrupted=True, began_at_s=99.0)
    assert (account.began_at_s, account.useful_s, account.lost_steps) == (0.0, 0.0, 3)


def test_steps_count_although_their_lines_were_lost_with_a_rank(tmp_path: Path) -> None:
    """The share took nothing after step 3; another rank saw steps 4 to 9, and takes over."""
    path = tmp_path / "metrics.jsonl"
    life(path, resume_goodput(read_backwards(path), 0, interrupted=True, began_at_s=0.0), range(1, 4), from_s=0.0)
    record = RunRecord(tmp_path)
    record.follow(resume_goodput(read_backwards(path), 3, interrupted=False, began_at_s=99.0))
    for step in range(4, 10):
        record.count_step(step, 1.0)
    account = record.account(9, interrupted=True)
    assert (account.useful_s, account.lost_steps, account.interruptions, account.reported_step) == (9.0, 0, 1, 9)
    assert record.account(2, interrupted=True).useful_s == 2.0
    assert record.account(9, interrupted=True).last_at_s != 3.0


def test_lines_that_wait_are_in_the_account(tmp_path: Path) -> None:
    record = RunRecord(tmp_path / "away")
    (tmp_path / "away").write_text("in the way")
    account = record.account(0, interrupted=False)
    for step in (1, 2):
        record.file.write({"step": step, "time": 10.0 + step} | account.step(1.0, 10.0 + step))
    again = record.account(2, interrupted=True)
    assert (again.useful_s, again.reported_step, again.last_at_s) == (2.0, 2, 12.0)


def test_the_last_checkpoint_of_an_earlier_life_is_known_at_once(tmp_path: Path) -> None:
    write(tmp_path / "checkpoints", [5, 7])
    record = RunRecord(tmp_path)
    record.look_for_checkpoint(distrusted=["step-0000000007.a0000"])
    assert record.last_checkpoint.step == 5
    record = RunRecord(tmp_path)
    (tmp_path / "checkpoints" / "step-0000000009.a0000.json").write_text("{")
    record.look_for_checkpoint(distrusted=[])
    assert record.last_checkpoint.step == 7
    assert record.last_checkpoint.at_s == pytest.approx(time.monotonic() - time.time(), abs=60.0), (
        "it was written in 1970"
    )
    record.last_checkpoint.step = 11
    record.look_for_checkpoint(distrusted=[])
    assert record.last_checkpoint.step == 11


def counters(base: Path, **zones: tuple[str, int]) -> Path:
    """Write the kernel's counters of energy: zone, its name and its microjoules."""
    for zone, (name, microjoules) in zones.items():
        folder = base / f"intel-rapl:{zone[1:].replace('_', ':')}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "name").write_text(f"{name}\n")
        (folder / "energy_uj").write_text(f"{microjoules}\n")
        (folder / "max_energy_range_uj").write_text("262143000000\n")
    return base


def test_a_run_says_how_many_steps_a_kilowatt_hour_of_the_processors_gave(tmp_path: Path) -> None:
    begun = {"z0": ("package-0", 262_142_000_000), "z0_0": ("core", 0), "z0_1": ("dram", 5), "z1": ("psys", 0)}
    energy = ProcessorEnergy(counters(tmp_path, **begun))
    energy.begin(10)
    energy.begin(99)  # ranks were lost: the first step stays
    counters(tmp_path, z0=("package-0", 3_598_000_000), z0_0=("core", 9_000_000_000), z0_1=("dram", 1_000_005))
    assert energy.describe(110, ["n1", "n1"]) == (
        "energy: 0.001 kWh of the processors of this node (RAPL), 100,000 steps per kWh"
    )
    assert "of n1, 1 of 2 nodes (RAPL)" in energy.describe(110, ["n1", "n2"])


@pytest.mark.parametrize("readable", [False, True], ids=["no counters", "nothing counted"])
def test_a_run_says_nothing_of_energy_that_it_does_not_know(tmp_path: Path, readable: bool) -> None:
    energy = ProcessorEnergy(counters(tmp_path, z0=("package-0", 7)) if readable else tmp_path / "none")
    energy.begin(0)
    energy.sample(1e12)
    assert energy.describe(10, ["n1"]) == ""


def test_lines_of_a_version_that_kept_no_account_begin_none(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step":4,"time":5.0}\n')
    assert resume_goodput(read_backwards(tmp_path / "metrics.jsonl"), 4, interrupted=True, began_at_s=7.0) == Goodput(
        began_at_s=7.0
    )


def test_lines_are_read_backwards_over_blocks_and_half_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert list(read_backwards(path)) == []
    count = 3 * BLOCK_BYTES // 100
    path.write_text("".join(f'{{"step":{step},"of":"{"x" * 100}"}}\n' for step in range(count)) + '{"step":')
    assert [line["step"] for line in read_backwards(path)] == list(reversed(range(count)))
