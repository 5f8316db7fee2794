"""The decoder: the same logits and tokens as transformers, whole and split, alone and in batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from tiny_models import FAMILIES, VOCAB, tiny_model
from torch import Tensor

from hpcserve.config import read_config
from hpcserve.model import DecoderModel, whole_part
from hpcserve.split import ModelPart
from hpcserve.steps import BLOCK_POSITIONS, ForwardStep, StepRow
from hpcserve.weights import WeightFiles

transformers = pytest.importorskip("transformers")

BLOCKS = 40
PROMPT = tuple((7 * index + 3) % VOCAB for index in range(37))


def step(*rows: StepRow) -> ForwardStep:
    return ForwardStep(number=0, rows=rows)


def blocks_for(tokens: int, first: int = 0) -> tuple[int, ...]:
    return tuple(range(first, first + -(-tokens // BLOCK_POSITIONS)))


def load(directory: Path, kind: str = "fp32", part: ModelPart | None = None) -> DecoderModel:
    config = read_config(directory)
    with WeightFiles(directory) as checkpoint:
        return DecoderModel(config, checkpoint, part or whole_part(config), kind, blocks=BLOCKS)


def run(model: DecoderModel, plan: ForwardStep) -> Tensor:
    return model.logits(model.forward(plan, None), plan)


def greedy(run_step: Callable[[ForwardStep], Tensor], prompt: Sequence[int], count: int) -> list[int]:
    """Return the most likely tokens after a prompt, one by one."""
    blocks = blocks_for(len(prompt) + count)
    logits = run_step(step(StepRow(tokens=tuple(prompt), start=0, blocks=blocks)))
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < count:
        start = len(prompt) + len(tokens) - 1
        logits = run_step(step(StepRow(tokens=(tokens[-1],), start=start, blocks=blocks)))
        tokens.append(int(logits[-1].argmax()))
    return tokens


def reference(directory: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").float().eval()


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / request.param, request.param)


def test_logits_and_tokens_are_those_of_transformers(directory: Path) -> None:
    theirs = reference(directory)
    ours = load(directory)
    with torch.no_grad():
        wanted = theirs(torch.tensor([PROMPT])).logits[0]
        tokens = theirs.generate(
            torch.tensor([PROMPT]), max_new_tokens=64, min_new_tokens=64, do_sample=False, pad_token_id=0
        )
    row = StepRow(tokens=PROMPT, start=0, blocks=blocks_for(len(PROMPT)), logits=len(PROMPT))
    assert (run(ours, step(row)) - wanted).abs().max() < 1e-4
    assert greedy(lambda plan: suppressed(run(ours, plan)), PROMPT, 64) == tokens[0, len(PROMPT) :].tolist()


def suppressed(logits: Tensor) -> Tensor:
    """Never the end, as with min_new_tokens."""
    logits[:, 1] = -torch.inf
    return logits
