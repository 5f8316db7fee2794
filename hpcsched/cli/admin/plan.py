"""`hpcsched plan`: what fits, what it takes, and what another machine would be worth.

    fits           does a model fit on the nodes, one by one and together
    minimum        the fewest nodes that train or hold a model
    worth          the past again, and the weeks ahead, with more machines
    forecast       use and waits of the weeks ahead
    upgrade-cycle  what each node did, and what its electricity costs

`hpcsched maintenance suggest` finds the hours in which nodes are least used.

The modules of `hpcsched.planner` compute; this module asks the controller, and writes the answers. Instead of the cluster's
own history it reads a log in the Standard Workload Format (--trace), as hsim does.

All answers name what they do not know. A forecast needs four weeks of history; with less there is only the replay.
"""

from __future__ import annotations

import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from math import ceil
from pathlib import Path
from typing import Any

import click

from hpcsched import client
from hpcsched.cli.output import print_json
from hpcsched.errors import RequestError
from hpcsched.listing.text import clean, columns, date_text
from hpcsched.model.hostlist import compress_hostlist, expand_hostlist
from hpcsched.model.units import format_mem, nearest, parse_mem_mib
from hpcsched.planner import memory
from hpcsched.planner.capacity import (
    AHEAD_DAYS,
    DAY_S,
    DRAWS,
    HISTORY_DAYS,
    LEAST_DAYS,
    WARM_DAYS,
    Arrival,
    Band,
    PlanNode,
    PlanNodes,
    ReplayResult,
    backtest,
    day_of,
    days_of,
    midnight_s,
    replayed,
)
from hpcsched.planner.fits import (
    fit_on,
    lacks_of,
    least_count,
    link_needed,
    need_of,
    setting_of,
    size_text,
    together,
    verb_of,
)
from hpcsched.planner.windows import HOUR_S, NodeUse, QuietWindow, quiet_windows
from hpcsched.planner.worth import (
    HOURS_A_YEAR,
    MOST_PRICE,
    UNKNOWN,
    Past,
    Prices,
    added_nodes,
    bands_of,
    cost_lines,
    costs_of,
    days_ahead,
    forecast_lines,
    hours_text,
    instead_of,
    machines_of,
    past_of,
    replay_sentences,
)
from hpcsched.sched.sentences import plural
from hpcsched.sched.snapshot import Snapshot, snapshot_from_json
from hpcsched.sim.swf import read_trace

Json = dict[str, Any]
MOST_JOBS = 200_000  # of the history: more would not fit into the memory of a laptop


class Money(click.FloatRange):
    """A finite amount that is not negative."""

    name = "number"

    def __init__(self) -> None:
        super().__init__(min=0, max=MOST_PRICE)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found: float = super().convert(value, param, ctx)
        if found != found:
            self.fail("it is not a number", param, ctx)
        return found


@click.group("plan")
def plan() -> None:
    """Answer what fits, what it takes, and what another machine would be worth."""


Decorator = Callable[[Callable[..., int]], Callable[..., int]]


def _all_of(*options: Callable[..., Any]) -> Decorator:
    """Return a decorator that adds these options."""

    def add(command: Callable[..., int]) -> Callable[..., int]:
        for option in options:
            command = option(command)
        return command

    return add


_source_options = _all_of(
    click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON."),
    click.option("--cpus", metavar="N", type=click.IntRange(1, 10**7), help="With --trace: processors of the machine."),
    click.option(
        "--trace",
        metavar="FILE",
        type=click.Path(path_type=Path),
        help="Take the jobs of this log (Standard Workload Format, also gzip'ed) instead of the cluster's own.",
    ),
)


_draw_options = _all_of(
    click.option("--seed", type=click.IntRange(0, 2**31), default=1, show_default=True, help="Seed of the draws."),
    click.option(
        "--draws",
        metavar="N",
        type=click.IntRange(5, 1000),
        default=DRAWS,
        show_default=True,
        help="Number of draws.",
    ),
    click.option(
        "--days",
        metavar="N",
        type=click.IntRange(1, 92),
        default=AHEAD_DAYS,
        show_default=True,
        help="Days to replay, and days ahead.",
    ),
)


# ----- worth


@plan.command("worth")
@click.option(
    "--add",
    metavar="NODES",
    multiple=True,
    required=True,
    help="More nodes: COUNTxCPUS:MEM[:gpu:TYPE:N], for example 1x16:64G:gpu:rtx4090:1. Can be repeated.",
)
@click.option("--partition", metavar="NAME", help="Partition of the new nodes. Default: all.")
@click.option("--price", metavar="AMOUNT", type=Money(), help="Price of all of them.")
@click.option("--watts", metavar="W", type=Money(), help="Power that all of them draw under load.")
@click.option("--kwh", metavar="AMOUNT", type=Money(), help="Price of a kWh of electricity.")
@click.option("--backtest", "test_back", is_flag=True, help="Also test the bands on the past, which takes longer.")
@click.option("--cloud", metavar="AMOUNT", type=Money(), help="Price of an hour of such a node elsewhere, to compare.")
@_draw_options
@_source_options
def worth(
    add: tuple[str, ...],
    partition: str | None,
    price: float | None,
    watts: float | None,
    kwh: float | None,
    cloud: float | None,
    test_back: bool,
    days: int,
    draws: int,
    seed: int,
    trace: Path | None,
    cpus: int | None,
    as_json: bool,
) -> int:
    """Replay the past, and draw the weeks ahead, with more machines.

    Two answers, kept apart: the jobs of the last days again with these nodes, which needs no forecast; and the days ahead, drawn
    from the weeks before. Then costs, and cheaper ways to shorten the waits.
    """
    past = _past(trace, cpus, days)
    new = added_nodes(add, past, partition)
    more = (*past.machines, *new)
    span = _span(past, days)
    answer: Json = {"source": past.name, "days": days, "added": [_machine_json(machine) for machine in new]}
    now, then = (replayed(machines, past.jobs, *span) for machines in (past.machines, more))
    answer["past"] = {"now": asdict(now), "with": asdict(then)}
    drawn = days_ahead((past.machines, more), past, days, draws, seed)
    if drawn is not None:
        answer["ahead"] = {"draws": draws, "now": bands_of(drawn, 0), "with": bands_of(drawn, 1)}
    if test_back:
        answer["backtest"] = _backtest_json(past, more, days, draws, seed)
    prices = Prices(price=price, watts=watts, kwh=kwh, cloud=cloud)
    answer["costs"] = costs_of(now, then, new, days, prices)
    answer["instead"] = instead_of(past, span, now)
    if as_json:
        print_json(answer)
    else:
        click.echo(_worth_text(answer, past, now, then), nl=False)
    return 0


def _worth_text(answer: Json, past: Past, now: ReplayResult, then: ReplayResult) -> str:
    if not now.waits.jobs:
        return f"No job was submitted in the last {answer['days']} days: nothing to replay.\n"
    first, *others = replay_sentences(answer["days"], now, then)
    lines = [first, *(f"  {text}" for text in others)]
    lines += _table_lines(now, then)
    lines += forecast_lines(answer, past)
    lines += cost_lines(answer["costs"])
    lines += [f"Instead: {each['text']}" for each in answer["instead"]]
    lines.append(UNKNOWN)
    return "\n".join(lines) + "\n"


def _table_lines(now: ReplayResult, then: ReplayResult) -> list[str]:
    rows = []
    for title, groups, others in (
        ("partition", now.by_partition, then.by_partition),
        ("user", now.by_user, then.by_user),
    ):
        worst = sorted(groups.items(), key=lambda item: -item[1].total_s)[:5]
        if len(groups) > 1:
            rows += [
                (
                    title,
                    clean(name),
                    str(waits.jobs),
                    hours_text(waits.mean_s),
                    hours_text(others[name].mean_s if name in others else 0),
                )
                for name, waits in worst
            ]
    if not rows:
        return []
    return columns(("", "NAME", "JOBS", "WAIT", "WITH_IT"), rows, right=(2, 3, 4)).rstrip("\n").split("\n")


# ----- forecast


@plan.command("forecast")
@_draw_options
@_source_options
def forecast(days: int, draws: int, seed: int, trace: Path | None, cpus: int | None, as_json: bool) -> int:
    """Forecast use and waits of the days ahead, as bands."""
    past = _past(trace, cpus, HISTORY_DAYS)
    drawn = days_ahead((past.machines,), past, days, draws, seed)
    if drawn is None:
        raise RequestError(
            f"cannot forecast: there are {past.whole_days} days of history, and a forecast needs {LEAST_DAYS}. "
            f"hpcsched plan worth replays what there is"
        )
    bands = bands_of(drawn, 0)
    if as_json:
        print_json({"source": past.name, "days": days, "draws": draws, **bands})
        return 0
    rows = [("mean wait", *(hours_text(bands["wait_mean_s"][name]) for name in Band._fields))]
    if any(machine.gpus for machine in past.machines):
        rows.append(("mean wait of GPU jobs", *(hours_text(bands["gpu_wait_mean_s"][name]) for name in Band._fields)))
        rows.append(("use of GPUs", *(f"{bands['gpu_utilization'][name]:.0%}" for name in Band._fields)))
    rows.append(("use of cpus", *(f"{bands['utilization'][name]:.0%}" for name in Band._fields)))
    rows.append(("jobs", *(f"{bands['jobs'][name]:.0f}" for name in Band._fields)))
    click.echo(
        f"The next {days} days ({draws} draws of {min(past.whole_days, HISTORY_DAYS)} days; 80 % are between LOW and HIGH)"
    )
    click.echo(columns(("", "MEDIAN", "LOW", "HIGH"), rows, right=(1, 2, 3)), nl=False)
    return 0


# ----- upgrade-cycle


@plan.command("upgrade-cycle")
@click.option("--watts", metavar="NODE=W,...", default="", help="Power that nodes draw under load.")
@click.option(
    "--idle",
    metavar="PART",
    type=click.FloatRange(0, 1),
    default=0.3,
    show_default=True,
    help="Part of it that an idle node draws.",
)
@click.option("--kwh", metavar="AMOUNT", type=Money(), help="Price of a kWh of electricity.")
@click.option(
    "--days", metavar="N", type=click.IntRange(1, 366), default=AHEAD_DAYS, show_default=True, help="Days of the past."
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def upgrade_cycle(watts: str, idle: float, kwh: float | None, days: int, as_json: bool) -> int:
    """Show what each node did, its part of all work, and what its electricity costs.

    The least work for its power comes first. Work is cpu hours times the measured speed of the node.
    """
    past = _past(None, None, days)
    power = _watts(watts, past.machines)
    rows = _node_work(past, days, power, idle, kwh)
    if as_json:
        print_json({"days": days, "nodes": rows})
        return 0
    cells = [
        (
            clean(row["node"]),
            str(row["cpus"]),
            str(row["gpus"]),
            f"{row['speed']:.2f}" if row["speed"] else "-",
            f"{row['use']:.0%}",
            f"{row['part']:.1%}",
            f"{row['gpu_part']:.1%}" if row["gpus"] else "-",
            f"{row['kwh_a_year']:.0f}" if row["kwh_a_year"] is not None else "-",
            f"{row['cost_a_year']:.0f}" if row["cost_a_year"] is not None else "-",
        )
        for row in rows
    ]
    headers = ("NODE", "CPUS", "GPUS", "SPEED", "USE", "WORK", "GPU_WORK", "KWH_A_YEAR", "COST_A_YEAR")
    click.echo(columns(headers, cells, right=range(1, len(headers))), nl=False)
    if not power:
        click.echo("Power is not known: --watts n1=350,n2=120 --kwh 0.30")
    return 0


def _node_work(past: Past, days: int, power: Mapping[str, float], idle: float, kwh: float | None) -> list[Json]:
    span_s = min(days * DAY_S, max(1.0, past.now_s - past.began_s))
    work = {machine.name: past.work.get(machine.name, (0.0, 0.0)) for machine in past.machines}
    speed = {machine.name: past.speeds.get(machine.name, 0.0) for machine in past.machines}
    all_cpu = sum(cpu_s * (speed[name] or 1.0) for name, (cpu_s, _) in work.items()) or 1.0
    all_gpu = sum(gpu_s for _, gpu_s in work.values()) or 1.0
    rows: list[Json] = []
    for machine in past.machines:
        cpu_s, gpu_s = work[machine.name]
        use = min(1.0, cpu_s / (machine.cpus * span_s))
        if machine.gpus:
            use = max(use, min(1.0, gpu_s / (machine.gpus * span_s)))
        watts = power.get(machine.name)
        energy = watts * (idle + (1 - idle) * use) * HOURS_A_YEAR / 1000 if watts is not None else None
        rows.append(
            {
                "node": machine.name,
                "cpus": machine.cpus,
                "gpus": machine.gpus,
                "speed": speed[machine.name],
                "use": use,
                "part": cpu_s * (speed[machine.name] or 1.0) / all_cpu,
                "gpu_part": gpu_s / all_gpu,
                "kwh_a_year": energy,
                "cost_a_year": energy * kwh if energy is not None and kwh is not None else None,
            }
        )
    return sorted(rows, key=lambda row: ((row["part"] + row["gpu_part"]) / (row["kwh_a_year"] or 1.0), row["node"]))


def _watts(text: str, machines: PlanNodes) -> dict[str, float]:
    known = {machine.name for machine in machines}
    found = {}
    for word in filter(None, text.split(",")):
        name, _, value = word.partition("=")
        if name not in known:
            raise RequestError(f"cannot tell the power of {name[:60]!r}: there is no such node{nearest(name, known)}")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = -1.0
        if not 0 <= found[name] <= 1e6:
            raise RequestError(f"cannot tell the power of {name[:60]!r}: write watts, as {name[:60]}=350")
    return found


# ----- fits and minimum


_model_options = _all_of(
    click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON."),
    click.option(
        "--gpu-memory",
        metavar="TYPE=SIZE,...",
        default="",
        help="Memory of GPUs, for example a100=80G. Then GPUs count, not main memory.",
    ),
    click.option("--zero", is_flag=True, help="Divide the optimizer among the nodes (ZeRO stage 1)."),
    click.option("--recompute", is_flag=True, help="Recompute activations in the backward pass."),
    click.option("--optimizer", type=click.Choice(sorted(memory.OPTIMIZERS)), default="adamw", show_default=True),
    click.option(
        "--dtype",
        type=click.Choice(sorted(memory.BYTES)),
        help="Numbers of weights. Default: fp32 to train, bf16 to serve.",
    ),
    click.option(
        "--context",
        metavar="N",
        type=click.IntRange(1, 10**7),
        default=4096,
        show_default=True,
        help="To serve: tokens of a conversation.",
    ),
    click.option(
        "--streams",
        metavar="N",
        type=click.IntRange(1, 10**5),
        default=1,
        show_default=True,
        help="To serve: conversations at a time.",
    ),
    click.option(
        "--sequence",
        metavar="N",
        type=click.IntRange(1, 10**6),
        default=1024,
        show_default=True,
        help="To train: tokens of a sequence.",
    ),
    click.option(
        "--batch",
        metavar="N",
        type=click.IntRange(1, 10**5),
        default=1,
        show_default=True,
        help="To train: sequences at a time on each node.",
    ),
    click.option("--serve", is_flag=True, help="To serve it instead of training it."),
    *(
        click.option(f"--{name}", metavar="N", type=click.IntRange(0, memory.MOST), default=0)
        for name in ("ffn", "vocab", "kv-heads", "heads", "hidden", "layers")
    ),
    click.option(
        "--params",
        metavar="COUNT",
        default="",
        help="Parameters, for example 7B, with or without the other numbers.",
    ),
    click.argument("model", metavar="[MODEL]", default=""),
)


@plan.command("fits")
@_model_options
def fits(**options: Any) -> int:
    """Say on which nodes a model fits, to train it or to serve it.

    MODEL is a config.json of Hugging Face, or a directory with one; or give its numbers. With data parallel training every node
    needs all of it; a served model can be split over nodes.
    """
    model, rooms = _model(options), _rooms(options)
    asked = setting_of(options, len(rooms))
    need = need_of(model, asked)
    nodes = [fit_on(model, asked, name, room, len(rooms)) for name, room in rooms]
    on_all = together(need, asked, rooms)
    if options["as_json"]:
        print_json(
            {
                "model": {"name": model.name, "params": model.params},
                "setting": asdict(asked),
                "need_mib": need.mib,
                "parts_mib": {name: ceil(size / memory.MIB) for name, size in need.parts.items()},
                "nodes": nodes,
                "together": on_all,
            }
        )
        return 0
    what = "serve" if isinstance(asked, memory.Serving) else "train"
    parts = ", ".join(f"{name} {size_text(size)}" for name, size in need.parts.items() if size >= memory.MIB)
    click.echo(
        f"{clean(model.name)}: {model.params / 1e9:.3g} billion parameters; to {what} it takes {size_text(need.total)} on a node"
    )
    click.echo(f"  {parts}; not all at a time, and with what the allocator and Python take on top")
    cells = [(clean(node["node"]), format_mem(node["has_mib"]), node["words"]) for node in nodes]
    click.echo(columns(("NODE", "HAS", "VERDICT"), cells), nl=False)
    click.echo(on_all["words"])
    return 0


@plan.command("minimum")
@click.option(
    "--spare", metavar="N", type=click.IntRange(0, 100), default=0, show_default=True, help="Nodes that may be lost."
)
@click.option("--gflops", metavar="N", type=Money(), help="Speed of a node in training, in 10^9 operations a second.")
@click.option("--rtt-ms", metavar="MS", type=Money(), default=0.3, show_default=True, help="Round trip between nodes.")
@_model_options
def minimum(spare: int, gflops: float | None, rtt_ms: float, **options: Any) -> int:
    """Find the fewest nodes that train or hold a model, and the network that they need."""
    model, rooms = _model(options), _rooms(options)
    asked = setting_of(options, len(rooms))
    ordered = sorted(rooms, key=lambda item: (-item[1], item[0]))
    count = least_count(model, asked, [room for _, room in ordered])
    answer: Json = {"model": {"name": model.name, "params": model.params}, "setting": asdict(asked), "spare": spare}
    if count is None or count + spare > len(ordered):
        lacks = lacks_of(model, asked, [room for _, room in ordered], spare)
        raise RequestError(f"cannot {verb_of(asked)} {model.name} on these nodes: {lacks}")
    chosen = ordered[: count + spare]
    answer["nodes"] = [name for name, _ in chosen]
    answer["link"] = link_needed(model, asked, len(chosen), gflops, rtt_ms)
    if options["as_json"]:
        print_json(answer)
        return 0
    click.echo(
        f"{clean(model.name)}: {count} node{'s' if count > 1 else ''} can {verb_of(asked)} it"
        f"{f', and {spare} more so that {spare} may be lost' if spare else ''}: {', '.join(map(clean, answer['nodes']))}"
    )
    if answer["link"] is not None:
        click.echo(answer["link"]["words"])
    elif len(chosen) > 1 and isinstance(asked, memory.Training):
        click.echo("Which network it needs depends on the speed of the nodes: --gflops N")
    return 0


def _model(options: Json) -> memory.Model:
    path = options["model"]
    numbers = {name: options[name] for name in ("params", "layers", "hidden", "heads", "kv_heads", "vocab", "ffn")}
    if not path:
        return memory.model_from_numbers(**numbers)
    if any(numbers.values()):
        raise RequestError("cannot tell which model: give MODEL, or its numbers, not both")
    try:
        file = Path(path)
        file = file / "config.json" if file.is_dir() else file
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), encoding="utf-8") as source:
            if not stat.S_ISREG(os.fstat(source.fileno()).st_mode):
                raise RequestError(f"cannot read the model {path[:200]!r}: it is not a file")
            text = source.read(memory.MIB)
    except (OSError, ValueError) as error:  # also of text that is not UTF-8, and of a name with a NUL
        raise RequestError(
            f"cannot read the model {path[:200]!r}: {getattr(error, 'strerror', None) or error}"
        ) from None
    return memory.read_config(text, path)


def _rooms(options: Json) -> list[tuple[str, int]]:
    """Return the memory of each node in MiB: of its GPUs if their sizes are given."""
    sizes = {}
    for word in filter(None, options["gpu_memory"].split(",")):
        kind, _, size = word.partition("=")
        sizes[kind.lower()] = parse_mem_mib(size)
    machines = machines_of(_snapshot())
    if not sizes:
        return [(machine.name, machine.mem_mib) for machine in machines]
    rooms = [
        (machine.name, sizes[machine.gpu_type] * machine.gpus) for machine in machines if machine.gpu_type in sizes
    ]
    if not rooms:
        raise RequestError(f"cannot find a GPU of type {', '.join(sizes)[:60]}: hinfo shows the nodes' GPUs")
    return rooms


# ----- maintenance


SHOWN_WINDOWS = 5


@click.group()
def maintenance() -> None:
    """Find hours for maintenance, and reserve them."""


@maintenance.command()
@click.option("--hours", metavar="N", type=click.IntRange(1, 72), required=True, help="Length of the maintenance.")
@click.option("--nodes", "hosts", metavar="HOSTS", default="", help="Nodes: n[1-3],m7. Default: all.")
@click.option(
    "--within", metavar="DAYS", type=click.IntRange(1, 56), default=14, show_default=True, help="How far to look ahead."
)
@click.option("--book", metavar="NAME", help="Reserve the nodes in the best window, for maintenance, under this name.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def suggest(hours: int, hosts: str, within: int, book: str | None, as_json: bool) -> int:
    """Show the windows in which the nodes are least used.

    What a window displaces is the mean of the same hours in the last four weeks, and what running jobs hold by their time limits.
    """
    views = client.call("GET", "/v1/nodes")["nodes"]
    known = [view["name"] for view in views]
    nodes = expand_hostlist(hosts) if hosts else known
    for name in nodes:
        if name not in known:
            raise RequestError(f"cannot plan for {name[:60]!r}: there is no node of that name{nearest(name, known)}")
    found = _quiet_windows(nodes, hours, within)
    if not found:
        raise RequestError(f"cannot find {hours} hours within {plural(within, 'day')}: nodes are reserved all the time")
    command = _booking(book or "maintenance", nodes, found[0])
    if book is not None:
        _book(book, nodes, found[0])
    if as_json:
        windows = [one._asdict() for one in found[:SHOWN_WINDOWS]]
        print_json({"version": 1, "nodes": nodes, "windows": windows, "worst": found[-1]._asdict(), "booked": book})
        return 0
    rows = [_window_row(one) for one in [*found[:SHOWN_WINDOWS], found[-1]]]
    click.echo(
        columns(["START", "GPU-HOURS", "CPU-HOURS", "JOBS THAT MAY RUN INTO IT"], rows, right=(1, 2, 3)), nl=False
    )
    click.echo(
        "The last line is the worst window." if len(found) > SHOWN_WINDOWS else "The last line is the worst again."
    )
    click.echo(f"reserved as {book}" if book is not None else f"To reserve the first: {command}, or --book NAME")
    return 0


def _window_row(window: QuietWindow) -> list[str]:
    start = time.strftime("%a %Y-%m-%d %H:%M", time.localtime(window.start_s))
    return [start, f"{window.gpu_hours:.1f}", f"{window.cpu_hours:.1f}", str(window.running)]


def _booking(name: str, nodes: Sequence[str], window: QuietWindow) -> str:
    words = _booking_words(nodes, window)
    return f"hctl create reservation {name} " + " ".join(f"{key}={value}" for key, value in words.items())


def _booking_words(nodes: Sequence[str], window: QuietWindow) -> dict[str, str]:
    minutes = round((window.end_s - window.start_s) / 60)
    return {
        "StartTime": date_text(window.start_s),
        "Duration": str(minutes),
        "Users": "root",
        "Nodes": compress_hostlist(nodes),
        "Flags": "MAINT",
    }


def _book(name: str, nodes: Sequence[str], window: QuietWindow) -> None:
    client.call("POST", "/v1/reservations/create", {"name": name, "changes": _booking_words(nodes, window)})


def _quiet_windows(nodes: Sequence[str], hours: int, within: int) -> list[QuietWindow]:
    """Return the windows for these nodes, the quietest first.

    Raises RequestError without history.
    """
    now_s = time.time()
    local = time.localtime(now_s)
    from_s = now_s - local.tm_min * 60 - local.tm_sec - now_s % 1 + HOUR_S
    past: list[NodeUse] = []
    running: list[NodeUse] = []
    since_s = now_s
    for view in _history(now_s - HISTORY_DAYS * DAY_S):
        began_s, ended_s = view["started_at_s"], view["ended_at_s"]
        since_s = min(since_s, view["submitted_at_s"])
        if began_s is None:
            continue
        limit_s = view["time_limit_s"]
        until_s = ended_s if ended_s is not None else began_s + limit_s if limit_s else from_s + within * DAY_S
        for share in view["shares"]:
            use = NodeUse(share["node"], began_s, until_s, share["cpus"], len(share["gpus"]))
            (running if ended_s is None else past).append(use)
    taken = [one for one in client.call("GET", "/v1/reservations")["reservations"] if set(one["nodes"]) & set(nodes)]

    def is_closed(start_s: float, end_s: float) -> bool:
        return any(one["start_s"] < end_s and one["end_s"] > start_s for one in taken)

    try:
        return quiet_windows(
            past,
            running,
            nodes=frozenset(nodes),
            since_s=since_s,
            from_s=from_s,
            within_s=within * DAY_S,
            hours=hours,
            is_closed=is_closed,
        )
    except ValueError as error:
        raise RequestError(
            f"cannot suggest a window: {error}; choose a time yourself: hctl create reservation"
        ) from None


# ----- the past: of the cluster, or of a log


def _past(trace: Path | None, cpus: int | None, days: int) -> Past:
    if trace is not None:
        return _trace_past(trace, cpus)
    if cpus is not None:
        raise RequestError("cannot use --cpus without --trace: the cluster's own machines are known")
    return cluster_past(max(days, HISTORY_DAYS) * 2 + WARM_DAYS, days)


def _trace_past(path: Path, cpus: int | None) -> Past:
    found = read_trace(path)
    size = cpus or found.procs
    if size <= 0:
        raise RequestError(f"cannot tell the size of the machine: {found.name} has no MaxProcs; give --cpus")
    jobs = tuple(
        Arrival(job.submit_s, job.run_s, job.asked_s, 1, job.procs, 0, user=str(job.user)) for job in found.jobs
    )
    last_s = max((job.submit_s for job in jobs), default=0.0)
    now_s = midnight_s(day_of(last_s, False) + 1, False)
    return Past(
        name=found.name, machines=(PlanNode("pool", size, 0),), jobs=jobs, now_s=now_s, local=False, speeds={}, work={}
    )


def _snapshot() -> Snapshot:
    return snapshot_from_json(client.call("GET", "/v1/snapshot")["snapshot"])[0]


def cluster_past(days: int, work_days: int = 0) -> Past:
    """Return the machines of the cluster and its jobs of the last `days` days.

    The work is that of the last `work_days` days. Raises HpcschedError.
    """
    snapshot = _snapshot()
    return past_of(snapshot, _history(snapshot.now_s - days * DAY_S), work_days)


def _history(since_s: float) -> list[Json]:
    """Return the jobs of the history since then, as the API shows them, at most `MOST_JOBS`.

    If there are more, it says whose they are: one user's many small jobs may push those of others out.
    """
    answer = client.history(MOST_JOBS, start_s=since_s)
    found: list[Json] = answer["jobs"]
    if not answer.get("next_cursor"):
        return found
    user, count = Counter(str(view["user"]) for view in found).most_common(1)[0]
    since = date_text(min(view["submitted_at_s"] for view in found))
    click.echo(
        clean(f"! only the newest {len(found)} jobs are in this, since {since}; {count} of them are of {user}"),
        err=True,
    )
    return found


def _span(past: Past, days: int) -> tuple[float, float]:
    return past.now_s - days * DAY_S, past.now_s


def _backtest_json(past: Past, more: PlanNodes, days: int, draws: int, seed: int) -> Json | None:
    if past.whole_days < HISTORY_DAYS + days:
        return None
    tested = backtest(
        past.machines, more, days_of(past.jobs, past.local), past.local, count=days, draws=draws, seed=seed
    )
    return tested._asdict()


def _machine_json(machine: PlanNode) -> Json:
    return {**machine._asdict(), "partitions": sorted(machine.partitions)}
