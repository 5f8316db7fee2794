"""The metrics of a training run, read while the file grows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from screens import training

from hpcsched.tui.lines import plain
from hpcsched.tui.training import MetricsReader, TrainingRun, checkpoint_lines, smoothed, training_lines


def write(path: Path, *lines: dict[str, Any]) -> None:
    with path.open("a") as stream:
        stream.writelines(json.dumps(line) + "\n" for line in lines)


def step(number: int, attempt: int = 0, **more: Any) -> dict[str, Any]:
    return {"step": number, "total_steps": 10, "loss": 4.0 - number / 10, "attempt": attempt, "time": 7.0, **more}


def saved(number: int, kind: str, attempt: int = 0) -> dict[str, Any]:
    facts = {"checkpoint_step": number, "checkpoint_kind": kind, "checkpoint_bytes": 1000, "checkpoint_write_s": 0.1}
    return facts | {"step": number, "attempt": attempt}


def test_a_missing_file_is_a_run_that_has_not_begun(tmp_path: Path) -> None:
    training = MetricsReader(tmp_path / "none").read()
    assert (training.step, training.points, training.done) == (0, (), 0.0)


def test_an_incomplete_line_counts_once_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reader = MetricsReader(path)
    whole = json.dumps(step(1)) + "\n"
    path.write_text(whole[:9])
    assert reader.read().points == ()
    path.open("a").write(whole[9:])
    assert reader.read().step == 1


def test_an_incomplete_line_of_a_killed_writer_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, step(1))
    with path.open("a") as stream:
        stream.write('{"step": 2, "lo\n')
    write(path, step(2, 1, resumed_from=1))
    training = MetricsReader(path).read()
    assert [(point.step, point.attempt) for point in training.points] == [(1, 0), (2, 1)]


def test_steps_after_the_checkpoint_of_a_resume_are_lost(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, *(step(n) for n in range(1, 7)), saved(4, "base"))
    reader = MetricsReader(path)
    assert reader.read().lost == ()
    write(path, step(5, 1, resumed_from=4), step(6, 1), step(7, 1))
    training = reader.read()
    assert [point.step for point in training.lost] == [5, 6]
    assert [(point.step, point.attempt) for point in training.counted] == [
        (1, 0), (2, 0), (3, 0), (4, 0), (5, 1), (6, 1), (7, 1),
    ]  # fmt: skip
    assert training.resumes == ((1, 4),)
    assert (training.attempt, training.done) == (1, 0.7)


def test_an_attempt_without_a_checkpoint_loses_all_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, step(1), step(2), step(1, 1))
    training = MetricsReader(path).read()
    assert [point.step for point in training.lost] == [1, 2]


def test_checkpoints_that_failed_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, saved(2, "base"), saved(4, "delta"), saved(6, "delta") | {"checkpoint_error": "no space left"})
    made = MetricsReader(path).read().checkpoints
    assert [(item.step, item.is_base) for item in made] == [(2, True), (4, False)]


def test_lines_of_other_programs_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": "x", "loss": 1}\n[1]\n{"step": 1, "loss": NaN}\n{"step": 2, "loss": "?"}\nhello\n')
    with path.open("a") as stream:
        stream.write('{"step": 3, "loss": ' + "[" * 100_000 + "\n" + '{"step": 1' + "0" * 400 + ', "loss": 1}\n')
    assert MetricsReader(path).read().points == ()


def test_a_pipe_in_place_of_the_file_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert MetricsReader(tmp_path / "metrics.jsonl").read().points == ()


def test_b5_a_link_in_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    write(tmp_path / "of another user", step(1))
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "of another user")
    assert MetricsReader(tmp_path / "metrics.jsonl").read().points == ()


def test_reports_make_a_curve_if_the_file_cannot_be_read() -> None:
    reader = MetricsReader(None)
    for number in (1, 2, 2, 3):
        reader.add_report({"step": number, "loss": 2.0, "attempt": 0, "checkpoint_step": None, "total_steps": None})
    assert [point.step for point in reader.read().points] == [1, 2, 3]


def test_lost_steps_are_told_from_those_that_count() -> None:
    run = training(steps=360, restart_at=300)
    assert [point.step for point in run.lost] == list(range(288, 301))
    assert "attempt 1" in plain(training_lines(run, 60)[1])


def test_checkpoint_marks_tell_full_ones_from_increments() -> None:
    assert plain(checkpoint_lines(training(), 60)[1]) == "█full ▄incr. █▄▄▄▄█▄▄▄▄█▄"
    assert plain(checkpoint_lines(TrainingRun(), 60)[0]) == "no checkpoint yet"


def test_the_moving_average_has_no_bias_at_its_start() -> None:
    assert smoothed([3.0, 3.0, 3.0]) == pytest.approx([3.0, 3.0, 3.0])
