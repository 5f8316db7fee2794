"""Say on which nodes a model fits, what would make it fit, and how many nodes it needs.

Pure: the memory of the nodes is an argument, and that of the model comes from `hpcsched.planner.memory`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

from hpcsched.errors import RequestError
from hpcsched.listing.text import clean
from hpcsched.model.units import format_mem
from hpcsched.planner import memory

Json = dict[str, Any]

Setting = memory.Training | memory.Serving


def verb_of(asked: Setting) -> str:
    """Return what is to be done with the model."""
    return "serve" if isinstance(asked, memory.Serving) else "train"


def setting_of(options: Mapping[str, Any], nodes: int) -> Setting:
    """Return how the options want the model used, on so many nodes. Raises RequestError."""
    if options["serve"]:
        kind = options["dtype"] or "bf16"
        return memory.Serving(streams=options["streams"], context=options["context"], dtype=kind)
    kind = options["dtype"] or "fp32"
    if kind in ("int8", "int4"):
        raise RequestError(f"cannot train with weights of {kind}: --dtype is fp32, bf16 or fp16")
    return memory.Training(
        batch=options["batch"],
        sequence=options["sequence"],
        dtype=kind,
        optimizer=options["optimizer"],
        recompute=options["recompute"],
        zero_ranks=nodes if options["zero"] else 1,
    )


def need_of(model: memory.Model, asked: Setting) -> memory.Need:
    """Return the memory that the model needs on a node."""
    return (
        memory.serving_need(model, asked) if isinstance(asked, memory.Serving) else memory.training_need(model, asked)
    )


def fit_on(model: memory.Model, asked: Setting, name: str, room_mib: int, count: int) -> Json:
    """Return whether the model fits on one node, or what would make it fit."""
    need = need_of(model, asked)
    answer: Json = {"node": name, "has_mib": room_mib, "need_mib": need.mib, "fits": need.mib <= room_mib, "with": None}
    if answer["fits"]:
        return answer | {"words": "fits"}
    for words, other in changes_of(asked, count):
        if need_of(model, other).mib <= room_mib:
            return answer | {"with": words, "words": f"fits with {words}"}
    return answer | {"words": f"lacks {format_mem(need.mib - room_mib)}"}


def changes_of(asked: Setting, count: int) -> list[tuple[str, Setting]]:
    """Return the changes of a setting that take less memory, the least harmful first."""
    if isinstance(asked, memory.Serving):
        smaller = [kind for kind in ("bf16", "int8", "int4") if memory.BYTES[kind] < memory.BYTES[asked.dtype]]
        return [(f"--dtype {kind}", replace(asked, dtype=kind)) for kind in smaller]
    steps: list[tuple[str, Setting]] = [("--recompute", replace(asked, recompute=True))]
    if asked.batch > 1:
        steps.append(("--batch 1", replace(asked, batch=1)))
    steps.append(("--recompute --batch 1", replace(asked, recompute=True, batch=1)))
    if count > 1:
        steps.append(
            (
                f"--zero --recompute --batch 1 on {count} nodes",
                replace(asked, recompute=True, batch=1, zero_ranks=count),
            )
        )
    return steps


def together(need: memory.Need, asked: Setting, rooms: Sequence[tuple[str, int]]) -> Json:
    """Return whether the model fits on all nodes together; `rooms`: name and MiB of each."""
    whole = sum(room for _, room in rooms)
    if isinstance(asked, memory.Training):
        words = "Data parallel training does not add up their memory: each node needs all of it."
        return {"has_mib": whole, "fits": False, "words": words}
    held, names = 0, []
    for name, room in sorted(rooms, key=lambda item: (-item[1], item[0])):
        if held >= need.mib:
            break
        held += room
        names.append(name)
    fits_together = held >= need.mib
    if not fits_together:
        words = f"All nodes together lack {format_mem(need.mib - whole)}."
    elif len(names) == 1:
        words = f"It fits whole on {clean(names[0])}."
    else:
        words = f"Split over nodes it fits on {', '.join(map(clean, names))}."
    return {"has_mib": whole, "fits": fits_together, "nodes": names if fits_together else [], "words": words}


def least_count(model: memory.Model, asked: Setting, rooms: Sequence[int]) -> int | None:
    """Return how many of `rooms`, which descend, are needed; None if all are too little."""
    if isinstance(asked, memory.Serving):
        need, held = need_of(model, asked).mib, 0
        for count, room in enumerate(rooms, 1):
            held += room
            if held >= need:
                return count
        return None
    for count, room in enumerate(rooms, 1):
        ranks = count if asked.zero_ranks > 1 else 1
        if need_of(model, replace(asked, zero_ranks=ranks)).mib <= room:
            return count
        if asked.zero_ranks == 1:
            return None  # the largest is too small
    return None


def lacks_of(model: memory.Model, asked: Setting, rooms: Sequence[int], spare: int) -> str:
    """Return why so many of these nodes cannot do it."""
    count = least_count(model, asked, rooms)
    if count is not None:
        return f"{count} would do, and there are {len(rooms)}, too few for {spare} that may be lost"
    if isinstance(asked, memory.Serving):
        return f"together they lack {format_mem(need_of(model, asked).mib - sum(rooms))}; try --dtype int8"
    need = need_of(model, asked).mib
    largest = format_mem(max(rooms, default=0))
    return f"the largest has {largest} and needs {format_mem(need)}; hpcsched plan fits names what would help"


RING_PART = 0.1  # of a step: more time in the ring is not efficient


def link_needed(model: memory.Model, asked: Setting, count: int, gflops: float | None, rtt_ms: float) -> Json | None:
    """Return the network with which the ring of `count` ranks takes a tenth of a step."""
    if isinstance(asked, memory.Serving) or count < 2 or not gflops:
        return None
    step_s = 6 * model.params_per_token * asked.tokens / (gflops * 1e9)
    left_s = RING_PART * step_s - 2 * (count - 1) * rtt_ms / 1000
    sent = 2 * (count - 1) / count * model.params * memory.BYTES[asked.dtype]
    if left_s <= 0:
        words = (
            f"The round trips of {count} nodes at {rtt_ms:g} ms alone take over {RING_PART:.0%} of a step of {step_s:.2g} s: "
            f"fewer nodes are faster."
        )
        return {"step_s": step_s, "mbit_s": None, "words": words}
    rate = sent * 8 / left_s / 1e6
    words = (
        f"A step takes {step_s:.2g} s; so that the ring adds {RING_PART:.0%} at the most, the slowest link needs "
        f"{rate:.3g} Mbit/s ({rate / 4:.3g} with --sync int8). Slower links make more nodes slower than one."
    )
    return {"step_s": step_s, "mbit_s": rate, "words": words}


def size_text(size: float) -> str:
    """Return bytes as people write memory."""
    return format_mem(ceil(size / memory.MIB))
