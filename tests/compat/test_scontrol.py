"""scontrol's verbs beyond showing and changing records: its prompt, processes, messages, arrays as one record."""

from __future__ import annotations

from clientrun import Client
from waiting import wait_until

from hpcsched.loopback.cluster import LocalCluster


def test_the_prompt_runs_one_command_a_line(slurm: Client) -> None:
    held = slurm("sbatch", "--parsable", "--hold", "--wrap", "true").stdout.strip()
    change = f"update jobid={held} comment='two words'"
    typed = f"# a comment\n\nshow job {held}\nnonsense\n{change}\n!!\nquit\nshow job\n"
    said = slurm("scontrol", stdin=typed, check=False)
    assert said.stdout.count("JobId=") == 1
    assert said.stderr == "invalid keyword: nonsense\n"
    assert "Comment=two words" in slurm("scontrol", "show", "job", held).stdout
    assert said.returncode == 0
    assert slurm("scontrol", stdin="show job 99999999\n", check=False).returncode == 1
    slurm("scancel", held)


def test_an_array_that_waits_is_one_record(slurm: Client) -> None:
    array = slurm("sbatch", "--parsable", "--hold", "--array=0-7%2", "--wrap", "true").stdout.strip()
    shown = slurm("scontrol", "show", "job", array).stdout
    assert shown.count("JobId=") == 2  # with ArrayJobId
    assert f"JobId={array} ArrayJobId={array} ArrayTaskId=0-7%2 ArrayTaskThrottle=2 " in shown
    slurm("scontrol", "update", f"JobId={array}_3", "nice=5")
    assert slurm("scontrol", "-o", "show", "job", array).stdout.count("\n") == 2
    assert "ArrayTaskId=3 " in slurm("scontrol", "show", "job", f"{array}_3").stdout
    slurm("scontrol", "update", f"JobId={array}", "arraytaskthrottle", "3")
    assert "ArrayTaskThrottle=3" in slurm("scontrol", "show", "job", array).stdout
    slurm("scancel", array)


def test_processes_of_jobs_are_listed_and_told_apart(cluster: LocalCluster, slurm: Client) -> None:
    script = (
        "#!/bin/bash\nsrun -n2 sh -c 'echo $$ >> pids; exec sleep 600' &\n"
        "while [ $(wc -l < pids) -lt 2 ]; do sleep 0.1; done\nscontrol listpids $SLURM_JOB_ID > listed\n"
        "scontrol pidinfo $$ > info; scontrol listpids 99999999\necho status $?\nkill %1\n"
    )
    (cluster.share / "pids").write_text("")
    job_id = slurm("sbatch", "--parsable", "--wait", "-n2", "-N1", "-t", "5", stdin=script, check=False).stdout.strip()
    rows = [line.split() for line in (cluster.share / "listed").read_text().splitlines()]
    assert rows[0] == ["PID", "JOBID", "STEPID", "LOCALID", "GLOBALID"]
    pids = (cluster.share / "pids").read_text().split()
    assert {(row[0], row[2]) for row in rows[1:] if row[0] in pids} == {(pid, "0") for pid in pids}
    assert {row[4] for row in rows[1:] if row[2] == "0"} >= {"0", "1"}
    assert "batch" in {row[2] for row in rows[1:]}
    assert (cluster.share / "info").read_text().startswith(f"Slurm JobId={job_id} ends at 20")
    assert "status 1" in (cluster.share / f"slurm-{job_id}.out").read_text()


def test_a_message_reaches_the_standard_error_of_a_job(cluster: LocalCluster, slurm: Client) -> None:
    job_id = slurm("sbatch", "--parsable", "-e", "err.txt", "--wrap", "sleep 600").stdout.strip()
    wait_until(lambda: "RUNNING" in slurm("squeue", "-h", "-j", job_id, "-o", "%T").stdout, what="the job to run")
    slurm("scontrol", "notify", job_id, "the head", "restarts at 5; $(true) 'x'")
    assert (cluster.share / "err.txt").read_text() == "the head restarts at 5; $(true) 'x'\n"
    slurm("scancel", job_id)
    wait_until(lambda: not slurm("squeue", "-h", "-j", job_id).stdout, what="the end of the job")
    refused = slurm("scontrol", "notify", job_id, "late", check=False)
    assert (refused.returncode, "not RUNNING" in refused.stderr) == (1, True)


def test_a_job_that_shrinks_gets_scripts_with_its_new_variables(cluster: LocalCluster, slurm: Client) -> None:
    script = (
        "#!/bin/bash\nexport SLURM_NTASKS=3\nscontrol update JobId=$SLURM_JOB_ID NumNodes=2\n"
        ". ./slurm_job_${SLURM_JOB_ID}_resize.sh\n"
        "echo $SLURM_NNODES $SLURM_JOB_NODELIST $SLURM_TASKS_PER_NODE ${SLURM_NTASKS-none}; srun hostname | wc -l\n"
    )
    job_id = slurm("sbatch", "--parsable", "--wait", "-N3", stdin=script).stdout.strip()
    lines = (cluster.share / f"slurm-{job_id}.out").read_text().splitlines()
    assert lines[-2:] == ["2 n[1-2] 1(x2) none", "2"]
    csh = (cluster.share / f"slurm_job_{job_id}_resize.csh").read_text()
    assert 'setenv SLURM_JOB_NUM_NODES "2"\n' in csh
    assert "unsetenv SLURM_NTASKS\n" in csh


def test_small_verbs(cluster: LocalCluster, slurm: Client) -> None:
    assert slurm("scontrol", "errnumstr", "2017").stdout == "Invalid job id specified\n"
    assert slurm("scontrol", "errnumstr", "2").stdout == "No such file or directory\n"
    assert slurm("scontrol", "errnumstr", "x", check=False).returncode == 1
    assert slurm("scontrol", "completing").returncode == 0
    assert slurm("scontrol", "show", "daemons").stdout == "slurmctld slurmd\n"  # the nodes are this machine
    assert "QOS=normal" in slurm("scontrol", "show", "assoc_mgr").stdout
    assert slurm("scontrol", "show", "slurmd").stdout.count("Hostname ") == 3
    assert "listpids" in slurm("scontrol", "help").stdout
    assert len(slurm("sacctmgr", "-nP", "show", "assoc", "tree").stdout.splitlines()) >= 2
    made = slurm(
        "scontrol", "create", "reservation", "reservationname=r1", "start=now+1hour", "dur=10", "user=root", "nodes=n1"
    )
    assert made.stdout == "Reservation created: r1\n"
    slurm("scontrol", "delete", "reservation=r1")
    nothing = slurm("scancel", "-v", "--name=nobody")
    assert (nothing.stdout, nothing.stderr) == ("", "scancel: no job matches\n")
    held = slurm("sbatch", "--parsable", "-H", "--tmp=2", "--begin=noon-tomorrow", "--wrap", "true").stdout.strip()
    assert "MinTmpDiskNode=2M" in slurm("scontrol", "show", "job", held).stdout
    slurm("scancel", held)
    slurm(
        "sbatch", "--wait", "--deadline=now+30seconds", "--export=ALL,A.B=1", "-o", "dotted", stdin="#!/bin/bash\nenv\n"
    )
    assert "A.B=1\n" in (cluster.share / "dotted").read_text()
