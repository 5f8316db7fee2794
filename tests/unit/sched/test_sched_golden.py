"""Plans of busy little clusters, recorded word by word: a change of any decision or sentence shows in the diff.

To record anew after a wanted change: HPCSCHED_RECORD=1 pytest this file, then read the diff.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from unit.sched.world import World, world

from hpcsched.model.ids import JobId
from hpcsched.model.job import Hold
from hpcsched.model.node import GpuRequest, Link
from hpcsched.model.spec import ArraySpec, Dependency, DependencyKind
from hpcsched.sched.decisions import Plan
from hpcsched.sched.experience import Experience
from hpcsched.sched.plan import plan
from hpcsched.sched.policy import Backfill, Guard, ShortJobs

GOLDEN = Path(__file__).parents[2] / "golden"


def busy_cluster() -> World:
    sketch = world(
        "3x8/16000/2xa100+fast 2x16/64000+big 1x4/4000 1x4/4000",
        running=[
            "1: n1,n2 8c 8000M 2g 3600s",
            "2: n4 10c 20000M 7200s",
            "3: n6 2c 1000M 60s",
        ],
        waiting=[
            "10: 3 nodes 2g 4c 1800s",
            "11: 1g 2c 900s",
            "12: 1g 2c 9000s",
            "13: 20 tasks 600s",
            "14: 1c +fast&big 60s",
            "15: 64c 60s",
            "16: n7 60s",
            "17: 1c 60s",
            "18: 1c 60s",
            "19: 1c 60s",
            "20: 1-4 nodes 2c p=small 100s",
            "21: 1c exclusive 100s",
            "22: 1c 100s",
            "23: 6 tasks 2 per-node 300s",
            "24: 1c 30s",
            "25: 1c p=closed 30s",
            "26: 60000M 2c 30s",
        ],
        partitions={"main": "n1,n2,n3,n4,n5,n7", "small": "n6,n7"},
    )
    sketch.change_node("n7", link=Link.DOWN, link_why="no answer for 90 s")
    for index, job in enumerate((17, 18, 19)):
        sketch.change(job, array_job_id=JobId(17), array_task_id=index, array=ArraySpec(indices=(0, 1, 2), limit=2))
    sketch.change(22, hold=Hold.ADMIN)
    sketch.change(24, dependency=(Dependency(kind=DependencyKind.AFTER_OK, job_ids=(1,)),))
    return sketch.change(13, gpus_per_task=(GpuRequest(count=1, type="h100"),))


def guarded_cluster() -> World:
    """The policy `default` half a day after the first job came: of the measure of two hours the old have waited for one."""
    sketch = world(
        "4x8/16000/2xa100",
        running=["1: n1 8c 4000M 2g 3000s", "2: n2 6c 4000M 1g 600s", "3: n3 4c 4000M 1500s"],
        waiting=[
            "10: 4 nodes 8c 3600s",
            "11: 3 nodes 4c 1800s",
            "12: 2 nodes 4c 2g 9000s",
            "13: 2c 300s",
            "14: 4c 7200s",
            "15: 4c 7200s",
            "16: 1c 1g 60s",
            "17: 1c 60s",
            "18: 4c 600s p=first",
        ],
        partitions={"main": "n1,n2,n3,n4", "first": "n4"},
        backfill=Backfill.DEFAULT,
        guard=Guard(short=ShortJobs(share=0.04)),
    )
    sketch.partitions[1] = replace(sketch.partitions[1], priority_tier=2)
    sketch.now_s = 500.0
    for job in (10, 12):
        sketch.change(job, eligible_at_s=-5000.0 + job)
    for job in (11, 13, 14, 15, 16, 17, 18):
        sketch.change(job, eligible_at_s=450.0 - job, uid=job)
    return sketch


def text_of(made: Plan) -> str:
    lines = []
    for start in made.starts:
        shares = [
            f"{share.node}:{share.cpus}c,{share.mem_mib}M,gpus={list(share.gpus)},tasks={share.tasks}"
            for share in start.shares
        ]
        lines.append(f"start {start.job_id} {' '.join(shares)}")
    for job_id, wait in sorted(made.waits.items()):
        lines.append(f"wait {job_id} {wait.reason} ({wait.detail}) start={wait.expected_start_s}")
    return "\n".join(lines) + "\n"


def check(made: Plan, name: str) -> None:
    text = text_of(made)
    if os.environ.get("HPCSCHED_RECORD"):
        (GOLDEN / name).write_text(text)
    assert text == (GOLDEN / name).read_text()


def test_the_plan_reads_as_recorded() -> None:
    check(busy_cluster().plan(), "sched_plan.txt")


def test_the_plan_of_the_policy_default_reads_as_recorded() -> None:
    made = guarded_cluster()
    experience = Experience(longest_runs_s={14: 7000.0, 15: 200.0}, easy_wait_s=7200.0, began_s=-1e7)
    check(plan(replace(made.snapshot(), experience=experience), made.policy), "sched_plan_default.txt")
