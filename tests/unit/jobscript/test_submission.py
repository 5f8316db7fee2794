"""A whole submission: words, script and environment become a job, and notes about it."""

from __future__ import annotations

from typing import Any

import pytest
from submitted_words import built

from hpcsched.errors import RequestError


def test_a_job_is_made_of_the_words() -> None:
    spec = built(command="hsub").spec
    assert (spec.name, spec.work_dir, spec.env, spec.submit_host) == ("job.sh", "/w", (("LANG", "C"),), "login")
    assert (spec.script_path, spec.submit_line) == ("/w/job.sh", "hsub job.sh")


def test_the_command_of_wrap_is_the_script() -> None:
    spec = built(argv=("--wrap", "a b"), script=None).spec
    assert (spec.name, spec.script_path) == ("wrap", "")
    assert "a b" in spec.script


def test_lines_behind_the_first_command_are_noted() -> None:
    notes = built(script="#!/bin/sh\n#SBTACH -N2\ntrue\n#SBATCH --time=5\n").notes
    assert "line 4 of the script is ignored: it follows a command" in notes
    assert any(note.startswith("line 2 of the script is a comment") for note in notes)


@pytest.mark.parametrize(
    "changes",
    [{"argv": ("--nonsense",)}, {"argv": ("--wrap", " "), "script": None}, {"script": None}, {"script": "echo\n"}],
)
def test_what_cannot_be_a_job_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        built(**changes)
