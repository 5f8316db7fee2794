"""`hpcsched demo` as a user runs it: the whole story with a small model, and Ctrl-C in the middle of it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from other_user import become, runs
from waiting import PATIENCE_S, wait_until

SMALL = "--layers 1 --width 32 --heads 2 --context 32 --batch 8 --checkpoint-every 40 --sample 80"
DEMO = [str(Path(sys.executable).with_name("hpcsched")), "demo", "--plain"]
PNG = b"\x89PNG\r\n\x1a\n"
NOBODY = 65534
SECONDS = "60"  # estimated from the first steps: on a busy machine it takes half as long, and outlasts the restart too
STORY_S = 300.0  # for what takes half a minute where nothing else runs
# The demo with a story in which nothing dies: another test has the whole one.
QUIET_DEMO = """
from hpcsched.cli.admin import main
from hpcsched.demo.story import Story

def run(story):
    story._start_cluster()
    story._submit()
    story._wait_for_checkpoint()
    story._finish()
    return story.result

Story.run = run
main()
"""
QUIET_SECONDS = "8"


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a short path (sockets lie below it): the demo's TMPDIR is in it, and it is started there."""
    path = Path(tempfile.mkdtemp(prefix="hd-", dir="/tmp"))
    (path / "tmp").mkdir()
    yield path
    shutil.rmtree(path, ignore_errors=True)


def environment(place: Path) -> dict[str, str]:
    """Return what the demo is started with; its directory is then below `place`, which marks all its processes."""
    return {**os.environ, "TMPDIR": str(place / "tmp")}


def processes_of(place: Path) -> dict[int, str]:
    """Return pid -> command line of every process whose command line or environment names `place`."""
    mark = str(place).encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command, environ = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
        except OSError:
            continue
        if mark in command or mark in environ:
            found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")
    return found


def assert_nothing_is_left(place: Path) -> None:
    """Fail if a process or a file of the demo is there yet."""
    wait_until(lambda: not processes_of(place), what="the demo's processes to be gone")
    assert list((place / "tmp").iterdir()) == []


def test_the_story_survives_a_dead_controller_and_a_dead_node(place: Path) -> None:
    done = subprocess.run(
        [*DEMO, "--seconds", SECONDS, "--training", SMALL],
        cwd=place, env=environment(place), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=STORY_S,
    )  # fmt: skip
    said = done.stdout
    assert done.returncode == 0, said + done.stderr
    assert "\x1b" not in said, "no escape codes where the output is no terminal"
    assert re.search(r"^ *attempts +2 *$", said, re.MULTILINE)
    # where ten processes share a core, the training may be over before the power is cut: its last step is then the second
    resumed = re.search(r"resumed from the checkpoint of step (\d+)|all (\d+) steps were done before the loss", said)
    assert resumed is not None
    assert int(resumed[1] or resumed[2]) > 0
    assert "it finds job 1 running" in said
    assert "three nodes: 0:" in said, "the job that waited for three nodes has run on them"
    assert (place / "demo-out/loss.png").read_bytes().startswith(PNG)
    assert (place / "demo-out/model.pt").stat().st_size > 0
    assert_nothing_is_left(place)


def test_ctrl_c_leaves_nothing_behind(place: Path) -> None:
    heeds_ctrl_c = ["env", "--default-signal=INT"]  # a shell's job in the background is started with it ignored
    with subprocess.Popen(
        [*heeds_ctrl_c, *DEMO, "--seconds", "60", "--training", SMALL],
        cwd=place, env=environment(place), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.STDOUT, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if "runs on n[1-2]" in line:
                break
        assert len(processes_of(place)) > 5
        os.killpg(process.pid, signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(PATIENCE_S) == 130, rest
    assert "interrupted" in rest
    assert_nothing_is_left(place)


def test_a_killed_demo_takes_its_cluster_along(place: Path) -> None:
    with subprocess.Popen(
        [*DEMO, "--seconds", "60", "--training", SMALL],
        cwd=place, env=environment(place), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if "hpcschedd runs" in line:
                break
        process.kill()
    wait_until(lambda: not processes_of(place), what="the keeper to end the cluster")
    assert list((place / "tmp").iterdir()) == []


def test_a_plain_user_can_keep_the_cluster_use_it_and_stop_it(place: Path) -> None:
    base = place / "kept"
    user = plain_user(place)
    env = environment(place) | {"HOME": str(place), "HPCSCHED_CONFIG": str(base / "etc")}

    def run(*command: str) -> str:
        done = subprocess.run(
            [*user, *command],
            cwd=place,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=STORY_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    options = ["--seconds", QUIET_SECONDS, "--training", SMALL, "--keep", "--dir", str(base), "--server", "embedded"]
    said = run(sys.executable, "-c", QUIET_DEMO, *DEMO[1:], *options)
    assert "behind the embedded SSH server" in said
    assert f"hpcsched demo --stop {base}" in said
    bin_dir = Path(sys.executable).parent
    assert "chargpt" in run(str(bin_dir / "hacct"))
    assert "Submitted batch job" in run(str(bin_dir / "hsub"), "--wait", "--wrap", "true")
    assert "has ended" in run(*DEMO[:2], "--stop", str(base))
    assert not base.exists()
    assert_nothing_is_left(place)


def plain_user(place: Path) -> list[str]:
    """Return the words that run a command as a user who is not root, where root's Python can be run by others."""
    if os.geteuid() != 0:
        return []
    if not runs(NOBODY, sys.executable, first="import hpcsched, torch"):
        return []
    for path in (place, place / "tmp"):
        os.chown(path, NOBODY, NOBODY)
    return become(NOBODY)


def test_a_directory_with_something_in_it_is_left_alone(place: Path) -> None:
    (place / "precious").write_text("mine")
    done = subprocess.run([*DEMO, "--dir", str(place)], cwd=place, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1
    assert "is not empty" in done.stderr
    assert (place / "precious").read_text() == "mine"
    stopped = subprocess.run([*DEMO[:2], "--stop", str(place)], capture_output=True, text=True, timeout=PATIENCE_S)
    assert stopped.returncode == 1
    assert "there is none" in stopped.stderr
    assert (place / "precious").exists()
