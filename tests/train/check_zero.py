"""Runs on every rank: an optimizer in shards against the plain one, for what torch.optim has and for ours."""

from __future__ import annotations

import copy
import os
import sys

import torch

from hpctrain.comm import connect
from hpctrain.exchange.buckets import GradientBuckets
from hpctrain.optim.adamw import AdamW
from hpctrain.optim.torch_optim import optimizer_for
from hpctrain.optim.zero import ShardedOptimizer, check_elementwise

MAKERS = {
    "ours": lambda model: AdamW(model.named_parameters()),
    "groups": lambda model: torch.optim.AdamW(
        [{"params": list(model.parameters())[::2], "weight_decay": 0.5}, {"params": list(model.parameters())[1::2]}]
    ),
    "some": lambda model: torch.optim.SGD(list(model[0].parameters()), lr=0.1, momentum=0.9),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "plain": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.3),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), centered=True, momentum=0.5),
    "nadam": lambda model: torch.optim.NAdam(model.parameters()),
    "adadelta": lambda model: torch.optim.Adadelta(model.parameters()),
    "radam": lambda model: torch.optim.RAdam(model.parameters()),
}


def model_of() -> torch.nn.Sequential:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(40, 70), torch.nn.Linear(70, 31), torch.nn.Linear(31, 5))
    model[1].bias.requires_grad_(False)
    model.register_parameter("gain", torch.nn.Parameter(torch.tensor(0.5)))
    return model


def set_gradients(model: torch.nn.Module, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for parameter in model.parameters():
        if parameter.requires_grad:
            grad = torch.randn(parameter.shape, generator=generator)
            parameter.grad = grad if parameter.grad is None else parameter.grad.copy_(grad)


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(two) and all(torch.equal(one[name], two[name]) for name in one)


def main() -> None:
    torch.set_num_threads(1)
    comm = connect(sys.argv[1], os.environ)
    for name, make in MAKERS.items():
        plain, shared = model_of(), model_of()
        check_elementwise(make(shared))
        before, done = optimizer_for(plain, make(plain)), 0
        buckets = GradientBuckets(shared.parameters(), comm, bucket_bytes=4096)
        mine = optimizer_for(shared, make(shared))
        for _ in range(2):  # at the first step, and with what is there after some
            sharded = ShardedOptimizer(shared, mine, buckets, comm)
            for number in range(done + 1, done + 4):
                for model in (plain, shared):
                    set_gradients(model, number)
                before.step(number, 0.1 / number)
                sharded.step(number, 0.1 / number)
                assert same(plain.state_dict(), shared.state_dict()), f"{name}: other weights in step {number}"
            done += 3
            assert same(before.tensors(), sharded.tensors()), f"{name}: another state"
            shared, mine = copy.deepcopy(plain), None
            buckets = GradientBuckets(shared.parameters(), comm, bucket_bytes=4096)
            mine = optimizer_for(shared, make(shared))
            for key, tensor in mine.tensors().items():
                tensor.copy_(before.tensors()[key])
        whole = sum(tensor.nbytes for tensor in before.tensors().values())
        most = max(comm.all_gather_object(sharded.held_bytes()))  # type: ignore[type-var]
        assert most <= whole / comm.size * 1.1 + 64, f"{name}: {most} of {whole} bytes on one rank"
    if comm.rank == 0:
        print(f"{len(MAKERS)} optimizers in shards over {comm.name}")
    comm.barrier()
    comm.close()


if __name__ == "__main__":
    main()
