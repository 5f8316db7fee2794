"""Small jobs, nodes and shares for tests, with defaults that do not matter."""

from __future__ import annotations

from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import Job
from hpcsched.model.node import Link, Node, NodeSpec, Partition, Share
from hpcsched.model.spec import JobSpec

T0 = 1_000_000.0
SCRIPT = "#!/bin/sh\necho hello\n"


def spec(**fields: object) -> JobSpec:
    """Return a job's specification."""
    if "nodes_min" in fields:
        fields = {"nodes_max": fields["nodes_min"], "nodes_given": True} | fields
    return JobSpec(**{"name": "job", "script": SCRIPT, "work_dir": "/tmp"} | fields)  # type: ignore[arg-type]


def job(job_id: int = 1, **fields: object) -> Job:
    """Return a waiting job."""
    values = {"id": JobId(job_id), "spec_id": job_id, "spec": spec(), "uid": 1000, "user": "ann", "submitted_at_s": T0}
    return Job(**values | {"partition": "main"} | fields)  # type: ignore[arg-type]


def share(node: str = "n1", **fields: object) -> Share:
    """Return one cpu of a node."""
    return Share(**{"node": NodeName(node), "cpus": 1, "mem_mib": 100} | fields)  # type: ignore[arg-type]


def node(name: str = "n1", *, cpus: int = 2, link: Link = Link.UP, **fields: object) -> Node:
    """Return a node that answers."""
    spec = NodeSpec(name=NodeName(name), host="127.0.0.1", host_key="ssh-ed25519 AAAA", cpus=cpus, mem_mib=4000)
    return Node(**{"spec": spec, "link": link} | fields)  # type: ignore[arg-type]


def partition(*names: str, **fields: object) -> Partition:
    """Return the default partition over these nodes."""
    values = {"name": "main", "nodes": tuple(NodeName(name) for name in names), "default": True}
    return Partition(**values | fields)  # type: ignore[arg-type]
