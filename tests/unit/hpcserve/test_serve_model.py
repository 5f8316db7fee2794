"""The decoder: the same logits and tokens as transformers, whole and split, alone and in batches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tiny_models import FAMILIES, VOCAB, tiny_model
from torch import Tensor

import hpcserve.model
from hpcserve.config import ModelConfig, read_config
from hpcserve.errors import ServeError
from hpcserve.model import DecoderModel, StepLayout, whole_part
from hpcserve.split import ModelPart, ModelSplit, Span, spans_of
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


class Stage:
    """Ranks of one stage as threads, which add their tensors."""

    def __init__(self, models: list[DecoderModel]) -> None:
        self.models = models
        self.barrier = threading.Barrier(len(models))
        self.tensors: list[Tensor] = [torch.empty(0)] * len(models)
        self.pool = ThreadPoolExecutor(len(models))

    def reduce(self, rank: int, tensor: Tensor) -> None:
        self.tensors[rank] = tensor
        self.barrier.wait(30)
        total = sum(self.tensors[1:], self.tensors[0])
        self.barrier.wait(30)
        tensor.copy_(total)

    def forward(self, plan: ForwardStep, hidden: Tensor | None) -> Tensor:
        def one(rank: int) -> Tensor:
            return self.models[rank].forward(plan, hidden, lambda tensor: self.reduce(rank, tensor))

        return list(self.pool.map(one, range(len(self.models))))[0]


def split(directory: Path, parts: ModelSplit) -> Callable[[ForwardStep], Tensor]:
    """Return a function that runs a step on all ranks of a split."""
    stages = [Stage([load(directory, part=part) for part in stage]) for stage in parts.stages]

    def run_step(plan: ForwardStep) -> Tensor:
        hidden = None
        for stage in stages:
            hidden = stage.forward(plan, hidden)
        assert hidden is not None
        return torch.cat([model.logits(hidden, plan) for model in stages[-1].models], 1)

    return run_step


# Widths of KV groups and of FFN columns by rank, in quarters: a rank without KV groups, one without FFN columns, unequal ones.
WIDTHS = {"halves": ((2, 2), (2, 2)), "unequal": ((3, 1), (1, 3)), "three": ((3, 0, 1), (0, 3, 1))}


def stage_parts(config: ModelConfig, layers: Span, name: str) -> tuple[ModelPart, ...]:
    def spans(widths: Sequence[int], whole: int) -> list[Span]:
        return spans_of([width * whole // 4 for width in widths])

    groups, columns = WIDTHS[name]
    return tuple(
        ModelPart(layers=layers, kv_groups=kv, ffn=ffn, vocab=vocab)
        for kv, ffn, vocab in zip(
            spans(groups, config.kv_groups), spans(columns, config.ffn), spans(columns, config.vocab), strict=True
        )
    )


@pytest.mark.parametrize("name", sorted(WIDTHS))
def test_ranks_that_share_layers_compute_the_same(directory: Path, name: str) -> None:
    config = read_config(directory)
    parts = ModelSplit(stages=(stage_parts(config, Span(0, config.layers), name),))
    parts.check(layers=config.layers, kv_groups=config.kv_groups, ffn=config.ffn, vocab=config.vocab)
    whole, plan = load(directory), step(StepRow(tokens=PROMPT, start=0, blocks=blocks_for(37), logits=37))
    ranks = split(directory, parts)
    assert (ranks(plan) - run(whole, plan)).abs().max() < 1e-4
    assert greedy(ranks, PROMPT, 8) == greedy(lambda plan: run(whole, plan), PROMPT, 8)


def test_stages_compute_the_same(directory: Path) -> None:
    config = read_config(directory)
    parts = ModelSplit(
        stages=(stage_parts(config, Span(0, 1), "unequal"), stage_parts(config, Span(1, config.layers), "three"))
    )
    whole = load(directory)
    assert greedy(split(directory, parts), PROMPT, 8) == greedy(lambda plan: run(whole, plan), PROMPT, 8)


def alone(model: DecoderModel, tokens: Sequence[int]) -> Tensor:
    """Return the last logits of a sequence that is computed at once and alone."""
    return run(model, step(StepRow(tokens=tuple(tokens), start=0, blocks=blocks_for(len(tokens)))))[-1]


@pytest.mark.parametrize("count", [7, 16])
def test_rows_of_a_batch_do_not_see_each_other(directory: Path, count: int) -> None:
    """Prompts, parts of prompts and single tokens in one step; blocks are scattered and in no order."""
    model = load(directory)
    sequences = [tuple((11 * row + 5 * index + 1) % VOCAB for index in range(3 + 2 * row)) for row in range(count)]
    places = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(3)).tolist()
    rows = []
    for number, sequence in enumerate(sequences):
        blocks = tuple(places.pop() for _ in blocks_for(len(sequence))) if len(places) > 3 else ()
        if not blocks:
            continue
        start = (0, len(sequence) - 1, len(sequence) // 2)[number % 3]
        if start:
            model.forward(step(StepRow(tokens=sequence[:start], start=0, blocks=blocks, logits=0)), None)
        rows.append((sequence, StepRow(tokens=sequence[start:], start=start, blocks=blocks)))
    logits = run(model, step(*(row for _, row in rows)))
    fresh = load(directory)
    wanted = torch.stack([alone(fresh, sequence) for sequence, _ in rows])
    assert len(rows) >= 7
    assert (logits - wanted).abs().max() < 1e-4


# Positions of decoding rows; blocks of negative ones are scattered.
SEEN = (3, 30, -31, 33, 40, 2, 140, -150, 16, 17)


@pytest.mark.parametrize("most", [16, 1000], ids=["short-ones", "all"])
def test_decoding_rows_compute_together_what_they_compute_alone(
    directory: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Also beside a part of a prompt; what is not theirs in the cache may be anything."""
    monkeypatch.setattr(hpcserve.model, "LONGEST_COPIED", most)
    monkeypatch.setattr(hpcserve.model, "PADDED_POSITIONS", most)
    model, rows, first = load(directory), [], 0
    for tensor in (*model.cache.keys, *model.cache.values):
        tensor.fill_(torch.nan)
    for number, seen in enumerate(SEEN):
        sequence = [(13 * number + 7 * index + 1) % VOCAB for index in range(abs(seen))]
        blocks = blocks_for(len(sequence), first)
        first += len(blocks)
        start = len(sequence) - (2 if number == 4 else 1)
        blocks = blocks[::-1] if seen < 0 else blocks
        model.forward(step(StepRow(tokens=tuple(sequence[:start]), start=0, blocks=blocks, logits=0)), None)
        rows.append(StepRow(tokens=tuple(sequence[start:]), start=start, blocks=blocks))
    together = run(model, step(*rows))
    alone = torch.cat([run(model, step(row)) for row in rows])
    assert (together - alone).abs().max() < 1e-5


def test_rows_are_batched_by_length_unless_they_can_be_read_in_place(tmp_path: Path) -> None:
    rows = [
        StepRow(tokens=(1,) * count, start=start, blocks=blocks)
        for start, count, blocks in (
            (10, 1, (0,)),
            (300, 1, tuple(range(2, 21))),
            (140, 1, tuple(range(21, 12, -1))),
            (12, 2, (1,)),
            (14, 1, (22,)),
            (141, 1, tuple(range(31, 22, -1))),
        )
    ]
    config = read_config(tiny_model(tmp_path / "model", max_position_embeddings=1024))
    layout = StepLayout(step(*rows), config, BLOCKS, torch.device("cpu"))
    plan = layout.batches(None, torch.float32)
    assert [batch.tokens.tolist() for batch in plan.batches] == [[0, 5], [2, 6]]
    assert plan.alone == (1, 3)
    assert plan.order is not None
    assert plan.order.tolist() == [0, 4, 2, 5, 6, 1, 3]


def test_sequences_share_the_blocks_of_a_prefix(directory: Path) -> None:
    model = load(directory)
    prefix = PROMPT[: 2 * BLOCK_POSITIONS]
    model.forward(step(StepRow(tokens=prefix, start=0, blocks=(5, 9), logits=0)), None)
    rows = [StepRow(tokens=(token, 3), start=len(prefix), blocks=(5, 9, 20 + token)) for token in (1, 2)]
    fresh = load(directory)
    wanted = torch.stack([alone(fresh, (*prefix, token, 3)) for token in (1, 2)])
    assert (run(model, step(*rows)) - wanted).abs().max() < 1e-4


def test_the_largest_matrices_are_read_before_the_layers_need_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, names = WeightFiles.read, []

    def named(files: WeightFiles, name: str, *more: Span | None) -> Tensor:
        names.append(name)
        return read(files, name, *more)

    monkeypatch.setattr(WeightFiles, "read", named)
    load(tiny_model(tmp_path / "model"), "int8")
    assert names[:2] == ["model.embed_tokens.weight", "lm_head.weight"]


@pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
def test_smaller_numbers_are_near(directory: Path, kind: str) -> None:
    plan = step(StepRow(tokens=PROMPT, start=0, blocks=blocks_for(len(PROMPT)), logits=len(PROMPT)))
    found, wanted = run(load(directory, kind), plan), run(load(directory), plan)
    assert float((found - wanted).norm() / wanted.norm()) < {"bf16": 0.05, "int8": 0.3, "int4": 0.6}[kind]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (StepRow(tokens=(1,) * 17, start=0, blocks=(0,)), "17 tokens from position 0"),
        (StepRow(tokens=(), start=0, blocks=(0,)), "0 tokens"),
        (StepRow(tokens=(VOCAB,), start=0, blocks=(0,)), f"token {VOCAB}"),
        (StepRow(tokens=(1,), start=0, blocks=(BLOCKS,)), f"block {BLOCKS}"),
        (StepRow(tokens=(1,), start=256, blocks=(0,) * 17), "256 positions"),
        (StepRow(tokens=(1,), start=0, blocks=(0,), logits=2), "logits of 2"),
    ],
    ids=["positions", "empty", "token", "block", "context", "logits"],
)
def test_a_step_outside_of_the_model_is_refused(tmp_path: Path, row: StepRow, words: str) -> None:
    with pytest.raises(ServeError, match=words):
        run(load(tiny_model(tmp_path / "model")), step(row))
