"""simple-slurm: an array, a job that depends on it, the queue as it reads it, cancelling, srun."""

import time

from simple_slurm import Slurm

array = Slurm(
    array=range(3, 6),
    cpus_per_task=1,
    job_name="nm",
    time="0:5:0",
    output=f"a_{Slurm.JOB_ARRAY_MASTER_ID}_{Slurm.JOB_ARRAY_ID}.out",
)
job_id = array.sbatch("echo task $SLURM_ARRAY_TASK_ID")
assert isinstance(job_id, int)
after = Slurm(dependency={"afterok": job_id}, time="0:5:0", job_name="after").sbatch("sleep 600")
queue = Slurm().squeue
while True:
    queue.update_squeue()
    row = queue.jobs.get(after) or queue.jobs.get(str(after))
    if row["ST"] == "R":
        break
    assert row["ST"] in ("PD", "CF"), row
    time.sleep(0.2)
assert (row["NAME"], row["NODES"], row["CPUS"]) == ("after", "1", "1"), row
Slurm().scancel.cancel_job(after)
while after in queue.jobs or str(after) in queue.jobs:
    time.sleep(0.2)
    queue.update_squeue()
assert Slurm().srun("true") == 0
for index in range(3, 6):
    with open(f"a_{job_id}_{index}.out") as stream:
        assert stream.read() == f"task {index}\n"
print("well done")
