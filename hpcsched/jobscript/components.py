"""The components of a heterogeneous job: sbatch A : B job.sh, ``#SBATCH hetjob`` lines.

The first component has the job's script and all that concerns the job as a whole (partition, account, time limit ...); the
others say what they need of nodes of their own. As in Slurm what a component says of its nodes is not handed on to the next
one, and what concerns the script alone counts of the first. Partition, account and the like are one for all of them here.

Source: sbatch(1); "Heterogeneous Job Support" of Slurm's documentation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpcsched.errors import RequestError
from hpcsched.jobscript.build import build_spec
from hpcsched.jobscript.layers import merge_layers
from hpcsched.jobscript.options import Use, by_name
from hpcsched.jobscript.scan import Settings
from hpcsched.model.frozen import replace
from hpcsched.model.spec import JobSpec

OWN = frozenset((
    "constraint", "cpus-per-gpu", "cpus-per-task", "distribution", "exclude", "exclusive", "gpus", "gpus-per-node",
    "gpus-per-task", "gres", "hint", "job-name", "mem", "mem-per-cpu", "mem-per-gpu", "mincpus", "nodelist", "nodes", "ntasks",
    "ntasks-per-node", "prefer", "tmp",
))  # fmt: skip
OF_THE_SCRIPT = frozenset((
    "chdir", "comment", "error", "export", "input", "lease", "mail-type", "mail-user", "open-mode", "output", "requeue", "signal",
))  # fmt: skip


def with_components(
    spec: JobSpec, first: Mapping[str, Sequence[str]], in_script: Sequence[Settings], on_line: Sequence[Settings]
) -> JobSpec:
    """Return `spec`, the first component, with the others; `first` are its options, the rest those of the others by place.

    Raises RequestError for what a component cannot have for itself.
    """
    made: list[JobSpec] = []
    name = spec.name
    for at in range(max(len(in_script), len(on_line))):
        options = merge_layers(*[layer[at] for layer in (in_script, on_line) if at < len(layer)])
        try:
            _check(options, first)
            own = {option: given for option, given in options.items() if option in OWN}
            built = build_spec(own, script=None, default_name=name, work_dir=spec.work_dir, environ={}, now_s=0.0)
        except RequestError as error:
            raise RequestError(f"component {at + 1} of the job: {error}") from None
        name = built.spec.name
        made.append(replace(built.spec, submit_dir=""))
    return replace(spec, components=tuple(made)) if made else spec


def _check(options: Settings, first: Mapping[str, Sequence[str]]) -> None:
    known = by_name()
    for name, given in options.items():
        common = name not in OWN and name not in OF_THE_SCRIPT and known[name].use is Use.JOB
        if common and list(given) != list(first.get(name, ())):
            raise RequestError(
                f"cannot give it its own --{name}: all components have that of the first one; leave it out, or submit a job "
                "of its own"
            )
