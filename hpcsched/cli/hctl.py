"""hctl: shows and changes jobs, nodes, partitions, reservations and the configuration.

The grammar is scontrol's (``hctl show job 12``, ``hctl update JobId=12 TimeLimit=1:00:00``). Host lists are expanded and
compressed without a controller. Each verb is a function of its words; the controller decides about permissions.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from hpcsched import client, paths
from hpcsched.cli.output import (
    complain,
    note,
    outlive_its_end,
    print_findings,
    print_json,
    run_command,
    terminal_width,
)
from hpcsched.cli.slurm import records
from hpcsched.cli.slurm.sacctmgr import RECORDS
from hpcsched.client import Json
from hpcsched.commands.options import FAILED, HELP, VERSION, Command, Option, UsageError, Words, nearest, split_list
from hpcsched.errors import NotFoundError, RequestError, UnavailableError
from hpcsched.listing.ecs import ecs_line, event_document, event_sentence
from hpcsched.listing.text import clean, columns, date_text
from hpcsched.model.hostlist import compress_hostlist, expand_hostlist
from hpcsched.model.units import format_time_s, whole_number

# ----- reservations: create, update, delete, show, with the grammar and names of scontrol
# The controller interprets ``Name=value``; here it becomes a request, and the answer becomes text.


RecordWords = Sequence[tuple[str, object]]

NAMES = ("reservationname", "reservation")


def is_reservation(rest: Sequence[str]) -> bool:
    """Return whether the words after a verb name a reservation, and no job."""
    if rest[0].lower() in ("reservation", "res"):
        return True
    keys = [key.lower() if equals else "" for key, equals, _ in (word.partition("=") for word in rest)]
    return any(key in NAMES for key in keys) and not any(key in ("", "jobid", "job") for key in keys)


def create_reservation(rest: Sequence[str], words: Words) -> int:
    """Create a reservation and print its name."""
    name, changes = _read(rest)
    answer = client.call("POST", "/v1/reservations/create", {"name": name, "changes": changes})
    return _print_answer(answer, words, f"Reservation created: {clean(answer['name'])}")


def update_reservation(rest: Sequence[str], words: Words) -> int:
    """Change a reservation."""
    name, changes = _read(rest)
    answer = client.call("POST", "/v1/reservations/update", {"name": _must_be(name), "changes": changes})
    return _print_answer(answer, words)


def delete_reservation(rest: Sequence[str], words: Words) -> int:
    """Delete a reservation."""
    name, changes = _read(rest)
    if changes:
        raise UsageError("cannot delete that: write hctl delete reservation NAME")
    answer = client.call("POST", "/v1/reservations/delete", {"name": _must_be(name)})
    return _print_answer(answer, words)


def fetch(names: Sequence[str]) -> Json:
    """Return the controller's answer with the named reservations, by default all."""
    answer = client.call("GET", "/v1/reservations")
    wanted = [name for word in names for name in split_list(word)]
    by_name = {reservation["name"]: reservation for reservation in answer["reservations"]}
    for name in wanted:
        if name not in by_name:
            raise NotFoundError(f"Reservation {clean(name[:60])} not found; there are: {', '.join(by_name) or 'none'}")
    answer["reservations"] = [by_name[name] for name in wanted] if wanted else answer["reservations"]
    return answer


def reservation_lines(reservation: Json) -> list[RecordWords]:
    """Return a reservation as ``scontrol show reservation`` does."""
    flags = [*reservation["flags"], *([] if reservation["node_count"] else ["SPEC_NODES"])]
    # fmt: off
    return [
        [("ReservationName", reservation["name"]), ("StartTime", date_text(reservation["start_s"])),
         ("EndTime", date_text(reservation["end_s"])), ("Duration", format_time_s(reservation["duration_s"], full=True))],
        [("Nodes", reservation["node_list"]), ("NodeCnt", len(reservation["nodes"])), ("CoreCnt", reservation["cpus"]),
         ("Features", reservation["features"]), ("PartitionName", reservation["partition"]), ("Flags", ",".join(flags))],
        [("TRES", f"cpu={reservation['cpus']}")],
        [("Users", ",".join(reservation["users"])), ("Groups", ""), ("Accounts", ",".join(reservation["accounts"])),
         ("Licenses", ""), ("State", reservation["state"]), ("MaxStartDelay", "")],
    ]
    # fmt: on


def table(reservations: Sequence[Json], *, header: bool) -> str:
    """Return the reservations as ``sinfo -T`` does."""
    headers = ["RESV_NAME", "STATE", "START_TIME", "END_TIME", "DURATION", "NODELIST"]
    rows = [
        [
            clean(reservation["name"]),
            reservation["state"],
            date_text(reservation["start_s"]),
            date_text(reservation["end_s"]),
            format_time_s(reservation["duration_s"], full=True),
            reservation["node_list"],
        ]
        for reservation in reservations
    ]
    return columns(headers if header else [], rows)


def _read(rest: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return the name and the changes in ``[reservation] [NAME] Name=value ...``.

    ``Users+=ann`` is a change too.
    """
    name = ""
    changes: dict[str, str] = {}
    for at, word in enumerate(rest):
        key, equals, value = word.partition("=")
        if equals and key.lower() in NAMES:
            name = value
        elif equals:
            changes[_whole_name(key)] = value
        elif word.lower() in ("reservation", "res") and at == 0:
            continue
        elif name:
            raise UsageError(f"cannot understand {word[:60]!r}: write NAME=VALUE")
        else:
            name = word
    return name, changes


# Names that may be abbreviated, as in scontrol: ``start=now`` is StartTime.
_KEYS = ("StartTime", "EndTime", "Duration", "Users", "Accounts", "Nodes", "NodeCnt", "CoreCnt", "Features",
         "PartitionName", "Flags", "Licenses")  # fmt: skip


def _whole_name(key: str) -> str:
    """Return the full name of an abbreviated key, with its + or -.

    An unknown or ambiguous key is unchanged.
    """
    bare = key.rstrip("+-").lower()
    found = [name for name in _KEYS if name.lower() == bare] or [
        name for name in _KEYS if bare and name.lower().startswith(bare)
    ]
    return found[0] + key[len(bare) :] if len(found) == 1 else key


def _must_be(name: str) -> str:
    if not name:
        raise UsageError("cannot tell which reservation: name it, as ReservationName=maint")
    return name


COMMAND = Command(
    "hctl",
    (
        "show job [JOB...] | node [NODES] | partition [NAME...] | reservation [NAME...] | licenses | power | config",
        "show qos | account | user [NAME...]",
        "show hostnames LIST | hostlist NAME...",
        "hold | release | requeue | suspend | resume | sign JOB...",
        "update JOB... NAME=VALUE...",
        "create reservation NAME=VALUE... | update reservation NAME NAME=VALUE... | delete reservation NAME",
        "story JOB | events [-f] [--json] [--kind=LIST] [--node=NODES] [after=NUMBER]",
        "update PartitionName=NAME State=UP|DOWN|DRAIN|INACTIVE",
        "drain NODES WHY | resume NODES | fence NODES [WHY] | power down|up NODES",
        "backup DIR [keep=N] | FILE",
        "snapshot FILE",
        "strays | strays adopt|end TOKEN...|all",
        "reset usage all | [Account=LIST] [User=LIST]",
        "checkpoint list|verify|prune|export JOB|DIRECTORY [FILE] [NAME=VALUE...]",
        "token create [--scope=LIST] [--expires=AGE] [--name=TEXT] [--user=NAME] [--certificate=FILE [--key=FILE]]",
        "token list [--user=NAME|--mine] | revoke ID... | revoke --user=NAME | rotate-key",
        "metrics NODE|JOB [SERIES...] [--since=AGE] [--plot] | metrics --list [NODE|JOB]",
        "alerts | alerts rules | alerts test RECEIVER",
        "silence | silence LABEL=PATTERNS... TIME [WHY] | silence end ID...",
        "security",
        "ping | reconfigure [NODES]",
    ),
    "Show and change jobs, nodes, partitions, reservations and the configuration. 'hctl VERB --help' describes one verb. "
    "'update' changes a job: time_limit, time_min, partition, nice, priority, site_factor, begin, deadline, dependency, "
    "reservation, account, qos, array_task_throttle, name, comment, mail_user, requeue; of a waiting job also cheap_by, "
    "num_nodes, num_cpus, ntasks, ntasks_per_node, cpus_per_task, mem, mem_per_cpu, gres, constraint, prefer, nodelist, exclude, "
    "mincpus, tmp, licenses, work_dir. 'create', 'update' and 'delete' also manage reservations: ReservationName= StartTime= "
    "EndTime= Duration= Users= Accounts= Nodes= NodeCnt= Features= PartitionName= Flags=. 'story' prints the history of a job. "
    "'suspend' pauses a running job, which keeps its resources until 'resume JOB'. 'drain' stops new jobs from starting on "
    "nodes until 'resume NODES'. 'power' switches nodes off and on. 'fence' asserts that an unreachable node is no longer "
    "running anything, so that its jobs can be requeued or ended. "
    "'backup' copies database, configuration, node files and keys into DIR, or only the database to a new "
    "FILE, for 'hpcsched restore'. 'reconfigure' reads the configuration again; NODES are the same machines at new addresses, "
    "even if they hold jobs. 'snapshot' writes the cluster state that the planner sees to a file ('-': standard output), for "
    "'hsim replay' and 'hsim whatif'. 'strays' lists launches on nodes from before a restore: 'strays adopt' keeps them as their "
    "job, 'strays end' ends them. 'checkpoint' lists, verifies, prunes (keep=K every=HOURS) or exports (step=N all=yes) the "
    "checkpoints of a training job, on this machine and as you; the FILE is .safetensors, or else for torch.load. "
    "'reset usage' clears past usage for fair share and limits. 'alerts' shows what is wrong now, 'silence' keeps it from being "
    "told. 'metrics' shows what nodes and jobs used. 'token' makes, "
    "lists and revokes the credentials with which "
    "programs use the API over the network (hpcsched gateway).",
    (
        Option("follow", "f", help="print events as they happen, until interrupted"),
        Option("kind", "", "LIST", "print events of these only: job, node, reservation, configuration, alert"),
        Option("node", "", "NODES", "print events of these nodes only"),
        Option("json", help="print as JSON, version 1"),
        Option("oneliner", "o", help="print each record on one line"),
        Option("reason", "", "TEXT", "the reason for drain or fence, instead of WHY"),
        Option(
            "scope", "", "LIST", "what a token allows: some of read,submit,manage,metrics,serve,admin; default: read"
        ),
        Option("expires", "", "AGE", "how long a token is valid, as 12h or 30d; default: 30d"),
        Option("name", "", "TEXT", "a note for the list of tokens"),
        Option("user", "", "NAME", "whose token; other users' are for admins, '*' lists all"),
        Option("mine", help="list only your own tokens; admins see those of all users otherwise"),
        Option("certificate", "", "FILE", "register this client certificate (PEM) instead of making a token"),
        Option("key", "", "FILE", "the key of the certificate (PEM): signs that it is yours, and is not sent"),
        Option("since", "", "AGE", "metrics from when on: 30m, 12h, 7d, or a date; default: 1h"),
        Option("until", "", "TIME", "metrics until when; default: now"),
        Option("step", "", "TIME", "how much time each value covers: 10s, 5m, 1h; default: about 300 values"),
        Option("of", "", "WHAT", "mean, max or min of each step; default: mean"),
        Option("plot", help="draw each series of metrics, with characters"),
        Option("csv", help="print metrics as comma-separated values"),
        Option("list", help="list nodes with metrics, or the series of a node or job"),
        HELP,
        VERSION,
    ),
    (
        "A JOB is a number, a task of an array (10_3), some of its tasks (10_[1-3,7]), the name of one of your jobs, or "
        "'last'. NODES is a host list as n[1-3],m7.",
    ),
)


# The help of `hctl VERB --help`: usage and description.
HELPS: dict[str, tuple[tuple[str, ...], str]] = {
    "show": (
        (
            "show job [JOB...]",
            "show node [NODES]",
            "show partition|reservation|licenses|qos|account|user [NAME...]",
            "show power [CIRCUIT...]",
            "show config",
            "show roles",
            "show hostnames LIST",
            "show hostlist NAME...",
        ),
        "Show full records: all of a kind, or the named ones. 'roles' shows what each role may do; 'hostnames' expands a "
        "host list, 'hostlist' compresses names to a host list.",
    ),
    "hold": (("hold JOB...",), "Keep waiting jobs from starting until 'release'."),
    "release": (("release JOB...",), "Let held jobs start."),
    "sign": (
        ("sign JOB...",),
        "Sign your waiting jobs again, after their signatures have expired. Only what your key has signed before is signed.",
    ),
    "requeue": (
        ("requeue JOB...",),
        "Put jobs back into the queue: ended jobs at once, running jobs after they are ended.",
    ),
    "suspend": (("suspend JOB...",), "Pause running jobs until 'resume'; they keep their resources. For admins."),
    "resume": (
        ("resume JOB...", "resume NODES"),
        "Continue suspended jobs, or let jobs start on drained nodes again. For admins.",
    ),
    "update": (
        (
            "update JOB... NAME=VALUE...",
            "update reservation NAME NAME=VALUE...",
            "update PartitionName=NAME State=UP|DOWN|DRAIN|INACTIVE",
            "update NodeName=NODES State=DRAIN Reason=WHY | State=RESUME",
        ),
        "Change jobs: time_limit, time_min, partition, nice, priority, site_factor, begin, deadline, dependency, reservation, "
        "account, qos, array_task_throttle, name, comment, mail_user, requeue, and of waiting jobs cheap_by, num_nodes, "
        "num_cpus, ntasks, ntasks_per_node, cpus_per_task, mem, mem_per_cpu, gres, constraint, prefer, nodelist, exclude, "
        "mincpus, tmp, licenses, work_dir. A partition in state DOWN accepts jobs but starts none; in DRAIN it starts its queued "
        "jobs but accepts none; INACTIVE does neither. The state survives restarts.",
    ),
    "create": (
        ("create reservation NAME=VALUE...",),
        "Reserve nodes: ReservationName= StartTime= EndTime= Duration= Users= Accounts= Nodes= NodeCnt= Features= "
        "PartitionName= Flags=. For admins.",
    ),
    "delete": (("delete reservation NAME",), "Delete a reservation. For admins."),
    "audit": (
        (
            "audit list [user=NAME] [action=ACTION] [last=N]",
            "audit verify [log=FILE] [heads=FILE] [key=FILE]",
            "audit export FILE",
        ),
        "Show who changed what, from where. 'verify' checks the log against its hashes and signed ends, and names the first "
        "altered, missing or reordered record; an export, or copies of the signed ends and of the public key, can be given. For "
        "admins.",
    ),
    "story": (("story JOB",), "Print the history of a job, and what it waits for now or how it ended."),
    "events": (
        ("events [-f] [--json] [--kind=LIST] [--node=NODES] [after=NUMBER]",),
        "Print the events after event NUMBER, by default the last 100; with -f also those to come. --kind prints only those of "
        "job, node, reservation, configuration or alert; --node those of nodes. --json prints ECS JSON lines for log shippers.",
    ),
    "drain": (
        ("drain NODES WHY", "drain NODES --reason=WHY"),
        "Stop new jobs from starting on nodes; running jobs continue. Other users see the reason. For admins.",
    ),
    "power": (
        ("power down NODES", "power up NODES"),
        "Switch nodes off that hold no jobs, as [power] of hpcsched.toml says, or switch them on. A job that is placed on a node "
        "that is off switches it on, unless the node is drained. For admins.",
    ),
    "fence": (
        ("fence NODES [WHY]", "fence NODES [--reason=WHY]"),
        "Assert that unreachable nodes are no longer running anything, so that their jobs can be requeued or ended. If this is "
        "wrong, a job may run twice. For admins.",
    ),
    "backup": (
        ("backup DIR [keep=N] [encrypt=KEY|FILE]", "backup FILE"),
        "DIR, an existing directory: write a new directory into it, for 'hpcsched restore' on this head or another. It "
        "contains the database with queue, history and job scripts; hpcsched.toml, conf.d and nodes.d; the launch key; the keys "
        "that node files name (identity_file), and ssh_config. It does not contain output files, checkpoints, known_hosts or "
        "user accounts. With keep=N, only the newest N backups of this cluster stay in DIR. With encrypt=, "
        "it is one file, encrypted for a public key of age or SSH, or for those in a file. FILE, a new file: copy only the "
        "database.",
    ),
    "snapshot": (
        ("snapshot FILE",),
        "Write the cluster state that the planner sees to a file ('-': standard output), for 'hsim replay' and 'hsim whatif'.",
    ),
    "strays": (
        ("strays", "strays adopt TOKEN...|all", "strays end TOKEN...|all"),
        "List launches on nodes from before a restore; adopt them as their job, or end them. For admins.",
    ),
    "reset": (
        ("reset usage all", "reset usage [Account=LIST] [User=LIST]"),
        "Clear past usage, for fair share and limits. For admins.",
    ),
    "checkpoint": (
        (
            "checkpoint list JOB|DIRECTORY",
            "checkpoint verify JOB|DIRECTORY [step=N]",
            "checkpoint prune JOB|DIRECTORY [keep=K] [every=HOURS]",
            "checkpoint export JOB|DIRECTORY FILE [step=N] [all=yes]",
        ),
        "Manage the checkpoints of a training job, on this machine and as you. FILE ends in .safetensors, or is for torch.load. "
        "All take key-file=FILE or key-command=COMMAND for encrypted checkpoints.",
    ),
    "token": (
        (
            "token create [--scope=LIST] [--expires=AGE] [--name=TEXT] [--user=NAME] [--certificate=FILE [--key=FILE]]",
            "token list [--user=NAME | --mine]",
            "token revoke ID... | --user=NAME",
            "token rotate-key",
        ),
        "Manage credentials for the API over the network. 'create' prints a new token, once; only its hash is kept. It allows "
        "its scopes, and never more than its user may do: read; submit; manage (cancel, hold, change jobs); metrics; "
        "serve (ask served models); admin. With "
        "--certificate, requests with this client certificate act as the user, and no token is printed; its --key proves that it "
        "is yours, which admins need not. 'revoke' ends tokens, sessions and certificates at once. 'rotate-key' makes a new "
        "signing key; tokens of the last key stay valid, older ones end. --user and rotate-key are for admins.",
    ),
    "security": (
        ("security [--json]",),
        "Report what is wrong with the security of the installation: files, keys, accounts, nodes, limits, kernels, versions, "
        "gateway, tokens, audit log. Each finding says why, and how to correct it. It works without the controller, as far as "
        "it can. Exit status: 0 no findings; 1 findings; 2 something could not be looked at.",
    ),
    "metrics": (
        (
            "metrics NODE|JOB [SERIES...] [--since=AGE] [--step=TIME] [--of=WHAT] [--plot|--csv|--json]",
            "metrics --list [NODE|JOB]",
        ),
        "Show what a node or a job used: the mean of each step; of a counter (..._total) its growth each second. Without "
        "SERIES, list what there is. A SERIES is a name of hpcsched-metrics(7), also without hpcsched_, node_, its unit and "
        "_total: memory_available, load1, network_receive. NAME:LABEL takes one device, as network_receive:eth0.",
    ),
    "alerts": (
        ("alerts [--json]", "alerts rules", "alerts test RECEIVER"),
        "Show what is wrong with nodes, the head and the queue, and who is told of it: alerts that are pending (not for long "
        "enough yet), firing or resolved; why nobody is told of some; and receivers that cannot be reached. 'rules' lists the "
        "rules. 'test' sends a message to a receiver of [alerts.receivers] at once, for admins.",
    ),
    "silence": (
        ("silence", "silence LABEL=PATTERNS... TIME [WHY]", "silence end ID..."),
        "Tell nobody of alerts for a while. All labels must match: rule, node (a host list), mount, part, job, user. Patterns "
        "are those of file names, between commas. TIME is a length as 30m, 2h or 3d, or its end. Without words, list silences. "
        "Drained nodes and maintenance reservations silence their nodes by themselves. For admins.",
    ),
    "ping": (("ping",), "Report whether the controller is running."),
    "reconfigure": (
        ("reconfigure [NODES]",),
        "Read the configuration again. NODES are the same machines at new addresses, even if they hold jobs. "
        "For admins.",
    ),
}


def command_of(argv: Sequence[str]) -> Command:
    """Return the command as ``--help`` shows it; with a verb in `argv`, only that verb."""
    verb = next((word.lower() for word in argv if not word.startswith("-")), "")
    if verb not in HELPS:
        return COMMAND
    usage, about = HELPS[verb]
    return COMMAND._replace(usage=usage, about=about)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_command(command_of(sys.argv[1:] if argv is None else argv), _work, argv)


def _work(words: Words) -> int:
    if not words.operands:
        raise UsageError("cannot tell what to do: see hctl --help")
    verb, *rest = words.operands
    work = VERBS.get(verb.lower())
    if work is None:
        raise UsageError(_no_such("verb", verb, VERBS))
    if words.has("reason") and verb.lower() not in ("drain", "fence"):
        raise UsageError(f"cannot use --reason with {verb.lower()}: it is for drain and fence")
    return work(rest, words)


def _reason(rest: Sequence[str], words: Words) -> str:
    """Return the reason for drain or fence: the words after the nodes, or --reason."""
    text = " ".join(rest).strip()
    if words.has("reason") and text:
        raise UsageError(f"cannot take two reasons: write {text[:60]!r} or --reason, not both")
    return text or words.last("reason").strip()


def _no_such(what: str, word: str, known: Sequence[str] | Json) -> str:
    near = nearest(word.lower(), known)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
    return f"cannot understand {word[:60]!r}: no such {what}; {hint}"


def _needs(rest: Sequence[str], what: str) -> None:
    if not rest:
        raise UsageError(f"cannot do that: name {what}; see hctl --help")


def _print_answer(answer: Json, words: Words, text: str = "") -> int:
    """Print the answer as JSON with --json, else the text, if there is one; return 0."""
    if words.has("json"):
        print_json(answer)
    elif text:
        print(text)
    return 0


# ----- show


def _show(rest: Sequence[str], words: Words) -> int:
    _needs(rest, f"what to show ({', '.join(_ENTITIES)})")
    entity = rest[0].lower()
    found = [name for name in _ENTITIES if name.startswith(entity) or name == entity.removesuffix("s")]
    if len(found) != 1:
        raise UsageError(_no_such("thing to show", rest[0], _ENTITIES))
    return _ENTITIES[found[0]](rest[1:], words)


def _show_job(rest: Sequence[str], words: Words) -> int:
    answers = [client.call("GET", client.job_path(reference)) for operand in rest for reference in split_list(operand)]
    answers = answers or [client.call("GET", "/v1/jobs")]
    answer = {**answers[0], "jobs": [job for reply in answers for job in reply["jobs"]]}
    return _print_records(answer, "jobs", records.hctl_lines, words)


def _show_node(rest: Sequence[str], words: Words) -> int:
    answer = client.call("GET", "/v1/nodes")
    answer["nodes"] = _chosen(answer["nodes"], expand_hostlist(",".join(rest)), "Invalid node name specified")
    return _print_records(answer, "nodes", records.node_lines, words)


def _show_partition(rest: Sequence[str], words: Words) -> int:
    answer = client.call("GET", "/v1/partitions")
    names = [name for word in rest for name in split_list(word)]
    answer["partitions"] = _chosen(answer["partitions"], names, "invalid partition name specified")
    return _print_records(answer, "partitions", records.partition_lines, words)


def _chosen(known: Sequence[Json], names: Sequence[str], refusal: str) -> list[Json]:
    by_name = {record["name"]: record for record in known}
    for name in names:
        if name not in by_name:
            raise NotFoundError(f"{refusal}: {clean(name[:60])}; there are: {', '.join(by_name) or 'none'}")
    return [by_name[name] for name in names] if names else list(known)


def _print_records(answer: Json, key: str, lines: Callable[[Json], list[records.Words]], words: Words) -> int:
    if words.has("json"):
        print_json(answer)
        return 0
    one_line = words.has("oneliner")
    print("\n".join(records.record_text(lines(record), one_line=one_line) for record in answer[key]))
    return 0


def _show_reservation(rest: Sequence[str], words: Words) -> int:
    answer = fetch(rest)
    if not answer["reservations"] and not words.has("json"):
        print("No reservations in the system")
        return 0
    return _print_records(answer, "reservations", reservation_lines, words)


def _show_licenses(rest: Sequence[str], words: Words) -> int:
    answer = client.call("GET", "/v1/licenses")
    names = [name for word in rest for name in split_list(word)]
    answer["licenses"] = _chosen(answer["licenses"], names, "Invalid license name specified")
    if not answer["licenses"] and not words.has("json"):
        print("No licenses configured")
        return 0
    return _print_records(answer, "licenses", records.license_lines, words)


def _show_power(rest: Sequence[str], words: Words) -> int:
    answer = client.call("GET", "/v1/partitions")
    named = [circuit | {"name": circuit["name"] or "all"} for circuit in answer["circuits"]]
    names = [name for word in rest for name in split_list(word)]
    answer = {"version": 1, "circuits": _chosen(named, names, "Invalid circuit name specified")}
    if not answer["circuits"] and not words.has("json"):
        print("No power budget configured")
        return 0
    return _print_records(answer, "circuits", records.circuit_lines, words)


_ACCOUNTING_FIELDS = {
    "qos": ("QOSName", ("priority", "preempt", "preemptmode", "gracetime", "usagefactor")),
    "account": ("Account", ("parentname", "share", "qos", "defaultqos")),
    "user": ("User", ("account", "share", "defaultaccount", "qos", "defaultqos")),
}
_LIMIT_FIELDS = ("maxjobs", "maxsubmit", "maxwall", "maxtres", "maxtresperuser", "grpjobs", "grpsubmit", "grptres",
                 "grptresmins", "maxtresmins")  # fmt: skip
_FIELD_NAMES = {"parentname": "Parent", "share": "Shares", "qos": "QOS", "defaultqos": "DefaultQOS", "preempt": "Preempt",
                "preemptmode": "PreemptMode", "gracetime": "GraceTime", "usagefactor": "UsageFactor", "priority": "Priority",
                "account": "Account", "defaultaccount": "DefaultAccount", "maxjobs": "MaxJobs", "maxsubmit": "MaxSubmitJobs",
                "maxwall": "MaxWall", "maxtres": "MaxTRES", "maxtresperuser": "MaxTRESPerUser", "grpjobs": "GrpJobs",
                "grpsubmit": "GrpSubmitJobs", "grptres": "GrpTRES", "grptresmins": "GrpTRESMins",
                "maxtresmins": "MaxTRESMins"}  # fmt: skip


def _show_accounting(kind: str) -> Callable[[Sequence[str], Words], int]:
    def show(rest: Sequence[str], words: Words) -> int:
        title, fields = _ACCOUNTING_FIELDS[kind]
        names = [name for word in rest for name in split_list(word)]
        chosen = _chosen(RECORDS[kind](), names, f"there is no {kind} of that name")
        answer: Json = {"version": 1, f"{kind}s": chosen}

        def lines(record: Json) -> list[records.Words]:
            limits = [
                (_FIELD_NAMES[field], record[field]) for field in _LIMIT_FIELDS if record.get(field) not in (None, "")
            ]
            return [
                [(title, record["name"])],
                [(_FIELD_NAMES[field], record[field]) for field in fields if record.get(field) not in (None, "")],
                limits or [("Limits", "none")],
            ]

        return _print_records(answer, f"{kind}s", lines, words)

    return show


def _show_config(rest: Sequence[str], words: Words) -> int:
    answer = client.call("GET", "/v1/config")
    return _print_answer(answer, words, records.config_text(answer["config"]).removesuffix("\n"))


def _show_roles(rest: Sequence[str], words: Words) -> int:
    """Print the table of roles; it is the same on each cluster."""
    from hpcsched.auth.authorize import MATRIX, matrix_text  # commands that tools poll do without

    if words.has("json"):
        table = {
            action.value: {role.value: cell.value for role, cell in cells.items()} for action, cells in MATRIX.items()
        }
        print_json({"version": 1, "roles": table})
    else:
        sys.stdout.write(matrix_text())
    return 0


def _show_hostnames(rest: Sequence[str], words: Words) -> int:
    given = ",".join(rest) or os.environ.get("SLURM_JOB_NODELIST", "") or os.environ.get("HPCSCHED_JOB_NODELIST", "")
    _needs(given, "a host list: outside of a job there is none by itself")
    print("\n".join(expand_hostlist(given)))
    return 0


def _show_hostlist(rest: Sequence[str], words: Words) -> int:
    _needs(rest, "the hosts")
    print(compress_hostlist(expand_hostlist(",".join(rest))))
    return 0


_ENTITIES: dict[str, Callable[[Sequence[str], Words], int]] = {
    "job": _show_job,
    "node": _show_node,
    "partition": _show_partition,
    "reservation": _show_reservation,
    "licenses": _show_licenses,
    "power": _show_power,
    "config": _show_config,
    "roles": _show_roles,
    "qos": _show_accounting("qos"),
    "account": _show_accounting("account"),
    "user": _show_accounting("user"),
    "hostnames": _show_hostnames,
    "hostlist": _show_hostlist,
}


# ----- jobs


def _act(verb: str) -> Callable[[Sequence[str], Words], int]:
    def work(rest: Sequence[str], words: Words) -> int:
        _needs(rest, "the jobs")
        body: Json = {}
        if verb == "requeue":
            outlive_its_end()
            if rest[0].lower() == "incomplete":
                rest = rest[1:]
                _needs(rest, "the jobs")
                body = {"incomplete": True}
        references = [reference for operand in rest for reference in split_list(operand)]
        return _report(client.call("POST", f"/v1/{verb}", {"jobs": references, **body}), words)

    return work


def _sign(rest: Sequence[str], words: Words) -> int:
    """Sign waiting jobs again, and say what was signed."""
    from hpcsched.cli.process import signer  # few clusters need them
    from hpcsched.jobscript.signing import renewed

    _needs(rest, "the jobs")
    by, status = signer(), 0
    for reference in [reference for operand in rest for reference in split_list(operand)]:
        jobs = [job for job in client.call("GET", client.job_path(reference))["jobs"] if job["state"] == "PENDING"]
        texts = {job["signed"] for job in jobs if job.get("signed")}
        if not texts:
            raise RequestError(f"cannot sign job {reference}: it does not wait, is not yours, or was not signed before")
        for text in sorted(texts):
            again, request = renewed(text, max(each["attempt"] for each in jobs), by)
            those = [str(each["id"]) for each in jobs if each.get("signed") == text]
            answer = client.call("POST", "/v1/update", {"jobs": those, "changes": {"signed": again}})
            status = _report(answer, words) or status
            if not answer["errors"] and not words.has("json"):
                print(
                    f"signed job {clean(reference)} until {date_text(request['expires'])}: {clean(request['name'])!r} in "
                    f"{clean(request['directory'])}, signed first on {date_text(request['first'])}"
                )
    return status


def _report(answer: Json, words: Words) -> int:
    if words.has("json"):
        print_json(answer)
    for refusal in answer["errors"]:
        complain(COMMAND.name, clean(refusal["error"]))
    return FAILED if answer["errors"] else 0


# Slurm's names; case and _ are ignored.
_CHANGES = {
    "numnodes": "num_nodes", "reqnodes": "num_nodes", "numcpus": "num_cpus", "endtime": "end_time",
    "timelimit": "time_limit", "timemin": "time_min", "sitefactor": "site_factor", "site": "site_factor",
    "starttime": "begin", "arraytaskthrottle": "array_task_throttle", "reservationname": "reservation",
    "jobname": "name", "features": "constraint", "reqnodelist": "nodelist", "excnodelist": "exclude",
    "minmemorynode": "mem", "minmemorycpu": "mem_per_cpu", "mempercpu": "mem_per_cpu", "numtasks": "ntasks",
    "ntaskspernode": "ntasks_per_node", "cpuspertask": "cpus_per_task", "cpus/task": "cpus_per_task",
    "mincpusnode": "mincpus", "mintmpdisknode": "tmp", "trespernode": "gres", "mailuser": "mail_user",
    "mailtype": "mail_type", "workdir": "work_dir",
}  # fmt: skip


def _create(rest: Sequence[str], words: Words) -> int:
    _needs(rest, "what to create, as reservation Users=ann Nodes=n1 StartTime=now+1hour Duration=2:00:00")
    if not is_reservation(rest):
        raise UsageError(f"cannot create {rest[0][:60]!r}: there are reservations to create")
    return create_reservation(rest, words)


def _delete(rest: Sequence[str], words: Words) -> int:
    _needs(rest, "the reservation")
    if not is_reservation(rest):
        raise UsageError(f"cannot delete {rest[0][:60]!r}: there are reservations to delete")
    return delete_reservation(rest, words)


def _update(rest: Sequence[str], words: Words) -> int:
    _needs(rest, "the jobs, and what to change as NAME=VALUE")
    if is_reservation(rest):
        return update_reservation(rest, words)
    if any(word.partition("=")[0].lower() == "nodename" for word in rest):
        return update_node(rest, words)
    if is_partition(rest):
        return update_partition(rest, words)
    jobs, changes = job_changes(rest)
    _needs(jobs, "the jobs")
    _needs(list(changes), "what to change, as time_limit=1:00:00")
    return _report(client.call("POST", "/v1/update", {"jobs": jobs, "changes": changes}), words)


def job_changes(rest: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the jobs and the changes in ``[job] JOB...

    NAME=VALUE...``; ``JobId=12`` is a job too.
    """
    changes: dict[str, str] = {}
    jobs: list[str] = []
    for word in rest[1:] if rest[0].lower() == "job" else rest:
        name, equals, value = word.partition("=")
        plain = name.lower().replace("_", "").replace("-", "")
        if not equals:
            jobs += split_list(word)
        elif plain in ("jobid", "job"):
            jobs += split_list(value)
        else:
            changes[_CHANGES.get(plain, name.lower())] = value
    return jobs, changes


def is_partition(rest: Sequence[str]) -> bool:
    """Return whether the words name a partition, not the jobs in it."""
    keys = {word.partition("=")[0].lower() for word in rest}
    return "partitionname" in keys and not keys & {"jobid", "job", "reservationname", "reservation"} and "state" in keys


def update_partition(rest: Sequence[str], words: Words) -> int:
    """Execute ``update PartitionName=main State=DRAIN``."""
    changes = {name.lower(): value for name, _, value in (word.partition("=") for word in rest)}
    names, state = split_list(changes.pop("partitionname")), changes.pop("state")
    if changes:
        raise UsageError(
            f"cannot change {next(iter(changes))[:60]!r} of a partition: only State=UP|DOWN|DRAIN|INACTIVE; "
            "the other settings are in hpcsched.toml"
        )
    _needs(names, "the partition")
    for name in names:
        _print_answer(client.call("POST", "/v1/partitions/update", {"name": name, "state": state}), words)
    return 0


def update_node(rest: Sequence[str], words: Words) -> int:
    """Execute ``update NodeName=n1 State=DRAIN Reason=why``."""
    changes = {name.lower(): value for name, _, value in (word.partition("=") for word in rest)}
    nodes, state, why = (changes.pop(name, "") for name in ("nodename", "state", "reason"))
    if state.upper() in _POWER_STATES and not changes:
        return _power([_POWER_STATES[state.upper()], nodes], words)
    if changes or state.upper() not in ("DRAIN", "RESUME", "UNDRAIN", "IDLE"):
        raise UsageError(
            "cannot update a node so: write State=DRAIN with Reason=WHY, State=RESUME, State=POWER_DOWN or State=POWER_UP"
        )
    return _drain([nodes, why], words) if state.upper() == "DRAIN" else _resume([nodes], words)


def _story(rest: Sequence[str], words: Words) -> int:
    if len(rest) != 1:
        raise UsageError("cannot tell whose story: name one job")
    answer = client.call("GET", client.job_path(rest[0], "story"))
    lines = [f"{date_text(event['at_s'])}  {clean(event['text'])}" for event in answer["events"]]
    lines += [f"{date_text(answer['now_s'])}  now: {clean(answer['now'])}"] if answer.get("now") else []
    return _print_answer(answer, words, "\n".join(lines))


LAST_EVENTS = 100
EVENTS_WAIT_S = 15.0
RETRY_S = 1.0


def _events(rest: Sequence[str], words: Words) -> int:
    """Print events; with --follow until interrupted.

    A controller that restarts is waited for.
    """
    after = _event_number(rest)
    if after is None:
        after = max(0, client.call("GET", "/v1/events")["next"] - LAST_EVENTS)
    cluster = str(client.call("GET", "/v1/ping")["cluster"]) if words.has("json") else ""
    filters = {name: words.last(option) for name, option in (("about", "kind"), ("node", "node")) if words.has(option)}
    follows, is_lost = words.has("follow"), False
    while True:
        try:
            path = client.query("/v1/events", after=after, wait_s=EVENTS_WAIT_S if follows else 0, **filters)
            answer = client.call("GET", path, timeout_s=2 * EVENTS_WAIT_S)
        except UnavailableError as error:
            if not follows:
                raise
            if not is_lost:
                complain("hctl", f"{error}; following from event {after} when it answers again")
            is_lost = True
            time.sleep(RETRY_S)
            continue
        if is_lost and (last := client.call("GET", "/v1/events")["next"]) < after:
            complain("hctl", f"the database was restored: its last event is {last}; following from there")
            after, is_lost = last, False
            continue
        is_lost = False
        for event in answer["events"]:
            print(ecs_line(event_document(event, cluster)) if words.has("json") else _event_text(event))
        sys.stdout.flush()
        if not follows and answer["next"] == after:
            return 0
        after = answer["next"]


def _event_number(rest: Sequence[str]) -> int | None:
    if not rest:
        return None
    name, equals, number = rest[0].partition("=")
    if len(rest) > 1 or name != "after" or not equals:
        raise UsageError(
            "cannot understand that: write hctl events [-f] [--json] [--kind=LIST] [--node=NODES] [after=NUMBER]"
        )
    return whole_number(number, "the number of an event")


def _event_text(event: Json) -> str:
    return f"{date_text(event['at_s'])}  {event['seq']}  {clean(event_sentence(event))}"


# ----- nodes and the controller


def _drain(rest: Sequence[str], words: Words) -> int:
    _needs(rest, "the nodes")
    why = _reason(rest[1:], words)
    if not why:
        raise UsageError(
            "cannot drain a node: give the reason, it is what others will see: hctl drain n1 'fan is loud'"
        )
    return _print_nodes(client.call("POST", "/v1/nodes/drain", {"nodes": rest[0], "why": why}), "drained", words)


_POWER_STATES = {"POWER_DOWN": "down", "POWER_UP": "up"}  # scontrol's words


def _power(rest: Sequence[str], words: Words) -> int:
    if not rest or rest[0] not in ("down", "up"):
        raise UsageError("cannot tell whether to switch nodes off or on: hctl power down n1, or hctl power up n1")
    _needs(rest[1:], "the nodes")
    answer = client.call("POST", f"/v1/nodes/power-{rest[0]}", {"nodes": ",".join(rest[1:])})
    return _print_nodes(answer, "switching off" if rest[0] == "down" else "switching on", words)


def _resume(rest: Sequence[str], words: Words) -> int:
    _needs(rest, "the nodes")
    return _print_nodes(client.call("POST", "/v1/nodes/resume", {"nodes": ",".join(rest)}), "resumed", words)


def _print_nodes(answer: Json, what: str, words: Words) -> int:
    return _print_answer(answer, words, f"{compress_hostlist(answer['nodes'])} {what}" if answer["nodes"] else "")


def _resume_jobs_or_nodes(rest: Sequence[str], words: Words) -> int:
    """Resume jobs if the operands are job numbers, else nodes: no node is called 12 or 10_3."""
    _needs(rest, "the jobs or nodes")
    if all(part[:1].isdigit() or part == "last" for operand in rest for part in split_list(operand)):
        return _act("resume")(rest, words)
    return _resume(rest, words)


def _fence(rest: Sequence[str], words: Words) -> int:
    _needs(rest, "the nodes")
    answer = client.call("POST", "/v1/nodes/fence", {"nodes": rest[0], "why": _reason(rest[1:], words)})
    if not words.has("json"):
        became = answer.get("became", ())
        print(
            f"{clean(rest[0])} fenced; "
            + ("given up on your word, not on proof:" if became else "no job waited for it")
        )
        for line in became:
            print(f"  {clean(line)}")
    return _report(answer, words)


def _ping(rest: Sequence[str], words: Words) -> int:
    answer = client.call("GET", "/v1/ping")
    name, up = clean(answer["cluster"]), format_time_s(answer["now_s"] - answer["started_at_s"])
    text = f"hpcschedd {answer['hpcsched']} of cluster {name} is UP (process {answer['pid']}, for {up})"
    return _print_answer(answer, words, text)


BACKUP_TIMEOUT_S = 600.0


def _backup(rest: Sequence[str], words: Words) -> int:
    keep = [word for word in rest if word.startswith("keep=")]
    encrypt = tuple([word.removeprefix("encrypt=") for word in rest if word.startswith("encrypt=")])
    rest = [word for word in rest if not word.startswith(("keep=", "encrypt="))]
    if len(rest) != 1:
        raise UsageError(
            "cannot back up: name one directory, for all of the cluster, or one new file, for its database"
        )
    path = os.path.abspath(rest[0])
    if os.path.isdir(path):
        return _back_up_cluster(path, keep[-1].removeprefix("keep=") if keep else "", encrypt, words)
    if keep or encrypt:
        raise UsageError(
            f"cannot keep a number of backups, or encrypt: {clean(path)} is not a directory; run: "
            f"install -d -m 700 {clean(shlex.quote(path))}"
        )
    answer = client.call("POST", "/v1/backup", {"path": path}, timeout_s=BACKUP_TIMEOUT_S)
    text = f"backed up the database to {clean(answer['path'])} ({answer['size'] / (1 << 20):.1f} MiB)"
    return _print_answer(answer, words, text)


def _back_up_cluster(directory: str, keep: str, encrypt: tuple[str, ...], words: Words) -> int:
    from pathlib import Path  # no other verb needs these: SQLAlchemy, click, the whole configuration

    from hpcsched.cli.admin.backup import back_up_cluster, contents_in_words
    from hpcsched.config.load import load_config

    if keep and not (keep.isascii() and keep.isdigit() and int(keep[:6]) >= 1):
        raise UsageError(f"cannot keep {keep[:20]!r} backups: write keep=7, say")
    config = load_config(paths.find_config_dir(os.environ, os.getuid()))
    made = back_up_cluster(config, Path(directory), int(keep[:6]) if keep else None, encrypt)
    text = f"backed up the cluster to {clean(str(made))}: {clean(contents_in_words(made))}"
    return _print_answer({"version": 1, "path": str(made)}, words, text)


AUDIT_PAGE = 2000


def _audit(rest: Sequence[str], words: Words) -> int:
    _needs(rest, "list, verify or export")
    verb, operands = rest[0], rest[1:]
    if verb == "list":
        return _list_audit(_named(operands, ("user", "action", "last")), words)
    if verb == "verify":
        return _verify_audit(_named(operands, ("log", "heads", "key")), words)
    if verb == "export" and len(operands) == 1:
        lines = (json.dumps(record, sort_keys=True) + "\n" for record in _audit_records())
        return _write_new(operands[0], lines, "the audit log")
    raise UsageError("cannot do that: say audit list, audit verify or audit export FILE")


def _named(operands: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    """Return the values of operands NAME=VALUE."""
    values = dict(operand.split("=", 1) for operand in operands if "=" in operand)
    if len(values) != len(operands) or not values.keys() <= set(known):
        raise UsageError(
            f"cannot understand {' '.join(operands)[:80]!r}: the words are " + ", ".join(f"{name}=" for name in known)
        )
    return values


def _audit_records() -> Iterator[Json]:
    after = 0
    while True:
        page = client.call("GET", f"/v1/audit?after={after}&limit={AUDIT_PAGE}")["records"]
        yield from page
        if len(page) < AUDIT_PAGE:
            return
        after = page[-1]["seq"]


def _list_audit(chosen: Mapping[str, str], words: Words) -> int:
    last = chosen.get("last", "")
    if last and not (last.isascii() and last.isdigit()):
        raise UsageError(f"cannot show the last {last[:20]!r} records: say a number, as in last=20")
    found = [
        record
        for record in _audit_records()
        if chosen.get("user") in (None, record["user"]) and chosen.get("action") in (None, record["action"])
    ]
    found = found[-int(last[:9]) :] if last and int(last[:9]) else found
    if words.has("json"):
        print_json({"version": 1, "records": found})
        return 0
    for record in found:
        change = " -> ".join(filter(None, (record["before"], record["after"])))
        parts = (
            record["seq"],
            date_text(record["at_s"]),
            f"{record['user']}({record['uid']})",
            record["role"],
            record["source"],
            record["action"],
            record["object"] or "-",
            record["outcome"],
            change,
        )
        print(clean(" ".join(map(str, parts)).rstrip()))
    return 0


def _verify_audit(given: Mapping[str, str], words: Words) -> int:
    from hpcsched.auth.audit import Head, record_from_json, signature_check, verify

    answer: Json = {} if {"heads", "key"} <= given.keys() else client.call("GET", "/v1/audit/heads")
    try:
        heads = [Head(**values) for values in (_json_lines(given["heads"]) if "heads" in given else answer["heads"])]
        records = [
            record_from_json(values) for values in (_json_lines(given["log"]) if "log" in given else _audit_records())
        ]
    except (TypeError, KeyError) as error:
        raise RequestError(
            f"cannot verify the audit log: a line is neither a record nor a signed end: {error}"
        ) from None
    key = _read_text(given["key"]).strip() if "key" in given else answer["public_key"]
    good, wrong = verify(records, heads, signature_check(key))
    if words.has("json"):
        print_json({"version": 1, "good": good, "records": len(records), "heads": len(heads), "wrong": wrong})
    elif wrong:
        print(f"hctl: the audit log is not what was written: {clean(wrong)}", file=sys.stderr)
    else:
        print(f"the audit log is complete: {good} records, {len(heads)} signed ends")
    return 1 if wrong else 0


def _json_lines(path: str) -> list[Json]:
    try:
        return [json.loads(line) for line in _read_text(path).splitlines()]
    except ValueError as error:
        raise RequestError(f"cannot read {clean(path[:200])!r}: {error}") from None


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as stream:
            return stream.read()
    except OSError as error:
        raise RequestError(f"cannot read {clean(path[:200])!r}: {error.strerror}") from None


def _write_new(path: str, lines: Iterable[str], what: str) -> int:
    """Write the lines to a new file that only its owner can read."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8") as stream:
            stream.writelines(lines)
    except OSError as error:
        raise RequestError(f"cannot write {what} to {clean(path[:200])!r}: {error.strerror}") from error
    return 0


def _snapshot(rest: Sequence[str], words: Words) -> int:
    if len(rest) != 1:
        raise UsageError("cannot write a snapshot: name one file, or - for standard output")
    text = json.dumps(client.call("GET", "/v1/snapshot")["snapshot"]) + "\n"
    if rest[0] == "-":
        sys.stdout.write(text)
        return 0
    try:
        with open(rest[0], "w", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise RequestError(f"cannot write the snapshot to {clean(rest[0][:200])!r}: {error.strerror}") from error
    return 0


def _strays(rest: Sequence[str], words: Words) -> int:
    if not rest:
        return _list_strays(words)
    if rest[0] not in ("adopt", "end") or len(rest) < 2:
        raise UsageError("cannot do that: say strays, strays adopt TOKEN...|all or strays end TOKEN...|all")
    answer = client.call("POST", f"/v1/strays/{rest[0]}", {"tokens": list(rest[1:])})
    if rest[0] == "end":
        return _print_answer(answer, words, f"ending it on {compress_hostlist(answer['nodes'])}")
    left = f"; still to decide about: {answer['left']}" if answer.get("left") else ""
    return _print_answer(answer, words, f"adopted: {', '.join(map(str, answer['jobs']))}{left}")


def _list_strays(words: Words) -> int:
    answer = client.call("GET", "/v1/strays")
    lines = []
    for stray in answer["strays"]:
        whose = f"job {stray['job_id']} ({clean(stray['name'])} of {clean(stray['user'])})"
        since = f"{clean(stray['node'])} since {date_text(stray['since_s'])}"
        lines.append(
            f"{clean(stray['token'])}  {stray['status']} on {since}, {whose if stray['adoptable'] else 'not known'}"
        )
    return _print_answer(answer, words, "\n".join(lines) or "No stray jobs")


def _reset(rest: Sequence[str], words: Words) -> int:
    if len(rest) < 2 or rest[0].lower() != "usage":
        raise UsageError("cannot tell what to reset: write reset usage all, or reset usage Account=LIST User=LIST")
    lists: dict[str, list[str]] = {"accounts": [], "users": []}
    for word in rest[1:]:
        name, _, value = word.partition("=")
        key = name.lower().removesuffix("s") + "s"
        if rest[1:] != ["all"] and (key not in lists or not split_list(value)):
            raise UsageError(f"cannot understand {word[:60]!r}: write all, or Account=LIST and User=LIST")
        if key in lists:
            lists[key] += split_list(value)
    answer = client.call("POST", "/v1/usage/reset", lists)
    lines = [
        f"usage of {clean(usage['user'])}{' in ' + clean(usage['account']) if usage['account'] else ''} is 0 from now on"
        for usage in answer["reset"]
    ]
    return _print_answer(answer, words, "\n".join(lines) or "there is no usage to reset")


def _reconfigure(rest: Sequence[str], words: Words) -> int:
    body = {"same_machine": expand_hostlist(",".join(rest))} if rest else {}
    answer = client.call("POST", "/v1/reconfigure", body)
    return _print_answer(answer, words, "\n".join(map(clean, answer["changed"])) or "nothing has changed")


def _security(rest: Sequence[str], words: Words) -> int:
    """Print the findings; the status is 1 with any, 2 if a check was not possible."""
    import time  # no other verb needs these

    from hpcsched.doctor.security import findings
    from hpcsched.doctor.security_facts import look

    if rest:
        raise UsageError(f"cannot understand {rest[0][:60]!r}: hctl security takes no words")
    facts, looking = look(os.environ, time.time())
    return print_findings(findings(facts), looking.unseen, looking.skipped, as_json=words.has("json"))


# ----- tokens, sessions and client certificates of the API over the network

TOKEN_OPTIONS = {
    "create": ("scope", "expires", "name", "user", "certificate", "key"),
    "list": ("user", "mine"),
    "revoke": ("user",),
}
MAX_CERTIFICATE_BYTES = 64 << 10


def _token(rest: Sequence[str], words: Words) -> int:
    verb, *operands = rest or [""]
    if verb not in ("create", "list", "revoke", "rotate-key"):
        raise UsageError("cannot tell what to do with tokens: hctl token create|list|revoke|rotate-key")
    for option in (*TOKEN_OPTIONS["create"], "mine"):
        if words.has(option) and option not in TOKEN_OPTIONS.get(verb, ()):
            raise UsageError(f"cannot use --{option} with token {verb}; see hctl token --help")
    if operands and verb != "revoke":
        raise UsageError(f"cannot understand {operands[0][:60]!r}: token {verb} takes options only")
    if verb == "list":
        whose = client.call("GET", "/v1/me")["user"] if words.has("mine") else words.last("user")
        return _list_tokens(client.call("GET", client.query("/v1/tokens", user=whose)), words)
    body: Json = {"user": words.last("user")} if words.has("user") else {}
    if verb == "create":
        body |= _new_token(words)
    elif verb == "revoke":
        if not operands and not body:
            raise UsageError(
                "cannot tell which tokens to revoke: hctl token revoke ID..., or --user=NAME for all of a user"
            )
        body["ids"] = [one for operand in operands for one in split_list(operand)]
    answer = client.call("POST", f"/v1/tokens/{verb}", body)
    if words.has("json"):
        print_json(answer)
    elif verb == "create":
        print(answer["token"] or f"certificate registered: {clean(answer['id'])}")
        note("hctl", f"{answer['id']} of {clean(answer['user'])}, valid until {date_text(answer['expires_at_s'])}")
    elif verb == "revoke":
        print("\n".join(f"revoked: {clean(one)}" for one in answer["revoked"]))
    else:
        print(f"tokens are signed with key {clean(answer['key'])}; tokens of the key before the last one have ended")
    return 0


def _new_token(words: Words) -> Json:
    body: Json = {"scopes": words.last("scope", "read"), "name": words.last("name")}
    if words.has("expires"):
        body["expires"] = words.last("expires")
    if path := words.last("certificate"):
        certificate = _read_pem(path)
        body["certificate"] = certificate.decode("ascii", "replace")
        if key := words.last("key"):
            from hpcsched.auth.tokens import ownership_of

            body["ownership"] = ownership_of(certificate, _read_pem(key), words.last("user") or client.my_name())
    return body


def _read_pem(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_CERTIFICATE_BYTES)
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}") from None


def _list_tokens(answer: Json, words: Words) -> int:
    rows = [
        [
            clean(one["id"]),
            one["kind"],
            clean(one["user"]),
            ",".join(one["scopes"]),
            date_text(one["created_at_s"]),
            date_text(one["expires_at_s"]),
            "revoked" if one["revoked_at_s"] else "expired" if one["expires_at_s"] <= answer["now_s"] else "valid",
            clean(one["name"]),
        ]
        for one in answer["tokens"]
    ]
    headers = ["ID", "KIND", "USER", "SCOPES", "CREATED", "EXPIRES", "STATE", "NAME"]
    return _print_answer(answer, words, columns(headers, rows))


# ----- metrics

PLOT_WIDTH, PLOT_HEIGHT = 80, 8
AGES_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def _metrics(rest: Sequence[str], words: Words) -> int:
    names = [name for word in rest[1:] for name in split_list(word)]
    if words.has("list") or not names:
        if names:
            raise UsageError("cannot list and show series at once: leave out --list or the series")
        if not rest and not words.has("list"):
            raise UsageError("cannot tell whose metrics: name a node or a job, or say hctl metrics --list")
        return _list_metrics(rest[0] if rest else "", words)
    now_s = time.time()
    from_s = _past_s(words.last("since", "1h"), "--since", now_s)
    to_s = _past_s(words.last("until", "0s"), "--until", now_s)
    if from_s >= to_s:
        raise UsageError("cannot show that period: --since must be before --until")
    asked = {"target": rest[0], "series": ",".join(names), "from_s": f"{from_s:.3f}", "to_s": f"{to_s:.3f}"}
    if words.has("step"):
        asked["step_s"] = f"{_age_s(words.last('step'), '--step'):.3f}"
    answer = client.call("GET", client.query("/v1/metrics/history", **asked, of=words.last("of", "mean")))
    if words.has("json"):
        print_json(answer)
    elif words.has("plot"):
        _plot_metrics(answer)
    else:
        _print_metrics(answer, as_csv=words.has("csv"))
    return 0


def _list_metrics(target: str, words: Words) -> int:
    answer = client.call("GET", client.query("/v1/metrics/series", target=target))
    if not target:
        return _print_answer(answer, words, "\n".join(map(clean, answer["names"])))
    rows = [(clean(row["key"]), row["kind"], row["unit"], clean(row["help"])) for row in answer["series"]]
    return _print_answer(answer, words, columns(("SERIES", "KIND", "UNIT", "MEANING"), rows).rstrip("\n"))


def _past_s(text: str, option: str, now_s: float) -> float:
    """Return the time that is so long ago, or that a date means."""
    from hpcsched.model.dates import parse_when

    if text[:-1].isdigit() and text[-1:].lower() in AGES_S:
        return now_s - _age_s(text, option)
    return parse_when(text, now_s, past=True)


def _age_s(text: str, option: str) -> float:
    number, unit = text[:-1], text[-1:].lower()
    if not (number.isascii() and number.isdigit()) or len(number) > 9 or unit not in AGES_S:
        raise UsageError(f"cannot take {option} {text[:40]!r}: write 30s, 5m, 12h, 7d or 2w")
    return float(int(number) * AGES_S[unit])


# ----- alerts


def _alerts(rest: Sequence[str], words: Words) -> int:
    """Show the alerts or the rules, or send a test."""
    if rest and rest[0] == "rules" and len(rest) == 1:
        return _print_rules(words)
    if rest and rest[0] == "test" and len(rest) == 2:
        answer = client.call("POST", "/v1/alerts/test", {"receiver": rest[1]})
        return _print_answer(answer, words, f"sent a test to {clean(rest[1])}")
    if rest:
        raise UsageError("cannot understand that: write alerts, alerts rules or alerts test RECEIVER")
    answer = client.call("GET", "/v1/alerts")
    return _print_answer(answer, words, "\n".join(_alert_lines(answer)))


def _print_rules(words: Words) -> int:
    """Print the rules as they apply, and where that is from."""
    from hpcsched.model.alerting import limit_text  # no other verb needs it

    answer = client.call("GET", "/v1/alerts")
    rows = [
        (
            clean(rule["rule"]),
            rule["severity"] if rule["enabled"] else "off",
            format_time_s(rule["for_s"]) if rule["for_s"] else "at once",
            "-" if rule["limit"] is None else limit_text(rule["limit"], rule["unit"]),
            f"{', '.join(rule['changed'])} of [alerts.rules]" if rule["changed"] else "default",
            clean(rule["meaning"]),
        )
        for rule in answer["rules"]
    ]
    text = columns(("RULE", "SEVERITY", "AFTER", "LIMIT", "FROM", "MEANING"), rows).rstrip("\n")
    return _print_answer({"version": 1, "rules": answer["rules"]}, words, text)


def _alert_lines(answer: Json) -> list[str]:
    """Return a line for each alert, the worst first; then silences and receivers in trouble."""
    from hpcsched.listing.overview import worst_first  # no other verb needs it

    rows = [
        (
            clean(alert["rule"]),
            clean(",".join(alert["labels"].values())) or "-",
            alert["severity"],
            alert["phase"],
            date_text(alert["ended_at_s"] if alert["phase"] == "resolved" else alert["since_s"]),
            f"({clean(alert['quiet'])}) {clean(alert['text'])}" if alert["quiet"] else clean(alert["text"]),
        )
        for alert in worst_first(answer["alerts"])
    ]
    lines = columns(("RULE", "WHERE", "SEVERITY", "STATE", "SINCE", "TEXT"), rows).splitlines() if rows else []
    lines += [] if rows else ["no alerts: all that is watched is well"]
    if answer["left_out"]:
        lines.append(f"and {answer['left_out']} more, which are too many to be told")
    lines += _silence_lines(answer)
    for receiver in answer["receivers"]:
        if receiver["why"]:
            lines.append(
                f"receiver {receiver['name']} cannot be reached since {date_text(receiver['failing_since_s'])}, "
                f"{receiver['waiting']} messages wait: {clean(receiver['why'])}"
            )
    return lines


def _silence_lines(answer: Json) -> list[str]:
    return [
        f"silence {one['id']} by {clean(one['by'])} until {date_text(one['until_s'])}: "
        f"{' '.join(f'{label}={chr(44).join(map(clean, patterns))}' for label, patterns in one['matchers'])}"
        f"{'; ' + clean(one['why']) if one['why'] else ''}"
        for one in answer["silences"]
    ]


def _silence(rest: Sequence[str], words: Words) -> int:
    """Make, list or end silences."""
    if not rest:
        answer = client.call("GET", "/v1/alerts")
        return _print_answer(answer, words, "\n".join(_silence_lines(answer)) or "no silences")
    if rest[0] == "end":
        _needs(rest[1:], "the numbers of silences")
        if not all(word.isascii() and word.isdigit() and len(word) < 10 for word in rest[1:]):
            raise UsageError("cannot end that: write the numbers that hctl silence shows")
        for word in rest[1:]:
            answer = client.call("POST", "/v1/silences/end", {"id": int(word)})  # int: bounded
        return _print_answer(answer, words, f"ended: {', '.join(rest[1:])}")
    count = next((at for at, word in enumerate(rest) if "=" not in word), len(rest))
    if not count or count == len(rest):
        raise UsageError(
            "cannot silence that: write silence LABEL=PATTERNS... TIME [WHY], as silence node=n3 2h new fan"
        )
    matchers = dict(word.partition("=")[::2] for word in rest[:count])
    why = " ".join(rest[count + 1 :])
    until_s = _until_s(rest[count])
    body = {"matchers": matchers, "until_s": until_s, "why": why}
    answer = client.call("POST", "/v1/silences/create", body)
    text = f"silence {answer['id']} until {date_text(until_s)}; alerts that it matches now: {answer['alerts']}"
    return _print_answer(answer, words, text)


def _until_s(text: str) -> float:
    """Return the end of a silence: after so long, or at a date."""
    from hpcsched.model.dates import parse_when

    now_s = time.time()
    if text[:-1].isdigit() and text[-1:].lower() in AGES_S:
        return now_s + _age_s(text, "the time")
    return float(parse_when(text, now_s))  # float: of a number


def _heads(answer: Json) -> list[str]:
    """Return the name of each series; of a counter with /s, because its values are rates."""
    return [
        clean(row["key"]) + ("/s" if row["kind"] == "counter" else "") + (f" {row['node']}" if "node" in row else "")
        for row in answer["series"]
    ]


def _print_metrics(answer: Json, *, as_csv: bool) -> None:
    """Print a line for each step that has a value."""
    times = [date_text(answer["from_s"] + place * answer["step_s"]) for place in range(answer["count"])]
    steps = zip(times, *(row["values"] for row in answer["series"]), strict=True)
    rows = [step for step in steps if any(value is not None for value in step[1:])]
    if as_csv:
        import csv

        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(["time", *_heads(answer)])
        writer.writerows(rows)
        return
    texts = [[row[0], *("-" if value is None else f"{value:.6g}" for value in row[1:])] for row in rows]
    sys.stdout.write(columns(["TIME", *_heads(answer)], texts))


def _plot_metrics(answer: Json) -> None:
    from hpcsched.listing.plot import short_number, time_plot, unit_of

    width = terminal_width() or PLOT_WIDTH
    is_utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    for head, row in zip(_heads(answer), answer["series"], strict=True):
        unit, binary = unit_of(row, is_rate=row["kind"] == "counter")
        known = [value for value in row["values"] if value is not None]
        title = f"{head}  of {clean(answer['target'])}"
        if known:
            mean, most = (short_number(value, unit, binary=binary) for value in (sum(known) / len(known), max(known)))
            title += f"  mean {mean}, most {most}"
        lines = time_plot(
            row["values"],
            answer["from_s"],
            answer["step_s"],
            width,
            PLOT_HEIGHT,
            unit,
            binary=binary,
            ascii_only=not is_utf8,
        )
        print("\n".join([title, *lines, ""]))


VERBS: dict[str, Callable[[Sequence[str], Words], int]] = {
    "show": _show,
    "hold": _act("hold"),
    "release": _act("release"),
    "sign": _sign,
    "requeue": _act("requeue"),
    "suspend": _act("suspend"),
    "update": _update,
    "create": _create,
    "delete": _delete,
    "story": _story,
    "events": _events,
    "drain": _drain,
    "resume": _resume_jobs_or_nodes,
    "fence": _fence,
    "power": _power,
    "ping": _ping,
    "reconfigure": _reconfigure,
    "reset": _reset,
    "backup": _backup,
    "snapshot": _snapshot,
    "audit": _audit,
    "strays": _strays,
    "token": _token,
    "security": _security,
    "alerts": _alerts,
    "silence": _silence,
    "metrics": _metrics,
    "checkpoint": lambda rest, words: _on_checkpoints(rest, words.has("json")),
}

# ----- checkpoints: list, verify, prune, export, of a training job or in a directory
# The job reports the directory of its checkpoints; else it is found by the claims that attempts leave there
# (hpcsched-checkpoint(5)). A separate process reads it with hpctrain, so that this one does not load torch.


# The operands of each verb besides the directory: NAME=VALUE words, and whether a file.
KEYS = ("key-file", "key-command")  # of encrypted checkpoints
CHECKPOINT_VERBS = {
    "list": KEYS,
    "verify": ("step", *KEYS),
    "prune": ("keep", "every", *KEYS),
    "export": ("step", "all", *KEYS),
}
WITH_JSON = ("list", "verify")
YES, NO = frozenset({"1", "yes", "true"}), frozenset({"0", "no", "false"})
SOME = 4  # at most this many tasks of an array are listed
DEEP = 4  # levels below the job's directory that are searched for checkpoints


def _on_checkpoints(rest: Sequence[str], as_json: bool) -> int:
    """Execute a checkpoint verb and return the exit status."""
    if len(rest) < 2 or rest[0] not in CHECKPOINT_VERBS:
        raise UsageError(
            f"cannot tell what to do with checkpoints: hctl checkpoint {'|'.join(CHECKPOINT_VERBS)} JOB|DIRECTORY ..."
        )
    verb, where, *more = rest
    if as_json and verb not in WITH_JSON:
        raise UsageError(f"cannot print {verb} as JSON: only {' and '.join(WITH_JSON)} take --json")
    options = [option for word in more for option in _option(verb, word)] + ["--json"] * as_json
    directory = where if os.sep in where or os.path.isdir(where) else _of_job(where, verb)
    command = [sys.executable, "-P", "-m", "hpctrain.checkpoint", verb, *options, "--", directory, *_files(verb, more)]
    import subprocess  # slow to import, and needed only here

    status = subprocess.run(command, check=False).returncode
    return status if status >= 0 else 128 - status  # killed by a signal: the status that a shell reports


def _files(verb: str, words: Sequence[str]) -> list[str]:
    files = [word for word in words if "=" not in word]
    if len(files) != (verb == "export"):
        wanted = "hctl checkpoint export JOB|DIRECTORY FILE [step=N] [all=yes]" if verb == "export" else "no file here"
        raise UsageError(f"cannot understand {' '.join(files)!r}: {wanted}")
    return files


def _option(verb: str, word: str) -> list[str]:
    name, equals, value = word.partition("=")
    if not equals:
        return []
    if name.lower() not in CHECKPOINT_VERBS[verb]:
        raise UsageError(
            f"cannot understand {word[:60]!r}: {verb} takes {', '.join(CHECKPOINT_VERBS[verb]) or 'no such word'}"
        )
    if name.lower() == "all":
        if value.lower() not in YES | NO:
            raise UsageError(f"cannot understand {word[:60]!r}: all=yes or all=no")
        return ["--all"] if value.lower() in YES else []
    return [f"--{name.lower()}", value]


def _of_job(reference: str, verb: str) -> str:
    """Return the directory of the job's checkpoints: as reported, else found by its claims."""
    job, *others = client.call("GET", client.job_path(reference))["jobs"]
    if others:
        some = ", ".join(task["display_id"] for task in (job, *others)[:SOME])
        raise UsageError(f"cannot tell which of {1 + len(others)} jobs {reference} means: name one, as {some}")
    reported = (job.get("training") or {}).get("directory")
    if reported and _claimed_by(reported, str(job["id"])):
        return str(reported)
    found = [directory for directory in _directories(job["work_dir"], DEEP) if _claimed_by(directory, str(job["id"]))]
    if len(found) == 1:
        return found[0]
    places = f"more than one directory in {job['work_dir']} has some: {', '.join(found)}"
    why = places if found else f"no directory in {job['work_dir']} has any of it"
    first = (
        f"in {reported}, which its program named, are none of it"
        if reported
        else "its program has not said where they are"
    )
    raise NotFoundError(
        f"cannot find the checkpoints of job {reference}: {first}, and {why}; "
        f"name the directory: hctl checkpoint {verb} DIRECTORY"
    )


def _directories(top: str, deep: int) -> Iterator[str]:
    try:
        entries = [entry for entry in os.scandir(top) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return
    for entry in entries:
        if entry.name == "checkpoints":
            yield entry.path
        elif deep > 1 and not entry.name.startswith("."):
            yield from _directories(entry.path, deep - 1)


def _claimed_by(directory: str, job: str) -> bool:
    try:
        names = [name for name in os.listdir(directory) if name.startswith("attempt.")]
    except OSError:
        return False
    for name in names:
        try:
            with open(os.path.join(directory, name), "rb") as file:
                note = json.loads(file.read())
        except (OSError, ValueError):
            continue  # its writer died while writing it
        if isinstance(note, dict) and note.get("job") == job:
            return True
    return False
