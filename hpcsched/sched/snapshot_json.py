"""A snapshot and its policy as JSON, for inspection and for planning it again.

Versioned: an unknown version is rejected. Jobs have only the fields that the planner needs: no
scripts, environments or paths. Fields of jobs with their default value are left out, because ten
thousand jobs have mostly equal fields. Reservations are stored; the reserved intervals are computed
from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from typing import Any

from hpcsched.errors import ProtocolError
from hpcsched.model.codec import value_from_json, value_to_json
from hpcsched.model.ids import JobId
from hpcsched.sched.place.request import ResourceRequest, Shape
from hpcsched.sched.place.reserved_intervals import reserved_intervals_of
from hpcsched.sched.policy import Policy
from hpcsched.sched.snapshot import PendingJob, Snapshot

VERSION = 1
KIND = "hpcsched snapshot"

Json = dict[str, Any]


def snapshot_to_json(snapshot: Snapshot, policy: Policy) -> Json:
    """Return the snapshot and the policy as an object that ``json.dumps`` accepts."""
    data = value_to_json(replace(snapshot, reserved_intervals=()))
    del data["reserved_intervals"]
    usual = _usual()
    for job in data["pending"]:
        _drop_usual(job, usual)
    return {"kind": KIND, "version": VERSION, "snapshot": data, "policy": value_to_json(policy)}


def snapshot_from_json(obj: object) -> tuple[Snapshot, Policy]:
    """Return the snapshot and the policy in `obj`, which is parsed JSON.

    Raises: ProtocolError if it has none.
    """
    if not isinstance(obj, dict) or obj.get("kind") != KIND:
        raise ProtocolError("cannot read the snapshot: hctl snapshot has not written this file")
    if obj.get("version") != VERSION:
        raise ProtocolError(
            f"cannot read the snapshot: it has version {str(obj.get('version'))[:20]!r}, this hpcsched reads {VERSION}"
        )
    snapshot = value_from_json(Snapshot, obj.get("snapshot"))
    policy = value_from_json(Policy, obj.get("policy"))
    return replace(snapshot, reserved_intervals=reserved_intervals_of(snapshot.reservations, snapshot.now_s)), policy


def _usual() -> Json:
    """Return a pending job whose fields have their defaults."""
    some = ResourceRequest(shape=Shape())
    return value_to_json(PendingJob(id=JobId(0), display_id="", partition="", request=some, submitted_at_s=0.0))


def _drop_usual(job: Json, usual: Mapping[str, Any]) -> None:
    """Remove the fields of `job` with the same values as in `usual`.

    Fields of its shape, and of its views in other partitions, are removed too.
    """
    for name in _DEFAULTED:
        if job[name] == usual[name]:
            del job[name]
    shape, plain = job["request"]["shape"], usual["request"]["shape"]
    job["request"]["shape"] = {name: value for name, value in shape.items() if value != plain[name]}
    for other in job.get("others", ()):
        _drop_usual(other, usual)


_DEFAULTED = tuple([field.name for field in fields(PendingJob) if field.default is not MISSING])
