"""A cluster for hmon: canned answers of a controller, and the app in front of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fake_api import NOW_S, FakeApi, job, log_answer, running, text_answer
from screens import node
from textual.pilot import Pilot
from waiting import PATIENCE_S

from hpcsched.tui.app import MonitorApp
from hpcsched.tui.reading import SEPARATOR

FACTS = {
    "drained": False, "drained_why": "", "power": "on", "power_why": "", "launch_failures": 0, "launch_failure": "",
    "mem_mib": 4096, "mem_alloc_mib": 1024, "gpus": [], "gpus_alloc": 0, "host": "n1", "port": 22, "features": [],
    "partitions": ["main"], "reservation": "", "agent_version": "1",
}  # fmt: skip
PING = {
    "cluster": "lab", "pid": 42, "epoch": 2, "now_s": NOW_S, "started_at_s": NOW_S - 60, "not_taken": [], "undecided": 0,
    "counts": {"RUNNING": 1, "PENDING": 1},
}  # fmt: skip


def queue_line(number: int, display_id: str, name: str = "train", state: str = "RUNNING", where: str = "n1") -> str:
    """Return a line of the queue as the controller writes it for hmon."""
    reason = where.strip("()") if where.startswith("(") else "None"
    values = (str(number), display_id, name, "ann", state, "0:42", where, reason, "main", "9:18")
    return SEPARATOR.join(values) + "\n"


def alert(rule: str, severity: str = "warning", phase: str = "firing", **labels: str) -> dict[str, Any]:
    """Return an alert as the controller shows it."""
    times = {"since_s": NOW_S - 600, "ended_at_s": NOW_S - 60 if phase == "resolved" else None}
    texts = {"text": f"what {rule} means", "remedy": "hpcsched doctor n1", "quiet": ""}
    return {"rule": rule, "severity": severity, "phase": phase, "labels": labels, **times, **texts}


def energy_of(user: str, job_id: int, joules: float, source: str = "component") -> dict[str, Any]:
    """Return a job as reports count it: an hour on n1, and its energy."""
    held = {"node": "n1", "since_s": NOW_S - 3600, "until_s": NOW_S, "cpus": 2, "gpus": 0, "mem_mib": 100}
    times = {"allocated_at_s": NOW_S - 3600, "ended_at_s": None, "waited_s": 0.0}
    use = {"job_id": job_id, "attempt": 0, "node": "n1", "source": source, "joules": joules}
    use |= {"cost": joules / 3.6e6 * 0.3, "co2_g": joules / 3.6e6 * 400}
    return {
        "id": job_id, "user": user, "account": "", "state": "RUNNING", "use": None, "steps": [], "energy": [use],
        "attempts": [{"attempt": 0, "requeued": False, "holdings": [held], **times}],
    }  # fmt: skip


TARIFF = {"currency": "EUR", "cpu_hour": 0.0, "gpu_hour": 0.0, "kwh": [[0.0, 0.3]], "gco2_per_kwh": [[0.0, 400.0]]}


def serve(api: FakeApi, *lines: str, nodes: list[dict[str, Any]] | None = None) -> None:
    """Answer as a controller with two nodes, a job that runs and one that waits."""
    found = nodes if nodes is not None else [node("n1", **FACTS), node("n2", **FACTS, state="IDLE", jobs=[])]
    runs = running(11) | {"folded": {"tasks": "", "count": 1}}
    waits = job(12) | {"folded": {"tasks": "", "count": 1}}

    def jobs(body: Any, given: dict[str, str]) -> Any:
        return {"jobs": [waits] if given["state"] == "PENDING" else [runs], "now_s": NOW_S}

    text = "".join(lines) or queue_line(11, "11") + queue_line(12, "12", "later", "PENDING", "(Resources)")
    api.answers |= {
        "GET /v1/ping": PING,
        "GET /v1/nodes": {"nodes": found},
        "GET /v1/jobs": jobs,
        "GET /v1/queue": text_answer(text),
        "GET /v1/job/11": {"jobs": [running(11)]},
        "GET /v1/job/12": {"jobs": [job(12)]},
        "GET /v1/log": log_answer(b"step 1\nstep 2\n"),
        "GET /v1/slow": {"findings": [], "text": "nothing holds up the queue"},
        "GET /v1/reservations": {"reservations": []},
        "GET /v1/shares": {"shares": []},
        "GET /v1/alerts": {"alerts": [], "left_out": 0},
        "GET /v1/history": {"jobs": []},
        "GET /v1/config": {"cost": {"currency": "EUR"}},
        "GET /v1/tariff": TARIFF,
    }


def text_of(app: MonitorApp) -> str:
    """Return what the terminal shows."""
    return "\n".join(strip.text.rstrip() for strip in app.screen._compositor.render_strips())


@asynccontextmanager
async def opened(job_id: str = "", *, size: tuple[int, int] = (80, 24)) -> AsyncIterator[Pilot[int]]:
    """Run hmon without a terminal, until the block ends."""
    app = MonitorApp(0.2, job_id)
    async with app.run_test(size=size) as pilot:
        yield pilot


async def shown(pilot: Pilot[int], *parts: str, absent: str = "\0", until: Callable[[], bool] = lambda: True) -> str:
    """Wait until all parts are shown and `absent` is not, and return the text of the screen."""
    assert isinstance(pilot.app, MonitorApp)
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        text = text_of(pilot.app)
        if all(part in text for part in parts) and absent not in text and until():
            return text
        assert time.monotonic() < deadline_s, f"not shown: {[part for part in parts if part not in text]}\n{text}"
        await asyncio.sleep(0.02)
