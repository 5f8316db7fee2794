"""A node's agent on this machine, for the tests of the node alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agent_client import AS_ROOT, NodeUnderTest, place, running_node, work  # noqa: F401 - fixtures
from step_commands import Controller, Running

from hpcnode.wire import protocol


@pytest.fixture(params=["own", pytest.param("nobody", marks=pytest.mark.skipif(not AS_ROOT, reason="needs root"))])
def node(request: pytest.FixtureRequest, place: Path) -> Iterator[NodeUnderTest]:  # noqa: F811
    """An agent that runs as we do, and one that runs as nobody: as root there are cgroups, as nobody there are none."""
    with running_node(place / "node", user="" if request.param == "own" else "nobody") as node:
        yield node


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    server = Controller(tmp_path / "agent.sock")
    yield server
    server.close()


@pytest.fixture
def run(controller: Controller, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def start(*args: str, module: str = "hpcnode.commands.hrun", changes: str = "pass", **variables: str) -> Running:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "HPCSCHED_"))}
        env["PYTHONPATH"] = str(Path(protocol.__file__).parents[2])
        env |= {"HPCSCHED_JOB_ID": "12", "HPCSCHED_SOCKET": str(controller.path), **variables}
        started.append(Running(module, args, env, tmp_path, changes))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
            each.process.communicate()
