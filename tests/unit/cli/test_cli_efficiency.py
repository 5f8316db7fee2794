"""What a job used of what it was given, and the line of advice."""

from __future__ import annotations

from typing import Any

import pytest
from fake_api import NOW_S, FakeApi, ended, step

from hpcsched.cli import hacct
from hpcsched.listing.efficiency import advice, cpu_part, mem_part, part_text, time_part

GIB = 1024
HOUR_S = 3600


def job(*, cpus: int = 4, mem_mib: int | None = 4 * GIB, took_s: float = 1000.0, **changes: Any) -> dict[str, Any]:
    """Return a job of one node that had `cpus` and used 900 s of each, half of its memory and of its time limit."""
    made = ended(state="COMPLETED", num_nodes=1, num_cpus=cpus, mem_mib=mem_mib, elapsed_s=took_s, time_limit_s=2000)
    steps = changes.pop(
        "steps", [step("batch", cpu_user_s=890.0 * cpus, cpu_system_s=10.0 * cpus, max_rss_kib=2 * GIB * GIB)]
    )
    return made | {"steps": steps} | changes


def test_the_parts_are_those_of_all_steps() -> None:
    steps = [step("batch", cpu_user_s=100.0, cpu_system_s=0.0, max_rss_kib=GIB * GIB), step("0", cpu_user_s=1900.0, ntasks=2,
             cpu_system_s=0.0, max_rss_kib=GIB * GIB), step("0", attempt=7, cpu_user_s=9e9)]  # fmt: skip
    one = job(steps=steps)
    assert (time_part(one), cpu_part(one), mem_part(one)) == (0.5, 0.5, 0.5)
    assert part_text(0.499) == "50%"


def test_what_is_not_known_is_left_out() -> None:
    one = job(
        mem_mib=None, time_limit_s=None, steps=[step("batch", cpu_user_s=None, cpu_system_s=None, max_rss_kib=None)]
    )
    assert [part_text(part(one)) for part in (time_part, cpu_part, mem_part)] == ["", "", ""]
    assert advice(one) == "nothing was measured"


@pytest.mark.parametrize(
    ("one", "says"),
    [
        (job(), "used what it was given"),
        (job(took_s=5.0), "ran too shortly to tell"),
        (job(state="RUNNING"), ""),
        (job(state="CANCELLED", started_at_s=None), ""),
        (job(steps=[step("batch", cpu_user_s=1200.0, max_rss_kib=3 * GIB * GIB)]), "of its 4 cpus 1.2 were busy: ask for 2"),
        (job(cpus=1, steps=[step("batch", cpu_user_s=99.0, max_rss_kib=3 * GIB * GIB)]),
         "its cpu was busy for 10% of the time: it waited for files, the network or others"),
        (job(steps=[step("batch", cpu_user_s=3900.0, max_rss_kib=100 * GIB)]), "used 100M of 4G on a node: --mem=200M"),
        (job(mem_mib=400, steps=[step("batch", cpu_user_s=3900.0, max_rss_kib=10 * GIB)]), "used what it was given"),
        (job(time_limit_s=10 * HOUR_S), "took 16:40 of 10:00:00: a shorter --time starts sooner"),
        (job(state="TIMEOUT"), "was ended at its limit of 33:20: a longer --time, or checkpoints and --requeue"),
        (job(state="OUT_OF_MEMORY", mem_mib=1000, steps=[]), "took more than the 1000M that it had on each node: --mem=2G"),
        (job(gpus=1, steps=[step("batch", cpu_user_s=10.0, max_rss_kib=3 * GIB * GIB)]),
         "its 4 cpus were busy for 0% of the time, as may be with GPUs"),
    ],
)  # fmt: skip
def test_the_line_of_advice(one: dict[str, Any], says: str) -> None:
    assert advice(one) == says


def test_eff_shows_jobs_alone_and_the_columns_can_be_asked_for(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    api.answers["GET /v1/history"] = {"now_s": NOW_S, "jobs": [job()]}
    assert hacct.main(["--eff", "-j", "10", "-P"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "10|train|COMPLETED|00:16:40|50%|90%|50%|used what it was given"
    ]
    assert hacct.main(["-n", "-P", "-o", "jobid,cpueff", "-j", "10"]) == 0
    assert capsys.readouterr().out == "10|90%\n10.batch|\n"
