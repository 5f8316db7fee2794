"""Which steps wait for the cpus of their job, and whose turn it is."""

from __future__ import annotations

from hpcnode.wire import protocol
from hpcsched.model.ids import JobId, NodeName
from hpcsched.steps.step import StepQueues, Waiting

ONE, TWO = JobId(1), JobId(2)


def waits(stream: int) -> Waiting:
    request = protocol.StepRequest(protocol.VERSION, 1, {}, ["true"], "/", {})
    return Waiting((NodeName("n1"), stream), request)


def test_each_job_has_its_queue_in_the_order_of_the_requests() -> None:
    queues = StepQueues()
    first, second, other = waits(1), waits(2), waits(3)
    for job_id, waiting in ((ONE, first), (TWO, other), (ONE, second)):
        queues.add(job_id, waiting)
    assert (queues.first(ONE), queues.first(TWO)) == (first, other)
    queues.take_first(ONE)
    assert queues.first(ONE) is second
    queues.take_first(ONE)
    assert (queues.first(ONE), ONE in queues, TWO in queues) == (None, False, True)


def test_who_goes_away_waits_no_more_and_the_jobs_concerned_are_told() -> None:
    queues = StepQueues()
    for job_id, waiting in ((ONE, waits(1)), (ONE, waits(2)), (TWO, waits(3))):
        queues.add(job_id, waiting)
    assert queues.drop((NodeName("n1"), 1)) == [ONE]
    assert queues.drop((NodeName("n1"), 3)) == [TWO]
    assert queues.drop((NodeName("n2"), 2)) == []
    assert queues.origins() == [((NodeName("n1"), 2), ONE)]
    assert TWO not in queues


def test_all_steps_of_a_job_that_has_ended_are_taken_out() -> None:
    queues = StepQueues()
    both = [waits(1), waits(2)]
    for waiting in both:
        queues.add(ONE, waiting)
    assert queues.take_all(ONE) == both
    assert queues.take_all(ONE) == []
    assert ONE not in queues
