"""The job scripts that the demo submits, as text: the training, and small jobs beside it so that the queue is alive.

Knows no cluster. The training's script is the shape of etc/examples/train_chargpt.sh.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

TRAIN_NAME = "chargpt"
OUT_DIR = "chargpt-out"
TRAIN_LOG = "chargpt-%j.out"

_TRAIN = """\
#!/bin/bash
#HSUB --job-name={name}
#HSUB --nodes=2 --ntasks-per-node=1 --cpus-per-task=2
#HSUB --time=00:30:00
#HSUB --requeue --open-mode=append
#HSUB --output={log}

mpirun {python} -m hpctrain.examples.chargpt --out {out} \\
    {options}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SideJob:
    """A small job beside the training: its file's name, its text, the options it is submitted with and what it shows."""

    file: str
    text: str
    options: tuple[str, ...] = ()
    what: str = ""


def training_script(python: str, options: Sequence[str]) -> str:
    """Return the training's script; `python` is the interpreter that has the training's packages."""
    return _TRAIN.format(
        name=TRAIN_NAME, log=TRAIN_LOG, python=shlex.quote(python), out=OUT_DIR, options=" ".join(options)
    )


def training_options(seconds: float, checkpoint_every: int) -> list[str]:
    """Return the options of a training that takes about so long, with a checkpoint every so many steps."""
    return [
        f"--target-seconds {seconds:g}",
        f"--checkpoint-every {checkpoint_every}",
        "--base-every 5",
        "--eval-every 25",
    ]


def side_jobs(train_id: int, *, tasks: int) -> list[SideJob]:
    """Return the small jobs: an array that has the third node, one that waits for all nodes, one for the training."""
    return [
        SideJob(
            file="sweep.sh",
            text=(
                "#!/bin/sh\n"
                f"#HSUB --job-name=sweep --array=1-{tasks}%2 --nodelist=n3 --time=1 --output=/dev/null\n"
                "sleep $((3 + HPCSCHED_ARRAY_TASK_ID % 4))\n"
            ),
            what=f"an array of {tasks} short tasks, two at a time, on n3",
        ),
        SideJob(
            file="census.sh",
            text=(
                "#!/bin/sh\n"
                "#HSUB --job-name=census --nodes=3 --time=1 --nice --output=census.out\n"
                "hrun --label hostname | sort\n"
            ),
            what="one that has to wait for all three nodes",
        ),
        SideJob(
            file="report.sh",
            text=(
                "#!/bin/sh\n"
                "#HSUB --job-name=report --time=1 --output=report.out\n"
                f"grep weights {TRAIN_NAME}-{train_id}.out\n"
            ),
            options=(f"--dependency=afterok:{train_id}",),
            what="one for when the training is done",
        ),
    ]
