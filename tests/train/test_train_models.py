"""Models that lie in memory in unusual ways, or not at all, and ranks that cannot meet."""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hpctrain.checkpoint.writing.snapshot import layout_of
from hpctrain.comm.base import SingleCommunicator, check_contiguous
from hpctrain.errors import MissingPackageError, PeerLost, TrainError
from hpctrain.exchange.agreement import hand_over
from hpctrain.run import prepare_model, report_unmet

PLAIN = argparse.Namespace(recompute=False, compile=None)


class Told(SingleCommunicator):
    """A rank of two that hears what the first one has said; of ranks that come and go, or not. It may be lost before a piece."""

    def __init__(self, said: list[torch.Tensor], *, elastic: bool, first: bool = False, lost_before: int = -1) -> None:
        self.elastic = elastic
        self.rank, self.size = 0 if first else 1, 2
        self._said, self._left, self._count = said, list(said), lost_before

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        check_contiguous(tensor)
        if self._count == 0:
            raise PeerLost("the source is gone")
        self._count -= 1
        if self.rank == root:
            self._said.append(tensor.detach().clone())
        else:
            tensor.detach().copy_(self._left.pop(0))


def unusual(value: float) -> dict[str, torch.Tensor]:
    """A state of tensors that lie in memory in several ways, of several types and sizes."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(2, 5)).to(memory_format=torch.channels_last)
    model.turned = torch.nn.Parameter(torch.zeros(6, 2).t())
    for kind in (torch.int64, torch.bool, torch.bfloat16, torch.float64):
        model.register_buffer(str(kind).replace(".", "_"), torch.zeros((), dtype=kind))
    model.register_buffer("nothing", torch.zeros(0, 3))
    tensors = model.state_dict()
    for tensor in tensors.values():
        tensor.fill_(value)
    return tensors


@pytest.mark.parametrize("elastic", [False, True])
def test_a_state_is_transferred_with_any_memory_layout(elastic: bool) -> None:
    said: list[torch.Tensor] = []
    source, mine = unusual(7.0), unusual(0.0)
    strides = {name: one.stride() for name, one in mine.items()}
    assert not all(one.is_contiguous() for one in mine.values())
    with torch.no_grad():
        hand_over(source, Told(said, elastic=elastic, first=True), 0)
        hand_over(mine, Told(said, elastic=elastic), 0)
    assert all(torch.equal(mine[name], source[name]) for name in source)
    assert {name: one.stride() for name, one in mine.items()} == strides


def test_a_rank_interrupted_in_a_transfer_keeps_its_own_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpctrain.exchange.agreement.PIECE_BYTES", 64)
    said: list[torch.Tensor] = []
    source, mine = unusual(7.0), unusual(1.0)
    with torch.no_grad():
        hand_over(source, Told(said, elastic=True, first=True), 0)
        assert len(said) > 2
        with pytest.raises(PeerLost):
            hand_over(mine, Told(said, elastic=True, lost_before=len(said) - 1), 0)
    assert all(bool((one == 1).all()) for one in mine.values())


def on_meta() -> torch.nn.Module:
    with torch.device("meta"):
        return torch.nn.Linear(2, 3)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.nn.LazyLinear(3), "weight has no shape yet .* call the model once on a sample"),
        (lambda: torch.nn.LazyBatchNorm1d(), "has no shape yet"),
        (lambda: torch.nn.Linear(2, 3).requires_grad_(False), "it has no weights, or all are frozen"),
        (on_meta, "weight has no values .* call model.to_empty"),
    ],
)
def test_a_model_without_weights_is_refused_with_a_remedy(make: Callable[[], torch.nn.Module], why: str) -> None:
    with pytest.raises(TrainError, match=why):
        prepare_model(PLAIN, make())


def test_a_tensor_that_no_checkpoint_can_keep_is_named() -> None:
    with pytest.raises(
        TrainError, match=r"cannot save model.phase in a checkpoint: it is of dtype float8_e4m3fnuz; convert"
    ):
        layout_of({"model.phase": torch.zeros(3, dtype=torch.float8_e4m3fnuz)})


def test_the_scheduler_hears_why_ranks_could_not_meet(tmp_path: Path) -> None:
    error = MissingPackageError("cannot use MPI: mpi4py is not installed")
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(tmp_path / "agent"))
        agent.listen()
        launched = {"PMI_RANK": "1", "PMI_SIZE": "3"}
        report_unmet({"HPCSCHED_SOCKET": str(tmp_path / "agent"), "HPCSCHED_JOB_ID": "12", **launched}, error)
        peer, _ = agent.accept()
        with peer, peer.makefile("rb") as stream:
            told = json.loads(stream.read()[8:])
    assert told == {"type": "Failure", "job_id": 12, "rank": 1, "ranks": 3, "text": str(error), "echo": False}
