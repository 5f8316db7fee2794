"""Slurm's texts: its words for refusals, and the order of options in its help.

Our own text of a refusal follows on a separate line: it has the numbers, and what to do. In help texts the order, headings and
names are Slurm's, so that its users find an option in the usual place; the descriptions are ours. Options that Slurm lacks follow
under a separate heading.

Sources: slurm_errno.c, and ``--help`` of the commands of Slurm 22.05 and 23.02.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# (part of our text in lower case, Slurm's text)
_OF_JOBS = (
    ("invalid partition name", "Invalid partition name specified"),
    ("required partition not available", "Required partition not available (inactive or drain)"),
    ("invalid account", "Invalid account or account/partition combination specified"),
    ("invalid qos", "Invalid qos specification"),
    ("invalid license", "Invalid license specification"),
    ("invalid node name", "Invalid node name specified"),
    ("job dependency problem", "Job dependency problem"),
    (
        "job violates accounting/qos policy",
        "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
    ),
    ("reservation", "Requested reservation is invalid"),
    ("max_array_size", "Invalid job array specification"),
    ("max_jobs", "Slurm temporarily unable to accept job, sleeping and retrying"),
    ("time limit", "Requested time limit is invalid (missing or exceeds some limit)"),
    ("permission", "Access/permission denied"),
)
_OTHER_JOB = "Requested node configuration is not available"
_OF_STEPS = (
    ("gpu", "Invalid generic resource (gres) specification"),
    (" mib ", "Memory required by task is not available"),
)
_OTHER_STEP = "More processors requested than permitted"


def of_job(text: str) -> str:
    """Return Slurm's words for why a job was refused."""
    return _found(text, _OF_JOBS, _OTHER_JOB)


def of_allocation(text: str) -> str:
    """Return salloc's line about a refused job, "" if there is none."""
    return "Job submit/allocate failed: " + of_job(text) if text.startswith("cannot ") else ""


def of_step(job_id: int, text: str) -> str:
    """Return srun's line about a refused step (`job_id` 0: a refused job), "" for none."""
    if not text.startswith("cannot "):  # it was accepted, and ended before it ran
        return ""
    if not job_id:
        return "Unable to allocate resources: " + of_job(text)
    if "Invalid job id" in text or "does not run on this node" in text:
        return "Unable to confirm allocation for job %d: Invalid job id specified" % job_id
    if not text.startswith("cannot give"):
        return ""
    return "Unable to create step for job %d: %s" % (job_id, _found(text, _OF_STEPS, _OTHER_STEP))


def _found(text: str, phrases: Sequence[tuple[str, str]], otherwise: str) -> str:
    lowered = text.lower()
    return next((slurms for ours, slurms in phrases if ours in lowered), otherwise)


USAGE_WIDTH = 80
OTHERS = "Further options"

_RUN = "Parallel run options"
_CONSTRAINTS = (
    "Constraint options",
    "cluster-constraint contiguous constraint nodefile mem mincpus reservation tmp nodelist exclude no-allocate",
)
_CONSUMABLE = ("Consumable resources related options", "exact exclusive mem-per-cpu resv-ports")
_CORES = (
    "Affinity/Multi-core options",
    "extra-node-info cores-per-socket sockets-per-node threads-per-core ntasks-per-core ntasks-per-socket cpu-bind hint mem-bind",
)
_GPUS = (
    "GPU scheduling options",
    "cpus-per-gpu gpus gpu-bind gpu-freq gpus-per-node gpus-per-socket gpus-per-task mem-per-gpu",
)
_REST = (_CONSTRAINTS, _CONSUMABLE, _CORES, _GPUS, ("Help options", "help usage"), ("Other options", "version"))

ORDER: dict[str, tuple[tuple[str, str], ...]] = {
    "sbatch": ((_RUN, """
        array account bb bbf begin comment cpu-freq cpus-per-task dependency deadline delay-boot chdir error export
        export-file get-user-env gid gres gres-flags hold ignore-pbs input job-name no-kill licenses clusters container
        container-id distribution mail-type mail-user mcs-label ntasks nice no-requeue ntasks-per-node nodes output
        overcommit partition parsable power priority profile propagate qos quiet reboot requeue oversubscribe core-spec
        signal spread-job switches thread-spec time time-min tres-per-task uid use-min-nodes verbose wait wckey wrap
    """), *_REST),
    "salloc": ((_RUN, """
        account begin bell bb bbf cpus-per-task comment container container-id cpu-freq dependency deadline delay-boot chdir
        get-user-env gid gres gres-flags hold immediate job-name no-kill kill-command licenses clusters distribution
        mail-type mail-user mcs-label ntasks nice no-bell ntasks-per-node nodes overcommit partition power priority profile
        qos quiet reboot oversubscribe core-spec signal spread-job switches thread-spec time time-min uid use-min-nodes
        verbose wckey
    """), *_REST),
    "srun": ((_RUN, """
        account acctg-freq bb bbf bcast bcast-exclude begin cpus-per-task comment compress container container-id cpu-freq
        dependency deadline delay-boot chdir export error epilog preserve-env gres gres-flags hold input immediate jobid
        job-name no-kill kill-on-bad-exit label licenses clusters distribution mail-type mail-user mcs-label mpi multi-prog
        ntasks nice ntasks-per-node nodes output overcommit overlap partition power priority prolog profile propagate pty
        quit-on-interrupt qos quiet reboot relative oversubscribe core-spec send-libs signal slurmd-debug spread-job
        switches task-epilog task-prolog thread-spec threads time time-min unbuffered use-min-nodes verbose wait wckey
        disable-status
    """), *_REST),
    "squeue": (("", """
        account all array-unique federation noheader hide iterate jobs json local long licenses clusters me name noconvert
        format Format only-job-state partition priority qos reservation array sibling steps sort start states user verbose
        version nodelist yaml help usage
    """),),
    "sinfo": (("", """
        all dead exact federation future noheader hide iterate json local long clusters nodes noconvert Node format Format
        partition responding list-reasons summarize sort states reservation verbose version yaml help usage
    """),),
    "sacct": (("", """
        allusers accounts array brief batch-script completion delimiter duplicates helpformat endtime env-vars file
        federation flags gid help nnodes ncpus jobs json local long allclusters clusters noheader nodelist name format
        parsable parsable2 qos partition reason state starttime truncate user units usage use-local-uid verbose version
        wckeys whole-hetjob associations allocations
    """),),
    "scancel": (("", """
        account batch ctld full hurry interactive clusters name me partition quiet qos reservation sibling signal state user
        verbose version nodelist wckey help usage
    """),),
    "scontrol": (("", """
        all details federation future help hide json local clusters oneliner quiet uid verbose version yaml usage
    """),),
    "sprio": (("", """
        noheader jobs json long clusters federation local norm format sibling partition sort user verbose version weights
        help usage
    """),),
    "sshare": (("", """
        all accounts noheader json long partition clusters format parsable parsable2 user Users verbose version help usage
    """),),
    "sstat": (("", """
        allsteps helpformat help pidformat jobs noheader noconvert format parsable parsable2 usage verbose version
    """),),
    "sattach": (("", """
        input-filter output-filter error-filter label layout pty quiet verbose version help usage
    """),),
    "sbcast": (("", """
        compress exclude force fanout jobid preserve send-libs size timeout verbose version help usage
    """),),
    "sdiag": (("", """
        all json reset clusters sort-by-id sort-by-time sort-by-time2 help version usage
    """),),
    "sacctmgr": (("", """
        help immediate json noheader format parsable parsable2 quiet readonly associations verbose version usage
    """),),
    "sreport": (("", """
        all_clusters federation help clusters noheader parsable parsable2 quiet time tres verbose version usage
    """),),
    "scrontab": (("", """
        edit list remove user verbose help version usage
    """),),
    "strigger": (("", """
        set get clear id noheader offset user jobid down drained fini idle node program quiet time up flags verbose help
        version usage
    """),),
}  # fmt: skip


def groups(command: str, names: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Return (heading, options), limited to `names`.

    A command that Slurm lacks keeps its own order.
    """
    left = list(names)
    found = []
    for title, words in ORDER.get(command, ()):
        group = [name for name in words.split() if name in left]
        left = [name for name in left if name not in group]
        if group:
            found.append((title, group))
    if left:
        found.insert(len(found) - 2 if len(found) > 2 else len(found), (OTHERS if found and found[0][0] else "", left))
    return found


def ordered(command: str, names: Iterable[str]) -> list[str]:
    """Return the options in Slurm's order."""
    return [name for _, group in groups(command, names) for name in group]


def usage_word(name: str, short: str, value: str) -> str:
    """Return ``[-t time]``, ``[--json]`` or ``[--format=LIST]``."""
    if short:
        return "[-%s %s]" % (short, value) if value else "[-%s]" % short
    return "[--%s=%s]" % (name, value) if value else "[--%s]" % name


def usage_text(command: str, words: Sequence[str]) -> str:
    """Return the text of ``--usage``: the command and these words, in lines of limited width."""
    head = "Usage: " + command
    line, lines = head, []
    for word in words:
        if len(line) + 1 + len(word) > USAGE_WIDTH and line.strip():
            lines.append(line)
            line = " " * len(head)
        line += " " + word
    return "\n".join([*lines, line]) + "\n"
