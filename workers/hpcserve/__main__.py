"""The commands of hpcserve.

`python -m hpcserve run|plan|quantize|prune|perplexity|hash ...`

`hserve` and the jobs of services run them. Exit statuses: 0, 1 if the command failed or the model does not fit, 2 for wrong
options.
Rules: what users and files say is checked here, in one place, before anything is read or written.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpcserve.config import StoredKind, read_config
from hpcserve.errors import ServeError
from hpcserve.group import front
from hpcserve.group.measure import measured_node
from hpcserve.plan import (
    GIB,
    KERNELS,
    LinkFacts,
    LinkTable,
    PlanCandidate,
    PlanGoal,
    RankMemory,
    ServeLoad,
    ServeNode,
    ServePlan,
    gib,
    make_plan,
    model_shape,
)
from hpcserve.smaller.perplexity import TextScore, perplexity, read_text
from hpcserve.smaller.prune import prune_model
from hpcserve.smaller.quantize import ModelSize, model_size, quantize_model
from hpcserve.weights import HASHES_NAME, write_hashes

MOST_NODES = 1000
MOST_NODES_BYTES = 4 << 20
MOST_LINKS = 10 * MOST_NODES
MOST_NOTES, MOST_NOTE_CHARACTERS = 20, 2000
DEFAULT_CONTEXT_TOKENS = 4096
SHOWN_CANDIDATES = 20


def main(words: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    options = make_parser().parse_args(words)
    try:
        status: int = options.work(options)
    except ServeError as error:
        print(f"hserve: {error}", file=sys.stderr)
        return 1
    return status


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(prog="hserve", description="Serve a language model from one or several nodes.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="serve a model from the nodes of a job, or from this machine")
    front.add_options(run)
    run.set_defaults(work=front.run)
    plan = commands.add_parser(
        "plan", help="show how nodes can share a model, and how fast they would be", allow_abbrev=False
    )
    add_plan_options(plan)
    plan.set_defaults(work=show_plan)
    quantize = commands.add_parser("quantize", help="make a smaller model: matrices as int8 or int4")
    quantize.add_argument("--kind", choices=("int8", "int4"), default="int8", help="the new numbers (%(default)s)")
    quantize.set_defaults(work=quantize_and_report)
    prune = commands.add_parser("prune", help="make a smaller model: fewer FFN columns, chosen by a text")
    prune.add_argument(
        "--share", type=share, default=0.75, metavar="S", help="of the FFN's columns that stays (%(default)s)"
    )
    prune.set_defaults(work=prune_and_report)
    judge = commands.add_parser("perplexity", help="judge a model by a text")
    judge.set_defaults(work=show_perplexity)
    hashes = commands.add_parser("hash", help="write hashes of a model's weights, by which ranks verify what they read")
    hashes.add_argument("model", type=Path, metavar="MODEL", help="directory of the model")
    hashes.set_defaults(work=hash_model)
    for command in (quantize, prune, judge):
        command.add_argument("model", type=Path, metavar="MODEL", help="directory of the model")
        if command is not judge:
            command.add_argument("target", type=Path, metavar="TARGET", help="new directory")
        command.add_argument(
            "--text", type=Path, metavar="FILE", help="text to judge by (default: source of a module of Python)"
        )
        command.add_argument(
            "--tokens", type=count, default=8192, metavar="N", help="of the text that are used (%(default)s)"
        )
        command.add_argument("--json", action="store_true", help="print as JSON, version 1")
    return parser


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `plan`."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="directory of the model; its config.json is enough")
    parser.add_argument(
        "--nodes",
        nargs="+",
        default=[],
        metavar="NODE",
        help="NAME:free=GIB,bw=GB_S[,flops=GFLOP_S,cores=N,watts=W], or a JSON file of nodes and links (-: standard input). "
        "With hserve also names of the cluster's nodes, such as n[1-4]. Default: all nodes that you may use, else this machine",
    )
    parser.add_argument(
        "--link",
        type=link,
        default=LinkFacts(),
        metavar="MS,GBIT",
        help="link between nodes for which no other is known (0.2,0.94: 1 Gbit/s)",
    )
    parser.add_argument(
        "--goal",
        type=PlanGoal,
        choices=list(PlanGoal),
        default=PlanGoal.LATENCY,
        help="what the best is best at: latency, throughput or energy (%(default)s)",
    )
    parser.add_argument(
        "--quantize", choices=tuple(KERNELS), metavar="KIND", help="fp32, bf16, int8, int4 (as stored, else bf16)"
    )
    parser.add_argument("--streams", type=count, default=1, metavar="N", help="requests at once (%(default)s)")
    parser.add_argument("--prompt", type=count, default=256, metavar="N", help="tokens of a prompt (%(default)s)")
    parser.add_argument("--answer", type=count, default=256, metavar="N", help="tokens of an answer (%(default)s)")
    parser.add_argument(
        "--context", type=count, metavar="N", help="longest request that fits (4096, or what the model has)"
    )
    parser.add_argument("--json", action="store_true", help="print as JSON, version 1")


def count(text: str) -> int:
    """Return a whole number from 1."""
    if not text.isdecimal() or not 1 <= int(text) <= 1 << 24:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 1 to {1 << 24}")
    return int(text)


def share(text: str) -> float:
    """Return a number between 0 and 1."""
    found = number(text)
    if not found < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not between 0 and 1, such as 0.75")
    return found


def number(text: str) -> float:
    """Return a number above 0."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < 1e15:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
    return found


def link(text: str) -> LinkFacts:
    """Return a link from milliseconds of latency and Gbit/s."""
    latency, comma, rate = text.partition(",")
    if not comma:
        raise argparse.ArgumentTypeError(f"'{text}' is not MILLISECONDS,GBIT_S, such as 0.2,0.94")
    return LinkFacts(latency_s=number(latency) / 1000, rate_bytes_s=number(rate) * 1e9 / 8)


# ----- nodes, from the command line or a file

FIELDS: Mapping[str, tuple[str, float]] = {
    "free": ("free_bytes", GIB),
    "bw": ("read_bytes_s", 1e9),
    "flops": ("flops_s", 1e9),
    "cores": ("cores", 1),
    "watts": ("watts", 1),
}


class GivenNodes(NamedTuple):
    """The nodes and links to plan with, and what is to be known of them."""

    nodes: list[ServeNode]
    links: LinkTable
    notes: list[str]


def given_nodes(options: argparse.Namespace, kind: str) -> GivenNodes:
    """Return the nodes and links that the options name; without any, this machine is measured.

    Raises:
        ServeError: one of them cannot be read.
    """
    if not options.nodes:
        return GivenNodes([measured_node("this machine", kind)], LinkTable(default=options.link), [])
    if len(options.nodes) == 1 and ":" not in options.nodes[0]:
        found = from_file(Path(options.nodes[0]), options.link)
    else:
        nodes = [from_words(text) for text in options.nodes[:MOST_NODES]]
        found = GivenNodes(nodes, LinkTable(default=options.link), [])
    return found._replace(notes=[*found.notes, *unknown_links(found.nodes, found.links)])


def unknown_links(nodes: Sequence[ServeNode], links: LinkTable) -> list[str]:
    """Return a note on the pairs of nodes whose link is not known; none if all are."""
    names = sorted(node.name for node in nodes)
    pairs = [pair for pair in itertools.combinations(names, 2) if frozenset(pair) not in links.pairs]
    if not pairs:
        return []
    shown = ", ".join(f"{one} and {other}" for one, other in pairs[:2])
    more = f", and {len(pairs) - 2} more pairs" if len(pairs) > 2 else ""
    taken = f"{links.default.rate_bytes_s * 8e-9:.3g} Gbit/s, {links.default.latency_s * 1000:.3g} ms"
    return [f"unknown links are taken as {taken} ('hpcsched node bench --links' measures them): {shown}{more}"]


def from_words(text: str) -> ServeNode:
    """Return the node that `NAME:free=..,bw=..` describes.

    Raises:
        ServeError: it is written in another way.
    """
    name, _, rest = text.partition(":")
    values = dict(word.partition("=")[::2] for word in rest.split(",") if word)
    return node_of(name, values)


def node_of(name: object, values: Mapping[str, object]) -> ServeNode:
    """Return a node from values in the units of the command line.

    Raises:
        ServeError: a value is missing, unknown or not a number.
    """
    if not isinstance(name, str) or not name or len(name) > 255 or not name.isprintable():
        raise ServeError("cannot read a node: it has no name; write NAME:free=8,bw=20")
    unknown = sorted(values.keys() - FIELDS.keys())
    if unknown or "free" not in values:
        wrong = f"'{unknown[0]}' is unknown" if unknown else "its free memory is missing"
        raise ServeError(f"cannot read node '{name}': {wrong}; write NAME:free=GIB,bw=GB_S and {', '.join(FIELDS)}")
    facts: dict[str, Any] = {}
    for key, value in values.items():
        field, unit = FIELDS[key]
        try:
            facts[field] = number(str(value)) * unit
        except argparse.ArgumentTypeError as error:
            raise ServeError(f"cannot read node '{name}': {key} {error}") from None
    facts["free_bytes"] = int(facts["free_bytes"])
    facts["cores"] = int(facts.get("cores", 1)) or 1
    return ServeNode(name=name, **facts)


def from_file(path: Path, default: LinkFacts) -> GivenNodes:
    """Return nodes, links and notes of a JSON file; `-` is the standard input.

    `{"nodes": [{"name": "n1", "free": 8, "bw": 20}], "links": [{"nodes": ["n1", "n2"], "ms": 0.2, "gbit": 0.94}]}`

    Raises:
        ServeError: it cannot be read, or has something else.
    """
    try:
        with sys.stdin.buffer if str(path) == "-" else path.open("rb") as file:
            content = json.loads(file.read(MOST_NODES_BYTES))
        nodes = [
            node_of(one.get("name"), {key: value for key, value in one.items() if key != "name"})
            for one in content["nodes"][:MOST_NODES]
        ]
        pairs = {
            frozenset(map(str, one["nodes"])): link(f"{one['ms']},{one['gbit']}")
            for one in content.get("links", [])[:MOST_LINKS]
        }
        notes = [str(note)[:MOST_NOTE_CHARACTERS] for note in content.get("notes", [])[:MOST_NOTES]]
    except OSError as error:
        raise ServeError(f"cannot read nodes from '{path}': {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, argparse.ArgumentTypeError) as error:
        raise ServeError(
            f"cannot read nodes from '{path}': {type(error).__name__}: {error}; it needs "
            '{"nodes": [{"name": "n1", "free": 8, "bw": 20}]}'
        ) from None
    return GivenNodes(nodes, LinkTable(default=default, pairs=pairs), notes)


# ----- plan


def show_plan(options: argparse.Namespace) -> int:
    """Print all candidates for a model on nodes."""
    config = read_config(options.model)
    kind = options.quantize or ("bf16" if config.stored is StoredKind.FLOAT else str(config.stored))
    context = options.context or min(config.context_tokens, DEFAULT_CONTEXT_TOKENS)
    load = ServeLoad(
        streams=options.streams,
        prompt_tokens=options.prompt,
        answer_tokens=options.answer,
        context_tokens=max(context, options.prompt + options.answer),
    )
    if load.context_tokens > config.context_tokens:
        raise ServeError(
            f"cannot plan: a request of {load.context_tokens} tokens is longer than the model's context of "
            f"{config.context_tokens}; use a smaller --context, --prompt or --answer"
        )
    nodes, links, notes = given_nodes(options, kind)
    try:
        made = make_plan(model_shape(config), kind, nodes, links, load, options.goal)
    except ServeError:
        for note in notes:
            print(f"hserve: note: {note}", file=sys.stderr)
        raise
    print(json.dumps(plan_document(made, notes)) if options.json else plan_table(made, notes))
    return 0


def plan_table(made: ServePlan, notes: Sequence[str]) -> str:
    """Return the candidates as lines, the best first, and the reasons."""
    rows = [("CANDIDATE", "MS/TOKEN", "FIRST", "TOKENS/S", "J/TOKEN", "MEMORY", "NODES")]
    for one in made.candidates[:SHOWN_CANDIDATES]:
        most = fullest(one)
        names = ", ".join(one.nodes[:8]) + (f" and {len(one.nodes) - 8} more" if len(one.nodes) > 8 else "")
        rows.append(
            (
                one.name,
                f"{one.gap_s * 1000:.1f}",
                f"{one.first_token_s:.2f} s",
                f"{one.tokens_s:.1f}",
                f"{one.joules:.2f}",
                f"{gib(most.total_bytes)} of {gib(most.free_bytes)}",
                names,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    hidden = len(made.candidates) - SHOWN_CANDIDATES
    lines += [f"and {hidden} slower candidates; --json has all"] * (hidden > 0)
    lines += ["", f"{made.goal}, {made.kind} weights: {made.why}"]
    lines += [f"{name} is left out: {why}" for name, why in made.left_out.items()]
    lines += [f"note: {note}" for note in notes]
    return "\n".join(lines)


def fullest(one: PlanCandidate) -> RankMemory:
    """Return the rank whose memory is the fullest."""
    return max(
        (need for replica in one.replicas for need in replica.memory),
        key=lambda need: need.total_bytes / max(1, need.free_bytes),
    )


def plan_document(made: ServePlan, notes: Sequence[str]) -> dict[str, Any]:
    """Return a plan as JSON, version 1; spans are [first, end]."""
    return {
        "version": 1,
        "goal": str(made.goal),
        "kind": made.kind,
        "why": made.why,
        "left_out": dict(made.left_out),
        "notes": list(notes),
        "candidates": [
            {
                "name": one.name,
                "gap_ms": one.gap_s * 1000,
                "first_token_s": one.first_token_s,
                "tokens_s": one.tokens_s,
                "joules_per_token": one.joules,
                "replicas": [
                    {
                        "streams": replica.streams,
                        "ranks": [
                            {
                                "node": need.node,
                                "stage": replica.split.place(rank)[0],
                                "layers": [part.layers.start, part.layers.stop],
                                "kv_groups": [part.kv_groups.start, part.kv_groups.stop],
                                "ffn": [part.ffn.start, part.ffn.stop],
                                "vocab": [part.vocab.start, part.vocab.stop],
                                "memory_bytes": need.total_bytes,
                                "free_bytes": need.free_bytes,
                            }
                            for rank, need in enumerate(replica.memory)
                            for part in [replica.split.part(rank)]
                        ],
                    }
                    for replica in one.replicas
                ],
            }
            for one in made.candidates
        ],
    }


# ----- smaller models


def quantize_and_report(options: argparse.Namespace) -> int:
    """Write a quantized model, and compare it with the original."""
    text = read_text(options.text)
    quantize_model(options.model, options.target, StoredKind(options.kind))
    compare(options, text)
    return 0


def prune_and_report(options: argparse.Namespace) -> int:
    """Write a pruned model, and compare it with the original."""
    text = read_text(options.text)
    width = prune_model(options.model, options.target, options.share, text)
    if not options.json:
        print(f"{width} of {read_config(options.model).ffn} FFN columns are kept in each layer")
    compare(options, text)
    return 0


def compare(options: argparse.Namespace, text: str) -> None:
    """Print sizes and perplexities of a model and of the smaller one."""
    sizes = [model_size(options.model), model_size(options.target)]
    scores = [perplexity(one, text, most_tokens=options.tokens) for one in (options.model, options.target)]
    if options.json:
        print(json.dumps(comparison(sizes, scores)))
        return
    before, after = sizes[0].bf16_bytes, min(sizes[1].stored_bytes, sizes[1].bf16_bytes)
    change = scores[1].perplexity / scores[0].perplexity - 1
    print(f"weights: {before / 1e6:.1f} MB as bf16, now {after / 1e6:.1f} MB ({after / before:.2f} of it)")
    print(
        f"perplexity over {scores[0].tokens} tokens: {scores[0].perplexity:.3f} before, {scores[1].perplexity:.3f} now "
        f"({change:+.2%})"
    )


def comparison(sizes: Sequence[ModelSize], scores: Sequence[TextScore]) -> dict[str, Any]:
    """Return the comparison as JSON, version 1."""
    return {
        "version": 1,
        "bytes_before_bf16": sizes[0].bf16_bytes,
        "bytes_after": min(sizes[1].stored_bytes, sizes[1].bf16_bytes),
        "perplexity_before": scores[0].perplexity,
        "perplexity_after": scores[1].perplexity,
        "tokens": scores[0].tokens,
    }


def show_perplexity(options: argparse.Namespace) -> int:
    """Print how well a model predicts a text."""
    score = perplexity(options.model, read_text(options.text), most_tokens=options.tokens)
    if options.json:
        print(json.dumps({"version": 1, "perplexity": score.perplexity, "tokens": score.tokens}))
    else:
        print(f"perplexity {score.perplexity:.3f} over {score.tokens} tokens")
    return 0


def hash_model(options: argparse.Namespace) -> int:
    """Write the hashes of a model's weights."""
    print(f"{options.model / HASHES_NAME}: hashes of {write_hashes(options.model)} bytes")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the reader has closed the pipe
    sys.exit(main())
