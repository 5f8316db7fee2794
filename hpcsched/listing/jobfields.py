"""The columns of a job: each with its own name, squeue's letter, header and long names, and how it is written.

A job is the JSON object of the API. Source: squeue(1) -o and -O.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from hpcsched.listing import formats
from hpcsched.listing.formats import Cell, Field, Look
from hpcsched.listing.jobs import (
    Job,
    array_text,
    checkpoint_text,
    end_s,
    exit_text,
    goodput_text,
    gres_of_node,
    id_text,
    is_waiting,
    loss_text,
    memory_asked,
    nodes_or_reason,
    rate_text,
    reason,
    start_s,
    step_text,
    time_left,
    training,
    tres_text,
    why,
)
from hpcsched.listing.states import ENDED_STATES, shown_state
from hpcsched.model.units import format_mem, format_time_s

_MAX_PRIORITY = 2**32 - 1


def _of(key: str, none: str = "") -> Callable[[Job, Look], str]:
    def text(job: Job, look: Look) -> str:
        value = job.get(key)
        return none if value is None or value == "" else str(value)

    return text


def _one(text: str) -> Callable[[Job, Look], str]:
    """Return the writer of what is the same for every job here."""
    return lambda job, look: text


def _listed(key: str) -> Callable[[Job, Look], str]:
    return lambda job, look: ",".join(job.get(key) or ()) or ""


def _group(job: Job) -> str:
    import grp  # these two only where a group is asked for
    import pwd

    try:
        return grp.getgrgid(pwd.getpwnam(job["user"]).pw_gid).gr_name
    except KeyError:
        return str(job["uid"])


def _gid(job: Job) -> str:
    import pwd

    try:
        return str(pwd.getpwnam(job["user"]).pw_gid)
    except KeyError:
        return str(job["uid"])


def _licenses(job: Job) -> str:
    return ",".join(f"{name}:{count}" for name, count in (job.get("licenses") or {}).items()) or "(null)"


def _share(job: Job) -> str:
    return f"{(job['priority'] or 0) / _MAX_PRIORITY:.14f}"


def _pending_s(job: Job, look: Look) -> str:
    until_s = job["started_at_s"] or job["ended_at_s"] or look.now_s
    return str(int(max(0, until_s - job["submitted_at_s"])))


def _soon(job: Job) -> str:
    """Return when a waiting job is expected to start, to the minute: of this year, so that the text holds at any time."""
    at_s = job["expected_start_s"] if is_waiting(job) else None
    return "-" if at_s is None else time.strftime("%m-%dT%H:%M", time.localtime(at_s))


# fmt: off
FIELDS = (
    Field("id", "i", "JOBID", lambda job, look: id_text(job), True, ("jobarrayid",)),
    Field("rawid", "A", "JOBID", _of("id"), True, ("jobid",)),
    Field("array", "F", "ARRAY_JOB_ID", lambda job, look: str(job["array_job_id"] or job["id"]), True, ("arrayjobid",)),
    Field("task", "K", "ARRAY_TASK_ID", lambda job, look: array_text(job), True, ("arraytaskid",)),
    Field("hetjob", "", "HET_JOB_ID", _of("het_job_id", "N/A"), True, ("hetjobid",)),
    Field("hetoffset", "", "HET_JOB_OFFSET", _of("het_offset", "N/A"), True, ("hetjoboffset",)),
    Field("hetids", "", "HET_JOB_ID_SET", _of("het_job_ids", "N/A"), False, ("hetjobidset",)),
    Field("partition", "P", "PARTITION", _of("partition"), True, ("partition",)),
    Field("name", "j", "NAME", _of("name"), True, ("name",)),
    Field("user", "u", "USER", _of("user"), True, ("username",)),
    Field("uid", "U", "UID", _of("uid"), True, ("userid",)),
    Field("group", "g", "GROUP", lambda job, look: _group(job), False, ("groupname",)),
    Field("gid", "G", "GROUP", lambda job, look: _gid(job), True, ("groupid",)),
    Field("account", "a", "ACCOUNT", _of("account", "(null)"), False, ("account",)),
    Field("st", "t", "ST", _of("state_short"), True, ("statecompact",)),
    Field("state", "T", "STATE", lambda job, look: shown_state(job), True, ("state",)),
    Field("time", "M", "TIME", lambda job, look: format_time_s(job["elapsed_s"]), True, ("timeused",)),
    Field("limit", "l", "TIME_LIMIT", lambda job, look: format_time_s(job["time_limit_s"]), True, ("timelimit",)),
    Field("left", "L", "TIME_LEFT", lambda job, look: time_left(job), True, ("timeleft",)),
    Field("nodes", "D", "NODES", _of("num_nodes"), True, ("numnodes",)),
    Field("cpus", "C", "CPUS", _of("num_cpus"), True, ("numcpus",)),
    Field("tasks", "", "TASKS", _of("num_tasks"), True, ("numtasks",)),
    Field("cpuspertask", "", "CPUS_PER_TASK", _of("cpus_per_task"), True, ("cpus-per-task",)),
    Field("mincpus", "c", "MIN_CPUS", _of("mincpus", "1"), True, ("mincpus",)),
    Field("mem", "m", "MIN_MEMORY", lambda job, look: memory_asked(job), True, ("minmemory",)),
    Field("tmp", "d", "MIN_TMP_DISK", lambda job, look: format_mem(job.get("tmp_mib") or 0), True, ("mintmpdisk",)),
    Field("gres", "b", "TRES_PER_NODE", lambda job, look: gres_of_node(job), False, ("tres-per-node", "gres")),
    Field("gpus", "", "GPUS", _of("gpus"), True),
    Field("tres", "", "TRES_ALLOC", lambda job, look: tres_text(job, billing=True), False, ("tres-alloc", "tres")),
    Field("nodelist", "N", "NODELIST", _of("node_list"), False, ("nodelist", "nodes")),
    Field("where", "R", "NODELIST(REASON)", lambda job, look: nodes_or_reason(job), False, ("reasonlist",)),
    Field("reason", "r", "REASON", lambda job, look: reason(job), False, ("reason",)),
    Field("why", "", "WHY", lambda job, look: why(job)),
    Field("eta", "", "ETA", lambda job, look: look.date(job["expected_start_s"])),
    Field("within", "", "LIMIT", lambda job, look: format_time_s(job["time_limit_s"]), True),
    Field("starts", "", "ETA", lambda job, look: _soon(job)),
    Field("start", "S", "START_TIME", lambda job, look: look.date(start_s(job)), False, ("starttime",)),
    Field("end", "e", "END_TIME", lambda job, look: look.date(end_s(job)), False, ("endtime",)),
    Field("submitted", "V", "SUBMIT_TIME", lambda job, look: look.date(job["submitted_at_s"]), False, ("submittime",)),
    Field("eligible", "", "ELIGIBLE_TIME", lambda job, look: look.date(job["eligible_at_s"]), False,
          ("eligibletime", "accruetime")),
    Field("deadline", "", "DEADLINE", lambda job, look: look.date(job.get("deadline_at_s")), False, ("deadline",)),
    Field("waited", "", "PENDING_TIME", _pending_s, True, ("pendingtime",)),
    Field("exit", "", "EXIT_CODE", lambda job, look: exit_text(job) if job["state"] in ENDED_STATES else "N/A", False,
          ("exit-code", "exitcode")),
    Field("qos", "q", "QOS", _of("qos", "normal"), False, ("qos",)),
    Field("priority", "Q", "PRIORITY", _of("priority", "0"), True, ("prioritylong",)),
    Field("share", "p", "PRIORITY", lambda job, look: _share(job), True, ("priority",)),
    Field("nice", "y", "NICE", _of("nice"), True, ("nice",)),
    Field("dependency", "E", "DEPENDENCY", _of("dependency", "(null)"), False, ("dependency",)),
    Field("reservation", "v", "RESERVATION", _of("reservation", "(null)"), False, ("reservation",)),
    Field("features", "f", "FEATURES", _of("constraint", "(null)"), False, ("feature", "features")),
    Field("prefer", "", "PREFER", _of("prefer", "(null)"), False, ("prefer",)),
    Field("licenses", "W", "LICENSES", lambda job, look: _licenses(job), False, ("licenses",)),
    Field("asked", "n", "REQ_NODES", _listed("asked_nodes"), False, ("reqnodes",)),
    Field("excluded", "x", "EXC_NODES", _listed("excluded_nodes"), False, ("excnodes",)),
    Field("scheduled", "Y", "SCHEDNODES", _one("(null)"), False, ("schednodes",)),
    Field("batchhost", "B", "EXEC_HOST", lambda job, look: job["nodes"][0] if job["nodes"] else "n/a", False,
          ("batchhost",)),
    Field("submithost", "", "ALLOC_SID", _of("submit_host", "N/A"), False, ("allocsid", "allocnodes")),
    Field("shared", "h", "OVER_SUBSCRIBE", lambda job, look: "NO" if job["exclusive"] else "OK", False,
          ("oversubscribe", "shared")),
    Field("contiguous", "O", "CONTIGUOUS", lambda job, look: str(int(bool(job.get("contiguous")))), True, ("contiguous",)),
    Field("sockets", "H", "SOCKETS_PER_NODE", _one("*"), True, ("sockets",)),
    Field("cores", "I", "CORES_PER_SOCKET", _one("*"), True, ("cores",)),
    Field("threads", "J", "THREADS_PER_CORE", _one("*"), True, ("threads",)),
    Field("sct", "z", "S:C:T", _one("*:*:*"), True, ("sct",)),
    Field("corespec", "X", "CORE_SPEC", _one("N/A"), True, ("corespec",)),
    Field("wckey", "w", "WCKEY", _one("(null)"), False, ("wckey",)),
    Field("comment", "k", "COMMENT", _of("comment", "(null)"), False, ("comment",)),
    Field("command", "o", "COMMAND", _of("command", "(null)"), False, ("command",)),
    Field("dir", "Z", "WORK_DIR", _of("work_dir", "(null)"), False, ("workdir",)),
    Field("stdin", "", "STDIN", _of("stdin", "/dev/null"), False, ("stdin",)),
    Field("stdout", "", "STDOUT", _of("stdout", "(null)"), False, ("stdout",)),
    Field("stderr", "", "STDERR", _of("stderr", "(null)"), False, ("stderr",)),
    Field("step", "", "STEP", lambda job, look: step_text(job), True),
    Field("loss", "", "LOSS", lambda job, look: loss_text(job), True),
    Field("rate", "", "SAMPLES/S", lambda job, look: rate_text(job), True),
    Field("trained", "", "TRAINED", lambda job, look: look.date(training(job).get("ends_at_s"))),
    Field("goodput", "", "GOODPUT", lambda job, look: goodput_text(job), True),
    Field("checkpoint", "", "CHECKPOINT", lambda job, look: checkpoint_text(job, look.now_s)),
    Field("restarts", "", "RESTARTS", _of("restarts"), True, ("restartcnt",)),
    Field("requeue", "", "REQUEUE", lambda job, look: "1" if job["requeue"] else "0", True, ("requeue",)),
)
# fmt: on


def _only_long() -> tuple[Field, ...]:
    """Return columns that Slurm's --Format has and that say nothing here: asked for by tools that show all there are."""
    nothing = {
        "N/A": "admin_comment system_comment associd batchflag boardsperblock burstbuffer burstbufferstate cluster "
        "clusterfeature container delayboot derivedec lastschedeval maxcpus maxnodes mcslabel mem-per-tres mintime network "
        "ntperboard ntpercore ntpernode ntpersocket origin originraw preempttime profile reboot reqswitch resizetime resvport "
        "selectjobinfo siblingsactive siblingsactiveraw siblingsviable siblingsviableraw sperboard statereason tres-bind "
        "tres-freq tres-per-job tres-per-socket tres-per-step tres-per-task cpus-per-tres wait4switch"
    }
    return tuple(
        Field("", "", name.upper().replace("-", "_"), _one(text), False, (name,))
        for text, names in nothing.items()
        for name in names.split()
    )


def parse_format(text: str) -> list[Cell]:
    """Return the places of a format, of names or of percent signs. Raises UsageError for a column that there is not."""
    return formats.parse_percent(text, FIELDS) if "%" in text else formats.parse_names(text, FIELDS)


def parse_long_format(text: str) -> list[Cell]:
    """Return the places of a format as -O takes it. Raises UsageError."""
    return formats.parse_long(text, (*FIELDS, *_only_long()))
