"""A restore that asks: what runs from before goes on until an admin has it ended or adopted, by its whole token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from restoredworld import Restored
from world import ANN, ROOT, Cluster, full_disk

from hpcnode import protocol
from hpcsched.api.views import node_views
from hpcsched.controller import requests, strays
from hpcsched.controller.messages import claim_token
from hpcsched.errors import NotFoundError, PermissionDeniedError, RequestError, UnavailableError
from hpcsched.model.ids import NodeName
from hpcsched.model.job import JobState, Reason


@pytest.fixture
def restored(tmp_path: Path) -> Restored:
    return Restored(tmp_path, "ask")


def adopt(cluster: Cluster, *tokens: str) -> list[int]:
    found: list[int] = cluster.ask(lambda tx: strays.adopt(tx, ROOT, tokens))
    return found


def end(cluster: Cluster, *tokens: str) -> None:
    cluster.controller.end_strays(cluster.ask(lambda tx: strays.end(tx, ROOT, tokens)))


def test_an_adopted_job_goes_on_as_it_runs_and_ends_as_itself(restored: Restored) -> None:
    job_id = restored.before.submit(cpus_per_task=2)
    restored.before.run(job_id)
    restored.back_up()
    after = restored.restore()
    running = after.report(job_id, protocol.STARTED)
    after.welcome("n1", inventory=(running,))
    after.welcome("n2")
    assert after.sent(protocol.EndJob) == []
    (seen,) = strays.views(after.world)
    assert (seen["token"], seen["node"], seen["job_id"], seen["adoptable"]) == (running.token, "n1", job_id, True)
    assert adopt(after, running.token) == [job_id]
    assert strays.views(after.world) == []
    after.store.close()

    again = restored.start()  # the word is on disk
    again.welcome("n1", inventory=(running,))
    assert (again.job(job_id).state, strays.views(again.world)) == (JobState.RUNNING, [])
    again.end(job_id)
    assert again.job(job_id).state is JobState.COMPLETED
    assert [type(event).__name__ for event in again.store.load_events(job_id)][-2:] == ["Adopted", "Exited"]


@pytest.mark.parametrize("decide", [adopt, end])
def test_a_decision_that_does_not_fit_on_the_disk_is_not_taken(
    restored: Restored, decide: Callable[..., object]
) -> None:
    job_id = restored.before.submit()
    restored.before.run(job_id)
    restored.back_up()
    after = restored.restore()
    running = after.report(job_id, protocol.STARTED)
    after.welcome("n1", inventory=(running,))
    with full_disk(after), pytest.raises(UnavailableError):
        decide(after, "all")
    assert [view["job_id"] for view in strays.views(after.world)] == [job_id]
    after.welcome("n1", inventory=(running,))  # and not at the next connection either
    assert [view["job_id"] for view in strays.views(after.world)] == [job_id]
    assert after.sent(protocol.EndJob) == []
    adopt(after, "all")
    assert strays.views(after.world) == []


def test_an_adopted_job_is_ended_under_the_incarnation_that_it_has(restored: Restored) -> None:
    job_id = restored.before.submit()
    restored.before.run(job_id)
    restored.back_up()
    after = restored.restore()
    after.welcome("n1", inventory=(after.report(job_id, protocol.STARTED),))
    adopt(after, "all")
    after.ask(lambda tx: requests.cancel(tx, ROOT, [str(job_id)], {}))
    former = restored.before.world.incarnation
    assert [(to, order.incarnation) for to, order in after.sent(protocol.EndJob)] == [("n1", former)]
    after.says("n1", protocol.JobGone(incarnation=former, job_id=job_id, attempt=0))
    assert after.job(job_id).state is JobState.CANCELLED


def test_a_gang_is_adopted_with_its_parts(restored: Restored) -> None:
    job_id = restored.before.submit(nodes_min=2)
    part = protocol.Report(
        seq=2, token=claim_token(restored.before.job(job_id), NodeName("n2")), status=protocol.CLAIMED, at_s=1.0
    )
    restored.back_up()  # before the part was claimed and the job began
    restored.before.says("n2", part)
    restored.before.run(job_id)
    after = restored.restore()
    after.welcome("n1", inventory=(after.report(job_id, protocol.STARTED),))
    after.welcome("n2", inventory=(part,))
    assert len(strays.views(after.world)) == 2
    assert adopt(after, f"{restored.before.world.incarnation}.{job_id}") == [job_id]
    assert (after.job(job_id).state, after.job(job_id).claimed_nodes) == (JobState.RUNNING, ("n2",))
    assert after.sent(protocol.Launch) == []


def test_what_is_to_end_is_told_so_also_after_its_node_was_away_and_its_job_runs_again(restored: Restored) -> None:
    job_id = restored.before.submit(requeue=True)
    restored.before.run(job_id)
    restored.back_up()
    after = restored.restore()
    running = after.report(job_id, protocol.STARTED)
    after.welcome("n2")
    after.welcome("n1", inventory=(running,))
    end(after, running.token)
    former = restored.before.world.incarnation
    assert {order.incarnation for _, order in after.sent(protocol.EndJob)} == {former}
    after.welcome("n1", inventory=(running,))
    assert {order.incarnation for _, order in after.sent(protocol.EndJob)} == {former}
    after.says("n1", protocol.changed(running, status=protocol.ENDED, codes=[0], signals=[15]))
    after.says("n1", protocol.JobGone(incarnation=former, job_id=job_id, attempt=0))
    after.tick(60.0)
    assert after.job(job_id).state is JobState.CONFIGURING
    assert after.job(job_id).token.startswith(after.world.incarnation)
    assert not after.world.kept
    assert not after.world.doomed


def test_what_the_database_does_not_know_is_not_adopted_and_keeps_its_node_free_of_new_jobs(restored: Restored) -> None:
    restored.back_up()
    later = restored.before.submit()
    restored.before.run(later)
    running = restored.before.report(later, protocol.STARTED)
    after = restored.restore()
    after.welcome("n1", inventory=(running,))
    after.welcome("n2")
    with pytest.raises(RequestError, match="does not know this launch"):
        adopt(after, running.token)
    with pytest.raises(RequestError, match="does not know this launch"):
        adopt(after, "all")
    new = after.submit(cpus_per_task=2)
    assert [share.node for share in after.job(new).shares] == ["n2"]
    waits = after.submit()
    assert after.job(waits).state is JobState.PENDING
    after.says("n1", protocol.changed(running, status=protocol.ENDED, codes=[0], signals=[0]))
    after.says("n1", protocol.JobGone(incarnation=restored.before.world.incarnation, job_id=later, attempt=0))
    after.tick(1.0)
    assert [share.node for share in after.job(waits).shares] == ["n1"]


def test_what_waits_for_a_decision_is_shown_where_people_look(restored: Restored) -> None:
    known = restored.before.submit()
    restored.before.run(known)
    restored.back_up()
    later = restored.before.submit(nodelist=("n2",))
    restored.before.run(later)
    reports = {
        "n1": restored.before.report(known, protocol.STARTED),
        "n2": restored.before.report(later, protocol.STARTED),
    }
    after = restored.restore()
    for name, report in reports.items():
        after.welcome(name, inventory=(report,))
    assert "an admin decides whether it goes on: hctl strays" in after.backend().story(ROOT, str(known))["now"]
    blocked = {view["name"]: (view["state"], view["drained_why"]) for view in node_views(after.world, after.now_s)}
    why = "runs what was launched before the database was restored: hctl strays"
    assert blocked == {"n1": ("MIXED", ""), "n2": ("DRAINED", why)}
    adopt(after, str(reports["n1"].token))
    assert after.backend().story(ROOT, str(known))["now"] == f"job {known} is RUNNING"


def test_all_that_can_be_adopted_is_and_the_rest_waits_for_another_word(restored: Restored) -> None:
    known = restored.before.submit()
    restored.before.run(known)
    restored.back_up()
    later = restored.before.submit()
    restored.before.run(later)
    running = [restored.before.report(job_id, protocol.STARTED) for job_id in (later, known)]
    after = restored.restore()
    after.welcome("n1", inventory=tuple(running))
    assert adopt(after, "all") == [known]
    assert after.job(known).state is JobState.RUNNING
    assert [view["job_id"] for view in strays.views(after.world)] == [later]


def test_a_waiting_job_that_was_started_since_waits_for_the_decision(restored: Restored) -> None:
    job_id = restored.before.submit(hold=True)
    restored.back_up()
    restored.before.ask(lambda tx: requests.release(tx, ROOT, [str(job_id)]))
    restored.before.run(job_id)
    running = restored.before.report(job_id, protocol.STARTED)
    after = restored.restore()
    after.ask(lambda tx: requests.release(tx, ROOT, [str(job_id)]))
    after.welcome("n1", inventory=(running,))
    after.welcome("n2")
    assert after.world.waits[job_id].reason is Reason.NODE_LOST
    assert "hctl strays" in after.world.waits[job_id].detail
    with pytest.raises(RequestError, match="does not know this launch"):
        adopt(after, running.token)
    end(after, "all")
    after.says("n1", protocol.JobGone(incarnation=restored.before.world.incarnation, job_id=job_id, attempt=0))
    after.tick(1.0)
    assert after.job(job_id).state is JobState.CONFIGURING


def test_only_an_admin_decides_and_only_about_what_is_there(restored: Restored) -> None:
    restored.back_up()
    after = restored.restore()
    for verb in (strays.adopt, strays.end):
        with pytest.raises(PermissionDeniedError):
            after.ask(lambda tx, verb=verb: verb(tx, ANN, ["all"]))
        with pytest.raises(NotFoundError, match="see hctl strays"):
            after.ask(lambda tx, verb=verb: verb(tx, ROOT, ["1"]))
