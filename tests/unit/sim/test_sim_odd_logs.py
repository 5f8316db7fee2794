"""Logs as they are found: drawn with all that is odd in real ones, and each start compared with what the definition says."""

from __future__ import annotations

import csv
import gzip
import random
from pathlib import Path

import pytest
from unit.sim.brute import brute_starts

from hpcsched.cli.hsim import main
from hpcsched.sim.swf import TraceJob

LOGS = 60


def odd_log(seed: int) -> tuple[bytes, list[TraceJob], int, bool]:
    """Return a log, the jobs that it stands for in the order of submission, the machine's size, and whether the log says it."""
    chance = random.Random(seed)
    size = chance.choice([4, 10, 32])
    header = chance.choice(
        [[], [f"; MaxProcs: {size}"], [f";MaxNodes:\t{size}"], ["; MaxNodes: 2", f"; MaxProcs: {size}"]]
    )
    lines, jobs, at_s = list(header), [], 0.0
    for number in range(1, chance.randint(1, 50) + 1):
        at_s = max(0, at_s + chance.choice([0, 0, 0, 1, 5, 20.5, 100, -7]))
        procs, allocated = (chance.choice([-1, 0, 1, 1, 2, 3, size // 2, size, size + 1]) for _ in range(2))
        run_s = chance.choice([-1, 0, 0, 1, 5, 10, 60, 300])
        asked_s = chance.choice([-5, -1, 0, 1, 5, 10, 60, 300, 600])
        status = chance.choice([-1, 0, 1, 1, 5])
        fields = [
            number,
            at_s,
            -1,
            run_s,
            allocated,
            -1,
            -1,
            procs,
            asked_s,
            -1,
            status,
            chance.choice([-1, 1, 2]),
            *[-1] * 6,
        ]
        text = chance.choice([" ", "\t", "   "]).join(map(str, fields))
        lines.append(chance.choice(["", "  "]) + text)
        if chance.random() < 0.1:  # it was swapped out: its parts follow
            lines += [" ".join(map(str, [*fields[:10], part, *fields[11:]])) for part in (2, 3)]
        if chance.random() < 0.1:
            lines.append(chance.choice(["", "  ", "; a word between"]))
        needed = procs if procs > 0 else allocated
        if run_s >= 0 and 0 < needed <= size:
            jobs.append(TraceJob(number, at_s, run_s, needed, max(asked_s, run_s), fields[11]))
    end = chance.choice(["\n", "\r\n"])
    log = (end.join(lines) + chance.choice(["", end])).encode()
    jobs.sort(key=lambda job: job.submit_s)
    return (gzip.compress(log) if chance.random() < 0.5 else log), jobs, size, bool(header)


@pytest.mark.parametrize("policy", ["fcfs", "easy", "easy-sjbf"])
def test_an_odd_log_goes_as_the_definition_says(policy: str, tmp_path: Path) -> None:
    log, schedule = tmp_path / "log.swf", tmp_path / "schedule.csv"
    for seed in range(LOGS):
        data, jobs, size, says_size = odd_log(seed)
        if not jobs:
            continue
        log.write_bytes(data)
        machine = [] if says_size else [f"--nodes={size}"]
        assert main(["run", str(log), f"--policy={policy}", f"--schedule-out={schedule}", *machine]) == 0
        with schedule.open(newline="") as file:
            found = [(int(row["job_id"]), float(row["start"])) for row in csv.DictReader(file)]
        assert found == list(zip([job.id for job in jobs], brute_starts(jobs, size, policy), strict=True)), (
            f"seed {seed}"
        )
