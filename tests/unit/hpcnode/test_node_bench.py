"""The measurements of a node: what is counted, and what becomes of one that cannot be made."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcnode.agent import bench


def test_processes_work_in_the_same_windows_and_their_rates_are_added() -> None:
    def prepare() -> Callable[[], int]:
        return lambda: 1000

    rates = bench.together(2, prepare, windows=3, window_s=0.01)
    assert len(rates) == 3
    assert all(rate > 0 for rate in rates)


def test_a_process_that_cannot_begin_ends_the_test_and_no_process_is_left() -> None:
    def prepare() -> Callable[[], int]:
        raise MemoryError

    with pytest.raises(OSError, match="could not begin"):
        bench.together(2, prepare, windows=3, window_s=0.01)


def test_arrays_take_an_eighth_of_the_free_memory_at_most() -> None:
    assert bench.array_bytes(64 << 30, 4) == bench.ARRAY_BYTES
    assert bench.array_bytes(4 << 30, 4) == 64 << 20
    assert bench.array_bytes(0, 256) == bench.LEAST_ARRAY_BYTES
    assert 2 * 64 * bench.array_bytes(32 << 30, 64) <= (32 << 30) // 8


def test_copies_count_what_is_read_and_written() -> None:
    work = bench._copying(bench.BLOCK_BYTES)
    assert work() == 2 * bench.BLOCK_BYTES


def test_the_disk_is_measured_in_a_file_that_is_gone_afterwards(tmp_path: Path) -> None:
    notes: dict[str, str] = {}
    found = bench.disk(str(tmp_path), 1, notes)
    assert {name: len(rounds) >= 1 and min(rounds) > 0 for name, rounds in found.items()} == dict.fromkeys(
        ("disk_write", "disk_read", "fsync"), True
    )
    assert list(tmp_path.iterdir()) == []


def test_of_cpus_the_best_round_counts_and_of_disks_the_median() -> None:
    found = bench.summary(
        {"cpu": [1.0, 2.0, 3.0], "disk_read": [10.0, 20.0, 90.0], "fsync": [1.0] * 19 + [9.0, 9.0], "none": []}
    )
    assert found["values"] == {"cpu": 3.0, "disk_read": 20.0, "fsync": 1.0, "fsync_p95": 9.0}
    assert found["spread"] == {"cpu": 1.0, "disk_read": 4.0, "fsync": 0.0}


def test_load_and_pressure_before_make_a_node_busy(tmp_path: Path) -> None:
    load, pressure = tmp_path / "loadavg", tmp_path / "cpu"
    cpus = os.cpu_count() or 1
    load.write_text("0.01 0.02 0.03 1/100 7\n")
    pressure.write_text("some avg10=0.50 avg60=9.00 avg300=9.00 total=7\n")
    assert bench.busy_before(str(load), str(pressure)) == ""
    pressure.write_text("some avg10=31.20 avg60=0.00 avg300=0.00 total=7\n")
    assert bench.busy_before(str(load), str(pressure)) == "cpu pressure was 31 % before"
    load.write_text(f"{cpus}.00 0.02 0.03 1/100 7\n")
    assert bench.busy_before(str(load), str(pressure)) == f"its load was {cpus}.0 before"
    assert bench.busy_before(str(tmp_path / "none"), str(tmp_path / "none")) == ""  # a kernel without PSI


def products(python: str) -> tuple[dict[str, list[float]], dict[str, str]]:
    notes: dict[str, str] = {}
    return bench._products(python, 1, notes), notes


@contextlib.contextmanager
def open_directory() -> Iterator[Path]:
    """Yield a directory that the account nobody, as whom root runs the users' Python, can enter."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


def test_without_the_users_python_there_are_no_matrix_products() -> None:
    assert products("") == ({}, {"gemm": "not measured: no numpy; name the users' Python with --python"})
    with open_directory() as directory:
        found, notes = products(str(directory / "none"))
    assert found == {}
    assert "No such file" in notes["gemm"]


@pytest.mark.parametrize(
    ("says", "why"),
    [
        ("exit 3", "exit status 3"),
        ("echo rubbish", "not measured"),
        ('echo \'{"rounds": 1, "notes": 2}\'', "not measured"),
    ],
)
def test_a_python_that_answers_rubbish_gives_a_note(says: str, why: str) -> None:
    with open_directory() as directory:
        program = directory / "python"
        program.write_text(f"#!/bin/sh\n{says}\n")
        program.chmod(0o755)
        found, notes = products(str(program))
    assert found == {}
    assert why in notes["gemm"]


def test_a_run_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="quick and full"):
        bench.bench(str(tmp_path), "longest", sys.executable)
