"""The controller, tick by tick: commit before answer before action, reports matched by token, recovery by the same path."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster import ANN, BOB, ROOT, Cluster
from jobs import T0, spec

from hpcnode.wire import protocol
from hpcsched.api import connection_limits
from hpcsched.api.views import how_it_ended
from hpcsched.controller.recovery import load_state
from hpcsched.controller.requests import jobs, submission
from hpcsched.controller.requests.submission import jobs_again
from hpcsched.errors import NotFoundError, PermissionDeniedError, RequestError, UnavailableError
from hpcsched.model.ids import NodeName
from hpcsched.model.job import Hold, JobState, Reason
from hpcsched.model.node import Link, Partition
from hpcsched.model.spec import ArraySpec, JobSpec
from hpcsched.sched.place.feasible import impossible_shape
from hpcsched.sched.place.request import Shape
from hpcsched.sched.snapshot import NodeView
from hpcsched.state.transaction import Transaction
from hpcsched.store.store import HistoryQuery


def test_a_job_is_queued_launched_and_over() -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit()
    ((to, launch),) = cluster.sent(protocol.Launch)
    assert (to, launch.job_id, launch.attempt, launch.step) == ("n1", job_id, 0, "batch")
    assert cluster.job(job_id).state is JobState.CONFIGURING
    cluster.run(job_id)
    assert cluster.job(job_id).state is JobState.RUNNING
    cluster.end(job_id, code=3)
    assert (cluster.job(job_id).state, str(cluster.job(job_id).exit)) == (JobState.FAILED, "3:0")
    assert [ack.seqs for _, ack in cluster.sent(protocol.Ack)] == [[1], [1]]


def test_the_row_is_on_disk_before_a_byte_goes_to_a_node() -> None:
    cluster = Cluster("n1")
    seen: list[str] = []
    commit = cluster.store.commit
    cluster.store.commit = lambda batch: (commit(batch), seen.append("commit"))[0]  # type: ignore[method-assign]
    send = cluster.ports.send
    cluster.ports.send = lambda *a: (seen.append(type(a[1]).__name__), send(*a))[1]  # type: ignore[method-assign]
    cluster.submit()
    assert seen == ["commit", "Launch"]


def test_a_failed_commit_leaves_nothing_behind_and_is_answered() -> None:
    cluster = Cluster("n1")

    def fail(batch: object) -> None:
        raise UnavailableError("cannot write the database: disk full")

    commit, cluster.store.commit = cluster.store.commit, fail  # type: ignore[method-assign,assignment]
    with pytest.raises(UnavailableError, match="disk full"):
        cluster.submit()
    assert not cluster.state.jobs
    assert not cluster.sent(protocol.Launch)
    cluster.store.commit = commit  # type: ignore[method-assign]
    assert cluster.submit() == 1


def test_requests_that_come_together_share_a_commit_and_a_refused_one_spoils_none() -> None:
    cluster = Cluster("n1")
    commits: list[int] = []
    commit = cluster.store.commit
    cluster.store.commit = lambda batch: (commit(batch), commits.append(1))[0]  # type: ignore[method-assign]
    answers: list[object] = []
    for fields in ({}, {"nodes_min": 9}, {}):
        one = spec(**fields)
        cluster.controller.ask(
            lambda tx, one=one: submission.submit(tx, ANN, "", [one], cluster.store.request_jobs), answers.append
        )
    cluster.tick()
    assert commits == [1]
    assert [type(answer).__name__ for answer in answers] == ["list", "RequestError", "list"]
    assert sorted(cluster.state.jobs) == [1, 2]


def test_a_job_that_can_never_run_is_refused_with_the_numbers() -> None:
    with pytest.raises(RequestError, match="nine nodes: partition 'main' has 3"):
        Cluster("n1", "n2", "n3").submit(nodes_min=9)


def test_of_many_jobs_one_that_is_refused_is_told_by_its_number_and_none_is_queued() -> None:
    cluster = Cluster("n1")
    specs = [spec(), spec(), spec(cpus_per_task=99), spec()]
    with pytest.raises(RequestError) as caught:
        cluster.ask(lambda tx: submission.submit(tx, ANN, "many", specs, cluster.store.request_jobs))
    assert caught.value.at == 2
    assert not cluster.state.jobs
    assert cluster.store.request_jobs(ANN.uid, "many") is None


def test_jobs_of_one_request_that_ask_for_the_same_are_tried_on_the_nodes_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, tried = Cluster("n1", "n2"), []

    def counted(shape: Shape, nodes: list[NodeView], partition: Partition) -> str | None:
        tried.append(shape.cpus_least)
        return impossible_shape(shape, nodes, partition)

    monkeypatch.setattr(submission, "impossible_shape", counted)
    specs = [spec(name=f"j{at}", cpus_per_task=1 + at % 2, time_limit_s=60 + at, hold=True) for at in range(40)]
    cluster.ask(lambda tx: submission.submit(tx, ANN, "", specs, cluster.store.request_jobs))
    assert len(cluster.state.pending) == 40
    assert sorted(tried) == [1, 2]


def test_nodes_are_looked_through_in_slices_before_the_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, tried, turns = Cluster("n1", "n2"), [], []

    def counted(shape: Shape, nodes: list[NodeView], partition: Partition) -> str | None:
        tried.append(len(tried))
        return impossible_shape(shape, nodes, partition)

    async def look(specs: list[JobSpec]) -> submission.PartitionLooks:
        looking = asyncio.create_task(submission.looked_at(cluster.state, ANN, specs, T0))
        while not looking.done():
            turns.append(len(tried))
            await asyncio.sleep(0)
        return await looking

    monkeypatch.setattr(submission, "impossible_shape", counted)
    monkeypatch.setattr(connection_limits, "SLICE_S", -1.0)
    specs = [spec(name=f"j{at}", cpus_per_task=1 + at % 2, nodes_min=1 + at // 2, hold=True) for at in range(4)]
    looks = asyncio.run(look(specs))
    assert set(turns) >= {1, 2, 3}
    cluster.ask(lambda tx: submission.submit(tx, ANN, "", specs, cluster.store.request_jobs, looks))
    assert (tried, len(cluster.state.pending)) == ([0, 1, 2, 3], 4)
    cluster.state.config = replace(cluster.state.config, name="other")
    cluster.ask(lambda tx: submission.submit(tx, ANN, "", specs[:1], cluster.store.request_jobs, looks))
    assert tried == [0, 1, 2, 3, 4]


def test_a_request_that_comes_twice_at_once_makes_one_job_and_hinders_nobody() -> None:
    cluster = Cluster("n1")
    answers: list[Any] = []
    for request_id in ("r1", "r1", "r2"):

        def work(tx: Transaction, request_id: str = request_id) -> Any:
            return submission.submit(tx, ANN, request_id, [spec()], cluster.store.request_jobs)

        cluster.controller.ask(work, answers.append)
    cluster.tick()
    assert [answer[0]["job_id"] for answer in answers] == [1, 1, 2]
    assert cluster.submit(request_id="r1") == 1


def test_the_same_request_id_gives_the_same_job() -> None:
    cluster = Cluster("n1")
    assert cluster.submit(request_id="r1") == cluster.submit(request_id="r1") == 1
    assert cluster.submit(BOB, request_id="r1") == 2


def test_a_request_id_that_comes_again_for_another_job_is_refused_with_what_differs() -> None:
    cluster = Cluster("n1")
    cluster.submit(request_id="r1", script="#!/bin/sh\n")
    with pytest.raises(RequestError, match="'r1': it has already made job 1, which differs in its script, nodes_min"):
        cluster.submit(request_id="r1", script="#!/bin/sh\nid\n", nodes_min=2)
    two = [spec(script="#!/bin/sh\n"), spec()]
    with pytest.raises(RequestError, match="it has already made job 1, and 2 are asked for now"):
        cluster.ask(lambda tx: submission.submit(tx, ANN, "r1", two, cluster.store.request_jobs))
    assert list(cluster.state.jobs) == [1]


def test_where_and_when_a_command_ran_makes_no_other_job_of_it() -> None:
    cluster = Cluster("n1")
    tasks = ArraySpec(indices=(1, 2, 3))
    first = cluster.submit(request_id="r1", array=tasks, begin_at_s=int(T0) + 60, env=(("SHLVL", "1"),))
    again = spec(array=tasks, begin_at_s=int(T0) + 61, env=(("SHLVL", "2"),), submit_dir="/tmp", script_path="/tmp/x")
    answer = cluster.ask(lambda tx: submission.submit(tx, ANN, "r1", [again], cluster.store.request_jobs))
    assert answer == [{"job_id": first, "tasks": 3}]


def test_a_repeated_request_finds_the_job_that_got_its_account_from_the_config() -> None:
    made = {7: spec(account="lab", qos="normal")}
    assert jobs_again("r1", made, [spec()]) == [{"job_id": 7, "tasks": 1}]
    with pytest.raises(RequestError, match="differs in its account"):
        jobs_again("r1", made, [spec(account="other")])


def test_a_jobs_story_names_people_and_ends_with_how_the_job_did() -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit(hold=True)
    cluster.ask(lambda tx: jobs.release(tx, ROOT, [str(job_id)]))
    cluster.run(job_id)
    cluster.end(job_id, code=3)
    story = cluster.backend().story(ANN, str(job_id))
    assert "released by root" in [event["text"] for event in story["events"]]
    assert story["now"] == f"job {job_id} is FAILED: its script ended with exit code 3"


def test_of_a_job_that_could_not_be_started_nobody_says_that_its_script_has_ended() -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit()
    cluster.says("n1", cluster.report(job_id, protocol.REFUSED, why="cannot open output file /x: Permission denied"))
    story = cluster.backend().story(ANN, str(job_id))
    assert story["events"][-1]["text"] == "n1 could not start it: cannot open output file /x: Permission denied"
    assert story["now"] == f"job {job_id} is FAILED: it could not be started"


def test_a_report_with_an_old_token_changes_nothing() -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit()
    cluster.run(job_id)
    old = cluster.report(job_id, protocol.ENDED, codes=[0], signals=[0])
    cluster.ask(lambda tx: jobs.requeue(tx, ROOT, [str(job_id)]))
    cluster.gone(job_id, "n1")
    cluster.tick(after_s=1000)
    assert (cluster.job(job_id).state, cluster.job(job_id).attempt) == (JobState.CONFIGURING, 1)
    cluster.sent(protocol.Ack)
    cluster.says("n1", old)
    assert cluster.job(job_id).state is JobState.CONFIGURING
    assert cluster.sent(protocol.Ack) == [("n1", protocol.Ack(seqs=[1]))]


def test_a_stray_attempt_is_ended_and_another_node_s_word_is_not_taken() -> None:
    cluster = Cluster("n1", "n2")
    job_id = cluster.submit()
    started = cluster.report(job_id, protocol.STARTED)
    cluster.says("n2", started)
    assert cluster.job(job_id).state is JobState.CONFIGURING
    stray = protocol.changed(started, token=started.token.replace(f".{job_id}.0.", ".77.4."))
    cluster.says("n1", stray)
    assert cluster.sent(protocol.EndJob)[0][1].job_id == 77


def test_cancelling_ends_a_waiting_job_at_once_and_clears_the_nodes_of_a_running_one() -> None:
    cluster = Cluster("n1", "n2")
    job_id = cluster.submit(nodes_min=2)
    waiting = cluster.submit(nodes_min=2, ntasks=4)
    cluster.run(job_id)
    outcome = cluster.ask(lambda tx: jobs.cancel(tx, ANN, [str(job_id), str(waiting), "99"], {}))
    assert outcome.jobs == [job_id, waiting]
    assert outcome.errors[0]["error"] == "Invalid job id specified: 99"
    assert cluster.job(waiting).state is JobState.CANCELLED
    assert sorted(to for to, _ in cluster.sent(protocol.EndJob)) == ["n1", "n2"]
    cluster.gone(job_id, "n2")
    assert cluster.job(job_id).state is JobState.COMPLETING
    cluster.end(job_id, code=1)
    assert cluster.job(job_id).state is JobState.CANCELLED


def test_cancelling_an_array_that_is_partly_over_ends_the_rest() -> None:
    cluster = Cluster("n1")
    array = cluster.submit(array=ArraySpec(indices=(1, 2, 3), limit=1))
    cluster.run(array)
    cluster.end(array)
    outcome = cluster.ask(lambda tx: jobs.cancel(tx, ANN, [str(array)], {}))
    assert (outcome.jobs, outcome.errors) == ([array + 1, array + 2], [])
    again = cluster.ask(lambda tx: jobs.cancel(tx, ANN, [f"{array}_1", f"{array}.0"], {}))
    assert ["already ended" in again.errors[0]["error"], "Invalid job id" in again.errors[1]["error"]] == [True, True]


def test_people_act_on_their_own_jobs_and_admins_on_all() -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit()
    refused = cluster.ask(lambda tx: jobs.cancel(tx, BOB, [str(job_id)], {}))
    assert refused.errors[0]["kind"] == PermissionDeniedError.__name__
    assert not cluster.ask(lambda tx: jobs.cancel(tx, BOB, [], {"user": "ann"})).jobs
    assert cluster.ask(lambda tx: jobs.cancel(tx, ROOT, [str(job_id)], {})).jobs == [job_id]


@pytest.mark.parametrize("fields", [{"priority": 1_000_000}, {"nice": -1}])
def test_only_admins_put_a_job_before_those_of_others(fields: dict[str, int]) -> None:
    cluster = Cluster("n1")
    with pytest.raises(PermissionDeniedError, match="this needs the role operator or admin; you are ann"):
        cluster.submit(**fields)
    assert cluster.submit(ROOT, **fields) == 1
    assert cluster.submit(nice=5, priority=0) == 2


def test_a_hold_by_an_admin_is_not_released_by_the_user() -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit(hold=True)
    cluster.ask(lambda tx: jobs.hold(tx, ROOT, [str(job_id)]))
    assert cluster.job(job_id).hold is Hold.ADMIN
    assert cluster.ask(lambda tx: jobs.release(tx, ANN, [str(job_id)])).errors
    cluster.ask(lambda tx: jobs.release(tx, ROOT, [str(job_id)]))
    assert cluster.job(job_id).state is JobState.CONFIGURING


def test_a_node_that_does_not_answer_keeps_its_job_until_there_is_proof() -> None:
    cluster = Cluster("n1", "n2")
    job_id = cluster.submit()
    cluster.run(job_id)
    cluster.controller.node_down(NodeName("n1"), "connection lost")
    cluster.tick(after_s=3600 * 24)
    assert cluster.state.nodes[NodeName("n1")].link is Link.DOWN
    assert cluster.job(job_id).state is JobState.RUNNING
    cluster.ask(lambda tx: jobs.fence(tx, ROOT, "n1", "it burnt"))
    assert (cluster.job(job_id).state, cluster.job(job_id).attempt) == (JobState.PENDING, 1)
    assert "it burnt" in cluster.job(job_id).reason_detail


def test_a_node_that_answers_is_not_fenced_for_what_it_runs_would_run_twice() -> None:
    cluster = Cluster("n1", "n2")
    job_id = cluster.submit()
    cluster.run(job_id)
    cluster.controller.node_down(NodeName("n2"), "connection lost")
    cluster.tick()
    with pytest.raises(RequestError, match="cannot fence node n1: it answers"):
        cluster.ask(lambda tx: jobs.fence(tx, ROOT, "n[1-2]", "wrong plug"))
    assert (cluster.job(job_id).state, cluster.job(job_id).attempt) == (JobState.RUNNING, 0)


@pytest.mark.parametrize(
    ("requeue", "became"), [(True, "job 1 goes back to the queue"), (False, "job 1 has ended as NODE_FAIL")]
)
def test_who_fences_a_node_is_told_what_becomes_of_each_job(requeue: bool, became: str) -> None:
    cluster = Cluster("n1", "n2")
    alone = cluster.submit(requeue=requeue)
    cluster.run(alone)
    gang = cluster.submit(nodes_min=2, requeue=requeue)
    cluster.run(gang)
    cluster.controller.node_down(NodeName("n1"), "connection lost")
    cluster.tick()
    answer = cluster.ask(lambda tx: jobs.fence(tx, ROOT, "n1", "it burnt")).as_json()
    rest = "goes back to the queue" if requeue else "ends as NODE_FAIL"
    assert answer["jobs"] == [alone, gang]
    assert answer["became"] == [became, f"job {gang} {rest} when its other nodes are clear"]


def test_a_rebooted_node_sends_its_job_back_to_the_queue() -> None:
    cluster = Cluster("n1", "n2")
    job_id = cluster.submit(nodes_min=2)
    cluster.run(job_id)
    cluster.welcome("n2", boot_id="boot-2")
    assert cluster.job(job_id).state is JobState.COMPLETING
    cluster.gone(job_id, "n1")
    assert (cluster.job(job_id).state, cluster.job(job_id).attempt) == (JobState.PENDING, 1)


@pytest.mark.parametrize("silent_first", [True, False])
def test_a_script_that_fails_while_a_node_is_away_runs_again(silent_first: bool) -> None:
    cluster = Cluster("n1", "n2")
    job_id = cluster.submit(nodes_min=2)
    cluster.run(job_id)
    if not silent_first:
        cluster.end(job_id, code=1)
    cluster.controller.node_down(NodeName("n2"), "cable")
    cluster.tick()
    if silent_first:
        cluster.end(job_id, code=1)
    assert cluster.job(job_id).state is JobState.COMPLETING
    cluster.welcome("n2")
    cluster.gone(job_id, "n2")
    assert cluster.job(job_id).attempt == 1


def test_a_node_that_lost_its_record_loses_the_job_and_a_missed_launch_is_repeated() -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit()
    cluster.sent(protocol.Launch)
    cluster.welcome("n1")
    assert [launch.token for _, launch in cluster.sent(protocol.Launch)] == [cluster.job(job_id).token]
    cluster.run(job_id)
    cluster.welcome("n1")
    assert cluster.job(job_id).attempt == 1
    assert "no record" in cluster.job(job_id).reason_detail


def test_after_a_restart_the_same_job_goes_on(tmp_path: Path) -> None:
    before = Cluster("n1", path=tmp_path / "h.db")
    running, waiting = before.submit(), before.submit(ntasks=2)
    before.run(running)
    report = before.report(running, protocol.STARTED)
    before.store.close()
    after = Cluster("n1", path=tmp_path / "h.db", up=False)
    load_state(after.state, after.store, after.now_s)
    assert after.job(running) == before.job(running)
    assert after.state.epoch == before.state.epoch + 1
    after.welcome("n1", inventory=(report,))
    assert after.job(running).state is JobState.RUNNING
    assert not after.sent(protocol.EndJob)
    after.end(running)
    assert [after.job(number).state for number in (running, waiting)] == [JobState.COMPLETED, JobState.CONFIGURING]


def test_an_array_runs_no_more_tasks_at_once_than_it_may() -> None:
    cluster = Cluster("n1", "n2")
    job_id = cluster.submit(array=ArraySpec(indices=(1, 2, 3), limit=2))
    states = [cluster.job(job_id + i).state for i in range(3)]
    assert states == [JobState.CONFIGURING, JobState.CONFIGURING, JobState.PENDING]
    assert cluster.state.waits[cluster.job(job_id + 2).id].reason is Reason.ARRAY_LIMIT


def test_a_begin_time_wakes_the_planner() -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit(begin_at_s=int(cluster.now_s) + 100)
    assert cluster.job(job_id).state is JobState.PENDING
    assert cluster.ports.wakes[-1] == pytest.approx(100, abs=1)
    cluster.tick(after_s=101)
    assert cluster.job(job_id).state is JobState.CONFIGURING


def test_an_allocation_without_a_script_runs_at_once_and_ends_at_its_limit() -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit(script="", time_limit_s=60)
    assert cluster.job(job_id).state is JobState.RUNNING
    assert not cluster.sent(protocol.Launch)
    cluster.tick(after_s=61)
    assert cluster.job(job_id).state is JobState.COMPLETING
    cluster.gone(job_id, "n1")
    assert cluster.job(job_id).state is JobState.TIMEOUT


def test_a_drained_node_gets_no_new_job_and_a_health_check_resumes_only_its_own() -> None:
    cluster = Cluster("n1")
    cluster.ask(lambda tx: jobs.drain(tx, ROOT, "n1", "new fan", ""))
    job_id = cluster.submit()
    assert cluster.job(job_id).state is JobState.PENDING
    assert cluster.ask(lambda tx: jobs.resume_nodes(tx, ROOT, "n1", "hhealth")) == []
    cluster.ask(lambda tx: jobs.resume_nodes(tx, ROOT, "n1", ""))
    assert cluster.job(job_id).state is JobState.CONFIGURING
    with pytest.raises(PermissionDeniedError):
        cluster.ask(lambda tx: jobs.drain(tx, ANN, "n1", "mine", ""))
    with pytest.raises(NotFoundError, match="Invalid node name"):
        cluster.ask(lambda tx: jobs.drain(tx, ROOT, "n7", "x", ""))


def test_a_job_that_exits_with_75_is_queued_again_if_it_was_submitted_with_requeue() -> None:
    cluster = Cluster("n1")
    again, not_again = cluster.submit(requeue=True), cluster.submit()
    for job_id in (again, not_again):
        cluster.run(job_id)
        cluster.end(job_id, code=75)
    assert (cluster.job(again).attempt, cluster.job(not_again).state) == (1, JobState.FAILED)


def test_old_ends_are_forgotten_in_memory_and_kept_on_disk() -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit()
    cluster.run(job_id)
    cluster.end(job_id)
    cluster.tick(after_s=100_000)
    assert job_id not in cluster.state.jobs
    assert cluster.store.history(HistoryQuery(job_ids=(job_id,)))[0].state is JobState.COMPLETED


def test_a_job_that_starts_as_its_last_node_comes_asks_all_to_claim_their_part() -> None:
    cluster = Cluster("n1", "n2")
    cluster.controller.node_down(NodeName("n1"), "off")
    job_id = cluster.submit(nodes_min=2)
    assert cluster.job(job_id).state is JobState.PENDING
    cluster.welcome("n1")
    assert cluster.job(job_id).state is JobState.CONFIGURING
    assert [(node, message.step) for node, message in cluster.sent(protocol.Launch)] == [("n2", "alloc")]


def test_the_script_of_an_attempt_that_is_queued_again_has_ended_in_its_row() -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit()
    cluster.run(job_id)
    cluster.ask(lambda tx: jobs.requeue(tx, ROOT, [str(job_id)]))
    cluster.end(job_id)
    assert cluster.job(job_id).state is JobState.PENDING
    assert [(step.attempt, step.state) for step in cluster.store.load_steps([job_id])] == [(0, "CANCELLED")]


@pytest.mark.parametrize(
    ("report", "text"),
    [
        ({"codes": [7], "signals": [0]}, ": its script ended with exit code 7"),
        ({"codes": [0], "signals": [9]}, ": its script was killed by SIGKILL; perhaps memory ran out"),
        ({"codes": [0], "signals": [15], "timed_out": True}, ": its time limit of 1:00 was reached"),
        ({"codes": [0], "signals": [9], "out_of_memory": True}, ": it took more memory than the 100M"),
        ({"codes": [0], "signals": [0]}, ""),
    ],
)
def test_how_a_job_ended_is_told_with_its_numbers(report: dict[str, Any], text: str) -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit(time_limit_s=60, mem_per_node_mib=100)
    cluster.run(job_id)
    cluster.says("n1", cluster.report(job_id, protocol.ENDED, **report))
    told = how_it_ended(cluster.job(job_id))
    assert told[: len(text) or None] == text


def test_a_begin_time_comes_although_the_clock_was_set_back() -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit(begin_at_s=int(cluster.now_s) + 10)
    cluster.now_s -= 100.0
    cluster.ports.wakes.clear()
    cluster.tick(10.0)  # the timer of before rings
    assert cluster.ports.wakes == [100.0]
    cluster.tick(100.0)
    assert cluster.job(job_id).state is JobState.CONFIGURING


def test_what_runs_on_a_node_that_the_job_does_not_hold_any_more_is_ended() -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit(requeue=False)
    cluster.run(job_id)
    running = cluster.report(job_id, protocol.STARTED)
    cluster.controller.node_down(NodeName("n1"), "connection lost")
    cluster.tick()
    cluster.ask(lambda tx: jobs.fence(tx, ROOT, "n1", "burnt, they say"))
    assert cluster.job(job_id).state is JobState.NODE_FAIL
    cluster.welcome("n1", inventory=(running,))
    assert [(to, order.job_id) for to, order in cluster.sent(protocol.EndJob)] == [("n1", job_id)]


def test_the_events_of_a_node_replay_to_its_state() -> None:
    cluster = Cluster("n1")
    cluster.ask(lambda tx: jobs.drain(tx, ROOT, "n1", "new disk", ""))
    cluster.controller.node_down(NodeName("n1"), "no answer")
    cluster.tick(5.0)
    cluster.controller.node_down(NodeName("n1"), "no route")
    cluster.tick(5.0)
    cluster.ask(lambda tx: jobs.resume_nodes(tx, ROOT, "n1", ""))
    cluster.welcome("n1", boot_id="boot-2")
    events = [type(event).__name__ for event in cluster.store.load_node_events("n1")]
    assert events == ["NodeUp", "NodeDrained", "NodeDown", "NodeDown", "NodeResumed", "NodeUp"]
    assert cluster.replayed_node("n1") == cluster.state.nodes[NodeName("n1")]
