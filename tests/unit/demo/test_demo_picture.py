"""The screen of the demo: values in, text out."""

from __future__ import annotations

import re

import pytest
from rich.console import Console
from screens import job, node, queued, whole_scene

from hpcsched.demo.picture import Scene, picture
from hpcsched.tui.reading import ClusterScreen

LIMBO = "node n1 does not answer (connection refused); the job may still run there"
HOSTILE = "\x1b[2J\x1b]0;owned\x07[bold]x[/bold]\n"


def drawn(scene: Scene, width: int = 100, height: int = 35) -> str:
    """Return the screen as a terminal without colours shows it."""
    console = Console(width=width, height=height, color_system=None, force_terminal=True, legacy_windows=False)
    with console.capture() as capture:
        console.print(picture(scene, width, height), height=height)
    return capture.get()


def lab(nodes: int, jobs: int) -> Scene:
    """Return a larger cluster."""
    return whole_scene(
        nodes=tuple(node(f"node{at:03}", state="DOWN" if at == 90 else "IDLE") for at in range(nodes)),
        queue=tuple(queued(at, "sleep", "PENDING", "(Resources)") for at in range(1, jobs + 1)),
        job=job(jobs, "sleep"),
    )


@pytest.mark.parametrize(("width", "height"), [(100, 35), (140, 50), (80, 24), (40, 12), (200, 10)])
@pytest.mark.parametrize(
    "scene", [whole_scene(), lab(100, 1000), whole_scene(queue=()), Scene(cluster=ClusterScreen())]
)
def test_a_frame_fits_its_terminal(scene: Scene, width: int, height: int) -> None:
    lines = drawn(scene, width, height).splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_a_large_terminal_shows_everything() -> None:
    text = drawn(whole_scene())
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


def test_a_terminal_of_80_by_24_shows_nodes_queue_curve_and_story() -> None:
    text = drawn(whole_scene(), 80, 24)
    for part in ("n1 ALLOCATED", "chargpt", "step 300/500", "hpcschedd pid", "it is back"):
        assert part in text


def test_of_many_nodes_and_jobs_the_down_and_the_selected_are_shown() -> None:
    text = drawn(lab(100, 1000), 80, 24)
    assert "node090 DOWN" in text
    assert re.search(r"\d+ more: \d+ IDLE", text)
    assert re.search(r"│ 1000 +sleep", text)


def test_an_empty_cluster_is_shown() -> None:
    assert "no jobs" in drawn(Scene(cluster=ClusterScreen()))


def test_a_down_node_is_shown_with_the_cause_and_its_job_in_limbo() -> None:
    lost = node("n1", state="DOWN", link_why="cannot reach it: connection refused")
    limbo = job(1, "chargpt", reason="NodeDown", reason_detail=LIMBO)
    queue = (queued(1, "chargpt", reason="NodeDown"),)
    text = drawn(whole_scene(nodes=(lost, node("n2")), job=limbo, queue=queue))
    assert "n1 DOWN" in text
    assert "cannot reach it: connection refused" in text
    assert "LIMBO" in text
    assert "job may still run there" in text


def test_a_controller_that_does_not_answer_is_shown() -> None:
    text = drawn(whole_scene(controller=None, trouble="Unable to contact the controller"))
    assert "hpcschedd does not answer" in text
    assert "Unable to contact" in text


def test_texts_of_others_cannot_move_the_cursor() -> None:
    scene = whole_scene(
        queue=(queued(1, HOSTILE, where=HOSTILE, display_id="1"),),
        job=job(1, HOSTILE, reason="NodeDown", reason_detail=HOSTILE),
        nodes=(node(HOSTILE, state="DOWN", link_why=HOSTILE),),
        log=(HOSTILE,),
    )
    text = drawn(scene)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[bold]x[/bold]" in text
