"""Limits of the power of GPUs, against a fake driver's library in C: bounds, refusals, and what a crash leaves."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from nodeworld import World, token
from test_gpu_watch import NO_LIBRARY, built
from test_job_scripts import NotedScripts, failures

from hpcnode.agent.gpu_power import limit, restore
from hpcnode.agent.job_scripts import ScriptRunner
from hpcnode.os.faults import CrashPoints
from hpcnode.os.loop import Loop
from hpcnode.wire import protocol

LIMITED = protocol.JobScripts(limit_s=9.0, gpu_power=250, gpus=["0", "GPU-1"])


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return built(tmp_path_factory.mktemp("nvml"))


class Driver:
    """Two GPUs of a fake driver, whose limits are in files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.mode("ok")

    def mode(self, word: str) -> None:
        self.path.write_text(f"2 {word}")

    def limits(self) -> list[int]:
        files = [self.path.with_name(f"driver.{gpu}") for gpu in (0, 1)]
        return [int(file.read_text()) if file.exists() else 300_000 for file in files]


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setenv("FAKE_NVML", str(tmp_path / "driver"))
    return Driver(tmp_path / "driver")


@pytest.fixture
def note(tmp_path: Path) -> str:
    return str(tmp_path / "note")


def test_limits_are_set_and_the_former_ones_come_back(library: str, driver: Driver, note: str) -> None:
    assert limit(note, ["0", "GPU-1"], 250, library) == ""
    assert driver.limits() == [250_000, 250_000]
    assert restore(note, library) == ""
    assert driver.limits() == [300_000, 300_000]
    assert not os.path.exists(note)
    assert restore(note, library) == ""


def test_a_second_try_does_not_take_the_new_limit_for_the_former_one(library: str, driver: Driver, note: str) -> None:
    limit(note, ["0"], 250, library)
    limit(note, ["0"], 200, library)
    restore(note, library)
    assert driver.limits() == [300_000, 300_000]


@pytest.mark.parametrize(
    ("mode", "watts", "gpus", "why"),
    [
        ("ok", 90, ["1", "0"], "GPU power: GPU 1 takes a limit of 100 to 350 W, not 90 W"),
        ("ok", 400, ["0"], "GPU power: GPU 0 takes a limit of 100 to 350 W, not 400 W"),
        ("user", 250, ["0"], "GPU power: cannot limit GPU 0: only root may"),
        ("lost", 250, ["0", "1"], "GPU power: the driver tells no limits of GPU 1"),
        ("mig", 250, ["0"], "GPU power: the driver tells no limits of GPU 0"),
        ("ok", 250, ["MIG-1"], "GPU power: the driver tells no limits of GPU MIG-1"),
        ("unloaded", 250, ["0"], "GPU power: the NVIDIA driver is not loaded"),
    ],
)
def test_a_limit_that_cannot_be_set_says_why_and_changes_nothing(
    library: str, driver: Driver, note: str, mode: str, watts: int, gpus: list[str], why: str
) -> None:
    driver.mode(mode)
    assert limit(note, gpus, watts, library) == why
    assert driver.limits() == [300_000, 300_000]


def test_a_node_without_a_driver_says_so(note: str) -> None:
    assert limit(note, ["0"], 250, NO_LIBRARY) == "GPU power: there is no NVIDIA driver"


def test_a_limit_that_cannot_be_set_back_is_told_and_tried_again(library: str, driver: Driver, note: str) -> None:
    limit(note, ["0"], 250, library)
    driver.mode("user")
    assert "cannot set the limit of GPU 0 back to 300000 mW: cannot limit GPU 0: only root may" in restore(
        note, library
    )
    driver.mode("ok")
    assert restore(note, library) == ""
    assert driver.limits()[0] == 300_000


def test_what_is_on_disk_comes_before_the_first_limit(library: str, driver: Driver, note: str) -> None:
    """Killed between the two, whoever comes next finds the former limit."""
    os.mkdir(f"{note}.new")  # so the note cannot be written
    with pytest.raises(OSError, match="note"):
        limit(note, ["0"], 250, library)
    assert driver.limits() == [300_000, 300_000]


# ----- around a job


@pytest.fixture
def scripts() -> NotedScripts:
    return NotedScripts()


@pytest.fixture
def world(scripts: NotedScripts) -> World:
    return World(scripts)


def test_a_limit_alone_runs_before_the_job_and_after_it(world: World, scripts: NotedScripts) -> None:
    batch = world.launch(token(), scripts=LIMITED)
    assert (world.statuses(batch), scripts.states) == ([], ["prolog"])
    scripts.ends("prolog")
    assert world.shepherds.starts == [batch]
    world.started(batch)
    world.restart()  # the agent was killed while the job ran
    world.ended(batch)
    world.gone(batch)
    assert scripts.states == ["prolog", "epilog"]


def test_a_refused_limit_fails_the_job_and_is_no_fault_of_the_node(world: World, scripts: NotedScripts) -> None:
    batch = world.launch(token(), scripts=LIMITED)
    scripts.ends("prolog", "GPU power: GPU 0 takes a limit of 100 to 350 W, not 90 W")
    (report,) = [message for message in world.sent if isinstance(message, protocol.Report) and message.token == batch]
    assert (report.status, report.why, report.node_fault) == (
        "refused", "GPU power: GPU 0 takes a limit of 100 to 350 W, not 90 W", False
    )  # fmt: skip
    assert failures(world) == []
    assert scripts.states == ["prolog", "epilog"]  # what was set before the refusal is set back


def test_the_next_agent_sets_back_what_a_killed_one_had_begun(library: str, driver: Driver, tmp_path: Path) -> None:
    """The child that set the limits was killed after the first one."""
    name = "inc.1.0.0"
    (tmp_path / f"{name}.power").write_text(json.dumps({"0": 300_000, "1": 300_000}))
    (tmp_path / "driver.0").write_text("250000")
    assert ran(ScriptRunner, tmp_path, name, "epilog", library) == ""
    assert driver.limits() == [300_000, 300_000]


def test_a_child_sets_the_limits_and_another_one_sets_them_back(library: str, driver: Driver, tmp_path: Path) -> None:
    assert ran(ScriptRunner, tmp_path, "inc.1.0.0", "prolog", library) == ""
    assert driver.limits() == [250_000, 250_000]
    assert ran(ScriptRunner, tmp_path, "inc.1.0.0", "epilog", library) == ""
    assert driver.limits() == [300_000, 300_000]


def ran(runner: type[ScriptRunner], folder: Path, name: str, state: str, library: str) -> str:
    """Run the work of a state in a child, and return why it failed."""
    loop, over = Loop(), []
    runner(loop, str(folder), CrashPoints(), library).run(name, state, LIMITED, over.append)
    while not over:
        loop.turn()
    return str(over[0])
