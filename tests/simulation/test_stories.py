"""Every crash point of the small stories, every message fault in them, and a part of all their pairs."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from simulation.stage import Stage, stage
from simulation.stories import STORIES, Story, Tally, explore, pairs_of

ALONE, BOTH = 40, 75  # how many of each story's runs with one fault, and with both; `make sim STORIES=1` tries all


@pytest.fixture(scope="module")
def on() -> Iterator[Stage]:
    with stage() as made:
        yield made


TOTAL = Tally()


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name.replace(" ", "_"))
def test_g1_g2_no_crash_and_no_lost_message_breaks_an_invariant(story: Story, on: Stage) -> None:
    pairs = pairs_of(on, story)
    alone = [pair for pair in pairs if pair[0] is None or pair[1] is None]
    both = [pair for pair in pairs if pair[0] is not None and pair[1] is not None]
    chance = random.Random(story.name)
    tally = explore(on, story, chance.sample(alone, ALONE) + chance.sample(both, BOTH))
    TOTAL.add(tally)
    assert not tally.failures, "\n".join(tally.failures[:5])


def test_enough_was_explored() -> None:
    print(TOTAL)
    assert len(TOTAL.distinct) >= 500
