"""A restore that asks: what runs from before goes on until an admin has it ended or adopted, by its whole token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import ANN, ROOT, Cluster, full_disk
from restored import Restored

from hpcnode.wire import protocol
from hpcsched.api.views import node_views
from hpcsched.controller.nodes import orphans
from hpcsched.controller.nodes.messages import claim_token
from hpcsched.controller.requests import jobs
from hpcsched.errors import NotFoundError, PermissionDeniedError, RequestError, UnavailableError
from hpcsched.lifecycle.events import Adopted
from hpcsched.model.ids import LaunchToken, NodeName
from hpcsched.model.job import JobState, Reason


@pytest.fixture
def restored(tmp_path: Path) -> Restored:
    return Restored(tmp_path, "ask")


def adopt(cluster: Cluster, *tokens: str) -> list[int]:
    found: list[int] = cluster.ask(lambda tx: orphans.adopt(tx, ROOT, tokens))
    return found


def end(cluster: Cluster, *tokens: str) -> None:
    cluster.controller.end_orphans(cluster.ask(lambda tx: orphans.end(tx, ROOT, tokens)))


def test_an_adopted_job_goes_on_as_it_runs_and_ends_as_itself(restored: Restored) -> None:
    job_id = restored.before.submit(cpus_per_task=2)
    restored.before.run(job_id)
    restored.back_up()
    after = restored.restore()
    running = after.report(job_id, protocol.STARTED)
    after.welcome("n1", inventory=(running,))
    after.welcome("n2")
    assert after.sent(protocol.EndJob) == []
    (seen,) = orphans.views(after.state)
    assert (seen["token"], seen["node"], seen["job_id"], seen["adoptable"]) == (running.token, "n1", job_id, True)
    assert adopt(after, running.token) == [job_id]
    assert orphans.views(after.state) == []
    after.store.close()

    again = restored.start()  # the word is on disk
    again.welcome("n1", inventory=(running,))
    assert (again.job(job_id).state, orphans.views(again.state)) == (JobState.RUNNING, [])
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
    assert [view["job_id"] for view in orphans.views(after.state)] == [job_id]
    after.welcome("n1", inventory=(running,))  # and not at the next connection either
    assert [view["job_id"] for view in orphans.views(after.state)] == [job_id]
    assert after.sent(protocol.EndJob) == []
    adopt(after, "all")
    assert orphans.views(after.state) == []


def test_an_adopted_job_is_ended_under_the_incarnation_that_it_has(restored: Restored) -> None:
    job_id = restored.before.submit()
    restored.before.run(job_id)
    restored.back_up()
    after = restored.restore()
    after.welcome("n1", inventory=(after.report(job_id, protocol.STARTED),))
    adopt(after, "all")
    after.ask(lambda tx: jobs.cancel(tx, ROOT, [str(job_id)], {}))
    former = restored.before.state.incarnation
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
    assert len(orphans.views(after.state)) == 2
    assert adopt(after, f"{restored.before.state.incarnation}.{job_id}") == [job_id]
    assert (after.job(job_id).state, after.job(job_id).claimed_nodes) == (JobState.RUNNING, ("n2",))
    assert after.sent(protocol.Launch) == []


def test_an_orphan_to_end_is_told_so_after_its_node_was_away_and_its_job_restarted(restored: Restored) -> None:
    job_id = restored.before.submit(requeue=True)
    restored.before.run(job_id)
    restored.back_up()
    after = restored.restore()
    running = after.report(job_id, protocol.STARTED)
    after.welcome("n2")
    after.welcome("n1", inventory=(running,))
    end(after, running.token)
    former = restored.before.state.incarnation
    assert {order.incarnation for _, order in after.sent(protocol.EndJob)} == {former}
    after.welcome("n1", inventory=(running,))
    assert {order.incarnation for _, order in after.sent(protocol.EndJob)} == {former}
    after.says("n1", protocol.changed(running, status=protocol.ENDED, codes=[0], signals=[15]))
    after.says("n1", protocol.JobGone(incarnation=former, job_id=job_id, attempt=0))
    after.tick(60.0)
    assert after.job(job_id).state is JobState.CONFIGURING
    assert after.job(job_id).token.startswith(after.state.incarnation)
    assert not after.state.undecided_launches
    assert not after.state.to_kill


def test_an_unknown_launch_is_not_adopted_and_keeps_new_jobs_off_its_node(restored: Restored) -> None:
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
    after.says("n1", protocol.JobGone(incarnation=restored.before.state.incarnation, job_id=later, attempt=0))
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
    assert "an admin decides whether it continues: hctl strays" in after.backend().story(ROOT, str(known))["now"]
    blocked = {view["name"]: (view["state"], view["drained_why"]) for view in node_views(after.state, after.now_s)}
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
    assert [view["job_id"] for view in orphans.views(after.state)] == [later]


def test_a_waiting_job_that_was_started_since_waits_for_the_decision(restored: Restored) -> None:
    job_id = restored.before.submit(hold=True)
    restored.back_up()
    restored.before.ask(lambda tx: jobs.release(tx, ROOT, [str(job_id)]))
    restored.before.run(job_id)
    running = restored.before.report(job_id, protocol.STARTED)
    after = restored.restore()
    after.ask(lambda tx: jobs.release(tx, ROOT, [str(job_id)]))
    after.welcome("n1", inventory=(running,))
    after.welcome("n2")
    assert after.state.waits[job_id].reason is Reason.NODE_LOST
    assert "hctl strays" in after.state.waits[job_id].detail
    with pytest.raises(RequestError, match="does not know this launch"):
        adopt(after, running.token)
    end(after, "all")
    after.says("n1", protocol.JobGone(incarnation=restored.before.state.incarnation, job_id=job_id, attempt=0))
    after.tick(1.0)
    assert after.job(job_id).state is JobState.CONFIGURING


def test_only_an_admin_decides_and_only_about_what_is_there(restored: Restored) -> None:
    restored.back_up()
    after = restored.restore()
    for verb in (orphans.adopt, orphans.end):
        with pytest.raises(PermissionDeniedError):
            after.ask(lambda tx, verb=verb: verb(tx, ANN, ["all"]))
        with pytest.raises(NotFoundError, match="see hctl strays"):
            after.ask(lambda tx, verb=verb: verb(tx, ROOT, ["1"]))


def test_what_the_backup_knows_is_adopted_by_itself_and_the_rest_is_asked_about(tmp_path: Path) -> None:
    restored = Restored(tmp_path, "adopt")
    known = restored.before.submit()
    restored.before.run(known)
    gang = restored.before.submit(nodes_min=2, nodes_max=2, nodes_given=True)
    restored.before.tick()
    for name in ("n1", "n2"):
        claim = claim_token(restored.before.job(gang), NodeName(name))
        if restored.before.job(gang).shares[0].node != name:
            claimed = protocol.Report(seq=1, token=claim, status=protocol.CLAIMED, at_s=0.0)
            restored.before.says(name, claimed)
            other = name
    restored.before.run(gang)
    restored.back_up()
    later = restored.before.submit(nodelist=("n2",))
    restored.before.tick()
    restored.before.run(later)
    unknown = restored.before.report(later, protocol.STARTED)
    after = restored.restore()
    mine = [after.report(known, protocol.STARTED), after.report(gang, protocol.STARTED)]
    inventory: dict[str, list[protocol.Report]] = {"n1": [], "n2": [unknown]}
    inventory[other].append(claimed)
    for report in mine:
        inventory[read_node(report.token)].append(report)
    for name in ("n2", "n1"):
        after.welcome(name, inventory=tuple(inventory[name]))
    assert [after.job(job).state for job in (known, gang)] == [JobState.RUNNING] * 2
    assert [view["job_id"] for view in orphans.views(after.state)] == [later]
    assert after.sent(protocol.EndJob) == []
    for job in (known, gang):
        adopted = next(event for event in after.store.load_events(job) if isinstance(event, Adopted))
        assert adopted.by_uid is None
        assert after.replayed(job) == after.job(job)


def read_node(token: str) -> str:
    return str(LaunchToken.parse(token).node)


def test_a_job_that_was_being_ended_is_not_adopted_and_ends(tmp_path: Path) -> None:
    restored = Restored(tmp_path, "adopt")
    job_id = restored.before.submit()
    restored.before.run(job_id)
    restored.before.ask(lambda tx: jobs.cancel(tx, ROOT, [str(job_id)], {}))
    restored.back_up()
    after = restored.restore()
    after.welcome("n1", inventory=(after.report(job_id, protocol.STARTED),))
    assert after.job(job_id).state is JobState.COMPLETING
    assert after.sent(protocol.EndJob) != []
    assert orphans.views(after.state) == []


def test_a_suspended_job_is_adopted(tmp_path: Path) -> None:
    restored = Restored(tmp_path, "adopt")
    job_id = restored.before.submit()
    restored.before.run(job_id)
    restored.before.ask(lambda tx: jobs.suspend(tx, ROOT, [str(job_id)]))
    restored.back_up()
    after = restored.restore()
    after.welcome("n1", inventory=(after.report(job_id, protocol.STARTED),))
    assert after.job(job_id).state is JobState.SUSPENDED
    assert orphans.views(after.state) == []
    assert after.sent(protocol.SuspendJob) != []


def test_a_waiting_job_waits_after_a_restart_for_the_node_that_runs_it_from_before(restored: Restored) -> None:
    job_id = restored.before.submit(hold=True)
    restored.back_up()
    restored.before.ask(lambda tx: jobs.release(tx, ROOT, [str(job_id)]))
    restored.before.run(job_id)
    running = restored.before.report(job_id, protocol.STARTED)
    after = restored.restore()
    after.ask(lambda tx: jobs.release(tx, ROOT, [str(job_id)]))
    after.welcome("n1", inventory=(running,))
    after.welcome("n2")
    assert "hctl strays" in after.state.waits[job_id].detail
    after.store.close()
    again = restored.start()
    again.welcome("n2")
    again.tick(1.0)
    assert again.job(job_id).state is JobState.PENDING
    assert again.state.waits[job_id].reason is Reason.NODE_LOST
    again.welcome("n1")  # it has ended meanwhile
    assert again.job(job_id).state is JobState.CONFIGURING
    assert not again.state.nodes[NodeName("n1")].has_orphans


def test_a_node_that_runs_something_from_before_cannot_be_led_elsewhere(restored: Restored) -> None:
    spool = {"id": "s1", "machine": "m1", "inode": 1, "hardware": []}
    restored.before.welcome("n1", facts={"spool": spool})
    job_id = restored.before.submit(hold=True)
    restored.back_up()
    restored.before.ask(lambda tx: jobs.release(tx, ROOT, [str(job_id)]))
    restored.before.run(job_id)
    running = restored.before.report(job_id, protocol.STARTED)
    after = restored.restore()
    after.ask(lambda tx: jobs.release(tx, ROOT, [str(job_id)]))
    assert not after.welcome("n1", inventory=(running,), facts={"spool": spool})
    after.welcome("n2")
    after.controller.node_redialled(NodeName("n1"), "its description was changed")
    assert "another spool answers" in after.welcome("n1", facts={"spool": spool | {"id": "s2"}})
    after.tick(60.0)
    assert after.job(job_id).state is JobState.PENDING
    after.controller.node_down(NodeName("n1"), "gone")
    after.ask(lambda tx: jobs.fence(tx, ROOT, "n1", ""))
    assert not after.welcome("n1", facts={"spool": spool | {"id": "s2"}})
    after.tick(60.0)
    assert after.job(job_id).state is JobState.CONFIGURING
