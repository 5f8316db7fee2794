"""Nested state (of `state_dict()`) as tensors by name and a JSON skeleton, and back.

Knows no files.
Rules: the restored state is equal, with the same types: dictionaries in their order, with text or numbers as keys, lists,
tuples, tensors, NumPy arrays and numbers, text, numbers, bytes, None.  Any other value is rejected with its place.  Nothing
is pickled, so a checkpoint never runs code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hpctrain.errors import TrainError

PLAIN = (str, int, float, bool, type(None))


def flattened(tree: object, name: str = "") -> tuple[dict[str, torch.Tensor], object]:
    """Return the tensors of a tree by name, and its skeleton.

    Raises:
        TrainError: a value cannot be saved; names its place.
    """
    tensors: dict[str, torch.Tensor] = {}
    return tensors, _shape_of(tree, name, tensors)


def keepable(tree: Mapping[str, object], name: str) -> tuple[dict[str, object], list[str]]:
    """Return the entries of a dictionary that can be saved, and the reasons why others cannot."""
    accepted: dict[str, object] = {}
    refused: list[str] = []
    for key, part in tree.items():
        try:
            flattened({key: part}, name)
        except TrainError as error:
            refused.append(str(error))
        else:
            accepted[key] = part
    return accepted, refused


def grown(skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> object:
    """Return the tree of a skeleton and its tensors: the inverse of `flattened`."""
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
    """Return the skeleton of a tree, and add its tensors to `tensors`."""
    match tree:
        case torch.Tensor():
            return _shape_of_tensor(tree, name, tensors)
        case np.ndarray() | np.generic():
            return _shape_of_array(tree, name, tensors)
        case float():
            return ["float", tree.hex()]  # also for nan and infinity
        case str() | int() | None:
            return ["value", tree]
        case bytes():
            return ["bytes", tree.hex()]
        case Mapping():
            wrong = [key for key in tree if not isinstance(key, PLAIN)]
            if wrong:
                raise TrainError(f"cannot save {name}: its key {wrong[0]!r} is neither text nor a number")
            return ["dict", [[key, _shape_of(part, _below(name, key), tensors)] for key, part in tree.items()]]
        case list() | tuple():
            parts = [_shape_of(part, _below(name, at), tensors) for at, part in enumerate(tree)]
            return ["tuple" if isinstance(tree, tuple) else "list", parts]
    raise TrainError(
        f"cannot save {name}: it is a {type(tree).__name__}, not tensors, numbers, text, lists or dictionaries"
    )


def _shape_of_tensor(tensor: torch.Tensor, name: str, tensors: dict[str, torch.Tensor]) -> object:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise TrainError(f"cannot save {name}: it is a {type(tensor).__name__}; gather it to a plain tensor first")
    if tensor.is_meta:
        raise TrainError(f"cannot save {name}: the tensor has no data (it is on the device 'meta')")
    if tensor.layout != torch.strided:
        raise TrainError(f"cannot save {name}: the tensor is {tensor.layout}; make it dense first")
    tensors[name] = tensor.detach()
    return ["tensor", name]


def _shape_of_array(value: np.ndarray | np.generic, name: str, tensors: dict[str, torch.Tensor]) -> object:
    array = np.ascontiguousarray(value)
    if array.dtype.hasobject:
        raise TrainError(f"cannot save {name}: an array of Python objects")
    tensors[name] = torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8)
    return ["array", [name, array.dtype.str, list(np.shape(value))]]


def _below(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)
