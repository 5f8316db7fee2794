"""A model on several ranks answers as one rank does, also if ranks are killed, frozen or cut off meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from hpcserve.group.front import ServeFront
from tests.serve.groups import Streams, all_tokens, cut_connections, group, prompts, ready, undisturbed
from tests.tiny_models import tiny_model
from tests.waiting import PATIENCE_S

COUNT = 100
ASKED = prompts(4)
PATIENT_S = 30.0  # a busy machine lets a rank be silent for long


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return undisturbed(model, ASKED, COUNT)


def pid_of(front: ServeFront, slot: int) -> int:
    return front.launcher.processes[slot].pid


async def disturbed(front: ServeFront, signal_or_none: int | None, slot: int) -> list[list[int]]:
    """The tokens of all streams, in the middle of which something happens to the rank in a slot."""
    streams = Streams(front.engine, ASKED, COUNT)
    await streams.reach(len(ASKED) * COUNT // 4)
    if signal_or_none is None:
        assert cut_connections(pid_of(front, slot))
    else:
        os.kill(pid_of(front, slot), signal_or_none)
    return await streams.end()


def test_streams_survive_the_loss_of_followers_and_leaders(model: Path, expected: list[list[int]]) -> None:
    async def scene() -> None:
        async with group(model, ranks=2, spares=1, silent_s=PATIENT_S, patience_s=PATIENCE_S) as front:
            await ready(front)
            assert await all_tokens(front.engine, ASKED, COUNT) == expected
            leader, follower = sorted(front.inside)
            assert await disturbed(front, signal.SIGKILL, follower) == expected
            assert await disturbed(front, signal.SIGKILL, leader) == expected
            assert front.engine.metrics()["resumed_streams_total"] >= 1

    asyncio.run(asyncio.wait_for(scene(), 3 * PATIENCE_S))


def test_streams_survive_a_frozen_and_a_cut_off_rank(model: Path, expected: list[list[int]]) -> None:
    async def scene() -> None:
        async with group(model, ranks=2, shape="pipeline", silent_s=3.0, patience_s=PATIENCE_S) as front:
            await ready(front)
            assert await disturbed(front, signal.SIGSTOP, 1) == expected
            await ready(front)
            assert await disturbed(front, None, min(front.inside)) == expected

    asyncio.run(asyncio.wait_for(scene(), 3 * PATIENCE_S))
