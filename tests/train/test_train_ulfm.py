"""Ranks under Open MPI's `mpirun --with-ft ulfm`: one is killed, the others take the very next step.

The Open MPI is one of those in HPCSCHED_TEST_MPI_BIN (its Python borrows this one's packages), as `make ulfm` says. That alone
runs these, until two hundred runs have ended since Open MPI's hang at the end of a run was found and avoided (ADR 13).
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest
from ranks import HERE, Ended, finish, started
from test_train_resume import SMALL, STEPS, lines_of

LISTED = os.environ.get("HPCSCHED_TEST_MPI_BIN", "").split(os.pathsep)
OPEN_MPI = next((Path(one) for one in LISTED if (Path(one) / "ompi_info").exists()), None)
pytestmark = pytest.mark.skipif(
    OPEN_MPI is None or not os.environ.get("HPCSCHED_ULFM"), reason="ULFM NOT TESTED: `make ulfm` does"
)


def run(out: Path, fault: str, *more: str) -> Ended:
    """Three ranks with a fault; `more` are words of mpirun."""
    assert OPEN_MPI is not None
    mpirun = [OPEN_MPI / "mpirun", "--with-ft", "ulfm", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    paths = [str(HERE.parent.parent / "workers"), str(HERE.parent), sysconfig.get_path("purelib")]
    yields = ["--mca", "mpi_yield_when_idle", "1"]
    command = [*mpirun, *yields, *more, "-n", "3", OPEN_MPI / "python", HERE / "faulty_chargpt.py", fault]
    with started([*command, "--out", out, *SMALL], {"PYTHONPATH": os.pathsep.join(paths)}) as process:
        return finish(process, 120)


def steps_of(out: Path) -> list[tuple[float, int]]:
    """The loss and the world of each step, after checking that every step is told once, in order."""
    lines = [line for line in lines_of(out) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return [(line["loss"], line["world"]) for line in lines]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run in which nobody is lost."""
    out = tmp_path_factory.mktemp("ulfm") / "run"
    ended = run(out, "none")
    assert ended.status == 0, ended.output
    assert "3 ranks over ulfm" in ended.output
    return [loss for loss, _ in steps_of(out)]


@pytest.mark.parametrize("slot", [0, 1])
def test_the_others_go_on_without_a_killed_rank(undisturbed: list[float], tmp_path: Path, slot: int) -> None:
    """Rank 0 is the one that writes, and another one writes then."""
    ended = run(tmp_path, f"slot:{slot}:11")
    assert ended.status == 0, ended.output
    assert "1 of 3 ranks failed" in ended.output
    losses, worlds = zip(*steps_of(tmp_path), strict=True)
    assert losses == pytest.approx(undisturbed, rel=1e-4)
    assert worlds == (3,) * 10 + (2,) * (STEPS - 10), "the very next step is taken by the two that are left"


def test_a_rank_that_is_killed_in_the_last_step_leaves_nobody_waiting(undisturbed: list[float], tmp_path: Path) -> None:
    ended = run(tmp_path, f"slot:2:{STEPS}")
    assert ended.status == 0, ended.output
    assert [loss for loss, _ in steps_of(tmp_path)] == pytest.approx(undisturbed, rel=1e-4)


def test_what_a_lost_rank_alone_would_have_is_refused(tmp_path: Path) -> None:
    assert OPEN_MPI is not None
    command = [OPEN_MPI / "mpirun", "--with-ft", "ulfm", "-n", "1", OPEN_MPI / "python", HERE / "tiny.py"]
    paths = [str(HERE.parent.parent / "workers"), sysconfig.get_path("purelib")]
    with started([*command, "--out", tmp_path, "--zero"], {"PYTHONPATH": os.pathsep.join(paths)}) as process:
        ended = finish(process)
    assert ended.status == 1
    assert "cannot train with --zero in an elastic run" in ended.output
