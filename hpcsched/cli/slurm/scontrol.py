"""scontrol: `hctl` with Slurm's records, error messages and exit statuses.

``show hostnames``, ``show hostlist`` and ``version`` need no controller: scripts call them on the nodes of a job. Changes are
made by `hctl`, with other output. Without a command it reads commands from standard input, one per line.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence

from hpcsched import client
from hpcsched.cli import hctl
from hpcsched.cli.output import outlive_its_end, print_json
from hpcsched.cli.slurm import records, run_face
from hpcsched.cli.slurm.sacctmgr import RECORDS
from hpcsched.cli.slurm.sstat import running_steps
from hpcsched.client import Json
from hpcsched.commands.options import (
    ELSEWHERE,
    FAILED,
    HELP,
    INVALID_JOB,
    SLURM_VERSION,
    VERSION,
    Command,
    Face,
    Option,
    Words,
    slurm_explained,
    split_list,
)
from hpcsched.errors import HpcschedError, NotFoundError, PermissionDeniedError, RequestError
from hpcsched.listing.jobs import ENDED_STATES, end_s, index_ranges
from hpcsched.listing.text import clean, date_text
from hpcsched.model.hostlist import compress_hostlist, expand_hostlist
from hpcsched.model.units import format_time_s
from hpcsched.steps.layout import tasks_per_node_text

POLL_S = 1.0

SCONTROL = Face(
    Command(
        "scontrol",
        ("[OPTIONS] COMMAND [WORD...]",),
        "Look at jobs, nodes, partitions and the configuration, and change them.",
        (
            Option("all", "a", help="show all partitions (the default)"),
            Option("details", "d", help="also show the share of each node of a job"),
            Option("json", help="print as JSON"),
            Option("oneliner", "o", help="print each record on one line"),
            Option("quiet", "Q", help="print errors only"),
            Option("verbose", "v", help="print more"),
            HELP,
            VERSION,
        ),
        accepted=(*ELSEWHERE, Option("hide"), Option("future", "F"), Option("uid", "u", "UID"), Option("yaml")),
    ),
    "slurm_load_jobs error",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_face(SCONTROL, lambda words: _run(words.operands, words) if words.operands else _prompt(words), argv)


PROMPT = "scontrol: "
MAX_LINE = 100_000
_QUIT = ("quit", "exit", "q")


def _prompt(words: Words) -> int:
    """Read commands and run them until ``quit`` or the end of the input.

    Return the last one's status.
    """
    status, last = 0, ""
    while True:
        if sys.stdin.isatty():
            sys.stdout.write(PROMPT)
            sys.stdout.flush()
        line = sys.stdin.readline(MAX_LINE)
        if not line or line.strip().lower() in _QUIT:
            return status
        if line.strip() == "!!":
            line = last
        try:
            command = shlex.split(line, comments=True)
            if command:
                status, last = _run(command, words), line
        except (HpcschedError, ValueError) as error:
            text, status = (
                slurm_explained("scontrol", error, SCONTROL.contact)
                if isinstance(error, HpcschedError)
                else (str(error), 1)
            )
            print(text, file=sys.stderr)


def _run(operands: Sequence[str], words: Words) -> int:
    verb, *rest = operands
    if verb.lower() in _QUIT:
        return 0
    found = _found(verb, VERBS)
    if found is None:
        print(f"invalid keyword: {clean(verb)}", file=sys.stderr)
        return FAILED
    return VERBS[found](rest, words)


def _found(word: str, known: Iterable[str]) -> str | None:
    """Return the name, or the first name that begins with it, like scontrol.

    None if there is none.
    """
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


def _print(shown: Sequence[list[records.Words]], words: Words) -> int:
    for lines in shown:
        print(records.record_text(lines, one_line=words.has("oneliner")))
    return 0


def _show_job(rest: Sequence[str], words: Words) -> int:
    references = [reference for operand in rest for reference in split_list(operand)]
    answers = [client.call("GET", client.job_path(reference)) for reference in references]
    answers = answers or [client.call("GET", "/v1/jobs")]
    jobs = [job for answer in answers for job in answer["jobs"]]
    if words.has("json"):
        return records.print_jobs({**answers[0], "jobs": jobs})
    if not jobs:
        print("No jobs in the system")
        return 0
    return _print([records.scontrol_lines(job, detailed=words.has("details")) for job in _folded(jobs)], words)


def _folded(jobs: Sequence[Json]) -> list[Json]:
    """Return the jobs.

    Equal waiting tasks of an array are one record, at the position of the first.
    """
    groups: dict[tuple[object, ...], list[Json]] = {}
    for job in jobs:
        alone = job["array_task_id"] is None or job["state"] != "PENDING" or job["restarts"]
        alike = (job["array_job_id"], job["hold"], job["nice"], job["partition"], job["time_limit_s"])
        groups.setdefault((job["id"],) if alone else alike, []).append(job)
    found = []
    for tasks in groups.values():
        limit = f"%{tasks[0]['array_limit']}" if tasks[0].get("array_limit") else ""
        indices = index_ranges([task["array_task_id"] for task in tasks]) + limit if len(tasks) > 1 else ""
        found.append(tasks[0] | {"id": tasks[0]["array_job_id"], "array_task_id": indices} if indices else tasks[0])
    return found


def _show_node(rest: Sequence[str], words: Words) -> int:
    nodes = client.call("GET", "/v1/nodes")["nodes"]
    chosen, missing = _chosen(nodes, expand_hostlist(",".join(rest)))
    if words.has("json"):
        records.print_nodes(chosen)
    else:
        _print([records.scontrol_node_lines(node) for node in chosen], words)
    return _report_missing("Node", missing)


def _show_partition(rest: Sequence[str], words: Words) -> int:
    partitions = client.call("GET", "/v1/partitions")["partitions"]
    chosen, missing = _chosen(partitions, [name for word in rest for name in split_list(word)])
    nodes = client.call("GET", "/v1/nodes")["nodes"] if chosen else []
    if words.has("json"):
        records.print_partitions(chosen, nodes)
    else:
        _print([records.scontrol_partition_lines(partition, nodes) for partition in chosen], words)
    return _report_missing("Partition", missing)


def _chosen(known: Sequence[Json], wanted: Sequence[str]) -> tuple[list[Json], list[str]]:
    """Return the records with these names, by default all, and the names without a record."""
    by_name = {record["name"]: record for record in known}
    chosen = [by_name[name] for name in wanted if name in by_name] if wanted else list(known)
    return chosen, [name for name in wanted if name not in by_name]


def _report_missing(what: str, names: Sequence[str]) -> int:
    for name in names:
        print(f"{what} {clean(name)} not found")
    return FAILED if names else 0


def _show_step(rest: Sequence[str], words: Words) -> int:
    wanted = [word for operand in rest for word in split_list(operand)]
    _, steps = running_steps(wanted)
    if wanted and not steps:
        raise NotFoundError(INVALID_JOB)
    return _print([records.step_lines(step) for step in steps], words)


def _show_reservation(rest: Sequence[str], words: Words) -> int:
    answer = client.call("GET", "/v1/reservations")
    if words.has("json"):
        print_json(answer)
        return 0
    wanted = [name for word in rest for name in split_list(word)]
    by_name = {reservation["name"]: reservation for reservation in answer["reservations"]}
    for name in wanted:
        if name not in by_name:
            print(f"Reservation {clean(name)} not found")
            return FAILED
    chosen = [by_name[name] for name in wanted] if wanted else answer["reservations"]
    if not chosen:
        print("No reservations in the system")
    return _print([hctl.reservation_lines(reservation) for reservation in chosen], words)


def _show_licenses(rest: Sequence[str], words: Words) -> int:
    answer = client.call("GET", "/v1/licenses")
    if words.has("json"):
        names = {"name": "LicenseName", "total": "Total", "used": "Used", "free": "Free"}
        print_json(
            {"licenses": [{names.get(key, key): license[key] for key in license} for license in answer["licenses"]]}
        )
        return 0
    if not answer["licenses"]:
        print("No licenses configured in Slurm.")
        return 0
    return _print([records.license_lines(license) for license in answer["licenses"]], words)


def _show_config(rest: Sequence[str], words: Words) -> int:
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
    "hostlistsorted": lambda rest, words: _show_hostlist(rest, words, in_order=True),
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
    """Send the request, and print a refusal in Slurm's words."""
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
    states = {word.partition("=")[2].lower().replace("_", "") for word in rest if word.lower().startswith("state=")}
    if states - {"specialexit", "se"}:
        raise RequestError(
            f"cannot requeue into the state {clean(min(states)[:40])!r}: only SpecialExit is one for that"
        )
    how = {"held": True} | ({"special": True} if states else {})
    return _requeue([word for word in rest if not word.lower().startswith("state=")], words, how)


def _requeue(rest: Sequence[str], words: Words, how: Json | None = None) -> int:
    """Requeue jobs.

    If the first word is Incomplete, those that have completed stay as they are.
    """
    incomplete = _is_incomplete(rest)
    jobs = _jobs(rest[1:] if incomplete else rest)
    if not jobs:
        print(f"too few arguments for keyword:requeue{'hold' if how else ''}", file=sys.stderr)
        return FAILED
    body = {"jobs": jobs} | ({"incomplete": True} if incomplete else {}) | (how or {})
    return _ask("requeue", body, words)


def _is_incomplete(rest: Sequence[str]) -> bool:
    """Return whether the first word is Incomplete, or a beginning of it."""
    return bool(rest) and len(rest[0]) > 2 and "incomplete".startswith(rest[0].lower())


def _top(rest: Sequence[str], words: Words) -> int:
    """Move these jobs to the front: set a priority slightly above the highest one."""
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
            f"job script retrieval failed: {INVALID_JOB if 'script' in job else 'Access/permission denied'}",
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
    if hctl.is_partition(rest):
        return hctl.update_partition(rest, words)
    if "partitionname" in keys and not keys & {"jobid", "job", "reservationname", "reservation"}:
        raise RequestError(
            "cannot change a partition so: only State= can be; the rest is in hpcsched.toml: edit it, then scontrol reconfigure"
        )
    if "nodename" in keys:
        return hctl.update_node(rest, words)
    if hctl.is_reservation(rest):
        return hctl.update_reservation(rest, words)
    jobs, changes = hctl.job_changes(_joined(rest))
    if not jobs or not changes:
        print("too few arguments for keyword:update", file=sys.stderr)
        return FAILED
    status = _ask("update", {"jobs": jobs, "changes": changes}, words)
    if "num_nodes" in changes and not status:
        for job_id in jobs:
            _write_resized(client.call("GET", client.job_path(job_id))["jobs"][0], words)
    return status


def _write_resized(job: Json, words: Words) -> None:
    """Write the scripts with the new variables for the shell of a resized job."""
    if job["state"] != "RUNNING":
        return
    shares = job["shares"]
    facts = {
        "NODELIST": job["node_list"],
        "JOB_NODELIST": job["node_list"],
        "NNODES": str(len(shares)),
        "JOB_NUM_NODES": str(len(shares)),
        "JOB_CPUS_PER_NODE": tasks_per_node_text([share["cpus"] for share in shares]),
        "TASKS_PER_NODE": tasks_per_node_text([share["tasks"] for share in shares]),
    }
    pairs = [(f"{prefix}_{name}", value) for prefix in ("SLURM", "HPCSCHED") for name, value in facts.items()]
    removed = [f"{prefix}_{name}" for prefix in ("SLURM", "HPCSCHED") for name in ("NPROCS", "NTASKS")]
    path = f"slurm_job_{job['id']}_resize"
    for ending, form in (("sh", 'export {}="{}"\n'), ("csh", 'setenv {} "{}"\n')):
        unset = "unset" if ending == "sh" else "unsetenv"
        text = "".join(form.format(*pair) for pair in pairs) + "".join(f"{unset} {name}\n" for name in removed)
        try:
            with open(f"{path}.{ending}", "w") as stream:
                os.fchmod(stream.fileno(), 0o755)
                stream.write(text)
        except OSError as error:
            raise RequestError(
                f"job {job['id']} is resized, but cannot write {path}.{ending}: {error.strerror}"
            ) from None
    if not words.has("quiet"):
        print("The shell of the job gets its new SLURM_ variables when it reads one of these:")
        print(f"  sh, bash:  . ./{path}.sh\n  csh, tcsh: source ./{path}.csh")


def _joined(rest: Sequence[str]) -> list[str]:
    """Return the words; separate names and values (``Nice 2``) are joined by ``=``."""
    found: list[str] = []
    pending = iter(rest)
    for word in pending:
        value = None if "=" in word else next(pending, None)
        found.append(word if value is None else f"{word}={value}")
    return found


def _completing(rest: Sequence[str], words: Words) -> int:
    now_s = time.time()
    for job in client.call("GET", client.query("/v1/jobs", state="COMPLETING"))["jobs"]:
        since_s = job["ended_at_s"] or now_s
        lasts = format_time_s(max(0.0, now_s - since_s), full=True)
        ended = date_text(job["ended_at_s"], "Unknown")
        print(f"JobId={job['id']} EndTime={ended} CompletingTime={lasts} Nodes(COMPLETING)={clean(job['node_list'])}")
    return 0


def _errnumstr(rest: Sequence[str], words: Words) -> int:
    if len(rest) != 1 or not (rest[0].isascii() and rest[0].isdigit() and len(rest[0]) < 8):
        print("too few arguments for keyword:errnumstr" if not rest else "Non-numeric error code", file=sys.stderr)
        return FAILED
    print(_ERRORS.get(int(rest[0])) or os.strerror(int(rest[0])))
    return 0


# Slurm's error numbers whose texts this scontrol may print.
_ERRORS = {
    2000: "Invalid partition name specified",
    2009: "Requested node configuration is not available",
    2016: "Access/permission denied",
    2017: INVALID_JOB,
    2020: "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
    2021: "Job/step already completing or completed",
    2050: "Job is no longer pending execution",
}


def _processes() -> list[tuple[int, dict[str, str]]]:
    """Return pid and environment of the jobs' processes on this machine that we may read."""
    found = []
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            with open(f"/proc/{pid}/environ", "rb") as stream:
                entries = stream.read().decode("utf-8", "replace").split("\0")
        except OSError:
            continue
        env = dict(entry.split("=", 1) for entry in entries if entry.startswith(("SLURM_", "SLURMD_")) and "=" in entry)
        if "SLURM_JOB_ID" in env:
            found.append((pid, env))
    return found


def _listpids(rest: Sequence[str], words: Words) -> int:
    """List the processes on this node of all jobs, of a job, or of a step (``12.0``)."""
    job, _, step = (rest[0] if rest else "").partition(".")
    rows = []
    for pid, env in _processes():
        ids = (env["SLURM_JOB_ID"], env.get("SLURM_STEP_ID", "batch"))
        if job in ("", "*", ids[0]) and step in ("", ids[1]):
            rows.append((pid, *ids, env.get("SLURM_LOCALID", "-"), env.get("SLURM_PROCID", "-")))
    if job not in ("", "*") and not rows:
        print(f"Job {clean(rest[0])} does not exist on this node.", file=sys.stderr)
        return FAILED
    print(f"{'PID':<8} {'JOBID':<8} {'STEPID':<8} {'LOCALID':<7} {'GLOBALID':<8}")
    for row in rows:
        print("{:<8} {:<8} {:<8} {:<7} {:<8}".format(*map(clean, row)).rstrip())
    return 0


def _pidinfo(rest: Sequence[str], words: Words) -> int:
    if len(rest) != 1:
        print("too few arguments for keyword:pidinfo", file=sys.stderr)
        return FAILED
    env = next((env for pid, env in _processes() if str(pid) == rest[0]), None)
    if env is None:
        print(f"Failed to get job id info: process {clean(rest[0][:20])} belongs to no job", file=sys.stderr)
        return FAILED
    job = client.call("GET", client.job_path(env["SLURM_JOB_ID"]))["jobs"][0]
    ends = date_text(end_s(job), "Unknown")
    print(f"Slurm JobId={job['id']} ends at {ends}")
    return 0


def _notify(rest: Sequence[str], words: Words) -> int:
    """Append a message to the standard error of a running batch job, as its owner."""
    if len(rest) < 2:
        print("too few arguments for keyword:notify", file=sys.stderr)
        return FAILED
    job = client.call("GET", client.job_path(rest[0]))["jobs"][0]
    if job["state"] != "RUNNING" or not job["nodes"]:
        raise RequestError(f"cannot write to job {job['display_id']}: it is {job['state']}, not RUNNING")
    if not job.get("stderr"):
        raise PermissionDeniedError(f"cannot write to job {job['display_id']}: it belongs to {clean(job['user'])}")
    from hpcnode.commands import hrun  # only this verb needs it

    message = clean(" ".join(rest[1:]))
    script = f"printf '%s\\n' {shlex.quote(message)} >> {shlex.quote(job['stderr'])}"
    step = ["--nodes=1", "--ntasks=1", "--overlap", "--quiet", f"--nodelist={job['nodes'][0]}", f"--jobid={job['id']}"]
    return hrun.main([*step, "sh", "-c", script])


def _help(rest: Sequence[str], words: Words) -> int:
    print("Commands: " + " ".join(sorted({*VERBS, *_QUIT[:2], "!!"})))
    print("Things to show: " + " ".join(sorted(_ENTITIES)))
    return 0


def _show_assoc_mgr(rest: Sequence[str], words: Words) -> int:
    print("Current Association Manager state\n")
    for title, name, key in (("User Records", "user", "UserName"), ("Association Records", "association", "Name"),
                             ("QOS Records", "qos", "QOS")):  # fmt: skip
        print(f"{title}\n")
        for record in RECORDS[name]():
            shown = " ".join(
                f"{field}={clean(value)}" for field, value in record.items() if field != "name" and value != ""
            )
            print(f"{key}={clean(record['name'])}\n    {shown}")
        print()
    return 0


def _show_daemons(rest: Sequence[str], words: Words) -> int:
    print("slurmctld slurmd" if _own_nodes() else "slurmctld")
    return 0


def _own_nodes() -> list[Json]:
    """Return the nodes that run on this machine."""
    names = {os.uname().nodename, "local", "localhost", "127.0.0.1"}
    return [node for node in client.call("GET", "/v1/nodes")["nodes"] if {node["name"], node["host"]} & names]


def _show_slurmd(rest: Sequence[str], words: Words) -> int:
    nodes = _own_nodes()
    if not nodes:
        print("slurm_load_slurmd_status: Connection refused", file=sys.stderr)
        return FAILED
    for node in nodes:
        jobs = ",".join(str(job) for job in node["jobs"]) or "NONE"
        print(f"Active Steps             = {jobs}\nActual CPUs              = {node['cpus']}")
        print(f"Actual Real Memory       = {node['mem_mib']} MB\nHostname                 = {clean(node['name'])}")
        print(f"Version                  = {SLURM_VERSION}")
    return 0


def _ping(rest: Sequence[str], words: Words) -> int:
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


_ENTITIES |= {"assoc_mgr": _show_assoc_mgr, "daemons": _show_daemons, "slurmd": _show_slurmd}

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
    "resume": _act("resume"),
    "top": _top,
    "wait_job": _wait_job,
    "write": _write,
    "ping": _ping,
    "reconfigure": _reconfigure,
    "create": lambda rest, words: hctl.create_reservation(rest, words),
    "delete": lambda rest, words: hctl.delete_reservation(rest, words),
    "version": _version,
    "reboot": _refused("reboot nodes", "only their administrator does"),
    "shutdown": _refused("stop the controller", "use 'hpcsched down'"),
    "takeover": _refused("take over", "there is one controller"),
    "setdebug": _refused("change what is logged", "start hpcschedd with another level"),
    "notify": _notify,
    "listpids": _listpids,
    "pidinfo": _pidinfo,
    "completing": _completing,
    "errnumstr": _errnumstr,
    "help": _help,
}

# ----- ``scontrol show config``, version and ping: settings of the controller with the names of slurm.conf(5)
# Clients look for MinJobAge, MaxArraySize and ClusterName.


def ping_line() -> str:
    """Return the line of scontrol ping. Raises UnavailableError without a controller."""
    client.call("GET", "/v1/ping")
    return f"Slurmctld(primary) at {os.uname().nodename} is UP"


def config_lines() -> list[str]:
    """Return the lines of scontrol show config."""
    answer, ping = client.call("GET", "/v1/config"), client.call("GET", "/v1/ping")
    config, accounting = answer["config"], answer.get("accounting") or {}
    scheduler = config.get("scheduler") or {}
    host = os.uname().nodename
    values = {
        "AccountingStorageEnforce": "associations,limits,qos" if accounting.get("accounts") else "none",
        "AccountingStorageHost": host,
        "AccountingStorageTRES": "cpu,mem,energy,node,billing,gres/gpu",
        "AccountingStorageType": "accounting_storage/slurmdbd",  # clients use this to detect that sacct works
        "AuthType": "auth/peercred",
        "BOOT_TIME": date_text(ping["started_at_s"]),
        "ClusterName": ping["cluster"],
        "FirstJobId": 1,
        "GresTypes": "gpu,shard",
        "InactiveLimit": "0 sec",
        "JobAcctGatherType": "jobacct_gather/linux",
        "JobRequeue": int(bool(config.get("requeue", True))),
        "KillWait": f"{_whole(config, 'kill_wait_s', 30)} sec",
        "MaxArraySize": _whole(scheduler, "max_array_size", 10_000) + 1,  # in Slurm, one more than the highest index
        "MaxJobCount": _whole(scheduler, "max_jobs", 100_000),
        "MinJobAge": f"{_whole(config, 'min_job_age_s', 300)} sec",
        "MpiDefault": "none",
        "PriorityType": "priority/multifactor",
        "PropagateResourceLimits": config.get("propagate", "ALL"),
        "ProctrackType": "proctrack/linuxproc",
        "SchedulerType": "sched/place/groups",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU_MEMORY",
        "SlurmctldHost[0]": host,
        "SlurmctldPort": 0,
        "SlurmUser": config.get("user") or "root(0)",
        "SLURM_VERSION": SLURM_VERSION,
        "StateSaveLocation": config.get("state_dir", ""),
        "SwitchType": "switch/none",
        "TaskPlugin": "task/none",
        "TopologyPlugin": "topology/tree",
    }
    lines = [f"Configuration data as of {date_text(ping['now_s'])}"]
    lines += [
        f"{name:<23} = {clean(value)}" for name, value in sorted(values.items(), key=lambda item: item[0].lower())
    ]
    return [*lines, "", f"Slurmctld(primary) at {host} is UP"]


def _whole(table: Json, key: str, default: int) -> int:
    value = table.get(key, default)
    return int(value) if isinstance(value, int | float) else default
