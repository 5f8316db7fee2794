"""The stage of a terminal: what is told while the live view covers the ordinary screen is printed there when it is over."""

from __future__ import annotations

from rich.console import Console
from scenes import whole_scene

from hpcsched.demo.story import LiveStage
from hpcsched.demo.view import Moment


def test_a_terminal_has_the_story_and_the_tables_when_the_live_view_is_over() -> None:
    console = Console(width=80, height=30, color_system=None, force_terminal=True, _environ={"TERM": "xterm"})
    stage = LiveStage(console)
    with console.capture() as before:
        stage.tell(Moment(at_s=0.0, kind="act", text="it begins"))
        stage.show(["#HSUB --nodes=2"])
    with console.capture() as live:
        stage.frame(whole_scene())
        stage.tell(Moment(at_s=1.0, kind="bad", text="a node is lost"))
        stage.show(["hidden by the view"])
    with console.capture() as after:
        stage.curtain()
        stage.heading("what happened")
        stage.table([("attempts", "2"), ("lost", "3 s")])
        stage.curtain()
    assert "it begins" in before.get()
    assert "#HSUB --nodes=2" in before.get()
    assert "n1 ALLOCATED" in live.get()
    assert "a node is lost" not in live.get()
    assert "hidden" not in live.get() + after.get()
    told = [line.rstrip() for line in after.get().splitlines() if line.strip()]
    assert [line for line in told if "a node is lost" in line] == told[-4:-3]
    assert told[-3:] == ["what happened", "  attempts  2", "  lost      3 s"]
