"""A user's script with a network so small that a step is nothing, and faults at places.

Usage: tiny.py OPTIONS... [--optimizer NAME] [--die RANK:STEP] [--overflow RANK:STEP]
    --die R:N         rank R is killed at its step N
    --overflow R:N    rank R's gradient is not finite at step N, though its loss is
    --grow N          the loss's scale is doubled after N finite steps
    --leave N         the script leaves the loop at its step N
    --canary HEX      the model has a buffer with these bytes
    --patient         each checkpoint is on the share before the next step, so that all are of one step
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

import torch
import torch.nn.functional as F

from hpctrain.checkpoint.writing.writer import CheckpointWriter
from hpctrain.optim import precision
from hpctrain.optim.adamw import AdamW
from hpctrain.options import add_options
from hpctrain.run import start

MAKERS = {
    "ours": lambda model: AdamW(model.named_parameters()),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), weight_decay=0.1),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
}


class Overflow(torch.autograd.Function):
    """Changes nothing in forward, and makes the gradient infinite."""

    @staticmethod
    def forward(ctx: object, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return grad * float("inf")


def place(text: str) -> tuple[int, int]:
    rank, _, step = text.partition(":")
    return int(rank), int(step)


def wait_for_checkpoints() -> None:
    from waiting import wait_until  # noqa: PLC0415 (other tests start this without the path to it)

    real = CheckpointWriter.begin

    def begin(self: CheckpointWriter, *arguments: object, **options: object) -> float:
        copy_s = real(self, *arguments, **options)
        wait_until(self._finished, what="a checkpoint")
        return copy_s

    CheckpointWriter.begin = begin


def main() -> int:
    parser = argparse.ArgumentParser()
    add_options(
        parser,
        schedule="cosine",
        clip=1.0,
        batch=12,
        steps=16,
        warmup=2,
        checkpoint_every=4,
        eval_every=0,
        print_every=1,
        lr=1e-2,
    )
    parser.add_argument("--optimizer", choices=MAKERS, default="ours")
    parser.add_argument("--die", type=place)
    parser.add_argument("--overflow", type=place)
    parser.add_argument("--grow", type=int, default=precision.GROWTH_STEPS)
    parser.add_argument("--drop", type=float, default=0.2)
    parser.add_argument("--leave", type=int)
    parser.add_argument("--canary", type=bytes.fromhex)
    parser.add_argument("--patient", action="store_true")
    options = parser.parse_args()
    if options.patient:
        wait_for_checkpoints()
    precision.GROWTH_STEPS = options.grow
    with start(options, "tiny") as here:
        model = torch.nn.Sequential(
            torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Dropout(options.drop), torch.nn.Linear(16, 3)
        )
        if options.canary:
            model.register_buffer("canary", torch.frombuffer(bytearray(options.canary), dtype=torch.uint8))
        inputs = torch.randn(1000, 6, generator=torch.Generator().manual_seed(0))
        names = (inputs[:, :3].abs()).argmax(dim=1)
        for batch in here.steps(model, MAKERS[options.optimizer](model)):
            if options.die == (here.rank, batch.step):
                os.kill(os.getpid(), signal.SIGKILL)
            if options.leave == batch.step:
                break
            outputs = model(inputs[batch.low : batch.high])
            if options.overflow == (here.rank, batch.step):
                outputs = Overflow.apply(outputs)
            batch.backward(F.cross_entropy(outputs, names[batch.low : batch.high]))
        if here.is_first:
            print(f"weights sha256 {here.weights_sha256}")
    return here.status


if __name__ == "__main__":
    sys.exit(main())
