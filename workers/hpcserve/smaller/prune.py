"""Makes a smaller model: FFN columns that matter least to a text are left out.

A column matters as much as its activations on the text, squared and summed, times the length of its vector in the second
matrix. Each layer keeps as many columns, because config.json has one width. Does not train: what is lost is measured by
`perplexity`, and may be learned again by more training.
Sources: structured pruning as in Minitron (Muralidharan et al., 2024), its width pruning of MLPs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from hpcserve.config import ModelConfig, ModelFamily, StoredKind, read_config
from hpcserve.errors import ServeError
from hpcserve.kernels import WeightKind
from hpcserve.model import GPT2_NAMES, ROTARY_NAMES
from hpcserve.smaller.perplexity import text_tokens, whole_model, windows
from hpcserve.smaller.quantize import config_values, new_model
from hpcserve.weights import GROUP_COLUMNS, WeightFiles

CALIBRATION_TOKENS = 4096


def prune_model(source: Path, target: Path, share: float, text: str) -> int:
    """Write a model with a share of its FFN columns; return how many.

    Raises:
        ServeError: the model cannot be pruned, or a directory not be read or written.
    """
    config = read_config(source)
    if config.stored is not StoredKind.FLOAT or config.experts:
        raise ServeError(
            f"cannot prune '{source}': prune the original before it is quantized, and models without experts only"
        )
    width = pruned_width(config, share)
    kept = kept_columns(source, config, width, text)
    names = columns_of_tensors(config)
    values = config_values(source)
    values["n_inner" if config.family is ModelFamily.GPT2 else "intermediate_size"] = width
    with WeightFiles(source) as files, new_model(target) as writer:
        for name in files.tensors:
            tensor = files.read(name)
            for layer, columns in kept.items():
                axis = names.get(without_prefix(name, layer))
                if axis is not None:
                    tensor = tensor.index_select(axis, columns)
            writer.add(name, tensor)
        writer.finish(source, values)
    return width


def pruned_width(config: ModelConfig, share: float) -> int:
    """Return the FFN width after pruning: whole groups, so that the result can become int4.

    Raises:
        ServeError: the share is not between 0 and 1.
    """
    if not 0 < share < 1:
        raise ServeError(f"cannot prune to {share:g} of the FFN: use a share between 0 and 1, such as 0.75")
    unit = GROUP_COLUMNS if config.ffn >= 2 * GROUP_COLUMNS else 1
    return max(unit, round(config.ffn * share / unit) * unit)


def kept_columns(source: Path, config: ModelConfig, width: int, text: str) -> Mapping[int, Tensor]:
    """Return the columns to keep of each layer, in order."""
    model = whole_model(source, WeightKind.FP32)
    squares = torch.zeros(config.layers, config.ffn)

    def seen(layer: int, states: Tensor) -> None:
        squares[layer] += states.float().square().sum(0)

    model.watch_ffns(seen)
    for _ in windows(model, text_tokens(source, model, text, CALIBRATION_TOKENS)):
        pass
    names = GPT2_NAMES if config.family is ModelFamily.GPT2 else ROTARY_NAMES
    kept = {}
    with WeightFiles(source) as files:
        for layer in range(config.layers):
            name = next(name for name in files.tensors if name.endswith(f"{names.layers}.{layer}.{names.down}.weight"))
            lengths = files.read(name).float().square().sum(1 if names.turned else 0)
            kept[layer] = (squares[layer] * lengths).topk(width).indices.sort().values
    return kept


def columns_of_tensors(config: ModelConfig) -> Mapping[str, int]:
    """Return the axis of FFN columns in each tensor of a layer that has them."""
    names = GPT2_NAMES if config.family is ModelFamily.GPT2 else ROTARY_NAMES
    axes = {f"{name}.weight": 1 if names.turned else 0 for name in names.up}
    axes |= {f"{name}.bias": 0 for name in names.up}
    return axes | {f"{names.down}.weight": 0 if names.turned else 1}


def without_prefix(name: str, layer: int) -> str:
    """Return the name of a tensor within its layer, or "" if it is of another layer."""
    before, found, rest = name.partition(f".{layer}.")
    return rest if found and before.rpartition(".")[2] in (GPT2_NAMES.layers, ROTARY_NAMES.layers) else ""
