"""Values that travel between ranks, as JSON: nothing that a rank receives can run code.

Numbers, texts, None, bytes, paths, arrays of numbers, lists, tuples and dicts travel as they are. A class travels if it is
marked with `travels`; its fields are set without calling its code. Knows neither MPI, torch nor sockets, except that
`gather_over_mpi` gets a communicator of mpi4py, whose lower-case methods would pickle.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import sys
from pathlib import Path, PurePath
from typing import Any, TypeVar

import numpy as np

from hpctrain.errors import TrainError

Class = TypeVar("Class", bound=type)
_CLASSES: dict[str, type] = {}  # filled when their modules are imported


def travels(cls: Class) -> Class:
    """Let instances of a dataclass, or of a class without fields, travel between ranks."""
    _CLASSES[cls.__name__] = cls
    return cls


def encode(value: object) -> bytes:
    """Return a value as bytes.

    Raises:
        TrainError: its type does not travel.
    """
    return json.dumps(_plain(value), separators=(",", ":")).encode()


def decode(content: bytes) -> Any:
    """Return the value of `encode`.

    Raises:
        TrainError: it is damaged, or has an unknown class.
    """
    try:
        return _value(json.loads(content))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TrainError(f"cannot read what another rank sent: {error!r:.200}") from None


def _plain(value: object) -> object:
    """Return a value as JSON values; what JSON does not have is an object with one key."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [_plain(each) for each in value]
        case tuple():
            return {"tuple": [_plain(each) for each in value]}
        case dict():
            return {"dict": [[_plain(key), _plain(each)] for key, each in value.items()]}
        case bytes():
            return {"bytes": base64.b64encode(value).decode()}
        case np.ndarray() | np.generic() if value.dtype.kind in "biufc":
            array = np.asarray(value)
            return {"array": [array.dtype.str, list(array.shape), base64.b64encode(array.tobytes()).decode()]}
        case PurePath():
            return {"path": str(value)}
    torch = sys.modules.get("torch")  # the process that writes checkpoints does without it, and has no tensors
    if torch is not None and isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        text = base64.b64encode(flat.numpy().tobytes()).decode()
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), text]}
    name = type(value).__name__
    if _CLASSES.get(name) is not type(value):
        raise TrainError(f"cannot send a value of type {type(value)!r} to other ranks")
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    return {"class": [name, {field.name: _plain(getattr(value, field.name)) for field in fields}]}


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(each) for each in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    match kind:
        case "tuple":
            return tuple(_value(each) for each in content)
        case "dict":
            return {_value(key): _value(each) for key, each in content}
        case "bytes":
            return base64.b64decode(content, validate=True)
        case "path":
            return Path(content)
        case "array":
            dtype, shape, text = content
            if np.dtype(dtype).kind not in "biufc":
                raise ValueError(f"{dtype!r:.40} is not a number")
            return np.frombuffer(bytearray(base64.b64decode(text, validate=True)), np.dtype(dtype)).reshape(shape)
        case "tensor":
            import torch  # see `_plain`

            name, shape, text = content
            dtype = getattr(torch, name)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{name!r:.40} is not a type of a tensor")
            raw = torch.frombuffer(bytearray(base64.b64decode(text, validate=True)) or bytearray(1), dtype=torch.uint8)
            return raw.view(dtype).reshape(shape) if text else torch.empty(shape, dtype=dtype)
        case "class":
            name, fields = content
            made: Any = object.__new__(_CLASSES[name])
            known = {field.name for field in dataclasses.fields(made)} if dataclasses.is_dataclass(made) else set()
            if known != fields.keys():
                raise ValueError(f"{name} has other fields")
            for field, each in fields.items():
                object.__setattr__(made, field, _value(each))
            return made
    raise ValueError(f"{kind!r:.40} is not a kind of value")


def gather_over_mpi(comm: Any, value: object) -> list[Any]:
    """Return the value of each rank of an MPI communicator; all of them call it."""
    mine = np.frombuffer(encode(value), np.uint8)
    size = comm.Get_size()
    lengths = np.empty(size, np.int64)
    comm.Allgather(np.array([mine.size], np.int64), lengths)
    padded, rows = np.zeros(lengths.max(), np.uint8), np.empty((size, lengths.max()), np.uint8)
    padded[: mine.size] = mine
    comm.Allgather(padded, rows)
    return [decode(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]


def broadcast_over_mpi(comm: Any, value: object) -> Any:
    """Return the value of the first rank; all ranks call it."""
    return gather_over_mpi(comm, value if comm.Get_rank() == 0 else None)[0]
