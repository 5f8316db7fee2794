"""hctl: looks at and changes what the controller has: jobs, nodes, partitions, its configuration.

The grammar is scontrol's (``hctl show job 12``, ``hctl update JobId=12 TimeLimit=1:00:00``); host lists are written out
and together without a controller. What a verb does is a function of its words here; who may do it the controller says.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence

from hpcsched import client
from hpcsched.cli import reservation, showtext
from hpcsched.cli.errors import FAILED, complain, run_command
from hpcsched.cli.options import HELP, VERSION, Command, Option, UsageError, Words, nearest, split_list
from hpcsched.cli.output import clean, date_text, print_json
from hpcsched.cli.ownjob import outlive_its_end
from hpcsched.client import Json
from hpcsched.errors import NotFoundError, RequestError
from hpcsched.model.hostlist import compress_hostlist, expand_hostlist
from hpcsched.model.units import format_time_s

COMMAND = Command(
    "hctl",
    (
        "show job [JOB...] | node [NODES] | partition [NAME...] | reservation [NAME...] | licenses | config",
        "show hostnames LIST | hostlist NAME...",
        "hold | release | requeue | suspend | resume JOB...",
        "update JOB... NAME=VALUE...",
        "create reservation NAME=VALUE... | update reservation NAME NAME=VALUE... | delete reservation NAME",
        "story JOB",
        "drain NODES WHY | resume NODES | fence NODES [WHY]",
        "backup FILE",
        "snapshot FILE",
        "strays | strays adopt|end TOKEN...|all",
        "reset usage all | [Account=LIST] [User=LIST]",
        "checkpoint list|verify|prune|export JOB|DIRECTORY [FILE] [NAME=VALUE...]",
        "ping | reconfigure",
    ),
    "Look at jobs, nodes, partitions and the configuration, and change them. 'update' changes a job's time_limit, "
    "time_min, partition, nice, priority, site_factor, begin, deadline, dependency, reservation, account, qos, "
    "array_task_throttle, name, comment, mail_user or requeue, and of one that waits also num_nodes, num_cpus, "
    "ntasks, ntasks_per_node, cpus_per_task, mem, mem_per_cpu, gres, constraint, prefer, nodelist, exclude, mincpus, tmp, "
    "licenses and work_dir; 'create', 'update' and "
    "'delete' are also for reservations: ReservationName= StartTime= EndTime= Duration= Users= Accounts= Nodes= NodeCnt= "
    "Features= PartitionName= Flags=. 'story' tells all that happened to a job. 'suspend' "
    "has a running job stand still, with all that it holds, until 'resume JOB'. 'drain' lets no new job start on nodes, "
    "'resume NODES' does again. 'fence' is your word that a node which does not answer runs nothing any more: its jobs go on "
    "without it. 'backup' copies the database, beside all that goes on, to a new file for 'hpcsched restore'. "
    "'snapshot' writes the world as the planner sees it to a file ('-': standard output) for 'hsim replay' and 'hsim whatif'. "
    "'strays' lists what nodes run from before a restore that asks, 'strays adopt' goes on with it as the job that it is, "
    "'strays end' ends it. 'checkpoint' looks at "
    "a training job's checkpoints, here and as you: prune takes keep=K every=HOURS, export step=N all=yes and a FILE "
    "(.safetensors, or else for torch.load). 'reset usage' has what was used until now count no more for fair share and limits.",
    (
        Option("json", help="print as JSON, version 1"),
        Option("oneliner", "o", help="print each record on one line"),
        HELP,
        VERSION,
    ),
    (
        "A JOB is a number, a task of an array (10_3), some of its tasks (10_[1-3,7]), the name of one of your jobs, or "
        "'last'. NODES is a host list as n[1-3],m7.",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_command(COMMAND, _work, argv)


def _work(words: Words) -> int:
    if not words.operands:
        raise UsageError("cannot tell what to do: see hctl --help")
    verb, *rest = words.operands
    work = VERBS.get(verb.lower())
    if work is None:
        raise UsageError(_no_such("verb", verb, VERBS))
    return work(rest, words)


def _no_such(what: str, word: str, known: Sequence[str] | Json) -> str:
    near = nearest(word.lower(), known)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
    return f"cannot understand {word[:60]!r}: no such {what}; {hint}"


def _needs(rest: Sequence[str], what: str) -> None:
    if not rest:
        raise UsageError(f"cannot do that: name {what}; see hctl --help")


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
    answer = {**answers[0], "jobs": [job for one in answers for job in one["jobs"]]}
    return _print_records(answer, "jobs", showtext.job_lines, words)


def _show_node(rest: Sequence[str], words: Words) -> int:
    answer = client.call("GET", "/v1/nodes")
    answer["nodes"] = _chosen(answer["nodes"], expand_hostlist(",".join(rest)), "Invalid node name specified")
    return _print_records(answer, "nodes", showtext.node_lines, words)


def _show_partition(rest: Sequence[str], words: Words) -> int:
    answer = client.call("GET", "/v1/partitions")
    names = [name for word in rest for name in split_list(word)]
    answer["partitions"] = _chosen(answer["partitions"], names, "invalid partition name specified")
    return _print_records(answer, "partitions", showtext.partition_lines, words)


def _chosen(records: Sequence[Json], names: Sequence[str], refusal: str) -> list[Json]:
    by_name = {record["name"]: record for record in records}
    for name in names:
        if name not in by_name:
            raise NotFoundError(f"{refusal}: {clean(name[:60])}; there are: {', '.join(by_name) or 'none'}")
    return [by_name[name] for name in names] if names else list(records)


def _print_records(answer: Json, key: str, lines: Callable[[Json], list[showtext.Words]], words: Words) -> int:
    if words.has("json"):
        print_json(answer)
        return 0
    one_line = words.has("oneliner")
    print("\n".join(showtext.record_text(lines(record), one_line=one_line) for record in answer[key]))
    return 0


def _show_reservation(rest: Sequence[str], words: Words) -> int:
    answer = reservation.fetch(rest)
    if not answer["reservations"] and not words.has("json"):
        print("No reservations in the system")
        return 0
    return _print_records(answer, "reservations", reservation.lines, words)


def _show_licenses(rest: Sequence[str], words: Words) -> int:
    answer = client.call("GET", "/v1/licenses")
    names = [name for word in rest for name in split_list(word)]
    answer["licenses"] = _chosen(answer["licenses"], names, "Invalid license name specified")
    if not answer["licenses"] and not words.has("json"):
        print("No licenses configured")
        return 0
    return _print_records(answer, "licenses", showtext.license_lines, words)


def _show_config(rest: Sequence[str], words: Words) -> int:
    answer = client.call("GET", "/v1/config")
    if words.has("json"):
        print_json(answer)
    else:
        sys.stdout.write(showtext.config_text(answer["config"]))
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
    "config": _show_config,
    "hostnames": _show_hostnames,
    "hostlist": _show_hostlist,
}


# ----- jobs


def _act(verb: str) -> Callable[[Sequence[str], Words], int]:
    def work(rest: Sequence[str], words: Words) -> int:
        _needs(rest, "the jobs")
        references = [reference for operand in rest for reference in split_list(operand)]
        if verb == "requeue":
            outlive_its_end()
        return _report(client.call("POST", f"/v1/{verb}", {"jobs": references}), words)

    return work


def _report(answer: Json, words: Words) -> int:
    if words.has("json"):
        print_json(answer)
    for refusal in answer["errors"]:
        complain(COMMAND.name, clean(refusal["error"]))
    return FAILED if answer["errors"] else 0


_CHANGES = {  # Slurm's names, without regard to case and _
    "numnodes": "num_nodes",
    "reqnodes": "num_nodes",
    "numcpus": "num_cpus",
    "endtime": "end_time",
    "timelimit": "time_limit",
    "timemin": "time_min",
    "sitefactor": "site_factor",
    "site": "site_factor",
    "starttime": "begin",
    "arraytaskthrottle": "array_task_throttle",
    "reservationname": "reservation",
    "jobname": "name",
    "features": "constraint",
    "reqnodelist": "nodelist",
    "excnodelist": "exclude",
    "minmemorynode": "mem",
    "minmemorycpu": "mem_per_cpu",
    "mempercpu": "mem_per_cpu",
    "numtasks": "ntasks",
    "ntaskspernode": "ntasks_per_node",
    "cpuspertask": "cpus_per_task",
    "cpus/task": "cpus_per_task",
    "mincpusnode": "mincpus",
    "mintmpdisknode": "tmp",
    "trespernode": "gres",
    "mailuser": "mail_user",
    "mailtype": "mail_type",
    "workdir": "work_dir",
}


def _create(rest: Sequence[str], words: Words) -> int:
    _needs(rest, "what to create, as reservation Users=ann Nodes=n1 StartTime=now+1hour Duration=2:00:00")
    if not reservation.is_meant(rest):
        raise UsageError(f"cannot create {rest[0][:60]!r}: there are reservations to create")
    return reservation.create(rest, words)


def _delete(rest: Sequence[str], words: Words) -> int:
    _needs(rest, "the reservation")
    if not reservation.is_meant(rest):
        raise UsageError(f"cannot delete {rest[0][:60]!r}: there are reservations to delete")
    return reservation.delete(rest, words)


def _update(rest: Sequence[str], words: Words) -> int:
    _needs(rest, "the jobs, and what to change as NAME=VALUE")
    if reservation.is_meant(rest):
        return reservation.update(rest, words)
    if any(word.partition("=")[0].lower() == "nodename" for word in rest):
        return update_node(rest, words)
    jobs, changes = job_changes(rest)
    _needs(jobs, "the jobs")
    _needs(list(changes), "what to change, as time_limit=1:00:00")
    return _report(client.call("POST", "/v1/update", {"jobs": jobs, "changes": changes}), words)


def job_changes(rest: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the jobs and the changes in ``[job] JOB... NAME=VALUE...``; a job may be ``JobId=12`` as well."""
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


def update_node(rest: Sequence[str], words: Words) -> int:
    """Do what ``update NodeName=n1 State=DRAIN Reason=why`` asks for."""
    changes = {name.lower(): value for name, _, value in (word.partition("=") for word in rest)}
    nodes, state, why = (changes.pop(name, "") for name in ("nodename", "state", "reason"))
    if changes or state.upper() not in ("DRAIN", "RESUME", "UNDRAIN", "IDLE"):
        raise UsageError("cannot update a node so: write State=DRAIN with Reason=WHY, or State=RESUME")
    return _drain([nodes, why], words) if state.upper() == "DRAIN" else _resume([nodes], words)


def _story(rest: Sequence[str], words: Words) -> int:
    if len(rest) != 1:
        raise UsageError("cannot tell whose story: name one job")
    answer = client.call("GET", client.job_path(rest[0], "story"))
    if words.has("json"):
        print_json(answer)
        return 0
    for event in answer["events"]:
        print(f"{date_text(event['at_s'])}  {clean(event['text'])}")
    if answer.get("now"):
        print(f"{date_text(answer['now_s'])}  now: {clean(answer['now'])}")
    return 0


# ----- nodes and the controller


def _drain(rest: Sequence[str], words: Words) -> int:
    _needs(rest, "the nodes")
    why = " ".join(rest[1:]).strip()
    if not why:
        raise UsageError(
            "cannot drain a node: give the reason, it is what others will see: hctl drain n1 'fan is loud'"
        )
    return _said(client.call("POST", "/v1/nodes/drain", {"nodes": rest[0], "why": why}), "drained", words)


def _resume(rest: Sequence[str], words: Words) -> int:
    _needs(rest, "the nodes")
    return _said(client.call("POST", "/v1/nodes/resume", {"nodes": ",".join(rest)}), "resumed", words)


def _said(answer: Json, what: str, words: Words) -> int:
    if words.has("json"):
        print_json(answer)
    elif answer["nodes"]:
        print(f"{compress_hostlist(answer['nodes'])} {what}")
    return 0


def _resume_jobs_or_nodes(rest: Sequence[str], words: Words) -> int:
    """Resume jobs where the operands are their numbers, else nodes: no node is called 12 or 10_3."""
    _needs(rest, "the jobs or nodes")
    if all(part[:1].isdigit() or part == "last" for operand in rest for part in split_list(operand)):
        return _act("resume")(rest, words)
    return _resume(rest, words)


def _fence(rest: Sequence[str], words: Words) -> int:
    _needs(rest, "the nodes")
    answer = client.call("POST", "/v1/nodes/fence", {"nodes": rest[0], "why": " ".join(rest[1:])})
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
    if words.has("json"):
        print_json(answer)
        return 0
    up = format_time_s(answer["now_s"] - answer["started_at_s"])
    print(
        f"hpcschedd {answer['hpcsched']} of cluster {clean(answer['cluster'])} is UP (process {answer['pid']}, for {up})"
    )
    return 0


BACKUP_TIMEOUT_S = 600.0


def _backup(rest: Sequence[str], words: Words) -> int:
    if len(rest) != 1:
        raise UsageError("cannot back up: name one file, which is not there yet")
    path = os.path.abspath(rest[0])
    answer = client.call("POST", "/v1/backup", {"path": path}, timeout_s=BACKUP_TIMEOUT_S)
    if words.has("json"):
        print_json(answer)
    else:
        print(f"{clean(answer['path'])} has the database as it was just now ({answer['size'] / (1 << 20):.1f} MiB)")
    return 0


def _snapshot(rest: Sequence[str], words: Words) -> int:
    if len(rest) != 1:
        raise UsageError("cannot write a snapshot: name one file, or - for standard output")
    text = json.dumps(client.call("GET", "/v1/snapshot")["world"]) + "\n"
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
    if words.has("json"):
        print_json(answer)
    elif rest[0] == "adopt":
        left = answer.get("left", 0)
        print(f"adopted: {', '.join(map(str, answer['jobs']))}" + (f"; still to decide about: {left}" if left else ""))
    else:
        print(f"ending it on {compress_hostlist(answer['nodes'])}")
    return 0


def _list_strays(words: Words) -> int:
    answer = client.call("GET", "/v1/strays")
    if words.has("json"):
        print_json(answer)
        return 0
    for one in answer["strays"]:
        whose = (
            f"job {one['job_id']} ({clean(one['name'])} of {clean(one['user'])})" if one["adoptable"] else "not known"
        )
        since = date_text(one["since_s"])
        print(f"{clean(one['token'])}  {one['status']} on {clean(one['node'])} since {since}, {whose}")
    if not answer["strays"]:
        print("Nothing from before a restore waits for a decision")
    return 0


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
    if words.has("json"):
        print_json(answer)
        return 0
    for one in answer["reset"]:
        print(
            f"usage of {clean(one['user'])}{' in ' + clean(one['account']) if one['account'] else ''} is 0 from now on"
        )
    if not answer["reset"]:
        print("nobody has used anything")
    return 0


def _reconfigure(rest: Sequence[str], words: Words) -> int:
    answer = client.call("POST", "/v1/reconfigure", {})
    if words.has("json"):
        print_json(answer)
    else:
        print("\n".join(map(clean, answer["changed"])) or "nothing has changed")
    return 0


def _checkpoint(rest: Sequence[str], words: Words) -> int:
    from hpcsched.cli import checkpoint  # noqa: PLC0415 - it brings subprocess, which nothing else here needs

    return checkpoint.run(rest, words.has("json"))


VERBS: dict[str, Callable[[Sequence[str], Words], int]] = {
    "show": _show,
    "hold": _act("hold"),
    "release": _act("release"),
    "requeue": _act("requeue"),
    "suspend": _act("suspend"),
    "update": _update,
    "create": _create,
    "delete": _delete,
    "story": _story,
    "drain": _drain,
    "resume": _resume_jobs_or_nodes,
    "fence": _fence,
    "ping": _ping,
    "reconfigure": _reconfigure,
    "reset": _reset,
    "backup": _backup,
    "snapshot": _snapshot,
    "strays": _strays,
    "checkpoint": _checkpoint,
}
