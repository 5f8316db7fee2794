"""What a user's script may and may not do in its loop, in one process; what it may not do is refused with what to do."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hpctrain.batch import Batch, validation_loss
from hpctrain.comm.base import SingleCommunicator
from hpctrain.env import StopRequest
from hpctrain.errors import TrainError
from hpctrain.loop import SKIPPED_STEPS, StepProfiler
from hpctrain.options import add_options
from hpctrain.run import Run

INPUTS = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))


def run_in(out: Path, *words: str) -> Run:
    parser = argparse.ArgumentParser()
    add_options(parser, batch=6, steps=4, checkpoint_every=0, eval_every=0, schedule="constant", clip=1.0, lr=0.1)
    return Run(parser.parse_args(["--out", str(out), *words]), "script", SingleCommunicator(), StopRequest(), {})


def net() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model: torch.nn.Module, low: int, high: int) -> torch.Tensor:
    return model(INPUTS[low:high]).square().mean()


def train(run: Run, model: torch.nn.Module, take: Callable[[Batch], None] | None = None) -> int:
    """Go through the loop, with `take` or as usual in each step, and return how many steps that were."""
    steps = 0
    for batch in run.steps(model, sgd(model)):
        steps = batch.step
        if take is not None:
            take(batch)
        else:
            batch.backward(loss_of(model, batch.low, batch.high))
    return steps


def test_gradients_of_another_backward_pass_are_refused_until_the_loop_is_over(tmp_path: Path) -> None:
    model = net()

    def after(batch: Batch) -> None:
        batch.backward(loss_of(model, batch.low, batch.high))
        model[2].bias.sum().backward()

    with pytest.raises(TrainError, match=r"cannot use gradients of loss.backward\(\): call batch.backward\(loss\)"):
        train(run_in(tmp_path / "before"), model, lambda batch: loss_of(model, batch.low, batch.high).backward())
    with pytest.raises(TrainError, match="cannot use gradients"):
        train(run_in(tmp_path / "after"), model, after)
    loss_of(model, 0, 6).backward()


def test_gradients_that_are_only_looked_at_are_not(tmp_path: Path) -> None:
    model = net()

    def penalized(batch: Batch) -> None:
        loss = loss_of(model, batch.low, batch.high)
        (slope,) = torch.autograd.grad(loss, model[0].weight, create_graph=True)
        batch.backward(loss + slope.square().sum())

    assert train(run_in(tmp_path), model, penalized) == 4


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (1.0, "the mean loss over the samples, a tensor of one number, and got float"),
        (None, "and got NoneType"),
        (torch.ones(2, 3, requires_grad=True), r"and got a tensor of shape \(2, 3\)"),
        (torch.tensor(1.0), "the loss does not come from weights that are trained"),
    ],
)
def test_a_value_that_is_not_a_loss_is_refused(given: object, why: str, tmp_path: Path) -> None:
    model = net()
    with pytest.raises(TrainError, match=f"cannot compute gradients of step 1: .*{why}"):
        next(run_in(tmp_path).steps(model, sgd(model))).backward(given)  # type: ignore[arg-type]


def test_weights_that_are_unfrozen_within_the_loop_are_refused(tmp_path: Path) -> None:
    model = net()
    model[0].requires_grad_(False)

    def unfreezing(batch: Batch) -> None:
        model[0].requires_grad_(batch.step == 3)
        batch.backward(loss_of(model, batch.low, batch.high))

    with pytest.raises(TrainError, match="cannot take step 3: weights that were frozen .* are trainable now"):
        train(run_in(tmp_path), model, unfreezing)


@pytest.mark.parametrize("words", [(), ("--zero",)], ids=str)
def test_a_step_of_the_optimizer_is_refused(words: tuple[str, ...], tmp_path: Path) -> None:
    model = net()
    optimizer = sgd(model)
    steps = run_in(tmp_path, *words).steps(model, optimizer)
    next(steps)
    with pytest.raises(TrainError, match=r"cannot take a step of SGD here: .*remove optimizer.step\(\)"):
        optimizer.step()
    steps.close()


def test_a_second_loop_is_refused(tmp_path: Path) -> None:
    model, run = net(), run_in(tmp_path)
    assert train(run, model) == 4
    with pytest.raises(TrainError, match="cannot begin another loop: run.steps was called already"):
        train(run, model)


def test_a_loss_that_is_not_finite_between_exchanges_is_reported_with_its_samples(tmp_path: Path) -> None:
    model = net()

    def spoilt(batch: Batch) -> None:
        batch.backward(loss_of(model, batch.low, batch.high) * (float("nan") if batch.low == 9 else 1.0))

    with pytest.raises(TrainError, match="not finite at step 2 .* on rank 0, in its samples 9 to 12;"):
        train(run_in(tmp_path, "--sync", "local:4", "--micro-batch", "3"), model, spoilt)


def test_validation_leaves_layers_in_the_mode_in_which_they_were() -> None:
    model = net()
    model[1].eval()
    seen: list[bool] = []

    def validation(part: int, parts: int) -> tuple[float, int]:
        seen.append(model.training)
        return float(loss_of(model, part, 100)), 100

    validation_loss(model, validation, SingleCommunicator())
    assert seen == [False]
    assert [module.training for module in model.modules()] == [True, True, False, True]


def test_a_profiler_tells_which_steps_it_traces(tmp_path: Path) -> None:
    profile = StepProfiler(2, tmp_path / "trace.json")
    watched = []
    for _ in range(SKIPPED_STEPS + 3):
        profile.step_begins()
        watched.append(profile.is_on)
        profile.step_ended()
    assert watched == [False] * SKIPPED_STEPS + [True, True, False]
    assert (tmp_path / "trace.json").is_file()
