"""The front's options, its address, and what it makes of the ranks' counts."""

from __future__ import annotations

import argparse
import asyncio
import math
import socket
from pathlib import Path
from unittest.mock import Mock

import pytest

from hpcserve.errors import ServeError
from hpcserve.group.front import (
    LEAST_STEPS,
    ServeFront,
    SpeedCounts,
    add_options,
    bound_socket,
    listen_name,
    settings_of,
)
from tests.tiny_models import tiny_model


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args(words)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def test_options_without_a_value_follow_from_the_model(model: Path) -> None:
    settings = settings_of(options(str(model)), {})
    assert (settings.group.ranks, settings.group.kind, settings.spares) == (1, "bf16", 0)
    assert settings.group.load.context_tokens == 256, "the tiny model knows no more"
    assert settings.step_s == math.inf
    assert settings_of(options(str(model), "--max-step-ms", "50"), {}).step_s == 0.05


@pytest.mark.parametrize(
    "words",
    [
        ("--context", "300"),
        ("--ranks", "0"),
        ("--spares", "-1"),
        ("--silence", "0.1"),
        ("--streams", "0"),
        ("--max-step-ms", "0"),
    ],
    ids=" ".join,
)
def test_options_without_sense_are_refused(model: Path, words: tuple[str, ...]) -> None:
    with pytest.raises(ServeError, match="cannot serve: --"):
        settings_of(options(str(model), *words), {})


def test_the_socket_of_an_earlier_front_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "sock"
    for _ in range(2):
        with bound_socket(f"unix:{path}") as bound:
            assert listen_name(bound) == f"unix:{path}"


def test_an_address_is_a_host_and_a_port() -> None:
    with bound_socket("127.0.0.1:0") as bound:
        assert listen_name(bound).startswith("http://127.0.0.1:")
        port = bound.getsockname()[1]
        with pytest.raises(ServeError, match=f"cannot listen at '127.0.0.1:{port}'"):
            bound_socket(f"127.0.0.1:{port}")
    for wrong in ("8000x", "127.0.0.1:99999", "unix:/no/such/directory/sock"):
        with pytest.raises(ServeError, match="cannot listen at"):
            bound_socket(wrong)


def test_a_speed_is_that_of_steps_of_one_token_since_the_last_look() -> None:
    then = SpeedCounts(generation=2, single=(100.0, 5.0), members={1: (100, 4.0), 2: (100, 1.0)})
    now = SpeedCounts(
        generation=2, single=(100.0 + LEAST_STEPS, 7.0), members={1: (140, 6.0), 2: (140, 1.4), 3: (9, 9.0)}
    )
    speed, step_s = now.since(then)
    assert speed == LEAST_STEPS / 2
    assert step_s == pytest.approx({1: 0.05, 2: 0.01})


@pytest.mark.parametrize("steps", [LEAST_STEPS - 1, LEAST_STEPS])
@pytest.mark.parametrize("generation", [2, 3])
def test_too_few_steps_or_another_generation_say_nothing(steps: int, generation: int) -> None:
    then = SpeedCounts(generation=2, single=(0.0, 0.0))
    speed, _ = SpeedCounts(generation=generation, single=(float(steps), 1.0)).since(then)
    assert (speed is None) == (steps < LEAST_STEPS or generation == 3)


def test_a_socket_is_bound_to_its_owner_alone(tmp_path: Path) -> None:
    with bound_socket(f"unix:{tmp_path / 'sock'}") as bound:
        assert bound.family == socket.AF_UNIX
        assert (tmp_path / "sock").stat().st_mode & 0o077 == 0


def test_a_lost_rank_is_started_again_when_a_spare_has_replaced_it(model: Path) -> None:
    async def scene() -> None:
        front = ServeFront(settings_of(options(str(model), "--spares", "1"), {}), {})
        front.inside = frozenset({0, 1})
        front.engine.attach(Mock())
        waiting = asyncio.create_task(front.spare_first(0))
        await asyncio.sleep(0)
        front.engine.detach()
        front.inside = frozenset({1, 2})
        await asyncio.sleep(0)
        assert not waiting.done(), "the spare has not loaded its part"
        front.engine.attach(Mock())
        await waiting
        await front.spare_first(0)

    asyncio.run(scene())


def test_without_spares_a_lost_rank_is_started_again_at_once(model: Path) -> None:
    front = ServeFront(settings_of(options(str(model)), {}), {})
    front.inside = frozenset({0})
    awaitable = front.spare_first(0)
    with pytest.raises(StopIteration):
        awaitable.send(None)
