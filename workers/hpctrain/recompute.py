"""Less memory for more time: forward's inner results are not kept but computed again when backward needs them.

Does not know models beyond their lists of blocks.
Rules: random numbers are the same the second time, so the gradients are the same to the bit.
Sources: Chen et al., "Training deep nets with sublinear memory cost", 2016; torch.utils.checkpoint.
"""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hpctrain.errors import TrainError


def recompute_blocks(model: nn.Module) -> int:
    """This will recompute each block of the model's outermost lists (ModuleList, Sequential), and return how many there are.

    Raises:
        TrainError: the model has no list of blocks.
    """
    blocks = _blocks(model)
    if not blocks:
        raise TrainError(
            "cannot recompute: the model has no torch.nn.ModuleList or Sequential of blocks; call "
            "hpctrain.recompute.recompute(module) for those of its parts that are to be computed twice"
        )
    for block in blocks:
        recompute(block)
    return len(blocks)


def recompute(module: nn.Module) -> None:
    """This will make the module keep its inputs alone for backward."""
    forward = module.forward

    @functools.wraps(forward)
    def twice(*inputs: object, **named: object) -> object:
        if module.training and torch.is_grad_enabled():
            return checkpoint(forward, *inputs, use_reentrant=False, **named)
        return forward(*inputs, **named)

    module.forward = twice  # type: ignore[method-assign]


def _blocks(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        return [child for child in module if any(True for _ in child.parameters())]
    return [block for child in module.children() for block in _blocks(child)]
