"""dask-jobqueue: a cluster of two workers, each a job, that computes, and is gone in the end."""

import os
import subprocess
import sys
import time

from dask.distributed import Client
from dask_jobqueue import SLURMCluster

cluster = SLURMCluster(
    cores=1, processes=1, memory="800MB", queue="main", walltime="00:05:00", log_directory="dask", local_directory="/tmp",
    death_timeout=240, python=sys.executable,
)  # fmt: skip
cluster.scale(2)
client = Client(cluster)
client.wait_for_workers(2, timeout=240)
assert client.gather(client.map(lambda x: x * x, range(10))) == [x * x for x in range(10)]
jobs = client.run(lambda: os.environ["SLURM_JOB_ID"])
assert len(set(jobs.values())) == 2, jobs
client.close()
cluster.close()
while subprocess.run(["squeue", "-h", "--me", "-n", "dask-worker"], capture_output=True, text=True, check=True).stdout:
    time.sleep(0.2)
print("well done")
