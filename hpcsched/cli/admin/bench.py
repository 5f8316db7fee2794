"""`hpcsched node bench`: how fast nodes and the links between them are, and which is slow.

The controller keeps jobs away from a node while it is measured, asks its agent, and records the
result; see `hpcnode.agent.bench` for the tests and `hpcsched.metrics.bench` for the rules, and for links
`hpcnode.agent.link_speed` and `hpcsched.metrics.links`. Nodes are measured at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import datetime
from typing import Any

import click

from hpcnode.wire.protocol import BENCH_DEADLINES_S
from hpcsched import client
from hpcsched.cli.admin.node import node, write_link_rates
from hpcsched.cli.output import print_json
from hpcsched.errors import HpcschedError, NotFoundError, UnavailableError
from hpcsched.listing.text import clean, columns
from hpcsched.metrics.bench import MOST_SPREAD, BenchRun, SlowTest, bench_test, roles, run_from_json, slow_tests
from hpcsched.metrics.links import (
    LinkRun,
    best_rates,
    ends,
    last_runs,
    link_findings,
    link_from_json,
    links_limit_s,
)
from hpcsched.model.hostlist import expand_hostlist
from hpcsched.model.node import Link

AT_ONCE = 16  # nodes that are measured at the same time
EXTRA_S = 60.0  # beyond the deadline of a node

Json = dict[str, Any]


@node.command()
@click.argument("nodes", required=False, default="")
@click.option("--quick", "how", flag_value="quick", default=True, help="At most 20 s a node. The default.")
@click.option("--full", "how", flag_value="full", help="Five times as many rounds.")
@click.option(
    "--python", metavar="PATH", default="", help="Python of the users, for matrix products by torch or numpy."
)
@click.option("--links", is_flag=True, help="Measure the links between all pairs of NODES instead.")
@click.option("--now", is_flag=True, help="Measure although jobs are running; the results are not compared.")
@click.option("--show", is_flag=True, help="Measure nothing; show the last results.")
@click.option("--drain-slow", is_flag=True, help="Drain nodes that were slow in two runs.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench(
    nodes: str, how: str, python: str, links: bool, now: bool, show: bool, drain_slow: bool, as_json: bool
) -> None:
    """Measure CPUs, memory, disk and GPUs of NODES, by default of all that are up.

    No jobs start on a node while it is measured.
    """
    names = _names(nodes, everywhere=show)
    if links:
        _bench_links(names, now=now, show=show, as_json=as_json)
        return
    failed: dict[str, str] = {}
    if not show:
        body = {"how": how, "python": python, "now": now}
        with ThreadPoolExecutor(AT_ONCE) as threads:
            whys = threads.map(lambda name: _measure(name, body), names)
            failed = {name: why for name, why in zip(names, whys, strict=True) if why}
    runs = [run_from_json(view) for view in client.call("GET", "/v1/benches")["benches"]]
    last = {run.node: run for run in sorted(runs, key=lambda run: run.at_s) if run.node in names}
    slow = {name: slow_tests(name, runs) for name in last}
    good_for = roles(last, list(last_runs(_kept_links(names)).values()))
    if as_json:
        views = [
            _view(run, slow[run.node]) | {"roles": [role._asdict() for role in good_for.get(run.node, [])]}
            for run in last.values()
        ]
        print_json({"version": 1, "nodes": views, "errors": failed})
    else:
        click.echo(_table(list(last.values()), slow), nl=False)
        for line in _remarks(last, slow):
            click.echo(clean(line))
        for name, found in good_for.items():
            click.echo(clean(f"{name}: role: {'; '.join(role.text for role in found)}"))
        for why in failed.values():
            click.echo(clean(f"! {why}"), err=True)
    if drain_slow:
        _drain(slow, quiet=as_json)
    if failed:
        raise UnavailableError(f"cannot measure {len(failed)} of {len(names)} nodes: {', '.join(sorted(failed))}")


def _names(nodes: str, *, everywhere: bool) -> list[str]:
    """Return the named nodes, or all that are up; with `everywhere` also those that are not."""
    views = client.call("GET", "/v1/nodes")["nodes"]
    if not nodes:
        return [view["name"] for view in views if everywhere or view["link"] == Link.UP]
    names = list(dict.fromkeys(expand_hostlist(nodes)))
    known = {view["name"] for view in views}
    for name in names:
        if name not in known:
            raise NotFoundError(f"cannot measure {name[:60]!r}: there is no node of that name")
    return names


def _measure(name: str, body: Mapping[str, Any]) -> str:
    """Measure one node; return why it failed, "" if it did not."""
    try:
        client.call(
            "POST", "/v1/nodes/bench", {"node": name, **body}, timeout_s=BENCH_DEADLINES_S[body["how"]] + EXTRA_S
        )
    except HpcschedError as error:
        return str(error)
    return ""


def _view(run: BenchRun, slow: Sequence[SlowTest]) -> Json:
    tests = {
        name: {
            "value": value,
            "unit": bench_test(name).unit,
            "spread": run.spread.get(name),
            "judged": run.is_judged(name),
        }
        for name, value in run.values.items()
    }
    return {
        "name": run.node,
        "at_s": run.at_s,
        "how": run.how,
        "cpu_model": run.cpu_model,
        "busy": run.busy,
        "throttled": run.throttled,
        "took_s": run.took_s,
        "tests": tests,
        "notes": dict(run.notes),
        "slow": [one._asdict() for one in slow],
    }


SHOWN = ("cpu", "cpus", "memory", "disk_write", "disk_read", "fsync")


def _table(runs: Sequence[BenchRun], slow: Mapping[str, Sequence[SlowTest]]) -> str:
    products = sorted({name for run in runs for name in run.values if name not in SHOWN and name != "fsync_p95"})
    names = [*SHOWN, *products]
    headers = ["NODE", *(f"{name.upper()} {bench_test(name).unit}" for name in names), "VERDICT"]
    rows = [
        [clean(run.node), *(_cell(run, name, slow[run.node]) for name in names), _verdict(run, slow[run.node])]
        for run in runs
    ]
    return columns(headers, rows, right=range(1, len(names) + 1)) if rows else "No node has been measured.\n"


def _cell(run: BenchRun, name: str, slow: Sequence[SlowTest]) -> str:
    """Return a value; "~": its rounds differ too much, and a percentage if it is slow."""
    if name not in run.values:
        return "-"
    worst = min((one.part for one in slow if one.test == name), default=1.0)
    text = f"{run.values[name]:.4g}" + ("~" if run.spread.get(name, 0.0) > MOST_SPREAD else "")
    return text if worst == 1.0 else f"{text} {round(100 * (worst - 1)):+d}%"


def _verdict(run: BenchRun, slow: Sequence[SlowTest]) -> str:
    if run.busy:
        return "busy"
    confirmed = sorted({one.test for one in slow if one.confirmed})
    if confirmed:
        return f"SLOW: {' '.join(confirmed)}"
    return "slow, to be confirmed" if slow else "ok"


def _remarks(last: Mapping[str, BenchRun], slow: Mapping[str, Sequence[SlowTest]]) -> Iterator[str]:
    for name, run in last.items():
        when = datetime.fromtimestamp(run.at_s).isoformat(sep=" ", timespec="minutes")
        if run.busy:
            yield f"{name}: not a baseline: {run.busy} ({when})"
        for one in slow[name]:
            usual = "nodes of its class" if one.versus == "class" else "its own earlier runs"
            again = "in two runs" if one.confirmed else "in one run; a second one confirms it"
            yield (
                f"{name}: {one.test} is {one.value:.4g} {bench_test(one.test).unit}, {one.usual:.4g} is usual for {usual}: "
                f"{again}"
            )
        if run.throttled:
            yield f"{name}: its CPUs throttled {run.throttled:.0f} times meanwhile: check its cooling"
        yield from (f"{name}: {what} {why}" for what, why in run.notes.items())


def _drain(slow: Mapping[str, Sequence[SlowTest]], *, quiet: bool) -> None:
    for name, found in slow.items():
        tests = sorted({one.test for one in found if one.confirmed})
        if tests:
            client.call("POST", "/v1/nodes/drain", {"nodes": name, "why": f"slow in two runs: {' '.join(tests)}"})
            if not quiet:
                click.echo(f"drained {name}. After the repair: hctl resume {name}")


# ----- links


def _bench_links(names: Sequence[str], *, now: bool, show: bool, as_json: bool) -> None:
    """Measure the links between the nodes, and print the last runs of their pairs."""
    if not show:
        body = {"how": "links", "nodes": ",".join(names), "now": now}
        answer = client.call("POST", "/v1/nodes/bench", body, timeout_s=links_limit_s(len(names)) + EXTRA_S)
        measured = [link_from_json(view) for view in answer["links"]]
        write_link_rates(best_rates(run for run in measured if not run.busy))
    kept = _kept_links(names)
    runs = sorted(last_runs(kept).values(), key=lambda run: run.pair)
    found = list(link_findings(runs, [run for run in kept if run not in runs]))
    if as_json:
        print_json({"version": 1, "links": [asdict(run) for run in runs], "findings": found})
        return
    if not runs:
        click.echo("No links have been measured.")
        return
    click.echo(_interfaces(runs), nl=False)
    click.echo(_matrix("MBIT/S", runs, lambda run, one: run.to_mbps if run.one == one else run.from_mbps), nl=False)
    click.echo(_matrix("RTT US", runs, lambda run, _one: run.rtt_us), nl=False)
    for line in found:
        click.echo(clean(line))
    if busy := {run.busy for run in runs if run.busy}:
        click.echo(clean(f"not compared with other runs: {'; '.join(sorted(busy))}"))


def _kept_links(names: Sequence[str]) -> list[LinkRun]:
    """Return the last runs of the pairs of these nodes."""
    kept = [link_from_json(view) for view in client.call("GET", "/v1/links")["links"]]
    return [run for run in kept if set(names).issuperset(run.pair)]


def _interfaces(runs: Sequence[LinkRun]) -> str:
    """Return the table of the nodes' interfaces and best rates."""
    best = best_rates(runs)
    headers = ["NODE", "INTERFACE", "KIND", "SPEED", "MTU", "BEST MBIT/S"]
    rows = [
        [name, end.device or "-", end.kind or "-", str(end.speed_mbps or "-"), str(end.mtu or "-"), f"{best[name]:.4g}"]
        for name, end in sorted(ends(runs).items())
    ]
    return columns(headers, [[clean(word) for word in row] for row in rows], right=(3, 4, 5)) if rows else ""


def _matrix(what: str, runs: Sequence[LinkRun], value: Callable[[LinkRun, str], float]) -> str:
    """Return the matrix of all pairs: from the node of the row to that of the column."""
    names = sorted({name for run in runs for name in run.pair})
    by_pair = last_runs(runs)

    def cell(one: str, other: str) -> str:
        run = by_pair.get(frozenset((one, other)))
        if one == other or run is None:
            return "-"
        return "failed" if run.why else f"{value(run, one):.4g}"

    rows = [[clean(one), *(cell(one, other) for other in names)] for one in names]
    return columns([what, *map(clean, names)], rows, right=range(1, len(names) + 1))
