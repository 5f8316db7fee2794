"""A training by Hugging Face's Trainer. Usage: with_transformers.py OUT [--stop-at STEP]: there it sends itself SIGTERM."""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from hpctrain.checkpoint.huggingface import Checkpoints

STEPS = 12


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"loss": self.net(x).square().mean()}


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args, state, control, **parts) -> None:  # noqa: ANN001, ANN003
        if state.global_step + 1 == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--stop-at", type=int, default=0)
    options = parser.parse_args()
    set_seed(3)
    rows = torch.randn(5 * 16, 4, generator=torch.Generator().manual_seed(1))
    data = [{"x": row, "labels": torch.zeros(1)} for row in rows]  # 5 steps are an epoch
    model = Model()
    kept = Checkpoints(options.out, every=3)
    newest = kept.newest()
    print(f"goes on from step {kept._last}" if newest else "a fresh start", flush=True)
    arguments = TrainingArguments(
        output_dir=options.out,
        max_steps=STEPS,
        per_device_train_batch_size=16,
        learning_rate=0.05,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
    )
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[StopAt(options.stop_at), kept])
    trainer.train(resume_from_checkpoint=newest)
    total = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values()))
    print(f"weights {total.hexdigest()} after {trainer.state.global_step}")
    return kept.status


if __name__ == "__main__":
    sys.exit(main())
