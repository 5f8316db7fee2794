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
from pathlib import Path

from simulation import chaos, cover
from simulation.world import Stage, stage

_STAGE: list[Stage] = []  # of a worker process, made once in it
_OPEN = contextlib.ExitStack()
_COVER: list[cover.Cover] = []  # of the stories, made before there were worker processes
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


def _world(seed: int) -> chaos.Outcome:
    return chaos.play(_STAGE[0], chaos.script_of(seed))


def _many(seeds: Iterable[int], jobs: int) -> int:
    began_s = time.monotonic()
    steps: list[int] = []
    executions = 0
    faults: Counter[str] = Counter()
    failed: list[chaos.Outcome] = []
    with multiprocessing.get_context("fork").Pool(jobs, _begin) as pool:
        for outcome in pool.imap_unordered(_world, seeds, chunksize=CHUNK):
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


def _part(number: int) -> tuple[int, cover.Part]:
    return number, cover.explore(_STAGE[0], _COVER[0], number)


def _all_stories(args: argparse.Namespace) -> int:
    began_s = said_s = time.monotonic()
    with stage() as on:
        made = cover.cover_of(on, everywhere=args.everywhere, every=args.every)
    _COVER.append(made)
    total = cover.Result()
    with cover.Progress(args.state, made) as progress:
        for number, part in progress.parts.items():
            total.take(made, number, part)
        left = [number for number in range(made.parts) if number not in progress.parts]
        print(f"{len(made.runs)} runs, {total.runs} of them made before", flush=True)
        with multiprocessing.get_context("fork").Pool(args.jobs, _begin) as pool:
            for number, part in pool.imap_unordered(_part, left):
                progress.keep(number, part)
                total.take(made, number, part)
                for failure in part.failures:
                    print(failure, flush=True)
                if time.monotonic() - said_s > SAY_EVERY_S:
                    said_s = time.monotonic()
                    print(f"{100 * total.runs // len(made.runs)} %, {said_s - began_s:.0f} s: {total}", flush=True)
    print("\n".join(total.lines()))
    print(total)
    return 1 if total.failures else 0


if __name__ == "__main__":
    sys.exit(main())
