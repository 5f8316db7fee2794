"""Runs on every rank: a GPT with `--shares auto` while the last rank is slowed down to a third in mid-run by a CPU quota.

Usage: unequal.py FOLDER CGROUP, the CPU cgroup with the quota, or nothing: then all ranks stay as they are.  First every rank
measures alone, before and after it is slowed down; then they train together.  Rank 0 prints one JSON line: `solo` samples per
second of each rank alone when slowed, `slowed_at` the step, and of each step together `samples_per_s` and `shares`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from hpctrain.examples.chargpt import Gpt
from hpctrain.optim.adamw import AdamW
from hpctrain.options import add_options
from hpctrain.run import start

LAYERS, WIDTH, HEADS, CONTEXT, BATCH, VOCABULARY = 2, 256, 8, 128, 32, 256
STEPS, SLOWED_AT, SOLO_STEPS = 40, 12, 24


def main() -> None:
    """Measure alone, then together."""
    folder, group = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
    parser = argparse.ArgumentParser()
    add_options(parser, out=folder, steps=STEPS, batch=BATCH, shares="auto", checkpoint_every=0, eval_every=0)
    for action in parser._actions:
        action.required = False
    with start(parser.parse_args([]), "unequal") as run:
        os.sched_setaffinity(0, {run.rank % (os.cpu_count() or 1)})
        tokens_BT = torch.randint(0, VOCABULARY, (BATCH, CONTEXT + 1))
        slow = bool(group) and run.rank == run.size - 1
        if slow:
            join(group)
        run.comm.barrier()
        solo = run.comm.all_gather_object(solo_rate(tokens_BT, BATCH * (1 if slow else 3) // 4))
        if slow:
            join(str(Path(group).parent))
        model = Gpt(VOCABULARY, CONTEXT, LAYERS, WIDTH, HEADS)
        optimizer = AdamW(model.named_parameters())
        for batch in run.steps(model, optimizer):
            if slow and batch.step == SLOWED_AT:
                join(group)
            batch.backward(loss_of(model, tokens_BT[: batch.high - batch.low]))
        if slow:
            join(str(Path(group).parent))
        if run.is_first:
            steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            found = {name: [step[name] for step in steps] for name in ("samples_per_s", "shares")}
            print(json.dumps({"solo": solo, "slowed_at": SLOWED_AT, **found}), flush=True)


def solo_rate(tokens_BT: torch.Tensor, count: int) -> float:
    """Samples per second of this rank, which talks to nobody, with so many samples."""
    model = Gpt(VOCABULARY, CONTEXT, LAYERS, WIDTH, HEADS)
    optimizer = AdamW(model.named_parameters())
    rows = tokens_BT[:count]
    times_s = []
    for number in range(1, SOLO_STEPS + 1):
        started_s = time.perf_counter()
        model.zero_grad()
        loss_of(model, rows).backward()
        optimizer.step(number, 1e-4)
        times_s.append(time.perf_counter() - started_s)
    return len(rows) / statistics.median(times_s[SOLO_STEPS // 2 :])  # the first steps touch fresh memory


def loss_of(model: torch.nn.Module, tokens_BT: torch.Tensor) -> torch.Tensor:
    """The next-token loss."""
    return F.cross_entropy(model(tokens_BT[:, :-1]).flatten(0, 1), tokens_BT[:, 1:].flatten())


def join(group: str) -> None:
    """Put this process with all its threads into a cgroup."""
    (Path(group) / "cgroup.procs").write_text(str(os.getpid()))


if __name__ == "__main__":
    main()
