"""The environment of a task: the controller's, completed by the node.

It is computed before the change of user and passed to exec unchanged. Nothing of the agent's own environment is in it.

A job finds changes of its nodes in a file, ROOT/allocation/INCARNATION.JOB.ATTEMPT, which all users may read. It is JSON:
`generation` grows with each change, `nodes` are the job's nodes, `wanted` (if not empty) are the nodes that it should keep. It is
replaced in one step, and does not exist before the first change.
"""

from __future__ import annotations

import json
import os
import re
from typing import Dict, List, Mapping, Sequence

from hpcnode import paths
from hpcnode.os import rlimits
from hpcnode.os.account import UserAccount
from hpcnode.wire import gate, protocol

SOCKET = "HPCSCHED_SOCKET"
GPU_DEVICES = "HPCSCHED_GPU_DEVICES"  # names of the launch's GPUs for CUDA, if they are not their indices
NOT_ENFORCED = "HPCSCHED_NOT_ENFORCED"  # what this node cannot keep the job to, with commas; not set if nothing
ALWAYS = ("memory", "hugepages")  # what a node keeps every job to, if it can
GPUS_PER_TASK = "HPCSCHED_STEP_GPUS_PER_TASK"  # number of the launch's GPUs for each task, in order
AGENT_ROOT = "HPCSCHED_AGENT_ROOT"  # the agent of the job that a process belongs to
ALLOCATION_FILE = "HPCSCHED_ALLOCATION_FILE"
UMASK = "SLURM_UMASK"  # of the submitter, octal; a step's environment keeps it
USUAL_UMASK = 0o022
MARKER = "HPCSCHED_TOKEN"  # marks the processes of a step whose shepherd is gone
_SLURM_PATH = re.compile(r"/hpcsched/slurm(-[0-9a-f]{12})?/?\Z")  # printed by `hpcsched slurm-path`
_COUNT = re.compile("[0-9]{1,6}")
DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"


def step_environment(
    launch: protocol.Launch,
    account: UserAccount,
    *,
    root: str,
    socket_path: str,
    has_gpus: bool,
    cannot: Sequence[str] = (),
) -> Dict[str, str]:
    """Return the variables that all tasks of the step share."""
    env = dict(launch.env)
    env.pop(rlimits.VARIABLE, None)
    if launch.step == protocol.BATCH:
        env.pop(UMASK, None)
    env["PATH"] = _path(root, env.get("PATH", DEFAULT_PATH))
    env[AGENT_ROOT] = root
    env[SOCKET] = socket_path
    env[MARKER] = launch.token
    for prefix in ("SLURM_", "HPCSCHED_"):
        env.setdefault(prefix + "JOB_GID", str(account.gid))  # groups are those of the node
    incarnation = launch.token.partition(".")[0]
    env[ALLOCATION_FILE] = allocation_path(root, incarnation, launch.job_id, launch.attempt)
    env.update(HOME=account.home, USER=account.name, LOGNAME=account.name, SHELL=account.shell)
    env.pop(NOT_ENFORCED, None)
    if missing := [word for word in cannot if word in ALWAYS or word in launch.confine.words]:
        env[NOT_ENFORCED] = ",".join(missing)
    if launch.gpus or has_gpus:
        env[visible_devices()] = ",".join(_devices(launch))
    return env


def umask_of(launch: protocol.Launch) -> int:
    """Return the umask of the tasks; the usual one if the text is not a umask."""
    text = launch.env.get(UMASK, "")
    if not 0 < len(text) <= 4 or not set(text) <= set("01234567"):
        return USUAL_UMASK
    mask = int(text, 8)  # int: four octal digits
    return mask if mask <= 0o777 else USUAL_UMASK


def visible_devices() -> str:
    """Return the variable that selects GPUs on this node, which depends on the driver."""
    return "ROCR_VISIBLE_DEVICES" if os.path.exists("/dev/kfd") else "CUDA_VISIBLE_DEVICES"


def _devices(launch: protocol.Launch) -> List[str]:
    named = launch.env.get(GPU_DEVICES, "").split(",")
    return named if len(named) == len(launch.gpus) and named[0] else [str(index) for index in launch.gpus]


def _path(root: str, users: str) -> str:
    """Return the PATH of tasks, with Slurm's names if the user's PATH has them."""
    ours = [bin_dir(root)]
    if any(_SLURM_PATH.search(folder) for folder in users.split(":")):
        ours.append(os.path.join(bin_dir(root), "slurm"))
    return ":".join([*(folder for folder in ours if folder not in users.split(":")), users])


def own_folders(env: Mapping[str, str]) -> List[str]:
    """Return the folders of a task's PATH that have our commands."""
    ours = bin_dir(env[AGENT_ROOT])
    folders = env["PATH"].split(":")
    return [folder for folder in folders if folder in (ours, ours + "/slurm") or _SLURM_PATH.search(folder)]


def bin_dir(root: str) -> str:
    """Return the folder of the step commands."""
    return os.path.join(root, "bin")


def task_environment(shared: Dict[str, str], launch: protocol.Launch, local_rank: int) -> Dict[str, str]:
    """Return the environment of the task with this number on this node."""
    tasks = launch.tasks
    rank = tasks.ranks()[local_rank]
    env = dict(shared)
    for name, value in (("PROCID", rank), ("LOCALID", local_rank), ("NODEID", tasks.node_rank)):
        env["HPCSCHED_" + name] = env["SLURM_" + name] = str(value)
    env["SLURM_GTIDS"] = ",".join(str(number) for number in tasks.ranks())
    each = env.get(GPUS_PER_TASK, "")
    count = gate.whole_number(each) if _COUNT.fullmatch(each) else None
    if count is not None and count * (local_rank + 1) <= len(launch.gpus):
        own = slice(count * local_rank, count * (local_rank + 1))
        env[visible_devices()] = ",".join(_devices(launch)[own])
        env["HPCSCHED_TASK_GPUS"] = ",".join(str(index) for index in launch.gpus[own])
    if launch.step != protocol.BATCH:
        env.update(
            RANK=str(rank),
            LOCAL_RANK=str(local_rank),
            WORLD_SIZE=str(tasks.total),
            LOCAL_WORLD_SIZE=str(tasks.count),
        )
    return env


def node_has_gpus() -> bool:
    """Return whether this node has NVIDIA GPUs, which must be hidden from jobs without GPUs."""
    return os.path.exists("/proc/driver/nvidia/gpus") or os.path.exists("/dev/nvidia0")


def allocation_path(root: str, incarnation: str, job_id: int, attempt: int) -> str:
    """Return the path of the attempt's allocation file."""
    return os.path.join(root, "allocation", "%s.%d.%d" % (incarnation, job_id, attempt))


def write_allocation(root: str, order: protocol.Allocation) -> bool:
    """Write the allocation file if its generation is new; return whether it is.

    Raises WireError if the order names no place for it.
    """
    if not protocol.is_incarnation(order.incarnation):
        raise protocol.WireError("there is no incarnation %.60r" % order.incarnation)
    path = allocation_path(root, order.incarnation, order.job_id, order.attempt)
    if allocation_generation(path) >= order.generation:
        return False
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    os.chmod(folder, 0o755)  # noqa: S103 - users read it
    with open(path + ".new", "w") as file:
        json.dump({"generation": order.generation, "nodes": order.nodes, "wanted": order.wanted}, file)
        file.write("\n")
    os.chmod(path + ".new", 0o644)
    os.replace(path + ".new", path)
    return True


def allocation_generation(path: str) -> int:
    """Return the generation of an allocation file, 0 if there is none."""
    try:
        with open(path) as file:
            return int(json.load(file)["generation"])  # int: of our own file
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def remove_allocations(root: str) -> None:
    """Remove all allocation files. No job may be running."""
    paths.remove_tree(os.path.join(root, "allocation"))
