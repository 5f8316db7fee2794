"""parsl: a block of two nodes from its Slurm provider, workers started by srun, functions that run on both."""

import os
import subprocess
import time

import parsl
from parsl.config import Config
from parsl.executors import HighThroughputExecutor
from parsl.launchers import SrunLauncher
from parsl.providers import SlurmProvider


@parsl.python_app
def square(x):
    import os
    import time

    time.sleep(0.2)
    return x * x, os.environ["SLURM_JOB_ID"], os.environ["SLURM_PROCID"]


provider = SlurmProvider(
    partition="main", nodes_per_block=2, cores_per_node=1, mem_per_node=1, init_blocks=1, max_blocks=1, walltime="00:05:00",
    exclusive=False, launcher=SrunLauncher(), worker_init=f"export PATH={os.environ['PATH']}",
)  # fmt: skip
executor = HighThroughputExecutor(label="htex", address="127.0.0.1", max_workers_per_node=1, provider=provider)
with parsl.load(Config(executors=[executor], run_dir="parsl", strategy="none")):
    found = [one.result() for one in [square(number) for number in range(20)]]
assert [value for value, _, _ in found] == [number * number for number in range(20)]
assert len({job for _, job, _ in found}) == 1
assert {rank for _, _, rank in found} == {"0", "1"}, found
while subprocess.run(["squeue", "-h", "--me"], capture_output=True, text=True, check=True).stdout:
    time.sleep(0.2)
print("well done")
