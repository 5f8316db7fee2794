"""Commands start fast: what each imports is counted, in a process of its own.

Of the modules that commands must never import, most would take longer than Python itself takes to start.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hpcsched.cli.admin import shell

SCRIPTS: dict[str, str] = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
    "scripts"
]
FAST = ("hsub", "hqueue", "hcancel", "hinfo", "hlogs", "hacct", "hctl", "hwhy", "hprio", "hshare")

HEAVY = frozenset(
    {
        "aiohttp", "asyncio", "click", "concurrent", "cryptography", "email", "filelock", "http", "logging", "matplotlib",
        "multiprocessing", "numpy", "paramiko", "rich", "sqlalchemy", "sqlite3", "ssl", "subprocess", "tempfile",
        "threading", "torch", "unittest", "urllib.request", "zoneinfo",
    }
)  # fmt: skip
OURS = frozenset({"api", "config", "controller", "demo", "launch", "lifecycle", "store"})
MOST_MODULES = 140  # of any kind; hsub has about 65, and 100 where nothing was imported before

# An editable installation may bring a finder that imports some modules by itself: only what comes behind it is the command's.
COUNT = """
import sys
before = set(sys.modules)
import {module}
print("\\n".join(sorted(set(sys.modules) - before)))
"""


def imported(module: str) -> set[str]:
    """Return the modules that importing `module` brings in, in an isolated process that has not imported any."""
    done = subprocess.run(
        [sys.executable, "-c", COUNT.format(module=module)], capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.split())


def module_of(name: str) -> str:
    """Return the module of a command, of ours or with a name of Slurm's."""
    return (shell.COMMANDS.get(name) or SCRIPTS[name]).partition(":")[0]


@pytest.mark.parametrize("name", [*FAST, *shell.COMMANDS])
def test_a_command_imports_nothing_heavy(name: str) -> None:
    modules = imported(module_of(name))
    roots = {module.partition(".")[0] for module in modules}
    assert (roots | modules) & HEAVY == set()
    assert {module.split(".")[1] for module in modules if module.startswith("hpcsched.")} & OURS == set()
    assert len(modules) < MOST_MODULES


@pytest.mark.parametrize("name", ["hrun", "srun"])
def test_a_step_command_does_without_what_it_does_not_need(name: str) -> None:
    assert not {"dataclasses", "importlib.metadata", "inspect", "pathlib"} & imported(module_of(name))


@pytest.mark.parametrize("name", ["hsub", "hqueue", "hcancel", "hinfo", "hlogs", "hprio", "hshare", "hwhy"])
def test_what_tools_poll_does_without_dataclasses(name: str) -> None:
    """`dataclasses` imports `inspect`: 7 ms, nearly as much as Python's start; the others together take as long again."""
    modules = imported(module_of(name))
    assert not {"dataclasses", "inspect", "pathlib", "socket", "typing", "datetime", "hpcsched.model.job"} & modules


def test_the_package_with_the_clients_imports_them_when_they_are_used() -> None:
    """Every command imports `hpcsched`; `hpcsched.Client` needs hundreds of modules."""
    assert imported("hpcsched") == {"hpcsched"}
