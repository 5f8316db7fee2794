"""Where the demo is shown: live on a terminal, or as plain lines."""

from __future__ import annotations

import re

from rich.console import Console
from screens import training, whole_scene

from hpcsched.demo.picture import StoryLine
from hpcsched.demo.show import DemoStage


def test_a_terminal_has_the_story_and_the_tables_after_the_live_view() -> None:
    console = Console(width=80, height=30, color_system=None, force_terminal=True, _environ={"TERM": "xterm"})
    stage = DemoStage(console, plain=False)
    with console.capture() as before:
        stage.tell(StoryLine(at_s=0.0, kind="act", text="it begins"))
        stage.show(["#HSUB --nodes=2"])
    with console.capture() as live:
        stage.frame(whole_scene(), 1.0)
        stage.tell(StoryLine(at_s=1.0, kind="bad", text="a node is lost"))
        stage.show(["hidden by the view"])
    with console.capture() as after:
        stage.close()
        stage.heading("what happened")
        stage.table([("attempts", "2"), ("lost", "3 s")])
        stage.close()
    assert "it begins" in before.get()
    assert "#HSUB --nodes=2" in before.get()
    assert "n1 ALLOCATED" in live.get()
    assert "a node is lost" not in live.get()
    assert "hidden" not in live.get() + after.get()
    told = [line.rstrip() for line in after.get().splitlines() if line.strip()]
    assert [line for line in told if "a node is lost" in line] == told[-4:-3]
    assert told[-3:] == ["what happened", "  attempts  2", "  lost      3 s"]


def test_plain_lines_have_times_and_no_escape_codes() -> None:
    console = Console(force_terminal=False, width=80)
    with console.capture() as capture:
        stage = DemoStage(console, plain=False)
        stage.tell(StoryLine(at_s=65.0, kind="bad", text="n1 loses power"))
        for number in range(1, 31):
            stage.frame(whole_scene(run=training(steps=number)), float(number))
    lines = capture.get().splitlines()
    assert lines[0] == " 1:05 n1 loses power"
    assert [re.search(r"step (\d+)/500", line)[1] for line in lines[1:]] == ["10", "20", "30"]  # type: ignore[index]
