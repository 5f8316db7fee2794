"""submitit: a function, an array, tasks on two nodes, a cancelled job, and one that is interrupted and goes on."""

import os
import sys
import time

import submitit

folder = os.path.join(os.getcwd(), "submitit")
called = os.path.join(folder, "called")  # by then submitit handles signals


class Resumed(submitit.helpers.Checkpointable):
    """Waits for ever, until it has been interrupted once."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        open(called, "w").close()
        while self.calls == 1:
            time.sleep(0.1)
        return self.calls


def add(a, b):
    return a + b


def whoami():
    env = submitit.JobEnvironment()
    return env.global_rank, env.local_rank, env.node, env.num_tasks


def until(condition):
    while not condition():
        time.sleep(0.2)


executor = submitit.AutoExecutor(folder=folder)
assert type(executor._executor).__name__ == "SlurmExecutor", executor
executor.update_parameters(timeout_min=5, mem_gb=0.2, name="compat")
what = sys.argv[1]

if what == "submit":
    job = executor.submit(add, 5, 7)
    assert job.result() == 12
    with executor.batch():
        jobs = [executor.submit(add, number, 1) for number in range(3)]
    assert [one.result() for one in jobs] == [1, 2, 3]
    assert [one.job_id.partition("_")[2] for one in jobs] == ["0", "1", "2"]
elif what == "tasks":
    executor.update_parameters(nodes=2, tasks_per_node=2)
    assert executor.submit(whoami).results() == [(0, 0, 0, 4), (1, 1, 0, 4), (2, 0, 1, 4), (3, 1, 1, 4)]
elif what == "cancel":
    job = executor.submit(time.sleep, 600)
    until(lambda: job.state == "RUNNING")
    job.cancel()
    until(job.done)
    assert job.state.startswith("CANCELLED"), job.state
elif what == "requeue":
    job = executor.submit(Resumed())
    until(lambda: job.state == "RUNNING" and os.path.exists(called))
    job._interrupt()
    assert job.result() == 2
print("well done")
