"""What clients of Slurm ask, word for word, of a real cluster: the answer has the shape that they parse, stderr is empty.

Job 1 runs with a step, 2 is held, 3 is an array of four tasks that are held.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator

import pytest
from clientrun import Client, new_cluster
from waiting import wait_until

from hpcsched.loopback.cluster import LocalCluster

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d"
ASKED = (
    # submitit
    ("sacct -o JobID,State,NodeList --parsable2 -j 1 -j 2", r"JobID\|State\|NodeList\n1\|RUNNING\|n\d\n1.batch\|RUNNING\|n\d\n"),
    # snakemake
    ("sacct -X --parsable2 --clusters all --noheader --format=JobIdRaw,State --starttime {day} --endtime now --name work",
     r"1\|RUNNING\n\Z"),
    ("squeue '--format=%i|%T' --states=all --noheader --name work", r"1\|RUNNING\n\Z"),
    ("sacct -j 1 -n -X -o nodelist%-256", r"n\d {254,255} \n\Z"),
    ("sacct -j 1.0 --format=Reason --noheader", r" +\n\Z"),
    ("sacct --name=work --parsable2 --noheader --format=JobID,JobName,Comment,Elapsed,TotalCPU,NNodes,NCPUS,MaxRSS,ReqMem",
     r"1\|work\|RULE\|00:\d\d:\d\d\|[\d:.]+\|1\|2\|\|200M\n1.batch\|batch\|"),
    ("scontrol show config", r"(?m)^MinJobAge +=  ?\d+ sec$"),
    ("sacctmgr -n -s list user {user} format=account%256", r" {200,}"),
    ("sshare -U --format Account%256 --noheader", r"[\s\S]*"),
    # nextflow, toil, parsl, dask-jobqueue
    ("squeue --noheader -o '%i %t' -t all --only-job-state", r"(?m)^1 R$"),
    ("sacct -X --noheader --format=jobid,state%20 --job 1,2", r"1 +RUNNING \n2 +PENDING \n\Z"),
    ("squeue --noheader --format='%i %t' --job 1,2", r"2 PD\n1 R\n\Z"),
    ("squeue -h --format '%i %t %M' -j 1", r"1 R \d+:\d\d\n\Z"),
    ("sacct -n -j 1,2 --format JobIDRaw,State,ExitCode -P -S {day} -E now", r"1\|RUNNING\|0:0\n1.batch\|RUNNING\|0:0\n"),
    ("sinfo -a -o '%P %G %l %p %c %m'", r"PARTITION GRES TIMELIMIT PRIO_TIER CPUS MEMORY\nmain\* \(null\) infinite 1 4 8192\n\Z"),
    ("sinfo -h -o %C", r"\d+/\d+/\d+/12\n\Z"),
    # simple-slurm, psij-python, pysqa, fireworks, batchspawner
    ("squeue --me -h -o '\"%i\",\"%j\",\"%t\",\"%M\",\"%L\",\"%D\",\"%C\",\"%m\",\"%b\",\"%R\"' -j 1",
     r'"1","work","R","\d+:\d\d","\d+:\d\d","1","2","100M","N/A","n\d"\n\Z'),
    ("squeue -O JobArrayID,StateCompact,Reason -t all --me -r", r"(\S+ +\S+ +\S+ *\n)+\Z"),
    ("squeue --format '%A|%u|%t|%.15j|%Z' --noheader -j 1", r"1\|\w+\|R\| {11}work\|/\S+\n\Z"),
    ("squeue -h -j 1 -o '%T %B'", r"RUNNING n\d\n\Z"),
    # qtoolkit, aiida, covalent
    ("squeue --noheader -o '%i<><> %t<><> %r<><> %j<><> %u<><> %P<><> %l<><> %D<><> %C<><> %M<><> %m' --jobs=1,1",
     r"1<><> R<><> None<><> work<><> \w+<><> main<><> 30:00<><> 1<><> 2<><> \d+:\d\d<><> 100M\n\Z"),
    ("squeue --noheader -o '%i^^^%t^^^%r^^^%B^^^%u^^^%D^^^%C^^^%R^^^%P^^^%l^^^%M^^^%S^^^%j^^^%V' --jobs=2,2",
     rf"2\^\^\^PD\^\^\^JobHeldUser\^\^\^n/a\^\^\^\w+\^\^\^1\^\^\^1\^\^\^\(JobHeldUser\)\^\^\^main\^\^\^UNLIMITED\^\^\^0:00\^\^\^N/A"
     rf"\^\^\^wrap\^\^\^{TIME}\n\Z"),
    ("scontrol show job -o 1", r"JobId=1 JobName=work UserId=\S+ .*JobState=RUNNING .*TimeLimit=00:30:00 .*NumNodes=1 NumCPUs=2 "
     r".*CPUs/Task=1 .*MinMemoryCPU=100M "),
    # torchx, SkyPilot, dstack
    ("squeue --start --noheader -j 2 -o '%i|%S|%T'", r"2\|N/A\|PENDING\n\Z"),
    ("sinfo --format %P,%m --noconvert", r"PARTITION,MEMORY\nmain\*,8192\n\Z"),
    (r"sinfo -h --Node -o '%N\x1f%t\x1f%G\x1f%c\x1f%m\x1f%P'", r"n1\\x1f\w+\\x1f\(null\)\\x1f4\\x1f8192\\x1fmain\*\n"),
    ("scontrol show partitions -o", r"PartitionName=main .* State=UP TotalCPUs=12 TotalNodes=3 "),
    ("scontrol -o show step 1.0", r"StepId=1.0 .*State=RUNNING .*Name=sleep "),
    ("squeue -h --states=running,completing -o '%i %j %N %b'", r"1 work n\d N/A\n\Z"),
    # exporters, turm, stui, reportseff, slurm_gpustat
    ("squeue -a -r -h '-o %A|%a|%T|%C' -j 3", r"( \d\|\(null\)\|PENDING\|1\n){4}\Z"),
    ("squeue --states=all -h -r -j 1 -o '{{\"id\": %A, \"end_time\": \"%e\", \"cpu\": %C}}'",
     rf'{{"id": 1, "end_time": "{TIME}", "cpu": 2}}\n\Z'),
    ("sinfo -h -N -O NodeList,AllocMem,Memory,CPUsState,StateLong", r"n1 {18}\d+ +8192 +\d/\d/0/4 +\w+ +\n"),
    ("squeue --array --noheader --Format jobid:###t###,name:###t###,tres-alloc:###t### -j 1",
     r"1###t###work###t###cpu=2,mem=200M,node=1,billing=2###t###\n\Z"),
    ("squeue --noheader --all '--format=%A|%i|%F|%K|%C|%j|%P|%r|%u|%y|%T|%M|%b|%N' -j 3_1 -r",
     r"\d\|3_1\|3\|1\|1\|wrap\|main\|JobHeldUser\|\w+\|0\|PENDING\|0:00\|N/A\|\n\Z"),
    ("sinfo -sh", r"main\* +up +infinite +\d/\d/0/3 n\[1-3\]\n\Z"),
    ("sacct --parsable -n '--delimiter=^|^' --format=JobID,State,AllocCPUS,ReqMem,NNodes,NTasks,Timelimit --jobs=1",
     r"1\^\|\^RUNNING\^\|\^2\^\|\^200M\^\|\^1\^\|\^\^\|\^00:30:00\^\|\^\n"),
    ("squeue -O tres-per-node,nodelist,username,jobid --noheader -j 1", r"N/A {17}n\d {18}\w+ +1 {19}\n\Z"),
    ("sdiag", r"(?s)\*+\nsdiag output at .*Server thread count:.*Jobs running: +1\n"),
    ("sprio -l", r" *JOBID +PART"),
    # ClusterShell, Open OnDemand
    ("sinfo -h -o %R:%N", r"main:n\[1-3\]\n|(main:\S+\n)+\Z"),
    ("squeue -h -j 1 -o %N", r"n\d\n\Z"),
    ("sinfo -aho %F/%C", r"\d/\d/0/3/\d+/\d+/0/12\n\Z"),
    ("sinfo -ahNO nodehost:100,gres:512,gresused:512,statelong", r"n1 {98}\(null\)"),
    ("sacct -P --delimiter ; -n --units G --allocations -o JobID,ReqMem -j 1", r"1;0.20G\n\Z"),
)  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """A cluster of its own: the answers have the numbers of the first jobs."""
    with new_cluster() as started:
        yield started


@pytest.fixture(scope="module")
def queue(cluster: LocalCluster, slurm_env: dict[str, str]) -> None:
    """Fill the queue, once."""

    def run(*words: str) -> str:
        return cluster.run(*words, env=slurm_env).stdout

    run(
        "sbatch", "-J", "work", "-n2", "--mem-per-cpu=100", "-t", "30", "--comment=RULE", "--wrap", "srun -n2 sleep 600"
    )
    run("sbatch", "-H", "--wrap", "true")
    run("sbatch", "-H", "-a", "0-3", "--wrap", "true")
    wait_until(lambda: run("squeue", "-h", "-s", "-o", "%i").split() == ["1.batch", "1.0"], what="the step to run")


@pytest.mark.parametrize(("command", "shape"), ASKED, ids=[command.split("{")[0][:40] for command, _ in ASKED])
def test_the_answer_has_the_shape_that_clients_read(command: str, shape: str, slurm: Client, queue: None) -> None:
    day = slurm("date", "+%Y-%m-%dT00:00").stdout.strip()
    user = slurm("id", "-un").stdout.strip()
    said = slurm(*shlex.split(command.format(day=day, user=user)))
    assert said.stderr == ""
    assert re.match(shape, said.stdout) or (shape.startswith("(?m)") and re.search(shape, said.stdout)), said.stdout


@pytest.mark.parametrize(
    ("command", "key"),
    [("squeue --json", "jobs"), ("sacct --json -S1970-01-01-00:00:01", "jobs"), ("sinfo --json", "nodes"),
     ("scontrol show job 1 --json", "jobs"), ("scontrol show node --json", "nodes"), ("scontrol show lic --json", "licenses"),
     ("scontrol show partition --json", "partitions")],
)  # fmt: skip
def test_json_has_the_name_that_clients_read(command: str, key: str, slurm: Client, queue: None) -> None:
    answer = json.loads(slurm(*command.split()).stdout)
    assert isinstance(answer[key], list)
    assert answer[key] or key == "licenses"
