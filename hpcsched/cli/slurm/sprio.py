"""sprio: `hprio` under Slurm's name."""

from __future__ import annotations

from collections.abc import Sequence

from hpcsched.cli import hprio
from hpcsched.cli.slurm import run_face
from hpcsched.client import Json
from hpcsched.commands.options import Option, Words
from hpcsched.commands.slurm import ELSEWHERE, Face

FACE = Face(
    hprio.COMMAND._replace(
        name="sprio", accepted=(*ELSEWHERE, Option("sort", "S", "LIST"), Option("verbose", "v"), Option("usage"))
    ),
    "slurm_load_jobs error",
)
_LETTERS = {"age": "A", "assoc": "B", "fairshare": "F", "size": "J", "partition": "P", "qos": "Q", "tres": "T"}
_NORMALISED = {ord(letter): letter.lower() for letter in ("Y", *_LETTERS.values())}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_face(FACE, lambda words: hprio.show(words, _format), argv)


def _format(words: Words, weights: Json) -> str:
    """Return sprio's columns: the factors with a weight, or all with --long.

    Source: sprio of Slurm 23.02.
    """
    whose = " %.8u" if words.has("long") else ""
    letters = [letter for name, letter in _LETTERS.items() if words.has("long") or weights.get(name)]
    factors = "".join(f" %.{20 if letter == 'T' else 10}{letter}" for letter in letters)
    text = f"%.15i %9r{whose} %.10Y %.10S{factors}"
    return text.translate(_NORMALISED) if words.has("norm") else text
