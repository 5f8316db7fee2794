"""hwhy: in words, what a job waits for and when it is expected to start, or how it came to its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcsched import client
from hpcsched.cli.errors import run_command
from hpcsched.cli.options import HELP, VERSION, Command, Option, UsageError, Words
from hpcsched.cli.output import clean, print_json, when_text
from hpcsched.model.units import format_time_s

COMMAND = Command(
    "hwhy",
    ("[OPTIONS] JOB",),
    "Say what a job waits for, with the numbers, and when it is expected to start; of a job that is over, how it ended.",
    (
        Option("json", help="print the answer as JSON, version 1"),
        HELP,
        VERSION,
    ),
    ("A JOB is a number, a task of an array (10_3), the name of one of your jobs, or 'last'.",),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_command(COMMAND, _work, argv)


def _work(words: Words) -> int:
    if len(words.operands) != 1:
        raise UsageError("cannot tell which job: name one; see hwhy --help")
    answer = client.call("GET", client.job_path(words.operands[0], "why"))
    if words.has("json"):
        print_json(answer)
        return 0
    for line in _lines(answer, client.call("GET", "/v1/ping")["now_s"]):
        print(line)
    return 0


def _lines(answer: dict[str, Any], now_s: float) -> list[str]:
    text = clean(answer["text"])
    reason = answer["reason"]
    lines = [f"{reason}: {text}" if reason and reason != "None" and not text.startswith(reason) else text]
    if answer.get("ahead"):
        lines.append(f"{answer['ahead']} waiting {'job is' if answer['ahead'] == 1 else 'jobs are'} older.")
    expected_s = answer["expected_start_s"]
    if expected_s is not None:
        delay = f", in {format_time_s(expected_s - now_s)}" if expected_s > now_s else ""
        lines.append(f"Expected to start about {when_text(expected_s, now_s)}{delay}, by the time limits of what runs.")
    return lines
