"""The gradients of each step since the last checkpoint.

Recorded during training, replayed after a restart.

Dense training changes every number of weights and moments in every step, and the changes pack badly.  The gradients are a
third of them, and pack better (much better if they were exchanged in half precision).  So an increment can be the gradients,
and a restart passes them to the same optimizer again.  Does not know files or ranks.
Rules: tensors that the optimizer does not move (buffers, frozen weights) are saved as they are.  Memory is bounded: a log that
would need more is dropped, and the next checkpoint is of another kind.  Some numbers of the weights are recorded, to verify
that the replay led to the same bits.
Sources: the idea of gradients as increments: "LowDiff" (2025), which is lossy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping

import torch

from hpctrain.checkpoint.manifest import LoggedStep, StepLog, Taken
from hpctrain.checkpoint.writing.snapshot import TensorPiece, TensorSnapshot, layout_of, share_of

PROBED = 4  # recorded numbers per tensor


class GradientLog:
    """Gradients of the steps since the last checkpoint was begun, in reused buffers."""

    def __init__(
        self,
        model: torch.nn.Module,
        groups: list[list[torch.nn.Parameter]],
        flats: list[torch.Tensor],
        step: int,
        most_bytes: int,
        optimizer: Mapping[str, object],
        rank: int = 0,
        size: int = 1,
    ) -> None:
        """Make a log; `groups` are the parameters of each of `flats`, in order.

        At most `most_bytes` are kept.

        If several ranks have the same gradients, each keeps a part.
        """
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._rank, self._size, self._optimizer = rank, size, optimizer
        self._model = model
        self._flats = {str(index): _part_of(flat, rank, size) for index, flat in enumerate(flats)}
        self._order = tuple(tuple(names[id(parameter)] for parameter in group) for group in groups)
        self._layout = layout_of(self._flats)
        trained = {name for group in self._order for name in group}
        self._tied = _further_names(model, trained)
        self._loose = [f"model.{name}" for name in model.state_dict() if name not in trained and name not in self._tied]
        self._device = device_facts(model)
        step_bytes = sum(slot.bytes for slot in self._layout)
        self.most_steps = max(1, most_bytes // max(1, step_bytes))
        self.enabled = True  # false: no checkpoint will use it
        self._steps: list[LoggedStep] = []
        self._spare: list[TensorSnapshot] = []
        self._loose_spare: list[TensorSnapshot] = []
        self._since, self._intact = step, True

    def note(self, number: int, lr: float, factor: float) -> None:
        """Record the gradients before they are multiplied by `factor` and weights move."""
        if not self._intact:
            return
        if not self.enabled or len(self._steps) >= self.most_steps:
            self._drop()
            return
        flats = self._spare.pop() if self._spare else TensorSnapshot(self._layout)
        flats.fill(self._flats)
        self._steps.append(LoggedStep(number=number, lr=lr, factor=factor, flats=flats))

    def covers(self, step: int) -> bool:
        """Return whether the log has all steps since the checkpoint of that step."""
        return self._intact and self._since == step

    def take(self, step: int) -> Taken | None:
        """Return the steps until now (None: incomplete), and begin a new log after `step`."""
        since, steps, intact = self._since, tuple(self._steps), self._intact
        self._since, self._steps, self._intact = step, [], True
        if not intact:
            return None
        state = {f"model.{name}": tensor for name, tensor in self._model.state_dict().items()}
        loose = share_of({name: state[name] for name in self._loose}, self._rank, self._size, own_of_first(self._model))
        snapshot = self._loose_spare.pop() if self._loose_spare else TensorSnapshot(layout_of(loose))
        snapshot.fill(loose)
        return Taken(
            since=since,
            steps=steps,
            order=self._order,
            tied=self._tied,
            loose=snapshot,
            device=self._device,
            optimizer=self._optimizer,
            probe=probe_of(self._model.state_dict()),
        )

    def give_back(self, taken: Taken) -> None:
        """Reuse buffers that nothing reads any more; any thread may call it."""
        self._spare += [step.flats for step in taken.steps if isinstance(step.flats, TensorSnapshot)]
        if isinstance(taken.loose, TensorSnapshot):
            self._loose_spare.append(taken.loose)

    def _drop(self) -> None:
        self._spare += [step.flats for step in self._steps if isinstance(step.flats, TensorSnapshot)]
        self._steps, self._intact = [], False


def own_of_first(model: torch.nn.Module) -> set[str]:
    """Return the tensors that may differ among ranks, so that the first rank's count: buffers."""
    return {f"model.{name}" for name, _ in model.named_buffers()}


def _further_names(model: torch.nn.Module, trained: Collection[str]) -> dict[str, str]:
    """Return further names of trained parameters (tied weights), each with the first one."""
    named = dict(model.named_parameters(remove_duplicate=False))
    first = {id(named[name]): name for name in trained}
    return {
        name: first[id(parameter)]
        for name, parameter in named.items()
        if name not in trained and id(parameter) in first
    }


def _part_of(flat: torch.Tensor, rank: int, size: int) -> torch.Tensor | TensorPiece:
    if size == 1:
        return flat
    low, high = (flat.numel() * place // size for place in (rank, rank + 1))
    return TensorPiece(part=flat[low:high], low=low, whole=tuple(flat.shape))


@torch.no_grad()
def replay_steps(
    named: Mapping[str, torch.nn.Parameter],
    move: Callable[[int, float], None],
    log: StepLog,
    gradients: Iterator[list[torch.Tensor]],
) -> None:
    """Take the steps of a log with the optimizer's step `move(number, lr)`."""
    before = {name: parameter.grad for name, parameter in named.items()}
    try:
        for step in log.steps:
            for names, flat in zip(log.order, next(gradients), strict=True):
                if step.factor != 1.0:
                    flat.mul_(step.factor)
                low = 0
                for name in names:
                    parameter = named[name]
                    part = flat[low : low + parameter.numel()].view_as(parameter)
                    parameter.grad = part.to(parameter.device)
                    low += parameter.numel()
            move(step.number, step.lr)
    finally:
        for name, parameter in named.items():
            parameter.grad = before[name]


@torch.no_grad()
def probe_of(state: Mapping[str, torch.Tensor]) -> bytes:
    """Return some numbers of each of the model's tensors, in the order of names, as float64."""
    picked = []
    for _, tensor in sorted(state.items()):
        flat = tensor.detach().reshape(-1)
        picked.append(flat[:: max(1, flat.numel() // PROBED)][:PROBED].to(torch.float64))
    return torch.cat(picked).cpu().numpy().tobytes() if picked else b""


def difference(probe: bytes, other: bytes) -> float:
    """Return the largest difference of two probes' numbers.

    Infinite if they are of different models.
    """
    if len(probe) != len(other):
        return math.inf
    differences = torch.frombuffer(bytearray(probe), dtype=torch.float64) - torch.frombuffer(
        bytearray(other), dtype=torch.float64
    )
    return float(differences.abs().nan_to_num(nan=math.inf).max()) if len(probe) else 0.0


def device_facts(model: torch.nn.Module) -> dict[str, object]:
    """Return the facts of a model's device: where they are equal, a step has the same bits."""
    parameter = next(model.parameters(), torch.empty(0))
    on_gpu = parameter.device.type == "cuda"
    name = torch.cuda.get_device_name(parameter.device) if on_gpu else torch.backends.cpu.get_cpu_capability()
    return {
        "type": parameter.device.type,
        "name": name,
        "torch": str(torch.__version__),
    }  # str: unpickling a TorchVersion needs torch
