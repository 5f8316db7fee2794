"""What the row of a step keeps for the controllers after this one: who asked for it, and how far it is on each node.

With it a step that a controller began is minded by the next as if it were its own; it knows how what was reported and
acknowledged has ended, and that a launch which no node knows of never ran. It is kept after the step's end as well, as long
as the job runs: its step command may not have heard of the end yet, and output may still be on its way.

JSON, because nobody but a controller reads it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

from hpcsched.controller.stepplace import Place
from hpcsched.controller.stepstate import HEAD, Origin, Run, Step
from hpcsched.launch.layout import NodeTasks
from hpcsched.model.ids import NodeName
from hpcsched.model.job import Job
from hpcsched.store.rows import StepRow

_KEPT = ("kill_on_bad_exit", "finished", "again", "error")


def keep(step: Step, row: StepRow) -> StepRow:
    """Return `row` with what is to be kept of `step`; nothing if that was found by the word of its nodes alone."""
    if step.asked_by is None or any(run.place is None for run in step.runs.values()):
        return row
    kept: dict[str, Any] = {"asked_by": step.asked_by, "runs": [_run_fields(run) for run in step.in_rank_order()]}
    for name in _KEPT:
        if getattr(step, name):
            kept[name] = getattr(step, name)
    return replace(row, kept=json.dumps(kept, separators=(",", ":")))


def asked_by(row: StepRow) -> Origin | None:
    """Return who asked for the step of `row`; None: that was not kept."""
    if row.kept is None:
        return None
    node, stream = json.loads(row.kept)["asked_by"]
    return NodeName(node), stream


def restored(job: Job, row: StepRow) -> Step | None:
    """Return the step of a controller before us as its row has it; None if nothing was kept."""
    origin = asked_by(row)
    if row.kept is None or origin is None:
        return None
    kept = json.loads(row.kept)
    gone = origin[0] == HEAD  # connections to the head ended with the controller that held them
    runs = [_run_of(fields) for fields in kept["runs"]]
    return Step(
        job=job,
        number=int(row.step),
        origin=None if gone else origin,
        asked_by=origin,
        name=row.name,
        nodes=tuple(NodeName(node) for node in row.nodes),
        ntasks=row.ntasks,
        started_at_s=row.started_at_s or 0.0,
        runs={run.node: run for run in runs},
        found=True,
        ending=gone,
        state="CANCELLED" if gone else "",
        **{name: kept[name] for name in _KEPT if name in kept},
    )


def _run_fields(run: Run) -> dict[str, Any]:
    assert run.place is not None
    fields: dict[str, Any] = {"token": run.token, "place": asdict(run.place)}
    if run.ended:
        fields |= {"codes": run.codes, "signals": run.signals, "usage": run.usage, "barred": run.barred}
    return fields


def _run_of(fields: dict[str, Any]) -> Run:
    tasks = fields["place"]["tasks"]
    place = fields["place"] | {
        "tasks": NodeTasks(**tasks | {"node": NodeName(tasks["node"]), "scattered": tuple(tasks["scattered"])}),
        "gpus": tuple(fields["place"]["gpus"]),
        "held_gpus": tuple(fields["place"]["held_gpus"]),
    }
    ended = {name: fields[name] for name in ("codes", "signals", "usage", "barred") if name in fields}
    return Run(node=NodeName(tasks["node"]), token=fields["token"], place=Place(**place), ended=bool(ended), **ended)
