"""hwhy: explains why a job waits, when it starts, what slows it down, or how it ended.

The sentences come from the controller (`hpcsched.sched.explain`): for a waiting job also its position in the queue, and
what each node lacks, for a few nodes or if asked.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcsched import client
from hpcsched.cli.output import print_json, run_command
from hpcsched.client import Json
from hpcsched.commands.options import HELP, VERSION, Command, Option, UsageError, Words
from hpcsched.listing.text import clean, date_text

FEW_NODES = 8

COMMAND = Command(
    "hwhy",
    ("[OPTIONS] JOB", "--slow [JOB]"),
    "Explain why a job is waiting, with numbers, and when it is expected to start; for an ended job, how it ended.",
    (
        Option("json", help="print the answer as JSON, version 1"),
        Option("slow", help="tell what slows a running job down, or without a JOB, what holds up the queue"),
        Option("verbose", "v", help=f"show what each node lacks, even if there are more than {FEW_NODES} nodes"),
        HELP,
        VERSION,
    ),
    ("A JOB is a number, a task of an array (10_3), the name of one of your jobs, or 'last'.",),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_command(COMMAND, _work, argv)


def _work(words: Words) -> int:
    if words.has("slow"):
        return _slow(words)
    if len(words.operands) != 1:
        raise UsageError("cannot tell which job: name one; see hwhy --help")
    answer = client.call("GET", client.job_path(words.operands[0], "why"))
    if words.has("json"):
        print_json(answer)
        return 0
    about = f" That is about {date_text(answer['expected_start_s'])}."
    lines = [
        line + about if line.startswith(("It starts in", "It may start in")) else line
        for line in _lines(answer, all_nodes=words.has("verbose"))
    ]
    print("\n".join(map(clean, lines)))
    return 0


def _slow(words: Words) -> int:
    """Print the findings about a running job, or about the queue."""
    if len(words.operands) > 1:
        raise UsageError("cannot tell which job: name one; see hwhy --help")
    answer = client.call("GET", client.job_path(words.operands[0], "slow") if words.operands else "/v1/slow")
    if words.has("json"):
        print_json(answer)
        return 0
    for finding in answer["findings"]:
        where = f" on {finding['node']}" if finding["node"] else ""
        print(clean(f"{finding['cause']}{where}: {finding['text']}"))
        print(clean(f"    {finding['remedy']}"))
    if not answer["findings"]:
        print(clean(answer["text"]))
    if answer.get("nodes_left_out"):
        print(f"{answer['nodes_left_out']} more nodes of the job were not judged.")
    return 0


def _lines(answer: Json, *, all_nodes: bool) -> list[str]:
    lines: list[str] = [*_which(answer), *(answer.get("lines") or _brief(answer))]
    nodes = answer.get("nodes") or {}
    if all_nodes or len(nodes) <= FEW_NODES:
        return lines
    near = tuple(f"  {name} " for name in answer.get("nearest") or ())
    shown = [line for line in lines if not line.startswith("  ") or line.startswith(near)]
    return [*shown, f"hwhy -v tells what each of the {len(nodes)} nodes lacks; these lack least."]


def _which(answer: Json) -> list[str]:
    """Return the job of an array that the answer is about."""
    if answer.get("of", 1) == 1 or not answer["waiting"]:
        return []
    return [f"Of {answer['of']} tasks {answer['waiting']} wait; of job {answer['job']}, the first of them:"]


def _brief(answer: Json) -> list[str]:
    text, reason = answer["text"], answer["reason"]
    return [f"{reason}: {text}" if reason and reason != "None" and not text.startswith(reason) else text]
