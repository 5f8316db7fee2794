"""How the demo waits, gives up with words, and closes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import paramiko
import pytest
from scenes import job, training, whole_scene

from hpcsched.demo.keeper import stop_kept
from hpcsched.demo.show import Wishes, closing_rows, make_directory, plan_of, sample_of
from hpcsched.demo.story import Outcome, Story, Watch
from hpcsched.demo.view import Moment, Scene
from hpcsched.errors import RequestError, UnavailableError
from hpcsched.loopback.machine import is_hopeless


class Scenes:
    """An observer that has seen what is to be seen before."""

    def __init__(self, *scenes: Scene) -> None:
        self._scenes = list(scenes)
        self.log_file = None

    def look(self, **_: object) -> Scene:
        return self._scenes.pop(0) if len(self._scenes) > 1 else self._scenes[0]


class Nowhere:
    """A stage that nobody looks at."""

    plain = True

    def tell(self, moment: Moment) -> None: ...

    def frame(self, scene: Scene) -> None: ...

    def show(self, lines: Sequence[str]) -> None: ...


def watch(*scenes: Scene) -> Watch:
    made = Watch(Scenes(*scenes), Nowhere())  # type: ignore[arg-type]
    made.job_id = 1
    return made


def test_waiting_ends_with_the_scene_that_was_waited_for() -> None:
    scene = watch(whole_scene(elapsed_s=1.0), whole_scene(elapsed_s=2.0)).until(
        lambda scene: scene.elapsed_s == 2.0, 30, "the second"
    )
    assert scene.elapsed_s == 2.0


def test_what_does_not_happen_in_time_is_said_with_how_things_stand() -> None:
    waits = job(1, "chargpt", state="PENDING", reason="Resources", reason_detail="n1 is busy", exit_code=None)
    with pytest.raises(UnavailableError, match=r"waited 0 s for it to start; job 1 is PENDING .*Resources n1 is busy"):
        watch(whole_scene(jobs=(waits,))).until(lambda scene: False, 0, "it to start")


def test_a_failed_training_ends_the_waiting_at_once() -> None:
    failed = job(1, "chargpt", state="FAILED", exit_code=3)
    with pytest.raises(UnavailableError, match="ended as FAILED.*exit code 3"):
        watch(whole_scene(jobs=(failed,))).until_trained(lambda scene: False, "more steps")


def test_a_training_that_is_over_too_early_is_said() -> None:
    over = job(1, "chargpt", state="COMPLETED", exit_code=0)
    with pytest.raises(UnavailableError, match="waited for a checkpoint, but the training is over"):
        watch(whole_scene(jobs=(over,))).until_trained(lambda scene: False, "a checkpoint")


def test_an_error_of_what_is_done_meanwhile_comes_through() -> None:
    def fail() -> None:
        raise UnavailableError("no power")

    with pytest.raises(UnavailableError, match="no power"):
        watch(whole_scene()).meanwhile(fail)


def test_the_closing_figures() -> None:
    run = training(steps=500, restart_at=300, lost=13)
    rows = dict(closing_rows(Outcome(server="sshd", training=run, lost_at=300, resumed_from=287, lost_node="n1")))
    assert rows["attempts"] == "2"
    assert rows["lost and repeated"] == "13 steps (at step 300, resumed from 287)"
    assert rows["checkpoints"] == "20: 4 full of 8.4 MB, 16 increments of 8.4 MB"
    assert rows["training"].startswith("500 steps on 2 ranks (mpi), validation loss 3.33 -> 1.75")


def test_the_sample_is_the_last_attempts(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("--- sample ---\nold\n--- end ---\n--- sample ---\ndef \x1b[2Jf():\n\n    pass\n--- end ---\nbye\n")
    assert sample_of(log) == ["def  [2Jf():", "    pass"]
    assert sample_of(tmp_path / "none") == []


def test_a_directory_whose_sockets_would_have_too_long_paths_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="characters"):
        make_directory(tmp_path / ("x" * 100))
    assert list(tmp_path.iterdir()) == []


def test_only_a_demos_directory_can_be_stopped(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="there is none"):
        stop_kept(tmp_path)
    assert tmp_path.exists()


def test_further_options_of_the_training_win() -> None:
    wishes = Wishes(
        keep=False, directory=None, server="auto", seconds=50, plain=True, training=("--checkpoint-every 7",)
    )
    plan = plan_of(wishes, watched=False)
    assert plan.checkpoint_every == 7
    assert plan.training_options[-1] == "--checkpoint-every 7"
    assert plan.python in ("python3", Path(sys.executable).name)


def test_an_attempt_that_was_over_before_one_looked_has_been_seen(tmp_path: Path) -> None:
    """A terminal that was stopped for a while, or a machine that slept."""
    over = whole_scene(
        jobs=(job(1, "chargpt", attempt=1, state="COMPLETED", exit_code=0),), training=training(500, restart_at=300)
    )
    story = Story(SimpleNamespace(share=tmp_path), None, None, None)  # type: ignore[arg-type]
    story._watch = watch(over)
    story._resume()
    assert story._outcome.resumed_from == 287


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
