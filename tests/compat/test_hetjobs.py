"""Heterogeneous jobs: sbatch A : B, ``#SBATCH hetjob``, srun --het-group, and how lists call their components."""

from __future__ import annotations

import json

from clientrun import Client
from waiting import wait_until

from hpcsched.loopback.cluster import LocalCluster

SCRIPT = """#!/bin/bash
#SBATCH --job-name=leader --ntasks=1 --time=5
#SBATCH hetjob
#SBATCH --job-name=crew --nodes=2 --ntasks=4 --cpus-per-task=2 --mem=100M
env | grep ^SLURM_ | sort > facts
echo "own $(srun hostname | sort | xargs)"
echo "crew $(srun --het-group=1 sh -c 'echo $SLURM_CPUS_PER_TASK$SLURMD_NODENAME' | sort | xargs)"
echo "both $(srun -l --het-group=0,1 sh -c 'echo $SLURM_NTASKS' | sort -n | xargs)"
echo "apart $(srun -l sh -c 'echo a$SLURMD_NODENAME' : -n2 sh -c 'echo b$SLURMD_NODENAME' | sort -n | xargs)"
echo "named $(srun -w n3 -n1 hostname)"
srun --het-group=2 true
echo "code $?"
while [ ! -e go ]; do sleep 0.05; done
"""


def test_a_heterogeneous_job_from_its_script_to_its_history(cluster: LocalCluster, slurm: Client) -> None:
    (cluster.share / "het.sh").write_text(SCRIPT)
    job_id = int(slurm("sbatch", "--parsable", "het.sh").stdout)
    ids = f"{job_id}-{job_id + 1}"
    out = cluster.share / f"slurm-{job_id}.out"
    wait_until(lambda: out.exists() and "code" in out.read_text(), what="its steps")
    try:
        assert out.read_text().splitlines() == [
            "own n1",
            "crew 2n2 2n2 2n3 2n3",
            "both 0: 5 1: 5 2: 5 3: 5 4: 5",
            "apart 0: an1 1: bn2 2: bn3",
            "named n3",
            "srun: error: cannot start tasks in --het-group=2: the job's components are 0 to 1",
            "code 1",
        ]
        facts = dict(line.split("=", 1) for line in (cluster.share / "facts").read_text().splitlines())
        wanted = {
            "SLURM_JOB_ID": str(job_id),
            "SLURM_HET_SIZE": "2",
            "SLURM_JOB_NODELIST": "n1",
            "SLURM_JOB_ID_HET_GROUP_0": str(job_id),
            "SLURM_JOB_ID_HET_GROUP_1": str(job_id + 1),
            "SLURM_JOB_NODELIST_HET_GROUP_1": "n[2-3]",
            "SLURM_NTASKS_HET_GROUP_1": "4",
            "SLURM_CPUS_PER_TASK_HET_GROUP_1": "2",
        }
        assert {name: facts.get(name) for name in wanted} == wanted
        rows = slurm("squeue", "-h", "-j", str(job_id), "-o", "%i %A %j %t %D %C %N").stdout.splitlines()
        assert rows == [f"{job_id}+0 {job_id} leader R 1 1 n1", f"{job_id}+1 {job_id + 1} crew R 2 8 n[2-3]"]
        assert slurm("squeue", "-h", "-j", f"{job_id}+1", "-o", "%i").stdout.split() == [f"{job_id}+1"]
        assert slurm("squeue", "-h", "-j", str(job_id + 1), "-o", "%i").stdout.split() == [f"{job_id}+1"]
        shown = slurm("scontrol", "show", "job", str(job_id)).stdout
        assert f"JobId={job_id + 1} HetJobId={job_id} HetJobOffset=1 JobName=crew" in shown
        assert shown.count(f"HetJobIdSet={ids}") == 2
        told = json.loads(slurm("squeue", "--json", "-j", str(job_id)).stdout)["jobs"]
        assert [(job["job_id"], job["het_job_offset"]["number"]) for job in told] == [(job_id, 0), (job_id + 1, 1)]
        refused = slurm("scancel", f"{job_id}+1", check=False)
        assert refused.returncode == 1
        assert "Operation not permitted on individual component of heterogeneous job" in refused.stderr
    finally:
        (cluster.share / "go").touch()
    wait_until(lambda: not slurm("squeue", "-h", "-j", str(job_id)).stdout, what="its end")
    rows = slurm("sacct", "-n", "-P", "-X", "-j", str(job_id), "-o", "JobID,JobIDRaw,JobName,AllocCPUS,State").stdout
    assert rows.split() == [
        f"{job_id}+0|{job_id}|leader|1|COMPLETED",
        f"{job_id}+1|{job_id + 1}|crew|8|COMPLETED",
    ]
    steps = slurm("sacct", "-n", "-P", "-j", str(job_id + 1), "-o", "JobID").stdout.split()
    assert steps == [f"{job_id}+1", f"{job_id}+1.1", f"{job_id}+1.2", f"{job_id}+1.3", f"{job_id}+1.4"]
    after = int(slurm("sbatch", "--parsable", "--wrap", "true").stdout)
    assert after == job_id + 2


def test_components_from_the_command_line(cluster: LocalCluster, slurm: Client) -> None:
    job = "#!/bin/bash\nsrun --het-group=0-1 hostname | sort\n"
    (cluster.share / "small.sh").write_text(job)
    job_id = slurm("sbatch", "--parsable", "--wait", "-N1", ":", "-N2", "-n2", "small.sh").stdout.strip()
    assert (cluster.share / f"slurm-{job_id}.out").read_text().split() == ["n1", "n2", "n3"]
    never = slurm("sbatch", "-N2", ":", "-N2", "small.sh", check=False)
    assert never.returncode == 1
    assert "Requested node configuration is not available" in never.stderr
    assert "its components run on nodes of their own" in never.stderr
    own = slurm("sbatch", "-t1", ":", "-t2", "small.sh", check=False)
    assert "component 1 of the job: cannot give it its own --time" in own.stderr
    array = slurm("sbatch", "--array=1-2", ":", "-n1", "small.sh", check=False)
    assert "cannot submit an array of heterogeneous jobs" in array.stderr


def test_salloc_of_components(cluster: LocalCluster, slurm: Client) -> None:
    told = slurm(
        "salloc", "-Jours", "-N1", ":", "-N2", "-n2", "-c2", "bash", "-c", "srun -l --het-group=0,1 hostname; env"
    )
    lines = told.stdout.splitlines()
    assert sorted(lines[:3]) == ["0: n1", "1: n2", "2: n3"]
    assert {"SLURM_HET_SIZE=2", "SLURM_JOB_NODELIST=n1", "SLURM_JOB_NODELIST_HET_GROUP_1=n[2-3]"} <= set(lines)
    assert "SLURM_CPUS_PER_TASK_HET_GROUP_1=2" in lines
    own = slurm("salloc", "-N1", ":", "-N1", "-pother", "true", check=False)
    assert own.returncode == 1
    assert "cannot give component 1 of the job its own --partition" in own.stderr


def test_components_outlive_a_restart_of_the_controller(cluster: LocalCluster, slurm: Client) -> None:
    script = "#!/bin/bash\nuntil [ -e again ]; do sleep 0.05; done\nsrun --het-group=1 hostname\n"
    (cluster.share / "long.sh").write_text(script)
    job_id = slurm("sbatch", "--parsable", "-N1", ":", "-N2", "long.sh").stdout.strip()

    def rows() -> list[str]:
        return slurm("squeue", "-h", "-j", job_id, "-o", "%i %t %N").stdout.splitlines()

    running = [f"{job_id}+0 R n1", f"{job_id}+1 R n[2-3]"]
    wait_until(lambda: rows() == running, what="its start")
    cluster.down()
    cluster.up()
    cluster.wait_for_nodes()
    assert rows() == running
    assert int(slurm("sbatch", "--parsable", "--hold", "--wrap", "true").stdout) == int(job_id) + 2
    slurm("scancel", str(int(job_id) + 2))
    (cluster.share / "again").touch()
    wait_until(lambda: not rows(), what="its end")
    assert sorted((cluster.share / f"slurm-{job_id}.out").read_text().split()) == ["n2", "n3"]
