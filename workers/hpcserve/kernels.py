"""Products of hidden states with a matrix, as fast as this machine can.

A `Linear` is a function from [tokens, in] to [tokens, out]; it takes float32 or bfloat16, and returns the type in which it
computes.  There are several makers of it for each kind of numbers.  `make_linear` tests each against F.linear, measures them
once for each shape, and takes the fastest.  Does not know layers.
Rules: fp32 is always F.linear, so that results are the same everywhere.  Most makers use private or deprecated operators of
torch: one that is missing, fails or computes wrongly is left out with a warning, and the last maker always works.
Sources: torch 2.13 (mkldnn_fusion.py of inductor, ao/quantization, _meta_registrations.py).
"""

from __future__ import annotations

import enum
import logging
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcserve.weights import GROUP_COLUMNS, Int4Weight, Int8Weight, quantized_int4, quantized_int8

Linear = Callable[[Tensor], Tensor]
Weight = Tensor | Int8Weight | Int4Weight
MEASURED_ROWS = 4096  # of a matrix: enough to compare makers
SMALLEST_MEASURED = 1 << 16  # weights: below, the first maker that works is taken
MEASURE_S = 0.2  # for one shape, all makers together
ROUNDS = 20
WIDENED_TOKENS = 4  # from here on float32 products pay for the conversion
WIDENED_ROWS = 512
TESTED_TOKENS = (1, 5)
# The error of activations that are rounded to 7 or 8 bits is larger than that of bfloat16.
LARGEST_ERROR = 0.05

log = logging.getLogger(__name__)


class WeightKind(enum.StrEnum):
    """The numbers that a rank keeps its matrices in."""

    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def hidden_dtype(self) -> torch.dtype:
        """The type of keys and values, and of numbers that are not quantized."""
        return torch.float32 if self is WeightKind.FP32 else torch.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearMaker:
    """One way to multiply by matrices.

    `make` raises an exception if this machine or matrix cannot have it.
    """

    name: str
    make: Callable[[Weight, Tensor | None], Linear]


def floats(weight: Weight) -> Tensor:
    """Return a weight as a tensor of floats."""
    return weight if isinstance(weight, Tensor) else weight.floats()


def stacked(weights: Sequence[Weight]) -> Weight:
    """Return the rows of several matrices as one matrix; of different kinds as floats."""
    if len(weights) == 1:
        return weights[0]
    eights = [weight for weight in weights if isinstance(weight, Int8Weight)]
    if len(eights) == len(weights):
        return Int8Weight(
            values=torch.cat([one.values for one in eights]), scale=torch.cat([one.scale for one in eights])
        )
    fours = [weight for weight in weights if isinstance(weight, Int4Weight)]
    if len(fours) == len(weights):
        return Int4Weight(
            values=torch.cat([one.values for one in fours]),
            scales=torch.cat([one.scales for one in fours]),
            zeros=torch.cat([one.zeros for one in fours]),
        )
    return torch.cat([floats(weight) for weight in weights])


def embedding_table(weight: Weight, kind: WeightKind, device: torch.device | str = "cpu") -> Weight:
    """Return an embedding as a kind keeps it.

    It is int8 also for int4, because a step reads few of its rows.
    """
    return _on(_as_kind(weight, WeightKind.INT8 if kind is WeightKind.INT4 else kind), torch.device(device))


def embedded(table: Weight, tokens: Tensor) -> Tensor:
    """Return the rows of an embedding, as float32."""
    if isinstance(table, Int8Weight):
        return table.values.index_select(0, tokens).float() * table.scale.index_select(0, tokens)[:, None]
    return F.embedding(tokens, floats(table)).float()


def make_linear(weight: Weight, bias: Tensor | None, kind: WeightKind, device: torch.device | str = "cpu") -> Linear:
    """Return the product with a matrix [out, in], and a bias added, in numbers of a kind."""
    weight = _on(_as_kind(weight, kind), torch.device(device))
    bias = None if bias is None else bias.to(device)
    makers = _makers(kind, torch.device(device).type)
    if len(makers) == 1:
        return makers[0].make(weight, bias)
    shape = _shape(weight)
    key = (kind, min(shape[0], MEASURED_ROWS), shape[1], torch.device(device).type)
    if key not in _CHOSEN:
        _CHOSEN[key] = _fastest(makers, _some_rows(weight, key[1]))
        log.info("%s matrices of %d columns are multiplied by %s", kind, shape[1], _CHOSEN[key].name)
    try:
        return _CHOSEN[key].make(weight, bias)
    except (RuntimeError, ValueError, AttributeError) as error:
        _leave_out(_CHOSEN[key], f"{_first_line(error)} (a matrix of {list(shape)})")
        return makers[-1].make(weight, bias)


_CHOSEN: dict[tuple[WeightKind, int, int, str], LinearMaker] = {}
_LEFT_OUT: set[str] = set()


def _leave_out(maker: LinearMaker, why: str) -> None:
    """Log why a maker is not used: once as a warning, because a model has many shapes."""
    level = logging.DEBUG if maker.name in _LEFT_OUT else logging.WARNING
    _LEFT_OUT.add(maker.name)
    log.log(level, "%s is not used: %s", maker.name, why)


def _as_kind(weight: Weight, kind: WeightKind) -> Weight:
    """Return a weight in the numbers of a kind.

    int4 needs whole groups of columns; other matrices become bfloat16.
    """
    if kind is WeightKind.INT8:
        return weight if isinstance(weight, Int8Weight) else quantized_int8(floats(weight))
    if kind is WeightKind.INT4:
        if isinstance(weight, Int4Weight):
            return weight
        matrix = floats(weight)
        return quantized_int4(matrix) if matrix.shape[1] % GROUP_COLUMNS == 0 else matrix.to(torch.bfloat16)
    return floats(weight).to(kind.hidden_dtype)


def _on(weight: Weight, device: torch.device) -> Weight:
    if isinstance(weight, Tensor):
        return weight.to(device)
    if isinstance(weight, Int8Weight):
        return Int8Weight(values=weight.values.to(device), scale=weight.scale.to(device))
    return Int4Weight(values=weight.values.to(device), scales=weight.scales.to(device), zeros=weight.zeros.to(device))


def _shape(weight: Weight) -> tuple[int, int]:
    """Return rows and columns."""
    values = weight if isinstance(weight, Tensor) else weight.values
    return values.shape[0], values.shape[1] * (2 if isinstance(weight, Int4Weight) else 1)


def _some_rows(weight: Weight, count: int) -> Weight:
    """Return the first rows of a matrix."""
    if isinstance(weight, Tensor):
        return weight[:count]
    if isinstance(weight, Int8Weight):
        return replace(weight, values=weight.values[:count], scale=weight.scale[:count])
    return replace(weight, values=weight.values[:count], scales=weight.scales[:count], zeros=weight.zeros[:count])


def _fastest(makers: Sequence[LinearMaker], weight: Weight) -> LinearMaker:
    """Return the fastest maker that computes this matrix rightly; the last one needs no test."""
    matrix = floats(weight).float()
    rows, columns = matrix.shape
    made: list[tuple[LinearMaker, Linear]] = []
    for maker in makers:
        try:
            linear = maker.make(weight, None)
            error = max(_error(linear, matrix, tokens) for tokens in TESTED_TOKENS)
        except (RuntimeError, ValueError, AttributeError) as failure:
            _leave_out(maker, _first_line(failure))
            continue
        if not error < LARGEST_ERROR and maker is not makers[-1]:
            _leave_out(maker, f"it is wrong by {error:.3f}")
            continue
        made.append((maker, linear))
        if rows * columns < SMALLEST_MEASURED:
            return maker
    hidden = torch.randn(1, columns, device=matrix.device)
    times = dict.fromkeys(range(len(made)), float("inf"))
    stop = time.monotonic() + MEASURE_S
    for _ in range(ROUNDS):
        for place, (_, linear) in enumerate(made):
            begin = time.perf_counter()
            linear(hidden)
            _finish(hidden)
            times[place] = min(times[place], time.perf_counter() - begin)
        if time.monotonic() > stop:
            break
    return made[min(times, key=times.__getitem__)][0] if made else makers[-1]


def _finish(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def _error(linear: Linear, matrix: Tensor, tokens: int) -> float:
    """Return the relative error of a product, with inputs of a fixed seed."""
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, matrix.shape[1], generator=generator).to(matrix.device)
    wanted = F.linear(hidden, matrix)
    return float((linear(hidden).float() - wanted).norm() / wanted.norm().clamp(min=1e-20))


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]


def _makers(kind: WeightKind, device: str) -> tuple[LinearMaker, ...]:
    """Return the makers for a kind; the last one always works."""
    if kind is WeightKind.FP32:
        return (FLOAT32,)
    if device != "cpu":
        return (CUDA_INT4, BFLOAT16) if kind is WeightKind.INT4 else (BFLOAT16,)
    return {
        WeightKind.BF16: (PACKED_BFLOAT16, BFLOAT16),
        WeightKind.INT8: (DYNAMIC_INT8, PACKED_INT8, BFLOAT16),
        WeightKind.INT4: (PACKED_INT4, BFLOAT16),
    }[kind]


def _float32(weight: Weight, bias: Tensor | None) -> Linear:
    matrix = floats(weight).float()
    return lambda hidden: F.linear(hidden.float(), matrix, bias)


def _bfloat16(weight: Weight, bias: Tensor | None) -> Linear:
    matrix = floats(weight).bfloat16()
    added = None if bias is None else bias.bfloat16()
    widens = not matrix.is_cuda and not torch.ops.mkldnn._is_mkldnn_bf16_supported()

    def linear(hidden: Tensor) -> Tensor:
        if widens and len(hidden) >= WIDENED_TOKENS:
            return _widened(hidden.float(), matrix, bias)
        return F.linear(hidden.bfloat16(), matrix, added)

    return linear


def _widened(hidden: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product in float32, for CPUs that multiply bfloat16 slowly."""
    outs = [F.linear(hidden, rows.float()) for rows in matrix.split(WIDENED_ROWS)]
    out = torch.cat(outs, 1)
    return out if bias is None else out + bias


def _packed_bfloat16(weight: Weight, bias: Tensor | None) -> Linear:
    # Packed for one token: the layout is as fast for more.
    packed = torch.ops.mkldnn._reorder_linear_weight(floats(weight).bfloat16().contiguous(), 1)
    added = None if bias is None else bias.bfloat16()
    product = torch.ops.mkldnn._linear_pointwise.default

    def linear(hidden: Tensor) -> Tensor:
        out: Tensor = product(hidden.bfloat16().contiguous(), packed, added, "none", [], "")
        return out

    return linear


def _dynamic_int8(weight: Weight, bias: Tensor | None) -> Linear:
    if not isinstance(weight, Int8Weight):
        raise ValueError("the weight is not int8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantized tensors are deprecated; the self-test sees when they are gone
        quantized = torch._make_per_channel_quantized_tensor(
            weight.values, weight.scale.double(), torch.zeros(len(weight.scale), dtype=torch.long), 0
        )
        packed = torch.ops.quantized.linear_prepack(quantized, bias)
    # Without VNNI, 16-bit sums of 8-bit products overflow: activations get 7 bits.
    halve = not torch.cpu._is_vnni_supported()
    product = torch.ops.quantized.linear_dynamic

    def linear(hidden: Tensor) -> Tensor:
        out: Tensor = product(hidden.float().contiguous(), packed, halve)
        return out

    return linear


def _packed_int8(weight: Weight, bias: Tensor | None) -> Linear:
    if not isinstance(weight, Int8Weight):
        raise ValueError("the weight is not int8")
    values, scale = weight.values.contiguous(), weight.scale.bfloat16()

    def linear(hidden: Tensor) -> Tensor:
        out = torch._weight_int8pack_mm(hidden.bfloat16().contiguous(), values, scale)
        return out if bias is None else out + bias

    return linear


def _int4_tables(weight: Int4Weight) -> tuple[Tensor, Tensor]:
    """Return numbers [out, in] int32, and scales with zeros [groups, out, 2]."""
    numbers = torch.stack((weight.values & 15, weight.values >> 4), -1).flatten(1).int()
    pairs = torch.stack((weight.scales, weight.zeros), -1).transpose(0, 1).contiguous().bfloat16()
    return numbers.contiguous(), pairs


def _packed_int4(weight: Weight, bias: Tensor | None) -> Linear:
    if not isinstance(weight, Int4Weight):
        raise ValueError("the weight is not int4: its columns are not whole groups of 32")
    numbers, pairs = _int4_tables(weight)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
    product = torch.ops.aten._weight_int4pack_mm_for_cpu

    def linear(hidden: Tensor) -> Tensor:
        out: Tensor = product(hidden.bfloat16().contiguous(), packed, GROUP_COLUMNS, pairs)
        return out if bias is None else out + bias

    return linear


def _cuda_int4(weight: Weight, bias: Tensor | None) -> Linear:
    if not isinstance(weight, Int4Weight):
        raise ValueError("the weight is not int4: its columns are not whole groups of 32")
    numbers, pairs = _int4_tables(weight)
    # On GPUs a byte has the even column in its high half.
    packed = torch.ops.aten._convert_weight_to_int4pack(((numbers[:, ::2] << 4) | numbers[:, 1::2]).to(torch.uint8), 8)
    product = torch.ops.aten._weight_int4pack_mm

    def linear(hidden: Tensor) -> Tensor:
        out: Tensor = product(hidden.bfloat16().contiguous(), packed, GROUP_COLUMNS, pairs)
        return out if bias is None else out + bias

    return linear


FLOAT32 = LinearMaker(name="F.linear in float32", make=_float32)
BFLOAT16 = LinearMaker(name="F.linear in bfloat16", make=_bfloat16)
PACKED_BFLOAT16 = LinearMaker(name="oneDNN's packed bfloat16", make=_packed_bfloat16)
DYNAMIC_INT8 = LinearMaker(name="FBGEMM's dynamic int8", make=_dynamic_int8)
PACKED_INT8 = LinearMaker(name="torch's packed int8", make=_packed_int8)
PACKED_INT4 = LinearMaker(name="torch's packed int4", make=_packed_int4)
CUDA_INT4 = LinearMaker(name="torch's packed int4 for GPUs", make=_cuda_int4)
