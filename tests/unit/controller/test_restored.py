"""A controller on a restored database: what was launched before is ended and never taken for what is launched since."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import ROOT
from restored import Restored

from hpcnode.wire import protocol
from hpcsched.controller.requests import jobs
from hpcsched.model.ids import NodeName
from hpcsched.model.job import JobState, Reason


@pytest.fixture
def restored(tmp_path: Path) -> Restored:
    return Restored(tmp_path, "end")


def test_what_runs_from_before_is_ended_and_its_job_runs_again_when_that_is_gone(restored: Restored) -> None:
    job_id = restored.before.submit(requeue=True)
    restored.before.run(job_id)
    restored.back_up()
    after = restored.restore()
    old = after.job(job_id).token
    running = after.report(job_id, protocol.STARTED)
    after.welcome("n2")
    after.welcome(after.job(job_id).shares[0].node, inventory=(running,))
    (_, order), *_ = after.sent(protocol.EndJob)
    assert (order.incarnation, order.job_id) == (restored.before.state.incarnation, job_id)
    assert after.job(job_id).state is JobState.COMPLETING, "no word yet that it is gone"
    after.says("n1", protocol.changed(running, status=protocol.ENDED, codes=[0], signals=[15]))
    after.says("n1", protocol.JobGone(incarnation=order.incarnation, job_id=job_id, attempt=0))
    after.tick(60.0)
    assert (after.job(job_id).state, after.job(job_id).attempt) == (JobState.CONFIGURING, 1)
    assert after.job(job_id).token.startswith(after.state.incarnation)
    assert after.job(job_id).token != old
    assert after.controller.orphans == {}


def test_a_job_that_ended_meanwhile_has_ended_by_its_whole_token(restored: Restored) -> None:
    job_id = restored.before.submit()
    restored.before.run(job_id)
    restored.back_up()
    after = restored.restore()
    after.welcome("n1", inventory=(after.report(job_id, protocol.ENDED, codes=[3], signals=[0]),))
    assert (after.job(job_id).state, str(after.job(job_id).exit)) == (JobState.FAILED, "3:0")


def test_a_job_of_which_the_node_has_nothing_is_lost(restored: Restored) -> None:
    job_id = restored.before.submit(requeue=False)
    restored.back_up()
    after = restored.restore()
    assert after.job(job_id).state is JobState.CONFIGURING
    after.welcome("n1")
    assert after.sent(protocol.Launch) == [], "a token of before is never launched"
    assert after.job(job_id).state is JobState.NODE_FAIL
    assert "restored" in after.job(job_id).reason_detail


def test_another_launch_under_the_same_id_is_not_adopted(restored: Restored) -> None:
    job_id = restored.before.submit(requeue=True)
    restored.back_up()
    after = restored.restore()
    token = restored.before.job(job_id).token.replace(".0.batch", ".4.batch")
    other = protocol.changed(restored.before.report(job_id, protocol.STARTED), token=token)
    after.welcome("n1", inventory=(other,))
    ((_, order),) = after.sent(protocol.EndJob)
    assert (order.incarnation, order.attempt) == (restored.before.state.incarnation, 4)
    assert after.job(job_id).started_at_s is None


def test_a_step_of_before_is_ended(restored: Restored) -> None:
    job_id = restored.before.submit()
    restored.before.run(job_id)
    restored.back_up()
    after = restored.restore()
    step = protocol.changed(
        after.report(job_id, protocol.STARTED), token=after.job(job_id).token.replace(".batch.n1", ".0.n2")
    )
    after.welcome("n2", inventory=(step,))
    assert [(to, order.job_id) for to, order in after.sent(protocol.EndJob)] == [("n2", job_id)]


def test_an_end_that_was_asked_for_before_goes_to_what_runs_from_before(restored: Restored) -> None:
    job_id = restored.before.submit()
    restored.before.run(job_id)
    restored.before.ask(lambda tx: jobs.cancel(tx, ROOT, [str(job_id)], {}))
    restored.back_up()
    after = restored.restore()
    after.welcome("n1")
    former = restored.before.state.incarnation
    assert {order.incarnation for _, order in after.sent(protocol.EndJob)} == {former}
    after.says("n1", protocol.JobGone(incarnation=after.state.incarnation, job_id=job_id, attempt=0))
    assert after.job(job_id).state is JobState.COMPLETING
    after.says("n1", protocol.JobGone(incarnation=former, job_id=job_id, attempt=0))
    assert after.job(job_id).state is JobState.CANCELLED


def test_a_waiting_job_that_may_have_started_since_waits_for_every_nodes_report(restored: Restored) -> None:
    held = restored.before.submit(hold=True)
    restored.back_up()
    after = restored.restore()
    after.ask(lambda tx: jobs.release(tx, ROOT, [str(held)]))
    after.welcome("n1")
    assert after.job(held).state is JobState.PENDING
    assert after.state.waits[held].reason is Reason.NODE_LOST
    assert "hctl fence n2" in after.state.waits[held].detail
    new = after.submit()
    assert after.job(new).state is JobState.CONFIGURING, "a new job cannot run from before"
    running = protocol.Report(
        seq=1,
        token=f"{restored.before.state.incarnation}.{held}.0.batch.n2.{'f' * 32}",
        status=protocol.STARTED,
        at_s=after.now_s,
    )
    after.welcome("n2", inventory=(running,))
    assert after.job(held).state is JobState.PENDING, "it runs on n2 still"
    gone = protocol.JobGone(incarnation=restored.before.state.incarnation, job_id=held, attempt=0)
    after.says("n2", gone)
    after.tick()
    assert after.job(held).state is JobState.CONFIGURING


def test_a_node_that_comes_back_without_what_ran_there_is_not_waited_for(restored: Restored) -> None:
    held = restored.before.submit(hold=True)
    restored.back_up()
    after = restored.restore()
    after.ask(lambda tx: jobs.release(tx, ROOT, [str(held)]))
    token = f"{restored.before.state.incarnation}.{held}.0.batch.n2.{'f' * 32}"
    running = protocol.Report(seq=1, token=token, status=protocol.STARTED, at_s=after.now_s)
    after.welcome("n1")
    after.welcome("n2", inventory=(running,))
    assert after.job(held).state is JobState.PENDING
    after.welcome("n2")  # JobGone was lost with the connection
    assert after.job(held).state is JobState.CONFIGURING


def test_a_fenced_node_is_not_waited_for(restored: Restored) -> None:
    held = restored.before.submit(hold=True)
    restored.back_up()
    after = restored.restore()
    after.ask(lambda tx: jobs.release(tx, ROOT, [str(held)]))
    after.welcome("n1")
    after.controller.node_down(NodeName("n2"), "no route to host")
    after.tick()
    after.ask(lambda tx: jobs.fence(tx, ROOT, "n2", "burnt"))
    assert after.job(held).state is JobState.CONFIGURING
    assert after.state.unseen_nodes() == []
    assert after.state.nodes[NodeName("n2")].boot_id == "fenced"
