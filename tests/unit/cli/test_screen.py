"""The screen of `hpcsched top` and the demo: values in, text out."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from rich.console import Console
from screens import job, node, queued, training, whole_screen

from hpcsched.cli.admin.top import (
    ClusterReader,
    ClusterScreen,
    TrainingRun,
    checkpoint_lines,
    picture,
    plain_text,
    smoothed,
)

LIMBO = "node n1 does not answer (connection refused); the job may still run there"
HOSTILE = "\x1b[2J\x1b]0;owned\x07[bold]x[/bold]\n"


def drawn(screen: ClusterScreen, width: int = 100, height: int = 35) -> str:
    """Return the screen as a terminal without colours shows it."""
    console = Console(width=width, height=height, color_system=None, force_terminal=True, legacy_windows=False)
    with console.capture() as capture:
        console.print(picture(screen, width, height), height=height)
    return capture.get()


def lab(nodes: int, jobs: int) -> ClusterScreen:
    """Return the screen of a larger cluster, as top shows it."""
    return whole_screen(
        title="hpcsched top",
        story=(),
        nodes=tuple(node(f"node{at:03}", state="DOWN" if at == 90 else "IDLE") for at in range(nodes)),
        queue=tuple(queued(at, "sleep", "PENDING", "(Resources)") for at in range(1, jobs + 1)),
        job=job(jobs, "sleep"),
    )


@pytest.mark.parametrize(("width", "height"), [(100, 35), (140, 50), (80, 24), (40, 12), (200, 10)])
@pytest.mark.parametrize("screen", [whole_screen(), lab(100, 1000), whole_screen(story=(), queue=()), ClusterScreen()])
def test_a_frame_fits_its_terminal(screen: ClusterScreen, width: int, height: int) -> None:
    lines = drawn(screen, width, height).splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_a_large_terminal_shows_everything() -> None:
    text = drawn(whole_screen())
    for part in (
        "n1 ALLOCATED",
        "hpcschedd pid 4242, epoch 2",
        "step 300/500",
        "12 saved; last: step 300, increment, 8.4 MB",
        "loss 2.10",
        "it is back and has found the job again",
    ):
        assert part in text
    assert re.search(r"census +PENDING +\(Resources\)", text)


def test_a_terminal_of_80_by_24_shows_nodes_queue_curve_and_log() -> None:
    text = drawn(whole_screen(story=(), title="hpcsched top"), 80, 24)
    for part in ("n1 ALLOCATED", "chargpt", "step 300/500", "step   300/500  loss 2.10", "hpcschedd pid"):
        assert part in text


def test_of_many_nodes_and_jobs_the_down_and_the_selected_are_shown() -> None:
    text = drawn(lab(100, 1000), 80, 24)
    assert "node090 DOWN" in text
    assert re.search(r"\d+ more: \d+ IDLE", text)
    assert re.search(r"│ 1000 +sleep", text)


def test_an_empty_cluster_is_shown() -> None:
    assert "no jobs" in drawn(ClusterScreen())


def test_a_down_node_is_shown_with_the_cause_and_its_job_in_limbo() -> None:
    lost = node("n1", state="DOWN", link_why="cannot reach it: connection refused")
    limbo = job(1, "chargpt", reason="NodeDown", reason_detail=LIMBO)
    queue = (queued(1, "chargpt", reason="NodeDown"),)
    text = drawn(whole_screen(nodes=(lost, node("n2")), job=limbo, queue=queue))
    assert "n1 DOWN" in text
    assert "cannot reach it: connection refused" in text
    assert "LIMBO" in text
    assert "job may still run there" in text


def test_a_controller_that_does_not_answer_is_shown() -> None:
    text = drawn(whole_screen(controller=None, trouble="Unable to contact the controller"))
    assert "hpcschedd does not answer" in text
    assert "Unable to contact" in text


def test_texts_of_others_cannot_move_the_cursor() -> None:
    screen = whole_screen(
        story=(),
        queue=(queued(1, HOSTILE, where=HOSTILE, display_id="1"),),
        job=job(1, HOSTILE, reason="NodeDown", reason_detail=HOSTILE),
        nodes=(node(HOSTILE, state="DOWN", link_why=HOSTILE),),
        log=(HOSTILE,),
    )
    text = drawn(screen)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[bold]x[/bold]" in text
    assert "\x1b" not in plain_text(dataclasses.replace(screen, job=None))


def test_lost_steps_are_told_from_those_that_count() -> None:
    run = training(steps=360, restart_at=300)
    assert [point.step for point in run.lost] == list(range(288, 301))
    assert "attempt 1" in drawn(whole_screen(run=run))


def test_checkpoint_marks_tell_full_ones_from_increments() -> None:
    assert checkpoint_lines(training(), 60)[1].plain == "█full ▄incr. █▄▄▄▄█▄▄▄▄█▄"
    assert checkpoint_lines(TrainingRun(), 60)[0].plain == "no checkpoint yet"


def test_the_moving_average_has_no_bias_at_its_start() -> None:
    assert smoothed([3.0, 3.0, 3.0]) == pytest.approx([3.0, 3.0, 3.0])


def test_a_controller_that_is_down_is_reported_and_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCSCHED_API", str(tmp_path / "api.sock"))
    reader = ClusterReader()
    for _ in range(2):
        screen = reader.look()
        assert screen.controller is None
        assert "Unable to contact" in screen.trouble
