"""The signal of --signal for jobs without a script: in time, and once."""

from __future__ import annotations

import signal
from typing import Any

from unit.controller.cluster import Cluster

from hpcsched.model.job import Job, JobState
from hpcsched.model.spec import SignalSpec


class Heard:
    """A step service that notes the signals and does nothing else."""

    def __init__(self) -> None:
        self.signals: list[tuple[int, int]] = []

    def signal_steps(self, job: Job, signum: int) -> None:
        self.signals.append((job.id, signum))

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def test_an_allocation_is_warned_once_before_its_limit() -> None:
    cluster = Cluster("n1")
    heard = cluster.controller.listener = Heard()
    warning = SignalSpec(signum=signal.SIGUSR1, before_s=30)
    job_id = cluster.submit(script="", time_limit_s=120, signal=warning)
    other = cluster.submit(script="", time_limit_s=120)
    assert {cluster.job(one).state for one in (job_id, other)} <= {JobState.CONFIGURING, JobState.RUNNING}
    cluster.run(job_id)
    cluster.tick(89.0)
    assert heard.signals == []
    assert any(0.9 <= wake <= 1.0 for wake in cluster.ports.wakes)
    cluster.tick(1.0)
    assert heard.signals == [(job_id, signal.SIGUSR1)]
    cluster.tick(5.0)
    cluster.tick(20.0)
    assert heard.signals == [(job_id, signal.SIGUSR1)]
    cluster.tick(6.0)
    assert cluster.job(job_id).outcome is JobState.TIMEOUT
