"""Nested state (what `state_dict()` gives) as tensors by name and a skeleton of JSON values, and back.

Knows no files.
Rules: what comes back is equal, with the same types: dictionaries in their order, with keys that are text or numbers, lists,
tuples, tensors, NumPy's arrays and numbers, text, numbers, bytes, None.  Anything else is refused by its place: nothing is
pickled, so a checkpoint never runs code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hpctrain.errors import TrainError

PLAIN = (str, int, float, bool, type(None))


def flattened(tree: object, name: str = "") -> tuple[dict[str, torch.Tensor], object]:
    """Return the tensors of a tree by name, and the rest of it.

    Raises:
        TrainError: something in it cannot be kept; says where.
    """
    tensors: dict[str, torch.Tensor] = {}
    return tensors, _shape_of(tree, name, tensors)


def keepable(tree: Mapping[str, object], name: str) -> tuple[dict[str, object], list[str]]:
    """Return what of a dictionary can be kept, and say of each of the others why not."""
    kept: dict[str, object] = {}
    refused: list[str] = []
    for key, part in tree.items():
        try:
            flattened({key: part}, name)
        except TrainError as error:
            refused.append(str(error))
        else:
            kept[key] = part
    return kept, refused


def grown(skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> object:
    """Put together again what `flattened` took apart."""
    kind, value = skeleton
    match kind:
        case "value":
            return value
        case "float":
            return float.fromhex(value)
        case "bytes":
            return bytes.fromhex(value)
        case "dict":
            return {key: grown(part, tensors) for key, part in value}
        case "list":
            return [grown(part, tensors) for part in value]
        case "tuple":
            return tuple(grown(part, tensors) for part in value)
        case "tensor":
            return tensors[value]
        case "array":
            name, dtype, shape = value
            return np.frombuffer(tensors[name].numpy().tobytes(), dtype=np.dtype(dtype)).reshape(shape).copy()
    raise TrainError(f"cannot read a state: it has a {kind!r}, which this program does not know")


def _shape_of(tree: object, name: str, tensors: dict[str, torch.Tensor]) -> object:
    if isinstance(tree, torch.Tensor):
        if type(tree) not in (torch.Tensor, torch.nn.Parameter):
            raise TrainError(f"cannot keep {name}: it is a {type(tree).__name__}; gather it to a plain tensor first")
        if tree.layout != torch.strided or tree.is_meta:
            what = (
                "has no data (it is on the device 'meta')" if tree.is_meta else f"is {tree.layout}; make it dense first"
            )
            raise TrainError(f"cannot keep {name}: the tensor {what}")
        tensors[name] = tree.detach()
        return ["tensor", name]
    if isinstance(tree, np.ndarray | np.generic):
        array = np.ascontiguousarray(tree)
        if array.dtype.hasobject:
            raise TrainError(f"cannot keep {name}: an array of Python objects")
        tensors[name] = torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8)
        return ["array", [name, array.dtype.str, list(np.shape(tree))]]
    if isinstance(tree, float):
        return ["float", tree.hex()]  # not a number and infinity too
    if isinstance(tree, PLAIN):
        return ["value", tree]
    if isinstance(tree, bytes):
        return ["bytes", tree.hex()]
    if isinstance(tree, Mapping):
        if wrong := [key for key in tree if not isinstance(key, PLAIN)]:
            raise TrainError(f"cannot keep {name}: its key {wrong[0]!r} is neither text nor a number")
        return ["dict", [[key, _shape_of(part, _below(name, key), tensors)] for key, part in tree.items()]]
    if isinstance(tree, list | tuple):
        parts = [_shape_of(part, _below(name, at), tensors) for at, part in enumerate(tree)]
        return ["tuple" if isinstance(tree, tuple) else "list", parts]
    raise TrainError(
        f"cannot keep {name}: it is a {type(tree).__name__}, not tensors, numbers, text, lists or dictionaries"
    )


def _below(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)
