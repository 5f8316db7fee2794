"""scontrol: `hctl` in Slurm's words: its records, its texts where it refuses, its exit statuses.

``show hostnames``, ``show hostlist`` and ``version`` ask no controller: scripts call them on the nodes of a job. What
changes something is `hctl`'s, but for what it prints.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence

from hpcsched import client
from hpcsched.cli import hctl, reservation, showtext
from hpcsched.cli.errors import FAILED
from hpcsched.cli.options import HELP, VERSION, Command, Option, UsageError, Words, split_list
from hpcsched.cli.output import print_json
from hpcsched.cli.ownjob import outlive_its_end
from hpcsched.cli.slurm.face import ELSEWHERE, INVALID_JOB, SLURM_VERSION, Face, run_face
from hpcsched.client import Json
from hpcsched.errors import HpcschedError, NotFoundError, RequestError
from hpcsched.listing.states import ENDED_STATES
from hpcsched.listing.text import clean
from hpcsched.model.hostlist import compress_hostlist, expand_hostlist

POLL_S = 1.0

FACE = Face(
    Command(
        "scontrol",
        ("[OPTIONS] COMMAND [WORD...]",),
        "Look at jobs, nodes, partitions and the configuration, and change them.",
        (
            Option("all", "a", help="show all partitions (always so)"),
            Option("details", "d", help="show the share of each node of a job, too"),
            Option("json", help="print as JSON"),
            Option("oneliner", "o", help="print each record on one line"),
            Option("quiet", "Q", help="print errors only"),
            Option("verbose", "v", help="say more"),
            HELP,
            VERSION,
        ),
        accepted=(
            *ELSEWHERE,
            Option("hide"),
            Option("future", "F"),
            Option("uid", "u", "UID"),
            Option("yaml"),
            Option("usage"),
        ),
    ),
    "slurm_load_jobs error",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_face(FACE, _work, argv)


def _work(words: Words) -> int:
    if not words.operands:
        raise UsageError("no command was given: see scontrol --help; it has no prompt of its own here")
    verb, *rest = words.operands
    found = _found(verb, VERBS)
    if found is None:
        print(f"invalid keyword: {clean(verb)}", file=sys.stderr)
        return FAILED
    return VERBS[found](rest, words)


def _found(word: str, known: Iterable[str]) -> str | None:
    """Return the name that is meant: itself, or the first that begins so, as scontrol takes them."""
    lowered = word.lower()
    if lowered in known:
        return lowered
    return next((name for name in known if lowered and name.startswith(lowered)), None)


# ----- show


def _show(rest: Sequence[str], words: Words) -> int:
    if not rest:
        print("too few arguments for keyword:show", file=sys.stderr)
        return FAILED
    name, _, value = rest[0].partition("=")
    found = _found(name, _ENTITIES)
    if found is None:
        print(f"invalid entity:{clean(rest[0])} for keyword:show ", file=sys.stderr)
        return FAILED
    return _ENTITIES[found]([value, *rest[1:]] if value else rest[1:], words)


def _print(records: Sequence[list[showtext.Words]], words: Words) -> int:
    from hpcsched.cli.slurm.records import record

    for lines in records:
        print(record(lines, one_line=words.has("oneliner")))
    return 0


def _show_job(rest: Sequence[str], words: Words) -> int:
    references = [reference for operand in rest for reference in split_list(operand)]
    answers = [client.call("GET", client.job_path(reference)) for reference in references]
    answers = answers or [client.call("GET", "/v1/jobs")]
    jobs = [job for one in answers for job in one["jobs"]]
    if words.has("json"):
        from hpcsched.cli.slurm.jobjson import print_jobs

        return print_jobs({**answers[0], "jobs": jobs})
    if not jobs:
        print("No jobs in the system")
        return 0
    from hpcsched.cli.slurm.records import job_lines

    return _print([job_lines(job, detailed=words.has("details")) for job in jobs], words)


def _show_node(rest: Sequence[str], words: Words) -> int:
    answer = client.call("GET", "/v1/nodes")
    wanted = expand_hostlist(",".join(rest))
    return _show_chosen(answer, "nodes", wanted, "Node", words)


def _show_partition(rest: Sequence[str], words: Words) -> int:
    answer = client.call("GET", "/v1/partitions")
    return _show_chosen(answer, "partitions", [name for word in rest for name in split_list(word)], "Partition", words)


def _show_chosen(answer: Json, key: str, wanted: Sequence[str], what: str, words: Words) -> int:
    by_name = {one["name"]: one for one in answer[key]}
    missing = [name for name in wanted if name not in by_name]
    chosen = [by_name[name] for name in wanted if name in by_name] if wanted else list(answer[key])
    if words.has("json"):
        _print_json(key, chosen)
    else:
        _print([_lines(key, one) for one in chosen], words)
    for name in missing:
        print(f"{what} {clean(name)} not found")
    return FAILED if missing else 0


def _print_json(key: str, chosen: Sequence[Json]) -> None:
    from hpcsched.cli.slurm import clusterjson  # few ask for it

    if key == "nodes":
        clusterjson.print_nodes(chosen)
    else:
        clusterjson.print_partitions(chosen, client.call("GET", "/v1/nodes")["nodes"])


def _lines(key: str, one: Json) -> list[showtext.Words]:
    from hpcsched.cli.slurm import records

    if key == "nodes":
        return records.node_lines(one)
    nodes = client.call("GET", "/v1/nodes")["nodes"]
    return records.partition_lines(one, [node for node in nodes if node["name"] in one["nodes"]])


def _show_step(rest: Sequence[str], words: Words) -> int:
    from hpcsched.cli.slurm.records import step_lines
    from hpcsched.cli.steplist import running_steps

    wanted = [word for operand in rest for word in split_list(operand)]
    _, steps = running_steps(wanted)
    if wanted and not steps:
        raise NotFoundError(INVALID_JOB)
    return _print([step_lines(step) for step in steps], words)


def _show_reservation(rest: Sequence[str], words: Words) -> int:
    answer = client.call("GET", "/v1/reservations")
    if words.has("json"):
        print_json(answer)
        return 0
    wanted = [name for word in rest for name in split_list(word)]
    by_name = {one["name"]: one for one in answer["reservations"]}
    for name in wanted:
        if name not in by_name:
            print(f"Reservation {clean(name)} not found")
            return FAILED
    chosen = [by_name[name] for name in wanted] if wanted else answer["reservations"]
    if not chosen:
        print("No reservations in the system")
    return _print([reservation.lines(one) for one in chosen], words)


def _show_licenses(rest: Sequence[str], words: Words) -> int:
    answer = client.call("GET", "/v1/licenses")
    if words.has("json"):
        names = {"name": "LicenseName", "total": "Total", "used": "Used", "free": "Free"}
        print_json({"licenses": [{names.get(key, key): one[key] for key in one} for one in answer["licenses"]]})
        return 0
    if not answer["licenses"]:
        print("No licenses configured in Slurm.")
        return 0
    return _print([showtext.license_lines(one) for one in answer["licenses"]], words)


def _show_config(rest: Sequence[str], words: Words) -> int:
    from hpcsched.cli.slurm.sconfig import config_lines

    print("\n".join(config_lines()))
    return 0


def _show_hostnames(rest: Sequence[str], words: Words) -> int:
    given = ",".join(rest) or os.environ.get("SLURM_JOB_NODELIST") or os.environ.get("SLURM_NODELIST", "")
    if not given:
        print("SLURM_JOB_NODELIST environment variable is not set", file=sys.stderr)
        return FAILED
    print("\n".join(expand_hostlist(given)))
    return 0


def _show_hostlist(rest: Sequence[str], words: Words, *, in_order: bool = False) -> int:
    if not rest:
        print("too few arguments for keyword:show hostlist", file=sys.stderr)
        return FAILED
    given = rest[0]
    if given.startswith("/") or given == "-":
        with open(given) if given != "-" else sys.stdin as stream:
            given = ",".join(stream.read().split())
    names = expand_hostlist(given)
    print(compress_hostlist(sorted(set(names), key=_natural) if in_order else names))
    return 0


def _natural(name: str) -> tuple[str, int, str]:
    head = name.rstrip("0123456789")
    return head, int(name[len(head) :] or 0), name


def _show_hostlist_sorted(rest: Sequence[str], words: Words) -> int:
    return _show_hostlist(rest, words, in_order=True)


def _version(rest: Sequence[str], words: Words) -> int:
    print(f"slurm {SLURM_VERSION}")
    return 0


def _show_nothing(rest: Sequence[str], words: Words) -> int:
    return 0


_Work = Callable[[Sequence[str], Words], int]

_ENTITIES: dict[str, _Work] = {
    "job": _show_job,
    "jobs": _show_job,
    "jobid": _show_job,
    "node": _show_node,
    "nodes": _show_node,
    "partition": _show_partition,
    "partitions": _show_partition,
    "reservation": _show_reservation,
    "reservations": _show_reservation,
    "step": _show_step,
    "steps": _show_step,
    "config": _show_config,
    "hostnames": _show_hostnames,
    "hostlist": _show_hostlist,
    "hostlistsorted": _show_hostlist_sorted,
    "licenses": _show_licenses,
    "lic": _show_licenses,
    "version": _version,
    "burstbuffer": _show_nothing,
    "federation": _show_nothing,
    "topology": _show_nothing,
}


# ----- jobs


def _act(verb: str) -> _Work:
    def work(rest: Sequence[str], words: Words) -> int:
        if not rest:
            print(f"too few arguments for keyword:{verb}", file=sys.stderr)
            return FAILED
        return _ask(verb, {"jobs": _jobs(rest)}, words)

    return work


def _jobs(rest: Sequence[str]) -> list[str]:
    """Return the references in ``12,13``, ``jobid=12``, ``name=x``."""
    found = []
    for word in rest:
        key, equals, value = word.partition("=")
        found += split_list(value if equals and key.lower() in ("jobid", "jobids", "job", "name") else word)
    return found


def _ask(verb: str, body: Json, words: Words) -> int:
    """Have the controller do it, and say in Slurm's words what it refused."""
    if verb == "requeue":
        outlive_its_end()
    answer = client.call("POST", f"/v1/{verb}", body)
    for refusal in answer["errors"]:
        if not words.has("quiet"):
            print(f"{_why(refusal)} for job {clean(refusal['job'])}", file=sys.stderr)
    return FAILED if answer["errors"] else 0


def _why(refusal: Json) -> str:
    text = clean(refusal["error"])
    match refusal.get("kind"):
        case "NotFoundError":
            return INVALID_JOB
        case "PermissionDeniedError":
            return f"Access/permission denied ({text})"
        case _:
            if any(f"is {state}" in text for state in ENDED_STATES) or "already ended" in text:
                return "Job/step already completing or completed"
            return f"Job is no longer pending execution ({text})" if "is RUNNING" in text else text


def _requeue_hold(rest: Sequence[str], words: Words) -> int:
    jobs = [word for word in rest if not word.lower().startswith("state=")]
    return _act("requeue")(jobs, words) or _act("hold")(jobs, words)


def _requeue(rest: Sequence[str], words: Words) -> int:
    return _act("requeue")([word for word in rest if word.lower() != "incomplete"], words)


def _top(rest: Sequence[str], words: Words) -> int:
    """Put these jobs first in line: what `update Priority` does, a little over the highest there is."""
    jobs = _jobs(rest)
    waiting = client.call("GET", client.query("/v1/jobs", state="PENDING"))["jobs"]
    highest = max((job["priority"] or 0 for job in waiting), default=0)
    status = 0
    for at, job in enumerate(reversed(jobs), start=1):
        status |= _ask("update", {"jobs": [job], "changes": {"priority": str(highest + at)}}, words)
    return status


def _wait_job(rest: Sequence[str], words: Words) -> int:
    if len(rest) != 1:
        print("too few arguments for keyword:wait_job", file=sys.stderr)
        return FAILED
    while True:
        job = client.call("GET", client.job_path(rest[0]))["jobs"][0]
        if job["state"] in ENDED_STATES or job["state"] == "RUNNING":
            print(
                f"Nodes for job {clean(rest[0])} are ready" if job["state"] == "RUNNING" else f"Job {rest[0]} is over"
            )
            return 0 if job["state"] == "RUNNING" else FAILED
        time.sleep(POLL_S)


def _write(rest: Sequence[str], words: Words) -> int:
    if len(rest) < 2 or rest[0].lower() not in ("batch_script", "batch"):
        print("invalid entity for keyword:write", file=sys.stderr)
        return FAILED
    job = client.call("GET", client.job_path(rest[1]))["jobs"][0]
    script = job.get("script")
    if not script:
        print(
            f"job script retrieval failed: {INVALID_JOB if script == '' else 'Access/permission denied'}",
            file=sys.stderr,
        )
        return FAILED
    path = rest[2] if len(rest) > 2 else f"slurm-{job['id']}.sh"
    if path == "-":
        sys.stdout.write(script)
        return 0
    try:
        with open(path, "w", encoding="utf-8", errors="surrogateescape") as stream:
            stream.write(script)
    except OSError as error:
        raise RequestError(f"cannot write {clean(path)}: {error.strerror}") from None
    print(f'batch script for job {job["id"]} written to "{clean(path)}"')
    return 0


# ----- changes


def _update(rest: Sequence[str], words: Words) -> int:
    keys = {word.partition("=")[0].lower() for word in rest}
    if "partitionname" in keys and not keys & {"jobid", "job", "reservationname", "reservation"}:
        raise RequestError("cannot change a partition so: partitions are in hpcsched.toml; then scontrol reconfigure")
    if "nodename" in keys:
        return hctl.update_node(rest, words)
    if reservation.is_meant(rest):
        return reservation.update(rest, words)
    jobs, changes = hctl.job_changes(rest)
    if not jobs or not changes:
        print("too few arguments for keyword:update", file=sys.stderr)
        return FAILED
    return _ask("update", {"jobs": jobs, "changes": changes}, words)


def _resume(rest: Sequence[str], words: Words) -> int:
    return _act("resume")(rest, words)


def _ping(rest: Sequence[str], words: Words) -> int:
    from hpcsched.cli.slurm.sconfig import ping_line

    try:
        print(ping_line())
    except HpcschedError:
        print(f"Slurmctld(primary) at {os.uname().nodename} is DOWN")
        return FAILED
    return 0


def _reconfigure(rest: Sequence[str], words: Words) -> int:
    client.call("POST", "/v1/reconfigure", {})
    return 0


def _refused(what: str, instead: str) -> _Work:
    def work(rest: Sequence[str], words: Words) -> int:
        raise RequestError(f"cannot {what}: {instead}")

    return work


VERBS: dict[str, _Work] = {
    "show": _show,
    "update": _update,
    "updatejob": _update,
    "hold": _act("hold"),
    "uhold": _act("hold"),
    "release": _act("release"),
    "requeue": _requeue,
    "requeuehold": _requeue_hold,
    "suspend": _act("suspend"),
    "resume": _resume,
    "top": _top,
    "wait_job": _wait_job,
    "write": _write,
    "ping": _ping,
    "reconfigure": _reconfigure,
    "create": lambda rest, words: reservation.create(rest, words),
    "delete": lambda rest, words: reservation.delete(rest, words),
    "version": _version,
    "reboot": _refused("reboot nodes", "nobody but their own administrator does"),
    "shutdown": _refused("stop the controller", "use 'hpcsched down'"),
    "takeover": _refused("take over", "there is one controller"),
    "setdebug": _refused("change what is logged", "start hpcschedd with another level"),
    "notify": _refused("write to a job", "its output belongs to it alone"),
    "listpids": _refused("list the processes of a job", "use ps on its nodes"),
}
