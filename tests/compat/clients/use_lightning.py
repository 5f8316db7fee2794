"""PyTorch Lightning: 2 nodes x 2 tasks found by its SLURMEnvironment; on USR1 it saves, has the job requeued, and goes on."""

import os
import subprocess
import sys
import time

ROOT = os.path.join(os.getcwd(), "lightning")
SCRIPT = f"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --mem=2G --requeue --open-mode=append --output={ROOT}/out
srun {sys.executable} {__file__} train
"""


def train():
    import lightning
    import torch

    resumed = int(os.environ.get("SLURM_RESTART_COUNT", "0"))

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def on_train_start(self):
            world = self.trainer.world_size
            name = type(self.trainer.strategy.cluster_environment).__name__
            node = os.environ["SLURMD_NODENAME"]
            print(
                f"life {resumed} rank {self.global_rank} of {world} on {node} {name} step {self.global_step}",
                flush=True,
            )

        def training_step(self, batch):
            # Lightning saves inside of its signal handler, and all ranks have to: one that was averaging meanwhile would
            # wait for the others for ever. So they stand still here, each between two steps, until they are ended.
            if not resumed and self.global_step == 5:
                print("stands still", flush=True)
                while True:
                    time.sleep(0.1)
            return self.layer(batch).square().mean()

        def on_train_batch_end(self, outputs, batch, number):
            if resumed and self.global_step >= 20:
                self.trainer.should_stop = True

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    data = torch.utils.data.DataLoader(torch.randn(1024, 4), batch_size=2)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, num_nodes=2, max_epochs=-1, logger=False, default_root_dir=ROOT,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Model(), data)


def shown():
    try:
        with open(ROOT + "/out") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def ask(*words):
    return subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def until(condition):
    while not condition():
        if ask("sacct", "-X", "-n", "-P", "-o", "State", "-j", job) in ("FAILED", "TIMEOUT", "CANCELLED"):
            sys.exit(shown())
        time.sleep(0.5)


if sys.argv[1:] == ["train"]:
    train()
    sys.exit()
os.makedirs(ROOT)
job = subprocess.run(
    ["sbatch", "--parsable"], input=SCRIPT, stdout=subprocess.PIPE, text=True, check=True
).stdout.strip()
until(lambda: shown().count("stands still") == 4)
ask("scancel", "--signal=USR1", job)
until(lambda: ask("sacct", "-X", "-n", "-P", "-o", "State", "-j", job) == "COMPLETED")
starts = [line.split() for line in shown().splitlines() if line.startswith("life ")]
for life in ("0", "1"):
    mine = sorted(words[2:] for words in starts if words[1] == life)
    where = [" ".join(words[1:6]) for words in mine]
    assert where == ["0 of 4 on n1", "1 of 4 on n1", "2 of 4 on n2", "3 of 4 on n2"], shown()
    assert {words[6] for words in mine} == {"SLURMEnvironment"}, shown()
    steps = {int(words[8]) for words in mine}
    assert len(steps) == 1, shown()
    assert (steps == {0}) == (life == "0"), shown()
print("well done")
