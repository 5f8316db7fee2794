"""Ranks of a served model are killed, frozen and cut off while eight streams run: `make serve-rounds ROUNDS=50`.

Each round starts eight streams, lets one thing go wrong at a random token, and compares all tokens with those of an undisturbed
run. Prints one line a round: the longest pause between two tokens, and the seconds from the fault until the loss is noticed, the
next generation is formed, and it is ready. Then the longest pauses.
Exit status 1 if a token is wrong, lost or doubled, or a stream ends early.

    kill       SIGKILL of a rank
    stop       SIGSTOP of a rank: it is silent, and its connections stay
    cut        a rank's connections are broken; the process lives
    power-off  a rank and the spare are killed at once
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from hpcserve.group.front import SILENT_S, RecoveryTimes, ServeFront
from tests.serve.groups import Streams, cut_connections, group, prompts, ready, undisturbed
from tests.tiny_models import tiny_model

STREAMS, TOKENS = 8, 120
FAULTS = ("kill", "stop", "cut", "power-off")


def rank_pids(front: ServeFront) -> dict[int, int]:
    """Return the process of each slot that runs."""
    return {slot: one.pid for slot, one in front.launcher.processes.items() if one.returncode is None}


def do_harm(front: ServeFront, fault: str, slot: int) -> None:
    """Let something go wrong with the rank in a slot."""
    pids = rank_pids(front)
    match fault:
        case "kill":
            os.kill(pids[slot], signal.SIGKILL)
        case "stop":
            os.kill(pids[slot], signal.SIGSTOP)
        case "cut":
            cut_connections(pids[slot])
        case "power-off":
            for number in {slot, *(set(pids) - front.inside)}:
                os.kill(pids[number], signal.SIGKILL)


async def whole(front: ServeFront, ranks: int, spares: int) -> None:
    """Wait until all ranks are in the generation and all spares wait."""
    while not (front.engine.is_ready and len(front.inside) == ranks and front.spare_count >= spares):
        assert not front.failure, front.failure
        await asyncio.sleep(0.02)


async def recovery_of(front: ServeFront, began_s: float) -> RecoveryTimes:
    """Return the times of the first generation that was lost from `began_s` on, when the next one is ready."""
    while not (front.recovery.lost_at_s >= began_s and front.recovery.ready_at_s):
        assert not front.failure, front.failure
        await asyncio.sleep(0.005)
    return front.recovery


async def play(directory: Path, options: argparse.Namespace, expected: Sequence[Sequence[int]]) -> bool:
    """Play all rounds; return whether all tokens were right."""
    chance, right = random.Random(options.seed), True
    gaps: dict[str, list[float]] = defaultdict(list)
    asked = prompts(STREAMS)
    async with group(
        directory, ranks=options.ranks, shape=options.split, spares=options.spares, silent_s=options.silence
    ) as front:
        await ready(front)
        for number in range(options.rounds):
            await whole(front, options.ranks, options.spares)
            fault = options.fault or FAULTS[number % len(FAULTS)]
            slot = chance.choice(sorted(front.inside))
            streams = Streams(front.engine, asked, TOKENS)
            await streams.reach(chance.randrange(STREAMS, STREAMS * TOKENS * 3 // 4))
            began_s = time.monotonic()
            recovering = asyncio.create_task(recovery_of(front, began_s))
            do_harm(front, fault, slot)
            tokens = await streams.end()
            is_right = tokens == list(map(list, expected))
            right &= is_right
            times = await recovering
            after_s = [at_s - began_s for at_s in (times.lost_at_s, times.formed_at_s, times.ready_at_s)]
            gaps[fault].append(streams.gap_s)
            print(
                f"round {number + 1}: {fault} of slot {slot}: {'right' if is_right else 'WRONG'}, longest pause "
                f"{streams.gap_s:.2f} s (noticed {after_s[0]:.2f}, formed {after_s[1]:.2f}, ready {after_s[2]:.2f})",
                flush=True,
            )
    for fault, all_s in gaps.items():
        print(
            f"{fault}: {len(all_s)} rounds, pause median {statistics.median(all_s):.2f} s, longest {max(all_s):.2f} s"
        )
    return right


def main() -> int:
    """Play the rounds that the options say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--spares", type=int, default=1)
    parser.add_argument("--split", default="tensor", choices=("auto", "tensor", "pipeline"))
    parser.add_argument("--silence", type=float, default=SILENT_S)
    parser.add_argument("--fault", choices=FAULTS, help="only this one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        directory = tiny_model(Path(parent) / "model", "llama", num_hidden_layers=4)
        expected = undisturbed(directory, prompts(STREAMS), TOKENS)
        return 0 if asyncio.run(play(directory, options, expected)) else 1


if __name__ == "__main__":
    sys.exit(main())
