"""A user's script that leaves its loop, or ends, in one of many ways on some ranks.

Usage: leaving.py OPTIONS... --way WAY --who RANK...
"""

from __future__ import annotations

import argparse
import sys

import torch

from hpctrain.options import add_options
from hpctrain.run import start

WAYS = ("break", "return", "exit", "fail", "refuse", "stop", "never", "end", "requeue")
AT = 6  # the step in which it happens


def main() -> int:
    parser = argparse.ArgumentParser()
    add_options(
        parser,
        lr=4e-3,
        warmup=20,
        schedule="cosine",
        clip=1.0,
        batch=12,
        steps=16,
        checkpoint_every=4,
        eval_every=0,
        print_every=1,
    )
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--who", type=int, nargs="+")
    options = parser.parse_args()
    way = options.way
    with start(options, "leaving") as run:
        mine = run.rank in options.who
        if mine and way == "never":
            return run.status
        if mine and way == "refuse":
            sys.exit("no such data here")
        model = torch.nn.Linear(6, 3)
        inputs = torch.randn(1000, 6, generator=torch.Generator().manual_seed(0))
        validation = lambda part, parts: (float(model(inputs[part::parts]).square().sum()), len(inputs[part::parts]))  # noqa: E731
        for batch in run.steps(model, torch.optim.SGD(model.parameters(), lr=0.1), validation):
            if mine and batch.step == AT and way == "break":
                break
            if mine and batch.step == AT and way == "return":
                return run.status
            if mine and batch.step == AT and way == "exit":
                sys.exit(0)
            if mine and batch.step == AT and way == "fail":
                sys.exit(3)
            batch.backward(model(inputs[batch.low : batch.high]).square().mean())
            if mine and batch.step == AT and way == "stop":
                run.stop()
        if mine and way == "end":
            sys.exit()
        if mine and way == "requeue":
            sys.exit(75)
    return run.status


if __name__ == "__main__":
    sys.exit(main())
