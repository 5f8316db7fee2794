"""How the demo waits, fails and closes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import paramiko
import pytest
from screens import job, training, whole_screen

from hpcsched.demo.keeper import stop_kept
from hpcsched.demo.picture import Scene, StoryLine
from hpcsched.demo.show import DemoOptions, closing_rows, make_directory, plan_of, sample_of
from hpcsched.demo.story import Story, StoryResult
from hpcsched.errors import RequestError, UnavailableError
from hpcsched.loopback.cluster import is_hopeless
from hpcsched.tui.reading import ClusterScreen


class Screens:
    """A reader of screens that were made before."""

    def __init__(self, *screens: ClusterScreen) -> None:
        self._screens = list(screens)

    def look(self, chosen: str | int | None) -> ClusterScreen:
        return self._screens.pop(0) if len(self._screens) > 1 else self._screens[0]


class Nowhere:
    """A stage without an audience."""

    def tell(self, line: StoryLine) -> None: ...

    def frame(self, scene: Scene, elapsed_s: float) -> None: ...

    def show(self, lines: Sequence[str]) -> None: ...


def story_of(*screens: ClusterScreen) -> Story:
    return Story(None, None, Screens(*screens), Nowhere(), None)  # type: ignore[arg-type]


def test_waiting_ends_with_the_screen_that_was_waited_for() -> None:
    screen = story_of(whole_screen(now_s=1.0), whole_screen(now_s=2.0)).until(
        lambda screen: screen.now_s == 2.0, "the second", 30
    )
    assert screen.now_s == 2.0


def test_an_event_that_does_not_happen_in_time_is_reported_with_the_jobs_status() -> None:
    waits = job(1, "chargpt", state="PENDING", reason="Resources", reason_detail="n1 is busy")
    with pytest.raises(UnavailableError, match=r"waited 0 s for it to start; job 1 is PENDING .*Resources n1 is busy"):
        story_of(whole_screen(job=waits)).until(lambda screen: False, "it to start", 0)


def test_a_failed_training_ends_the_waiting_at_once() -> None:
    failed = job(1, "chargpt", state="FAILED", exit_code=3)
    with pytest.raises(UnavailableError, match="ended as FAILED.*exit code 3"):
        story_of(whole_screen(job=failed)).until(lambda screen: False, "more steps")


def test_a_training_that_ends_too_early_is_reported() -> None:
    over = job(1, "chargpt", state="COMPLETED", exit_code=0)
    with pytest.raises(UnavailableError, match="waited for a checkpoint, but the training is over"):
        story_of(whole_screen(job=over)).until(lambda screen: False, "a checkpoint")


def test_an_error_of_work_in_the_background_is_raised() -> None:
    def fail() -> None:
        raise UnavailableError("no power")

    with pytest.raises(UnavailableError, match="no power"):
        story_of(whole_screen()).meanwhile(fail)


def test_the_closing_figures() -> None:
    run = training(steps=500, restart_at=300, lost=13)
    result = StoryResult(server="sshd", run=run, attempts=2, lost_at=300, resumed_from=287, lost_node="n1")
    rows = dict(closing_rows(result))
    assert rows["attempts"] == "2"
    assert rows["lost and repeated"] == "13 steps (at step 300, resumed from 287)"
    assert rows["checkpoints"] == "20: 4 full of 8.4 MB, 16 increments of 8.4 MB"
    assert rows["training"].startswith("500 steps on 2 ranks (mpi), validation loss 3.33 -> 1.75")


def test_the_sample_is_that_of_the_last_attempt(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("--- sample ---\nold\n--- end ---\n--- sample ---\ndef \x1b[2Jf():\n\n    pass\n--- end ---\nbye\n")
    assert sample_of(log) == ["def ?[2Jf():", "    pass"]
    assert sample_of(tmp_path / "none") == []


def test_a_directory_with_a_path_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="characters"):
        make_directory(tmp_path / ("x" * 100))
    assert list(tmp_path.iterdir()) == []


def test_only_a_demos_directory_can_be_stopped(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="there is none"):
        stop_kept(tmp_path)
    assert tmp_path.exists()


def test_further_options_of_the_training_win() -> None:
    options = DemoOptions(
        keep=False, directory=None, server="auto", seconds=50, plain=True, training=("--checkpoint-every 7",)
    )
    plan = plan_of(options, watched=False)
    assert plan.checkpoint_every == 7
    assert plan.training_options[-1] == "--checkpoint-every 7"
    assert plan.python in ("python3", Path(sys.executable).name)


def test_an_attempt_that_ended_between_two_looks_counts() -> None:
    """A terminal that was stopped for a while, or a machine that slept."""
    over = job(1, "chargpt", attempt=1, state="COMPLETED", exit_code=0)
    story = story_of(whole_screen(job=over, run=training(500, restart_at=300)))
    story._resume()
    assert story.result.resumed_from == 287


@pytest.mark.parametrize(
    ("problem", "hopeless"),
    [
        (paramiko.AuthenticationException("Authentication failed."), True),
        (paramiko.AuthenticationException("Authentication timeout."), False),
        (paramiko.AuthenticationException("Authentication failed: transport shut down or saw EOF"), False),
        (paramiko.SSHException("Error reading SSH protocol banner"), False),
        (ConnectionRefusedError(), False),
    ],
)
def test_only_a_refusal_of_the_key_ends_the_wait_for_a_node(problem: Exception, hopeless: bool) -> None:
    assert is_hopeless(problem) is hopeless
