"""A small GPT that is trained on Python's own source, and its checkpoints: what the benchmark of checkpoints measures."""

from __future__ import annotations

import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from hpctrain.checkpoint.manifest import CheckpointFacts
from hpctrain.checkpoint.replay import replay_through
from hpctrain.checkpoint.restore import RestoredCheckpoint, restore_newest
from hpctrain.checkpoint.writing.files import claim
from hpctrain.checkpoint.writing.gradient_log import GradientLog
from hpctrain.checkpoint.writing.maker import CheckpointReport
from hpctrain.checkpoint.writing.publish import RetentionPolicy
from hpctrain.checkpoint.writing.snapshot import layout_of
from hpctrain.checkpoint.writing.writer import ProcessWriter
from hpctrain.comm.base import SingleCommunicator
from hpctrain.env import JobFacts
from hpctrain.examples.chargpt import Gpt
from hpctrain.exchange.sync import make_sync
from hpctrain.loop import live_tensors
from hpctrain.optim.adamw import AdamW, clip_factor, multiply

VOCABULARY, CONTEXT = 256, 128
NO_JOB = JobFacts(job=None, attempt=None, restarts=0)
LR = 3e-4


class World:
    """A model, an optimizer and steps as the training loop takes them."""

    def __init__(self, layers: int, width: int, batch: int, frozen: float = 0.0, bf16: bool = False) -> None:
        torch.manual_seed(1)
        self.model = Gpt(VOCABULARY, CONTEXT, layers, width, width // 64)
        for block in list(self.model.blocks)[: round(frozen * layers)]:
            block.requires_grad_(False)
        if frozen:
            self.model.token.requires_grad_(False)
            self.model.position.requires_grad_(False)
        self.optimizer = AdamW(self.model.named_parameters())
        self.buckets = make_sync("exact", list(self.model.parameters()), SingleCommunicator(), overlap=None).buckets
        self._tokens = torch.frombuffer(bytearray(_text()), dtype=torch.uint8)
        self._batch, self._bf16 = batch, bf16
        self.step = 0
        self.log: GradientLog | None = None
        self.noted_s = 0.0  # what the log has taken

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that a checkpoint keeps."""
        return live_tensors(self.model, self.optimizer)

    def state_bytes(self) -> int:
        """How much that is."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def move(self, *, compute: bool = True) -> None:
        """Take a step; without `compute` by the last one's gradients."""
        if compute:
            self.buckets.zero()
            low = torch.randint(len(self._tokens) - CONTEXT - 1, (self._batch,)).tolist()
            tokens_BT = torch.stack([self._tokens[at : at + CONTEXT + 1] for at in low]).long()
            F.cross_entropy(self.model(tokens_BT[:, :-1]).flatten(0, 1), tokens_BT[:, 1:].flatten()).backward()
            if self._bf16:
                for flat in self.buckets.flats:
                    flat.copy_(flat.bfloat16())
        _, factor = clip_factor(self.buckets.squares(), 1.0)
        self.step += 1
        if self.log is not None:
            started_s = time.perf_counter()
            self.log.note(self.step, LR, factor)
            self.noted_s += time.perf_counter() - started_s
        multiply(self.buckets.flats, factor)
        self.optimizer.step(self.step, LR)

    def writer(self, directory: Path, base_every: int) -> ProcessWriter:
        """Begin to write checkpoints."""
        mine = claim(directory, NO_JOB, time.time())
        writer = ProcessWriter(mine, None, base_every, RetentionPolicy(keep=2))
        self.log = GradientLog(
            self.model,
            self.buckets.groups,
            self.buckets.flats,
            self.step,
            self.state_bytes(),
            self.optimizer.settings(),
        )
        writer.follow(self.log)
        return writer

    def begin(self, writer: ProcessWriter) -> float:
        """Begin a checkpoint, and return the seconds of the copy."""
        return writer.begin(None if writer.log_suffices() else self.tensors(), facts(self.step))

    def written(self, writer: ProcessWriter) -> CheckpointReport:
        """Write a checkpoint whole."""
        self.begin(writer)
        report = writer.wait()
        assert report is not None
        assert report.error is None, report.error
        return report

    def restore(self, directory: Path) -> RestoredCheckpoint:
        """Go on from the newest checkpoint."""
        replay = replay_through(self.model, self.optimizer.step, self.tensors, print)
        restored = restore_newest(directory, layout_of(self.tensors()), print, replay)
        assert restored is not None
        restored.pour(self.tensors())
        self.step = restored.published.manifest.facts.step
        return restored


def facts(step: int) -> CheckpointFacts:
    """What a checkpoint says beside its tensors."""
    return CheckpointFacts(step=step, attempt=0, generation=0, world=1, job=None, written_at_s=0.0, state={})


def _text() -> bytes:
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
    return b"".join(path.read_bytes() for path in sources)
