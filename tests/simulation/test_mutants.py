"""The simulation sees what it is there to see: each known way to break the launch protocol is noticed."""

from __future__ import annotations

import pytest

from simulation.mutants import MUTANTS, Mutant, noticed
from simulation.stage import stage

WORLDS = 800  # the first that notices ends the search; the rarest needs several hundred

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "_"))
def test_a_broken_protocol_is_noticed(mutant: Mutant) -> None:
    with stage() as on:
        violation = noticed(on, mutant, WORLDS)
    assert violation
    assert "crash: " not in violation  # then it is the mutant that does not work, and nothing was noticed
