"""The live view and the text curve: a scene in, text out."""

from __future__ import annotations

import re

import pytest
from rich.console import Console
from scenes import job, node, training, whole_scene

from hpcsched.demo.story import PlainStage
from hpcsched.demo.training import Training
from hpcsched.demo.view import Canvas, Moment, Range, Scene, checkpoint_lines, picture, queue_rows, smoothed

LIMBO = "node n1 does not answer (connection refused); the job may still run there"


def drawn(scene: Scene, width: int = 100, height: int = 35) -> str:
    """Return the scene as a terminal without colours shows it."""
    console = Console(width=width, height=height, color_system=None, force_terminal=True, legacy_windows=False)
    with console.capture() as capture:
        console.print(picture(scene, width, height), height=height)
    return capture.get()


@pytest.mark.parametrize(("width", "height"), [(100, 35), (140, 50), (80, 24), (40, 12)])
def test_a_frame_fits_its_terminal(width: int, height: int) -> None:
    lines = drawn(whole_scene(), width, height).splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_everything_is_shown_on_a_large_terminal() -> None:
    text = drawn(whole_scene())
    for part in (
        "n1 ALLOCATED",
        "hpcschedd pid 4242, term 2",
        "step 300/500",
        "12 saved; last: step 300, increment, 8.4 MB",
        "loss 2.10",
    ):
        assert part in text
    assert re.search(r"census +PENDING +\(Resources\)", text)
    assert "2/6 done" in text


def test_a_scene_with_nothing_in_it_can_be_shown() -> None:
    assert "waiting for the first step" in drawn(Scene())


def test_a_dead_node_is_shown_with_why_and_its_job_in_limbo() -> None:
    lost = node("n1", state="DOWN", link_why="cannot reach it: connection refused")
    limbo = job(1, "chargpt", reason="NodeDown", reason_detail=LIMBO)
    text = drawn(whole_scene(nodes=(lost, node("n2")), jobs=(limbo,)))
    assert re.search(r"n1 DOWN", text)
    assert "cannot reach it: connection refused" in text
    assert "IN LIMBO" in text
    assert "the job may still run" in " ".join(re.split(r"[^\w()]+", text))


def test_a_dead_controller_is_shown() -> None:
    assert "hpcschedd: dead" in drawn(whole_scene(controller=None))


def test_what_a_job_writes_cannot_move_the_cursor() -> None:
    text = drawn(whole_scene(log=("\x1b[2Jgone [bold]not markup[/bold]",)))
    assert "\x1b" not in text
    assert "[bold]not markup[/bold]" in text


def test_an_array_is_one_row() -> None:
    rows = queue_rows(whole_scene().jobs)
    assert [(row["id"], row["state"], row["where"]) for row in rows[:2]] == [
        ("1", "RUNNING", "n[1-2]"),
        ("2", "RUNNING", "2/6 done"),
    ]


def test_a_restart_is_seen_in_the_curve_and_the_lost_steps_are_kept_apart() -> None:
    run = training(steps=360, restart_at=300)
    assert [point.step for point in run.lost] == list(range(288, 301))
    assert "attempt 1" in drawn(whole_scene(training=run))


def test_checkpoint_marks_tell_bases_from_increments() -> None:
    marks = checkpoint_lines(training(), 60)[1].plain
    assert marks == "█full ▄incr. █▄▄▄▄█▄▄▄▄█▄"
    assert checkpoint_lines(Training(), 60)[0].plain == "no checkpoint yet"


def test_a_falling_line_goes_from_the_upper_left_to_the_lower_right() -> None:
    canvas = Canvas(4, 2, Range(low=0, high=1), Range(low=0, high=1))
    canvas.line([(0, 1), (1, 0)], "loss")
    assert ["".join(text for text, _ in runs) for runs in canvas.rows()] == ["⠑⢄  ", "  ⠑⢄"]


def test_points_outside_of_the_range_are_drawn_at_its_edge() -> None:
    canvas = Canvas(2, 1, Range(low=0, high=1), Range(low=0, high=1))
    canvas.marks([(5, 5), (-5, -5)], "validation")
    assert all(layer == "validation" for runs in canvas.rows() for _, layer in runs)


def test_the_moving_average_has_no_bias_at_its_start() -> None:
    assert smoothed([3.0, 3.0, 3.0]) == pytest.approx([3.0, 3.0, 3.0])


def test_plain_lines_have_times_and_no_escape_codes() -> None:
    console = Console(force_terminal=False, width=80)
    with console.capture() as capture:
        stage = PlainStage(console)
        stage.tell(Moment(at_s=65.0, kind="bad", text="n1 loses power"))
        for number in range(1, 31):
            stage.frame(whole_scene(training=training(steps=number)))
    lines = capture.get().splitlines()
    assert lines[0] == " 1:05 n1 loses power"
    assert [re.search(r"step (\d+)/500", line)[1] for line in lines[1:]] == ["10", "20", "30"]  # type: ignore[index]
