"""Checkpoints outside of our own loop: in any script, under Lightning, under Hugging Face's Trainer; each to the same bits."""

from __future__ import annotations

import os
import signal
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import HERE, LIBRARIES, finish, python, started

from hpctrain.checkpoint.chunks import ITEM_BYTES
from hpctrain.checkpoint.manifest import checkpoint_names
from hpctrain.checkpoint.script import Checkpointer, Trees
from hpctrain.checkpoint.tree import flattened, grown, keepable
from hpctrain.checkpoint.writing.maker import CheckpointReport
from hpctrain.errors import EXIT_REQUEUE, MismatchError, TrainError
from hpctrain.heartbeat import Heartbeat

TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(tree=TREES)
@settings(deadline=None)
def test_a_tree_grows_again_as_it_was(tree: object) -> None:
    tensors, skeleton = flattened(tree)
    assert repr(grown(skeleton, tensors)) == repr(tree)


def test_tensors_and_arrays_come_back_with_their_kinds() -> None:
    tree = {"a": torch.ones(2, dtype=torch.bfloat16), "n": (np.arange(3, dtype=np.uint32), np.float64(2.5))}
    tensors, skeleton = flattened(OrderedDict(tree))
    again = grown(skeleton, tensors)
    assert again["a"].dtype == torch.bfloat16
    assert again["n"][0].dtype == np.uint32
    assert again["n"][0].tolist() == [0, 1, 2]
    assert float(again["n"][1]) == 2.5


def test_a_value_that_cannot_be_saved_is_refused_with_its_place() -> None:
    with pytest.raises(TrainError, match=r"cannot save optim\.0\.hook: it is a function"):
        flattened({"optim": [{"hook": lambda: 0}]})


def test_entries_of_a_dictionary_that_cannot_be_saved_are_left_out() -> None:
    kept, refused = keepable({"lr": 0.1, "out": Path("x"), "sizes": [1, {"a": None}]}, "hyper")
    assert kept == {"lr": 0.1, "sizes": [1, {"a": None}]}
    assert refused == [
        "cannot save hyper.out: it is a PosixPath, not tensors, numbers, text, lists or dictionaries",
    ]


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.eye(3).to_sparse(), "the tensor is torch.sparse_coo; make it dense first"),
        (torch.zeros(3, device="meta"), "the tensor has no data"),
    ],
)
def test_a_tensor_without_numbers_one_after_another_is_refused_by_its_place(tensor: torch.Tensor, why: str) -> None:
    with pytest.raises(TrainError, match=rf"cannot save mask\.3: {why}"):
        flattened({"mask": {3: tensor}})


class Part:
    """What a script keeps that is neither a model nor an optimizer."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.state = state


def of_all_kinds(seed: int) -> dict[str, torch.Tensor]:
    numbers = torch.randint(0, 100, (12, 8), generator=torch.Generator().manual_seed(seed))
    kinds = {kind: numbers.to(getattr(torch, kind)) for kind in ITEM_BYTES}
    return kinds | {"imaginary": (kinds["complex64"] * 1j).conj()}


def test_tensors_of_all_kinds_come_back_from_a_chain(tmp_path: Path) -> None:
    part = Part(of_all_kinds(1))
    with Checkpointer(tmp_path, environ={}, part=part) as kept:
        kept.save()
        part.state = of_all_kinds(2)
        kept.step = 1
        kept.save()
    again = Part({})
    with Checkpointer(tmp_path, environ={}, part=again) as kept:
        assert kept.step == 1
    assert list(again.state) == list(part.state)
    for name, tensor in part.state.items():
        assert again.state[name].dtype == tensor.dtype, name
        assert again.state[name].tolist() == tensor.tolist(), name


class Script:
    """A user's own script: dropout, a schedule, a torch optimizer."""

    def __init__(self, width: int = 8) -> None:
        torch.manual_seed(5)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Dropout(0.3), torch.nn.Linear(width, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)

    def kept(self, out: Path, **options: int) -> Checkpointer:
        parts = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        return Checkpointer(out, every=options.pop("every", 2), environ={}, **options, **parts)

    def take_step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(16, 4)).square().mean().backward()
        self.optimizer.step()
        self.schedule.step()


def test_a_script_resumes_to_the_same_bits(tmp_path: Path) -> None:
    whole = Script()
    with whole.kept(tmp_path / "whole") as kept:
        while kept.step < 12:
            whole.take_step()
            kept.step_done()
    first = Script()
    kept = first.kept(tmp_path / "parts")
    while kept.step < 7:
        first.take_step()
        kept.step_done()
    kept.save()
    kept._trees.close()  # as if it had been killed then
    second = Script()
    with second.kept(tmp_path / "parts") as kept:
        assert kept.step == 7
        while kept.step < 12:
            second.take_step()
            kept.step_done()
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name]), name
    assert checkpoint_names(tmp_path / "parts" / "checkpoints")[0].startswith("step-0000000012")


def test_a_signal_keeps_the_state_and_asks_for_another_run(tmp_path: Path) -> None:
    script = Script()
    kept = script.kept(tmp_path, every=100)
    script.take_step()
    kept.step_done()
    os.kill(os.getpid(), signal.SIGTERM)
    script.take_step()
    with pytest.raises(SystemExit) as ended:
        kept.step_done()
    assert ended.value.code == EXIT_REQUEUE
    again = Script()
    kept = again.kept(tmp_path)
    assert kept.step == 2
    kept.close()


def test_another_model_is_refused_with_the_first_difference(tmp_path: Path) -> None:
    script = Script()
    with script.kept(tmp_path) as kept:
        script.take_step()
        kept.step_done()
    with pytest.raises(MismatchError, match=r"model's '0.weight' it has float32\[8, 4\], this script float32\[9, 4\]"):
        Script(width=9).kept(tmp_path)


def test_a_checkpoint_that_is_due_too_early_is_skipped_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trees = Trees(tmp_path, environ={})
    assert trees.begin(1, {"a": torch.ones(3)})
    monkeypatch.setattr(type(trees._writer), "_finished", lambda self: False)
    assert not trees.begin(2, {"a": torch.ones(3)})
    assert "checkpoint of step 2: left out" in capsys.readouterr().out
    monkeypatch.undo()
    trees.close()
    assert Trees(tmp_path, environ={}).newest()[0] == 1


def test_the_scheduler_hears_of_a_script_and_why_its_checkpoint_is_not_on_the_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[dict[str, object]] = []
    monkeypatch.setattr(Heartbeat, "due", lambda _: True)
    monkeypatch.setattr(Heartbeat, "_send", lambda _, message: said.append(message))
    trees = Trees(tmp_path, environ={"HPCSCHED_SOCKET": "agent", "HPCSCHED_JOB_ID": "12"})
    for error in ("No space left on device", None):
        trees._note(CheckpointReport(step=3, kind="base", stored_bytes=1, write_s=0.1, error=error))
        trees.send_heartbeat(4)
    away, back = said
    assert (away["step"], away["note"]) == (4, "checkpoints: No space left on device")
    assert not {"checkpoint_step", "loss", "goodput"} & away.keys()
    assert (back["checkpoint_step"], back["note"]) == (3, "")
    trees.begin(5, {"weight": torch.ones(3)})
    trees.close()
    again = Trees(tmp_path, environ={"HPCSCHED_SOCKET": "agent", "HPCSCHED_JOB_ID": "12"})
    assert again.newest() is not None
    again.send_heartbeat(5)
    assert said[-1]["checkpoint_step"] == 5


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_librarys_training_resumes_to_the_same_bits(tmp_path: Path, library: str) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed: its callback is not tested")
    script = HERE / f"with_{library}.py"
    interpreter = python(*LIBRARIES[library])

    def run(out: Path, *more: str) -> tuple[int, str]:
        with started([*interpreter, script, out, *more]) as process:
            ended = finish(process)
        return ended.status, ended.output

    status, output = run(tmp_path / "whole")
    assert status == 0, output
    whole = output.splitlines()[-1]
    assert whole.startswith("weights ")
    status, output = run(tmp_path / "parts", "--stop-at", "7")
    assert status == EXIT_REQUEUE, output
    status, output = run(tmp_path / "parts")
    assert status == 0, output
    assert "goes on from step 7" in output
    assert output.splitlines()[-1] == whole
