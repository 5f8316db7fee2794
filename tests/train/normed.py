"""A user's script whose model has buffers of all sorts: running statistics, counters, a table that nobody changes.

Usage: normed.py OPTIONS... [--die RANK:STEP]; the last line names the SHA-256 of all of the model, buffers included.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

import torch
import torch.nn.functional as F

from hpctrain.options import add_options
from hpctrain.run import start


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(6, 16), torch.nn.Linear(16, 3)
        self.norm = torch.nn.BatchNorm1d(16)
        self.register_buffer("table", torch.arange(16.0) / 7)
        self.register_buffer("widest", torch.zeros(16, dtype=torch.complex64), persistent=False)
        self.register_buffer("seen", torch.zeros(16, dtype=torch.bool), persistent=False)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        with torch.no_grad():
            self.widest.data.copy_(hidden.amax(dim=0))  # the version counter does not see this
            self.seen = self.seen | (hidden.amax(dim=0) > 1)  # nor this, another tensor in its place
            self.forwards += 1  # also in validation
        return self.last(torch.tanh(self.norm(hidden) + self.table))


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
    parser.add_argument("--die")
    options = parser.parse_args()
    with start(options, "normed") as here:
        model = Net()
        inputs = torch.randn(1000, 6, generator=torch.Generator().manual_seed(0))
        names = (inputs[:, :3].abs()).argmax(dim=1)

        def validation(part: int, parts: int) -> tuple[float, int]:
            mine = slice(part * 40, (part + 1) * 40)
            for _ in range(part):  # ranks do not have equally much to do
                model(inputs[mine])
            return float(F.cross_entropy(model(inputs[mine]), names[mine], reduction="sum")), 40

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in here.steps(model, optimizer, validation):
            if options.die == f"{here.rank}:{batch.step}":
                os.kill(os.getpid(), signal.SIGKILL)
            batch.backward(F.cross_entropy(model(inputs[batch.low : batch.high]), names[batch.low : batch.high]))
        if here.is_first:
            print(f"weights sha256 {here.weights_sha256} forwards {int(model.forwards)} seen {int(model.seen.sum())}")
            print(f"running mean {float(model.norm.running_mean.abs().sum()):.4f}")
    return here.status


if __name__ == "__main__":
    sys.exit(main())
