"""What a run's metrics cost: the time that telling takes in each step, beside steps of the smallest and of a usual GPT.

Telling is a clock for the phases, the ranks' times, a JSON line written and flushed, and the word to the scheduler where it is
due. It is measured by itself, as what it adds is far below the noise of a step; the bar is a part of a step of the same run.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from hpctrain.batch import Batch, Phases
from hpctrain.comm.base import SingleCommunicator
from hpctrain.examples.chargpt import Gpt
from hpctrain.exchange.balance import RankTimes
from hpctrain.loop import RunIdentity, StepReport, TrainingProgress
from hpctrain.optim.adamw import AdamW
from hpctrain.options import add_options
from hpctrain.reporter import Goodput, Reporter, ReporterSetup, RunRecord
from hpctrain.settings import settings_of
from tests.bench.figures import Figure, from_samples

TOLD = 500  # steps in a sample
SIZES = {"the smallest GPT": (1, 32, 2, 32, 8), "the example's GPT": (4, 128, 4, 64, 32)}


def run(quick: bool = False) -> list[Figure]:
    """Return the seconds of telling, as a part of those of a step."""
    torch.set_num_threads(1)
    samples = 3 if quick else 9
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        tell = teller(Path(folder))
        for name, size in SIZES.items():
            step, telling = steps(size), []
            stepping = []
            for _ in range(samples):
                stepping.append(seconds(step, 20))
                telling.append(seconds(tell, TOLD))
            floor_s = sorted(stepping)[samples // 2]
            figures.append(
                from_samples(
                    f"telling of a step, beside {name} on one core",
                    [1e3 * each for each in telling],
                    "ms",
                    bar="<= 0.005" if name != "the smallest GPT" else "",
                    floor=1e3 * floor_s,
                    floor_name=f"a step ({telling[samples // 2] / floor_s:.2%})",
                )
            )
    return figures


def seconds(act: Callable[[], None], times: int) -> float:
    """Return the seconds of one call."""
    started_s = time.perf_counter()
    for _ in range(times):
        act()
    return (time.perf_counter() - started_s) / times


def teller(out: Path) -> Callable[[], None]:
    """Return what tells of one step of two ranks."""
    parser = argparse.ArgumentParser()
    add_options(parser)
    options = parser.parse_args(["--out", str(out), "--print-every", "1000000"])
    settings = settings_of(options, 1e-3, epoch_samples=10_000)
    model = torch.nn.Linear(1, 1)
    identity = RunIdentity(attempt=0, generation=0, job=None)
    comm = SingleCommunicator()
    goodput = Goodput(began_at_s=time.time())
    told = Reporter(
        ReporterSetup(
            options=options,
            name="bench",
            comm=comm,
            identity=identity,
            progress=TrainingProgress(),
            model=model,
            environ={},
            hosts=["n1", "n2"],
            settings=settings,
            goodput=goodput,
            record=RunRecord(options.out),
        )
    )
    phases, batch = Phases(model), Batch(0, 1, 1, 1.0)
    count = 0

    def tell() -> None:
        nonlocal count
        count += 1
        phases.begin()
        phases._forward_begins(model, ())
        phases.backward_begins()
        phases.backward_ended()
        data_s, forward_s, backward_s = phases.end()
        batch.phases = phases
        times = RankTimes(own_s=(0.1, 0.12), data_s=(0.01, 0.01), wait_s=(0.03, 0.01))
        report = StepReport(
            step=count,
            total_steps=None,
            loss=1.2345,
            val_loss=None,
            lr=1e-3,
            grad_norm=1.0,
            samples_per_s=123.4,
            step_s=0.13,
            comm_s=0.02,
            checkpoint=None,
            checkpoint_copy_s=0.0,
            shares=[16, 16],
            loss_scale=None,
            data_s=data_s,
            forward_s=forward_s,
            backward_s=backward_s,
            wait_s=0.02,
            exchanged_bytes=1 << 20,
            samples=32 * count,
            times=times,
        )
        told.step(report)

    return tell


def steps(size: tuple[int, int, int, int, int]) -> Callable[[], None]:
    """Return one step of training a GPT of these layers, width, heads, context and batch."""
    layers, width, heads, context, batch = size
    model = Gpt(128, context, layers, width, heads)
    optimizer, tokens_BT = AdamW(model.named_parameters()), torch.randint(0, 128, (batch, context + 1))

    def step() -> None:
        model.zero_grad(set_to_none=False)
        F.cross_entropy(model(tokens_BT[:, :-1]).flatten(0, 1), tokens_BT[:, 1:].flatten()).backward()
        optimizer.step(1, 1e-3)

    return step
