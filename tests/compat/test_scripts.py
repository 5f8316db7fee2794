"""Job scripts as they are written for Slurm, on nodes that have the installation at hand and on nodes that have not."""

from __future__ import annotations

from clientrun import Client

from hpcsched.loopback.cluster import LocalCluster

PREAMBLE = """#!/bin/bash
#SBATCH --job-name=ranks --nodes=2
#SBATCH --ntasks-per-node=2 --mem=100M   # a comment
##SBATCH --nodes=9
set -e
nodes=( $(scontrol show hostnames "$SLURM_JOB_NODELIST") )
export MASTER_ADDR=${nodes[0]} MASTER_PORT=$((15000 + SLURM_JOB_ID % 1000))
echo "$MASTER_ADDR ${#nodes[@]} $SLURM_NNODES"
"""
# A job is CF until its node has reported its start, which its script may overtake.
SELF = """
while [ "$(squeue -h -j $SLURM_JOB_ID -o %t)" = CF ]; do :; done
squeue -h -j $SLURM_JOB_ID -o "%i %t %D"
scontrol show job $SLURM_JOB_ID -o | tr ' ' '\\n' | grep ^JobState=
srun --ntasks=2 --nodes=2 bash -c 'echo rank $SLURM_PROCID' | sort
sbatch --parsable --mem=50M --dependency=afterok:$SLURM_JOB_ID --wrap 'echo second'
"""


def output(cluster: LocalCluster, job_id: str) -> list[str]:
    return (cluster.share / f"slurm-{job_id}.out").read_text().split("\n")[:-1]


def test_a_script_asks_for_its_hosts_for_itself_and_submits_the_next(cluster: LocalCluster, slurm: Client) -> None:
    job_id = slurm("sbatch", "--parsable", "--wait", stdin=PREAMBLE + SELF).stdout.strip()
    *mine, following = output(cluster, job_id)
    assert mine == ["n1 2 2", f"{job_id} R 2", "JobState=RUNNING", "rank 0", "rank 1"]
    assert slurm("squeue", "-h", "-t", "all", "-j", following, "-o", "%E").stdout.startswith(f"afterok:{job_id}")


def test_hosts_are_known_where_the_installation_is_not(cluster: LocalCluster, slurm: Client) -> None:
    """The node cannot reach the directory of Slurm's names; that its submitter has it on the PATH is enough."""
    away = {"PATH": "/nonexistent/hpcsched/slurm:/usr/bin:/bin"}
    job_id = cluster.run("hsub", "--parsable", "--wait", f"--export=PATH={away['PATH']}", stdin=PREAMBLE).stdout.strip()
    assert output(cluster, job_id) == ["n1 2 2"]
    refused = cluster.run(
        "hsub", "--parsable", "--wait", "--export=PATH=/usr/bin:/bin", stdin=PREAMBLE, check=False
    )  # fmt: skip
    assert refused.returncode != 0


def test_a_node_without_the_controllers_socket_asks_by_its_agent(cluster: LocalCluster, slurm: Client) -> None:
    """As on any node but the head: the commands are there (on the share, say), the socket is not."""
    away = {"HPCSCHED_API": "/nonexistent/api.sock"}
    script = PREAMBLE.replace("set -e", f"set -e; export HPCSCHED_API={away['HPCSCHED_API']}") + SELF
    job_id = slurm("sbatch", "--parsable", "--wait", stdin=script).stdout.strip()
    *mine, following = output(cluster, job_id)
    assert mine == ["n1 2 2", f"{job_id} R 2", "JobState=RUNNING", "rank 0", "rank 1"]
    assert (
        slurm("squeue", "-h", "-t", "all", "-j", following, "-o", "%u %E")
        .stdout.split()[1]
        .startswith(f"afterok:{job_id}")
    )


def test_a_job_that_takes_nothing_along_finds_slurms_commands(cluster: LocalCluster, slurm: Client) -> None:
    script = "#!/bin/bash\numask\nsrun -N2 -n2 sh -c 'umask; echo $SLURM_UMASK ${MINE-none}'\nsqueue -h -j $SLURM_JOB_ID -o %t\n"
    words = ("sbatch", "--parsable", "--wait", "-N2", "--export=NONE")
    job_id = slurm("sh", "-c", 'umask 027; exec "$@"', "sh", *words, stdin=script, env={"MINE": "x"}).stdout.strip()
    first, *tasks, state = output(cluster, job_id)
    assert (first, sorted(tasks), state) == ("0027", ["0027", "0027", "0027 none", "0027 none"], "R")


def test_a_login_shells_profile_takes_no_command_away(cluster: LocalCluster, slurm: Client) -> None:
    script = "#!/bin/bash -l\nset -e\nsrun -N2 -n2 -l echo $1\nsqueue -h -j $SLURM_JOB_ID -o %t\nshopt -q login_shell\n"
    (cluster.share / "login.sh").write_text(script)
    for export in ("ALL", "NONE"):
        # A profile is the machine's own, and may complain: pyenv does so if two shells start at once.
        words = ("--parsable", "--wait", "-N2", f"--export={export}", "--error=profile.err", "login.sh", "word")
        job_id = slurm("sbatch", *words).stdout.strip()
        assert sorted(output(cluster, job_id)) == ["0: word", "1: word", "R"]


def test_by_its_agent_a_job_requeues_itself_but_changes_no_cluster(cluster: LocalCluster, slurm: Client) -> None:
    script = """#!/bin/bash
#SBATCH --requeue --open-mode=append --mem=50M
export HPCSCHED_API=/nonexistent/api.sock
trap true TERM  # or the shell ends by it as soon as scontrol does
scontrol reconfigure || echo refused
squeue -j 99999999 2>&1
[ "$SLURM_RESTART_COUNT" = 1 ] && exit 0
scontrol requeue $SLURM_JOB_ID && echo requeued
sleep 60
"""
    job_id = slurm("sbatch", "--parsable", "--wait", stdin=script).stdout.strip()
    lines = output(cluster, job_id)
    assert lines.count("requeued") == 1
    assert lines.count("refused") == 2
    assert lines.count("slurm_load_jobs error: Invalid job id specified") == 2
