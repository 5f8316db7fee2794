"""What a command hands over of a submission, as the tests of it begin."""

from __future__ import annotations

from typing import Any

WORDS: dict[str, Any] = {
    "command": "sbatch",
    "argv": ["job.sh"],
    "script": "#!/bin/sh\ntrue\n",
    "script_path": "/w/job.sh",
    "environ": {"LANG": "C"},
    "work_dir": "/w",
    "host": "login",
}
