"""The tree of `hpcsched doctor`: facts in, causes with their remedies out.

Pure. `CAUSES` has each cause's id, severity, reason and remedy. `of_cluster`, `of_node` and `of_job` walk the tree. A walk is a list
of steps, from what everything depends on to what nothing depends on. It ends at the first broken link of a chain: a dead name
server gives one finding, not twenty. An id never gets another meaning. A cause of severity INFO is no fault.

A fact is the answer to one question, or the reason why there is none, see `Fact`. Questions that were not asked are missing, and
are not judged. Facts of nodes and jobs are from other machines and users: types are checked, texts are cut and quoted.

Sources: connect(2), sshd(8), ssh_config(5), sysexits.h, signal(7); messages of glibc, Python, CUDA, NCCL, Open MPI, MPICH.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hpcsched.doctor.security import Severity, finding_json
from hpcsched.model.node import CHECKS

MAX_DETAIL = 300


class Fact(NamedTuple):
    """The answer to a question.

    `kind`: the class or the errno of an error. `parts`: what was found before the end, also if it was too late; its "stage" says
    what was done last.
    """

    value: Any = None
    error: str = ""
    kind: str = ""
    is_late: bool = False
    parts: Mapping[str, Any] = {}

    @property
    def is_known(self) -> bool:
        """Return whether the question has an answer."""
        return not self.is_late and not self.kind


Facts = Mapping[str, Fact]
UNKNOWN = Fact(kind="NotAsked")


class Cause(NamedTuple):
    """A cause that the doctor knows.

    `fix`: commands to copy; words in braces are filled in, quoted for a shell.
    """

    id: str
    severity: Severity
    title: str
    why: str
    fix: str


_C, _H, _M, _L, _I = Severity

# fmt: off
# ruff: noqa: E501 - a row of the table is read as one
CAUSES = {cause.id: cause for cause in (
    # ----- a client on another machine
    Cause("HD-101", _H, "address of the gateway that cannot be used", "Commands do not know where the cluster is.",
          "export HPCSCHED_URL=https://HOST:6820"),
    Cause("HD-102", _H, "name of the gateway that is not known", "The name service knows no address for it.",
          "getent hosts {host}   # correct the name in HPCSCHED_URL, or add a line to /etc/hosts"),
    Cause("HD-103", _H, "gateway that refuses connections", "Its machine answers, and no gateway runs at this port.",
          "hpcsched gateway   # on the head"),
    Cause("HD-104", _H, "gateway that does not answer", "A firewall drops the packets, or the machine or its network is off.",
          "nc -vz -w 5 {host} {port}   # also from another network; then open the port on the head: ufw allow {port}/tcp"),
    Cause("HD-105", _H, "certificate of the gateway that is not trusted", "Another machine may have taken its place.",
          "export HPCSCHED_CA_FILE=FILE   # the certificate of the authority that signed it, from an admin"),
    Cause("HD-106", _H, "token that is missing or not accepted", "The gateway does not know who asks.",
          "hctl token create --scope=read,submit,manage --expires=30d   # on the head; then here: export HPCSCHED_TOKEN=TOKEN"),
    Cause("HD-107", _H, "another server than a gateway of hpcsched", "Something else answers at this address.",
          "export HPCSCHED_URL=https://HOST:6820"),
    Cause("HD-108", _H, "gateway without a controller", "The gateway runs, and the controller behind it does not answer.",
          "hpcsched doctor   # on the head"),
    # ----- the head: configuration, state, controller
    Cause("HD-201", _H, "no configuration", "There is no cluster of this account, and none of this machine.",
          "hpcsched init   # or, for a cluster elsewhere: export HPCSCHED_URL=https://HOST:6820"),
    Cause("HD-202", _H, "configuration that this account may not read", "Commands need hpcsched.toml to find the controller.",
          "chmod go+rX {path}   # as its owner"),
    Cause("HD-203", _H, "mistake in the configuration", "The controller does not start with it, and a running one does not take it.",
          "hctl reconfigure   # after the correction of {path}"),
    Cause("HD-204", _C, "file system of the configuration that hangs", "Everything that reads it hangs, too.",
          "umount -l {path}; mount {path}   # after its server answers again"),
    Cause("HD-205", _M, "own cluster that hides the cluster of this machine", "Your configuration has precedence, and its controller does not run.",
          "export HPCSCHED_CONFIG=/etc/hpcsched"),
    Cause("HD-210", _C, "state directory that is missing", "The database is there.",
          "hpcsched restore FILE   # or mount the file system of {path}; for an empty database: hpcsched init --database"),
    Cause("HD-211", _C, "state directory of another account", "The controller refuses a directory that others own.",
          "chown -R {owner} {path}"),
    Cause("HD-212", _C, "state directory on a read-only file system", "Nothing can be recorded. A kernel does this after errors of a disk.",
          "dmesg --level=err,warn | tail; mount -o remount,rw {mount}"),
    Cause("HD-213", _C, "full file system of the state directory", "The controller accepts no jobs until it can write.",
          "du -xh --max-depth=2 {mount} | sort -h | tail"),
    Cause("HD-214", _C, "no free inodes for the state directory", "No file can be made, though there is space.",
          "du -x --inodes --max-depth=2 {mount} | sort -n | tail"),
    Cause("HD-215", _C, "file system of the state directory that hangs", "The controller hangs with it.",
          "dmesg --level=err,warn | tail   # then repair the disk, or its server"),
    Cause("HD-220", _C, "database that is missing or empty", "The controller does not start, because running jobs would be lost.",
          "hpcsched restore FILE   # the newest backup; without any: hpcsched init --database"),
    Cause("HD-221", _C, "damaged database", "The controller does not start, or stops.",
          "hpcsched down; hpcsched restore FILE   # the newest backup; the damaged file is kept"),
    Cause("HD-222", _C, "database of another version or program", "This hpcsched cannot read it.",
          "pip install --upgrade hpcsched   # the version that wrote {path}, or a newer one"),
    Cause("HD-223", _C, "database of another cluster", "Its jobs would be started on the wrong nodes.",
          "hpcsched restore FILE   # a backup of this cluster"),
    Cause("HD-230", _H, "controller that is not running", "No job is started. Running jobs continue.",
          "hpcsched up"),
    Cause("HD-231", _H, "stopped controller process", "Somebody sent it SIGSTOP, or a debugger holds it.",
          "kill -CONT {pid}"),
    Cause("HD-232", _H, "controller that does not answer", "It is busy, or waits for a disk.",
          "hpcsched down; hpcsched up   # running jobs continue; if it does not end: kill -KILL {pid}"),
    Cause("HD-233", _H, "controller whose socket is gone", "It runs, and no command can reach it.",
          "kill -TERM {pid}; hpcsched up"),
    Cause("HD-234", _H, "socket of the controller that this account may not use", "The directory of the socket is closed to other users.",
          "chmod go+x {path}   # as its owner; or set run_dir in hpcsched.toml"),
    Cause("HD-235", _C, "socket that another account serves", "That account would get the jobs and secrets of all users.",
          "ls -ld {path}; hctl security"),
    Cause("HD-236", _L, "controller of another version than the commands", "Commands may ask for what it does not know.",
          "hpcsched down; hpcsched up"),
    Cause("HD-237", _M, "changes that the controller did not take", "Its configuration differs from the files.",
          "hctl reconfigure"),
    Cause("HD-238", _H, "prolog or epilog of the head that waits", "Jobs do not start, or their epilog does not run.",
          "df -h; df -i; hhealth   # the state directory: state_dir of hpcsched.toml"),
    Cause("HD-240", _C, "clock of the head that is wrong", "Time limits, ages and shares are computed from it.",
          "timedatectl set-ntp true; timedatectl"),
    Cause("HD-241", _H, "launch key that is missing", "The controller cannot log in to nodes.",
          "hpcsched restore FILE   # with the key; or a new one: hpcsched init --force; then hpcsched key, on each node"),
    Cause("HD-242", _H, "launch key that cannot be used", "A key that others may read is not used, as by ssh.",
          "chown {owner} {path}; chmod 600 {path}"),
    Cause("HD-250", _C, "share that hangs", "Jobs and commands that touch it wait without end.",
          "umount -l {path}; mount {path}   # after its server answers again"),
    Cause("HD-251", _H, "share that is missing", "Scripts, results and checkpoints are there.",
          "mount {path}"),
    Cause("HD-252", _H, "share that cannot be written", "Jobs cannot write results and checkpoints.",
          "findmnt -T {path}; mount -o remount,rw {path}"),
    Cause("HD-253", _H, "full share", "Jobs cannot write results and checkpoints.",
          "du -xh --max-depth=2 {path} | sort -h | tail"),
    Cause("HD-255", _H, "scheduled backups of which none was made", "A lost disk is the end of queue and history.",
          "hpcsched backup --scheduled"),
    Cause("HD-256", _H, "backups that are too old", "What came later would be lost with the disk.",
          "hpcsched backup --scheduled"),
    Cause("HD-257", _H, "directory of backups that cannot be reached", "No backup is made there. Earlier ones may be out of reach.",
          "findmnt -T {path}; ls -ld {path}   # mount it, then: hpcsched backup --scheduled"),
    Cause("HD-258", _H, "backup that failed or was not as the database", "The earlier backups stay; a newer one is missing.",
          "hpcsched backup --scheduled   # says it again; then: hpcsched restore --drill {path}"),
    Cause("HD-260", _M, "cluster without nodes", "There is no machine for jobs.",
          "hpcsched node add user@host"),
    Cause("HD-261", _H, "node that does not answer", "It gets no jobs.",
          "hpcsched doctor {node}"),
    Cause("HD-262", _I, "drained node", "Somebody took it out of service. It gets no new jobs.",
          "hctl resume {node}"),
    Cause("HD-263", _H, "node that was drained because of faults", "It gets no new jobs until the fault is corrected.",
          "hpcsched doctor {node}   # then: hctl resume {node}"),
    Cause("HD-264", _I, "node that is switched off to save power", "A job that needs it switches it on.",
          "hctl power up {node}   # to have it on now"),
    # ----- the way to a node
    Cause("HD-300", _H, "no such node", "The cluster has no node of that name.",
          "hpcsched node list"),
    Cause("HD-301", _H, "host name of a node that is not known", "The name service knows no address for it.",
          "getent hosts {host}   # correct host in {path}, or add a line to /etc/hosts"),
    Cause("HD-302", _H, "name service that does not answer", "Every connection by name waits for it.",
          "cat /etc/resolv.conf; resolvectl status   # or write addresses as host in nodes.d"),
    Cause("HD-303", _H, "node that refuses connections", "The machine answers, and no SSH server listens at this port.",
          "systemctl enable --now ssh   # on {node}; or correct port in {path}"),
    Cause("HD-304", _H, "node that does not answer at its port", "It is off or elsewhere, or a firewall drops the packets.",
          "ping -c 3 {host}; nc -vz -w 5 {host} {port}   # if it answers pings: ufw allow {port}/tcp, on {node}"),
    Cause("HD-305", _H, "no route to a node", "This machine has no network that reaches its address, or the node is off.",
          "ip route get {address}; ip -br address"),
    Cause("HD-306", _H, "port of a node that accepts and says nothing", "sshd is overloaded or stopped, or a firewall answers in its place.",
          "systemctl restart ssh   # on {node}, at its console; and see MaxStartups in /etc/ssh/sshd_config"),
    Cause("HD-307", _H, "port of a node that is not SSH", "Another program listens there.",
          "ss -tlnp   # on {node}; then correct port in {path}"),
    Cause("HD-308", _C, "host key of a node that has changed", "It was installed anew, or another machine answers in its place.",
          "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub   # on {node}, at its console; if it is the same: hpcsched node rekey {node}"),
    Cause("HD-309", _H, "launch key that a node does not let in", "Its authorized_keys lacks the key, or its directories are writable by others.",
          "hpcsched key | ssh -p {port} {login} 'umask 077; mkdir -p ~/.ssh; cat >> ~/.ssh/authorized_keys; chmod go-w ~ ~/.ssh'"),
    Cause("HD-310", _H, "private key for a node that cannot be used", "It is missing, damaged, or others may read it.",
          "ls -l {path}; chmod 600 {path}"),
    Cause("HD-311", _H, "node that wants another login than a key", "sshd there takes no public keys, or wants more.",
          "sshd -T | grep -i authentication   # on {node}: pubkeyauthentication yes, and nothing else in authenticationmethods"),
    Cause("HD-312", _H, "SSH configuration that cannot be used", "It names a way that is not supported, or has a mistake.",
          "ssh -G {host}   # correct ~/.ssh/config of the controller's account: ProxyJump, not ProxyCommand"),
    Cause("HD-313", _H, "jump host that does not lead to the node", "The jump host cannot reach it, or forbids forwarding.",
          "ssh -J JUMP -p {port} {login} true   # and AllowTcpForwarding in sshd_config of the jump host"),
    Cause("HD-314", _H, "account on a node that may not run commands", "Its login shell ends at once.",
          "usermod -s /bin/bash {user}   # on {node}"),
    Cause("HD-315", _H, "start-up files of a node's account that print without end", "Their output comes before the agent's.",
          "ssh -p {port} {login} true | head -c 300   # then remove the output from ~/.bashrc on {node}"),
    Cause("HD-316", _H, "login on a node that hangs", "A start-up file of the account, or its home directory, does not answer.",
          "ssh -p {port} {login} true   # if it hangs: mv ~/.bashrc ~/.bashrc.off, and df ~, on {node}"),
    Cause("HD-317", _H, "node without Python", "The agent needs Python 3.9 or newer.",
          "apt-get install python3   # on {node}; or set python in {path}"),
    Cause("HD-318", _H, "node whose Python is too old", "The agent needs Python 3.9 or newer.",
          "ls /usr/bin/python3* /usr/local/bin/python3*   # on {node}; then set python in {path}"),
    Cause("HD-319", _H, "agent's directory on a node that is full", "The agent cannot be copied there, and jobs cannot start.",
          "df -h {root}; df -i {root}   # on {node}; or set root in {path} to another disk"),
    Cause("HD-320", _H, "agent's directory on a node that cannot be written", "The agent cannot be copied there, and jobs cannot start.",
          "findmnt -T {root}; ls -ld {root}   # on {node}; or set root in {path} to another directory"),
    Cause("HD-321", _H, "agent's directory on a node that others can change", "Others could replace the agent.",
          "chown {user} {root}; chmod go-w {root}   # on {node}, and the directories above it"),
    Cause("HD-322", _H, "agent on a node that does not answer", "Its process is stopped, or waits for a disk.",
          "ps -eo pid,stat,wchan:20,args | grep hpcnode   # on {node}; stat T: kill -CONT PID; else kill -KILL PID, jobs continue"),
    Cause("HD-323", _H, "node that has accepted another controller", "Two controllers, or an old database, would start jobs twice.",
          "hpcsched restore FILE   # the newest backup; or stop the other head"),
    Cause("HD-324", _H, "policy of a node that refuses the agent", "/etc/hpcsched/node.json there does not list this version.",
          "hpcsched key --bundle   # add its output to bundles in /etc/hpcsched/node.json on {node}"),
    Cause("HD-325", _H, "connection to a node that fails", "None of the known causes fits.",
          "ssh -v -p {port} {login} true"),
    # ----- the node itself
    Cause("HD-401", _M, "clock of a node that differs", "Files and logs get wrong times; builds and certificates fail.",
          "timedatectl set-ntp true   # on {node}"),
    Cause("HD-402", _H, "node with less than its file declares", "Jobs get what is not there.",
          "hinfo -N; nvidia-smi -L   # on {node}; then correct cpus, memory or gpus in {path}, and: hctl reconfigure"),
    Cause("HD-403", _H, "little space for the agent on a node", "Jobs cannot start there when it is full.",
          "du -xh --max-depth=2 {root} | sort -h | tail   # on {node}"),
    Cause("HD-404", _H, "few inodes for the agent on a node", "No file can be made, though there is space.",
          "du -x --inodes --max-depth=2 {root} | sort -n | tail   # on {node}"),
    Cause("HD-405", _M, "little space in /tmp of a node", "Many programs need it.",
          "du -xh --max-depth=1 /tmp | sort -h | tail   # on {node}"),
    Cause("HD-406", _H, "share that a node does not have", "Jobs there do not find their files.",
          "mount {share}; findmnt -T {share}   # on {node}"),
    Cause("HD-407", _H, "mount on a node that hangs", "Its server does not answer. Jobs that touch it cannot be killed.",
          "umount -l {mount}; mount {mount}   # on {node}, after its server answers again"),
    Cause("HD-408", _H, "users with other numbers on a node", "Files on a share belong to another user there.",
          "usermod -u {uid} {user}   # on {node}; then chown the files of the old number"),
    Cause("HD-409", _L, "time zone of a node that differs", "Times in output of jobs differ between nodes.",
          "timedatectl set-timezone {zone}   # on {node}"),
    Cause("HD-410", _M, "MPI of a node that differs", "Ranks of different MPIs do not find each other.",
          "mpirun --version   # on the head and on {node}; install the same"),
    Cause("HD-411", _M, "node that cannot confine jobs as configured", "A job there can take the resources of others.",
          "hctl show node {node}   # says what it lacks: an agent of root, cgroups; or set confine in {path}"),
    Cause("HD-412", _M, "processes of ended jobs on a node", "They take the resources of other jobs.",
          "kill -KILL {pids}   # on {node}"),
    Cause("HD-413", _M, "node that is overloaded", "More processes want a CPU than there are. Jobs crawl.",
          "ps -eo user,pid,pcpu,args --sort=-pcpu | head   # on {node}; to keep jobs away: hctl drain {node} busy"),
    Cause("HD-414", _M, "Python of a node that users cannot run", "hrun in their jobs fails with Permission denied.",
          "ls -ld {closed}   # on {node}; then set python in {path} to one outside of it, such as /usr/bin/python3"),
    Cause("HD-415", _H, "node that could not start jobs", "They could be started elsewhere.",
          "hctl show node {node}   # correct the reason; then: hctl resume {node}"),
    Cause("HD-416", _M, "few open files allowed on a node", "Programs with many files or connections fail.",
          "systemctl edit ssh   # on {node}: [Service] LimitNOFILE=65536; then restart ssh and the agent"),
    Cause("HD-417", _M, "little space in /dev/shm of a node", "Data loaders and MPI need shared memory.",
          "ls -la /dev/shm; mount -o remount,size=50% /dev/shm   # on {node}"),
    Cause("HD-418", _I, "agent of another version on a node", "It has jobs. It is replaced when they have ended.",
          "hinfo -N   # nothing is to be done"),
    Cause("HD-419", _H, "agent that cannot start anything", "Its spool cannot be written, or it cannot make processes.",
          "df -h {root}; df -i {root}; findmnt -T {root}   # on {node}"),
    # ----- waiting and running jobs
    Cause("HD-500", _H, "no such job", "It was never submitted here, is no longer kept, or is hidden from you.",
          "hacct --user=$USER"),
    Cause("HD-501", _H, "held job", "It waits until it is released.",
          "hctl release {job}"),
    Cause("HD-502", _H, "dependency that can never be satisfied", "The other job did not end as this one needs.",
          "hctl update {job} dependency=   # or: hcancel {job}"),
    Cause("HD-503", _I, "job behind a limit", "Other jobs of its user, account or QOS must end first.",
          "hctl show account; hctl show qos; hwhy {job}"),
    Cause("HD-504", _H, "job whose nodes are not available", "They are down or drained.",
          "hwhy {job}; hinfo -N"),
    Cause("HD-505", _I, "job that waits for resources", "Its turn comes.",
          "hwhy {job}"),
    Cause("HD-506", _I, "job that waits for its time or another job", "It is as it was asked for.",
          "hwhy {job}"),
    Cause("HD-507", _H, "partition that starts no jobs", "An admin closed it.",
          "hctl show partition {partition}   # then set state in hpcsched.toml, or: hctl update {job} partition=NAME"),
    Cause("HD-508", _M, "job that waits for a reservation", "Its reservation has not begun or is gone, or its time limit reaches into another.",
          "hinfo -T; hctl update {job} timelimit=TIME"),
    Cause("HD-509", _M, "account or QOS that the job may not use", "It is never started with it.",
          "hctl show account; hctl update {job} account=NAME"),
    Cause("HD-510", _H, "job whose node does not answer", "It may still run there. It is requeued on proof only.",
          "hpcsched doctor {node}   # if the machine is off for certain: hctl fence {node}"),
    Cause("HD-511", _M, "suspended job", "A user or a preemptor took its CPUs.",
          "hctl resume {job}"),
    Cause("HD-512", _M, "job that does not finish ending", "Its processes wait in the kernel, or its node does not answer.",
          "hpcsched doctor {node}"),
    Cause("HD-513", _M, "job close to its time limit", "It is killed at the limit.",
          "hctl update {job} timelimit=+1:00:00"),
    # ----- jobs that failed
    Cause("HD-520", _H, "time limit reached", "The job needed more time than --time.",
          "hacct --eff {job}; hsub --time=TIME SCRIPT"),
    Cause("HD-521", _H, "more memory than the job was given", "The kernel killed it.",
          "hacct --eff {job}; hsub --mem=SIZE SCRIPT"),
    Cause("HD-522", _H, "program killed by SIGKILL", "Usually memory ran out, or somebody killed it.",
          "hacct --eff {job}; dmesg | grep -i oom   # on {node}"),
    Cause("HD-523", _H, "program that crashed", "It used memory that is not its own, or gave up.",
          "hlogs --err {job}"),
    Cause("HD-524", _H, "program built for another processor", "The node's CPU lacks an instruction that it uses.",
          "lscpu   # on {node}, and where it was built; hsub --exclude={node} SCRIPT"),
    Cause("HD-530", _H, "working directory that is not on the node", "The job's directory must exist on its nodes.",
          "hsub --chdir=DIR SCRIPT   # a directory of the share; or on {node}: mkdir -p {path}"),
    Cause("HD-531", _H, "user without an account on the node", "Jobs run as their user, who must exist there.",
          "useradd -m -u {uid} {user}   # on {node}"),
    Cause("HD-532", _H, "output file that cannot be opened", "The job's user may not write there, or the directory is missing.",
          "hsub --output=FILE SCRIPT; ls -ld {folder}"),
    Cause("HD-533", _H, "node whose spool cannot be written", "Nothing starts there.",
          "hpcsched doctor {node}"),
    Cause("HD-534", _H, "interpreter that is not on the node", "The first line of the script names a program that the node lacks.",
          "ls -l {path}   # on {node}; or correct the first line of the script"),
    Cause("HD-535", _H, "script with a Windows line end or a missing interpreter in its first line", "The kernel does not find the program that the line names.",
          "head -1 {script} | cat -A   # ^M$ is a Windows line end; then: sed -i 's/\\r$//' {script}"),
    Cause("HD-536", _H, "command that was not found", "PATH of the job does not have it. A job has the environment of hsub.",
          "command -v {program}; echo $PATH   # on {node}; use its full path, or set PATH before hsub"),
    Cause("HD-537", _H, "command that could not be executed", "It is not executable, or not a program.",
          "chmod +x {program}"),
    Cause("HD-538", _H, "full file system of the output", "The end of the output is lost.",
          "df -h {folder}"),
    Cause("HD-539", _H, "node that was lost while the job ran", "The job was not requeued.",
          "hpcsched doctor {node}; hctl requeue {job}   # and --requeue at submission"),
    Cause("HD-540", _I, "cancelled job", "A user, or its deadline or preemptor, ended it.",
          "hctl story {job}"),
    Cause("HD-541", _M, "job that could not be started", "No node could start it.",
          "hctl story {job}"),
    Cause("HD-542", _H, "program that failed", "Its exit code is not 0. Its output says more.",
          "hlogs --err {job}"),
    Cause("HD-543", _H, "account that may not run jobs on the node", "The node's policy, or its agent's account, forbids it.",
          "hctl show node {node}; cat /etc/hpcsched/node.json   # on {node}"),
    # ----- known errors in the output
    Cause("HD-601", _H, "Python module that is missing", "The Python of the job does not have it.",
          "python3 -m pip install {name}   # into the Python of the job; or activate its environment before hsub"),
    Cause("HD-602", _H, "shared library that is missing", "The node lacks it, or LD_LIBRARY_PATH of the job does not name it.",
          "ldconfig -p | grep {name}   # on {node}; hsub --export=ALL,LD_LIBRARY_PATH=DIR SCRIPT"),
    Cause("HD-603", _H, "environment modules that are not set up", "The shell of the job has no module command.",
          "sed -i '2i source /etc/profile.d/modules.sh' {script}"),
    Cause("HD-604", _H, "GPU memory that is used up", "The model and batch are larger than the GPU.",
          "nvidia-smi   # on {node}; then a smaller batch, or more GPUs: hsub --gres=gpu:2 SCRIPT"),
    Cause("HD-605", _H, "ranks that lost each other", "One rank ended or hung; the others waited.",
          "hlogs {job}; hpcsched doctor {node}"),
    Cause("HD-606", _H, "port that is in use", "Another program on the node has it.",
          "ss -tlnp   # on {node}; use MASTER_PORT of the job, not a fixed port"),
    Cause("HD-607", _H, "full disk", "A file system of the job was full.",
          "df -h; df -i   # on {node}"),
    Cause("HD-608", _H, "quota that is used up", "The user may not write more.",
          "quota -s   # on {node}"),
    Cause("HD-609", _H, "permission that is missing", "The job's user may not do this.",
          "ls -ld {path}; id {user}   # on {node}"),
    Cause("HD-610", _H, "program built for a newer system", "The C library of the node is older.",
          "ldd --version   # on {node}; build it there, or: hsub --exclude={node} SCRIPT"),
    Cause("HD-611", _H, "too many open files", "The job has reached its limit.",
          "hsub --wrap 'ulimit -n'; hsub --propagate=NONE SCRIPT"),
    Cause("HD-612", _H, "GPU that cannot be used", "The driver is missing or does not fit, or the job asked for no GPU.",
          "nvidia-smi   # on {node}; hsub --gres=gpu:1 SCRIPT"),
    Cause("HD-613", _H, "memory that a program could not get", "It reached a limit before the kernel killed it.",
          "hacct --eff {job}; hsub --mem=SIZE SCRIPT"),
    Cause("HD-614", _H, "file that is missing", "The path does not exist on the node.",
          "ls -ld {path}   # on {node}; use a path of the share"),
    Cause("HD-615", _H, "MPI without enough slots", "mpirun wants more ranks than the job has tasks.",
          "hsub --ntasks=N SCRIPT   # as many as mpirun -n"),
    Cause("HD-616", _H, "conda that is not set up", "The shell of the job does not know conda activate.",
          "sed -i '2i eval \"$(conda shell.bash hook)\"' {script}"),
)}
# fmt: on


class Diagnosis(NamedTuple):
    """A cause that the facts show, of what, and how to remove it."""

    rule: Cause
    at: str
    detail: str
    fix: str

    def as_json(self) -> dict[str, object]:
        """Return the finding as an object of the command's JSON."""
        return finding_json(*self)


@dataclass(slots=True)
class Walk:
    """A walk down the tree: its steps, its findings, and what could not be checked."""

    steps: list[tuple[str, str]] = field(default_factory=list)  # name, and what is well
    findings: list[Diagnosis] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)

    def well(self, name: str, text: str) -> None:
        """Note a step without a fault."""
        self.steps.append((name, text[:MAX_DETAIL]))

    def found(self, cause_id: str, at: str, detail: str, **words: object) -> None:
        """Note a cause, once for each object."""
        finding = _found(cause_id, at, detail, words)
        if not any(one.rule is finding.rule and one.at == finding.at for one in self.findings):
            self.findings.append(finding)

    def has(self, *causes: str) -> bool:
        """Return whether one of these causes was found."""
        return any(one.rule.id in causes for one in self.findings)


def table_text() -> str:
    """Return the list of causes, as the man page has it."""
    rows = [("ID", "SEVERITY", "CAUSE"), *((one.id, one.severity.value, one.title) for one in CAUSES.values())]
    return "".join(f"{row[0]:8}{row[1]:10}{row[2]}\n" for row in rows)


def _found(cause_id: str, at: str, detail: str, words: Mapping[str, object]) -> Diagnosis:
    cause = CAUSES[cause_id]
    given: dict[str, object] = {"node": at, "job": at, "path": at, **words}

    def word(match: re.Match[str]) -> str:
        value = given.get(match[1], "")
        text = str(match[1].upper() if value in ("", None) else value)[:1000]
        # A line end would end a comment, and what follows would be run.
        return shlex.quote("".join(char if char.isprintable() else "?" for char in text))

    return Diagnosis(cause, at, detail[:MAX_DETAIL], re.sub(r"\{(\w+)\}", word, cause.fix))


def _get(facts: Facts, name: str) -> Fact:
    return facts.get(name, UNKNOWN)


def _number(of: Any, name: str) -> float | None:
    """Return a number that another machine sent; None if it is not one."""
    value = of.get(name) if isinstance(of, Mapping) else None
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18
    return float(value) if is_number and value is not None else None


def _text(of: Any, name: str) -> str:
    """Return a text that another machine sent; "" if it is not one."""
    value = of.get(name) if isinstance(of, Mapping) else None
    return value[:2000] if isinstance(value, str) else ""


def _rows(of: Any, name: str) -> list[Any]:
    """Return a list that another machine sent; [] if it is not one."""
    value = of.get(name) if isinstance(of, Mapping) else None
    return list(value[:1000]) if isinstance(value, list | tuple) else []


# ----- the cluster, as seen from here

MIN_FREE_MIB = 64
LATE_S, MOST_S = 900.0, 1e11  # a backup takes time; times of another machine are bounded
MIN_FREE_INODES = 200
CLOCK_SET_S = 1_735_689_600  # 2025: a clock before that was never set
CLOCK_BACK_S = 60.0
SLOW_ANSWER_S = 2.0


def of_cluster(facts: Facts, now_s: float) -> Walk:
    """Walk down the tree of a cluster."""
    walk = Walk()
    if "gateway" in facts:
        _gateway(facts["gateway"], walk)
        if not walk.findings:
            _nodes(facts, walk, now_s)
        return walk
    if not _config(facts, walk):
        return walk
    _state(facts, walk)
    _controller(facts, walk)
    _clock(facts, walk, now_s)
    _keys(facts, walk)
    _share(facts, walk)
    if not walk.has("HD-204", "HD-215"):
        _names(facts, walk)
        _nodes(facts, walk, now_s)
    return walk


_GATEWAY_ERRORS = (  # the class of the error, a part of its text, the cause
    ("ConfigError", "cannot trust the gateway", "HD-105"),
    ("ConfigError", "token", "HD-106"),
    ("ConfigError", "", "HD-101"),
    ("UnauthenticatedError", "", "HD-106"),
    ("gaierror", "", "HD-102"),
    ("ConnectionRefusedError", "", "HD-103"),
    ("TimeoutError", "", "HD-104"),
    ("OSError", "", "HD-104"),
    ("UnavailableError", "and not from a gateway of hpcsched", "HD-107"),
    ("UnavailableError", "cannot speak TLS", "HD-107"),
    ("ProtocolError", "", "HD-107"),
    ("BrokenConnectionError", "no answer", "HD-104"),
    ("BrokenConnectionError", "", "HD-107"),
    ("UnavailableError", "", "HD-108"),
)


def _gateway(fact: Fact, walk: Walk) -> None:
    where = {"host": fact.parts.get("host", ""), "port": fact.parts.get("port", "")}
    at = str(fact.parts.get("address") or "HPCSCHED_URL")
    if fact.is_late:
        cause = "HD-302" if fact.parts.get("stage") == "name" else "HD-104"
        walk.found(cause, at, "no answer in time", **where)
    elif fact.kind:
        known = (cause for kind, part, cause in _GATEWAY_ERRORS if fact.kind == kind and part in fact.error)
        walk.found(next(known, "HD-108"), at, fact.error, **where)
    else:
        walk.well("gateway", f"{at} answers as {fact.value.get('user', '?')}")


def _config(facts: Facts, walk: Walk) -> bool:
    """Judge the configuration; return whether anything below it can be judged."""
    fact = _get(facts, "config")
    path = str(fact.parts.get("path") or "hpcsched.toml")
    if fact.is_late:
        walk.found("HD-204", path, "no answer in time", path=path.rpartition("/")[0])
    elif fact.kind == "NoConfiguration":
        walk.found("HD-201", path, "it does not exist")
    elif fact.kind == "PermissionError":
        walk.found("HD-202", path, fact.error)
    elif fact.kind:
        walk.found("HD-203", path, fact.error)
        return True  # the controller may run with what it read before
    else:
        walk.well("configuration", path)
        return True
    return False


def _state(facts: Facts, walk: Walk) -> None:
    """Judge the state directory and the database."""
    state = _get(facts, "state")
    path = str(state.parts.get("path", "state directory"))
    if state.is_late:
        walk.found("HD-215", path, "no answer in time")
    elif state.kind == "FileNotFoundError":
        walk.found("HD-210", path, "it does not exist")
    elif state.kind == "PermissionError":
        walk.unseen.append(f"{path}: only the controller's account may look at it")
    elif state.is_known:
        found = state.value
        if found["uid"] not in found["owners"]:
            walk.found("HD-211", path, f"it belongs to uid {found['uid']}", owner=found["owners"][0])
        if found["read_only"]:
            walk.found("HD-212", path, "it is mounted read-only", mount=found["mount"])
        elif found["free_mib"] < MIN_FREE_MIB:
            walk.found("HD-213", path, f"{found['free_mib']} MiB are free", mount=found["mount"])
        elif found["inodes"] and found["inodes_free"] < MIN_FREE_INODES:
            walk.found("HD-214", path, f"{found['inodes_free']} inodes are free", mount=found["mount"])
        else:
            walk.well("state", f"{path}: {found['free_mib']} MiB free")
    if not walk.has("HD-210", "HD-215"):
        _database(_get(facts, "database"), walk)


def _database(fact: Fact, walk: Walk) -> None:
    path = str(fact.parts.get("path", "database"))
    if fact.is_late:
        walk.found("HD-215", path, "no answer in time")
    elif fact.kind == "FileNotFoundError":
        walk.found("HD-220", path, "it does not exist")
    elif fact.kind == "PermissionError" or not fact.parts:
        pass  # the state directory says it
    elif fact.kind == "DatabaseError":
        walk.found("HD-221", path, fact.error)
    elif fact.kind:
        walk.unseen.append(f"{path}: {fact.error}")
    elif fact.value.get("is_empty"):
        walk.found("HD-220", path, "it is empty")
    elif fact.value.get("unusable"):
        walk.found("HD-222", path, fact.value["unusable"])
    elif fact.value.get("damage"):
        walk.found("HD-221", path, "; ".join(fact.value["damage"]))
    elif fact.value.get("own_id") and fact.value.get("id") and fact.value["own_id"] != fact.value["id"]:
        walk.found("HD-223", path, f"it is of {fact.value['id']}, and cluster-id says {fact.value['own_id']}")
    else:
        walk.well("database", "whole" if fact.value.get("is_checked") else "readable; hhealth checks all of it")


_BROKEN_STATE = (
    "HD-203", "HD-210", "HD-211", "HD-212", "HD-213", "HD-214", "HD-215", "HD-220", "HD-221", "HD-222", "HD-223",
)  # fmt: skip
_NO_CONTROLLER = ("HD-230", "HD-231", "HD-232", "HD-233", "HD-234", "HD-235", *_BROKEN_STATE)


def _controller(facts: Facts, walk: Walk) -> None:
    fact = _get(facts, "controller")
    socket = str(fact.parts.get("socket", "socket"))
    folder = socket.rpartition("/")[0]
    pid = fact.parts.get("pid", 0)
    if not fact.kind and not fact.is_late:
        answer = fact.value
        walk.well("controller", f"process {pid} answers in {1000 * answer['took_s']:.0f} ms")
        if _text(answer, "hpcsched") != answer["own_version"]:
            walk.found("HD-236", "controller", f"it is {_text(answer, 'hpcsched')}, this is {answer['own_version']}")
        for note in _rows(answer, "not_taken"):
            walk.found("HD-237", "controller", str(note))
        for note in _rows(answer, "scripts"):
            walk.found("HD-238", "controller", str(note))
        _backups(answer, walk)
    elif fact.kind == "NoControllerError":
        _absent(facts, walk, socket)
    elif fact.kind == "PermissionError":
        walk.found("HD-234", socket, fact.error, path=folder)
    elif fact.kind == "Foreign":
        walk.found("HD-235", socket, fact.error, path=folder)
    elif fact.parts.get("process") in ("T", "t"):
        walk.found("HD-231", "controller", f"process {pid} is stopped (state {fact.parts['process']})", pid=pid)
    elif fact.kind == "NotAsked":
        pass
    else:
        state = {"D": "it waits for a disk (state D)", "Z": "it is a zombie"}.get(str(fact.parts.get("process")), "")
        walk.found("HD-232", "controller", state or fact.error or f"process {pid} did not answer in time", pid=pid)


def _backups(answer: Mapping[str, Any], walk: Walk) -> None:
    """Judge the scheduled backups; without a schedule there is nothing to judge."""
    backup = answer.get("backup")
    if not isinstance(backup, Mapping):
        return
    newest_s, every_s, now_s, started_s = (
        float(value) if isinstance(value, int | float) and 0 <= value < MOST_S else 0.0
        for value in (backup.get("newest_at_s"), backup.get("every_s"), answer.get("now_s"), answer.get("started_at_s"))
    )
    where, why = [str(path) for path in _rows(backup, "to")] or ["?"], _text(backup, "why")
    at = next((path for path in where if f"{path}:" in why), where[0])
    if why:
        walk.found("HD-257" if "there is no such directory" in why else "HD-258", at, why, path=at)
    elif newest_s and now_s - newest_s > LATE_S + 2 * every_s:
        walk.found("HD-256", ", ".join(where), f"the newest one is {(now_s - newest_s) / 3600:.0f} hours old")
    elif not newest_s and now_s - started_s > LATE_S:
        walk.found("HD-255", ", ".join(where), f"every {every_s / 3600:g} hours, says the configuration")
    elif newest_s:
        walk.well("backups", f"the newest one is {max(0.0, now_s - newest_s) / 3600:.0f} hours old")


def _absent(facts: Facts, walk: Walk, socket: str) -> None:
    """Judge a controller that does not listen."""
    holder = _get(facts, "holder")
    if holder.is_known and holder.value:
        walk.found("HD-233", socket, f"process {holder.value} holds the state directory", pid=holder.value)
    elif hidden := str(_get(facts, "config").parts.get("hidden", "")):
        walk.found("HD-205", socket, f"{hidden} is the configuration of this machine")
    elif not walk.has(*_BROKEN_STATE):
        log = _get(facts, "log")
        last = f"; its log ends: {log.value}" if log.is_known and log.value else ""
        walk.found("HD-230", "controller", f"nothing listens at {socket}{last}")


def _clock(facts: Facts, walk: Walk, now_s: float) -> None:
    last = _get(facts, "last_change")
    if now_s < CLOCK_SET_S:
        walk.found("HD-240", "the head", "it was never set")
    elif last.is_known and last.value and last.value - now_s > CLOCK_BACK_S:
        walk.found("HD-240", "the head", f"it is {last.value - now_s:.0f} s behind the last change of the database")


def _keys(facts: Facts, walk: Walk) -> None:
    fact = _get(facts, "key")
    if fact.kind in ("NotAsked", "PermissionError") or fact.is_late:
        return
    path = str(fact.parts.get("path", ""))
    if fact.kind:
        walk.found("HD-241", path, "it does not exist")
    elif fact.value["mode"] & 0o077 or fact.value["uid"] not in fact.value["owners"]:
        detail = f"its mode is {fact.value['mode'] & 0o777:04o}, and it belongs to uid {fact.value['uid']}"
        walk.found("HD-242", path, detail, owner=fact.value["owners"][0])
    else:
        walk.well("launch key", path)


def _share(facts: Facts, walk: Walk) -> None:
    fact = _get(facts, "share")
    path = str(fact.parts.get("path", ""))
    if fact.is_late:
        walk.found("HD-250", path, "no answer in time")
    elif fact.kind == "NotAsked":
        return
    elif fact.kind == "FileNotFoundError":
        walk.found("HD-251", path, "it does not exist")
    elif fact.kind:
        walk.found("HD-252", path, fact.error)
    elif fact.value["free_mib"] < MIN_FREE_MIB:
        walk.found("HD-253", path, f"{fact.value['free_mib']} MiB are free")
    elif fact.value["problem"]:
        walk.found("HD-252", path, fact.value["problem"])
    else:
        walk.well("share", f"{path}: {fact.value['free_mib']} MiB free")


def _names(facts: Facts, walk: Walk) -> None:
    fact = _get(facts, "names")
    if fact.is_late:
        walk.found("HD-302", str(fact.parts.get("stage", "name service")), "no answer in time")
    elif fact.is_known:
        for node, (host, why) in fact.value.items():
            if why:
                walk.found("HD-301", node, f"{host}: {why}", host=host, path=f"nodes.d/{node}.toml")


def _nodes(facts: Facts, walk: Walk, now_s: float) -> None:
    config, fact = _get(facts, "config"), _get(facts, "nodes")
    if config.is_known and config.value and not config.value["nodes"]:
        walk.found("HD-260", "cluster", "nodes.d is empty")
        return
    if not fact.is_known:
        if fact.kind != "NotAsked" and not walk.has(*_NO_CONTROLLER):
            walk.unseen.append(f"nodes: {fact.error or 'the controller did not answer in time'}")
        return
    for view in fact.value[:2000]:
        _view(view, facts, walk, now_s)
    _same_mpi(fact.value, walk)


def _view(view: Mapping[str, Any], facts: Facts, walk: Walk, now_s: float) -> None:
    """Judge a node as the controller sees it."""
    name, before = _text(view, "name"), len(walk.findings)
    if _is_off(view):
        walk.well(
            f"node {name}", f"{_text(view, 'state')}: switched off by {_text(view, 'power_by')}, and on again for a job"
        )
    elif _text(view, "link") == "down" and not walk.has("HD-302"):
        if not any(one.at == name for one in walk.findings):
            _link_error(_text(view, "link_why"), name, _place(view), walk, or_else="HD-261")
    elif _text(view, "link") == "up":
        _node(view, view.get("facts"), facts, walk)
        if view.get("facts_error"):
            walk.found("HD-322", name, _text(view, "facts_error"))
    _drained(view, name, walk)
    if len(walk.findings) == before and _text(view, "link") == "up":
        walk.well(f"node {name}", f"{_text(view, 'state').lower()}, agent {_text(view, 'agent_version')}")


def _drained(view: Mapping[str, Any], name: str, walk: Walk) -> None:
    """Name a drain, by a check (`hhealth`, `hpcschedd`, `hpcschedd/links` ...) or by a person."""
    if view.get("drained"):
        by = _text(view, "drained_by")
        walk.found("HD-263" if by in CHECKS else "HD-262", name, f"by {by}: {_text(view, 'drained_why')}")


def _is_off(view: Mapping[str, Any]) -> bool:
    """Return whether the controller has switched the node off to save power."""
    return _text(view, "power") not in ("", "on") and _text(view, "link") != "up"


def _place(view: Mapping[str, Any]) -> dict[str, object]:
    """Return the words of remedies that name a node's address."""
    host, user = _text(view, "host"), _text(view, "user") or "USER"
    return {
        "host": host,
        "address": host,
        "port": view.get("port") or 22,
        "user": user,
        "login": f"{user}@{host}",
        "path": f"nodes.d/{_text(view, 'name')}.toml",
        "root": _text(view, "root") or "~/.local/state/hpcsched-node",
    }


# ----- the way to a node

# What `hpcsched.launch` says about a connection that failed, and the cause. The first that fits counts.
_LINK_ERRORS = tuple((re.compile(pattern, re.DOTALL), cause) for pattern, cause in (
    (r"cannot find the database", "HD-220"),
    (r"cannot (?:open|read|use) the database", "HD-221"),
    (r"cannot find host", "HD-301"),
    (r"cannot reach \S+ from ", "HD-313"),
    (r"Connection refused", "HD-303"),
    (r"No route to host|[Nn]etwork is unreachable|Invalid argument", "HD-305"),
    (r"no answer within .* while (?:connecting|going on)|cannot reach .*: (?:no answer within|Connection timed out)", "HD-304"),
    (r"no answer within .* while logging in|Error reading SSH protocol banner|[Nn]o existing session", "HD-306"),
    (r"[Ii]nvalid SSH banner|Incompatible version|Banner", "HD-307"),
    (r"no answer within .* while starting Python", "HD-316"),
    (r"no answer within .* while (?:copying|looking)", "HD-322"),
    (r"no answer within .* while waiting for the agent", "HD-322"),
    (r"host key has changed|no longer has a host key of type|cannot trust .* shows the host key", "HD-308"),
    (r"others may read it|none, for there is none|damaged, or encrypted|\(No such file", "HD-310"),
    (r"refused every key", "HD-309"),
    (r"takes no public keys|after the key it also wants", "HD-311"),
    (r"ProxyCommand|Match exec|cannot follow ProxyJump|cannot (?:read|trust) \S*ssh\S*config", "HD-312"),
    (r"account is currently not available|nologin|may not log in|status 1: *This account", "HD-314"),
    (r"printed \d+ bytes and ran no command", "HD-315"),
    (r"status 12[67]", "HD-317"),
    (r"needs 3\.9 or newer", "HD-318"),
    (r"No space left on device|Disk quota exceeded|cannot keep hpcnode\.pyz.*Errno (?:28|122)", "HD-319"),
    (r"cannot use /\S*: .*(?:belongs to uid|others may write)", "HD-321"),
    (r"cannot keep hpcnode\.pyz|Read-only file system|Permission denied: '/", "HD-320"),
    (r"not in bundles of|root in /etc/hpcsched/node\.json|cannot trust /etc/hpcsched/node\.json", "HD-324"),
    (r"is in the past|this is node \S+ of cluster|speaks protocol|says that it is", "HD-323"),
    (r"cannot speak SSH", "HD-307"),
))  # fmt: skip


def _link_error(why: str, node: str, words: Mapping[str, object], walk: Walk, or_else: str) -> None:
    """Judge the text of a failed connection."""
    cause = next((cause for pattern, cause in _LINK_ERRORS if pattern.search(why)), or_else)
    if cause == "HD-310" and (path := re.search(r"tried (\S+) \(", why)):
        words = {**words, "path": path[1]}
    walk.found(cause, node, why, **words)


def of_node(facts: Facts, now_s: float) -> Walk:
    """Walk down the way to one node, and then through the node."""
    walk = Walk()
    if "gateway" in facts:
        _gateway(facts["gateway"], walk)
    elif not _config(facts, walk):
        return walk
    if walk.has("HD-101", "HD-102", "HD-103", "HD-104", "HD-105", "HD-106", "HD-107", "HD-108", "HD-203"):
        return walk
    target = _get(facts, "target")
    if not target.value:
        name = str(target.parts.get("name", "NODE"))
        walk.found("HD-300", name, f"the nodes are: {target.parts.get('known', '') or 'none'}")
        return walk
    spec, name = target.value, _text(target.value, "name")
    view = _get(facts, "view").value or {}
    if _is_off(view):
        walk.found("HD-264", name, f"by {_text(view, 'power_by')}; it is {_text(view, 'state')}", node=name)
        return walk
    if _text(spec, "host") != "local" and not _way(_get(facts, "way"), name, _place(spec), walk):
        return walk
    visit = _get(facts, "visit")
    if visit.kind != "NotAsked" and not _visit(visit, name, _place(spec), walk):
        return walk
    if visit.kind == "NotAsked" and _text(view, "link") == "down":
        _link_error(_text(view, "link_why"), name, _place(spec), walk, or_else="HD-325")
        return walk
    if view.get("facts_error"):
        walk.found("HD-322", name, _text(view, "facts_error"))
        return walk
    seen = visit.parts.get("facts") or view.get("facts")
    _same_mpi(
        [{"name": "the head", "facts": {"surroundings": _get(facts, "here").value}}, {"name": name, "facts": seen}],
        walk,
    )
    before = len(walk.findings)
    _node({**spec, **view, **dict(visit.parts.get("view", {}))}, seen, facts, walk)
    if seen and len(walk.findings) == before:
        walk.well("node", f"{_text(seen, 'hostname')}: Linux {_text(seen, 'kernel')}, Python {_text(seen, 'python')}")
    _drained(view, name, walk)
    if not seen:
        walk.unseen.append(f"node {name}: its agent was not asked; only the controller's account may log in there")
    return walk


def _way(fact: Fact, node: str, words: Mapping[str, object], walk: Walk) -> bool:
    """Judge name, route, port and banner; return whether an SSH server answers."""
    parts = fact.parts
    stage, host, port = parts.get("stage"), parts.get("host", words["host"]), parts.get("port", words["port"])
    at = {**words, "host": host, "port": port, "address": parts.get("address") or host}
    if fact.kind == "NotAsked":
        return True
    if fact.is_late or fact.kind == "TimeoutError":
        cause = {"name": "HD-302", "port": "HD-304"}.get(str(stage), "HD-306")
        walk.found(cause, node, f"no answer from {host} port {port} in time", **at)
    elif fact.kind == "gaierror":
        walk.found("HD-301", node, f"{host}: {fact.error}", **at)
    elif fact.kind == "ConnectionRefusedError":
        walk.found("HD-303", node, f"{at['address']} port {port}: {fact.error}", **at)
    elif fact.kind == "ConfigError" and "Permission denied" in fact.error:
        walk.unseen.append(f"way to {node}: {fact.error}")
        return True
    elif fact.kind in ("LinkError", "ConfigError"):
        walk.found("HD-312", node, fact.error, **at)
    elif fact.kind and stage == "port":
        walk.found("HD-305", node, f"{at['address']} port {port}: {fact.error}", **at)
    elif fact.kind:
        walk.found("HD-306", node, f"{at['address']} port {port}: {fact.error}", **at)
    elif not str(fact.value).startswith("SSH-"):
        walk.found("HD-307", node, f"{at['address']} port {port} says {fact.value!r}", **at)
    else:
        walk.well("name", f"{host} is {at['address']}")
        walk.well("port", f"{port}: {fact.value}")
        return True
    return False


def _visit(fact: Fact, node: str, words: Mapping[str, object], walk: Walk) -> bool:
    """Judge a login of our own; return whether the agent answered."""
    if fact.parts.get("facts"):
        walk.well("login", f"{words['login']}: Python {_text(fact.parts['facts'], 'python')}, agent answers")
        if share_error := _text(fact.parts, "share_error"):
            walk.found("HD-406", node, share_error, share=fact.parts.get("share", ""))
        if fault := _text(fact.parts.get("view"), "fault"):
            walk.found("HD-419", node, fault, root=_text(fact.parts["facts"], "root"))
        return True
    stage = str(fact.parts.get("stage", ""))
    if fact.is_late and stage == "reading the database":
        walk.found("HD-215", "state directory", "no answer in time")
        return False
    why = f"no answer within the time while {stage}" if fact.is_late else fact.error
    _link_error(why, node, words, walk, or_else="HD-325")
    return False


# ----- a node that answers

CLOCK_OFF_S = 2.0
MEMORY_TOLERANCE = 0.98
MIN_DISK_MIB, MIN_TMP_MIB, MIN_SHM_MIB = 256, 64, 64
MAX_LOAD = 2.0  # per CPU
MIN_OPEN_FILES = 1024
ZONE_TOLERANCE_S = 60


def _node(view: Mapping[str, Any], seen: Any, facts: Facts, walk: Walk) -> None:
    """Judge a node by what its agent says, and by what the controller knows about it."""
    if not isinstance(seen, Mapping):
        return
    name = _text(view, "name")
    words = _place(view) | {"root": _text(seen, "root")}
    for judge in (_node_resources, _node_disks, _node_jobs, _node_account, _node_place):
        for cause, detail, more in judge(view, seen, facts):
            walk.found(cause, name, detail, **{**words, **more})


_Judged = Iterator[tuple[str, str, dict[str, object]]]


def _node_resources(view: Mapping[str, Any], seen: Mapping[str, Any], _facts: Facts) -> _Judged:
    asked_s, answered_s, time_s = (_number(seen, name) for name in ("asked_at_s", "answered_at_s", "time_s"))
    if asked_s is not None and answered_s is not None and time_s is not None:
        ahead_s = time_s - (asked_s + answered_s) / 2
        if abs(ahead_s) - (answered_s - asked_s) / 2 > CLOCK_OFF_S:
            yield "HD-401", f"it is {abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} the head's", {}
    lacks = []
    cpus, mem_mib = _number(seen, "cpus"), _number(seen, "mem_mib")
    if cpus is not None and cpus < (_number(view, "cpus") or 0):
        lacks.append(f"{cpus:.0f} of {view['cpus']} CPUs")
    if mem_mib is not None and mem_mib < MEMORY_TOLERANCE * (_number(view, "mem_mib") or 0):
        lacks.append(f"{mem_mib:.0f} of {view['mem_mib']} MiB memory")
    devices = sum(max(1, len(_rows(gpu, "mig"))) for gpu in _rows(seen, "gpus"))
    if devices < len(_rows(view, "gpus")):
        lacks.append(f"{devices} of {len(_rows(view, 'gpus'))} GPUs")
    if lacks:
        yield "HD-402", f"it has only {', '.join(lacks)}", {}


def _node_disks(_view: Mapping[str, Any], seen: Mapping[str, Any], _facts: Facts) -> _Judged:
    around = seen.get("surroundings")
    free_mib, tmp_mib = _number(seen, "disk_free_mib"), _number(seen, "tmp_free_mib")
    if free_mib is not None and free_mib < MIN_DISK_MIB:
        yield "HD-403", f"{free_mib:.0f} MiB are free in {_text(seen, 'root')}", {}
    inodes, free = _number(around, "inodes"), _number(around, "inodes_free")
    if inodes and free is not None and free < MIN_FREE_INODES:
        yield "HD-404", f"{free:.0f} inodes are free in {_text(seen, 'root')}", {}
    if tmp_mib is not None and tmp_mib < MIN_TMP_MIB:
        yield "HD-405", f"{tmp_mib:.0f} MiB are free in /tmp", {}
    shm_mib = _number(around, "shm_free_mib")
    if shm_mib is not None and shm_mib < MIN_SHM_MIB:
        yield "HD-417", f"{shm_mib:.0f} MiB are free in /dev/shm", {}
    for mount in _rows(around, "mounts"):
        if _text(mount, "state") in ("hung", "stale"):
            where = _text(mount, "point")
            yield "HD-407", f"{where} ({_text(mount, 'kind')}): {_text(mount, 'state')}", {"mount": where}


def _node_jobs(view: Mapping[str, Any], seen: Mapping[str, Any], _facts: Facts) -> _Judged:
    left = [each for each in _rows(seen, "leftovers") if _number(each, "pid") is not None]
    if left:
        pids = [f"{_number(each, 'pid'):.0f}" for each in left[:8]]
        yield (
            "HD-412",
            f"{len(left)} processes: {', '.join(pids)}",
            {"pids": pids[0] if len(pids) == 1 else " ".join(pids)},
        )
    load = _rows(seen, "load")
    cpus = _number(seen, "cpus") or 1.0
    if len(load) == 3 and all(isinstance(each, int | float) for each in load) and min(load[:2]) / cpus > MAX_LOAD:
        yield "HD-413", f"{load[1]:.1f} processes on {cpus:.0f} CPUs in the last 5 minutes", {}
    if failures := _number(view, "launch_failures"):
        yield "HD-415", f"{failures:.0f} in a row: {_text(view, 'launch_failure')}", {}
    if missing := [str(word)[:40] for word in _rows(view, "not_enforced")]:
        yield "HD-411", f"it lacks: {', '.join(missing)}", {}
    if (own := _text(view, "own_agent")) and (its := _text(view, "agent_version")) and not own.startswith(its):
        yield "HD-418", f"it is {its}, this is {own[:16]}", {}


def _node_account(_view: Mapping[str, Any], seen: Mapping[str, Any], facts: Facts) -> _Judged:
    here, around = _get(facts, "here").value, seen.get("surroundings")
    closed = _text(seen, "python_closed")
    if closed:
        yield "HD-414", f"{_text(seen, 'python_path')}: {closed} is closed to them", {"closed": closed}
    files = _number(around, "open_files")
    if files is not None and 0 < files < MIN_OPEN_FILES:
        yield "HD-416", f"a process may open {files:.0f} files", {}
    ours, theirs = (of.get("accounts") if isinstance(of, Mapping) else None for of in (here, around))
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for key, (user, uid) in _get(facts, "accounts").value.items() if _get(facts, "accounts").is_known else ():
            if (its := _number(theirs, key)) is not None and its != uid:
                yield "HD-408", f"{user} is {uid} here and {its:.0f} there", {"uid": uid, "user": user}
                return


def _node_place(view: Mapping[str, Any], seen: Mapping[str, Any], facts: Facts) -> _Judged:
    here, around = _get(facts, "here").value, seen.get("surroundings")
    ours, theirs = _number(here, "zone_s"), _number(around, "zone_s")
    if ours is not None and theirs is not None and abs(ours - theirs) > ZONE_TOLERANCE_S:
        zone = _text(here, "zone") or "UTC"
        yield "HD-409", f"it is {_offset(theirs)}, here it is {_offset(ours)}", {"zone": zone}
    if share_error := _text(view, "share_error"):
        yield "HD-406", share_error, {"share": _text(_get(facts, "config").value, "share")}


def _offset(zone_s: float) -> str:
    return f"UTC{'+' if zone_s >= 0 else '-'}{abs(zone_s) // 3600:02.0f}:{abs(zone_s) % 3600 // 60:02.0f}"


def _same_mpi(views: Iterable[Any], walk: Walk) -> None:
    """Judge whether machines have the same MPI.

    Those without one do not count; of two equally frequent ones the first is right.
    """
    found: dict[str, list[str]] = {}
    for view in views:
        seen = view.get("facts")
        mpi = _text(seen.get("surroundings") if isinstance(seen, Mapping) else None, "mpi")
        if mpi:
            found.setdefault(mpi, []).append(_text(view, "name"))
    if len(found) > 1:
        common = max(found, key=lambda mpi: len(found[mpi]))
        for mpi, names in found.items():
            for name in names if mpi != common else ():
                walk.found("HD-410", name, f"{mpi}; {found[common][0]} has {common}")


# ----- a job

_WAITS = {
    "JobHeldUser": "HD-501",
    "JobHeldAdmin": "HD-501",
    "DependencyNeverSatisfied": "HD-502",
    "Dependency": "HD-506",
    "BeginTime": "HD-506",
    "ReqNodeNotAvail": "HD-504",
    "Resources": "HD-505",
    "Priority": "HD-505",
    "Licenses": "HD-505",
    "PowerNotAvail": "HD-505",
    "JobArrayTaskLimit": "HD-503",
    "PartitionDown": "HD-507",
    "PartitionInactive": "HD-507",
    "Reservation": "HD-508",
    "ReservationDeleted": "HD-508",
    "InvalidAccount": "HD-509",
    "InvalidQOS": "HD-509",
    "AccountNotAllowed": "HD-509",
    "QOSNotAllowed": "HD-509",
}
_NEAR = 0.9  # of its time limit
_ENDING_S = 120.0


def of_job(facts: Facts, now_s: float) -> Walk:
    """Walk down the tree of one job."""
    fact = _get(facts, "job")
    if fact.kind in ("NotFoundError", "PermissionDeniedError", "RequestError"):
        walk = Walk()
        walk.found("HD-500", str(fact.parts.get("name", "JOB")), fact.error)
        return walk
    if not fact.is_known:  # it cannot be asked: that is the cluster's fault
        walk = of_cluster(facts, now_s)
        walk.unseen.append(f"job: {fact.error or 'the controller did not answer in time'}")
        return walk
    walk, job = Walk(), fact.value
    words = _job_words(job)
    name = str(words["job"])
    state = _text(job, "state")
    walk.well("job", f"{name} is {state}")
    if state == "PENDING":
        _waiting(job, _get(facts, "why"), walk, words)
    elif state in ("CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING"):
        _running(job, facts, walk, words, now_s)
    elif state != "COMPLETED":
        _ended(job, _get(facts, "errors"), walk, words)
    return walk


def _job_words(job: Mapping[str, Any]) -> dict[str, object]:
    """Return the words of remedies for a job."""
    nodes = [str(node) for node in _rows(job, "nodes")]
    outputs = _text(job, "stderr") or _text(job, "stdout")
    return {
        "job": _text(job, "display_id"),
        "node": nodes[0] if nodes else "NODE",
        "user": _text(job, "user"),
        "uid": job.get("uid", ""),
        "script": _text(job, "command").split(" ")[0] or "SCRIPT",
        "folder": outputs.rpartition("/")[0] or ".",
        "partition": _text(job, "partition"),
        "path": _text(job, "work_dir") or "PATH",
    }


def _waiting(job: Mapping[str, Any], why: Fact, walk: Walk, words: Mapping[str, object]) -> None:
    reason = _text(job, "reason")
    lines = [str(line) for line in _rows(why.value, "lines")] if why.is_known else []
    text = "; ".join(lines[:5]) or _text(why.value, "text") or _text(job, "reason_detail") or reason
    cause = _WAITS.get(reason, "HD-503" if reason.startswith(("Assoc", "QOS")) else "HD-505")
    if "could not be started" in text and (known := _refusal(text, walk, words)):
        cause = known
    if not walk.has(cause):
        walk.found(cause, str(words["job"]), text, **words)


def _running(job: Mapping[str, Any], facts: Facts, walk: Walk, words: dict[str, object], now_s: float) -> None:
    name, state = str(words["job"]), _text(job, "state")
    views = _get(facts, "nodes").value or []
    mine = [view for view in views if _text(view, "name") in _rows(job, "nodes")]
    down = [_text(view, "name") for view in mine if _text(view, "link") == "down" and not _is_off(view)]
    ended_s, started_s, limit_s = (_number(job, key) for key in ("ended_at_s", "started_at_s", "time_limit_s"))
    if down:
        walk.found("HD-510", name, f"{', '.join(down)}: {_text(mine[0], 'link_why')}", **words | {"node": down[0]})
    elif state == "SUSPENDED":
        walk.found("HD-511", name, _text(job, "reason_detail") or "it is suspended", **words)
    elif state == "COMPLETING" and ended_s and now_s - ended_s > _ENDING_S:
        walk.found("HD-512", name, f"for {now_s - ended_s:.0f} s", **words)
    elif started_s and limit_s and state == "RUNNING" and now_s - started_s > _NEAR * limit_s:
        walk.found("HD-513", name, f"{now_s - started_s:.0f} of {limit_s:.0f} s are over", **words)
    for view in mine:
        _node(view, view.get("facts"), facts, walk)
    _known_errors(_get(facts, "errors"), walk, words, least=Severity.HIGH if state == "RUNNING" else Severity.LOW)


# What a node says if it cannot start a job, and the cause. The first that fits counts; a group is the path or the name.
_REFUSALS = tuple((re.compile(pattern, re.DOTALL), cause, word) for pattern, cause, word in (
    (r"cannot enter the job's directory (.{1,1000}?): ", "HD-530", "path"),
    (r"cannot run as (\S{1,100}): this node has no such account", "HD-531", "user"),
    (r"cannot run as (\S{1,100}): ", "HD-543", "user"),
    (r"cannot open (?:output|input) file (.{1,1000}?): ", "HD-532", "folder"),
    (r"cannot (?:write to|record [\w ]+ in) the spool (\S{1,1000})", "HD-533", "path"),
    (r"cannot execute .{1,1000}?: its interpreter [^\n]{0,400}(?:\\r|\r|\?) is not on", "HD-535", ""),
    (r"cannot execute .{1,1000}?: its interpreter (\S{1,400}) is not on this node", "HD-534", "path"),
    (r"cannot execute (\S{1,1000}): No such file", "HD-536", "program"),
    (r"cannot execute (\S{1,1000}): (?:Permission|Exec format)", "HD-537", "program"),
    (r"cannot (?:prepare the task|start the step|start a shepherd)[^\n]*No space left", "HD-533", ""),
))  # fmt: skip


def _refusal(text: str, walk: Walk, words: Mapping[str, object]) -> str:
    """Judge a reason why a job could not be started; return the cause, "" if none is known."""
    for pattern, cause, word in _REFUSALS:
        if match := pattern.search(text):
            given = dict(words)
            if word:
                given[word] = match[1].rpartition("/")[0] or "/" if word == "folder" else match[1]
            walk.found(cause, str(words["job"]), text, **given)
            return cause
    return ""


_CLOSED = re.compile(r"(\S{1,500}?)(?:: cannot execute)?: Permission denied")
_SIGNALS = {9: "HD-522", 11: "HD-523", 7: "HD-523", 6: "HD-523", 8: "HD-523", 4: "HD-524"}
_STATES = {
    "TIMEOUT": "HD-520",
    "OUT_OF_MEMORY": "HD-521",
    "NODE_FAIL": "HD-539",
    "CANCELLED": "HD-540",
    "PREEMPTED": "HD-540",
    "DEADLINE": "HD-540",
    "BOOT_FAIL": "HD-541",
}


def _ended(job: Mapping[str, Any], errors: Fact, walk: Walk, words: Mapping[str, object]) -> None:
    """Judge a job that did not complete."""
    name, state, detail = str(words["job"]), _text(job, "state"), _text(job, "reason_detail")
    code, signum = int(_number(job, "exit_code") or 0), int(_number(job, "exit_signal") or 0)
    signum = signum or (code - 128 if 128 < code < 160 else 0)
    if state in _STATES and state != "BOOT_FAIL":
        walk.found(_STATES[state], name, detail or f"it is {state}", **words)
        if state == "CANCELLED":
            return
    elif "was full when it ended" in detail:
        walk.found("HD-538", name, detail, **words)
    else:
        _refusal(detail, walk, words)
    if code == 126 and not walk.findings and (shown := re.search(_CLOSED, _last_line(errors))):
        walk.found("HD-537", name, _last_line(errors), **{**words, "program": shown[1]})
    _known_errors(errors, walk, words)
    if walk.findings:
        return
    if state == "BOOT_FAIL" or _text(job, "reason") == "JobLaunchFailure":
        walk.found("HD-541", name, detail, **words)
    elif signum in _SIGNALS:
        walk.found(_SIGNALS[signum], name, f"signal {signum}", **words)
    elif code in (126, 127):
        walk.found("HD-537" if code == 126 else "HD-536", name, f"exit code {code}", **{**words, "program": "PROGRAM"})
    else:
        detail = f"exit code {code}" + (f", signal {signum}" if signum else "")
        last = _last_line(errors)
        walk.found("HD-542", name, detail + (f"; it said last: {last}" if last else ""), **words)


# Errors of well-known programs, as they are in the output of jobs. A group is the name or path of the remedy. The first text must
# be in the line: a search for the patterns that need one takes long.
_KNOWN_ERRORS = tuple((needed, re.compile(pattern), cause, word) for needed, pattern, cause, word in (
    ("", r"\$'\\r': command not found|\^M: bad interpreter|env: '[^'\n]{1,100}\\r'", "HD-535", ""),
    ("cannot execute: required", r"(\S{1,500}): cannot execute: required file not found", "HD-535", "script"),
    ("", r"(?:ModuleNotFoundError: No module named|ImportError: No module named) '?([\w.]{1,100})", "HD-601", "name"),
    ("", r"error while loading shared libraries: (\S{1,200}):", "HD-602", "name"),
    ("", r"(?:ImportError|OSError): (lib\S{1,200}): cannot open shared object file", "HD-602", "name"),
    ("", r"\bmodule: (?:command )?not found", "HD-603", ""),
    ("", r"CUDA out of memory|CUDA error: out of memory|OutOfMemoryError: CUDA", "HD-604", ""),
    ("", r"Watchdog caught collective operation timeout|NCCL error|ncclSystemError|ncclRemoteError", "HD-605", ""),
    ("", r"[Aa]ddress already in use|EADDRINUSE", "HD-606", ""),
    ("", r"version [`']GLIBC(?:XX)?_[\d.]{1,20}' not found", "HD-610", ""),
    ("", r"Disk quota exceeded", "HD-608", ""),
    ("", r"No space left on device", "HD-607", ""),
    ("", r"Too many open files", "HD-611", ""),
    ("", r"CUDA driver version is insufficient|no CUDA-capable device|NVIDIA-SMI has failed|Found no NVIDIA driver|"
     r"CUDA is not available|invalid device ordinal", "HD-612", ""),
    ("", r"MemoryError|[Cc]annot allocate memory|std::bad_alloc|oom-kill", "HD-613", ""),
    ("", r"not enough slots available", "HD-615", ""),
    ("", r"CondaError: Run 'conda init'|CommandNotFoundError: Your shell has not been properly configured", "HD-616", ""),
    ("", r"Illegal instruction", "HD-524", ""),
    ("Permission denied", r"(\S{1,500}): cannot execute: Permission denied", "HD-537", "program"),
    ("", r"Exec format error|cannot execute binary file", "HD-537", "program"),
    ("command not found", r"(\S{1,200}): command not found", "HD-536", "program"),
    (": not found", r"\b(\S{1,200}): not found$", "HD-536", "program"),
    ("Permission denied", r"([^\s:'\"]{1,500}): Permission denied", "HD-609", "path"),
    ("Permission denied", r"Permission denied: '([^'\n]{1,500})'", "HD-609", "path"),
    ("", r"Permission denied", "HD-609", ""),
    ("No such file or directory", r"No such file or directory: '([^'\n]{1,500})'", "HD-614", "path"),
    ("No such file or directory", r"([^\s:'\"]{1,500})'?: No such file or directory", "HD-614", "path"),
))  # fmt: skip
MAX_ERRORS = 64 << 10


def _known_errors(errors: Fact, walk: Walk, words: Mapping[str, object], least: Severity = Severity.INFO) -> None:
    """Judge the end of a job's output: the last known error in it is the cause."""
    if not errors.is_known or not isinstance(errors.value, str):
        return
    for line in reversed(errors.value[-MAX_ERRORS:].splitlines()):
        line = line[:2000]
        for needed, pattern, cause, word in _KNOWN_ERRORS:
            if needed in line and (match := pattern.search(line)):
                given = dict(words)
                if word and match.lastindex:
                    given[word] = match[1]
                walk.found(cause, str(words["job"]), line.strip(), **given)
                return


def _last_line(errors: Fact) -> str:
    lines = (
        [line.strip() for line in str(errors.value or "")[-MAX_ERRORS:].splitlines() if line.strip()]
        if errors.is_known
        else []
    )
    return lines[-1][:200] if lines else ""


JUDGES: Mapping[str, Callable[[Facts, float], Walk]] = {"cluster": of_cluster, "node": of_node, "job": of_job}
