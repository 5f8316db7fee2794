"""A submission that a command hands over as words: what is read in its place, and what is not."""

from __future__ import annotations

from typing import Any

import pytest
import submitted_words

from hpcsched.errors import RequestError
from hpcsched.jobscript.submission import manners, read_remote, words_from_json

WORDS = submitted_words.WORDS | {"command": "hsub"}


def test_a_job_is_made_of_the_words() -> None:
    read = read_remote(words_from_json(WORDS), 0.0)
    spec = read.built.spec
    assert (spec.name, spec.work_dir, spec.env, spec.submit_host) == ("job.sh", "/w", (("LANG", "C"),), "login")
    assert manners(read) == {"quiet": False, "verbose": False, "parsable": False}


def test_how_to_answer_may_stand_in_the_script_and_in_the_environment() -> None:
    script = "#!/bin/sh\n#HSUB --quiet --parsable\n"
    read = read_remote(words_from_json({**WORDS, "script": script, "environ": {"SBATCH_DEBUG": "1"}}), 0.0)
    assert manners(read) == {"quiet": True, "verbose": True, "parsable": True}


def test_the_command_of_wrap_is_the_script() -> None:
    read = read_remote(words_from_json({**WORDS, "argv": ["--wrap", "a b"], "script": None}), 0.0)
    assert read.built.spec.name == "wrap"
    assert read.built.spec.script_path == ""
    assert "a b" in read.built.spec.script


@pytest.mark.parametrize(
    "changes",
    [
        {"argv": ["--wait", "job.sh"]},
        {"environ": {"SBATCH_WAIT": "1"}},
        {"script": "#!/bin/sh\n#SBATCH --begin=16:00\n"},
        {"argv": ["--deadline=16:00", "job.sh"]},
        {"argv": ["--nonsense"]},
        {"argv": ["--wrap", " "], "script": None},
        {"script": None},
        {"script": "echo\n"},
    ],
)
def test_what_only_the_command_can_do_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        read_remote(words_from_json(WORDS | changes), 0.0)


@pytest.mark.parametrize(
    "obj",
    [
        None,
        WORDS | {"uid": 0},
        WORDS | {"argv": "job.sh"},
        WORDS | {"argv": [1]},
        WORDS | {"environ": {"A": 1}},
        WORDS | {"environ": []},
        WORDS | {"script": 1},
        WORDS | {"work_dir": None},
    ],
)
def test_what_are_no_words_is_refused(obj: object) -> None:
    with pytest.raises(RequestError, match="cannot submit"):
        words_from_json(obj)
