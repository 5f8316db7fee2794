"""hsh: run a shell or a command with a terminal on a node of a running job, as a step."""

from __future__ import annotations

from collections.abc import Sequence

from hpcnode.commands import hrun
from hpcsched import client
from hpcsched.cli.output import run_command
from hpcsched.commands.options import HELP, VERSION, Command, UsageError, Words

COMMAND = Command(
    "hsh",
    ("JOB [NODE [COMMAND [ARGUMENT...]]]",),
    "Open a shell on a node of a running job (by default its first), or run a command there with a terminal. It shares the "
    "CPUs and GPUs of the job with the processes that are already running.",
    (HELP, VERSION),
    ("A JOB is a number, a task of an array (10_3), the name of one of your jobs, or 'last'.",),
)
_SHELL = ("sh", "-c", 'cd; exec "${SHELL:-/bin/sh}" -l')


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_command(COMMAND, _work, argv)


def _work(words: Words) -> int:
    if not words.operands:
        raise UsageError("cannot open a shell: name one job; see hsh --help")
    client.must_be_local(COMMAND.name)
    reference, *rest = words.operands
    job = client.call("GET", client.job_path(reference))["jobs"][0]
    node = [f"--nodelist={rest[0]}"] if rest else []
    step = [f"--jobid={job['id']}", "--overlap", "--overcommit", "-N1", "-n1", "--job-name=hsh", "--chdir=/", *node]
    return hrun.main([*step, "--pty", *(rest[1:] or _SHELL)], hrun.CommandStyle("hsh"))
