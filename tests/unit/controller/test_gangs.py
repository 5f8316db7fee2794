"""Jobs that start together or not at all, leases that end, and nodes that can start nothing: what the controller makes of it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster import ROOT, Cluster, config

from hpcnode.wire import protocol
from hpcsched.api.views import why_waiting
from hpcsched.controller.nodes.loss import GATHER_S
from hpcsched.controller.nodes.messages import claim_token
from hpcsched.controller.recovery import load_state
from hpcsched.controller.requests import jobs
from hpcsched.lifecycle.events import NodeLost
from hpcsched.lifecycle.job import lease_end_s
from hpcsched.model.ids import NodeName
from hpcsched.model.job import JobState


class Gang(Cluster):
    """A cluster whose monotonic clock the test moves, with claims answered by hand."""

    def __init__(self, *names: str, **options: Any) -> None:
        self.monotonic_s = 1000.0
        super().__init__(*names, **options)
        self.controller._unreachable._monotonic_s = self.ports.monotonic_s = lambda: self.monotonic_s  # type: ignore[method-assign]
        self.controller._unreachable._born_s = self.monotonic_s

    def says_of_part(self, job_id: int, name: str, status: str, **fields: Any) -> None:
        token = claim_token(self.job(job_id), NodeName(name))
        self.says(name, protocol.Report(seq=1, token=token, status=status, at_s=self.now_s, **fields))

    def launched(self) -> list[tuple[str, str]]:
        return sorted((to, message.step) for to, message in self.sent(protocol.Launch))

    def lose(self, name: str) -> None:
        self.controller.node_down(NodeName(name), "no answer")
        self.tick()

    def pass_s(self, seconds: float) -> None:
        self.monotonic_s += seconds
        self.tick(after_s=seconds)

    def why(self, job_id: int) -> str:
        return why_waiting(self.job(job_id), self.state, ROOT, self.now_s)[1]


def test_the_batch_step_follows_the_last_claim() -> None:
    gang = Gang("n1", "n2", "n3")
    job_id = gang.submit(nodes_min=3)
    assert gang.launched() == [("n2", "alloc"), ("n3", "alloc")]
    assert "n[2-3] to take its part" in gang.why(job_id)
    gang.says_of_part(job_id, "n3", protocol.CLAIMED)
    assert gang.launched() == []
    assert "n2 to take its part" in gang.why(job_id)
    gang.says_of_part(job_id, "n3", protocol.CLAIMED)
    gang.says_of_part(job_id, "n2", protocol.CLAIMED)
    assert gang.launched() == [("n1", "batch")]
    gang.run(job_id)
    gang.says_of_part(job_id, "n2", protocol.CLAIMED)
    assert gang.job(job_id).state is JobState.RUNNING


def test_a_job_on_one_node_is_launched_at_once() -> None:
    gang = Gang("n1", "n2")
    gang.submit()
    assert gang.launched() == [("n1", "batch")]


def test_a_node_that_comes_back_is_asked_again_and_a_claim_outlives_the_controller(tmp_path: Path) -> None:
    gang = Gang("n1", "n2", "n3", path=tmp_path / "db")
    job_id = gang.submit(nodes_min=3)
    gang.says_of_part(job_id, "n2", protocol.CLAIMED)
    gang.launched()
    gang.store.close()
    after = Gang("n1", "n2", "n3", path=tmp_path / "db", up=False)
    load_state(after.state, after.store, after.now_s)
    after.tick()
    held = protocol.Report(seq=1, token=claim_token(after.job(job_id), NodeName("n2")), status="claimed", at_s=1.0)
    after.welcome("n2", inventory=(held,))
    assert after.launched() == []
    after.welcome("n3")
    assert after.launched() == [("n3", "alloc")]
    after.says_of_part(job_id, "n3", protocol.CLAIMED)
    after.welcome("n1")
    assert ("n1", "batch") in after.launched()


def test_a_node_that_does_not_answer_meanwhile_sends_all_back_to_the_queue() -> None:
    gang = Gang("n1", "n2", "n3")
    job_id = gang.submit(nodes_min=3, requeue=False)
    gang.says_of_part(job_id, "n2", protocol.CLAIMED)
    gang.lose("n2")
    assert "goes back to the queue" in gang.why(job_id)
    gang.pass_s(GATHER_S - 1)
    assert gang.job(job_id).state is JobState.CONFIGURING
    gang.pass_s(1)
    assert gang.job(job_id).state is JobState.COMPLETING
    assert sorted(to for to, _ in gang.sent(protocol.EndJob)) == ["n1", "n3"]
    gang.gone(job_id, "n1")
    gang.lose("n3")
    gang.pass_s(GATHER_S)  # it has not launched anything there either
    job = gang.job(job_id)
    assert (job.state, job.attempt, job.outcome) == (JobState.PENDING, 1, None)
    assert job.reason_detail == "node n2 did not answer before the job could start"
    assert gang.sent(protocol.Launch)[-1][1].step == "alloc"  # nothing else was ever sent


def test_a_short_silence_is_nothing() -> None:
    gang = Gang("n1", "n2")
    job_id = gang.submit(nodes_min=2)
    gang.lose("n2")
    gang.pass_s(GATHER_S - 1)
    gang.welcome("n2")
    gang.pass_s(GATHER_S)
    assert gang.job(job_id).state is JobState.CONFIGURING
    assert [to for to, _ in gang.sent(protocol.Launch)] == ["n2", "n2"]


def test_once_it_may_run_a_silent_node_proves_nothing() -> None:
    gang = Gang("n1", "n2")
    job_id = gang.submit(nodes_min=2)
    gang.says_of_part(job_id, "n2", protocol.CLAIMED)
    gang.lose("n2")
    gang.lose("n1")
    gang.pass_s(1e6)
    assert gang.job(job_id).state is JobState.CONFIGURING
    assert "hctl fence" in gang.why(job_id)


def test_a_part_that_a_node_has_lost_is_a_lost_node() -> None:
    gang = Gang("n1", "n2")
    job_id = gang.submit(nodes_min=2)
    gang.says_of_part(job_id, "n2", protocol.CLAIMED)
    gang.run(job_id)
    gang.lose("n2")
    gang.welcome("n2")
    job = gang.job(job_id)
    assert (job.state, job.outcome) == (JobState.COMPLETING, JobState.NODE_FAIL)
    assert "has no record" in job.reason_detail


def test_a_part_of_an_attempt_that_is_over_is_ended() -> None:
    gang = Gang("n1", "n2")
    job_id = gang.submit(nodes_min=2)
    old = protocol.Report(seq=4, token=claim_token(gang.job(job_id), NodeName("n2")), status="claimed", at_s=1.0)
    gang.ask(lambda tx: jobs.requeue(tx, ROOT, [str(job_id)]))
    gang.gone(job_id, "n1")
    gang.gone(job_id, "n2")
    gang.sent(protocol.EndJob)
    gang.says("n2", old)
    assert [(to, message.attempt) for to, message in gang.sent(protocol.EndJob)] == [("n2", 0)]


@pytest.mark.parametrize("part", [False, True])
def test_a_node_that_can_start_nothing_is_drained_and_its_job_goes_elsewhere(part: bool) -> None:
    gang = Gang("n1", "n2", "n3")
    job_id = gang.submit(nodes_min=2, requeue=False)
    why = "cannot write to the spool /x: No space left on device"
    if part:
        gang.says_of_part(job_id, "n2", protocol.REFUSED, why=why, node_fault=True)
        bad, good = "n2", "n1"
    else:
        gang.says_of_part(job_id, "n2", protocol.CLAIMED)
        gang.says("n1", gang.report(job_id, protocol.REFUSED, why=why, node_fault=True))
        bad, good = "n1", "n2"
    gang.gone(job_id, good)
    gang.tick(after_s=100)
    job = gang.job(job_id)
    assert (job.state, job.attempt) == (JobState.CONFIGURING, 1)
    assert {share.node for share in job.shares} == {"n1", "n2", "n3"} - {bad}
    node = gang.state.nodes[NodeName(bad)]
    assert (node.drained, node.drained_why, node.drained_by) == (True, why, "hpcschedd")
    gang.says(bad, protocol.Condition(""))
    assert not gang.state.nodes[NodeName(bad)].drained


def test_a_job_that_a_node_refuses_for_its_own_sake_fails() -> None:
    gang = Gang("n1", "n2")
    job_id = gang.submit(nodes_min=2)
    gang.says_of_part(job_id, "n2", protocol.REFUSED, why="no such account")
    gang.gone(job_id, "n1")
    assert (gang.job(job_id).state, gang.job(job_id).reason_detail) == (JobState.FAILED, "no such account")
    assert not gang.state.nodes[NodeName("n2")].drained


def test_what_a_person_drained_stays_drained() -> None:
    gang = Gang("n1")
    gang.ask(lambda tx: jobs.drain(tx, ROOT, "n1", "a fan", ""))
    gang.says("n1", protocol.Condition("its disk is full"))
    gang.says("n1", protocol.Condition(""))
    gang.welcome("n1")
    node = gang.state.nodes[NodeName("n1")]
    assert (node.drained, node.drained_why) == (True, "a fan")


def test_a_node_is_back_when_its_new_agent_knows_of_no_fault_whatever_it_had_refused() -> None:
    gang = Gang("n1")
    job_id = gang.submit()
    refused = gang.report(job_id, protocol.REFUSED, why="its disk is full", node_fault=True)
    gang.welcome("n1", inventory=(refused,))
    assert not gang.state.nodes[NodeName("n1")].drained
    assert gang.job(job_id).attempt == 1


# ----- leases


def leased(*names: str, **fields: Any) -> tuple[Gang, int]:
    gang = Gang(*names)
    gang.state.config = config(lease_s=100, kill_wait_s=20, requeue_delay_s=0)
    job_id = gang.submit(lease="kill", **fields)
    return gang, job_id


def test_a_lease_that_has_certainly_run_out_frees_the_job() -> None:
    gang, job_id = leased("n1")
    assert gang.sent(protocol.Launch)[0][1].lease_s == 120
    gang.run(job_id)
    gang.pass_s(50)
    gang.lose("n1")
    end_s = lease_end_s(gang.job(job_id))
    assert end_s is not None
    assert end_s > 121
    assert f"in {math.ceil(end_s)} s when the job's lease there has run out" in gang.why(job_id)
    gang.controller.node_down(NodeName("n1"), "still no answer")  # the next attempt to reach it fails
    gang.pass_s(end_s - 1)
    assert gang.job(job_id).state is JobState.RUNNING
    assert min(gang.ports.wakes[-2:]) <= 1.01
    gang.pass_s(1)
    job = gang.job(job_id)
    assert (job.state, job.attempt) == (JobState.PENDING, 1)
    assert "lease there ran out" in job.reason_detail


def test_e5_a_wall_clock_that_jumps_ends_no_lease() -> None:
    gang, job_id = leased("n1")
    gang.run(job_id)
    gang.lose("n1")
    gang.tick(after_s=1e7)
    assert gang.job(job_id).state is JobState.RUNNING


def test_a_new_controller_counts_from_its_start(tmp_path: Path) -> None:
    gang = Gang("n1", path=tmp_path / "db")
    job_id = gang.submit(lease="kill")
    gang.run(job_id)
    gang.lose("n1")
    gang.pass_s(100)
    gang.store.close()
    after = Gang("n1", path=tmp_path / "db", up=False)
    load_state(after.state, after.store, after.now_s)
    end_s = lease_end_s(after.job(job_id))
    assert end_s is not None
    after.pass_s(end_s - 1)
    assert after.job(job_id).state is JobState.RUNNING
    after.pass_s(1)
    assert after.job(job_id).attempt == 1


def test_a_lease_is_as_long_as_it_was_at_the_start() -> None:
    gang, job_id = leased("n1")
    gang.run(job_id)
    gang.state.config = config(lease_s=1, kill_wait_s=1)
    gang.lose("n1")
    gang.pass_s(100)
    assert gang.job(job_id).state is JobState.RUNNING


def test_without_a_lease_and_on_connected_nodes_nothing_ends() -> None:
    gang = Gang("n1", "n2")
    kept = gang.submit(nodelist=(NodeName("n1"),))
    there = gang.submit(nodelist=(NodeName("n2"),), lease="kill")
    gang.run(kept)
    gang.run(there)
    gang.lose("n1")
    gang.pass_s(1e6)
    assert gang.job(kept).state is JobState.RUNNING
    assert gang.job(there).state is JobState.RUNNING


def test_a_job_that_is_being_ended_is_freed_of_a_silent_node_too() -> None:
    gang, job_id = leased("n1", "n2", nodes_min=2)
    gang.says_of_part(job_id, "n2", protocol.CLAIMED)
    gang.run(job_id)
    gang.lose("n2")
    gang.ask(lambda tx: jobs.cancel(tx, ROOT, [str(job_id)], {}))
    gang.gone(job_id, "n1")
    gang.pass_s(1000)
    assert gang.job(job_id).state is JobState.CANCELLED


def test_a_job_of_a_former_incarnation_may_be_renewed_by_another_controller() -> None:
    gang, job_id = leased("n1")
    gang.run(job_id)
    job = gang.job(job_id)
    gang.state.put(replace(job, token=job.token.replace(gang.state.incarnation, "0" * 32)))
    gang.lose("n1")
    gang.pass_s(1e6)
    assert gang.job(job_id).state is JobState.RUNNING


def test_the_nodes_word_that_a_lease_ran_out_queues_the_job_again() -> None:
    gang, job_id = leased("n1")
    gang.run(job_id)
    gang.says("n1", gang.report(job_id, protocol.LOST, why=protocol.LEASE_OVER))
    assert gang.job(job_id).attempt == 1
    lost = [event for event in gang.store.load_events(job_id) if isinstance(event, NodeLost)]
    assert [protocol.LEASE_OVER in event.why for event in lost] == [True]
