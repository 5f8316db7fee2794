"""The decoder: hidden states of a step's rows, computed by one rank's part of the weights.

A flat loop over layers.  The hidden states between layers are float32 in all kinds; matrices, keys and values are what the kind
says.  Does not know requests, files of weights (weights.py) or how ranks meet: sums over a stage are a function's matter.
Rules: no family has code of its own; switches of `ModelConfig` choose.  What is the same for all layers of a step is computed
once (`StepLayout`).  A step comes from another node: tokens, positions and blocks are checked.
Sources: the modeling files of transformers 5.23; Megatron-LM (Shoeybi et al., 2019) for the split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from hpcserve.cache import KvCache, run_of
from hpcserve.config import CONFIG_NAME, Activation, ModelConfig, ModelFamily, NormKind, RopeKind, RopeSettings
from hpcserve.errors import ModelFileError, ServeError
from hpcserve.kernels import Linear, Weight, WeightKind, embedded, embedding_table, make_linear, stacked
from hpcserve.split import ModelPart, Span
from hpcserve.steps import BLOCK_POSITIONS, ForwardStep, StepRow
from hpcserve.weights import WeightFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Where a family's files have what; names are without prefix, layer and `.weight`."""

    prefix: str
    layers: str
    embedding: str
    positions: str = ""
    final_norm: str
    attention_norm: str
    ffn_norm: str
    qkv: tuple[str, ...]  # one name: queries, keys and values are one matrix
    out: str
    up: tuple[str, ...]
    down: str
    turned: bool = False  # matrices are stored [in, out]


ROTARY_NAMES = TensorNames(
    prefix="model.",
    layers="layers",
    embedding="embed_tokens.weight",
    final_norm="norm",
    attention_norm="input_layernorm",
    ffn_norm="post_attention_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.o_proj",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
)
GPT2_NAMES = TensorNames(
    prefix="transformer.",
    layers="h",
    embedding="wte.weight",
    positions="wpe.weight",
    final_norm="ln_f",
    attention_norm="ln_1",
    ffn_norm="ln_2",
    qkv=("attn.c_attn",),
    out="attn.c_proj",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    turned=True,
)
Reduce = Callable[[Tensor], None]
Norm = Callable[[Tensor], Tensor]
SHORTEST_ROPE_TABLE = 512
# Rows of a batch are copied and padded.  On a CPU longer rows cost less where they are.
LONGEST_COPIED = 256
PADDED_POSITIONS = 64


def whole_part(config: ModelConfig) -> ModelPart:
    """Return the part that is the whole model."""
    return ModelPart(
        layers=Span(0, config.layers),
        kv_groups=Span(0, config.kv_groups),
        ffn=Span(0, config.ffn),
        vocab=Span(0, config.vocab),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """Where a row's new tokens are in the step, and its keys in the cache."""

    first: int
    last: int
    start: int
    blocks: tuple[int, ...]

    @property
    def positions(self) -> int:
        """The number of positions that the last new token sees."""
        return self.start + self.last - self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch:
    """Rows of one token whose attention is computed at once; the shorter ones are padded."""

    tokens: Tensor  # their places in the step
    slots: Tensor  # of the cache, [rows * positions]
    mask: Tensor | None  # what is added to the scores, [rows, 1, 1, positions]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatches:
    """How the attention of rows is computed: in batches, then the other rows one by one."""

    batches: tuple[RowBatch, ...]
    alone: tuple[int, ...]
    order: Tensor | None  # places of the tokens in these results, unless they are in order


class StepLayout:
    """What all layers of a step need: tokens, positions, places in the cache, masks."""

    def __init__(self, step: ForwardStep, config: ModelConfig, blocks: int, device: torch.device) -> None:
        """Lay out a step.

        Raises:
            ServeError: a token, position or block is outside of the model or the cache.
        """
        self._device = device
        self.rows: list[RowLayout] = []
        first = 0
        for row in step.rows:
            _check_row(row, config, blocks)
            self.rows.append(RowLayout(first=first, last=first + len(row.tokens), start=row.start, blocks=row.blocks))
            first += len(row.tokens)
        tokens = [token for row in step.rows for token in row.tokens]
        self.tokens = torch.tensor(tokens, dtype=torch.long, device=device)
        places = np.concatenate(
            [np.arange(row.start, row.start + len(row.tokens)) for row in step.rows] or [np.zeros(0, dtype=np.int64)]
        )
        self.last_position = int(places.max(initial=0))
        self.positions = torch.from_numpy(places).to(device)
        self.slots = self._new_slots()
        self._masks: dict[tuple[int, int | None], Tensor] = {}
        self._seen: dict[tuple[int, int | None], Tensor | slice] = {}
        self._batches: dict[int | None, RowBatches] = {}

    def _new_slots(self) -> Tensor | slice:
        """Return where new keys go; a slice if they are one run."""
        if len(self.rows) == 1:
            row = self.rows[0]
            run = run_of(row.blocks, row.start, row.positions)
            if run is not None:
                return slice(*run)
        slots = [_slots(row, row.start) for row in self.rows]
        return torch.from_numpy(np.concatenate(slots or [np.zeros(0, dtype=np.int64)])).to(self._device)

    def _first_seen(self, row: RowLayout, window: int | None) -> int:
        """Return the first position that the row's first new token sees."""
        return 0 if window is None else max(0, row.start - window + 1)

    def seen_slots(self, index: int, window: int | None) -> Tensor | slice:
        """Return the places of the keys that a row sees."""
        found = self._seen.get((index, window))
        if found is None:
            row = self.rows[index]
            start = self._first_seen(row, window)
            run = run_of(row.blocks, start, row.positions)
            if run is not None:
                found = slice(*run)
            else:
                found = torch.from_numpy(_slots(row, start)).to(self._device)
            self._seen[index, window] = found
        return found

    def batches(self, window: int | None, dtype: torch.dtype) -> RowBatches:
        """Return which rows are computed together, with masks of a type."""
        found = self._batches.get(window)
        if found is None:
            alone, batched = self._shared_rows(window)
            made = tuple(self._batch(rows, window, dtype) for rows in batched)
            places = [self.rows[index].first for rows in batched for index in rows]
            places += [place for index in alone for place in range(self.rows[index].first, self.rows[index].last)]
            is_ordered = all(place == at for at, place in enumerate(places))
            order = None if is_ordered else torch.tensor(np.argsort(places), device=self._device)
            found = RowBatches(batches=made, alone=tuple(alone), order=order)
            self._batches[window] = found
        return found

    def _shared_rows(self, window: int | None) -> tuple[list[int], list[list[int]]]:
        """Return the rows to compute alone, and those of about equal length to compute together.

        A GPU computes any rows of one token together, because each call costs it more than padding.
        """
        alone: list[int] = []
        similar: dict[int, list[int]] = {}
        for index, row in enumerate(self.rows):
            seen = row.positions - self._first_seen(row, window)
            if row.last - row.first > 1:
                alone.append(index)
            elif self._device.type != "cpu":
                similar.setdefault(seen.bit_length(), []).append(index)
            elif seen <= LONGEST_COPIED or not isinstance(self.seen_slots(index, window), slice):
                similar.setdefault(-(-seen // PADDED_POSITIONS), []).append(index)
            else:
                alone.append(index)
        alone += [rows[0] for rows in similar.values() if len(rows) == 1]
        return sorted(alone), [rows for rows in similar.values() if len(rows) > 1]

    def _batch(self, rows: Sequence[int], window: int | None, dtype: torch.dtype) -> RowBatch:
        """Return rows of one token as a batch; they are padded with their own first position."""
        seen = [_slots(row, self._first_seen(row, window)) for row in map(self.rows.__getitem__, rows)]
        lengths = np.array([len(own) for own in seen])
        slots = np.empty((len(rows), lengths.max()), dtype=np.int64)
        for line, own in zip(slots, seen, strict=True):
            line[:] = own[0]
            line[: len(own)] = own
        mask = None
        if lengths.min() < lengths.max():
            hidden = torch.from_numpy(np.arange(lengths.max()) >= lengths[:, None])
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -math.inf)
            mask = mask[:, None, None].to(self._device)
        return RowBatch(
            tokens=torch.tensor([self.rows[index].first for index in rows], device=self._device),
            slots=torch.from_numpy(slots.reshape(-1)).to(self._device),
            mask=mask,
        )

    def is_plain(self, index: int, window: int | None) -> bool:
        """Return whether a row's mask is the lower triangle alone."""
        row = self.rows[index]
        return row.start == 0 and (window is None or row.positions <= window)

    def mask(self, index: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return what is added to the scores [new tokens, seen positions] of a row."""
        found = self._masks.get((index, window))
        if found is None:
            row = self.rows[index]
            queries = torch.arange(row.start, row.positions)[:, None]
            keys = torch.arange(self._first_seen(row, window), row.positions)[None]
            hidden = keys > queries
            if window is not None:
                hidden |= keys <= queries - window
            found = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -math.inf).to(self._device)
            self._masks[index, window] = found
        return found


def _slots(row: RowLayout, start: int) -> NDArray[np.int64]:
    """Return the places in the cache of a row's positions from `start`."""
    places = np.arange(start, row.positions)
    blocks = np.asarray(row.blocks, dtype=np.int64)[places // BLOCK_POSITIONS]
    return blocks * BLOCK_POSITIONS + places % BLOCK_POSITIONS


def _check_row(row: StepRow, config: ModelConfig, blocks: int) -> None:
    stop = row.start + len(row.tokens)
    if not row.tokens or stop > min(len(row.blocks) * BLOCK_POSITIONS, config.context_tokens):
        raise ServeError(
            f"cannot compute {len(row.tokens)} tokens from position {row.start}: "
            f"the row has {len(row.blocks)} blocks, and the model {config.context_tokens} positions"
        )
    if max(row.tokens) >= config.vocab or min(row.tokens) < 0:
        raise ServeError(f"cannot compute token {max(row.tokens)}: the vocabulary has {config.vocab}")
    if max(row.blocks) >= blocks or min(row.blocks) < 0:
        raise ServeError(f"cannot use block {max(row.blocks)}: the cache has {blocks}")
    if not 0 <= row.logits <= len(row.tokens):
        raise ServeError(f"cannot return logits of {row.logits} tokens: the row has {len(row.tokens)}")


class RopeTable:
    """Cosines and sines of rotary positions, computed as far as they are needed."""

    def __init__(self, settings: RopeSettings, head_dim: int, device: torch.device) -> None:
        self._frequencies = rope_frequencies(settings, head_dim)
        self._device = device
        self._cos = self._sin = torch.empty(0, head_dim, device=device)

    def at(self, layout: StepLayout) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines [tokens, 1, head_dim] of a step's positions."""
        if layout.last_position >= len(self._cos):
            length = max(SHORTEST_ROPE_TABLE, 2 ** (layout.last_position + 1).bit_length())
            angles = torch.arange(length).float()[:, None] * self._frequencies
            cos, sin = angles.cos(), angles.sin()
            self._cos = torch.cat((cos, cos), 1).to(self._device)
            self._sin = torch.cat((-sin, sin), 1).to(self._device)
        return self._cos[layout.positions][:, None], self._sin[layout.positions][:, None]


def rope_frequencies(settings: RopeSettings, head_dim: int) -> Tensor:
    """Return the angle per position of each pair of numbers."""
    frequencies = 1.0 / (settings.theta ** (torch.arange(0, head_dim, 2).float() / head_dim))
    if settings.kind is RopeKind.LINEAR:
        return frequencies / settings.factor
    if settings.kind is RopeKind.DEFAULT:
        return frequencies
    turns = settings.original_tokens * frequencies / (2 * math.pi)  # within the original context
    share = ((turns - settings.low_factor) / (settings.high_factor - settings.low_factor)).clamp(0, 1)
    return (1 - share) * frequencies / settings.factor + share * frequencies


def rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return queries or keys [tokens, heads, head_dim] turned by their positions."""
    return torch.addcmul(states * cos, states.roll(states.shape[-1] // 2, -1), sin)


def softcapped(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float
) -> Tensor:
    """Return the attention of queries, with scores between `-softcap` and `softcap`."""
    scores = softcap * torch.tanh((queries @ keys.transpose(2, 3)).float() * (scale / softcap))
    return torch.softmax(scores if mask is None else scores + mask, -1).to(values.dtype) @ values


def activated(states: Tensor, activation: Activation) -> Tensor:
    """Return the activation of states."""
    if activation is Activation.SILU:
        return F.silu(states)
    return F.gelu(states, approximate="tanh" if activation is Activation.GELU_TANH else "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class FfnWeights:
    """One FFN, or one expert: gate and up in one matrix if it is gated."""

    up: Linear
    down: Linear
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """The weights of a layer's part; without KV groups or FFN columns these are None or empty."""

    attention_norm: Norm
    ffn_norm: Norm
    after_attention: Norm | None
    after_ffn: Norm | None
    qkv: Linear | None
    out: Linear | None
    out_bias: Tensor | None
    query_norm: Norm | None
    key_norm: Norm | None
    router: Tensor | None
    ffns: tuple[FfnWeights, ...]
    down_bias: Tensor | None


class DecoderModel:
    """One rank's part of a model, with its cache."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: WeightFiles,
        part: ModelPart,
        kind: WeightKind | str,
        *,
        blocks: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        """Read the part's weights, those of the vocabulary before the layers.

        Raises:
            ModelFileError: a tensor is missing, damaged or has another shape than config.json says.
        """
        self.config, self.part, self.kind = config, part, WeightKind(kind)
        self.device = torch.device(device)
        self.is_first = part.layers.start == 0
        self.is_last = part.layers.stop == config.layers
        loader = _Loader(config, checkpoint, part, self.kind, self.device)
        self._ropes = {
            rope: RopeTable(rope, config.head_dim, self.device) for rope in set(config.ropes) if rope is not None
        }
        # The largest matrices first: while they are converted, the memory of the layers is free.
        self._embedding, self._head = loader.ends(first=self.is_first, last=self.is_last)
        self._layers = [loader.layer(index) for index in part.layers]
        self._positions = loader.positions() if self.is_first else None
        self._final_norm = loader.final_norm() if self.is_last else None
        self.cache = KvCache(config, part, blocks, self.kind.hidden_dtype, self.device)

    def allocate(self, blocks: int) -> None:
        """Replace the cache by an empty one of so many blocks."""
        self.cache = KvCache(self.config, self.part, blocks, self.kind.hidden_dtype, self.device)

    def watch_ffns(self, seen: Callable[[int, Tensor], None]) -> None:
        """Call `seen` with the layer and its FFN's inner states [tokens, columns] in each step."""

        def watched(number: int, ffn: FfnWeights) -> FfnWeights:
            def down(states: Tensor) -> Tensor:
                seen(number, states)
                return ffn.down(states)

            return replace(ffn, down=down)

        self._layers = [
            replace(layer, ffns=tuple(watched(number, ffn) for ffn in layer.ffns))
            for number, layer in zip(self.part.layers, self._layers, strict=True)
        ]

    @torch.no_grad()
    def forward(self, plan: ForwardStep, hidden: Tensor | None, reduce: Reduce | None = None) -> Tensor:
        """Return the hidden states [tokens of all rows, D] after the part's layers, float32.

        Those of the last stage are normalised.  `hidden` is what the stage before returned.  `reduce` adds the tensors of the
        stage's ranks in place.

        Raises:
            ServeError: the step does not fit the model or the cache.
        """
        layout = StepLayout(plan, self.config, self.cache.blocks, self.device)
        if self.is_first:
            hidden = self._embedded(layout, reduce)
        if hidden is None or hidden.shape != (len(layout.tokens), self.config.hidden):
            raise ServeError("cannot compute a step: the hidden states of the stage before are missing or others")
        turns = {rope: table.at(layout) for rope, table in self._ropes.items()}
        for index, layer in enumerate(self._layers):
            number = self.part.layers.start + index
            rope = self.config.ropes[number]
            out = self._attention(
                index, layer, hidden, layout, self.config.windows[number], None if rope is None else turns[rope]
            )
            hidden = _added(hidden, out, layer.out_bias, layer.after_attention, reduce)
            out = self._ffn(layer, layer.ffn_norm(hidden))
            hidden = _added(hidden, out, layer.down_bias, layer.after_ffn, reduce)
        return hidden if self._final_norm is None else self._final_norm(hidden)

    @torch.no_grad()
    def logits(self, hidden: Tensor, plan: ForwardStep) -> Tensor:
        """Return the float32 logits [wanted tokens, vocabulary of the part].

        `hidden` is what `forward` of the last stage returned.
        """
        wanted: list[int] = []
        end = 0
        for row in plan.rows:
            end += len(row.tokens)
            wanted += range(end - row.logits, end)
        if self._head is None:
            return torch.zeros(len(wanted), 0, device=self.device)
        chosen = hidden if len(wanted) == len(hidden) else hidden[wanted]
        logits = self._head(chosen).float()
        if self.config.logit_softcap is not None:
            logits = self.config.logit_softcap * torch.tanh(logits / self.config.logit_softcap)
        return logits

    def _embedded(self, layout: StepLayout, reduce: Reduce | None) -> Tensor:
        """Return the hidden states before the first layer."""
        vocab = self.part.vocab
        if len(vocab) == self.config.vocab:
            hidden = embedded(self._embedding, layout.tokens)
        else:
            hidden = torch.zeros(len(layout.tokens), self.config.hidden, device=self.device)
            ours = (layout.tokens >= vocab.start) & (layout.tokens < vocab.stop)
            hidden[ours] = embedded(self._embedding, layout.tokens[ours] - vocab.start)
            if reduce is not None:
                reduce(hidden)
        if self.config.embedding_scale != 1.0:
            hidden = hidden * self.config.embedding_scale
        if self._positions is not None:
            hidden = hidden + self._positions[layout.positions]
        return hidden

    def _attention(
        self,
        index: int,
        layer: DecoderLayer,
        hidden: Tensor,
        layout: StepLayout,
        window: int | None,
        turns: tuple[Tensor, Tensor] | None,
    ) -> Tensor | None:
        """Return this part's share of attention's output, or None without KV groups."""
        if layer.qkv is None or layer.out is None:
            return None
        config, groups = self.config, len(self.part.kv_groups)
        heads = groups * config.heads_of_group
        states = layer.qkv(layer.attention_norm(hidden)).float().view(len(hidden), heads + 2 * groups, config.head_dim)
        turned, values = states[:, : heads + groups], states[:, heads + groups :]
        if layer.query_norm is not None and layer.key_norm is not None:
            turned = torch.cat((layer.query_norm(turned[:, :heads]), layer.key_norm(turned[:, heads:])), 1)
        if turns is not None:
            turned = rotated(turned, *turns)
        self.cache.write(index, layout.slots, turned[:, heads:], values)
        queries = turned[:, :heads].to(self.kind.hidden_dtype)
        return layer.out(self._attended(index, queries, layout, window))

    def _attended(self, index: int, queries: Tensor, layout: StepLayout, window: int | None) -> Tensor:
        """Return the attention [tokens, heads * head_dim] of all rows, each over all that it sees."""
        dtype = queries.dtype if self.config.attention_softcap is None else torch.float32
        plan = layout.batches(window, dtype)
        outs = []
        for batch in plan.batches:
            keys, values = self.cache.read_rows(index, batch.slots, len(batch.tokens))
            outs.append(self._attended_by_one(queries.index_select(0, batch.tokens), keys, values, batch.mask))
        for number in plan.alone:
            row = layout.rows[number]
            own = queries.narrow(0, row.first, row.last - row.first)
            if len(own) == 1:
                keys, values = self.cache.read(index, layout.seen_slots(number, window))
                outs.append(self._attended_by_one(own, keys.unsqueeze(0), values.unsqueeze(0), None))
            else:
                outs.append(self._attended_by_many(index, own, layout, number, window))
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out if plan.order is None else out.index_select(0, plan.order)

    def _attended_by_one(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Return the attention [rows, heads * head_dim] of rows with one token each.

        Keys and values are [rows, groups, positions, head_dim].
        """
        config = self.config
        # The heads of a group as its queries: the fast form for one token.
        grouped = queries.view(len(queries), keys.shape[1], -1, config.head_dim)
        if config.attention_softcap is None:
            out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=config.score_scale)
        else:
            out = softcapped(grouped, keys, values, mask, config.score_scale, config.attention_softcap)
        return out.reshape(len(queries), -1)

    def _attended_by_many(
        self, index: int, queries: Tensor, layout: StepLayout, number: int, window: int | None
    ) -> Tensor:
        """Return the attention [new tokens, heads * head_dim] of a row with several new tokens."""
        config, tokens = self.config, len(queries)
        keys, values = self.cache.read(index, layout.seen_slots(number, window))
        groups = keys.shape[0]
        grouped = queries.view(tokens, groups, -1, config.head_dim).permute(1, 2, 0, 3)
        keys, values = (
            keys[:, None].expand(-1, grouped.shape[1], -1, -1),
            values[:, None].expand(-1, grouped.shape[1], -1, -1),
        )
        if config.attention_softcap is not None:
            mask = layout.mask(number, window, torch.float32)
            out = softcapped(grouped, keys, values, mask, config.score_scale, config.attention_softcap)
        elif layout.is_plain(number, window):
            out = F.scaled_dot_product_attention(grouped, keys, values, is_causal=True, scale=config.score_scale)
        else:
            mask = layout.mask(number, window, queries.dtype)
            out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=config.score_scale)
        return out.permute(2, 0, 1, 3).reshape(tokens, -1)

    def _ffn(self, layer: DecoderLayer, states: Tensor) -> Tensor | None:
        """Return this part's share of the FFN's output, or None without columns."""
        if not layer.ffns:
            return None
        if layer.router is None:
            return self._one_ffn(layer.ffns[0], states)
        scores = torch.softmax(F.linear(states, layer.router), -1)
        weights, chosen = scores.topk(self.config.experts_per_token, -1)
        if self.config.normalize_experts:
            weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(states)
        for expert in chosen.unique().tolist():
            tokens, places = torch.where(chosen == expert)
            share = self._one_ffn(layer.ffns[expert], states[tokens])
            out.index_add_(0, tokens, share.float() * weights[tokens, places, None])
        return out

    def _one_ffn(self, ffn: FfnWeights, states: Tensor) -> Tensor:
        up = ffn.up(states)
        if self.config.gated:
            return ffn.down(activated(up[:, : ffn.width], self.config.activation).mul_(up[:, ffn.width :]))
        return ffn.down(activated(up, self.config.activation))


def _added(hidden: Tensor, out: Tensor | None, bias: Tensor | None, norm: Norm | None, reduce: Reduce | None) -> Tensor:
    """Return hidden states and the sum of all ranks' outputs; None is an output of zeros."""
    if reduce is not None:
        total = torch.zeros_like(hidden) if out is None else out.float().contiguous()
        reduce(total)
        out = total
    if out is None:
        raise ServeError("cannot compute a step: a part of the model has no other ranks to add to")
    if bias is not None:
        out = out + bias
    return hidden + (out if norm is None else norm(out.float()))


class _Loader:
    """Reads the weights of a part under the names of the model's family."""

    def __init__(
        self, config: ModelConfig, checkpoint: WeightFiles, part: ModelPart, kind: WeightKind, device: torch.device
    ) -> None:
        self.config, self.checkpoint, self.part, self.kind, self.device = config, checkpoint, part, kind, device
        self.names = GPT2_NAMES if config.family is ModelFamily.GPT2 else ROTARY_NAMES
        self.prefix = self.names.prefix
        if not checkpoint.has_matrix(self.prefix + self.names.embedding):
            self.prefix = ""  # files of the decoder without its head
        group = config.head_dim * config.heads_of_group
        self.query = Span(part.kv_groups.start * group, part.kv_groups.stop * group)
        self.key = Span(part.kv_groups.start * config.head_dim, part.kv_groups.stop * config.head_dim)

    def layer(self, index: int) -> DecoderLayer:
        """Return the part's weights of one layer."""
        config = self.config
        base = f"{self.prefix}{self.names.layers}.{index}."
        post = config.post_norms
        qk_norm = config.qk_norm and len(self.part.kv_groups) > 0
        return DecoderLayer(
            attention_norm=self.norm(base + self.names.attention_norm),
            ffn_norm=self.norm(base + ("pre_feedforward_layernorm" if post else self.names.ffn_norm)),
            after_attention=self.norm(base + self.names.ffn_norm) if post else None,
            after_ffn=self.norm(base + "post_feedforward_layernorm") if post else None,
            qkv=self.qkv(base),
            out=self.columns(base + self.names.out, self.query, config.heads * config.head_dim),
            out_bias=self.vector(base + self.names.out + ".bias", config.hidden) if config.out_bias else None,
            query_norm=self.norm(base + "self_attn.q_norm", config.head_dim) if qk_norm else None,
            key_norm=self.norm(base + "self_attn.k_norm", config.head_dim) if qk_norm else None,
            router=self.router(base) if config.experts and len(self.part.ffn) else None,
            ffns=self.ffns(base),
            down_bias=self.vector(base + self.names.down + ".bias", config.hidden) if config.ffn_bias else None,
        )

    def ends(self, *, first: bool, last: bool) -> tuple[Weight, Linear | None]:
        """Return the rows of the embedding and of the head, as far as the part has them."""
        config, vocab = self.config, self.part.vocab
        weight: Weight = torch.empty(0, config.hidden)
        if first or (last and config.tied):
            name = self.prefix + self.names.embedding
            weight = self.stored(name, (config.vocab, config.hidden), vocab, None)
        table = embedding_table(weight, self.kind, self.device) if first else torch.empty(0, config.hidden)
        head = None
        if last and len(vocab):
            if not config.tied:
                weight = self.rows("lm_head", vocab, config.vocab, config.hidden)
            head = make_linear(weight, None, self.kind, self.device)
        return table, head

    def positions(self) -> Tensor | None:
        """Return the table of learned positions, if the model has one."""
        if not self.config.learned_positions:
            return None
        name = self.prefix + self.names.positions
        self.expect(name, (self.config.context_tokens, self.config.hidden))
        return self.checkpoint.read(name).float().to(self.device)

    def final_norm(self) -> Norm:
        """Return the norm after the last layer."""
        return self.norm(self.prefix + self.names.final_norm)

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        """Check the shape of a tensor.

        Raises:
            ModelFileError: config.json says something else.
        """
        found = self.checkpoint.shape(name)
        if found != shape:
            raise ModelFileError(
                f"cannot serve the model: {name!r} has shape {list(found)}; by {CONFIG_NAME} it is {list(shape)}"
            )

    def vector(self, name: str, length: int, span: Span | None = None) -> Tensor:
        """Return a vector, or a part of it, as float32."""
        self.expect(name, (length,))
        return self.checkpoint.read(name, span).float().to(self.device)

    def norm(self, name: str, length: int | None = None) -> Norm:
        """Return the norm of this name."""
        length = length or self.config.hidden
        weight = self.vector(f"{name}.weight", length)
        eps = self.config.eps
        if self.config.norm is NormKind.LAYER:
            bias = self.vector(f"{name}.bias", length)
            return lambda states: F.layer_norm(states, (length,), weight, bias, eps)
        if self.config.norm is NormKind.RMS_PLUS_ONE:
            weight = weight + 1
        return lambda states: F.rms_norm(states, (length,), weight, eps)

    def rows(self, name: str, span: Span, outputs: int, inputs: int) -> Weight:
        """Return rows [out, in] of a matrix."""
        return self.matrix(name, (outputs, inputs), span, None)

    def columns(self, name: str, span: Span, inputs: int) -> Linear | None:
        """Return the product with columns of a matrix, whose outputs are hidden states."""
        if not len(span):
            return None
        return make_linear(self.matrix(name, (self.config.hidden, inputs), None, span), None, self.kind, self.device)

    def matrix(self, name: str, shape: tuple[int, int], rows: Span | None, columns: Span | None) -> Weight:
        """Return rows and columns of a matrix of a layer, or of the head."""
        is_turned = self.names.turned and not name.startswith("lm_head")
        return self.stored(f"{name}.weight", shape, rows, columns, is_turned=is_turned)

    def stored(
        self, name: str, shape: tuple[int, int], rows: Span | None, columns: Span | None, *, is_turned: bool = False
    ) -> Weight:
        """Return rows and columns of a matrix of this shape; in the file floats may be turned."""
        for quantized, width in ((f"{name}.int8", shape[1]), (f"{name}.int4", shape[1] // 2)):
            if quantized in self.checkpoint.tensors:
                self.expect(quantized, (shape[0], width))
                return self.checkpoint.matrix(name, rows, columns)
        if is_turned:
            self.expect(name, (shape[1], shape[0]))
            return self.checkpoint.read(name, columns, rows).t().contiguous()
        self.expect(name, shape)
        return self.checkpoint.read(name, rows, columns)

    def qkv(self, base: str) -> Linear | None:
        """Return queries, keys and values as one product."""
        config = self.config
        if not len(self.part.kv_groups):
            return None
        queries, keys = config.heads * config.head_dim, config.kv_groups * config.head_dim
        if len(self.names.qkv) == 1:
            name, width = base + self.names.qkv[0], queries + 2 * keys
            pieces = [
                (name, width, span)
                for span in (self.query, _moved(self.key, queries), _moved(self.key, queries + keys))
            ]
        else:
            pieces = [
                (base + name, width, span)
                for name, width, span in zip(
                    self.names.qkv, (queries, keys, keys), (self.query, self.key, self.key), strict=True
                )
            ]
        weight = stacked([self.rows(name, span, width, config.hidden) for name, width, span in pieces])
        bias = None
        if config.qkv_bias:
            bias = torch.cat([self.vector(f"{name}.bias", width, span) for name, width, span in pieces])
        return make_linear(weight, bias, self.kind, self.device)

    def router(self, base: str) -> Tensor:
        """Return the matrix that scores experts, as float32."""
        name = f"{base}mlp.gate.weight"
        self.expect(name, (self.config.experts, self.config.hidden))
        return self.checkpoint.read(name).float().to(self.device)

    def ffns(self, base: str) -> tuple[FfnWeights, ...]:
        """Return the part's columns of the FFN, or of each expert."""
        if not len(self.part.ffn):
            return ()
        if not self.config.experts:
            return (self.ffn(base, self.names.up, self.names.down),)
        return tuple(
            self.ffn(f"{base}mlp.experts.{number}.", ("gate_proj", "up_proj"), "down_proj")
            for number in range(self.config.experts)
        )

    def ffn(self, base: str, up: tuple[str, ...], down: str) -> FfnWeights:
        """Return the part's columns of one FFN."""
        config, span = self.config, self.part.ffn
        weight = stacked([self.rows(base + name, span, config.ffn, config.hidden) for name in up])
        bias = None
        if config.ffn_bias:
            bias = torch.cat([self.vector(f"{base}{name}.bias", config.ffn, span) for name in up])
        last = self.columns(base + down, span, config.ffn)
        assert last is not None
        return FfnWeights(up=make_linear(weight, bias, self.kind, self.device), down=last, width=len(span))


def _moved(span: Span, by: int) -> Span:
    return Span(span.start + by, span.stop + by)
