"""What a command hands over of a submission, as the tests of it begin, and the job that is made of it."""

from __future__ import annotations

from typing import Any

from hpcsched.jobscript.build import Built, SubmissionWords, build_submission, read_layers
from hpcsched.jobscript.options import parse_command_line

WORDS: dict[str, Any] = {
    "command": "sbatch",
    "argv": ("job.sh",),
    "script": "#!/bin/sh\ntrue\n",
    "script_path": "/w/job.sh",
    "environ": {"LANG": "C"},
    "work_dir": "/w",
    "host": "login",
}


def built(**changes: Any) -> Built:
    """Return the job that WORDS with `changes` ask for, at the time 0."""
    words = SubmissionWords(**(WORDS | changes))
    line = parse_command_line(words.argv)
    return build_submission(words, line, read_layers(words, line), 0.0)
