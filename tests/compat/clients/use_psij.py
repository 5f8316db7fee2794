"""psij-python: a job on two nodes by srun, and one that is cancelled while it runs. It looks at the queue every two seconds."""

import datetime
from pathlib import Path

import psij
from psij.executors.batch.slurm import SlurmExecutorConfig

LIMIT = datetime.timedelta(minutes=4)
executor = psij.JobExecutor.get_instance("slurm", config=SlurmExecutorConfig(queue_polling_interval=2))
out = Path.cwd() / "psij.out"
spec = psij.JobSpec(
    executable="/bin/hostname",
    stdout_path=out,
    attributes=psij.JobAttributes(duration=datetime.timedelta(minutes=5), queue_name="main"),
    resources=psij.ResourceSpecV1(node_count=2, processes_per_node=1),
    launcher="srun",
)
job = psij.Job(spec)
executor.submit(job)
status = job.wait(timeout=LIMIT)
assert (status.state, status.exit_code) == (psij.JobState.COMPLETED, 0), status
assert len(out.read_text().split()) == 2
sleeper = psij.Job(psij.JobSpec(executable="/bin/sleep", arguments=["600"], launcher="single"))
executor.submit(sleeper)
sleeper.wait(target_states=[psij.JobState.ACTIVE], timeout=LIMIT)
sleeper.cancel()
assert sleeper.wait(timeout=LIMIT).state == psij.JobState.CANCELED
print("well done")
