"""Elastic runs: ranks are killed, stopped and fail; the others take every step, each once, with the same samples."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from ranks import HERE, Ended, finish, python, started
from test_train_resume import SMALL, STEPS, WITH_WAITING, lines_of
from waiting import PATIENCE_S, wait_until

from hpctrain.errors import EXIT_REQUEUE

FAULTY = HERE / "faulty_chargpt.py"
# On a busy machine a healthy rank, too, may not be heard of for seconds.
PATIENT, MISSES_SOON = ("--silence", "60"), ("--silence", "8")


def command(out: Path, fault: str, *more: str) -> list[str | Path]:
    """An elastic run of the faulty GPT; `more` are options of the run."""
    run = [sys.executable, "-m", "hpctrain.elastic", "--report", out.with_suffix(".json"), *PATIENT, *more, "--"]
    return [*run, *python(), FAULTY, fault, "--out", out, *SMALL]


def elastic(out: Path, fault: str, *more: str, backend: str = "auto", words: tuple[str, ...] = ()) -> Ended:
    with started([*command(out, fault, *more), "--backend", backend, *words], WITH_WAITING) as process:
        return finish(process)


def losses_of(out: Path) -> list[float]:
    """The loss of each step, after checking that every step is told once, in order."""
    lines = [line for line in lines_of(out) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return [line["loss"] for line in lines]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run in which nobody is lost."""
    out = tmp_path_factory.mktemp("elastic") / "run"
    ended = elastic(out, "none", "--ranks", "3")
    assert ended.status == 0, ended.output
    assert json.loads(out.with_suffix(".json").read_text())["faults"] == []
    return losses_of(out)


@pytest.mark.parametrize("slot", [0, 1])
def test_the_other_ranks_continue_without_a_killed_one(undisturbed: list[float], tmp_path: Path, slot: int) -> None:
    """Slot 0 is as a rule the rank that writes, and another one writes then."""
    ended = elastic(tmp_path / "run", f"slot:{slot}:11", "--ranks", "3")
    assert ended.status == 0, ended.output
    assert losses_of(tmp_path / "run") == pytest.approx(undisturbed, rel=1e-4)
    worlds = [line["world"] for line in lines_of(tmp_path / "run") if "loss" in line]
    assert worlds[9] == 3
    assert worlds[10] == 2, "the very next step is taken by the two that are left"
    report = json.loads((tmp_path / "run.json").read_text())
    (fault,) = report["faults"]
    assert (fault["step"], fault["lost_steps"], fault["lost"][0]["slot"]) == (10, 0, slot)
    assert fault["next_step_s"] > 0
    assert "1 faults, 0 steps lost, missed after" in ended.output
    goodput = [line["interruptions"] for line in lines_of(tmp_path / "run") if "loss" in line]
    assert goodput == [0] * 10 + [1] * (STEPS - 10)


def test_a_step_that_the_lost_rank_did_not_report_is_reported_by_another(
    undisturbed: list[float], tmp_path: Path
) -> None:
    ended = elastic(tmp_path / "run", "untold:11", "--ranks", "2")
    assert ended.status == 0, ended.output
    assert losses_of(tmp_path / "run") == pytest.approx(undisturbed, rel=1e-4)


def test_a_rank_that_is_silent_is_missed_and_ends_when_it_wakes(undisturbed: list[float], tmp_path: Path) -> None:
    ended = elastic(tmp_path / "run", "still:1:11", "--ranks", "3", *MISSES_SOON)
    assert ended.status == 0, ended.output
    assert "no heartbeat for too long" in ended.output
    assert losses_of(tmp_path / "run") == pytest.approx(undisturbed, rel=1e-4)


def test_a_spare_or_a_new_process_steps_in_and_gets_the_state_from_a_peer(
    undisturbed: list[float], tmp_path: Path
) -> None:
    """Fewer than two are not enough here, so nothing can go on before."""
    ended = elastic(tmp_path / "run", "slot:0:11", "--ranks", "2", "--least", "2", "--spares", "1")
    assert ended.status == 0, ended.output
    assert losses_of(tmp_path / "run") == pytest.approx(undisturbed, rel=1e-4)
    assert {line["world"] for line in lines_of(tmp_path / "run") if "loss" in line} == {2}


@pytest.mark.parametrize("fault", ["slot:1:11", "still:1:11"])
def test_gloo_gets_a_fresh_group_for_every_generation(undisturbed: list[float], tmp_path: Path, fault: str) -> None:
    """Of the second fault Gloo knows nothing, and would wait for ever."""
    ended = elastic(tmp_path / "run", fault, "--ranks", "3", *MISSES_SOON, backend="gloo")
    assert ended.status == 0, ended.output
    assert "cannot sum over gloo" in ended.output
    assert losses_of(tmp_path / "run") == pytest.approx(undisturbed, rel=1e-4)
    worlds = [line["world"] for line in lines_of(tmp_path / "run") if "loss" in line]
    assert (worlds[9], worlds[10]) == (3, 2)


def test_a_backend_that_cannot_lose_ranks_is_refused(tmp_path: Path) -> None:
    ended = elastic(tmp_path / "run", "none", "--ranks", "2", backend="mpi")
    assert ended.status == 1
    assert "cannot use backend 'mpi' in an elastic run" in ended.output


def test_a_run_with_resume_never_continues_without_the_rank_that_wrote(
    undisturbed: list[float], tmp_path: Path
) -> None:
    ended = elastic(tmp_path / "run", "unclaimed:11:1", "--ranks", "2", words=("--resume", "never"))
    assert ended.status == 0, ended.output
    assert losses_of(tmp_path / "run") == pytest.approx(undisturbed, rel=1e-4)
    ended = elastic(tmp_path / "run", "none", "--ranks", "2", words=("--resume", "never"))
    assert ended.status == 1
    assert "cannot start a new run" in ended.output


def test_the_share_takes_nothing_when_the_rank_that_wrote_is_lost(undisturbed: list[float], tmp_path: Path) -> None:
    """The next one cannot claim the attempt at first, and does before the end."""
    ended = elastic(tmp_path / "run", "unclaimed:11:13", "--ranks", "2")
    assert ended.status == 0, ended.output
    assert "checkpoint: cannot write checkpoints now: " in ended.output
    assert "checkpoint: checkpoints can be written again" in ended.output
    assert losses_of(tmp_path / "run") == pytest.approx(undisturbed, rel=1e-4)
    assert f"checkpoint: step {STEPS}, " in ended.output


def test_a_last_state_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    ended = elastic(tmp_path / "run", f"unclaimed:11:{STEPS + 1}", "--ranks", "2")
    assert ended.status == 1
    assert f"cannot save the last state (step {STEPS}): " in ended.output


def test_checkpoints_that_are_due_when_it_is_best_need_no_other_rank(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "hpctrain.elastic", *PATIENT, "--ranks", "2", "--", *python(), HERE / "tiny.py"]
    options = ["--out", tmp_path, "--steps", "40", "--checkpoint-every", "auto"]
    with started([*run, *options], WITH_WAITING) as process:
        ended = finish(process)
    assert ended.status == 0, ended.output
    assert "checkpoint: step 10, " in ended.output
    assert "generation 1" not in ended.output


def test_a_rank_that_does_not_fit_is_turned_away_and_the_others_continue(
    undisturbed: list[float], tmp_path: Path
) -> None:
    """Who comes in the place of a lost one has other code, as after an update: the run goes on without."""
    ended = elastic(tmp_path / "run", "updated:1:11:16", "--ranks", "3")
    assert ended.status == 0, ended.output
    assert "slot 1 is given up: cannot start: ranks have different code" in ended.output
    assert losses_of(tmp_path / "run") == pytest.approx(undisturbed, rel=1e-4)
    worlds = [line["world"] for line in lines_of(tmp_path / "run") if "loss" in line]
    assert worlds == [3] * 10 + [2] * (STEPS - 10)
    assert ended.output.count("is given up") == 1


def test_silence_of_a_length_that_would_lose_healthy_ranks_is_refused(tmp_path: Path) -> None:
    ended = elastic(tmp_path / "run", "none", "--silence", "0.1")
    assert ended.status == 2
    assert "--silence 0.1: must be more than 0.5 s" in ended.output


def test_an_error_that_every_rank_would_meet_ends_the_run(tmp_path: Path) -> None:
    ended = elastic(tmp_path / "run", "raises:1:5", "--ranks", "2")
    assert ended.status == 1
    assert "a fault of the test's" in ended.output
    assert re.search(r"rank 1 of 2 failed", ended.output)


def test_a_wrong_option_ends_the_run_at_once(tmp_path: Path) -> None:
    wrong = [*command(tmp_path / "run", "none", "--ranks", "2"), "--no-such-option"]
    with started(wrong, WITH_WAITING) as process:
        ended = finish(process)
    assert ended.status == 2
    assert "before the run began" in ended.output


def test_a_stop_signal_is_forwarded_and_the_run_resumes_later(undisturbed: list[float], tmp_path: Path) -> None:
    with started(command(tmp_path / "run", "await:8", "--ranks", "2"), WITH_WAITING) as process:
        wait_until(lambda: len(lines_of(tmp_path / "run")) >= 7, what="seven steps")
        process.send_signal(signal.SIGUSR1)
        ended = finish(process)
    assert ended.status == EXIT_REQUEUE, ended.output
    ended = elastic(tmp_path / "run", "none", "--ranks", "3")
    assert ended.status == 0, ended.output
    assert losses_of(tmp_path / "run") == pytest.approx(undisturbed, rel=1e-4)


def test_ranks_that_are_killed_again_and_again_before_the_run_begins_end_it() -> None:
    run = [sys.executable, "-m", "hpctrain.elastic", "--ranks", "1", "--", "sh", "-c", "kill -9 $$"]
    with started(run, WITH_WAITING) as process:
        ended = finish(process)
    assert ended.status == 1
    assert "6 ranks were lost without a step between" in ended.output
    assert ended.output.count("elastic: slot 0: its process was killed by SIGKILL before it joined\n") == 6


def test_a_stop_signal_before_the_run_has_begun_ends_it(tmp_path: Path) -> None:
    """Ranks that never come: what they are doing still, importing say, ends by the signal itself."""
    run = [sys.executable, "-m", "hpctrain.elastic", "--ranks", "2", "--", "sh", "-c", "echo here; exec sleep 1000"]
    with started(run, WITH_WAITING) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGTERM)
        ended = finish(process)
    assert ended.status == EXIT_REQUEUE, ended.output
    assert "SIGTERM came before the run began" in ended.output


def test_a_run_with_a_closed_output_pipe_ends(tmp_path: Path) -> None:
    readable, writable = os.pipe()
    os.close(readable)
    with started(command(tmp_path / "deaf", "slot:1:11", "--ranks", "2"), WITH_WAITING, output=writable) as run:
        assert run.wait(PATIENCE_S) == 1, "its ranks cannot print"
    os.close(writable)
