"""How many switches, and for how long that matters."""

from __future__ import annotations

from hpcsched.jobscript.values import parse_switches
from hpcsched.model.units import UNLIMITED_S


def test_the_time_for_which_few_switches_matter_is_kept_to_the_second() -> None:
    assert parse_switches("1@0:05") == (1, 5)
    assert parse_switches("2@1") == (2, 60)
    assert parse_switches("2@UNLIMITED") == (2, UNLIMITED_S)
    assert parse_switches("2") == (2, None)
