"""The simulation sees what it is there to see: each known way to break the launch protocol is noticed in a few worlds."""

from __future__ import annotations

import pytest

from simulation.mutants import MUTANTS, Mutant, noticed
from simulation.world import stage

WORLDS = 60

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "_"))
def test_a_broken_protocol_is_noticed(mutant: Mutant) -> None:
    with stage() as on:
        assert noticed(on, mutant, WORLDS) is not None
