"""The agent and its shepherds are killed at each step of a launch: it runs at most once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_client import (
    FINAL,
    INCARNATION,
    Controller,
    NodeUnderTest,
    fill_done_log,
    launch_of,
    new_token,
    running_node,
    script_of,
)
from waiting import wait_until

from hpcnode.wire import protocol

# Who dies at the point, and what must be said of the token in the end.
LAUNCH_POINTS = {
    "epoch.before": protocol.ENDED,
    "epoch.after": protocol.ENDED,
    "claim.before": protocol.ENDED,
    "claim.made": protocol.ENDED,
    "claim.written": protocol.ENDED,
    "fork.before": protocol.ENDED,
    "fork.after": protocol.ENDED,
    "shepherd.begun": protocol.REFUSED,  # each of its shepherds dies there
    "tasks.forked": protocol.REFUSED,
    "started.before": protocol.REFUSED,
    "started.after": protocol.LOST,  # recorded as released, though it was not: it must not run again
    "released": protocol.LOST,
    "tasks.over": protocol.LOST,
    "final.before": protocol.LOST,
    "final.after": protocol.ENDED,
    "forget.before": protocol.ENDED,
    "done.turned": protocol.ENDED,
    "forget.noted": protocol.ENDED,
    "forget.after": protocol.ENDED,
}


@pytest.fixture
def node(place: Path) -> Iterator[NodeUnderTest]:
    with running_node(place / "node") as node:
        node.kill()
        yield node


class Persistent:
    """A controller that reconnects and repeats its launch until it knows the token's end."""

    def __init__(self, node: NodeUnderTest) -> None:
        self.node = node
        self.said: list[protocol.Report] = []

    def connect(self) -> Controller | None:
        agent = self.node.agent
        assert agent is not None
        if agent.poll() is not None:
            self.node.start()
        try:
            controller = Controller(self.node)
        except (AssertionError, OSError):
            return None
        self.said += [_report(fields) for fields in controller.welcome.inventory]
        return controller

    def bring(self, launch: protocol.Launch, script: bytes) -> protocol.Report:
        """Launch until a final report comes, acknowledge it until the entry is gone, return it."""
        wait_until(lambda: self._round(launch, script), what="the end")
        final = next(report for report in self.said if report.status in FINAL)
        wait_until(lambda: self._acknowledge(launch.token), what="the entry to go")
        return final

    def _round(self, launch: protocol.Launch, script: bytes) -> bool:
        controller = self.connect()
        if controller is None:
            return False
        try:
            for _ in range(2):
                controller.send(launch, script)
            while not controller.closed and not any(r.status in FINAL for r in self.said):
                controller.pump(5)
                self.said += [m for m, _ in controller.messages if isinstance(m, protocol.Report)]
                controller.messages.clear()
        except OSError:
            pass  # the agent died while we spoke
        finally:
            controller.close()
        return any(report.status in FINAL for report in self.said)

    def _acknowledge(self, token: str) -> bool:
        controller = self.connect()
        if controller is None:
            return False
        try:
            controller.send(protocol.Ack([fields["seq"] for fields in controller.welcome.inventory]))
            controller.send(protocol.Ping(1))
            while not controller.closed and not any(isinstance(m, protocol.Pong) for m, _ in controller.messages):
                controller.pump(1)
            return (
                bool(wait_until(lambda: controller.closed or not self._entry(token).exists() or controller.pump(0.05)))
                and not self._entry(token).exists()
            )
        except (OSError, AssertionError):
            return False
        finally:
            controller.close()

    def _entry(self, token: str) -> Path:
        return self.node.root / "spool" / token


def _report(fields: dict[str, object]) -> protocol.Report:
    report = protocol.from_json({"type": "Report", **fields})
    assert isinstance(report, protocol.Report)
    return report


@pytest.mark.parametrize("point", LAUNCH_POINTS)
def test_a_launch_runs_once_at_any_crash_point(node: NodeUnderTest, place: Path, point: str) -> None:
    marker = place / "marker"
    if point == "done.turned":
        fill_done_log(node.root)
    node.start(crash_at=point)
    token = new_token()
    launch = launch_of(token, append=True, stdout=str(marker), work_dir=str(place))
    controller = Persistent(node)
    final = controller.bring(launch, script_of("echo ran"))
    runs = marker.read_text().split() if marker.exists() else []
    expected = LAUNCH_POINTS[point]
    assert final.status == expected, final
    assert len(runs) == (1 if expected == protocol.ENDED else len(runs))
    assert len(runs) <= 1
    assert f"dying at {point}," in (node.root / "log").read_text()
    late = controller.connect() or controller.connect()
    assert late is not None
    late.send(launch, script_of("echo ran"))
    assert late.final(token).status == protocol.REVOKED
    late.send(protocol.EndJob(INCARNATION, 1, 0, 1.0))
    late.wait(lambda m: isinstance(m, protocol.JobGone))
    assert (marker.read_text().split() if marker.exists() else []) == runs
    assert node.job_processes() == []


@pytest.mark.parametrize("point", ["revoke.before", "revoke.made", "final.before", "final.after"])
def test_a_reported_revocation_holds_after_any_crash(node: NodeUnderTest, place: Path, point: str) -> None:
    node.start(crash_at=point)
    token = new_token()
    controller = Controller(node)
    controller.send(protocol.EndStep(token, 1.0, "cancelled"))
    wait_until(lambda: controller.pump(0.1) or controller.closed)
    answered = bool(controller.reports(token))
    agent = node.agent
    assert agent is not None
    wait_until(lambda: agent.poll() is not None)
    node.start()
    again = Controller(node)
    if not answered:
        again.send(protocol.EndStep(token, 1.0, "cancelled"))
        again.final(token)
    again.messages.clear()
    again.send(launch_of(token), script_of(f"echo ran >> {place}/marker"))
    assert again.final(token).status == protocol.REVOKED
    assert not (place / "marker").exists()


def test_agents_and_shepherds_killed_at_random_moments(node: NodeUnderTest, place: Path) -> None:
    """Twenty jobs with an agent that is killed repeatedly: each runs once, each end is known."""
    marker = place / "marker"
    node.start()
    launches = {
        token: launch_of(token, append=True, stdout=str(marker), env={"PATH": "/usr/bin:/bin", "N": token})
        for token in (new_token(job=number) for number in range(1, 21))
    }
    script = script_of('sleep 0.0$(($$ % 10)); echo "$N"')
    finals: dict[str, protocol.Report] = {}
    number = 0
    while len(finals) < len(launches):
        number += 1
        controller = Controller(node)
        for fields in controller.welcome.inventory:
            controller.messages.append((_report(fields), b""))
        for token, launch in launches.items():
            if token not in finals:
                controller.send(launch, script)
        for _ in range(number % 7 * (1 + number // 50)):  # a busy machine gets more time in the end
            controller.pump(0.01)
        for message, _ in controller.messages:
            if isinstance(message, protocol.Report) and message.status in FINAL:
                finals.setdefault(message.token, message)
        controller.close()
        assert node.agent is not None
        os.kill(node.agent.pid, signal.SIGKILL)
        node.agent.wait()
        node.start()
    assert {report.status for report in finals.values()} == {protocol.ENDED}
    assert sorted(marker.read_text().split()) == sorted(launches)
