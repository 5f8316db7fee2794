"""Steps that another controller had begun: found again, gone on with, or asked for again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from stepworld import HRUN, N1, N2, SECOND, World, a_job, gos, inventory

from hpcnode.wire import protocol
from hpcsched.model.ids import JobId
from hpcsched.model.job import ExitStatus, JobState
from hpcsched.steps.service import HEAD


def restarted(world: World) -> tuple[protocol.Launch, protocol.Launch]:
    world.asks(ntasks="5")
    (_, first), (_, second) = world.launches()
    world.restart()
    world.replies.clear()
    world.sent.clear()
    return first, second


def test_a_step_lives_on_after_a_restart() -> None:
    world = World()
    first, second = restarted(world)
    to = first.stream_to
    world.service.node_welcome(N2, inventory(world.report(second.token, codes=[3], signals=[0], stream_to=to)))
    assert not world.has_ended()
    world.service.node_welcome(N1, inventory(world.report(first.token, protocol.STARTED, stream_to=to)))
    assert not world.has_ended()
    output = protocol.Output(to=to, token=second.token, task=4, fd=1, offset=0, eof=False)
    assert world.service.output_origin(N2, output) == HRUN
    world.says(HRUN, protocol.StepSignal(signum=10))
    assert [m.token for m in world.said_to(N1, protocol.SignalStep)] == [first.token]
    world.ends(first, 0, 0, 0, 1)
    assert world.ended() == protocol.StepEnded(codes=[0, 0, 0, 1, 3], signals=[0] * 5)
    row = world.rows[(12, 0, "0")]
    assert (row.name, row.ntasks, row.state, row.exit_code) == ("prog", 5, "FAILED", 3)


def test_after_a_restart_new_steps_do_not_take_old_numbers() -> None:
    world = World()
    first, _ = restarted(world)
    world.service.node_welcome(N1, inventory(world.report(first.token, protocol.STARTED, stream_to=first.stream_to)))
    assert world.asks(origin=SECOND, nodes="1").step == 1


def test_after_a_restart_steps_from_the_head_have_nobody_left() -> None:
    world = World(a_job(20, script=""))
    world.asks(origin=(HEAD, 3), job_id=0, nodes="1")
    job = world.jobs[JobId(20)]
    world.service.job_running(job)
    ((_, launch),) = world.launches()
    world.restart()
    world.sent.clear()
    world.service.job_running(job)  # as for every such job that runs
    said = inventory(world.report(launch.token, protocol.STARTED, stream_to=launch.stream_to))
    world.service.node_welcome(N1, said)
    world.service.node_welcome(N2, [])
    assert [order.token for order in world.said_to(N1, protocol.EndStep)] == [launch.token]
    assert world.released == []
    world.ends(launch, 0, signals=(15,))
    assert [job_id for job_id, _ in world.released] == [20]


def test_after_a_restart_an_allocation_that_nobody_claims_is_released() -> None:
    world = World(a_job(20, script=""))
    world.service.job_running(world.jobs[JobId(20)])
    world.service.node_welcome(N1, [])
    assert world.released == []
    world.service.node_welcome(N2, [])
    assert world.released == [(20, ExitStatus(code=1))]


def test_a_step_of_an_old_attempt_is_ended() -> None:
    world = World()
    first, _ = restarted(world)
    world.jobs[JobId(12)] = a_job(attempt=1)
    world.service.node_welcome(N1, inventory(world.report(first.token, protocol.STARTED, stream_to=first.stream_to)))
    assert [order.token for order in world.said_to(N1, protocol.EndStep)] == [first.token]


def ready(world: World, launch: protocol.Launch, status: str = protocol.READY) -> list[dict[str, Any]]:
    return inventory(world.report(launch.token, status, stream_to=launch.stream_to))


def revoked(world: World) -> None:
    """Each node does as it is told: what is to end there ends before it has run."""
    for node in (N1, N2):
        for token in {order.token for order in world.said_to(node, protocol.EndStep)}:
            world.service.on_report(node, world.report(token, protocol.REVOKED, why="told to"))


def replies(world: World, kind: type, origin: Any = HRUN) -> list[Any]:
    return [message for message in world.replies.get(origin, []) if isinstance(message, kind)]


def test_what_is_said_to_a_step_that_was_not_found_again_yet_is_no_error() -> None:
    world = World()
    _, second = restarted(world)
    world.says(HRUN, protocol.OutputAck(token=second.token, task=4, fd=1, offset=9))
    assert not world.has_ended()


def test_how_a_part_ended_is_known_after_a_restart() -> None:
    world = World()
    world.asks(ntasks="5", kill_on_bad_exit=True)
    (_, first), (_, second) = world.launches()
    for launch, node in ((first, N1), (second, N2)):
        world.service.on_report(node, world.report(launch.token, protocol.STARTED))
    world.ends(second, 0, usage={"cpu_user_s": 2.0})
    world.restart()
    world.sent.clear()
    world.service.node_welcome(N2, [])  # its report was acknowledged
    world.service.node_welcome(N1, ready(world, first, protocol.STARTED))
    assert world.said_to(N2, protocol.EndStep) == []
    world.ends(first, 0, 0, 7, 0, usage={"cpu_user_s": 1.0})
    assert world.ended() == protocol.StepEnded(codes=[0, 0, 7, 0, 0], signals=[0] * 5)
    row = world.rows[(12, 0, "0")]
    assert (row.exit_code, row.cpu_user_s) == (7, 3.0)


def test_a_bad_exit_ends_the_others_also_after_a_restart() -> None:
    world = World()
    world.asks(ntasks="5", kill_on_bad_exit=True)
    (_, first), (_, second) = world.launches()
    world.restart()
    world.sent.clear()
    world.service.node_welcome(N2, ready(world, second, protocol.STARTED))
    world.service.node_welcome(N1, ready(world, first, protocol.STARTED))
    world.ends(second, 1)
    assert [order.token for order in world.said_to(N1, protocol.EndStep)] == [first.token]


def test_what_a_step_found_again_holds_nobody_else_gets() -> None:
    world = World()
    world.asks(ntasks="8", exclusive=True)
    (_, first), (_, second) = world.launches()
    world.restart()
    for node, launch in ((N1, first), (N2, second)):
        world.service.node_welcome(node, ready(world, launch, protocol.STARTED))
    assert isinstance(world.asks(origin=SECOND, ntasks="1", exclusive=True), protocol.StepWaiting)
    world.ends(second, 0, 0, 0, 0)
    assert replies(world, protocol.StepStarted, SECOND)


def test_a_lost_record_of_a_step_that_ran_is_not_taken_for_a_step_that_never_did() -> None:
    world = World()
    first, second = restarted(world)
    world.service.node_welcome(N1, ready(world, first, protocol.STARTED))
    world.service.node_welcome(N2, [])
    assert [order.token for order in world.said_to(N1, protocol.EndStep)] == [first.token]
    world.ends(first, 0, signals=(15,) * 4)
    ended = world.ended()
    assert (ended.error, ended.again) == ("n2 knows nothing of the step any more", False)


@pytest.mark.parametrize("there", [(N1,), (N2,)])
def test_what_was_not_ready_everywhere_is_ended_and_asked_for_again(there: tuple[Any, ...]) -> None:
    world = World()
    launches = dict(zip((N1, N2), restarted(world), strict=True))
    for node in (N1, N2):
        world.service.node_welcome(node, ready(world, launches[node]) if node in there else [])
    assert gos(world) == []
    revoked(world)
    assert world.ended().again
    assert world.rows[(12, 0, "0")].state == "CANCELLED"


def test_what_one_controller_has_ended_the_next_has_asked_for_again() -> None:
    """The controller dies a second time, when a node has revoked its part already."""
    world = World()
    _, second = restarted(world)
    world.service.node_welcome(N2, ready(world, second))
    world.service.node_welcome(N1, [])
    world.restart()
    world.replies.clear()
    world.sent.clear()
    world.service.node_welcome(N2, ready(world, second, protocol.REVOKED))
    world.service.node_welcome(N1, [])
    revoked(world)
    assert world.ended().again


def test_a_step_that_a_user_has_cancelled_meanwhile_is_not_asked_for_again() -> None:
    world = World()
    first, _ = restarted(world)
    world.service.node_welcome(N1, ready(world, first))
    world.service.act_on(a_job(), 0, None, "bob")
    world.service.node_welcome(N2, [])
    revoked(world)
    ended = world.ended()
    assert (ended.error, ended.again) == ("step 12.0 is ended: cancelled by bob", False)


def test_a_request_that_no_controller_has_acted_on_is_made_again() -> None:
    world = World()
    world.says(HRUN, protocol.StepAsked())
    assert world.ended().again
    assert world.rows == {}


def test_a_step_that_waited_for_cpus_is_asked_for_again() -> None:
    world = World()
    world.asks(ntasks="8", exclusive=True)
    world.asks(origin=SECOND, ntasks="8", exclusive=True)
    world.restart()
    world.says(SECOND, protocol.StepAsked())
    assert world.ended(SECOND).again


def test_a_step_that_no_node_has_got_is_asked_for_again() -> None:
    world = World()
    restarted(world)
    world.service.node_welcome(N1, [])
    world.says(HRUN, protocol.StepAsked())
    assert not world.has_ended()
    world.service.node_welcome(N2, [])
    revoked(world)
    assert world.ended().again


def test_the_same_when_its_nodes_have_spoken_before() -> None:
    world = World()
    restarted(world)
    world.service.node_welcome(N1, [])
    world.service.node_welcome(N2, [])
    world.says(HRUN, protocol.StepAsked())
    revoked(world)
    assert world.ended().again


def test_a_step_command_that_missed_the_start_is_told_of_it_once_all_can_run() -> None:
    world = World()
    world.asks(ntasks="5")
    (told,) = world.replies[HRUN]
    (_, first), (_, second) = world.launches()
    world.restart()
    world.replies.clear()
    world.service.node_welcome(N1, ready(world, first))
    world.says(HRUN, protocol.StepAsked())
    assert replies(world, protocol.StepStarted) == []
    world.service.node_welcome(N2, ready(world, second))
    world.ends(first, 0, 0, 0, 0)
    world.ends(second, 0)
    assert replies(world, protocol.StepStarted) == [told]
    assert isinstance(world.replies[HRUN][-1], protocol.StepEnded)


def test_a_step_that_ended_meanwhile_is_first_told_to_have_started() -> None:
    world = World()
    world.asks(nodes="1", ntasks="1")
    (told,) = world.replies[HRUN]
    ((_, launch),) = world.launches()
    world.restart()
    world.replies.clear()
    end = world.report(launch.token, codes=[0], signals=[0], stream_to=launch.stream_to)
    world.service.node_welcome(N1, inventory(end))
    assert world.replies[HRUN][-2:] == [told, protocol.StepEnded(codes=[0], signals=[0])]


def test_after_a_lost_connection_a_step_command_is_told_what_it_may_have_missed() -> None:
    world = World()
    world.asks(nodes="1", ntasks="1")
    (told,) = world.replies[HRUN]
    ((_, launch),) = world.launches()
    world.says(HRUN, protocol.StepAsked())
    world.ends(launch, 0)
    world.says(HRUN, protocol.StepAsked())
    ended = protocol.StepEnded(codes=[0], signals=[0])
    assert world.replies[HRUN] == [told, told, ended, ended]


def test_one_that_still_waits_is_not_told_anything() -> None:
    world = World()
    world.asks(ntasks="8", exclusive=True)
    world.asks(origin=SECOND, ntasks="8", exclusive=True)
    before = list(world.replies[SECOND])
    world.says(SECOND, protocol.StepAsked())
    assert world.replies[SECOND] == before


def test_a_step_that_was_over_under_the_last_controller_is_not_run_twice() -> None:
    """Neither of what it was told it has heard, and some of its output was lost on the way."""
    world = World()
    world.asks(nodes="1", ntasks="1")
    (told,) = world.replies[HRUN]
    ((_, launch),) = world.launches()
    world.ends(launch, 3)
    world.restart()
    world.replies.clear()
    world.says(HRUN, protocol.StepAsked())
    assert world.replies[HRUN] == [told, protocol.StepEnded(codes=[3], signals=[0])]
    lost = protocol.OutputAck(token=launch.token, task=0, fd=1, offset=0, again=True)
    world.says(HRUN, lost)
    assert (N1, protocol.changed(lost, to=launch.stream_to), b"") in world.sent
    output = protocol.Output(to=launch.stream_to, token=launch.token, task=0, fd=1, offset=0, eof=True)
    assert world.service.output_origin(N1, output) == HRUN
    assert not world.service.concerns(JobId(12))


@pytest.mark.parametrize("changes", [{"attempt": 1}, {"state": JobState.COMPLETED}])
def test_no_step_is_asked_for_again_in_an_attempt_that_is_over(changes: dict[str, Any]) -> None:
    world = World()
    restarted(world)
    world.jobs[JobId(12)] = a_job(**changes)
    world.says(HRUN, protocol.StepAsked())
    assert (world.ended().error, world.ended().again) == ("job 12 has ended", False)


def test_a_step_of_a_controller_that_kept_nothing_goes_on() -> None:
    """It was of the version before: what was acknowledged of it is not known."""
    world = World()
    first, _ = restarted(world)
    world.rows = {key: replace(row, kept=None) for key, row in world.rows.items()}
    world.service.node_welcome(N1, ready(world, first, protocol.STARTED))
    world.service.node_welcome(N2, [])
    world.ends(first, 0, 0, 0, 0)
    assert "how some of the tasks ended is not known" in world.ended().error
