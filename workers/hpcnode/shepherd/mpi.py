"""Variables and files that let plain `mpirun prog` use a job's whole allocation.

It knows Open MPI 5 (PRRTE), Open MPI 4 (ORTE) and MPICH's hydra. It does not know which of them the job will use: the variables
of all three are set, and each reads only its own. Jobs, agents and sockets are not known here.

Rules: host names in files come from the caller and are not resolved, because a lookup may block for seconds. Variables for one
machine that poses as several nodes are set only if the caller says that it does. man/adr/0002-mpirun-in-a-job.md explains each
variable, and what was rejected.

Sources: PRRTE 3 `ess/slurm`, `oob/tcp`, `plm/ssh`; Open MPI 5 FAQ on MCA parameters in the environment; MPICH wiki "Using the
Hydra Process Manager"; netdevice(7).
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import struct
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from hpcnode import paths
from hpcnode.os.account import UserAccount
from hpcnode.shepherd.environment import bin_dir
from hpcnode.wire import protocol

NAME_DAEMONS = "HPCSCHED_MPI_NAME_DAEMONS"
"""Set to 1 in a job whose Open MPI daemons need the name of their node (see `daemon_command`)."""

_BRIDGES = ("docker0", "podman0", "virbr0", "lxcbr0", "lxdbr0")
_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
_DAEMON = re.compile(r"(?:^|[\s;/])(?:prted|orted)\s")
_ESS_ENV = re.compile(r'(--?(?:prtemca|mca)\s+ess\s+)(?:\\?"env\\?"|env)(?=\s|$)')


def mpi_environment(
    *,
    hosts: Sequence[Tuple[str, int]],
    hrsh: str,
    state_dir: str,
    same_machine: bool,
    as_root: bool,
    same_hostnames: bool = False,
    peer_address: Optional[str] = None,
) -> Dict[str, str]:
    """Return the variables that make `mpirun` use `hosts`, and write their host files.

    Call it on the first node of the allocation, where mpirun runs. The caller needs write access to `state_dir`, and the
    job's user read access. The files are readable by all users.

    hosts: (node name, slots) of the allocation, the first node first. hrsh: path of the remote shell, the same on all
    nodes, without spaces. same_machine: several of the nodes are one machine. same_hostnames: nodes on different
    machines report one hostname (a home full of `raspberrypi`). peer_address: an IP address of another node, to find
    the interface that leads there; without it, that of the default route or the only one.

    Raises:
        ValueError: no hosts, a slot count below one, or a path that the launchers would split.
    """
    _check(hosts, hrsh, state_dir)
    several = len(hosts) > 1
    one_file = several and same_machine and not _has_network()
    open_mpi = os.path.join(state_dir, "hosts.openmpi")
    hydra = os.path.join(state_dir, "hosts.hydra")
    _write(open_mpi, _open_mpi_lines([("localhost", sum(n for _, n in hosts))] if one_file else hosts))
    _write(hydra, _hydra_lines(hosts))
    variables = {**_open_mpi_variables(open_mpi, hrsh), **_hydra_variables(hydra, hrsh)}
    if same_machine:
        variables.update(_same_machine_variables())
    else:
        excluded = ",".join(("127.0.0.0/8", "sppp") + _BRIDGES)
        variables["OMPI_MCA_btl_tcp_if_exclude"] = excluded
    if several and (same_machine or same_hostnames):
        variables[NAME_DAEMONS] = "1"
    interface = _launch_interface(same_machine, peer_address) if several else None
    if interface:
        variables["HYDRA_IFACE"] = interface
    if as_root:
        variables.update(_root_variables())
    return variables


def daemon_command(command: str, node: str, environ: Mapping[str, str]) -> Tuple[str, Dict[str, str]]:
    """Return the command and the variables with which `hrsh` runs `command` on `node`.

    Open MPI's daemon reports `gethostname()`, and MPI hangs if two daemons report the same name. A daemon that believes to be
    started by Slurm reports SLURMD_NODENAME. So if `environ` (that of hrsh) has NAME_DAEMONS, `ess env` of a daemon becomes
    `ess slurm`. Other commands are returned unchanged.
    """
    if environ.get(NAME_DAEMONS) != "1" or not _DAEMON.search(command):
        return command, {}
    renamed, count = _ESS_ENV.subn(r"\1slurm", command)
    if not count:
        return command, {}
    # ess/slurm needs SLURM_JOBID, and adds SLURM_NODEID to a number that is complete already.
    job = environ.get("SLURM_JOBID") or "0"
    return renamed, {"SLURMD_NODENAME": node, "SLURM_NODEID": "0", "SLURM_JOBID": job}


def _check(hosts: Sequence[Tuple[str, int]], hrsh: str, state_dir: str) -> None:
    if not hosts:
        raise ValueError("cannot set up mpirun: the allocation has no hosts")
    for name, slots in hosts:
        if slots < 1:
            raise ValueError(f"cannot set up mpirun: node {name!r} has {slots} slots, at least 1 is needed")
    for path in (hrsh, state_dir):
        if not os.path.isabs(path) or re.search(r"[\s,:;'\"\\]", path):
            raise ValueError(f"cannot set up mpirun: path {path!r} must be absolute, without blanks, commas, quotes")


def _open_mpi_lines(hosts: Sequence[Tuple[str, int]]) -> List[str]:
    # "localhost" is mpirun's own node under any hostname: no daemon and no hrsh are needed for it.
    names = ["localhost"] + [name for name, _ in hosts[1:]]
    return [f"{name} slots={slots}" for name, (_, slots) in zip(names, hosts)]


def _hydra_lines(hosts: Sequence[Tuple[str, int]]) -> List[str]:
    # Hydra starts a proxy by fork for the name that gethostname() gives, and would use "localhost" as the
    # address that the other nodes must call back.
    names = [socket.gethostname()] + [name for name, _ in hosts[1:]]
    return [f"{name}:{slots}" for name, (_, slots) in zip(names, hosts)]


def _open_mpi_variables(hostfile: str, hrsh: str) -> Dict[str, str]:
    return {
        "PRTE_MCA_plm": "ssh",
        "PRTE_MCA_plm_ssh_agent": hrsh,
        "PRTE_MCA_ras": "^slurm",
        "PRTE_MCA_prte_default_hostfile": hostfile,
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "OMPI_MCA_plm": "rsh",
        "OMPI_MCA_plm_rsh_agent": hrsh,
        "OMPI_MCA_ras": "^slurm",
        "OMPI_MCA_orte_default_hostfile": hostfile,
        "OMPI_MCA_hwloc_base_binding_policy": "none",
    }


def _hydra_variables(hostfile: str, hrsh: str) -> Dict[str, str]:
    return {
        "HYDRA_RMK": "user",
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": hrsh,
        "HYDRA_HOST_FILE": hostfile,
        "HYDRA_BINDING": "none",
    }


def _same_machine_variables() -> Dict[str, str]:
    # What is left out is named, not what stays: Open MPI 4 calls "vader" what is "sm" in 5.
    return {
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "^ofi,uct,openib",
    }


def _root_variables() -> Dict[str, str]:
    names = ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT")
    return {name + suffix: "1" for name in names for suffix in ("", "_CONFIRM")}


def _write(path: str, lines: Sequence[str]) -> None:
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as out:
        out.write("".join(line + "\n" for line in lines))
    os.chmod(temporary, 0o644)
    os.rename(temporary, path)


def _launch_interface(same_machine: bool, peer_address: Optional[str]) -> Optional[str]:
    """Return the interface on which other nodes reach this one, None if it is not known."""
    if peer_address is None:
        # Nodes of one machine may have networks of their own (containers), so its loopback comes last.
        return _default_route_interface() or _only_interface() or ("lo" if same_machine else None)
    source = _source_address(peer_address)
    for name, (_, address) in _interfaces().items():
        if source is not None and address == source:
            return name
    return "lo" if source is not None and source.startswith("127.") else None


def _source_address(peer_address: str) -> Optional[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer_address, 9))  # sends nothing: the kernel only chooses a route
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _default_route_interface() -> Optional[str]:
    try:
        with open("/proc/net/route", encoding="ascii") as table:
            rows = [line.split() for line in table.readlines()[1:]]
    except OSError:
        return None
    return next((row[0] for row in rows if row[1] == "00000000" and row[7] == "00000000"), None)


def _only_interface() -> Optional[str]:
    names = _outer_interfaces()
    return names[0] if len(names) == 1 else None


def _has_network() -> bool:
    """Return whether there is an interface besides loopback, which PRRTE's daemons need."""
    return bool(_outer_interfaces())


def _outer_interfaces() -> List[str]:
    """Return interfaces that are up and have an IPv4 address, without loopbacks."""
    return [
        name
        for name, (flags, address) in _interfaces().items()
        if flags & _IFF_UP and not flags & _IFF_LOOPBACK and address is not None
    ]


def _interfaces() -> Dict[str, Tuple[int, Optional[str]]]:
    """Return {name: (flags, first IPv4 address)} of this network namespace."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                flags = struct.unpack_from("H", fcntl.ioctl(sock, _SIOCGIFFLAGS, request), 16)[0]
            except OSError:
                continue  # gone since it was listed
            try:
                address = socket.inet_ntoa(fcntl.ioctl(sock, _SIOCGIFADDR, request)[20:24])
            except OSError:
                address = None
            found[name] = (flags, address)
    return found


# ----- the MPI variables of batch steps, made once for each allocation shape, because short jobs often have the same nodes
# A job can run without them, if `mpirun` gets its hosts in another way. So errors here are logged, not fatal.


MAX_KNOWN = 256


class MpiVariables:
    """The variables of known allocation shapes, and their host files in ROOT/mpi."""

    def __init__(self, root: str, log: Callable[[str], None]) -> None:
        self._root = root
        self._folder = os.path.join(root, "mpi")
        self._log = log
        self._known: Dict[str, Dict[str, str]] = {}

    def variables(self, launch: protocol.Launch, account: UserAccount) -> Dict[str, str]:
        """Return the variables to add to the environment of this launch."""
        if launch.step != protocol.BATCH or not launch.hosts:
            return {}
        shape = json.dumps([launch.hosts, launch.same_machine, account.uid == 0])
        if shape not in self._known:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[shape] = self._make(launch, account)
        return self._known[shape]

    def remove_files(self) -> None:
        """Remove all host files. No job may be running."""
        self._known.clear()
        paths.remove_tree(self._folder)

    def _make(self, launch: protocol.Launch, account: UserAccount) -> Dict[str, str]:
        folder = os.path.join(self._folder, launch.token.rpartition(".")[2])  # its nonce, which is unique
        try:
            os.makedirs(folder, exist_ok=True)
            for path in (self._folder, folder):
                os.chmod(path, 0o755)  # noqa: S103 - users read it
            return mpi_environment(
                hosts=launch.hosts,
                hrsh=os.path.join(bin_dir(self._root), "hrsh"),
                state_dir=folder,
                same_machine=launch.same_machine,
                as_root=account.uid == 0,
            )
        except (OSError, ValueError) as error:
            self._log("no MPI variables for %s: %s" % (launch.token, error))
            return {}
