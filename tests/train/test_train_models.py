"""Models that lie in memory in unusual ways, or not at all, and ranks that cannot meet."""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hpctrain.checkpoint.snapshot import layout_of
from hpctrain.comm.base import SingleCommunicator, check_contiguous
from hpctrain.errors import MissingPackageError, TrainError
from hpctrain.outermost import tell_unmet
from hpctrain.prepare import prepare_model
from hpctrain.replicas import hand_over

PLAIN = argparse.Namespace(recompute=False, compile=None)


class Sevens(SingleCommunicator):
    """A group in which somebody else has 7.0 everywhere."""

    def __init__(self, *, elastic: bool) -> None:
        self.elastic = elastic
        self.rank, self.size = 1, 2

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        check_contiguous(tensor)
        tensor.fill_(7.0)


@pytest.mark.parametrize("elastic", [False, True])
def test_weights_are_handed_over_however_they_lie_in_memory(elastic: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(2, 5)).to(memory_format=torch.channels_last)
    model.turned = torch.nn.Parameter(torch.zeros(6, 2).t())
    strides = {name: one.stride() for name, one in model.state_dict().items()}
    assert not all(one.is_contiguous() for one in model.parameters())
    with torch.no_grad():
        hand_over(model.state_dict(), Sevens(elastic=elastic), 0)
    assert all(bool((one == 7.0).all()) for one in model.parameters())
    assert {name: one.stride() for name, one in model.state_dict().items()} == strides


def on_meta() -> torch.nn.Module:
    with torch.device("meta"):
        return torch.nn.Linear(2, 3)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.nn.LazyLinear(3), "weight has no shape yet .* call the model once on a sample"),
        (lambda: torch.nn.LazyBatchNorm1d(), "has no shape yet"),
        (on_meta, "weight has no values .* call model.to_empty"),
    ],
)
def test_a_model_without_weights_is_refused_with_what_to_do(make: Callable[[], torch.nn.Module], why: str) -> None:
    with pytest.raises(TrainError, match=why):
        prepare_model(PLAIN, make())


def test_a_tensor_that_no_checkpoint_can_keep_is_named() -> None:
    with pytest.raises(
        TrainError, match=r"cannot keep model.phase in a checkpoint: it is of dtype complex64; .*view_as_real"
    ):
        layout_of({"model.phase": torch.zeros(3, dtype=torch.complex64)})


def test_the_scheduler_hears_why_ranks_could_not_meet(tmp_path: Path) -> None:
    error = MissingPackageError("cannot use MPI: mpi4py is not installed")
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(tmp_path / "agent"))
        agent.listen()
        launched = {"PMI_RANK": "1", "PMI_SIZE": "3"}
        tell_unmet({"HPCSCHED_SOCKET": str(tmp_path / "agent"), "HPCSCHED_JOB_ID": "12", **launched}, error)
        peer, _ = agent.accept()
        with peer, peer.makefile("rb") as stream:
            told = json.loads(stream.read()[8:])
    assert told == {"type": "Failure", "job_id": 12, "rank": 1, "ranks": 3, "text": str(error), "echo": False}
