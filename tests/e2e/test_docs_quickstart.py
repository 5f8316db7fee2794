"""docs/quickstart.md: its commands, in order, in an empty home; what they print has the page's lines.

Numbers, times, paths and names may differ. The node has two cpus, as on the page, and a job ends when the page reads
its output: so the test waits for nothing else.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/quickstart.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
INSTALLING = ("git clone", "python3 -m venv", ". ~/", "pip install")
READER = {"ann": getpass.getuser(), "ws1": socket.gethostname()}
QUERIES = ("hinfo", "hqueue", "hwhy", "hacct", "hctl story")
MACHINE = r"^  (cpus|memory|GPUs|speed|disk|system|account|clock) .*"
ROOT_ONLY = r"^(  python |other users cannot run ).*\n"
COMMAND_S = 60.0

# What the page's commands become, so that jobs run until the test lets them go.
SLEEP, GATE, LATER = "sleep 20", "until [ -e {0}/gate ]; do sleep 0.1; done", "sleep 600"


@pytest.fixture
def home() -> Iterator[Path]:
    """Return an empty directory with a short path, for the sockets; stop the controller at the end."""
    path = Path(tempfile.mkdtemp(prefix="hq-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    run("hpcsched down", path)
    shutil.rmtree(path, ignore_errors=True)


def run(command: str, home: Path) -> str:
    """Return what a command prints, as typed by a user with this home."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {"HOME": str(home), "PATH": path, "USER": getpass.getuser(), "LANG": "C.UTF-8", "COLUMNS": "200"}
    if os.geteuid() == 0:  # else it would be /etc/hpcsched
        env["HPCSCHED_CONFIG"] = str(home / ".config/hpcsched")
    done = subprocess.run(
        ["bash", "-c", command], cwd=home, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=COMMAND_S, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


def shape(text: str) -> str:
    """Return a text with what differs from one machine or day to the next made equal."""
    text = re.sub(ROOT_ONLY, "", text, flags=re.MULTILINE)
    text = re.sub(MACHINE, r"  \1", text, flags=re.MULTILINE)
    for name in READER.values():
        text = re.sub(rf"\b{re.escape(name)}\b", "NAME", text)
    text = re.sub(r"(?<![\w(])/[\w./-]+", "/PATH", text)
    text = re.sub(r"\d+(?:[.:T-]\d+)*M?", "0", text)
    return "\n".join(" ".join(re.sub("-{2,}", "--", line).split()) for line in text.strip().splitlines())


def matches(printed: str, page: str) -> bool:
    """Return whether a command printed the lines of the page; a line of three dots stands for any number of lines."""
    for ours, theirs in READER.items():
        page = re.sub(rf"\b{ours}\b", theirs, page)
    lines = [r"(?:.*\n)*?" if line == "..." else re.escape(line) + r"\n" for line in shape(page).splitlines()]
    return re.fullmatch("".join(lines), shape(printed) + "\n") is not None


def commands() -> list[tuple[str, str]]:
    """Return (command, what it prints) for each command of the page, in order."""
    text = "".join(text for language, text in BLOCKS if language == "console")
    found = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE)
    return [(command, printed) for command, printed in found if not command.startswith(INSTALLING)]


def test_the_commands_of_the_quickstart_print_what_the_page_shows(home: Path) -> None:
    (script,) = (text for language, text in BLOCKS if language == "bash")
    (home / "hello.sh").write_text(script.replace(SLEEP, GATE.format(home)))
    for command, expected in commands():
        typed = command.replace(SLEEP, LATER).replace("node add local", f"node add local --cpus 2 --root {home}/agent")
        if command.startswith("hlogs -f"):
            (home / "gate").touch()
        printed = run(typed, home)
        if command.startswith(QUERIES) and not matches(printed, expected):
            wait_until(
                lambda typed=typed, expected=expected: matches(run(typed, home), expected),
                PATIENCE_S / 2,
                what=f"{command} to print\n{shape(expected)}",
            )
            continue
        if expected:
            assert matches(printed, expected), f"{command}\n{shape(printed)}\n--- the page:\n{shape(expected)}"
        if command == "hpcsched init" and os.geteuid() == 0:
            (home / ".config/hpcsched/conf.d").mkdir(exist_ok=True)
            (home / ".config/hpcsched/conf.d/root.toml").write_text("[controller]\nallow_uid_below = 0\n")
