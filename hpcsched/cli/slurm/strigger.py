"""strigger: programs that the controller runs when a job or node changes.

They run on the head, as their user.

Source: strigger(1).
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcsched import client
from hpcsched.cli.slurm import run_face
from hpcsched.client import Json
from hpcsched.commands.options import ELSEWHERE, HELP, VERSION, Command, Face, Option, UsageError, Words
from hpcsched.listing.text import clean
from hpcsched.model.hostlist import expand_hostlist

STRIGGER = Face(
    Command(
        "strigger",
        (
            "--set [--jobid=ID --fini | --time | [--node[=NAMES]] --down | --up | --drained] --program=PATH",
            "--get [--id=N] [--jobid=ID] [--node=NAMES] [--user=NAME]",
            "--clear [--id=N] [--jobid=ID] [--node=NAMES] [--user=NAME]",
        ),
        "Run a program on the head when a job ends or nears its time limit, or when a node goes down, comes up or is "
        "drained. The program gets the job's id, or the node's name, as its last argument. It runs once, unless the flag "
        "PERM was given.",
        (
            Option("set", help="set a trigger"),
            Option("get", help="show triggers"),
            Option("clear", help="delete triggers"),
            Option("down", "d", help="a node stops answering"),
            Option("drained", "D", help="a node is drained"),
            Option("fini", "f", help="the job ends"),
            Option("flags", "", "FLAGS", "PERM: keep the trigger after its program has run (nodes only)"),
            Option("id", "i", "N", "the trigger of this number"),
            Option("jobid", "j", "ID", "a job"),
            Option("node", "n", "NAMES", "these nodes; without names: any node", bare=""),
            Option("noheader", "h", help="do not print headers"),
            Option("offset", "o", "SECONDS", "seconds from the event to the program (--time: before the limit)"),
            Option("program", "p", "PATH", "the program, with arguments if needed"),
            Option("quiet", "Q", help="print errors only"),
            Option("time", "t", help="the job nears its time limit: --offset seconds before it"),
            Option("up", "u", help="a node that was down answers again"),
            Option("user", "", "NAME", "triggers of this user"),
            HELP._replace(short=""),
            VERSION,
        ),
        accepted=(*ELSEWHERE, Option("verbose", "v")),
    ),
    "strigger: error",
)
_EVENTS = ("fini", "time", "down", "up", "drained")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_face(STRIGGER, _work, argv)


def _work(words: Words) -> int:
    chosen = [name for name in ("set", "get", "clear") if words.has(name)]
    if len(chosen) != 1 or words.operands:
        raise UsageError("cannot tell what to do: give one of --set, --get, --clear; see strigger --help")
    match chosen[0]:
        case "set":
            return _set(words)
        case "get":
            return _get(words)
        case _:
            return _clear(words)


def _set(words: Words) -> int:
    events = [name for name in _EVENTS if words.has(name)]
    program = words.last("program").split()
    if len(events) != 1:
        raise UsageError(f"cannot set a trigger: give one of {', '.join(f'--{name}' for name in _EVENTS)}")
    if not program:
        raise UsageError("cannot set a trigger: give --program=PATH")
    of_job = events[0] in ("fini", "time")
    if of_job != words.has("jobid"):
        raise UsageError("cannot set a trigger: --fini and --time are of a --jobid, the others of a --node")
    flags = [flag.upper() for flag in words.listed("flags")]
    if any(flag != "PERM" for flag in flags):
        raise UsageError(f"cannot set a trigger: unknown flag {flags[0][:20]!r}; there is PERM")
    targets = [words.last("jobid")] if of_job else _nodes(words) or [""]
    body = {
        "event": events[0],
        "program": program,
        "permanent": bool(flags),
        "offset_s": int(words.number("offset", 0)),
    }
    for target in targets:
        made = client.call("POST", "/v1/triggers/set", {**body, "target": target})
        if words.has("verbose"):
            print(f"strigger: trigger {made['id']} is set")
    return 0


def _nodes(words: Words) -> list[str]:
    return expand_hostlist(",".join(words.given.get("node", [])))


def _chosen(words: Words) -> list[Json]:
    targets = {*_nodes(words), *([words.last("jobid")] if words.has("jobid") else [])}
    return [
        trigger
        for trigger in client.call("GET", "/v1/triggers")["triggers"]
        if (not words.has("id") or str(trigger["id"]) == words.last("id"))
        and (not targets or trigger["target"] in targets)
        and words.last("user") in ("", trigger["user"])
    ]


def _get(words: Words) -> int:
    if not words.has("noheader"):
        print(
            f"{'TRIG_ID':>7} {'RES_TYPE':>8} {'RES_ID':>7} {'TYPE':>11} {'OFFSET':>6} {'USER':>8} {'FLAGS':>5} PROGRAM"
        )
    for trigger in _chosen(words):
        offset = -trigger["offset_s"] if trigger["event"] == "time" else trigger["offset_s"]
        flags, program = "PERM" if trigger["permanent"] else "", clean(" ".join(trigger["program"] or ("N/A",)))
        print(
            f"{trigger['id']:>7} {trigger['type']:>8} {clean(trigger['target']):>7} {trigger['event']:>11} {offset:>6} "
            f"{clean(trigger['user']):>8} {flags:>5} {program}"
        )
    return 0


def _clear(words: Words) -> int:
    if not any(words.has(name) for name in ("id", "jobid", "node", "user")):
        raise UsageError("cannot clear triggers: give --id, --jobid, --node or --user")
    for trigger in _chosen(words) or [{"id": int(words.number("id", 0))}]:
        client.call("POST", "/v1/triggers/clear", {"id": trigger["id"]})
    return 0
