"""A command that ends or requeues the very job that it runs in.

The job's processes get SIGTERM at once, the command among them, perhaps before it has read its answer: whoever called it
would take that for a failure of the request. So it lets that signal pass; what does not end by itself is killed later.
"""

from __future__ import annotations

import os


def outlive_its_end() -> None:
    """From now on SIGTERM does not end this command, if it runs in a job."""
    if os.environ.get("HPCSCHED_JOB_ID") or os.environ.get("SLURM_JOB_ID"):
        import signal  # takes as long as a tenth of Python's start

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
