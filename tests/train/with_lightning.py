"""A training under Lightning. Usage: with_lightning.py OUT [--stop-at STEP]: at that step it sends itself SIGTERM."""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything

from hpctrain.checkpoint.lightning import Checkpoints

STEPS = 12


class Model(LightningModule):
    def __init__(self, stop_at: int, out: Path) -> None:
        super().__init__()
        self.save_hyperparameters()  # a path is not kept
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        self.stop_at = stop_at

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        if self.global_step + 1 == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.net(batch).square().mean()

    def configure_optimizers(self):  # noqa: ANN201
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "step"}
        return [optimizer], [schedule]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--stop-at", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    seed_everything(3)
    model = Model(options.stop_at, Path(options.out))
    # Batches are alike: within an epoch Lightning goes on in its place only with loaders that have a state.
    rows = torch.randn(16, 4, generator=torch.Generator().manual_seed(1)).repeat(5, 1)
    data = torch.utils.data.DataLoader(rows, batch_size=16)  # 5 steps are an epoch
    kept = Checkpoints(options.out, every=3)
    newest = kept.newest()
    print(f"goes on from step {kept._last}" if newest else "a fresh start", flush=True)
    trainer = Trainer(
        max_steps=STEPS,
        callbacks=[kept],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        accelerator="cpu",
    )
    trainer.fit(model, data, ckpt_path=newest)
    total = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values()))
    print(f"weights {total.hexdigest()} after {trainer.global_step}")
    return kept.status


if __name__ == "__main__":
    sys.exit(main())
