"""The step service in a small world: two nodes of four cpus, everything it says is collected."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from step_bench import ADMIN, ANN, BOB, HRUN, N1, N2, SECOND, THIRD, StepBench, a_job, a_request, gos, inventory

from hpcnode.wire import protocol
from hpcsched.errors import ProtocolError, RequestError
from hpcsched.model.ids import JobId
from hpcsched.model.job import ExitStatus, JobState
from hpcsched.model.node import GpuRequest
from hpcsched.state.transaction import StepRecord
from hpcsched.steps.request import read_allocation
from hpcsched.steps.service import HEAD, MOST_STEPS, Origin, StepPlan

# ----- a step from its request to its end


def test_e1_a_job_has_a_bounded_number_of_steps() -> None:
    """Each is a row for ever, and whoever looks at the job's history has all of them in memory."""
    bench = StepBench()
    last = str(MOST_STEPS - 2)
    bench.rows[(12, 0, last)] = StepRecord(
        job_id=12, attempt=0, step=last, name="", nodes=(), ntasks=1, state="COMPLETED"
    )
    assert bench.asks(nodes="1").step == MOST_STEPS - 1
    assert f"it has had {MOST_STEPS} steps" in bench.asks(nodes="1", origin=SECOND).error


def test_a_step_is_launched_on_all_its_nodes() -> None:
    bench = StepBench()
    started = bench.asks(ntasks="5", argv="/opt/prog -x", output="%x/%4s.%j.%J.%u.%t.%n.%N.%%", label=True)
    (node1, first), (node2, second) = bench.launches()
    assert (node1, node2) == (N1, N2)
    assert started == protocol.StepStarted(job_id=12, step=0, tasks=[(N1, 0, 4, first.token), (N2, 4, 1, second.token)])
    assert first.argv == ["/opt/prog", "-x"]
    assert (first.tasks, second.tasks) == (protocol.TaskSet(0, 4, 5, 0, 2), protocol.TaskSet(4, 1, 5, 1, 2))
    assert (first.cpus, second.cpus, second.mem_mib, second.gpus) == (4, 1, 1000, [0, 1])
    assert (first.user, first.epoch, first.attempt, first.step) == ("ann", 7, 0, "0")
    assert first.stdout == "train/0000.12.12.0.ann.%t.%n.%N.%%"
    assert first.stream_to == protocol.Address(node="n1", stream=5)
    assert (first.env["WINS"], first.env["FOO"], first.env["SLURM_STEP_ID"]) == ("scheduler", "1", "0")
    assert bench.order == ["row", "reply", "send", "send"]  # on disk before it starts


def test_a_job_gives_nodes_back_for_who_may_start_steps_in_it() -> None:
    bench = StepBench()
    assert bench.asks(argv="", resize="1") == protocol.StepEnded(codes=[], signals=[])
    assert bench.resized == [(12, 1, ANN)]
    assert "not a whole number" in bench.asks(argv="", resize="two").error
    assert "it belongs to ann" in bench.asks(origin=(HEAD, 7), uid=ANN + 1, argv="", resize="1").error
    assert len(bench.resized) == 1


def test_e1_waiting_steps_of_one_account_do_not_fill_the_memory() -> None:
    """Each may have an environment of 4 MiB, and an account 512 connections to each agent."""
    bench = StepBench()
    bench.asks(ntasks="5")
    env = {f"V{number}": "x" * 100_000 for number in range(40)}  # one text: the test needs no such memory
    last = [bench.asks(origin=(N1, 100 + number), ntasks="5", env=env) for number in range(20)]
    assert [isinstance(each, protocol.StepWaiting) for each in last] == [True] * 16 + [False] * 4
    assert "the waiting steps of your jobs have more than 64 MiB" in last[-1].error
    held = bench.asks(origin=(HEAD, 5), job_id=0, env=env)
    assert "have more than 64 MiB" in held.error
    assert isinstance(bench.asks(origin=(N1, 200), ntasks="5"), protocol.StepWaiting)


def test_the_codes_of_all_ranks_come_in_order() -> None:
    bench = StepBench()
    bench.asks(ntasks="5")
    (_, first), (_, second) = bench.launches()
    bench.ends(second, 4, usage={"cpu_user_s": 1.5, "max_rss_kib": 10.0})
    assert not bench.has_ended()
    bench.ends(first, 0, 1, 0, 0, signals=(0, 0, 9, 0), usage={"cpu_user_s": 2.0, "max_rss_kib": 30.0})
    assert bench.ended() == protocol.StepEnded(codes=[0, 1, 0, 0, 4], signals=[0, 0, 9, 0, 0])
    row = bench.rows[(12, 0, "0")]
    assert (row.state, row.exit_code, row.exit_signal) == ("FAILED", 4, 9)
    assert (row.name, row.nodes, row.ntasks) == ("prog", ("n1", "n2"), 5)
    assert (row.cpu_user_s, row.max_rss_kib, row.ended_at_s) == (3.5, 30, 100.0)


def test_a_repeated_report_changes_nothing() -> None:
    bench = StepBench()
    bench.asks(nodes="1")
    ((_, launch),) = bench.launches()
    bench.ends(launch, 0)
    bench.ends(launch, 3)
    assert bench.ended().codes == [0]


def test_steps_are_numbered_from_what_is_on_disk() -> None:
    bench = StepBench()
    bench.rows[(12, 0, "4")] = StepRecord(job_id=12, attempt=0, step="4", name="", nodes=(), ntasks=1, state="FAILED")
    assert bench.asks(nodes="1").step == 5
    assert bench.asks(nodes="1", origin=SECOND).step == 6


def test_kill_on_bad_exit_ends_the_other_nodes() -> None:
    bench = StepBench()
    bench.asks(nodes="2", kill_on_bad_exit=True)
    (_, first), (_, second) = bench.launches()
    assert first.kill_on_bad_exit
    bench.ends(first, 1)
    (order,) = bench.said_to(N2, protocol.EndStep)
    assert order.token == second.token
    bench.ends(second, 0, signals=(15,))
    assert bench.ended() == protocol.StepEnded(codes=[1, 0], signals=[0, 15])


def test_without_it_the_others_go_on() -> None:
    bench = StepBench()
    bench.asks(nodes="2")
    bench.ends(bench.launches()[0][1], 1)
    assert bench.said_to(N2, protocol.EndStep) == []


def test_a_node_that_refuses_ends_the_rest() -> None:
    bench = StepBench()
    bench.asks(nodes="2")
    (_, first), (_, second) = bench.launches()
    bench.service.on_report(N1, bench.report(first.token, protocol.REFUSED, why="cannot enter /work"))
    assert [order.token for order in bench.said_to(N2, protocol.EndStep)] == [second.token]
    bench.service.on_report(N2, bench.report(second.token, protocol.REVOKED))
    assert bench.ended().error == "cannot start the step on n1: cannot enter /work"


def test_a_time_limit_is_told() -> None:
    bench = StepBench()
    bench.asks(nodes="1", time="1")
    ((_, launch),) = bench.launches()
    assert launch.limit_s == 60
    bench.ends(launch, 0, signals=(15,), timed_out=True)
    assert "time limit" in bench.ended().error
    assert bench.rows[(12, 0, "0")].state == "TIMEOUT"


def test_a_report_that_cannot_be_does_not_hang_the_step() -> None:
    bench = StepBench()
    bench.asks(nodes="1", ntasks="2")
    ((_, launch),) = bench.launches()
    bench.ends(launch, 0, 0, 0)
    assert "it sent 3 exit codes" in bench.ended().error


# ----- who may


@pytest.mark.parametrize("uid", [ANN, 0, ADMIN])
def test_owner_root_and_admin_may_add_a_step_from_the_head(uid: int) -> None:
    assert isinstance(StepBench().asks(origin=(HEAD, 1), uid=uid), protocol.StepStarted)


def test_others_may_not() -> None:
    bench = StepBench()
    assert (
        bench.asks(origin=(HEAD, 1), uid=BOB).error
        == "cannot start a step in job 12: it belongs to ann, you are uid 1002"
    )
    assert bench.launches() == []


def test_a_number_of_another_machines_user_is_no_proof() -> None:
    """On a node, who asks is the owner of the job that the agent vouches for."""
    bench = StepBench(a_job(12), replace(a_job(13), uid=BOB, user="bob"))
    request = a_request(job_id=12)
    bench.says(HRUN, request, uid=ANN, job_id=13)  # bob's job, on a machine where his number is ann's here
    assert bench.ended().error == "cannot start a step in job 12: it belongs to ann, you are uid 1002"
    bench.says(SECOND, request, uid=ANN, job_id=0)
    assert "runs in no job there" in bench.ended(SECOND).error


def test_an_old_attempt_may_not() -> None:
    bench = StepBench(a_job(attempt=1))
    assert bench.asks().error == "cannot start a step in attempt 0 of job 12: it is over"


def test_only_a_running_job_takes_steps_but_a_script_may_be_faster_than_its_report() -> None:
    bench = StepBench(a_job(state=JobState.CONFIGURING))
    assert isinstance(bench.asks(), protocol.StepStarted)
    assert bench.asks(origin=(HEAD, 1)).error == "cannot start a step in job 12: it is CONFIGURING, not RUNNING"
    assert "Invalid job id specified" in bench.asks(origin=(HEAD, 2), job_id=99).error


def test_another_stream_reaches_nothing_of_a_step() -> None:
    bench = StepBench()
    bench.asks(nodes="1")
    ((_, launch),) = bench.launches()
    before = len(bench.sent)
    bench.says(SECOND, protocol.Input(token=launch.token, task=0, offset=0, eof=False), blob=b"evil")
    bench.says(SECOND, protocol.StepSignal(signum=9))
    assert len(bench.sent) == before
    assert bench.ended(SECOND).error == "cannot reach a task of another's step"


def test_another_node_reports_nothing_of_a_step() -> None:
    bench = StepBench()
    bench.asks(nodes="1")
    ((_, launch),) = bench.launches()
    assert not bench.service.on_report(N2, bench.report(launch.token, codes=[0], signals=[0]))
    assert not bench.has_ended()


# ----- streams and signals


def test_input_acknowledgements_and_signals_go_to_the_tasks() -> None:
    bench = StepBench()
    bench.asks(nodes="2")
    (_, first), (_, second) = bench.launches()
    bench.says(HRUN, protocol.Input(token=first.token, task=0, offset=0, eof=True), blob=b"hello")
    assert bench.sent[-1] == (N1, protocol.Input(token=first.token, task=0, offset=0, eof=True), b"hello")
    bench.says(HRUN, protocol.OutputAck(token=second.token, task=1, fd=1, offset=9))
    assert bench.sent[-1][:2] == (N2, protocol.OutputAck(token=second.token, task=1, fd=1, offset=9))
    bench.ends(first, 0)
    bench.says(HRUN, protocol.StepSignal(signum=10))
    assert bench.sent[-1][:2] == (N2, protocol.SignalStep(token=second.token, signum=10))
    assert not bench.said_to(N1, protocol.SignalStep)
    bench.says(HRUN, protocol.StepSignal(signum=9))
    assert bench.sent[-1][1] == protocol.EndStep(token=second.token, grace_s=0.0, why="killed")


def test_output_goes_to_who_asked_also_after_the_end() -> None:
    bench = StepBench()
    bench.asks(nodes="2")
    (_, first), (_, second) = bench.launches()
    output = protocol.Output(
        to=protocol.Address(node="n1", stream=5), token=second.token, task=1, fd=1, offset=0, eof=False
    )
    assert bench.service.output_origin(N2, output) == HRUN
    assert bench.service.output_origin(N1, output) is None  # not the node that the token was made for
    elsewhere = protocol.changed(output, to=protocol.Address(node="n1", stream=6))
    assert bench.service.output_origin(N2, elsewhere) is None
    bench.ends(first, 0)
    bench.ends(second, 0)
    assert bench.service.output_origin(N2, output) == HRUN
    bench.service.on_stream_closed(HRUN)
    assert bench.service.output_origin(N2, output) is None


def test_a_step_command_that_goes_away_takes_its_step_along() -> None:
    bench = StepBench()
    bench.asks(nodes="2")
    (_, first), (_, second) = bench.launches()
    bench.ends(first, 0)
    bench.service.on_stream_closed(HRUN)
    (order,) = bench.said_to(N2, protocol.EndStep)
    assert (order.token, order.grace_s) == (second.token, 30.0)
    assert bench.said_to(N1, protocol.EndStep) == []
    bench.ends(second, 0, signals=(15,))
    assert bench.rows[(12, 0, "0")].state == "CANCELLED"
    assert not bench.has_ended()  # there is nobody to tell


# ----- listening to a running step


def test_who_listens_to_a_step_gets_its_output_and_its_end() -> None:
    bench = StepBench()
    started = bench.asks(nodes="2")
    (_, first), (_, second) = bench.launches()
    assert bench.asks(origin=SECOND, attach="0") == started
    to = protocol.Address(node="n1", stream=6)
    for node, launch in ((N1, first), (N2, second)):
        assert bench.said_to(node, protocol.WatchOutput) == [protocol.WatchOutput(token=launch.token, to=to, on=True)]
    output = protocol.Output(to=to, token=second.token, task=1, fd=1, offset=0, eof=False)
    assert bench.service.output_origin(N2, output) == SECOND
    assert bench.service.output_origin(N2, protocol.changed(output, to=protocol.Address("n1", 7))) is None
    bench.ends(first, 0)
    bench.ends(second, 3)
    assert bench.ended(SECOND).codes == bench.ended().codes == [0, 3]


def test_who_stops_listening_does_the_step_nothing() -> None:
    bench = StepBench()
    bench.asks(nodes="1")
    bench.asks(origin=SECOND, attach="0")
    bench.service.on_stream_closed(SECOND)
    assert [order.on for order in bench.said_to(N1, protocol.WatchOutput)] == [True, False]
    assert bench.said_to(N1, protocol.EndStep) == []
    bench.ends(bench.launches()[0][1], 0)
    assert not bench.has_ended(SECOND)


@pytest.mark.parametrize(
    ("step", "uid", "why"),
    [("1", ANN, "no step 12.1 is running"), ("batch", ANN, "no step 12.batch"), ("0", BOB, "it belongs to ann")],
)
def test_listening_is_refused(step: str, uid: int, why: str) -> None:
    bench = StepBench()
    bench.asks(nodes="1")
    assert why in bench.asks(origin=(HEAD, 3), uid=uid, attach=step).error
    assert bench.said_to(N1, protocol.WatchOutput) == []


# ----- waiting for cpus


def test_a_step_waits_for_cpus_and_starts_when_they_are_free() -> None:
    bench = StepBench()
    bench.asks(ntasks="8")
    waiting = bench.asks(origin=SECOND, ntasks="1")
    assert waiting.text == "Job 12 step creation temporarily disabled, retrying (Requested nodes are busy)"
    (_, first), (_, second) = bench.launches()
    bench.ends(first, 0, 0, 0, 0)
    assert isinstance(bench.replies[SECOND][-1], protocol.StepStarted)  # n1 is free, though the first step goes on


def test_waiting_steps_start_in_their_order() -> None:
    bench = StepBench()
    bench.asks(ntasks="7")
    bench.asks(origin=SECOND, ntasks="2")
    bench.asks(origin=THIRD, ntasks="1")  # would fit, but is not its turn
    assert len(bench.launches()) == 2
    (_, first), (_, second) = bench.launches()
    bench.ends(first, 0, 0, 0, 0)
    bench.ends(second, 0, 0, 0)
    started = [bench.replies[origin][-1].step for origin in (SECOND, THIRD)]
    assert started == [1, 2]


def test_one_step_is_signalled_or_ended_and_the_others_are_not() -> None:
    bench = StepBench()
    bench.asks(nodes="1", ntasks="1")
    bench.asks(origin=SECOND, nodes="1", ntasks="1")
    first, second = (launch.token for _, launch in bench.launches())
    del bench.sent[:]
    assert bench.service.act_on(bench.jobs[JobId(12)], 1, 10, "ann")
    assert [(type(m), m.token) for _, m, _ in bench.sent] == [(protocol.SignalStep, second)]
    assert bench.service.act_on(bench.jobs[JobId(12)], 0, None, "ann")
    assert [(m.token, m.grace_s) for _, m, _ in bench.sent[1:]] == [(first, 30.0)]
    assert bench.service.act_on(bench.jobs[JobId(12)], 1, 9, "ann")
    assert [(m.token, m.grace_s) for _, m, _ in bench.sent[2:]] == [(second, 0.0)]
    assert not bench.service.act_on(bench.jobs[JobId(12)], 2, None, "ann")


def test_tasks_that_are_dealt_in_turn_end_by_their_numbers() -> None:
    bench = StepBench()
    started = bench.asks(ntasks="5", distribution="cyclic")
    (_, first), (_, second) = bench.launches()
    assert (list(first.tasks.ranks()), list(second.tasks.ranks())) == ([0, 2, 4], [1, 3])
    assert [(node, list(ranks)) for node, ranks, _ in started.parts()] == [("n1", [0, 2, 4]), ("n2", [1, 3])]
    assert second.env["SLURM_GTIDS"] == "1,3"
    bench.ends(first, 10, 12, 14)
    bench.ends(second, 11, 13)
    assert bench.replies[HRUN][-1].codes == [10, 11, 12, 13, 14]
    assert "write block, cyclic or plane=N" in bench.asks(origin=SECOND, distribution="arbitrary").error


def test_a_step_goes_where_there_is_room() -> None:
    bench = StepBench()
    bench.asks(nodes="1", ntasks="4")
    assert bench.asks(origin=SECOND, nodes="1", ntasks="4").tasks[0][0] == "n2"


def test_overlap_does_not_wait_and_does_not_hold() -> None:
    bench = StepBench()
    bench.asks(ntasks="8")
    assert isinstance(bench.asks(origin=SECOND, ntasks="8", overlap=True), protocol.StepStarted)
    bench = StepBench()
    bench.asks(ntasks="8", overlap=True)
    assert isinstance(bench.asks(origin=SECOND, ntasks="8"), protocol.StepStarted)


def test_a_waiting_step_command_that_goes_away_lets_the_next_start() -> None:
    bench = StepBench()
    bench.asks(ntasks="7")
    bench.asks(origin=SECOND, ntasks="2")
    bench.asks(origin=THIRD, ntasks="1")
    bench.service.on_stream_closed(SECOND)
    assert isinstance(bench.replies[THIRD][-1], protocol.StepStarted)


def test_what_never_fits_is_refused_at_once() -> None:
    bench = StepBench()
    bench.asks(ntasks="8")
    assert bench.asks(origin=SECOND, ntasks="9").error == (
        "cannot give the step 9 tasks: the job has 8 cpus on 2 nodes"
    )


def test_each_task_gets_its_own_gpus_if_the_job_asked_for_them_by_task() -> None:
    job = a_job()
    bench = StepBench(replace(job, spec=replace(job.spec, gpus_per_task=(GpuRequest(count=1),))))
    bench.asks(ntasks="4", ntasks_per_node="2")
    assert [launch.env["HPCSCHED_STEP_GPUS_PER_TASK"] for _, launch in bench.launches()] == ["1", "1"]
    bench.asks(origin=SECOND, ntasks="2", ntasks_per_node="1", overlap=True)  # as mpirun starts its daemons
    assert "HPCSCHED_STEP_GPUS_PER_TASK" not in bench.launches()[-1][1].env


def test_steps_see_the_gpu_that_their_job_has_a_part_of() -> None:
    job = a_job(cpus=(4,))
    bench = StepBench(replace(job, shares=(replace(job.shares[0], gpus=(1,), shards=2, shards_of=4),)))
    assert bench.asks(gres="shard:3").error == "cannot give the step 3 shards of a GPU: the job has 2 on each node"
    bench.asks(ntasks="1", gres="shard:1")
    bench.asks(origin=SECOND, ntasks="1", gres="shard:2")
    assert [launch.gpus for _, launch in bench.launches()] == [[1], [1]]


def test_gpus_asked_for_by_number_are_held() -> None:
    bench = StepBench()
    bench.asks(nodes="1", ntasks="1", gpus_per_task="1")
    bench.asks(origin=SECOND, nodes="1", ntasks="1", gres="gpu:1")
    bench.asks(origin=THIRD, nodelist="n1", ntasks="1", gpus="1")
    assert [launch.gpus for _, launch in bench.launches()] == [[0], [1]]
    assert isinstance(bench.replies[THIRD][-1], protocol.StepWaiting)
    all_of_them = bench.asks(origin=(N1, 8), nodelist="n1", ntasks="1", overlap=True)
    assert isinstance(all_of_them, protocol.StepStarted)
    assert bench.launches()[-1][1].gpus == [0, 1]
    assert bench.asks(origin=(N1, 9), gpus_per_node="3").error == (
        "cannot give the step 3 GPUs on n1: the job has 2 there"
    )


def test_the_jobs_cpus_per_task_are_the_default_where_they_fit() -> None:
    job = a_job()
    job = replace(job, spec=replace(job.spec, cpus_per_task=2, cpus_per_task_given=True))
    bench = StepBench(job)
    bench.asks(ntasks="2", nodes="1")
    assert bench.launches()[0][1].cpus == 4
    bench = StepBench(job)
    bench.asks(ntasks="8")
    assert [launch.cpus for _, launch in bench.launches()] == [4, 4]


# ----- hrun alone


def test_hrun_alone_gets_a_job_first_and_gives_it_back() -> None:
    bench = StepBench()
    alone: Origin = (HEAD, 3)
    assert bench.asks(origin=alone, job_id=0, nodes="1").text == "job 20 queued and waiting for resources"
    job = a_job(20, script="")
    bench.jobs[job.id] = job
    bench.service.job_running(job)
    assert [type(message).__name__ for message in bench.replies[alone]] == ["StepWaiting", "StepWaiting", "StepStarted"]
    assert bench.replies[alone][1].text == "job 20 has been allocated resources"
    ((_, launch),) = bench.launches()
    assert launch.stream_to == protocol.Address(node="", stream=3)
    bench.ends(launch, 7)
    assert bench.released == [(20, ExitStatus(code=7))]


def test_an_allocation_that_is_refused_is_told() -> None:
    bench = StepBench()
    bench.refuse_allocation = "cannot give job nine nodes: partition 'main' has 3"
    assert bench.asks(origin=(HEAD, 3), job_id=0).error == bench.refuse_allocation


def test_hrun_alone_is_for_the_head() -> None:
    assert "run hrun in a job, or on the head node" in StepBench().asks(job_id=0).error


def test_hrun_alone_that_goes_away_gives_its_job_back() -> None:
    bench = StepBench()
    bench.asks(origin=(HEAD, 3), job_id=0)
    bench.service.on_stream_closed((HEAD, 3))
    assert bench.released == [(20, ExitStatus(code=1))]


@pytest.mark.parametrize(
    ("ending", "state", "says"),
    [
        ({"outcome": JobState.TIMEOUT}, "TIMEOUT", "job 12 is ended: its time limit was reached"),
        (
            {"outcome": JobState.CANCELLED, "reason_detail": "cancelled by ann"},
            "CANCELLED",
            "job 12 is ended: cancelled by ann",
        ),
        ({"requeue_wanted": True, "reason_detail": "preempted"}, "CANCELLED", "job 12 is ended: preempted"),
        ({"outcome": JobState.FAILED}, "FAILED", ""),
    ],
)
def test_what_ends_the_job_is_what_its_steps_end_for(ending: dict[str, Any], state: str, says: str) -> None:
    bench = StepBench()
    bench.asks(nodes="1")
    bench.service.job_ending(a_job(7, state=JobState.COMPLETING, outcome=JobState.TIMEOUT))  # another
    bench.service.job_ending(a_job(12, state=JobState.COMPLETING, **ending))
    bench.ends(bench.launches()[0][1], 0, signals=(15,))
    assert (bench.rows[(12, 0, "0")].state, bench.ended().error) == (state, says)


def test_a_step_that_is_left_and_yet_ends_well_has_completed_as_daemons_of_mpirun_do() -> None:
    bench = StepBench()
    bench.asks(nodes="1")
    bench.service.on_stream_closed(HRUN)
    bench.ends(bench.launches()[0][1], 0)
    assert bench.rows[(12, 0, "0")].state == "COMPLETED"


def test_another_step_in_that_job_does_not_end_it() -> None:
    bench = StepBench()
    job = a_job(20, script="")
    bench.asks(origin=(HEAD, 3), job_id=0, nodes="1")
    bench.jobs[job.id] = job
    bench.service.job_running(job)
    bench.asks(origin=(HEAD, 4), job_id=20, overlap=True, nodes="1")
    bench.ends(bench.launches()[1][1], 0)
    assert bench.released == []
    bench.ends(bench.launches()[0][1], 0)
    assert bench.released == [(20, ExitStatus(code=0))]


def test_the_job_that_ends_ends_all_its_steps() -> None:
    bench = StepBench()
    bench.asks(ntasks="8")
    bench.asks(origin=SECOND)
    bench.asks(origin=(HEAD, 3), job_id=0)
    assert bench.service.concerns(JobId(12))
    bench.service.job_ended(JobId(12), "TIMEOUT")
    assert bench.ended().error == "job 12 has ended: TIMEOUT"
    assert bench.ended(SECOND).error == "job 12 has ended: TIMEOUT"
    assert bench.rows[(12, 0, "0")].state == "CANCELLED"
    assert not bench.service.concerns(JobId(12))
    bench.service.job_ended(JobId(20))
    assert bench.ended((HEAD, 3)).error == "job 20 has ended"


def test_the_allocation_is_what_hrun_asked_for() -> None:
    request = a_request(
        nodes="2-3", ntasks="4", mem="2G", gpus_per_node="a100:1", time="10", partition="gpu", exclude="n[1-2]"
    )
    spec = read_allocation(request, 0.0)
    assert (spec.name, spec.script, spec.work_dir) == ("prog", "", "/work")
    assert (spec.nodes_min, spec.nodes_max, spec.nodes_given, spec.ntasks) == (2, 3, True, 4)
    assert (spec.mem_per_node_mib, spec.time_limit_s, spec.partition) == (2048, 600, "gpu")
    assert spec.gpus_per_node == (GpuRequest(count=1, type="a100"),)
    assert spec.exclude == (N1, N2)


def test_the_allocation_is_where_hrun_wants_it() -> None:
    spec = read_allocation(
        a_request(hint="synchronous,comm_bound", switches="2@10", prefer="fast", mincpus="8", tmp="3G"), 0.0
    )
    assert spec.hints == ("synchronous", "comm_bound")
    assert (spec.switches, spec.switches_wait_s) == (2, 600)
    assert (spec.prefer, spec.mincpus, spec.tmp_mib) == ("fast", 8, 3072)
    with pytest.raises(RequestError, match="cannot take hint 'quick'"):
        read_allocation(a_request(hint="quick"), 0.0)


# ----- bad requests


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"argv": []}, "it has no command"),
        ({"argv": ["a\0b"]}, "NUL"),
        ({"work_dir": "rel"}, "the path is not absolute"),
        ({"env": {"A=B": "1"}}, "'A=B' cannot be a variable"),
        ({"env": {"A": "x" * (5 << 20)}}, "its environment has"),
        ({"options": {"bogus": "1"}}, "unknown option 'bogus'"),
        ({"options": {"ntasks": 3}}, "cannot read --ntasks: it needs a value"),
        ({"options": {"ntasks": "x"}}, "not a whole number"),
        ({"options": {"label": "yes"}}, "cannot read --label: it is on or off"),
        ({"options": {"nodelist": "n[1-999999999]"}}, "cannot"),
        ({"options": {"mem": "2G"}}, "cannot give the step 2048 MiB on n1: the job has 1000 MiB there"),
        ({"version": 99}, "this hrun speaks version 99"),
    ],
)
def test_bad_requests_are_refused_in_words(changes: dict[str, Any], text: str) -> None:
    bench = StepBench()
    bench.says(HRUN, protocol.changed(a_request(), **changes))
    assert text in bench.ended().error
    assert bench.launches() == []


def test_one_step_for_a_connection() -> None:
    bench = StepBench()
    bench.asks(nodes="1")
    assert "second step" in bench.asks(nodes="1").error


def test_nonsense_from_a_stream_is_answered() -> None:
    bench = StepBench()
    said = protocol.FromStream(stream=5, uid=ANN, job_id=12, attempt=0, message={"type": "Bogus"})
    bench.service.on_from_stream(N1, said, b"")
    assert "unknown type" in bench.ended().error
    bench.says(SECOND, protocol.Ping(request=1))
    assert "cannot take Ping from a step command" in bench.ended(SECOND).error


# ----- after a lost connection or a restart


def test_a_launch_that_did_not_arrive_is_sent_again() -> None:
    bench = StepBench()
    bench.asks(nodes="2")
    (_, first), (_, second) = bench.launches()
    bench.service.node_welcome(N1, inventory(bench.report(first.token, protocol.STARTED)))
    bench.service.node_welcome(N2, [])
    assert [launch for _, launch in bench.launches()] == [first, second, second]


@pytest.mark.parametrize(
    "changes", [{"held_nodes": (N1,)}, {"state": JobState.COMPLETING}, {"state": JobState.COMPLETED, "held_nodes": ()}]
)
def test_a_launch_that_did_not_arrive_is_not_sent_to_a_node_that_was_given_back(changes: dict[str, Any]) -> None:
    bench = StepBench()
    bench.asks(ntasks="2", nodes="2")
    bench.jobs[JobId(12)] = a_job(**changes)
    bench.sent.clear()
    bench.service.node_welcome(N2, [])
    assert bench.launches() == []
    assert bench.said_to(N2, protocol.EndStep)


def test_no_step_starts_in_a_job_that_is_being_ended() -> None:
    bench = StepBench()
    bench.asks(ntasks="8", exclusive=True)
    bench.asks(origin=SECOND, ntasks="8", exclusive=True)
    bench.jobs[JobId(12)] = a_job(state=JobState.COMPLETING)
    (_, first), (_, second) = bench.launches()
    bench.ends(first, 0, 0, 0, 0)
    bench.ends(second, 0, 0, 0, 0)
    assert len(bench.launches()) == 2


def test_an_order_to_end_that_did_not_arrive_is_sent_again() -> None:
    bench = StepBench()
    bench.asks(nodes="1")
    ((_, launch),) = bench.launches()
    bench.service.on_stream_closed(HRUN)
    bench.service.node_welcome(N1, inventory(bench.report(launch.token, protocol.CLAIMED)))
    assert [order.token for order in bench.said_to(N1, protocol.EndStep)] == [launch.token] * 2


def test_a_launch_that_did_not_arrive_is_revoked_once_nobody_wants_it() -> None:
    bench = StepBench()
    bench.asks(nodes="1")
    ((_, launch),) = bench.launches()
    bench.service.on_stream_closed(HRUN)
    bench.service.node_welcome(N1, [])
    assert len(bench.launches()) == 1
    assert [order.token for order in bench.said_to(N1, protocol.EndStep)] == [launch.token] * 2


def test_step_commands_are_asked_for_when_their_node_has_connected_again() -> None:
    """An agent that was killed took their connections along; the one after it says so."""
    bench = StepBench()
    bench.asks(ntasks="8", exclusive=True)
    bench.asks(origin=SECOND, ntasks="8", exclusive=True)
    (_, first), (_, second) = bench.launches()
    bench.replies.clear()
    started = [bench.report(launch.token, protocol.STARTED) for launch in (first, second)]
    bench.service.node_welcome(N2, inventory(started[1]))
    assert bench.replies == {HRUN: [protocol.StepWaiting(job_id=12, text="")]}  # its step has tasks there
    bench.replies.clear()
    bench.service.node_welcome(N1, inventory(started[0]))
    assert bench.replies == {origin: [protocol.StepWaiting(job_id=12, text="")] for origin in (HRUN, SECOND)}


def test_a_node_that_forgot_a_running_step_has_lost_it() -> None:
    bench = StepBench()
    bench.asks(nodes="2")
    (_, first), (_, second) = bench.launches()
    bench.service.on_report(N1, bench.report(first.token, protocol.STARTED))
    bench.service.node_welcome(N1, [])
    assert [order.token for order in bench.said_to(N2, protocol.EndStep)] == [second.token]
    bench.ends(second, 0, signals=(15,))
    assert bench.ended().error == "n1 knows nothing of the step any more"


def test_an_inventory_that_is_none_is_refused() -> None:
    with pytest.raises(ProtocolError):
        StepBench().service.node_welcome(N1, [{"seq": "x"}])


def test_step_plan_tells_the_environment_what_it_needs() -> None:
    plans: list[StepPlan] = []
    bench = StepBench()
    bench.service._ports = replace(bench.service._ports, environment=lambda job, plan: plans.append(plan) or {})
    bench.asks(ntasks="5", gpus_per_task="0")
    (plan,) = plans
    assert (plan.number, [part.count for part in plan.tasks], plan.options.gpus_per_task) == (0, [4, 1], 0)


# ----- together or not at all


def test_no_task_goes_before_all_nodes_are_ready() -> None:
    bench = StepBench()
    bench.asks(ntasks="5")
    (_, first), (_, second) = bench.launches()
    assert first.hold
    bench.service.on_report(N1, bench.report(first.token, protocol.CLAIMED))
    bench.service.on_report(N2, bench.report(second.token, protocol.READY))
    assert gos(bench) == []
    bench.service.on_report(N1, bench.report(first.token, protocol.READY))
    assert gos(bench) == [N1, N2]
    bench.service.on_report(N1, bench.report(first.token, protocol.STARTED))
    bench.service.on_report(N2, bench.report(second.token, protocol.READY))  # it has heard nothing of it
    assert gos(bench) == [N1, N2, N2]


def test_a_step_on_one_node_does_not_wait() -> None:
    bench = StepBench()
    bench.asks(ntasks="1")
    ((_, launch),) = bench.launches()
    assert not launch.hold
    bench.service.on_report(N1, bench.report(launch.token, protocol.STARTED))
    assert gos(bench) == []


def test_a_node_that_cannot_keeps_all_from_going() -> None:
    bench = StepBench()
    bench.asks(ntasks="5")
    (_, first), (_, second) = bench.launches()
    bench.service.on_report(N2, bench.report(second.token, protocol.REFUSED, why="no such directory"))
    bench.service.on_report(N1, bench.report(first.token, protocol.READY))
    assert gos(bench) == []
    assert [message.token for message in bench.said_to(N1, protocol.EndStep)] == [first.token]
    bench.service.on_report(N1, bench.report(first.token, protocol.REVOKED))
    assert "no such directory" in bench.ended().error
