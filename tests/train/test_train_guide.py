"""docs/training.md: each of its snippets runs, and does what the page says."""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from ranks import LIBRARIES, MPIRUN, Ended, finish, needs_mpi, python, started

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/training.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
MOST_CHANGED_LINES = 8
EPOCHS, COUNT, BATCH = 10, 150, 64

# What the snippets leave to the reader.
READERS_OWN = f"""
import sys, torch, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
images = torch.randn({COUNT}, 8)
train_set = test_set = TensorDataset(images, (images[:, 0] > 0).long())


class Net(torch.nn.Sequential):
    def __init__(self):
        torch.manual_seed(5)
        super().__init__(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
"""

LIGHTNING = """
import lightning
from functools import partial

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)

    def training_step(self, batch, number):
        return F.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

model, data = Net(), DataLoader(train_set, batch_size=50)
Trainer = partial(
    lightning.Trainer, max_epochs=2, logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu"
)
"""

TRANSFORMERS = """
from functools import partial
from transformers import Trainer
import transformers

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)

    def forward(self, x, labels):
        return {"loss": F.cross_entropy(self.layer(x), labels)}

model, data = Model(), [{"x": x, "labels": y} for x, y in train_set]
TrainingArguments = partial(
    transformers.TrainingArguments, max_steps=4, report_to=[], disable_tqdm=True, use_cpu=True, remove_unused_columns=False
)
"""


def blocks(language: str, word: str = "") -> list[str]:
    return [text for kind, text in BLOCKS if kind == language and word in text]


def run_python(program: str, folder: Path, *arguments: str, library: str = "") -> Ended:
    path = folder / "script.py"
    path.write_text(program)
    interpreter = python(*LIBRARIES.get(library, ()))
    command = ["bash", "-c", 'cd "$1"; shift; exec "$@"', "bash", folder, *interpreter, path, *arguments]
    with started(command) as process:
        return finish(process)


def with_programs(folder: Path) -> dict[str, str]:
    """Return an environment in which the page's commands are the tests' own."""
    for name, line in {
        "mpirun": f'exec {MPIRUN} -n 2 "$@"',
        "python3": f'exec {shlex.join(python())} "$@"',
        "hctl": f'exec {Path(sys.executable).with_name("hctl")} "$@"',
        "pip": "true",
    }.items():
        program = folder / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/bash\n{line}\n")
        program.chmod(0o755)
    (program.parent / "python").symlink_to("python3")
    return {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}


def both_sides(diff: str) -> tuple[list[str], list[str]]:
    lines = diff.splitlines()
    return [line[1:] for line in lines if line[:1] != "+"], [line[1:] for line in lines if line[:1] != "-"]


def losses(folder: Path) -> list[float]:
    return [
        json.loads(line)["loss"]
        for line in (folder / "run1/metrics.jsonl").read_text().splitlines()
        if '"loss"' in line
    ]


def test_a_plain_loop_is_converted_by_few_lines() -> None:
    (diff,) = blocks("diff")
    plain, converted = both_sides(diff)
    changes = difflib.SequenceMatcher(a=plain, b=converted, autojunk=False).get_opcodes()
    changed = sum(max(high - low, end - begin) for kind, low, high, begin, end in changes if kind != "equal")
    assert 0 < changed <= MOST_CHANGED_LINES
    assert f"{['', '', '', '', '', '', 'Six', 'Seven', 'Eight'][changed]} lines change" in PAGE


@pytest.mark.parametrize("order", ["in order", "shuffled"])
def test_the_converted_loop_has_the_plain_ones_losses(order: str, tmp_path: Path) -> None:
    plain, converted = ("\n".join(side) for side in both_sides(*blocks("diff")))
    note = "losses = []\nmean = F.cross_entropy\nF.cross_entropy = lambda *a: losses.append(mean(*a)) or losses[-1]\n"
    if order == "in order":
        plain, converted = (text.replace("shuffle=True", "shuffle=False") for text in (plain, converted))
    else:  # torch's generators would shuffle otherwise
        plain = plain.replace("shuffle=True", "sampler=Order()")
        note += (
            "from hpctrain.data import order_of\n"
            "class Order:\n"
            "    epoch = -1\n"
            f"    def __len__(self): return {COUNT}\n"
            "    def __iter__(self):\n"
            "        self.epoch += 1\n"
            f"        return iter(order_of(self.epoch * {COUNT}, (self.epoch + 1) * {COUNT}, {COUNT}, 1).tolist())\n"
        )
    told = run_python(READERS_OWN + note + plain + "\nprint('losses', [float(x) for x in losses])\n", tmp_path)
    assert told.status == 0, told.output
    expected = json.loads(told.output.partition("losses ")[2])
    assert len(expected) == EPOCHS * -(-COUNT // BATCH)
    ended = run_python(READERS_OWN + converted + "\n", tmp_path)
    assert ended.status == 0, ended.output
    assert losses(tmp_path) == pytest.approx(expected, abs=1e-6)
    assert (tmp_path / "run1/model.pt").exists()
    assert "lr 1e-3 (constant), clip none, batch 64, 30 steps = 10 epochs" in ended.output


def test_the_whole_script_runs_as_it_is(tmp_path: Path) -> None:
    (script,) = blocks("python", "run.mean_loss")
    words = ["--out", "run1", "--patience", "5", "--epochs", "2"]
    ended = run_python(READERS_OWN + script, tmp_path, *words)
    assert ended.status == 0, ended.output
    assert "digits: lr 1e-3 (CosineAnnealingLR), clip 1, batch 64, 6 steps = 2 epochs" in ended.output
    assert len(losses(tmp_path)) == 6
    assert {path.name for path in (tmp_path / "run1").iterdir()} >= {"model.pt", "best.pt", "metrics.jsonl"}


def test_checkpoints_for_ones_own_loop_are_resumed(tmp_path: Path) -> None:
    (script,) = blocks("python", "schedule=schedule)  # resumes")
    for steps in ("120", "150"):
        program = READERS_OWN + script.replace("10_000", steps) + "print('ends', checkpointer.step)\n"
        ended = run_python(program, tmp_path)
        assert ended.status == 0, ended.output
        assert f"ends {steps}" in ended.output
    assert sorted((tmp_path / "run1/checkpoints").glob("*000000150*"))


@needs_mpi
def test_encrypted_checkpoints_are_made_listed_and_exported(tmp_path: Path) -> None:
    (script,), (commands,) = blocks("python", "key_file="), blocks("sh", "--checkpoint-key-file")
    environment = with_programs(tmp_path) | {"HOME": str(tmp_path)}
    small = "--steps 2 --layers 1 --width 16 --heads 2 --context 16 --sample 0 --out"
    with started(["bash", "-ec", f"cd {tmp_path}; {commands.replace('--out', small)}"], environment) as job:
        ended = finish(job)
    assert ended.status == 0, ended.output
    assert "model.safetensors: step 2, " in ended.output
    assert (tmp_path / "run1.key").stat().st_mode & 0o777 == 0o600
    (tmp_path / "own").mkdir()
    shutil.copy(tmp_path / "run1.key", tmp_path / "own")
    for _ in range(2):
        ended = run_python(READERS_OWN + script + "print('ends', checkpointer.step)\n", tmp_path / "own")
        assert ended.status == 0, ended.output
    content = [path.read_bytes() for path in (tmp_path / "own/run1/checkpoints").glob("step-*.json")]
    assert content
    assert all(b"hpctrain-encrypted" in text for text in content)


@pytest.mark.parametrize(
    ("package", "word", "own"),
    [("lightning", "checkpoint.lightning", LIGHTNING), ("transformers", "checkpoint.huggingface", TRANSFORMERS)],
)
def test_callbacks_keep_checkpoints_and_resume(package: str, word: str, own: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    (script,) = blocks("python", word)
    for _ in range(2):
        ended = run_python(READERS_OWN + own + script, tmp_path, library=package)
        assert ended.status == 0, ended.output
    assert any((tmp_path / "run1/checkpoints").iterdir())


def test_arrays_are_taken_as_data(tmp_path: Path) -> None:
    (script,) = blocks("python", "Rows(")
    ended = run_python(READERS_OWN + script, tmp_path)
    assert ended.status == 0, ended.output
    assert len(losses(tmp_path)) == 6


def test_every_snippet_is_of_a_kind_that_is_tested() -> None:
    assert len(blocks("python")) == 6
    assert {kind for kind, _ in BLOCKS} == {"python", "diff", "sh", "bash", "console", "text"}
    for text in blocks("sh") + blocks("bash"):
        assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"'\.\[(\w+)\]'", PAGE)) <= set(extras)


@needs_mpi
def test_commands_run(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "books").mkdir()
    (tmp_path / "books/one.txt").write_text(PAGE)
    environment = with_programs(tmp_path)
    small = "--steps 2 --layers 1 --width 16 --heads 2 --context 16 --sample 0"
    commands = blocks("bash")
    assert len(commands) == 5
    for text in commands:
        script = text.replace("/srv/share", str(tmp_path)).replace("/var/tmp/$USER", str(tmp_path / "stage"))
        script = script.replace("--vocabulary 8192", "--vocabulary 300").replace(
            "chargpt --out", f"chargpt {small} --out"
        )
        with started(["bash", "-ec", f"cd {tmp_path}; rm -rf run; {script}"], environment) as process:
            ended = finish(process)
        assert ended.status == 0, ended.output
        assert "model saved to " in ended.output
