"""Whether all ranks are about to train the same: code, versions, options, model and data, compared by hashes at the start.

Ranks that differ would not fail: they would train something else each, or wait for each other for ever.
Rules: every rank learns what all have, and all refuse alike, naming what differs and where. Of code only the modules that all
ranks have loaded count, each by its source: a module that one rank alone needs is no difference.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import socket
import sys
import sysconfig
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import torch

from hpctrain.comm import Communicator
from hpctrain.errors import MismatchError, TrainError

SHORT = 12  # hexadecimal digits of a hash that are shown
OF_ONE_RANK = ("verbose", "threads")  # options in which ranks may differ

Facts = Mapping[str, str]


class Ended:
    """What a rank says that has come to the end of the script without training."""


def agree(comm: Communicator, facts: Facts) -> list[str]:
    """Return the host of each rank if all have the same facts, as far as they have them; all ranks call it.

    Raises:
        MismatchError: says what differs, with the hashes and the ranks that have them.
    """
    everybody: list[Any] = told(comm, (socket.gethostname(), dict(facts)))
    hosts = [host for host, _ in everybody]
    for what in everybody[0][1]:
        values = [mine.get(what) for _, mine in everybody]
        if None not in values and len(set(values)) > 1:
            raise MismatchError(
                f"cannot start: ranks have different {what}: {_who(values, hosts)}; {_remedy(what)}",
                [rank for rank, value in enumerate(values) if value != values[0]],
            )
    return hosts


def told(comm: Communicator, value: object) -> list[Any]:
    """Return every rank's (small, picklable) value, by rank; all ranks call it.

    Raises:
        TrainError: ranks have come to the end of the script instead.
    """
    values = comm.all_gather_object(value)
    ended = [str(rank) for rank, said in enumerate(values) if isinstance(said, Ended)]
    if 0 < len(ended) < comm.size:
        raise TrainError(
            f"cannot train: rank{'s' * (len(ended) > 1)} {', '.join(ended)} ended without run.steps; every rank has to go "
            "through the loop"
        )
    return values


def say_ended(comm: Communicator) -> None:
    """Tell ranks that want to know something that this one has come to the end of the script.

    Raises:
        TrainError: there are such ranks.
    """
    told(comm, Ended())


def facts_of(options: argparse.Namespace, model: torch.nn.Module, optimizer: object) -> dict[str, str]:
    """Return what must be the same on all ranks."""
    shapes = [(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in model.state_dict().items()]
    trained = [(name, parameter.requires_grad) for name, parameter in model.named_parameters()]
    said = {name: value for name, value in vars(options).items() if name not in OF_ONE_RANK}
    return {
        "Python": platform.python_version().rpartition(".")[0],
        "torch": torch.__version__.partition("+")[0],
        "options": hash_of(sorted((name, str(value)) for name, value in said.items())),
        "models (names, kinds and shapes of weights)": hash_of((shapes, trained)),
        "optimizers": hash_of(_described(optimizer)),
        **{f"code of {name}": digest for name, digest in sorted(code_hashes().items())},
    }


def data_facts(data: object) -> dict[str, str]:
    """Return what must be the same of a data source: its own hash if it has one, and how many samples it has."""
    size = {"numbers of samples": str(len(data))} if isinstance(data, Sized) else {}
    digest = getattr(data, "digest", None)
    return size | ({"data": digest} if isinstance(digest, str) else {})


def hash_of(value: object) -> str:
    """Return the SHA-256 of bytes or of numbers, as they lie in memory, or of what a value says of itself."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous().view(torch.uint8).numpy()
    content = value if isinstance(value, bytes) else getattr(value, "tobytes", lambda: repr(value).encode())()
    return hashlib.sha256(content).hexdigest()


def code_hashes() -> dict[str, str]:
    """Return the SHA-256 of each loaded module's source that is neither Python's nor an installed package but ours."""
    system = tuple(sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    found = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not path or not path.endswith(".py"):
            continue
        if path.startswith(system) and not name.startswith("hpctrain"):
            continue
        try:
            found[name] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        except OSError:
            continue  # it was in memory only: its users are compared
    return found


def _described(optimizer: object) -> object:
    if not isinstance(optimizer, torch.optim.Optimizer):
        return type(optimizer).__name__
    groups = [
        {name: str(value) for name, value in group.items() if name != "params"} | {"count": len(group["params"])}
        for group in optimizer.param_groups
    ]
    return type(optimizer).__name__, groups


def _who(values: Sequence[str], hosts: Sequence[str]) -> str:
    """Which ranks have which value, the most common first."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    parts = []
    for value, having in sorted(ranks.items(), key=lambda item: (-len(item[1]), item[1])):
        some = ", ".join(f"{rank} ({hosts[rank]})" for rank in having[:4]) + (" ..." if len(having) > 4 else "")
        parts.append(f"{value[:SHORT]} on rank{'s' * (len(having) > 1)} {some}")
    return ", ".join(parts)


def _remedy(what: str) -> str:
    if what.startswith("code"):
        return "start all ranks from one copy, on the share say"
    if what in ("Python", "torch"):
        return "install the same on all nodes"
    return "all ranks have to run the same script with the same options and data"
