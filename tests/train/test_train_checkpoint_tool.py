"""`python -m hpctrain.checkpoint`, as `hctl checkpoint` runs it: list, verify, prune, export."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import HERE
from test_train_checkpoint import data_file, flip_byte, state, write
from test_train_gradlog import World

import hpctrain.checkpoint.__main__ as checkpoint_main
from hpctrain.checkpoint import Checkpointer
from hpctrain.checkpoint.__main__ import main
from hpctrain.checkpoint.encryption import CheckpointKey
from hpctrain.checkpoint.manifest import Manifest, checkpoint_names
from hpctrain.checkpoint.writing.publish import RetentionPolicy, prune


def steps_in(directory: Path) -> list[int]:
    return [int(name[5:15]) for name in checkpoint_names(directory)]


def test_list_has_each_checkpoint_and_its_parent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, [1, 2])
    assert main(["list", str(tmp_path)]) == 0
    head, newest, oldest = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["STEP", "KIND", "ATTEMPT"]
    assert newest.split()[:2] == ["2", "delta"]
    assert newest.endswith("step-0000000001.a0000")
    assert oldest.split()[:2] == ["1", "base"]


def test_list_and_verify_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, [1, 2])
    assert main(["list", "--json", str(tmp_path)]) == 0
    newest, oldest = json.loads(capsys.readouterr().out)["checkpoints"]
    assert (newest["step"], newest["kind"], newest["parent"]) == (2, "delta", oldest["name"])
    data_file(tmp_path, oldest["name"]).unlink()
    assert main(["verify", "--json", str(tmp_path), "--step", "1"]) == 1
    (there,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert there["name"] == oldest["name"]
    assert "data-step-0000000001" in there["damage"]


def test_a_checkpoint_removed_by_a_run_is_not_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "run", [1, 2, 3, 4], base_every=1)
    reading = checkpoint_main.read_chain

    def removing(directory: Path, name: str, key: CheckpointKey | None) -> list[tuple[Manifest, str]]:
        prune(directory, RetentionPolicy(keep=1), ())
        return reading(directory, name, key)

    monkeypatch.setattr(checkpoint_main, "read_chain", removing)
    assert main(["list", str(tmp_path / "run")]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == ["STEP", "4"]


def test_verify_skips_checkpoints_that_a_run_removes_meanwhile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, [1, 2, 3], base_every=1)
    checking = checkpoint_main._check

    def removing(directory: Path, name: str, key: CheckpointKey | None) -> None:
        prune(directory, RetentionPolicy(keep=1), ())
        checking(directory, name, key)

    monkeypatch.setattr(checkpoint_main, "_check", removing)
    assert main(["verify", str(tmp_path)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("step-0000000003.a0000: whole")


def test_an_export_looks_again_where_a_run_has_gone_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run" / "checkpoints"
    write(run, [1, 2])
    reading = checkpoint_main.exported
    gone_on = []

    def going_on(
        directory: Path, name: str, *, everything: bool, key: CheckpointKey | None
    ) -> tuple[Manifest, dict[str, torch.Tensor]]:
        if not gone_on:
            gone_on.extend(write(run, [3, 4], base_every=1))
            prune(run, RetentionPolicy(keep=1), ())
        return reading(directory, name, everything=everything, key=key)

    monkeypatch.setattr(checkpoint_main, "exported", going_on)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out.pt")]) == 0
    assert torch.equal(torch.load(tmp_path / "out.pt", weights_only=True)["w"], state(4)["model.w"])


def test_a_closed_output_pipe_is_not_an_error(tmp_path: Path) -> None:
    write(tmp_path, [1])
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [sys.executable, "-m", "hpctrain.checkpoint", "list", tmp_path]
        ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (-signal.SIGPIPE, "")


def test_verify_names_the_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, [1, 2])
    assert main(["verify", str(tmp_path)]) == 0
    damaged = data_file(tmp_path, "step-0000000002.a0000")
    flip_byte(damaged, damaged.stat().st_size // 2)
    assert main(["verify", str(tmp_path)]) == 1
    told = capsys.readouterr().out.splitlines()[-2:]
    assert told[0].startswith("step-0000000002.a0000: damaged: chunk ")
    assert damaged.name in told[0]
    assert told[1].startswith("step-0000000001.a0000: whole")


def test_verify_reads_logged_gradients(tmp_path: Path) -> None:
    World(tmp_path).run(3)
    assert main(["verify", str(tmp_path)]) == 0
    damaged = data_file(tmp_path, "step-0000000002.a0000")
    flip_byte(damaged, damaged.stat().st_size // 2)
    assert main(["verify", str(tmp_path), "--step", "1"]) == 0
    assert main(["verify", str(tmp_path), "--step", "2"]) == 1
    assert main(["verify", str(tmp_path), "--step", "3"]) == 1  # its increment


def test_prune_keeps_the_newest_undamaged_chains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, list(range(1, 9)), base_every=2)  # bases 1, 3, 5, 7
    flip_byte(data_file(tmp_path, "step-0000000007.a0000"), 100)
    assert main(["prune", str(tmp_path), "--keep", "1"]) == 0
    assert "step-0000000007.a0000 is damaged and does not count" in capsys.readouterr().out
    assert 5 in steps_in(tmp_path)
    assert 6 in steps_in(tmp_path)
    assert not {1, 2, 3, 4} & set(steps_in(tmp_path))
    assert not list(tmp_path.glob("data-step-0000000001*"))
    assert main(["verify", str(tmp_path), "--step", "6"]) == 0


def test_prune_removes_nothing_if_all_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, [1, 2], base_every=1)
    for name in checkpoint_names(tmp_path):
        data_file(tmp_path, name).unlink()
    assert main(["prune", str(tmp_path), "--keep", "1"]) == 1
    assert "no checkpoint is undamaged" in capsys.readouterr().err
    assert steps_in(tmp_path) == [2, 1]


@pytest.mark.parametrize("name", ["out.pt", "out.safetensors"])
def test_an_export_has_the_weights_under_the_models_names(tmp_path: Path, name: str) -> None:
    if name.endswith("safetensors"):
        pytest.importorskip("safetensors")
    write(tmp_path / "run" / "checkpoints", [1, 2])
    assert main(["export", str(tmp_path / "run"), str(tmp_path / name)]) == 0
    if name.endswith("safetensors"):
        from safetensors.torch import load_file

        there = load_file(tmp_path / name)
    else:
        there = torch.load(tmp_path / name, weights_only=True)
    wanted = {key.removeprefix("model."): one for key, one in state(2).items() if key.startswith("model.")}
    assert there.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert torch.equal(there[key], tensor), key


@pytest.mark.parametrize("part", ["model", "net"])
def test_an_export_of_a_scripts_own_checkpoint_has_the_models_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], part: str
) -> None:
    model = torch.nn.Linear(3, 2)
    with Checkpointer(tmp_path / "run", every=1, environ={}, **{part: model}) as kept:
        kept.step_done()
    out = tmp_path / "out.pt"
    status = main(["export", str(tmp_path / "run"), str(out)])
    if part == "model":
        assert status == 0
        there = torch.load(out, weights_only=True)
        assert there.keys() == {"weight", "bias"}
        assert torch.equal(there["weight"], model.weight)
    else:
        assert status == 1
        assert "use --all to export all" in capsys.readouterr().err
        assert main(["export", "--all", str(tmp_path / "run"), str(out)]) == 0
        assert "parts.net.weight" in torch.load(out, weights_only=True)


def test_an_export_takes_logged_steps_again(tmp_path: Path) -> None:
    world = World(tmp_path / "run")
    world.run(4)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out.pt"), "--all"]) == 0
    there = torch.load(tmp_path / "out.pt", weights_only=True)
    for name, tensor in world.tensors().items():
        assert torch.equal(there[name], tensor), name


def test_an_export_of_steps_by_an_unknown_optimizer_goes_back_to_a_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    World(tmp_path / "run", "adamw").run(4)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out.pt")]) == 0
    told = capsys.readouterr()
    assert "can only be taken again by the program that took them" in told.err
    assert f"{tmp_path / 'out.pt'}: step 1, " in told.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["prune", "--keep", "0"], "'0' is not a number of chains; keep at least 1"),
        (["prune", "--keep", "-1"], "'-1' is not a number of chains"),
        (["prune", "--every", "nan"], "'nan' is not a number of hours"),
        (["prune", "--every", "-3"], "'-3' is not a number of hours"),
        (["prune", "--every", "day"], "'day' is not a number of hours"),
        (["verify", "--step", "x"], "'x' is not a step; `list` shows the steps"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*words, str(tmp_path)])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("file", "said"), [(".", "it is a directory"), ("away/out.pt", "there is no directory")])
def test_a_place_that_takes_no_file_is_refused_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, said: str
) -> None:
    write(tmp_path / "run" / "checkpoints", [1])
    assert main(["export", str(tmp_path / "run"), str(tmp_path / file)]) == 1
    told = capsys.readouterr().err
    assert f"cannot export to {tmp_path / file}: {said}" in told


def test_an_empty_directory_is_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hpctrain.checkpoint", "list", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=HERE, check=False)
    assert ended.returncode == 1
    assert "cannot find checkpoints in" in ended.stderr
