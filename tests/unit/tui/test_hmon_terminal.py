"""The command hmon: on a real terminal, and without one."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from fake_api import FakeApi
from monitored import serve
from waiting import PATIENCE_S

HMON = (sys.executable, "-c", "from hpcsched.cli.admin.hmon import main; main()")
WITHOUT_TEXTUAL = (
    sys.executable,
    "-c",
    "import sys; sys.modules['textual'] = None; from hpcsched.cli.admin.hmon import main; main()",
)


class Terminal:
    """A terminal with hmon in it."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process, self.descriptor, self.text = process, descriptor, b""

    def wait_for(self, *parts: bytes) -> None:
        """Read until all parts were written."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not all(part in self.text for part in parts):
            ready = select.select([self.descriptor], [], [], max(0.0, deadline_s - time.monotonic()))[0]
            assert ready, self.text.decode(errors="replace")
            try:
                self.text += os.read(self.descriptor, 65536)
            except OSError:
                assert all(part in self.text for part in parts), self.text.decode(errors="replace")

    def press(self, keys: bytes) -> None:
        """Type keys."""
        os.write(self.descriptor, keys)

    def end(self) -> int:
        """Read until hmon has ended, and return its status."""
        while select.select([self.descriptor], [], [], PATIENCE_S)[0]:
            try:
                if not (data := os.read(self.descriptor, 65536)):
                    break
                self.text += data
            except OSError:  # no process has the terminal any more
                break
        return self.process.wait(PATIENCE_S)


@contextmanager
def at_terminal(command: tuple[str, ...] = HMON, **environ: str) -> Iterator[Terminal]:
    here, there = os.openpty()
    termios.tcsetwinsize(there, (24, 80))
    env = {**os.environ, "TERM": "xterm", "PYTHONUTF8": "1", **environ}
    env.pop("COLORTERM", None)
    process = subprocess.Popen(command, stdin=there, stdout=there, stderr=there, env=env, start_new_session=True)
    os.close(there)
    try:
        yield Terminal(process, here)
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        os.close(here)


def test_hmon_shows_the_cluster_on_a_terminal_until_q_is_pressed(api: FakeApi) -> None:
    serve(api)
    with at_terminal() as terminal:
        terminal.wait_for(b"hmon: lab", b"n1", b"train")
        terminal.press(b"2")
        terminal.wait_for(b"later", b"(Resources)")
        terminal.press(b"q")
        assert terminal.end() == 0
    assert b"\x1b[?1049h" in terminal.text
    assert terminal.text.rindex(b"\x1b[?1049l") > terminal.text.rindex(b"\x1b[?1049h")
    assert b"\x1b[38;2;" not in terminal.text.replace(b"\x1b[38;2;0", b"")  # 16 colors


def test_no_color_leaves_the_colors_out(api: FakeApi) -> None:
    serve(api)
    with at_terminal(NO_COLOR="1") as terminal:
        terminal.wait_for(b"hmon: lab", b"ALLOCATED")
        terminal.press(b"q")
        assert terminal.end() == 0
    for code in (b"\x1b[31m", b"\x1b[32m", b"\x1b[33m", b"\x1b[36m", b"\x1b[1;31m"):
        assert code not in terminal.text


def test_a_signal_ends_hmon_and_gives_the_terminal_back(api: FakeApi) -> None:
    serve(api)
    with at_terminal() as terminal:
        terminal.wait_for(b"hmon: lab")
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.end() == 128 + signal.SIGTERM
    assert b"\x1b[?1049l" in terminal.text


def test_without_textual_the_error_names_the_extra(api: FakeApi) -> None:
    serve(api)
    with at_terminal(WITHOUT_TEXTUAL) as terminal:
        assert terminal.end() == 1
    assert b"pip install 'hpcsched[tui]'" in terminal.text


def test_once_prints_text_and_needs_no_textual(api: FakeApi) -> None:
    serve(api)
    done = subprocess.run([*WITHOUT_TEXTUAL, "--once"], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for part in ("hpcschedd is running", "n1", "later", "job 11  train", "| step 2"):
        assert part in done.stdout
    assert "\x1b" not in done.stdout


def test_an_unknown_job_is_an_error(api: FakeApi) -> None:
    serve(api)
    done = subprocess.run([*HMON, "nosuch"], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 1
    assert "hmon: error:" in done.stderr


def test_a_controller_that_is_down_fails_at_once_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCSCHED_API", "/nonexistent/s")
    done = subprocess.run([*HMON, "--once"], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 1
    assert "Unable to contact" in done.stderr


def test_a_command_that_needs_the_terminal_gets_it_and_gives_it_back(api: FakeApi) -> None:
    serve(api)
    with at_terminal() as terminal:
        terminal.wait_for(b"hmon: lab", b"train")
        terminal.press(b":htunnel --help\r")
        terminal.wait_for(b"Usage: htunnel", b"Enter returns to hmon")
        terminal.text = b""
        terminal.press(b"\r")
        terminal.wait_for(b"ended with exit status 0", b"hmon: lab")
        terminal.press(b"q")
        assert terminal.end() == 0


def test_a_terminal_that_is_closed_ends_hmon(api: FakeApi) -> None:
    serve(api)
    with at_terminal() as terminal:
        terminal.wait_for(b"hmon: lab")
        os.kill(terminal.process.pid, signal.SIGHUP)
        assert terminal.end() == 128 + signal.SIGHUP
