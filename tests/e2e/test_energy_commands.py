"""Power budgets, tariffs and limits of GPUs as users and administrators see them, on a real cluster of two nodes."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_until

from hpcsched.loopback.cluster import LocalCluster


@pytest.fixture(scope="module")
def lab() -> Iterator[LocalCluster]:
    """Two nodes that take 20 W each when they are idle, and 50 W more for each of their two cpus."""
    with tempfile.TemporaryDirectory(prefix="hpc") as directory:
        base = Path(directory)
        base.chmod(0o755)
        with LocalCluster(base, names=("n1", "n2"), settings={"controller": {"kill_wait_s": 2}}) as started:
            for name in ("n1", "n2"):
                path = started.config_dir / "nodes.d" / f"{name}.toml"
                path.write_text(path.read_text() + "\nidle_watts = 20\npeak_watts = 120\n")
            configure(started, 1000)
            yield started


def configure(lab: LocalCluster, budget: int, cost: str = "") -> str:
    folder = lab.config_dir / "conf.d"
    folder.mkdir(mode=0o755, exist_ok=True)
    path = folder / "energy.toml"
    path.write_text(f"[power]\nbudget_watts = {budget}\n[cost]\n{cost}\n")
    done = lab.run("hctl", "reconfigure", check=False)
    return str(done.stdout + done.stderr)


def submit(lab: LocalCluster, *words: str) -> str:
    return str(lab.run("hsub", "--parsable", *words).stdout).strip()


def text(lab: LocalCluster, *words: str) -> str:
    return str(lab.run(*words).stdout)


def test_a_job_waits_for_power_and_a_higher_budget_starts_it(lab: LocalCluster) -> None:
    configure(lab, 40 + 100)
    first = submit(lab, "-n2", "-w", "n1", "--wrap", "sleep 600")
    wait_until(lambda: f"{first} R" in text(lab, "hqueue", "-h", "-o", "%i %t"), 60)
    second = submit(lab, "-w", "n2", "--wrap", "sleep 600")
    wait_until(lambda: "PowerNotAvail" in text(lab, "hqueue", "-h", "-o", "%i %t %r"), 30)
    assert "needs 50 W, of which 0 of 100 W for jobs are free now" in text(lab, "hwhy", second)
    assert re.search(
        r"CircuitName=all BudgetWatts=140 Nodes=n\[1-2\]\s+JobWatts=100 UsedWatts=100 FreeWatts=0",
        text(lab, "hctl", "show", "power"),
    )
    assert "Power: jobs count 100 of 100 W" in text(lab, "hinfo")
    configure(lab, 40 + 60)  # below what runs: accepted, and the job continues
    assert f"{first} R" in text(lab, "hqueue", "-h", "-o", "%i %t")
    configure(lab, 1000)
    wait_until(lambda: f"{second} R" in text(lab, "hqueue", "-h", "-o", "%i %t"), 60)
    lab.run("hcancel", first, second)


def test_a_job_waits_for_the_cheap_hours(lab: LocalCluster) -> None:
    later = time.localtime(time.time() + 3 * 3600)
    cheap = f'"{later.tm_hour:02}:00-{(later.tm_hour + 1) % 24:02}:30"' if later.tm_hour < 23 else '"23:00-00:30"'
    assert "cannot use" not in configure(lab, 1000, f"kwh = {{default = 0.4, {cheap} = 0.1}}")
    job = submit(lab, "--time=30", "--cheap-by=now+20hours", "--wrap", "true")
    wait_until(lambda: "BeginTime" in text(lab, "hqueue", "-h", "-j", job, "-o", "%r"), 30)
    why = text(lab, "hwhy", job)
    assert f"it starts at {later.tm_hour:02}:00, when energy is cheap, which saves" in why
    assert "cheap by" in text(lab, "hqueue", job)
    tried = lab.run("hsub", "--time=30", "--test-only", "--wrap", "true").stderr
    assert "would save" in tried
    assert "(--cheap-by)" in tried
    refused = lab.run("hsub", "--time=60", "--cheap-by=now+5minutes", "--wrap", "true", check=False).stderr
    assert "cannot end by --cheap-by: the time limit is 1:00:00" in refused
    lab.run("hcancel", job)


def test_a_tariff_that_cannot_be_meant_is_refused_by_reconfigure(lab: LocalCluster) -> None:
    said = configure(lab, 1000, 'kwh = {default = 0.4, "Mo-Xx 22:00-06:00" = 0.1}')
    assert "'Xx' is not a day" in said
    assert "energy.toml" in said
    configure(lab, 1000)


def test_power_of_gpus_is_limited_only_for_jobs_with_gpus(lab: LocalCluster) -> None:
    refused = lab.run("hsub", "--gpu-power=250", "--wrap", "true", check=False).stderr
    assert "the job asks for no whole GPUs" in refused
