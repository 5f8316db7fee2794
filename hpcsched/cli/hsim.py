"""hsim: replay a machine's log with the scheduler's policies, and compare what they do; plan a saved world, or today's, again."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcsched.cli.errors import note, run_command
from hpcsched.cli.options import HELP, VERSION, Command, Option, UsageError, Words
from hpcsched.cli.output import print_json
from hpcsched.client import Json
from hpcsched.errors import RequestError
from hpcsched.listing.table import columns
from hpcsched.sim.metrics import json_of
from hpcsched.sim.policies import PLAN, POLICIES, POOL, Simulation, simulate
from hpcsched.sim.swf import read_trace

if TYPE_CHECKING:
    from hpcsched.sim.swf import Trace

COMMAND = Command(
    "hsim",
    (
        "run [OPTIONS] TRACE",
        "compare [OPTIONS] TRACE POLICY...",
        "replay [OPTIONS] SNAPSHOT",
        "whatif [OPTIONS] [SNAPSHOT]",
        "whatif [OPTIONS] --database=FILE",
    ),
    "Replay the log of a machine (Standard Workload Format, also gzip'ed) with a policy of the scheduler: run prints how "
    "it went, compare sets policies side by side. replay makes the plan of a world that hctl snapshot saved; whatif lets the "
    "queue as it is, or was then, go on with other nodes and policies: when would which job start?",
    (
        Option(
            "policy",
            "p",
            "POLICY",
            "follow this policy (run; default without it); replay, whatif: try this one as well, or each of a list",
        ),
        Option(
            "engine", "", "WHO", "who decides (run): pool, quick code for one pool (default), or plan, hpcschedd's own"
        ),
        Option("nodes", "N", "COUNT", "let the machine have this many nodes instead of what the trace says"),
        Option("cpus", "c", "COUNT", "let each of these nodes have this many processors; 1 without it"),
        Option("schedule-out", "", "FILE", "write job_id,submit,start,end of every job to this file (run)"),
        Option("plot", "", "BASE", "draw utilization, waits and the first policy's schedule to BASE.png and BASE.svg"),
        Option(
            "add-nodes",
            "",
            "NODES",
            "add COUNTxCPUS:MEM[:gpu:TYPE:N], as 2x16:64G:gpu:a100:4, to all partitions (whatif)",
        ),
        Option("remove-node", "", "NODES", "let nothing more start on these nodes (whatif)"),
        Option(
            "database",
            "",
            "FILE",
            "the queue of this database, as hctl backup writes, with the configuration as it is (replay, whatif)",
        ),
        Option("predict", help="jobs run as long as their users' last ones did, not to their limits (whatif)"),
        Option("jobs", "", "USERS", "list when the jobs of these users start: names, me or all (whatif)"),
        Option("json", help="print the figures as JSON"),
        HELP,
        VERSION,
    ),
    ("Policies: " + "; ".join(f"{name} ({says})" for name, (_, says) in POLICIES.items()) + ".",),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_command(COMMAND, _work, argv)


def _work(words: Words) -> int:
    what, *rest = words.operands or [""]
    if what == "run":
        return _run(words, rest)
    if what == "compare":
        return _compare(words, rest)
    if what in ("replay", "whatif"):
        return _of_a_world(words, what, rest)
    raise UsageError(
        f"cannot tell what to do: begin with run, compare, replay or whatif, not {what[:60]!r}; see hsim --help"
    )


_ONLY_WHATIF = ("add-nodes", "remove-node", "predict", "jobs")
_OF_A_WORLD = {"replay": ("policy", "database", "json"), "whatif": ("policy", "database", "json", *_ONLY_WHATIF)}


def _of_a_world(words: Words, what: str, operands: Sequence[str]) -> int:
    for option in words.given:
        if option not in _OF_A_WORLD[what]:
            raise UsageError(f"cannot use --{option} with {what}: it takes --{', --'.join(_OF_A_WORLD[what])}")
    from hpcsched.cli import hsimworld  # only this needs the planner

    if what == "whatif":
        return hsimworld.whatif(words, operands)
    if not operands and not words.has("database"):
        raise UsageError("cannot tell which world: hsim replay wants a file of hctl snapshot; see hsim --help")
    return hsimworld.replay(words, operands)


def _run(words: Words, operands: Sequence[str]) -> int:
    _refuse(words, "run", (*_ONLY_WHATIF, "database"), "whatif")
    if len(operands) != 1:
        raise UsageError("cannot tell which trace: hsim run wants one; see hsim --help")
    policy = _policy(words.last("policy", "default"))
    engine = words.last("engine", POOL)
    if engine not in (POOL, PLAN):
        raise UsageError(f"cannot let {engine[:60]!r} decide: --engine is {POOL} or {PLAN}")
    picture = _picture(words)
    done = simulate(_trace(operands[0]), policy, _procs(words), engine)
    _tell_left_out(done)
    if words.has("schedule-out"):
        write_schedule(done, Path(words.last("schedule-out")))
    if picture is not None:
        _draw([done], picture)
    if words.has("json"):
        print_json(_json(done))
    else:
        print("\n".join(f"{name:<26}{value}" for name, value in _json(done).items() if not isinstance(value, list)))
    return 0


def _refuse(words: Words, what: str, options: Sequence[str], whose: str) -> None:
    for option in options:
        if words.has(option):
            raise UsageError(f"cannot use --{option} with {what}: it is for {whose}")


def _compare(words: Words, operands: Sequence[str]) -> int:
    _refuse(words, "compare", (*_ONLY_WHATIF, "database"), "whatif")
    if len(operands) < 2:
        raise UsageError("cannot compare: hsim compare wants a trace and policies; see hsim --help")
    _refuse(words, "compare", ("policy", "engine", "schedule-out"), "run")
    policies, picture = [_policy(name) for name in operands[1:]], _picture(words)
    trace, procs = _trace(operands[0]), _procs(words)
    done = [simulate(trace, policy, procs) for policy in policies]
    _tell_left_out(done[0])
    if picture is not None:
        _draw(done, picture)
    if words.has("json"):
        print_json({"trace": trace.name, "policies": [_json(one) for one in done]})
    else:
        print(_table(done), end="")
    return 0


def write_schedule(done: Simulation, path: Path) -> None:
    """Write when each job was submitted, started and ended, in the order of submission. Raises RequestError."""
    try:
        with path.open("w", newline="") as file:
            out = csv.writer(file, lineterminator="\n")
            out.writerow(("job_id", "submit", "start", "end"))
            for job, start_s in zip(done.jobs, done.starts_s, strict=True):
                out.writerow((job.id, job.submit_s, start_s, start_s + job.run_s))
    except OSError as error:
        raise RequestError(f"cannot write the schedule to {str(path)!r}: {error.strerror}") from error


def _policy(name: str) -> str:
    if name not in POLICIES:
        raise UsageError(f"cannot follow policy {name[:60]!r}: known are {', '.join(POLICIES)}")
    return name


def _trace(name: str) -> Trace:
    return read_trace(Path(name))


def _procs(words: Words) -> int:
    """Return the size of the machine that was asked for; 0: none was."""
    if words.has("cpus") and not words.has("nodes"):
        raise UsageError("cannot take --cpus alone: say with --nodes how many nodes have them")
    return int(words.number("nodes", 0, at_least=1)) * int(words.number("cpus", 1, at_least=1))


def _tell_left_out(done: Simulation) -> None:
    if done.too_big:
        note("hsim", f"left out {done.too_big} jobs that need more than {done.procs} processors")


def _picture(words: Words) -> Path | None:
    """Return the beginning of the picture's path, None if none is to be drawn."""
    base = Path(words.last("plot"))
    if words.has("plot") and base.name in ("", ".."):
        raise UsageError(f"cannot draw to {str(base)!r}: it names no file; --plot=week makes week.png and week.svg")
    return base if words.has("plot") else None


def _draw(done: Sequence[Simulation], base: Path) -> None:
    from hpcsched.sim.plot import draw  # only this needs matplotlib

    try:
        draw(done, base)
    except OSError as error:
        raise RequestError(f"cannot write the picture to {str(base)!r}: {error.strerror}") from error


def _json(done: Simulation) -> Json:
    return {
        "policy": done.policy,
        "procs": done.procs,
        **json_of(done.metrics),
        "left_out_too_big": done.too_big,
        "simulated_jobs_per_s": round(done.jobs_per_s, 1),
    }


def _table(done: Sequence[Simulation]) -> str:
    headers = ("POLICY", "SLOWDOWN", "WAIT_MEAN", "WAIT_P95", "WAIT_MAX", "UTILIZATION", "FAIRNESS", "JOBS/S")
    rows = [
        (
            one.policy,
            f"{one.metrics.bounded_slowdown_mean:.2f}",
            f"{one.metrics.wait_mean_s:.0f}",
            f"{one.metrics.wait_p95_s:.0f}",
            f"{one.metrics.wait_max_s:.0f}",
            f"{one.metrics.utilization * 100:.2f}%",
            f"{one.metrics.user_fairness_jain:.3f}",
            f"{one.jobs_per_s:.0f}",
        )
        for one in done
    ]
    return columns(headers, rows, right=range(1, 8))
