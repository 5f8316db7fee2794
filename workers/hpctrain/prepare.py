"""What is done to a model before it is trained: looked at, recomputing, compiling.

Rules: in place, and names of weights stay, so that checkpoints fit with and without.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil

import torch
from torch.nn.parameter import is_lazy

from hpctrain.errors import TrainError


def prepare_model(options: argparse.Namespace, model: torch.nn.Module) -> None:
    """This will make forward what the options say, in place: names of weights stay.

    Raises:
        TrainError: that cannot be done with this model or on this machine, or the model has weights without values.
    """
    _check_weights(model)
    if options.recompute:
        from hpctrain.recompute import recompute_blocks  # noqa: PLC0415 (only who wants it waits for its import)

        recompute_blocks(model)
    if options.compile:
        compiler = os.environ.get("CXX", "g++")
        on_cpu = next((p.device.type for p in model.parameters()), "cpu") == "cpu"
        if options.compile == "inductor" and on_cpu and shutil.which(compiler) is None:
            raise TrainError(
                f"cannot compile the model: there is no C++ compiler {compiler!r} here; install g++, set CXX, or leave "
                "--compile away"
            )
        model.compile(backend=options.compile)


def _check_weights(model: torch.nn.Module) -> None:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TrainError("cannot train this model: it has no weights, or all are frozen (requires_grad is False)")
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise TrainError(
                f"cannot train this model: {name} has no shape yet (a lazy module); call the model once on a sample before the "
                "optimizer is made"
            )
        if tensor.is_meta:
            raise TrainError(
                f"cannot train this model: {name} has no values (device meta); call model.to_empty(device=run.device), and "
                "have it initialized, before the optimizer is made"
            )
