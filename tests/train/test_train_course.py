"""The course of a training: the script's own learning rate, schedule, validation and early stop, and what is left at its end."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from ranks import finish, needs_mpi, python, run_mpi, started
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from hpctrain.comm.base import SingleCommunicator
from hpctrain.env import StopRequest
from hpctrain.errors import TrainError
from hpctrain.optim.adamw import AdamW
from hpctrain.options import options_from
from hpctrain.run import Run, start

INPUTS = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(INPUTS, (INPUTS[:, 0] > 0).long())

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], object]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 3, 0.5),
    "milestones": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 5], 0.3),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=12),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4),
    "in turn": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(optimizer, 8)],
        [4],
    ),
}


def net() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def groups_of(model: torch.nn.Module) -> list[dict]:
    return [{"params": model[0].parameters(), "lr": 0.03}, {"params": model[2].parameters(), "lr": 0.07}]


def loss_of(model: torch.nn.Module, part: list[torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(part[0]), part[1])


def plain(model: torch.nn.Module, optimizer: torch.optim.Optimizer, schedule: object = None) -> list[float]:
    """Three epochs without hpctrain: the loss of each step."""
    losses = []
    for _ in range(3):
        for part in DataLoader(DATA, batch_size=10):
            optimizer.zero_grad()
            loss = loss_of(model, part)
            loss.backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()
            losses.append(loss.item())
    return losses


def train(run: Run, model: torch.nn.Module, optimizer: torch.optim.Optimizer | AdamW, **more: object) -> None:
    for batch in run.steps(model, optimizer, data=DataLoader(DATA, batch_size=10), **more):
        batch.backward(loss_of(model, batch.samples))


def lines(out: Path) -> list[dict]:
    return [line for line in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()) if "loss" in line]


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups_of(model), momentum=0.9)


def test_without_options_a_script_trains_as_without_hpctrain(tmp_path: Path) -> None:
    alone, model = net(), net()
    losses = plain(alone, sgd(alone))
    with start(out=tmp_path, epochs=3) as run:
        train(run, model, sgd(model))
    assert [line["loss"] for line in lines(tmp_path)] == pytest.approx(losses, abs=1e-6)
    assert {line["lr"] for line in lines(tmp_path)} == {0.03}
    assert same(alone, model)
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    assert all(torch.equal(weights[name], tensor) for name, tensor in alone.state_dict().items())


def test_options_win_over_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone, model = net(), net()
    half = torch.optim.SGD([group | {"lr": group["lr"] * 0.5} for group in groups_of(alone)], momentum=0.9)
    plain(alone, half)
    with start(out=tmp_path, epochs=3, lr=0.015, save_model=False) as run:
        train(run, model, sgd(model))
    assert all(torch.allclose(*pair, rtol=1e-5) for pair in zip(alone.parameters(), model.parameters(), strict=True))
    assert "train: lr 0.015 (constant), clip none, batch 10, 12 steps = 3 epochs\n" in capsys.readouterr().out
    assert not (tmp_path / "model.pt").exists()
    with start(out=tmp_path / "ours", epochs=3, batch=20, name="ours") as run:
        train(run, model, AdamW(model.named_parameters(), lr=3e-4))
    assert "ours: lr 3e-4 (constant), clip none, batch 20, 6 steps = 3 epochs\n" in capsys.readouterr().out


def test_a_first_group_with_rate_zero_does_not_decide_the_learning_rate(tmp_path: Path) -> None:
    alone, model = net(), net()
    plain(alone, torch.optim.SGD([groups_of(alone)[0] | {"lr": 0.0}, groups_of(alone)[1]]))
    with start(out=tmp_path, epochs=3) as run:
        train(run, model, torch.optim.SGD([groups_of(model)[0] | {"lr": 0.0}, groups_of(model)[1]]))
    assert same(alone, model)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_of_torch_is_stepped_with_each_step_and_resumed(kind: str, tmp_path: Path) -> None:
    alone = net()
    optimizer = sgd(alone)
    losses = plain(alone, optimizer, SCHEDULES[kind](optimizer))
    for steps in (5, 12):
        model = net()
        optimizer = sgd(model)
        with start(out=tmp_path, steps=steps, checkpoint_every=2) as run:
            train(run, model, optimizer, schedule=SCHEDULES[kind](optimizer))
    assert [line["loss"] for line in lines(tmp_path)] == pytest.approx(losses, abs=1e-6)
    assert same(alone, model)


def test_a_schedule_by_validation_follows_it_over_a_restart(tmp_path: Path) -> None:
    for out, lengths in (("at once", (12,)), ("in parts", (5, 12))):
        for steps in lengths:
            model = net()
            optimizer = sgd(model)
            plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
            with start(out=tmp_path / out, steps=steps, eval_every=1, checkpoint_every=0 if steps == 12 else 1) as run:
                # A loss that never falls.
                train(run, model, optimizer, validation=lambda part, parts: (4.0, 1), schedule=plateau)
    rates = [[line["lr"] for line in lines(tmp_path / out)] for out in ("at once", "in parts")]
    assert rates[0] == rates[1]
    assert rates[0][:6] == [0.03, 0.03, 0.03, 0.015, 0.015, 0.0075]


def test_a_schedule_that_cannot_be_kept_or_has_no_say_is_refused(tmp_path: Path) -> None:
    model = net()
    optimizer = sgd(model)
    schedule = lr_scheduler.StepLR(optimizer, 3)

    def refusal(given: object, moved_by: object = optimizer, **settings: object) -> str:
        with pytest.raises(TrainError) as raised:
            train(run_in(tmp_path, **settings), model, moved_by, schedule=given)
        return str(raised.value)

    assert "with --lr and --warmup: the script gives run.steps its own schedule" in refusal(schedule, lr=1, warmup=3)
    assert "it was not made for the optimizer" in refusal(schedule, sgd(model))
    assert "it needs an optimizer of torch.optim" in refusal(schedule, AdamW(model.named_parameters()))
    assert "schedule=str: give one object of torch.optim.lr_scheduler" in refusal("cosine")


def run_in(out: Path, **settings: object) -> Run:
    return Run(options_from({"out": out, **settings}), "script", SingleCommunicator(), StopRequest(), {})


def test_a_schedules_step_by_the_script_is_refused(tmp_path: Path) -> None:
    model = net()
    optimizer = sgd(model)
    schedule = lr_scheduler.StepLR(optimizer, 3)
    steps = run_in(tmp_path).steps(model, optimizer, data=DATA, schedule=schedule)
    next(steps).backward(loss_of(model, DATA.tensors))
    for _ in range(3):
        schedule.step()
    with pytest.raises(TrainError, match=r"run.steps calls the schedule's step itself: remove schedule.step\(\)"):
        next(steps)


def test_training_stops_without_improvement_and_saves_the_best_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = iter([5.0, 3.0, 4.0, math.nan, 3.0, 1.0])
    model = net()
    at_best = []

    def validation(part: int, parts: int) -> tuple[float, int]:
        at_best.append([p.detach().clone() for p in model.parameters()])
        return next(told), 1

    with start(out=tmp_path, epochs=30, patience=3) as run:
        train(run, model, sgd(model), validation=validation)
    assert (run.status, run.finished) == (0, False)
    assert (
        "stopped early at step 20: 3 validations without a lower loss than 3.0000 at step 8" in capsys.readouterr().out
    )
    assert [line["step"] for line in lines(tmp_path) if "val_loss" in line] == [4, 8, 12, 16, 20]  # at each epoch's end
    best = torch.load(tmp_path / "best.pt", weights_only=True)
    assert all(map(torch.equal, best.values(), at_best[1]))
    assert all(map(torch.equal, torch.load(tmp_path / "model.pt", weights_only=True).values(), model.parameters()))
    with start(out=tmp_path, epochs=30, patience=3) as run:
        train(run, model, sgd(model), validation=validation)
    assert "stopped early at step 20: 3 validations" in capsys.readouterr().out
    assert len(lines(tmp_path)) == 20


def test_validation_over_a_loader_is_its_mean_on_any_number_of_ranks() -> None:
    model = net()
    run = run_in(Path("unused"))
    loader = DataLoader(DATA, batch_size=7, shuffle=True, num_workers=1)
    validation = run.mean_loss(lambda part: loss_of(model, part), loader)
    whole, count = validation(0, 1)
    parts = [validation(part, 3) for part in range(3)]
    for source in run._sources:
        source.close()
    assert count == sum(count for _, count in parts) == 40
    assert whole == pytest.approx(sum(total for total, _ in parts))
    assert whole / 40 == pytest.approx(loss_of(model, DATA.tensors).item(), abs=1e-6)
    with pytest.raises(TrainError, match="returned a float, not the mean loss"):
        run.mean_loss(lambda part: 1.0, DATA)(0, 1)


def test_validation_options_without_a_validation_are_noted_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = net()
    with start(out=tmp_path, steps=2, eval_every=1) as run:
        train(run, model, sgd(model))
    expected = "train: --eval-every 1 has no effect: the script gives run.steps no validation\n"
    assert expected in capsys.readouterr().out
    for more in ({}, {"eval_every": 0, "validation": lambda part, parts: (1.0, 1)}):
        validation = more.pop("validation", None)
        with pytest.raises(TrainError, match=r"cannot stop early \(--patience 2\)"):
            train(run_in(tmp_path, patience=2, **more), model, sgd(model), validation=validation)


def test_a_finished_run_prints_that_and_the_settings_that_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for batch in (None, 20):
        model = net()
        with start(out=tmp_path, steps=4, batch=batch, clip=0.5 if batch else None) as run:
            train(run, model, sgd(model))
    output = capsys.readouterr().out
    assert "train: settings differ from the checkpoint: clip none -> 0.5, batch 10 -> 20\n" in output
    assert "all 4 steps are done: give more --steps or --epochs, or another --out\n" in output
    assert output.count("goodput: ") == 1  # of the first one


def test_in_a_notebook_an_error_is_an_exception_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    monkeypatch.setattr(sys, "argv", ["kernel", "-f", "/run/kernel.json"])
    model = net()
    optimizer = sgd(model)
    with pytest.raises(ZeroDivisionError):
        fail_in_loop(tmp_path, model, optimizer)
    loss_of(model, DATA.tensors).backward()  # neither refused
    optimizer.step()
    with pytest.raises(TrainError, match="cannot take step 1"), start(out=tmp_path / "other", steps=3) as run:
        list(run.steps(model, optimizer, data=DATA))


def fail_in_loop(out: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with start(out=out, steps=3) as run:
        for _ in run.steps(model, optimizer, data=DATA):
            raise ZeroDivisionError


def test_in_another_thread_signals_stay_as_they_are(tmp_path: Path) -> None:
    program = tmp_path / "thread.py"
    program.write_text(
        "import threading, torch\n"
        "from hpctrain.run import start\n"
        "def work():\n"
        f"    with start(out={str(tmp_path / 'run')!r}, steps=2) as run:\n"
        "        model = torch.nn.Linear(2, 1)\n"
        "        for batch in run.steps(model, torch.optim.SGD(model.parameters(), lr=0.1)):\n"
        "            batch.backward(model(torch.ones(3, 2)).mean())\n"
        "    print('status', run.status)\n"
        "thread = threading.Thread(target=work)\n"
        "thread.start()\n"
        "thread.join()\n"
    )
    with started([*python(), program]) as process:
        ended = finish(process)
    assert "status 0" in ended.output, ended.output


@needs_mpi
def test_an_output_directory_that_cannot_be_made_is_a_one_line_error(tmp_path: Path) -> None:
    program = tmp_path / "script.py"
    program.write_text(
        "import torch\n"
        "from hpctrain.run import start\n"
        "with start(out='/proc/none/x', steps=2) as run:\n"
        "    model = torch.nn.Linear(2, 1)\n"
        "    for batch in run.steps(model, torch.optim.SGD(model.parameters(), lr=0.1)):\n"
        "        batch.backward(model(torch.ones(3, 2)).mean())\n"
    )
    ended = run_mpi(2, program)
    assert ended.status != 0
    assert "cannot write to /proc/none/x: " in ended.output
    assert "Traceback" not in ended.output, ended.output
