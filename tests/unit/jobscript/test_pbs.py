"""#PBS and #BSUB lines become what #SBATCH lines with the same meaning become, and count less than these."""

from __future__ import annotations

from dataclasses import replace

import pytest
import submitted_words

from hpcsched.errors import RequestError
from hpcsched.model.spec import JobSpec


def built(script: str, *argv: str, **environ: str) -> JobSpec:
    return submitted_words.built(argv=argv, script=script, environ=environ).spec


@pytest.mark.parametrize(
    ("line", "same"),
    [
        ("#PBS -N job -q short -A lab", "-J job -p short -A lab"),
        ("#PBS -l walltime=01:30:00", "-t 01:30:00"),
        ("#PBS -l nodes=2:ppn=4,walltime=10:00,mem=4gb", "-N2 --ntasks-per-node=4 -t 10:00 --mem=4G"),
        ("#PBS -l nodes=n1:ppn=2+n2:ppn=2", "-N2 -w n1,n2 --ntasks-per-node=2"),
        ("#PBS -l nodes=1:ppn=8:gpus=2:fast", "-N1 --ntasks-per-node=8 --gres=gpu:2 -C fast"),
        ("#PBS -l select=3:ncpus=8:mpiprocs=4:mem=16gb:ngpus=1", "-N3 --ntasks-per-node=4 -c2 --mem=16G --gres=gpu:1"),
        ("#PBS -l select=1:ncpus=6", "-N1 --ntasks-per-node=1 -c6"),
        ("#PBS -l pmem=500mb -l procs=4", "--mem-per-cpu=500M -n4"),
        ("#PBS -o head:/tmp/out -e err -j oe -k oe -V -S /bin/bash", "-o /tmp/out -e err"),
        ("#PBS -m abe -M ann@lab,bob@lab", "--mail-type=FAIL,BEGIN,END --mail-user=ann@lab"),
        ("#PBS -J 1-10:3 -h -r n", "-a 1-10:3 -H --no-requeue"),
        ("#PBS -t 1-4%2", "-a 1-4%2"),
        ("#PBS -a 202709012330", "--begin 2027-09-01T23:30"),
        ("#PBS -v A=1,B=2", "--export=ALL,A=1,B=2"),
        ('#BSUB -J "name[1-10]%3"\n#BSUB -o out.%J.%I -q short', "-J name -a 1-10%3 -o out.%A.%a -p short"),
        ("#BSUB -n 4,8 -W 1:30 -M 500 -x", "-n4 -t 1:30:00 --mem-per-cpu=500 --exclusive"),
        ('#BSUB -W 45 -m "n1 n2" -R "span[hosts=2] rusage[mem=3]" -N -P lab', "-t 45 -w n1,n2 -N2"),
        ("#BSUB -oo out.%J -eo err -i in -cwd /tmp", "-o out.%j -e err -i in -D /tmp"),
        ("#BSUB -gpu num=2:mode=shared", "--gres=gpu:2"),
        ("#PBSQ -N no", ""),
        ("# PBS -N no", ""),
        ("#PBS -N one\n#PBS -N two", "-J two"),
        ("#PBS -N pbs -q short\n#SBATCH -J sbatch", "-p short -J sbatch"),
        ("#SBATCH --ignore-pbs\n#PBS -N pbs", "--ignore-pbs"),
    ],
)
def test_lines_mean_what_sbatch_lines_mean(line: str, same: str) -> None:
    script = "#!/bin/sh\n{}\nhostname\n"
    found = built(script.format(line))
    expected = built(script.format(f"#SBATCH {same}"))
    assert replace(found, script="") == replace(expected, script="")


def test_the_command_line_and_the_environment_count_more() -> None:
    script = "#!/bin/sh\n#PBS -N pbs -l mem=4gb\nhostname\n"
    assert built(script, "-J", "line", "--mem-per-cpu=1G").name == "line"
    assert built(script, SBATCH_JOB_NAME="variable").name == "variable"
    assert built(script, "--ignore-pbs").name == "sbatch"
    assert built(script, SBATCH_IGNORE_PBS="1").name == "sbatch"
    assert built("#!/bin/sh\n#PBS -Y\nhostname\n", "--ignore-pbs").name == "sbatch"
    assert built("#!/bin/sh\nhostname\n#PBS -N late\n").name == "sbatch"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("#PBS -Y", "option -Y not recognized"),
        ("#PBS -N", "option -N requires argument"),
        ("#PBS name", "cannot understand 'name'"),
        ("#PBS -l walltime=soon", "soon"),
        ("#PBS -l mem=lots", "cannot read size 'lots'"),
        ("#PBS -l nodes=two:ppn=x", "'x'"),
        ("#PBS -l select=1:ncpus=2+2:ncpus=4", "several kinds"),
        ("#PBS -a noon", "cannot read time 'noon'"),
        ("#BSUB -n", "cannot take -n without a value"),
        ("#BSUB -w done(5)", "say --dependency"),
        ("#BSUB hostname", "cannot understand 'hostname'"),
        ("#PBS -l nodes=" + "9" * 30, "9"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_line(line: str, why: str) -> None:
    with pytest.raises(RequestError) as caught:
        built(f"#!/bin/sh\n\n{line}\n")
    assert "cannot read line 3 of the script" in str(caught.value)
    assert why in str(caught.value)
