"""What is to be seen at one moment, and the reading of it: nodes, queue, training, log.

`Observer.look` asks the API and reads the share as a user could; when there is no controller, nodes and jobs stay as
they were last seen. Knows nothing of how a scene is shown.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcsched.demo.cluster import LocalCluster
from hpcsched.demo.training import MetricsReader, Training
from hpcsched.errors import UnavailableError

LOG_TAIL_BYTES = 4000


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """One line of the story: when it happened, what kind of thing it is, and the words."""

    at_s: float
    kind: str  # "act", "good", "bad" or "note"
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """All that a frame shows. `controller` is what it answered to a ping, None while there is none."""

    elapsed_s: float = 0.0
    now_s: float = 0.0
    title: str = ""
    controller: Mapping[str, Any] | None = None
    nodes: tuple[Mapping[str, Any], ...] = ()
    jobs: tuple[Mapping[str, Any], ...] = ()
    training: Training = field(default_factory=Training)
    log: tuple[str, ...] = ()
    story: tuple[Moment, ...] = ()

    def job(self, job_id: int) -> Mapping[str, Any] | None:
        """Return the job with this number, None if it is not there."""
        return next((job for job in self.jobs if job["id"] == job_id), None)

    def node(self, name: str) -> Mapping[str, Any] | None:
        """Return the node of this name, None if it is not there."""
        return next((node for node in self.nodes if node["name"] == name), None)


class Observer:
    """Looks at a cluster and at one training run on its share."""

    def __init__(self, cluster: LocalCluster, metrics: Path) -> None:
        self._cluster = cluster
        self._metrics = MetricsReader(metrics)
        self._nodes: tuple[Mapping[str, Any], ...] = ()
        self._jobs: tuple[Mapping[str, Any], ...] = ()
        self.log_file: Path | None = None

    def look(self, *, elapsed_s: float, now_s: float, title: str, story: tuple[Moment, ...]) -> Scene:
        """Return what is to be seen now."""
        controller = self._ask()
        return Scene(
            elapsed_s=elapsed_s,
            now_s=now_s,
            title=title,
            controller=controller,
            nodes=self._nodes,
            jobs=self._jobs,
            training=self._metrics.read(),
            log=tail_lines(self.log_file, LOG_TAIL_BYTES) if self.log_file is not None else (),
            story=story,
        )

    def _ask(self) -> Mapping[str, Any] | None:
        try:
            ping = self._cluster.api("GET", "/v1/ping")
            self._nodes = tuple(self._cluster.api("GET", "/v1/nodes")["nodes"])
            self._jobs = tuple(self._cluster.api("GET", "/v1/jobs")["jobs"])
        except UnavailableError:
            return None
        return ping


def tail_lines(path: Path, limit_bytes: int) -> tuple[str, ...]:
    """Return the last whole lines of a file, as text; none if it is not there."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - limit_bytes))
            data = stream.read()
    except OSError:
        return ()
    lines = data.decode("utf-8", "replace").splitlines()
    return tuple(lines[1:] if size > limit_bytes else lines)
