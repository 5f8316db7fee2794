"""Each example with its job script, as a user starts it: some steps on one rank and on two."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
from ranks import MPIRUN, Ended, finish, needs_mpi, python, started

ROOT = Path(__file__).parents[2]
SMALL = {"chargpt": ("--layers", "1", "--width", "16", "--heads", "2", "--context", "16")}


def run_script(name: str, ranks: int, out: Path, *words: str) -> Ended:
    """Run a job script where `mpirun` knows how many ranks there are, as it does in a job."""
    bin_directory = out.parent / "bin"
    bin_directory.mkdir(exist_ok=True)
    for program, line in {
        "mpirun": f'exec {MPIRUN} -n {ranks} "$@"',
        "python3": f'exec {shlex.join(python())} "$@"',
    }.items():
        (bin_directory / program).write_text(f"#!/bin/bash\n{line}\n")
        (bin_directory / program).chmod(0o755)
    environment = {
        "PATH": f"{bin_directory}{os.pathsep}{os.environ['PATH']}",
        "HPCSCHED_JOB_ID": "7",
        f"{name.upper()}_OUT": str(out),
    }
    script = ROOT / "etc" / "examples" / f"train_{name}.sh"
    with started(["bash", script, *SMALL.get(name, ()), *words], environment) as process:
        return finish(process)


@needs_mpi
@pytest.mark.parametrize("name", ["chargpt", "digits"])
def test_a_job_script_trains_on_one_rank_and_continues_with_two(name: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = run_script(name, 1, out, "--steps", "4", "--checkpoint-every", "2")
    assert first.status == 0, first.output
    assert "1 rank over" in first.output
    second = run_script(name, 2, out, "--steps", "6")
    assert second.status == 0, second.output
    assert "2 ranks over mpi, attempt 1, resumed from step 4" in second.output
    assert (out / "model.pt").exists()
    assert (out / "loss.png").exists()


@needs_mpi
def test_frozen_weights_do_not_change_and_new_ones_learn_on_one_and_two_ranks(tmp_path: Path) -> None:
    import torch  # noqa: PLC0415

    first = run_script("finetune", 1, tmp_path / "run", "--steps", "10", "--checkpoint-every", "25")
    assert first.status == 0, first.output
    ended = run_script("finetune", 2, tmp_path / "run", "--steps", "50", "--checkpoint-every", "25")
    assert "2 ranks over mpi, attempt 1, resumed from step 10" in ended.output
    found = re.search(
        r"([0-9.]+) % of 796 unseen new digits classified correctly, 5125 of 23941 weights trained", ended.output
    )
    assert found, ended.output
    assert float(found[1]) > 75
    before, after = (torch.load(tmp_path / "run" / name, weights_only=True) for name in ("pretrained.pt", "model.pt"))
    assert all(torch.equal(before[key], after[key]) for key in before if key.startswith("eyes"))
    sizes = re.findall(r"checkpoint: step \d+, (base|delta), ([0-9.]+) MB", ended.output)
    assert [kind for kind, _ in sizes] == ["base", "delta"]
    assert float(sizes[1][1]) < float(sizes[0][1]) / 2  # what is frozen is not written again
    (tmp_path / "bad.pt").write_bytes(b"no weights")
    refused = run_script("finetune", 1, tmp_path / "other", "--from", str(tmp_path / "bad.pt"))
    assert refused.status == 1
    assert "cannot begin with" in refused.output
