"""`python -m simulation`: run seeds, replay one in words, or run the stories. See `make sim`."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable
from multiprocessing.pool import Pool
from pathlib import Path

from simulation import chaos, cover
from simulation.stage import Stage, stage
from simulation.stories import STORIES

_STAGE: list[Stage] = []  # of a worker process, made once in it
_OPEN = contextlib.ExitStack()
_FAULTS: list[cover.Faults] = []  # of each story, found before there were worker processes
CHUNK = 20
SAY_EVERY_S = 60.0


def main() -> int:
    """Do what the command line asks; return the exit status."""
    parser = argparse.ArgumentParser(prog="simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many random worlds (default %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default %(default)s)")
    parser.add_argument("--seed", type=int, help="run this one seed, in words")
    parser.add_argument("--stories", action="store_true", help="try every crash point with every message fault instead")
    parser.add_argument("--everywhere", action="store_true", help="each pair in every story in which it occurs")
    parser.add_argument("--every", type=int, default=1, help="of the pairs, only every so many (default: all)")
    parser.add_argument(
        "--state", type=Path, help="where finished parts are kept: what was stopped goes on behind them"
    )
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: cores)")
    args = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is to be the same each time
        os.execve(
            sys.executable, [sys.executable, "-m", "simulation", *sys.argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"}
        )
    if args.seed is not None:
        return _replay(args.seed)
    if args.stories:
        return _all_stories(args)
    return _many(range(args.first, args.first + args.seeds), args.jobs)


def _begin() -> None:
    _STAGE.append(_OPEN.enter_context(stage()))


def _sim(seed: int) -> chaos.Outcome:
    return chaos.play(_STAGE[0], chaos.script_of(seed))


def _many(seeds: Iterable[int], jobs: int) -> int:
    began_s = time.monotonic()
    steps: list[int] = []
    executions = 0
    faults: Counter[str] = Counter()
    failed: list[chaos.Outcome] = []
    with multiprocessing.get_context("fork").Pool(jobs, _begin) as pool:
        for outcome in pool.imap_unordered(_sim, seeds, chunksize=CHUNK):
            steps.append(outcome.steps)
            executions += outcome.executions
            faults += outcome.faults
            if len(steps) % 1000 == 0:
                print(f"{len(steps)} worlds in {time.monotonic() - began_s:.0f} s", flush=True)
            if outcome.violation is not None:
                failed.append(outcome)
                print(f"seed {outcome.seed}: {outcome.violation}", flush=True)
    took_s = time.monotonic() - began_s
    print("faults:", ", ".join(f"{count} x {kind}" for kind, count in faults.most_common()))
    print(
        f"{len(steps)} worlds of {min(steps)} to {max(steps)} events (median {statistics.median_low(steps)}, "
        f"{sum(steps)} in all), {executions} executions, {len(failed)} violations; "
        f"{took_s:.0f} s, {len(steps) / took_s:.1f} worlds/s"
    )
    if failed:
        _explain(min(outcome.seed for outcome in failed))
    return 1 if failed else 0


def _replay(seed: int) -> int:
    with stage() as on:
        outcome = chaos.play(on, chaos.script_of(seed), in_words=True)
    print("\n".join(outcome.history))
    print(f"seed {seed}: {outcome.steps} events, {outcome.jobs} jobs, {outcome.executions} executions")
    if outcome.violation is None:
        return 0
    print(f"seed {seed}: {outcome.violation}")
    _explain(seed)
    return 1


def _explain(seed: int) -> None:
    """Print the command that replays a seed, and the shortest history found that fails in the same way."""
    script = chaos.script_of(seed)
    with stage() as on:
        first = chaos.play(on, script).violation
        if first is None:
            return
        script = chaos.shrink(script, lambda one: _same(chaos.play(on, one).violation, first.invariant))
        last = chaos.play(on, script, in_words=True)
    print(f"\nTo see it again: make sim SEED={seed}\nThe shortest history found that fails in the same way:")
    print(f"nodes {script.nodes}, rates {script.rates}")
    print("\n".join(last.history))
    print(f"seed {seed}: {last.violation}")


def _same(violation: chaos.Violation | None, invariant: str) -> bool:
    return violation is not None and violation.invariant == invariant


def _part(work: tuple[int, list[cover.Run]]) -> tuple[int, cover.Part]:
    return work[0], cover.explore(_STAGE[0], _FAULTS, work[1])


def _all_stories(args: argparse.Namespace) -> int:
    with stage() as on:
        _FAULTS.extend(cover.Faults.of(on, story) for story in STORIES)
    total = cover.Result()
    singles = cover.single_faults(_FAULTS)
    digest = cover.digest_of(singles, args.everywhere, args.every)
    with (
        cover.Progress(args.state, digest) as progress,
        multiprocessing.get_context("fork").Pool(args.jobs, _begin) as pool,
    ):
        _make(pool, "single faults", singles, progress, total)
        seen: dict[cover.Run, int] = {}
        for number in range(singles.parts):
            masks = progress.parts["single faults", number].seen
            seen |= {run: int(mask, 16) for run, mask in zip(singles.part(number), masks, strict=True)}
        plan = cover.pairs(_FAULTS, seen, everywhere=args.everywhere, every=args.every)
        _make(pool, "pairs", plan, progress, total)
    print("\n".join(total.lines()))
    print(total)
    return 1 if total.failures else 0


def _make(pool: Pool, name: str, plan: cover.Plan, progress: cover.Progress, total: cover.Result) -> None:
    """Make the runs of a plan that have not been made before."""
    began_s = said_s = time.monotonic()
    work = []
    for number in range(plan.parts):
        if (part := progress.parts.get((name, number))) is None:
            work.append((number, plan.part(number)))
        else:
            total.take(_FAULTS, plan.part(number), part)
    print(
        f"{name}: {len(plan.runs)} runs, {len(plan.runs) - sum(len(runs) for _, runs in work)} made before", flush=True
    )
    for done, (number, part) in enumerate(pool.imap_unordered(_part, work), start=1):
        progress.keep(name, number, part)
        total.take(_FAULTS, plan.part(number), part)
        for failure in part.failures:
            print(failure, flush=True)
        if time.monotonic() - said_s > SAY_EVERY_S:
            said_s = time.monotonic()
            print(f"{100 * done // len(work)} % of it in {said_s - began_s:.0f} s: {total}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
