"""Steps that another controller had begun: found again, gone on with, or asked for again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from step_bench import HRUN, N1, N2, SECOND, StepBench, a_job, gos, inventory

from hpcnode.wire import protocol
from hpcsched.model.ids import JobId
from hpcsched.model.job import ExitStatus, JobState
from hpcsched.steps.service import HEAD


def restarted(bench: StepBench) -> tuple[protocol.Launch, protocol.Launch]:
    bench.asks(ntasks="5")
    (_, first), (_, second) = bench.launches()
    bench.restart()
    bench.replies.clear()
    bench.sent.clear()
    return first, second


def test_a_step_lives_on_after_a_restart() -> None:
    bench = StepBench()
    first, second = restarted(bench)
    to = first.stream_to
    bench.service.node_welcome(N2, inventory(bench.report(second.token, codes=[3], signals=[0], stream_to=to)))
    assert not bench.has_ended()
    bench.service.node_welcome(N1, inventory(bench.report(first.token, protocol.STARTED, stream_to=to)))
    assert not bench.has_ended()
    output = protocol.Output(to=to, token=second.token, task=4, fd=1, offset=0, eof=False)
    assert bench.service.output_origin(N2, output) == HRUN
    bench.says(HRUN, protocol.StepSignal(signum=10))
    assert [m.token for m in bench.said_to(N1, protocol.SignalStep)] == [first.token]
    bench.ends(first, 0, 0, 0, 1)
    assert bench.ended() == protocol.StepEnded(codes=[0, 0, 0, 1, 3], signals=[0] * 5)
    row = bench.rows[(12, 0, "0")]
    assert (row.name, row.ntasks, row.state, row.exit_code) == ("prog", 5, "FAILED", 3)


def test_after_a_restart_new_steps_do_not_take_old_numbers() -> None:
    bench = StepBench()
    first, _ = restarted(bench)
    bench.service.node_welcome(N1, inventory(bench.report(first.token, protocol.STARTED, stream_to=first.stream_to)))
    assert bench.asks(origin=SECOND, nodes="1").step == 1


def test_after_a_restart_steps_from_the_head_have_nobody_left() -> None:
    bench = StepBench(a_job(20, script=""))
    bench.asks(origin=(HEAD, 3), job_id=0, nodes="1")
    job = bench.jobs[JobId(20)]
    bench.service.job_running(job)
    ((_, launch),) = bench.launches()
    bench.restart()
    bench.sent.clear()
    bench.service.job_running(job)  # as for every such job that runs
    said = inventory(bench.report(launch.token, protocol.STARTED, stream_to=launch.stream_to))
    bench.service.node_welcome(N1, said)
    bench.service.node_welcome(N2, [])
    assert [order.token for order in bench.said_to(N1, protocol.EndStep)] == [launch.token]
    assert bench.released == []
    bench.ends(launch, 0, signals=(15,))
    assert [job_id for job_id, _ in bench.released] == [20]


def test_after_a_restart_an_allocation_that_nobody_claims_is_released() -> None:
    bench = StepBench(a_job(20, script=""))
    bench.service.job_running(bench.jobs[JobId(20)])
    bench.service.node_welcome(N1, [])
    assert bench.released == []
    bench.service.node_welcome(N2, [])
    assert bench.released == [(20, ExitStatus(code=1))]


def test_a_step_of_an_old_attempt_is_ended() -> None:
    bench = StepBench()
    first, _ = restarted(bench)
    bench.jobs[JobId(12)] = a_job(attempt=1)
    bench.service.node_welcome(N1, inventory(bench.report(first.token, protocol.STARTED, stream_to=first.stream_to)))
    assert [order.token for order in bench.said_to(N1, protocol.EndStep)] == [first.token]


def ready(bench: StepBench, launch: protocol.Launch, status: str = protocol.READY) -> list[dict[str, Any]]:
    return inventory(bench.report(launch.token, status, stream_to=launch.stream_to))


def revoked(bench: StepBench) -> None:
    """Each node does as it is told: what is to end there ends before it has run."""
    for node in (N1, N2):
        for token in {order.token for order in bench.said_to(node, protocol.EndStep)}:
            bench.service.on_report(node, bench.report(token, protocol.REVOKED, why="told to"))


def replies(bench: StepBench, kind: type, origin: Any = HRUN) -> list[Any]:
    return [message for message in bench.replies.get(origin, []) if isinstance(message, kind)]


def test_what_is_said_to_a_step_that_was_not_found_again_yet_is_no_error() -> None:
    bench = StepBench()
    _, second = restarted(bench)
    bench.says(HRUN, protocol.OutputAck(token=second.token, task=4, fd=1, offset=9))
    assert not bench.has_ended()


def test_how_a_part_ended_is_known_after_a_restart() -> None:
    bench = StepBench()
    bench.asks(ntasks="5", kill_on_bad_exit=True)
    (_, first), (_, second) = bench.launches()
    for launch, node in ((first, N1), (second, N2)):
        bench.service.on_report(node, bench.report(launch.token, protocol.STARTED))
    bench.ends(second, 0, usage={"cpu_user_s": 2.0})
    bench.restart()
    bench.sent.clear()
    bench.service.node_welcome(N2, [])  # its report was acknowledged
    bench.service.node_welcome(N1, ready(bench, first, protocol.STARTED))
    assert bench.said_to(N2, protocol.EndStep) == []
    bench.ends(first, 0, 0, 7, 0, usage={"cpu_user_s": 1.0})
    assert bench.ended() == protocol.StepEnded(codes=[0, 0, 7, 0, 0], signals=[0] * 5)
    row = bench.rows[(12, 0, "0")]
    assert (row.exit_code, row.cpu_user_s) == (7, 3.0)


def test_a_bad_exit_ends_the_others_also_after_a_restart() -> None:
    bench = StepBench()
    bench.asks(ntasks="5", kill_on_bad_exit=True)
    (_, first), (_, second) = bench.launches()
    bench.restart()
    bench.sent.clear()
    bench.service.node_welcome(N2, ready(bench, second, protocol.STARTED))
    bench.service.node_welcome(N1, ready(bench, first, protocol.STARTED))
    bench.ends(second, 1)
    assert [order.token for order in bench.said_to(N1, protocol.EndStep)] == [first.token]


def test_what_a_step_found_again_holds_nobody_else_gets() -> None:
    bench = StepBench()
    bench.asks(ntasks="8", exclusive=True)
    (_, first), (_, second) = bench.launches()
    bench.restart()
    for node, launch in ((N1, first), (N2, second)):
        bench.service.node_welcome(node, ready(bench, launch, protocol.STARTED))
    assert isinstance(bench.asks(origin=SECOND, ntasks="1", exclusive=True), protocol.StepWaiting)
    bench.ends(second, 0, 0, 0, 0)
    assert replies(bench, protocol.StepStarted, SECOND)


def test_a_lost_record_of_a_step_that_ran_is_not_taken_for_a_step_that_never_did() -> None:
    bench = StepBench()
    first, second = restarted(bench)
    bench.service.node_welcome(N1, ready(bench, first, protocol.STARTED))
    bench.service.node_welcome(N2, [])
    assert [order.token for order in bench.said_to(N1, protocol.EndStep)] == [first.token]
    bench.ends(first, 0, signals=(15,) * 4)
    ended = bench.ended()
    assert (ended.error, ended.again) == ("n2 knows nothing of the step any more", False)


@pytest.mark.parametrize("there", [(N1,), (N2,)])
def test_what_was_not_ready_everywhere_is_ended_and_asked_for_again(there: tuple[Any, ...]) -> None:
    bench = StepBench()
    launches = dict(zip((N1, N2), restarted(bench), strict=True))
    for node in (N1, N2):
        bench.service.node_welcome(node, ready(bench, launches[node]) if node in there else [])
    assert gos(bench) == []
    revoked(bench)
    assert bench.ended().again
    assert bench.rows[(12, 0, "0")].state == "CANCELLED"


def test_what_one_controller_has_ended_the_next_has_asked_for_again() -> None:
    """The controller dies a second time, when a node has revoked its part already."""
    bench = StepBench()
    _, second = restarted(bench)
    bench.service.node_welcome(N2, ready(bench, second))
    bench.service.node_welcome(N1, [])
    bench.restart()
    bench.replies.clear()
    bench.sent.clear()
    bench.service.node_welcome(N2, ready(bench, second, protocol.REVOKED))
    bench.service.node_welcome(N1, [])
    revoked(bench)
    assert bench.ended().again


def test_a_step_that_a_user_has_cancelled_meanwhile_is_not_asked_for_again() -> None:
    bench = StepBench()
    first, _ = restarted(bench)
    bench.service.node_welcome(N1, ready(bench, first))
    bench.service.act_on(a_job(), 0, None, "bob")
    bench.service.node_welcome(N2, [])
    revoked(bench)
    ended = bench.ended()
    assert (ended.error, ended.again) == ("step 12.0 is ended: cancelled by bob", False)


def test_a_request_that_no_controller_has_acted_on_is_made_again() -> None:
    bench = StepBench()
    bench.says(HRUN, protocol.StepAsked())
    assert bench.ended().again
    assert bench.rows == {}


def test_a_step_that_waited_for_cpus_is_asked_for_again() -> None:
    bench = StepBench()
    bench.asks(ntasks="8", exclusive=True)
    bench.asks(origin=SECOND, ntasks="8", exclusive=True)
    bench.restart()
    bench.says(SECOND, protocol.StepAsked())
    assert bench.ended(SECOND).again


def test_a_step_that_no_node_has_got_is_asked_for_again() -> None:
    bench = StepBench()
    restarted(bench)
    bench.service.node_welcome(N1, [])
    bench.says(HRUN, protocol.StepAsked())
    assert not bench.has_ended()
    bench.service.node_welcome(N2, [])
    revoked(bench)
    assert bench.ended().again


def test_the_same_when_its_nodes_have_spoken_before() -> None:
    bench = StepBench()
    restarted(bench)
    bench.service.node_welcome(N1, [])
    bench.service.node_welcome(N2, [])
    bench.says(HRUN, protocol.StepAsked())
    revoked(bench)
    assert bench.ended().again


def test_a_step_command_that_missed_the_start_is_told_of_it_once_all_can_run() -> None:
    bench = StepBench()
    bench.asks(ntasks="5")
    (told,) = bench.replies[HRUN]
    (_, first), (_, second) = bench.launches()
    bench.restart()
    bench.replies.clear()
    bench.service.node_welcome(N1, ready(bench, first))
    bench.says(HRUN, protocol.StepAsked())
    assert replies(bench, protocol.StepStarted) == []
    bench.service.node_welcome(N2, ready(bench, second))
    bench.ends(first, 0, 0, 0, 0)
    bench.ends(second, 0)
    assert replies(bench, protocol.StepStarted) == [told]
    assert isinstance(bench.replies[HRUN][-1], protocol.StepEnded)


def test_a_step_that_ended_meanwhile_is_first_told_to_have_started() -> None:
    bench = StepBench()
    bench.asks(nodes="1", ntasks="1")
    (told,) = bench.replies[HRUN]
    ((_, launch),) = bench.launches()
    bench.restart()
    bench.replies.clear()
    end = bench.report(launch.token, codes=[0], signals=[0], stream_to=launch.stream_to)
    bench.service.node_welcome(N1, inventory(end))
    assert bench.replies[HRUN][-2:] == [told, protocol.StepEnded(codes=[0], signals=[0])]


def test_after_a_lost_connection_a_step_command_is_told_what_it_may_have_missed() -> None:
    bench = StepBench()
    bench.asks(nodes="1", ntasks="1")
    (told,) = bench.replies[HRUN]
    ((_, launch),) = bench.launches()
    bench.says(HRUN, protocol.StepAsked())
    bench.ends(launch, 0)
    bench.says(HRUN, protocol.StepAsked())
    ended = protocol.StepEnded(codes=[0], signals=[0])
    assert bench.replies[HRUN] == [told, told, ended, ended]


def test_one_that_still_waits_is_not_told_anything() -> None:
    bench = StepBench()
    bench.asks(ntasks="8", exclusive=True)
    bench.asks(origin=SECOND, ntasks="8", exclusive=True)
    before = list(bench.replies[SECOND])
    bench.says(SECOND, protocol.StepAsked())
    assert bench.replies[SECOND] == before


def test_a_step_that_was_over_under_the_last_controller_is_not_run_twice() -> None:
    """Neither of what it was told it has heard, and some of its output was lost on the way."""
    bench = StepBench()
    bench.asks(nodes="1", ntasks="1")
    (told,) = bench.replies[HRUN]
    ((_, launch),) = bench.launches()
    bench.ends(launch, 3)
    bench.restart()
    bench.replies.clear()
    bench.says(HRUN, protocol.StepAsked())
    assert bench.replies[HRUN] == [told, protocol.StepEnded(codes=[3], signals=[0])]
    lost = protocol.OutputAck(token=launch.token, task=0, fd=1, offset=0, again=True)
    bench.says(HRUN, lost)
    assert (N1, protocol.changed(lost, to=launch.stream_to), b"") in bench.sent
    output = protocol.Output(to=launch.stream_to, token=launch.token, task=0, fd=1, offset=0, eof=True)
    assert bench.service.output_origin(N1, output) == HRUN
    assert not bench.service.concerns(JobId(12))


@pytest.mark.parametrize("changes", [{"attempt": 1}, {"state": JobState.COMPLETED}])
def test_no_step_is_asked_for_again_in_an_attempt_that_is_over(changes: dict[str, Any]) -> None:
    bench = StepBench()
    restarted(bench)
    bench.jobs[JobId(12)] = a_job(**changes)
    bench.says(HRUN, protocol.StepAsked())
    assert (bench.ended().error, bench.ended().again) == ("job 12 has ended", False)


def test_a_step_of_a_controller_that_kept_nothing_goes_on() -> None:
    """It was of the version before: what was acknowledged of it is not known."""
    bench = StepBench()
    first, _ = restarted(bench)
    bench.rows = {key: replace(row, kept=None) for key, row in bench.rows.items()}
    bench.service.node_welcome(N1, ready(bench, first, protocol.STARTED))
    bench.service.node_welcome(N2, [])
    bench.ends(first, 0, 0, 0, 0)
    assert "how some of the tasks ended is not known" in bench.ended().error
