"""The facts of a node: what it has, how it is, and how fast its cpus and links are.

    cpus mem_mib gpus disk_free_mib disk_total_mib tmp_free_mib load python kernel machine hostname machine_id boot_id
    time_s user uid is_root leftovers security surroundings root uptime_s mem_free_mib tmp_total_mib link_mbps
    mac (of the interface to the controller) speed (if it was measured)

`machine_id` is equal on nodes that share a machine: it is the kernel's boot id, because /etc/machine-id is equal on cloned
machines. `gpus` is a list of {index, name, uuid, mem_mib, mig}; `mig` is a list of {profile, uuid} of its MIG devices.
`leftovers` are processes of jobs that do not run here any more: {pid, job}. The agent's welcome also has `spool`, see
`hpcnode.spool`, and `samples`, whether it knows `SampleEvery`. Sizes are in MiB, times in seconds. Unknown facts are missing.
"""

from __future__ import annotations

import os
import pwd
import re
import socket
import stat
import struct
import sys
import time
from typing import Any, Collection, Dict, List, Mapping, Optional

from hpcnode.os import account, process
from hpcnode.os.account import has_helper
from hpcnode.os.surroundings import surroundings
from hpcnode.shepherd.environment import AGENT_ROOT as _AGENT_ROOT

# ----- the speed of a node compared with others: one number for its cpus, one for its network
# The number for cpus is the GB of BLAKE2b that one cpu hashes in a second of cpu time: plain arithmetic in registers and the
# nearest cache, without special instructions, with the same code in every Python. It compares machines; it is not a unit, and
# ignores memory and GPUs. It counts cpu time, so a busy node does not seem slow (unless its cpus share cores). The number for the
# network is the rate of the default route's link as the kernel reports it; virtual links and Wi-Fi have none.


CHUNK = b"\x5a" * (1 << 16)  # fits the nearest caches
ROUND_BYTES = 24 << 20  # takes some 30 ms
ROUNDS = 5  # the best one counts, because disturbances only slow it down


def cpu_speed(rounds: int = ROUNDS, round_bytes: int = ROUND_BYTES) -> float:
    """Return the speed of a cpu, rounded to three decimals and above 0."""
    import hashlib  # in a child; see `agent` on the cost of imports

    best = 0.0
    for _ in range(rounds):
        digest = hashlib.blake2b()
        began_s = time.thread_time()
        for _ in range(round_bytes // len(CHUNK)):
            digest.update(CHUNK)
        took_s = time.thread_time() - began_s
        best = max(best, round_bytes / max(took_s, 1e-6) / 1e9)
    return max(round(best, 3), 0.001)


def link_mbps(routes: str = "/proc/net/route", net: str = "/sys/class/net") -> int:
    """Return the rate of the link of the default route in Mbit/s, 0 if it is not known."""
    try:
        with open(routes) as file:
            rows = [line.split() for line in file]
        device = next(row[0] for row in rows if len(row) > 7 and row[1] == "00000000" and row[7] == "00000000")
        with open("%s/%s/speed" % (net, device)) as file:
            return max(0, int(file.read()))
    except (OSError, StopIteration, ValueError):
        return 0


def mac_to_peer(link_pid: int, net: str = "/sys/class/net") -> str:
    """Return the address of the network card that leads to the client of an SSH login.

    "" if it is not known.
    """
    from hpcnode.agent import link_speed  # in a child; see `agent` on the cost of imports

    client = process.environment_of(link_pid).get(b"SSH_CONNECTION", b"").decode("ascii", "replace").split()
    try:
        device = link_speed.device_to(client[0]) if client else ""
    except (OSError, ValueError, struct.error):
        return ""
    mac = _first_line("%s/%s/address" % (net, device)) or "" if device else ""
    return mac if mac.strip("0:") else ""


GPU_TIMEOUT_S = 15.0
SYSTEM_PYTHON = "/usr/bin/python3"
AGENT_ROOT = _AGENT_ROOT.encode()
MOST_LEFTOVERS = 1000  # that are named
_JOB = re.compile(rb"[0-9]{1,18}")
_LISTED = re.compile(r"(?:(?P<gpu>GPU \d+): .*|\s+MIG (?P<profile>\S+)\s.*)\(UUID: (?P<uuid>[\w/-]+)\)\s*\Z")
_GPU_QUERY = "index,name,uuid,memory.total"


def facts(
    root: str,
    environ: Mapping[str, str],
    live_jobs: Collection[int],
    thorough: bool = True,
    measure: bool = False,
    link_pid: int = 0,
) -> Dict[str, Any]:
    """Return the facts of this node.

    `thorough`: with GPUs and leftovers, which may take seconds. `measure`: with speed. `link_pid`: the process that sshd
    started for the controller; 0: this one.
    """
    found: Dict[str, Any] = {
        "cpus": len(os.sched_getaffinity(0)),
        "python": "%d.%d.%d" % sys.version_info[:3],
        "kernel": os.uname().release,
        "machine": os.uname().machine,
        "hostname": socket.gethostname(),
        "machine_id": _first_line("/proc/sys/kernel/random/boot_id") or "",
        "boot_id": process.boot_id(environ),
        "time_s": time.time(),
        "uptime_s": process.boot_clock_s(),
        "load": list(os.getloadavg()),
        "uid": os.geteuid(),
        "user": _user_name(),
        "is_root": os.geteuid() == 0 or has_helper(),  # it can start tasks as any user
        "root": root,
        "gpus": [],
    }
    if thorough and os.geteuid() == 0:
        found.update(python_of_users(sys.executable, root))
    if thorough:
        found["security"] = security(link_pid or os.getpid())
        found["surroundings"] = surroundings(root)
        found.update(gpus=gpus(environ), leftovers=leftovers(live_jobs, root), link_mbps=link_mbps())
        found["mac"] = mac_to_peer(link_pid or os.getpid())
    if measure:
        found["speed"] = cpu_speed()
    found.update(memory())
    found.update(_disk("disk", root))
    found.update(_disk("tmp", "/tmp"))  # noqa: S108 - only its free space is looked at
    return found


KERNEL_SETTINGS = (
    "fs.protected_symlinks",
    "fs.protected_hardlinks",
    "fs.protected_fifos",
    "fs.protected_regular",
    "kernel.yama.ptrace_scope",
)


def security(link_pid: int) -> Dict[str, Any]:
    """Return what `hctl security` judges: policy, kernel, sshd, the login of the controller.

    `forced_command`: sshd tells a command of authorized_keys what the client asked for instead.
    """
    forced = b"SSH_ORIGINAL_COMMAND" in process.environment_of(link_pid)
    found: Dict[str, Any] = {"forced_command": forced, "kernel": {}}
    for name in KERNEL_SETTINGS:
        text = _first_line("/proc/sys/" + name.replace(".", "/")) or ""
        if text.isdigit():
            found["kernel"][name] = int(text)
    try:
        policy = account.read_policy(account.POLICY_PATH)
        found["policy"] = {name: policy[name] for name in ("allow_root", "min_uid") if name in policy}
    except account.UserError as error:
        found["policy_error"] = str(error)
    found["openssh"] = _output_of("sh", "-c", "ssh -V 2>&1").strip()
    return found


def python_of_users(python: str, root: str) -> Dict[str, str]:
    """Return whether other accounts than root can run `python` and the files in `root`.

    `python_closed` is the directory or file that keeps them out, "" if none does; then `python_for_all` is another Python
    that they can run, "" if there is none.
    """
    needed = (python, os.path.realpath(python), os.path.realpath(os.__file__))
    closed = next(filter(None, map(closed_to_others, needed)), "")
    found = {"python_path": python, "python_closed": closed or closed_to_others(root), "python_for_all": ""}
    if closed and not closed_to_others(os.path.realpath(SYSTEM_PYTHON)):
        said = _output_of(SYSTEM_PYTHON, "-I", "-S", "-c", "import sys; print(sys.version_info >= (3, 9))")
        found["python_for_all"] = SYSTEM_PYTHON if said.strip() == "True" else ""
    return found


def closed_to_others(path: str) -> str:
    """Return the first part of `path` that other accounts cannot enter or read, "" for none."""
    parts = os.path.abspath(path).split("/")
    for count in range(1, len(parts) + 1):
        part = "/".join(parts[:count]) or "/"
        try:
            mode = os.stat(part).st_mode
        except OSError:
            return part
        if not mode & (stat.S_IXOTH if stat.S_ISDIR(mode) else stat.S_IROTH):
            return part
    return ""


def has_gpu_tool(environ: Mapping[str, str]) -> bool:
    """Return whether a program must run to list the GPUs, which can take seconds."""
    return _find("nvidia-smi", environ.get("PATH", "/usr/bin:/bin")) is not None


def gpus(environ: Mapping[str, str]) -> List[Dict[str, Any]]:
    """Return the NVIDIA GPUs of this node, [] if there are none or the driver does not answer."""
    tool = _find("nvidia-smi", environ.get("PATH", "/usr/bin:/bin"))
    if tool is None:
        return []
    found = parse_gpus(_output_of(tool, "--query-gpu=" + _GPU_QUERY, "--format=csv,noheader,nounits"))
    if found:
        devices = parse_mig(_output_of(tool, "-L"))
        for gpu in found:
            gpu["mig"] = devices.get(gpu["uuid"], [])
    return found


def _output_of(*argv: str) -> str:
    """Return a program's output, "" if it fails or takes too long."""
    status, output = process.output_of(argv, GPU_TIMEOUT_S)
    return output if status == 0 else ""


def parse_mig(text: str) -> Dict[str, List[Dict[str, str]]]:
    """Return the MIG devices of each GPU by its uuid, from the output of `nvidia-smi -L`."""
    found: Dict[str, List[Dict[str, str]]] = {}
    gpu = ""
    for line in text.splitlines():
        match = _LISTED.match(line)
        if match is None:
            continue
        if match.group("gpu"):
            gpu = match.group("uuid")
        elif gpu:
            found.setdefault(gpu, []).append({"profile": match.group("profile"), "uuid": match.group("uuid")})
    return found


def parse_gpus(text: str) -> List[Dict[str, Any]]:
    """Return the GPUs of nvidia-smi's table; other lines are skipped."""
    found = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 4 and fields[0].isdigit():
            memory = int(fields[3]) if fields[3].isdigit() else 0
            found.append({"index": int(fields[0]), "name": fields[1], "uuid": fields[2], "mem_mib": memory})
    return found


def leftovers(live_jobs: Collection[int], root: str) -> List[Dict[str, int]]:
    """Return processes of jobs of this root that do not run here any more.

    Any user's process can have these variables.
    """
    found: List[Dict[str, int]] = []
    for pid, status in process.all_processes().items():
        if status.state in "ZX" or pid == os.getpid():
            continue
        env = process.environment_of(pid)
        job = env.get(b"HPCSCHED_JOB_ID", b"")
        if env.get(AGENT_ROOT) != os.fsencode(root) or not _JOB.fullmatch(job) or len(found) >= MOST_LEFTOVERS:
            continue
        if int(job) not in live_jobs:  # int: bounded by the pattern
            found.append({"pid": pid, "job": int(job)})
    return found


def memory() -> Dict[str, int]:
    """Return the total and available memory in MiB; what is not known is missing."""
    found = {}
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                words = line.split()
                if words[0] == "MemTotal:":
                    found["mem_mib"] = int(words[1]) >> 10
                elif words[0] == "MemAvailable:":
                    found["mem_free_mib"] = int(words[1]) >> 10
    except OSError:
        pass
    return found


def _disk(name: str, path: str) -> Dict[str, int]:
    try:
        info = os.statvfs(path)
    except OSError:
        return {}
    return {
        name + "_free_mib": info.f_bavail * info.f_frsize >> 20,
        name + "_total_mib": info.f_blocks * info.f_frsize >> 20,
    }


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return "uid %d" % os.geteuid()


def _first_line(path: str) -> Optional[str]:
    try:
        with open(path) as file:
            return file.readline().strip()
    except OSError:
        return None


def _find(name: str, path: str) -> Optional[str]:
    for folder in path.split(":"):
        candidate = os.path.join(folder or ".", name)
        if folder and os.access(candidate, os.X_OK):
            return candidate
    return None
