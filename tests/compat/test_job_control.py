"""scontrol requeue Incomplete, scontrol update TimeLimit and scancel --interactive, as their manual pages say."""

from __future__ import annotations

from clientrun import Client
from waiting import wait_until

from hpcsched.loopback.cluster import LocalCluster

TASKS = """#!/bin/bash
echo run >> {folder}/$SLURM_ARRAY_TASK_ID
[ $SLURM_ARRAY_TASK_ID != 1 ]
"""


def test_requeue_incomplete_leaves_completed_tasks_alone(cluster: LocalCluster, slurm: Client) -> None:
    folder = cluster.share / "tasks"
    folder.mkdir(mode=0o777)

    def states(job_id: str) -> list[str]:
        return sorted(slurm("sacct", "-nXPj", job_id, "-o", "State").stdout.split())

    def runs() -> list[int]:
        return [len((folder / str(task)).read_text().splitlines()) for task in range(3)]

    job_id = slurm("sbatch", "--parsable", "-a0-2", "-o/dev/null", stdin=TASKS.format(folder=folder)).stdout.strip()
    ended = ["COMPLETED", "COMPLETED", "FAILED"]
    wait_until(lambda: states(job_id) == ended, what="the array to end")
    slurm("scontrol", "requeue", "Incomplete", job_id)
    wait_until(lambda: runs() == [1, 2, 1] and states(job_id) == ended, what="the second run")
    slurm("hctl", "requeue", "incomplete", f"{job_id}_0", f"{job_id}_1")
    wait_until(lambda: runs() == [1, 3, 1] and states(job_id) == ended, what="the third run")
    slurm("scontrol", "requeuehold", "incomplete", job_id)
    held = slurm("squeue", "-h", "-j", job_id, "-o", "%K %t %r").stdout
    assert held == "1 PD JobHeldUser\n" or "1 PD JobHeld" in held
    slurm("scancel", job_id)
    assert runs() == [1, 3, 1]
    refused = slurm("scontrol", "requeue", "incomplete", check=False)
    assert (refused.returncode, refused.stderr) == (1, "too few arguments for keyword:requeue\n")


def test_requeuehold_of_a_running_job(cluster: LocalCluster, slurm: Client) -> None:
    job_id = slurm("sbatch", "--parsable", "-o", "/dev/null", "--wrap", "sleep 600").stdout.strip()
    wait_until(lambda: slurm("squeue", "-h", "-j", job_id, "-o", "%t").stdout == "R\n", what="the job to run")
    slurm("scontrol", "requeuehold", job_id)
    wait_until(lambda: slurm("squeue", "-h", "-j", job_id, "-o", "%t %r").stdout == "PD JobHeldUser\n", what="the hold")
    slurm("scancel", job_id)


def test_a_job_that_is_requeued_as_a_special_case(cluster: LocalCluster, slurm: Client) -> None:
    """A running job, and one that has ended; both are known by their state until they are released."""
    script = "[ -e go ] || sleep 600"
    running, ended = (
        slurm("sbatch", "--parsable", "-o", "/dev/null", "--wrap", wrap).stdout.strip() for wrap in (script, "exit 3")
    )
    wait_until(lambda: slurm("squeue", "-h", "-j", running, "-o", "%t").stdout == "R\n", what="the job to run")
    wait_until(lambda: slurm("sacct", "-nXPj", ended, "-o", "State").stdout == "FAILED\n", what="the end of the other")
    slurm("scontrol", "requeuehold", "State=SpecialExit", f"{running},{ended}")
    shown = f"{running} SE SPECIAL_EXIT (JobHeldUser)\n{ended} SE SPECIAL_EXIT (JobHeldUser)\n"
    select = ("-o", "%i %t %T %R", "-S", "i")
    wait_until(lambda: slurm("squeue", "-h", "-t", "SE", *select).stdout == shown, what="both to be held")
    held = slurm("sbatch", "--parsable", "-H", "--wrap", "true").stdout.strip()
    assert slurm("squeue", "-h", "-t", "special_exit", *select).stdout == shown
    assert slurm("squeue", "-h", "-t", "PD", *select).stdout.splitlines()[:3] == [
        *shown.splitlines(), f"{held} PD PENDING (JobHeldUser)",
    ]  # fmt: skip
    assert "JobState=SPECIAL_EXIT Reason=JobHeldUser" in slurm("scontrol", "show", "job", ended).stdout
    assert '"job_state": "SPECIAL_EXIT"' in slurm("scontrol", "--json", "show", "job", ended).stdout
    (cluster.share / "go").touch()
    slurm("scontrol", "release", running)
    wait_until(lambda: slurm("sacct", "-nXPj", running, "-o", "State").stdout == "COMPLETED\n", what="the second run")
    slurm("scancel", "-t", "SE")
    wait_until(lambda: not slurm("squeue", "-h", "-j", ended).stdout, what="the end of the special case")
    assert slurm("squeue", "-h", "-j", held, "-o", "%t").stdout == "PD\n"
    slurm("scancel", held)
    refused = slurm("scontrol", "requeuehold", "State=Running", ended, check=False)
    assert (refused.returncode, "only SpecialExit" in refused.stderr) == (1, True)


def test_interactive_scancel_of_a_step(cluster: LocalCluster, slurm: Client) -> None:
    script = "#!/bin/bash\nsrun -n1 sleep 600\necho step $?\nsleep 600\n"
    job_id = slurm("sbatch", "--parsable", "-J", "two", "-o", "/dev/null", stdin=script).stdout.strip()
    step = f"{job_id}.0"

    def runs() -> bool:
        return step in slurm("squeue", "-h", "-s", "-j", job_id, "-o", "%i").stdout

    wait_until(runs, what="the step")
    asked = slurm("scancel", "-i", step, stdin="n\n")
    assert asked.stdout == f"Cancel step_id={step} name=two partition=main [y/n]? "
    assert runs()
    asked = slurm("scancel", "-i", step, job_id, stdin="n\ny\n")
    assert asked.stdout.split("? ") == [
        f"Cancel job_id={job_id} name=two partition=main [y/n]",
        f"Cancel step_id={step} name=two partition=main [y/n]",
        "",
    ]
    wait_until(lambda: not runs(), what="the end of the step")
    assert slurm("squeue", "-h", "-j", job_id, "-o", "%t").stdout == "R\n"
    slurm("scancel", job_id)
    wait_until(lambda: not slurm("squeue", "-h", "-j", job_id).stdout, what="the end of the job")
    over = slurm("scancel", "-i", job_id)
    assert over.stderr == (
        f"scancel: error: Kill job error on job id {job_id}: Job/step already completing or completed\n"
    )
    assert slurm("hcancel", "-i", job_id, check=False).returncode == 1


def test_a_priority_of_0_means_held(cluster: LocalCluster, slurm: Client) -> None:
    def priority(job_id: str) -> int:
        shown = slurm("scontrol", "show", "job", "-o", job_id).stdout
        return int(shown.partition("Priority=")[2].split()[0])

    wrapped = ("--parsable", "-o/dev/null", "--wrap", "true")
    begin = slurm("sbatch", "--begin=now+1hour", *wrapped).stdout.strip()
    after = slurm("sbatch", "-d", f"afterok:{begin}", *wrapped).stdout.strip()
    held = slurm("sbatch", "-H", *wrapped).stdout.strip()
    assert [priority(one) > 0 for one in (begin, after, held)] == [True, True, False]
    slurm("scontrol", "update", f"jobid={held}", "begin=now+1hour")
    slurm("scontrol", "release", held)
    assert priority(held) > 0
    slurm("scontrol", "hold", begin)
    assert priority(begin) == 0
    wait_until(
        lambda: slurm("squeue", "-h", "-j", f"{after},{held}", "-O", "prioritylong").stdout.split() > ["1"],
        what="a plan",
    )
    slurm("scancel", begin, after, held)


def test_a_deadline_bounds_the_time_limit(cluster: LocalCluster, slurm: Client) -> None:
    def limit_s(job_id: str) -> int:
        minutes, _, seconds = slurm("squeue", "-h", "-j", job_id, "-o", "%l").stdout.strip().partition(":")
        return int(minutes) * 60 + int(seconds)

    waiting = slurm("sbatch", "--parsable", "-H", "--deadline=now+10minutes", "--wrap", "true").stdout.strip()
    assert 590 <= limit_s(waiting) <= 600
    bounded = slurm("sbatch", "--parsable", "-H", "-t5", "--deadline=now+10minutes", "--wrap", "true").stdout.strip()
    assert limit_s(bounded) == 300
    script = "#!/bin/bash\nsqueue -h -j $SLURM_JOB_ID -o %l\n"
    slurm("sbatch", "--wait", "--deadline=now+10minutes", "-o", "limit", stdin=script)
    minutes, _, seconds = (cluster.share / "limit").read_text().strip().partition(":")
    assert 500 <= int(minutes) * 60 + int(seconds) <= 600
    slurm("scancel", waiting, bounded)
