"""torch's own optimizers under the loop: the same bits as without it, and as before a restart."""

from __future__ import annotations

import copy

import pytest
import torch

from hpctrain.errors import TrainError
from hpctrain.optim.adamw import AdamW, Stretch
from hpctrain.optim.torch_optim import TorchOptimizer, guarded, optimizer_for

MAKERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.5, nesterov=False),
    "plain sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1, amsgrad=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1, initial_accumulator_value=0.3),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.1, momentum=0.5, centered=True),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.1),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.1),
}


def model_of(seed: int = 3) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def set_gradients(model: torch.nn.Module, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


@pytest.mark.parametrize("kind", MAKERS)
def test_an_optimizer_moves_weights_as_it_does_by_itself(kind: str) -> None:
    ours, plain = model_of(), model_of()
    wrapped, alone = TorchOptimizer(ours, MAKERS[kind](ours.parameters())), MAKERS[kind](plain.parameters())
    assert torch.equal(flat(ours), flat(plain))
    for number in range(1, 5):
        lr = 0.1 / number
        set_gradients(ours, number)
        set_gradients(plain, number)
        alone.param_groups[0]["lr"] = lr
        wrapped.step(number, lr)
        alone.step()
        assert torch.equal(flat(ours), flat(plain)), number


@pytest.mark.parametrize("kind", MAKERS)
def test_a_checkpoint_suffices_to_continue_with_the_same_bits(kind: str) -> None:
    model = model_of()
    optimizer = TorchOptimizer(model, MAKERS[kind](model.parameters()))
    layout = {name: (tensor.dtype, tensor.shape) for name, tensor in optimizer.tensors().items()}
    for number in (1, 2):
        set_gradients(model, number)
        optimizer.step(number, 0.1)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in optimizer.tensors().items()} == layout
    other = model_of(seed=4)
    other.load_state_dict(model.state_dict())
    restarted = TorchOptimizer(other, MAKERS[kind](other.parameters()))
    for name, tensor in copy.deepcopy(optimizer.tensors()).items():
        restarted.tensors()[name].copy_(tensor)
    for number in (3, 4):
        for part, moved in ((model, optimizer), (other, restarted)):
            set_gradients(part, number)
            moved.step(number, 0.05)
    assert torch.equal(flat(model), flat(other))


def test_groups_keep_the_ratio_of_their_learning_rates() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.2}, {"params": model[2].parameters(), "lr": 0.02}]
    )
    before = flat(model)
    wrapped = TorchOptimizer(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    wrapped.step(1, 0.5)
    moved = before - flat(model)
    assert moved[:40] == pytest.approx(0.5, abs=1e-6)
    assert moved[40:] == pytest.approx(0.05, abs=1e-6)


def test_the_first_groups_learning_rate_is_the_loops_to_the_bit() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = TorchOptimizer(model, optimizer)
    rates = [0.1 * part / 97 for part in range(1, 97)]
    for number, lr in enumerate(rates, 1):
        set_gradients(model, number)
        wrapped.step(number, lr)
        assert optimizer.param_groups[0]["lr"] == lr


def test_frozen_weights_have_no_state_and_stay() -> None:
    model = model_of()
    model[0].requires_grad_(False)
    wrapped = TorchOptimizer(model, torch.optim.AdamW(model.parameters()))
    assert {name.split(".")[0] for name in wrapped.tensors()} == {"2"}


def test_optimizers_that_cannot_be_served_are_refused_with_the_reason() -> None:
    model = model_of()
    with pytest.raises(TrainError, match="with LBFGS: it computes the loss several times within a step"):
        TorchOptimizer(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(TrainError, match="this SGD: it has a parameter that is not of the model"):
        TorchOptimizer(model, torch.optim.SGD(model_of().parameters(), lr=0.1))

    class Counting(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["calls"] = self.state[parameter].get("calls", 0) + 1

    with pytest.raises(TrainError, match="with Counting: its state 'calls' is a int, and a checkpoint keeps tensors"):
        TorchOptimizer(model, Counting(model.parameters(), lr=0.1))
    with pytest.raises(TrainError, match="with SparseAdam: SparseAdam does not support dense gradients"):
        TorchOptimizer(model, torch.optim.SparseAdam(model.parameters()))


@pytest.mark.parametrize(
    ("given", "named"), [(None, "a NoneType"), ([], "a list"), (torch.optim.SGD, "SGD"), (AdamW, "AdamW")]
)
def test_an_object_that_is_not_an_optimizer_is_refused(given: object, named: str) -> None:
    with pytest.raises(TrainError, match=f"cannot train with {named} for an optimizer: give run.steps one object"):
        optimizer_for(model_of(), given)  # type: ignore[arg-type]


def test_a_script_that_changes_groups_or_rates_meanwhile_is_refused() -> None:
    model = model_of()
    plain = torch.optim.SGD(model[0].parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(plain, 0.9)
    wrapped = TorchOptimizer(model, plain)
    set_gradients(model, 1)
    wrapped.step(1, 0.1)
    wrapped.step(2, 0.05)
    schedule.step()
    with pytest.raises(
        TrainError, match=r"the script has changed its learning rate .* run.steps\(..., schedule=SCHEDULE\)"
    ):
        wrapped.step(3, 0.05)
    plain.add_param_group({"params": model[2].parameters()})
    with pytest.raises(TrainError, match="a parameter group was added after the loop began"):
        wrapped.step(3, 0.05)


def test_our_own_is_taken_as_it_is() -> None:
    model = model_of()
    ours = AdamW(model.named_parameters())
    assert optimizer_for(model, ours) is ours


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("cuts", [[1], [17, 33], [5000, 5007, 65531], [*range(3, 100_000, 7001)]])
def test_adamw_gives_the_same_bits_wherever_tensors_are_cut(cuts: list[int], kind: torch.dtype) -> None:
    """So a checkpoint's gradients may be taken again in any pieces, by any number of threads."""
    rule, _ = AdamW.from_settings(AdamW([]).settings())
    whole = stretch_of((100_003,), kind)
    parts = [one.clone() for one in whole]
    for number in range(1, 4):
        rule.move(whole, number, 1e-3, decayed=True)
        for stretch in zip(*(one.tensor_split(cuts) for one in parts), strict=True):
            rule.move(stretch, number, 1e-3, decayed=True)
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("shape", [(8, 6, 5, 3), (8, 8, 4, 4)])
def test_adamw_moves_weights_that_lie_otherwise_to_the_same_bits(shape: tuple[int, ...]) -> None:
    rule, _ = AdamW.from_settings(AdamW([]).settings())
    plain = stretch_of(shape, torch.float32)
    others = [one.clone() for one in plain]
    others[0] = others[0].contiguous(memory_format=torch.channels_last)
    others[3] = others[3].transpose(0, 3).contiguous().transpose(0, 3)
    for number in range(1, 4):
        rule.move(plain, number, 1e-3, decayed=True)
        rule.move((others[0], others[1], others[2], others[3]), number, 1e-3, decayed=True)
    for one, other in zip(plain, others, strict=True):
        assert torch.equal(one, other)


def test_adamw_is_torchs_fused_one() -> None:
    parameter = torch.nn.Parameter(torch.randn(32, 64))
    ours = torch.nn.Parameter(parameter.detach().clone())
    theirs = torch.optim.AdamW([parameter], lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    mine = AdamW([("w", ours)])
    for number in range(1, 6):
        parameter.grad = torch.randn(32, 64)
        ours.grad = parameter.grad.clone()
        theirs.step()
        mine.step(number, 1e-2)
    assert torch.equal(parameter, ours)


def test_adamw_moves_the_parts_of_complex_numbers_by_themselves() -> None:
    rule, _ = AdamW.from_settings(AdamW([]).settings())
    plain = stretch_of((50, 2), torch.float32)
    numbers = tuple(torch.view_as_complex(one.clone()) for one in plain)
    rule.move(plain, 1, 1e-3, decayed=True)
    rule.move((numbers[0], numbers[1], numbers[2], numbers[3]), 1, 1e-3, decayed=True)
    for one, other in zip(plain, numbers, strict=True):
        assert torch.equal(one, torch.view_as_real(other))


def stretch_of(shape: tuple[int, ...], kind: torch.dtype) -> Stretch:
    """Weights, gradients and moments of a usual size."""
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(shape, generator=generator).mul_(scale).to(kind) for scale in (1.0, 1e-3, 1e-3, 1e-6)]
    return parts[0], parts[1], parts[2], parts[3].abs_()


def test_a_step_that_the_script_takes_itself_is_refused_while_the_loop_trains() -> None:
    model = model_of()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = TorchOptimizer(model, plain)
    set_gradients(model, 1)
    with guarded(wrapped):
        wrapped.step(1, 0.1)
        moved = flat(model)
        with pytest.raises(TrainError, match=r"cannot take a step of SGD here: .*remove optimizer.step\(\)"):
            plain.step()
    assert torch.equal(flat(model), moved)
    plain.step()
    assert not torch.equal(flat(model), moved)
