"""seff: the CPU and memory efficiency of a job, in the format of Slurm's contributed `seff`.

The figures are those of `hacct --eff` (`hpcsched.cli.render.efficiency`). Source: Slurm's ``contribs/seff``.
"""

from __future__ import annotations

import grp
import pwd
from collections.abc import Sequence

from hpcsched import client
from hpcsched.cli.render import efficiency
from hpcsched.cli.slurm import own_cluster, run_face
from hpcsched.client import Json
from hpcsched.commands.options import HELP, VERSION, Command, Option, UsageError, Words
from hpcsched.commands.slurm import INVALID_JOB, Face
from hpcsched.errors import NotFoundError
from hpcsched.listing.text import clean
from hpcsched.model.units import format_time_s

SEFF = Face(
    Command(
        "seff",
        ("[Options] <Jobid>",),
        "Show how much of its cpus and memory a job used.",
        (
            Option("debug", "d", help="show the job's record as the controller has it as well"),
            HELP,
            Option("version", "v", help="show the version"),
        ),
        accepted=(VERSION,),
    ),
    "seff: error",
)
_UNITS = ("KB", "MB", "GB", "TB", "PB", "EB")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_face(SEFF, _work, argv)


def _work(words: Words) -> int:
    if len(words.operands) != 1:
        raise UsageError("cannot tell which job: name one: seff JOBID")
    job = _job(words.operands[0])
    if words.has("debug"):
        print(f"Slurm data: {clean(job)}\n")
    print("\n".join(lines(job, own_cluster())))
    return 0


def _job(reference: str) -> Json:
    number, _, task = reference.partition("_")
    if not number.isdigit() or (task and not task.isdigit()):
        raise NotFoundError(f"{INVALID_JOB}: {reference[:60]}")
    jobs = client.call("GET", client.query("/v1/history", id=number))["jobs"]
    wanted = [job for job in jobs if reference in (str(job["id"]), job["display_id"])] or jobs
    if not wanted:
        raise NotFoundError(f"{INVALID_JOB}: {reference}")
    return wanted[0]


def lines(job: Json, cluster: str) -> list[str]:
    """Return the lines for a job of the API's history."""
    found = [f"Job ID: {job['id']}"]
    if job["array_job_id"] is not None:
        found.append(f"Array Job ID: {job['array_job_id']}_{job['array_task_id']}")
    found += [f"Cluster: {cluster}", f"User/Group: {job['user']}/{_group(job['uid'])}", _state(job)]
    cores, nodes = job["num_cpus"], max(1, job["num_nodes"])
    if cores == 1:
        found.append("Cores: 1")
    else:
        found += [f"Nodes: {nodes}", f"Cores per node: {cores // nodes}"]
    if job["started_at_s"] is None:
        return [*found, f"Efficiency not available for jobs in the {job['state']} state."]
    walltime_s = job["elapsed_s"] * cores
    cpu = efficiency.cpu_part(job) or 0.0
    memory, most_kib = efficiency.mem_part(job) or 0.0, (job["mem_mib"] or 0) * 1024
    estimated = " (estimated maximum)" if (job["num_tasks"] or 1) > 1 else ""
    found += [
        f"CPU Utilized: {_clock(cpu * walltime_s)}",
        f"CPU Efficiency: {cpu:.2%} of {_clock(walltime_s)} core-walltime",
        f"Job Wall-clock time: {_clock(job['elapsed_s'])}",
        f"Memory Utilized: {_size(memory * most_kib)}{estimated}",
        f"Memory Efficiency: {memory:.2%} of {_size(most_kib)}",
    ]
    if job["ended_at_s"] is None:
        found.append("WARNING: Efficiency statistics may be misleading for RUNNING jobs.")
    return found


def _group(uid: int) -> str:
    try:
        return grp.getgrgid(pwd.getpwuid(uid).pw_gid).gr_name
    except KeyError:
        return str(uid)


def _state(job: Json) -> str:
    if job["exit_code"] is None:
        return f"State: {job['state']}"
    code = f"signal {job['exit_signal']}" if job["exit_signal"] else f"exit code {job['exit_code']}"
    return f"State: {job['state']} ({code})"


def _clock(seconds: float) -> str:
    return format_time_s(round(seconds), full=True)


def _size(kib: float) -> str:
    for unit in _UNITS[:-1]:
        if kib < 1024:
            return f"{kib:.2f} {unit}"
        kib /= 1024
    return f"{kib:.2f} {_UNITS[-1]}"
