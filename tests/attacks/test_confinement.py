"""What a job can reach beside its allocation: cpus, memory, processes, GPUs, /tmp, /dev/shm and other users' processes.

The agent is real and runs as root; the jobs are those of an unprivileged account. As a plain user nothing of this can be
enforced, and the agent must say so. There is no GPU here: other character devices are configured as GPUs.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import textwrap
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from agent_client import AS_ROOT, INCARNATION, Controller, NodeUnderTest, launch_of, new_token, running_node
from waiting import wait_until

from hpcnode.os import cgroup, mounts, process
from hpcnode.os.loop import Loop
from hpcnode.shepherd import confinement
from hpcnode.wire import protocol
from tests.attacks.siege import SYSTEM_PYTHON

EVERYTHING = ["cpus", "processes", "gpus", "shm", "tmp", "proc"]
ACCOUNT = "nobody" if AS_ROOT else ""


def _can(word: str) -> bool:
    if not AS_ROOT:
        return False
    folder = Path(tempfile.mkdtemp(prefix="hpcsched-survey-"))
    ground = confinement.survey(str(folder), "survey", "boot")
    folder.rmdir()
    return dict((name, can) for name, can, _ in confinement.abilities(ground)).get(word, False)


def needs(word: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not _can(word), reason=f"this machine, or this account, cannot enforce {word}")


@pytest.fixture
def node(place: Path) -> Iterator[NodeUnderTest]:
    with running_node(place / "node") as node:
        yield node


def share(**fields: object) -> protocol.Confinement:
    return protocol.changed(protocol.Confinement(words=list(EVERYTHING), cpus=1, max_processes=200), **fields)


def run(node: NodeUnderTest, work: Path, script: str, **fields: object) -> protocol.Report:
    """Run a script as an unprivileged user, and return its end."""
    controller = Controller(node)
    fields = {"confine": share(), "work_dir": str(work), "user": ACCOUNT, "stdout": "out", **fields}
    return controller.final(controller.launch(script, **fields))


def said(work: Path) -> str:
    return (work / "out").read_text()


LOCK = """import fcntl, os, sys
for path in sys.argv[1:]:
    fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not AS_ROOT, reason="needs to run as root: it acts as another account")
def test_e4_a_user_who_locks_the_directories_of_groups_delays_no_job(node: NodeUnderTest, work: Path) -> None:
    """Whoever may open a file, even to read it, can lock it: flock(2)."""
    roots = confinement.survey(str(node.root), "n1", _boot_id(node)).tree.roots()
    above = {str(Path(root).parents[1]) for root in roots}
    words = [SYSTEM_PYTHON, "-I", "-c", LOCK, *above]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, user=65534, group=65534, extra_groups=[], stdin=pipe, stdout=pipe) as hostile:
        assert hostile.stdout is not None
        assert hostile.stdout.readline() == b"locked\n"
        assert run(node, work, "echo ran").codes == [0]


def _make_job(tree: cgroup.Tree) -> None:
    limits = cgroup.JobLimits(processes=9)
    cgroup.make_job(tree, "9", cgroup.controllers_for(tree, limits), limits)


def _come_and_go(name: str) -> None:
    for _ in range(100):
        tree = cgroup.find(name)
        if tree.roots():
            cgroup.remove_abandoned(tree, time.time())
            _make_job(tree)
            cgroup.remove_job(tree, "9")
            cgroup.remove_unused(tree)


def test_agents_that_start_on_one_machine_at_the_same_time_keep_their_groups() -> None:
    with ProcessPoolExecutor(4) as pool:
        list(pool.map(_come_and_go, [f"test-{os.getpid()}-{number}" for number in range(4)]))


@needs("cpus")
def test_a_step_that_ends_leaves_the_groups_that_the_next_step_of_its_job_enters() -> None:
    tree = cgroup.find(f"test-{os.getpid()}-steps")
    _make_job(tree)
    controllers = cgroup.controllers_of(tree, "9")
    ended, begun = (cgroup.make_step(tree, "9", step, controllers, 0) for step in "01")
    cgroup.remove_step(ended)
    pid, is_in_unified = cgroup.fork_into(begun)
    if pid == 0:
        try:
            cgroup.enter(begun, is_in_unified)
        except OSError:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    cgroup.remove_step(begun)
    assert cgroup.remove_job(tree, "9")
    assert not cgroup.jobs(tree)
    cgroup.remove_unused(tree)


BUSY = """python3 - <<'X'
import os, time
os.sched_setaffinity(0, range(os.cpu_count()))
for _ in range(2):
    if os.fork() == 0:
        break
end = time.monotonic() + 2
while time.monotonic() < end:
    pass
X
"""


@needs("cpus")
def test_e4_a_job_of_one_cpu_uses_no_second_one(node: NodeUnderTest, work: Path) -> None:
    ended = run(node, work, BUSY + "wait")
    assert ended.ran_s is not None
    assert ended.usage is not None
    used = (ended.usage["cpu_user_s"] + ended.usage["cpu_system_s"]) / ended.ran_s
    assert used <= 1.05


@needs("pin")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="NOT TESTED: needs two cpus")
def test_e4_cpus_that_the_node_gets_later_are_used() -> None:
    """Of the group above the agent's, as if a container got more, or a cpu was plugged in."""
    mounts = cgroup._mounts()
    is_version_1 = "cpuset" in mounts
    top = Path(mounts["cpuset"] if is_version_1 else mounts[""])
    group = top / f"test-{os.getpid()}-cpus"
    group.mkdir()
    try:
        if is_version_1:
            (group / "cpuset.mems").write_text((top / "cpuset.mems").read_text())
        (group / "cpuset.cpus").write_text("0")
        base = group / "hpcsched" / "agent"
        assert cgroup._make_v1(str(base), "cpuset") if is_version_1 else not base.mkdir(parents=True)
        tree = cgroup.Tree(controllers={"cpuset": str(base)})
        sandboxes = confinement.Sandboxes(Loop(), confinement.Ground(tree=tree))
        launch = launch_of(new_token(), confine=share(cpus=1))
        assert cgroup.usable_cpus(tree) == {0}
        assert not sandboxes._limits(launch).pin
        (group / "cpuset.cpus").write_text("0-1")
        assert sandboxes._limits(launch).pin
        assert cgroup.usable_cpus(tree) == {0, 1}
    finally:
        for path in (base, base.parent, group):
            path.rmdir()


@needs("pin")
def test_e4_a_job_cannot_leave_its_cpus(node: NodeUnderTest, work: Path) -> None:
    """Jobs of other tests may have all cpus; then a job is not pinned, and only its cpu time is limited."""
    script = "python3 -c 'import os; os.sched_setaffinity(0, range(64)); print(len(os.sched_getaffinity(0)))'"

    def is_pinned() -> bool:
        run(node, work, script, stdout="out", append=False)
        return said(work) == "1\n"

    wait_until(is_pinned, what="a job with a cpu of its own")


TAKE = """python3 - <<'X'
import os
block = bytes(1 << 20)
for size in range(300):
    with open("/dev/shm/%d" % size, "wb") as file:
        file.write(block)
X
echo done >> out2
"""


@needs("memory")
@needs("shm")
def test_e4_files_in_dev_shm_are_memory_of_the_job(node: NodeUnderTest, work: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    controller = Controller(node)
    confine = share(mem_mib=100)
    token = controller.launch(TAKE + "sleep 60", confine=confine, mem_mib=100, work_dir=str(work), user=ACCOUNT)
    wait_until((work / "out2").exists, what="the files")
    tree = confinement.survey(str(node.root), "n1", _boot_id(node)).tree
    group = Path(tree.controllers["memory"]) / f"job-{_sandbox(node)}"
    assert 80 << 20 < _highest(group) <= 100 << 20
    assert not {str(number) for number in range(300)} & (set(os.listdir("/dev/shm")) - before)  # others use it, too
    controller.send(protocol.EndStep(token, 0.0, "enough"))
    controller.final(token)
    wait_until(lambda: f"{node.root}/private" not in Path("/proc/mounts").read_text(), what="the end of the mounts")


def _sandbox(node: NodeUnderTest, job: int = 1) -> str:
    return confinement.owners(confinement.owners_directory(str(node.root)))[f"{INCARNATION}.{job}.0"].sandbox


def _boot_id(node: NodeUnderTest) -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


# Ways to have memory that is no process's own, or is not seen when a process ends. Each tries to have more than 100 MiB.
HOARDS = {
    "files in /dev/shm of a process that has ended": """
        if os.fork() == 0:
            open("/dev/shm/x", "wb").write(bytes(60 << 20))
            os._exit(0)
        os.wait()
        kept = bytearray(b"x") * (60 << 20)""",
    "memfd": """
        for _ in range(15):
            os.write(os.memfd_create("x"), bytes(10 << 20))""",
    "System V segments": """
        for _ in range(15):
            place = libc.shmat(libc.shmget(0, 10 << 20, 0o1600), None, 0)
            libc.memset(ctypes.c_void_p(place), 1, 10 << 20)
            libc.shmdt(ctypes.c_void_p(place))""",
    "many processes": """
        for _ in range(15):
            if os.fork() == 0:
                kept = bytearray(b"x") * (10 << 20)
                time.sleep(600)
        time.sleep(1)""",
    "locked memory": """
        kept = mmap.mmap(-1, 150 << 20)
        libc.mlock(ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(kept))), 150 << 20)
        kept.write(bytes(150 << 20))""",
    "buffers of local sockets": """
        ends = [end for _ in range(400) for end in socket.socketpair()]
        for end in ends:
            end.setblocking(False)
            for _ in range(20):
                with contextlib.suppress(BlockingIOError):
                    end.send(bytes(1 << 16))""",
    "buffers of TCP and UDP": """
        udp = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(300)]
        for end in udp:
            end.bind(("127.0.0.1", 0))
            for _ in range(20):
                with contextlib.suppress(OSError):
                    udp[0].sendto(bytes(60000), end.getsockname())
        print("buffers", Path("/proc/net/sockstat").read_text())""",
}
HOARD = """import contextlib, ctypes, mmap, os, socket, sys, time
from pathlib import Path
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
%s
"""


@needs("memory")
@needs("shm")
def test_b9_no_way_of_having_memory_exceeds_the_limit(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    fields = {"confine": share(mem_mib=100, cpus=0), "mem_mib": 100, "work_dir": str(work), "user": ACCOUNT}
    tokens = []
    for number, hoard in enumerate(HOARDS.values(), 1):
        (work / f"{number}.py").write_text(HOARD % textwrap.dedent(hoard))
        script = f"{SYSTEM_PYTHON} -I {number}.py; touch done{number}; sleep 600"
        tokens.append(controller.launch(script, token=new_token(job=number), stdout=f"out{number}", **fields))
    root = Path(confinement.survey(str(node.root), "n1", _boot_id(node)).tree.controllers["memory"])
    for number, name in enumerate(HOARDS, 1):
        wait_until((work / f"done{number}").exists, what=name)
        group = root / f"job-{_sandbox(node, number)}"
        assert _highest(group) <= 100 << 20, name
        sockets = group / "memory.kmem.tcp.max_usage_in_bytes"  # what version 1 counts by itself
        if "UDP" in name and sockets.exists():
            assert 1 << 20 < int(sockets.read_text()) <= 7 << 20
        controller.send(protocol.EndJob(INCARNATION, number, 0, 0.0))
    killed = [controller.final(token).out_of_memory for token in tokens]
    assert killed == ["buffers of TCP" not in name for name in HOARDS]


def _highest(group: Path) -> int:
    """Return the most memory that a group has had."""
    files = [group / name for name in ("memory.peak", "memory.max_usage_in_bytes")]
    return next(int(file.read_text()) for file in files if file.exists())


HUGE = f"""{SYSTEM_PYTHON} -I - <<'X'
import mmap
kept = mmap.mmap(-1, 2 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000)
kept.write(bytes(2 << 20))
print("has huge pages")
X
"""


@pytest.fixture
def huge_pages() -> Iterator[None]:
    """Let the kernel make huge pages for programs that ask for them."""
    file = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_overcommit_hugepages")
    if not AS_ROOT or not file.exists():
        pytest.skip("needs root, and a kernel with huge pages")
    before = file.read_text()
    try:
        file.write_text("2")
        yield
    finally:
        file.write_text(before)


@needs("memory")
@pytest.mark.usefixtures("huge_pages")
def test_b9_huge_pages_are_counted_as_memory_or_a_job_has_none(node: NodeUnderTest, work: Path) -> None:
    run(node, work, HUGE)
    if "has huge pages" not in said(work):
        pytest.skip("the kernel has no two free megabytes in a row")
    able = {word: can for word, can, _ in Controller(node).welcome.facts["abilities"]}
    run(
        node,
        work,
        HUGE,
        confine=share(mem_mib=1 if cgroup.COUNTED in Path("/proc/mounts").read_text() else 100),
        stdout="limited",
    )
    assert ("has huge pages" in (work / "limited").read_text()) is not able["hugepages"]


@needs("memory")
@needs("shm")
def test_b9_memory_and_dev_shm_together_stay_below_the_limit(node: NodeUnderTest, work: Path) -> None:
    script = "head -c 70M /dev/zero > /dev/shm/x; python3 -c 'x = bytearray(60 << 20); print(len(x))'"
    ended = run(node, work, script, confine=share(mem_mib=100), mem_mib=100)
    assert ended.out_of_memory
    assert str(60 << 20) not in said(work)


@needs("shm")
def test_b9_dev_shm_is_no_larger_than_the_memory_of_the_job(node: NodeUnderTest, work: Path) -> None:
    run(node, work, "stat -f -c '%S %b' /dev/shm", confine=share(mem_mib=20))
    size, count = said(work).split()
    assert int(size) * int(count) == 20 << 20


@needs("shm")
def test_b9_dev_shm_has_no_more_files_than_its_size_allows(node: NodeUnderTest, work: Path) -> None:
    """The kernel's default is a share of the memory of the machine, not of the job."""
    run(node, work, "stat -f -c %c /dev/shm", confine=share(mem_mib=20))
    assert int(said(work)) == 20 << 20 >> 13


def test_b9_a_look_at_what_a_job_has_left_takes_no_memory_for_each_file(tmp_path: Path) -> None:
    for number in range(5000):
        (tmp_path / f"{number:0>200}").touch()
    tmp_path.chmod(0o1777)
    tracemalloc.start()
    assert not mounts.is_clean(mounts.Cover(shm=str(tmp_path)))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 100_000


BOMB = """python3 - <<'X'
import os, time
made = 0
try:
    for made in range(1000):
        if os.fork() == 0:
            time.sleep(600)
except BlockingIOError:
    pass
open("made", "w").write(str(made))
time.sleep(600)
X
"""


@needs("processes")
def test_e2_a_fork_bomb_stops_at_its_limit_and_nothing_survives(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    confine = share(max_processes=50)
    token = controller.launch(BOMB, confine=confine, work_dir=str(work), user=ACCOUNT)
    made = wait_until(lambda: (work / "made").exists() and (work / "made").read_text(), what="the end of the bomb")
    assert 40 <= int(made) <= 50
    controller.send(protocol.EndJob(INCARNATION, 1, 0, 0.0))
    controller.final(token)
    tree = confinement.survey(str(node.root), "n1", _boot_id(node)).tree
    wait_until(lambda: not cgroup.jobs(tree), what="the removal of the job's groups")


FORKS = f"""{SYSTEM_PYTHON} -I -S - <<'X'
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
X
"""


@needs("processes")
@needs("cpus")
def test_e2_a_job_that_forks_without_pause_at_its_limit_is_ended(node: NodeUnderTest, work: Path) -> None:
    """Even one that may not have more processes keeps other jobs from starting programs."""
    ended = run(node, work, FORKS, confine=share(max_processes=20))
    assert ended.signals == [9]
    assert re.match(r"fork bomb: \d+ forks failed at the limit of processes of the job", ended.why)


@needs("processes")
def test_a_job_with_some_failed_forks_is_not_ended(node: NodeUnderTest, work: Path) -> None:
    """It looks like a program that tries again: 60 failed forks, and more time than until the first looks."""
    tries = f"{SYSTEM_PYTHON} -I - <<'X'\nimport os, time\n"
    tries += (
        "for _ in range(60):\n    try:\n        os.fork() or time.sleep(600)\n    except OSError:\n        pass\nX\n"
    )
    ended = run(node, work, tries + "sleep 1; echo done", confine=share(max_processes=10))
    assert ended.codes == [0]
    assert said(work) == "done\n"


FORGE = """
for name in pid job.pid agent.pid started final lock; do
    echo VICTIM > $name
done
if [ "$(id -u)" != AGENT ]; then
    for entry in "$HPCSCHED_AGENT_ROOT"/spool/*; do
        echo '{"shepherd": [VICTIM, 0], "tasks": [[VICTIM, 0]]}' > "$entry/started"
    done
    echo VICTIM > "$HPCSCHED_AGENT_ROOT/agent.pid"
fi
touch made
sleep 600
"""


def test_b11_process_numbers_that_a_job_writes_end_no_process(node: NodeUnderTest, work: Path) -> None:
    """An agent of a plain user has jobs of that user alone, who may end the own processes anyway."""
    with subprocess.Popen(["sleep", "600"]) as victim:
        controller = Controller(node)
        script = FORGE.replace("VICTIM", str(victim.pid)).replace("AGENT", str(os.geteuid()))
        token = controller.launch(script, work_dir=str(work), user=ACCOUNT)
        wait_until((work / "made").exists, what="the job")
        node.kill()
        node.start()
        controller = Controller(node, epoch=2)
        controller.send(protocol.EndJob(INCARNATION, 1, 0, 0.0))
        ended = controller.final(token)
        assert ended.signals != [] or ended.status == protocol.ENDED
        assert victim.poll() is None
        victim.kill()


DETACH = """python3 - <<'X'
import os, signal, time
for number in range(1, 32):
    if number not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open("pid", "w").write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
X
while [ ! -s pid ]; do sleep 0.01; done
"""


def test_e2_a_detached_process_that_ignores_signals_ends_with_its_job(node: NodeUnderTest, work: Path) -> None:
    ended = run(node, work, DETACH)
    assert ended.codes == [0]
    assert not Path(f"/proc/{(work / 'pid').read_text()}").exists()


@needs("gpus")
def test_e4_a_gpu_that_was_not_given_cannot_be_opened(node: NodeUnderTest, work: Path) -> None:
    """/dev/zero and /dev/full stand for GPUs 0 and 1."""
    script = (
        "head -c 1 /dev/zero | wc -c; head -c 1 /dev/full | wc -c; CUDA_VISIBLE_DEVICES=0,1 dd if=/dev/full count=1"
    )
    run(node, work, script, confine=share(gpus=[0], gpu_files=["/dev/zero", "/dev/full"]))
    assert said(work).splitlines()[:2] == ["1", "0"] or said(work).count("Operation not permitted") == 2


@needs("gpus")
def test_e4_a_step_has_the_gpus_of_its_job_only(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    fields = {"confine": share(gpu_files=["/dev/full"]), "work_dir": str(work), "user": ACCOUNT, "stdout": "out"}
    token = controller.launch(
        token=new_token(step="0"), argv=["sh", "-c", "head -c 1 /dev/full || echo refused"], **fields
    )
    controller.final(token)
    assert "refused" in said(work)


@needs("proc")
def test_e4_processes_of_others_are_hidden(node: NodeUnderTest, work: Path) -> None:
    users = "stat -c %U /proc/[0-9]* 2>/dev/null | sort -u"  # other tests have processes of this account
    run(node, work, users + "; test -e /proc/1 || echo hidden; test -e /proc/$$ && echo own")
    assert said(work).splitlines() == [ACCOUNT, "hidden", "own"]


@needs("tmp")
def test_b9_nothing_stays_in_tmp(node: NodeUnderTest, work: Path) -> None:
    name = f"hpcsched-attack-{os.getpid()}"
    run(node, work, f"touch /tmp/{name} /dev/shm/{name} && ls /tmp")
    assert said(work) == f"{name}\n"
    assert not Path("/tmp", name).exists()
    assert not Path("/dev/shm", name).exists()
    wait_until(lambda: not list((node.root / "tmp").glob("*")), what="the removal of the job's /tmp")


# Ways out of the private mounts, the groups and the account. Each prints something only if it has succeeded.
ESCAPES = {
    "umount of /tmp": "unshare -Urm sh -c 'umount -l /tmp && ls /tmp/OUTSIDE'",
    "umount of /proc": "unshare -Urm sh -c 'umount -l /proc && ls -d /proc/1'",
    "a bind mount of what is below": "unshare -Urm sh -c 'mount --bind / /mnt && ls /mnt/tmp/OUTSIDE'",
    "a copy of the mounts": "unshare -Urm sh -c 'mount --rbind / /mnt && mount --make-rprivate /mnt; "
    "umount -l /mnt/tmp && ls /mnt/tmp/OUTSIDE'",
    "another root": "unshare -Urm sh -c 'mount --rbind / /mnt && cd /mnt && pivot_root . tmp && ls /tmp/tmp/OUTSIDE'",
    "a /proc that shows all": "unshare -Urm sh -c 'mount -o remount,hidepid=0 /proc && ls -d /proc/1'",
    "another /proc": "unshare -Urm sh -c 'mount -t proc proc /mnt && ls -d /mnt/VICTIM'",
    "the root of another process": "cat /proc/VICTIM/root/etc/passwd; cat /proc/1/root/etc/passwd",
    "the mounts of another process": "nsenter -t VICTIM -m ls /tmp/OUTSIDE; unshare -Ur nsenter -t VICTIM -m ls /tmp/OUTSIDE",
    "the mounts of the shepherd": "nsenter -t $PPID -m ls /tmp/OUTSIDE; ls /proc/$PPID/root/tmp/OUTSIDE",
    "another group": "for file in $(find /sys/fs/cgroup -maxdepth 3 -name tasks -o -maxdepth 3 -name cgroup.procs); do "
    "echo 0 > $file && echo $file; done",
    "limits of groups": "find /sys/fs/cgroup -maxdepth 4 -writable -type d -o -maxdepth 4 -name '*max' -writable",
    "a mount of groups": "unshare -UrmC sh -c 'mount -t cgroup2 none /mnt && echo max > /mnt/pids.max && echo $?'",
    "release_agent": "unshare -UrmC sh -c 'mount -t cgroup -o pids none /mnt && echo /x > /mnt/release_agent && echo $?'",
    "devices": "mknod /tmp/disk b 8 0 && echo $?; unshare -Ur mknod /tmp/disk b 8 0 && echo $?",
    "another account": "unshare -Ur cat /etc/shadow; setpriv --reuid=0 id",
    "a unit of systemd": "systemd-run --quiet --wait --pipe id; systemd-run --user --quiet --wait --pipe id",
    "a program of the kernel": "echo '|/bin/sh' > /proc/sys/kernel/core_pattern && echo $?",
    "no victim of the OOM killer": "echo -1000 > /proc/self/oom_score_adj && echo $?",
}


@needs("tmp")
@needs("proc")
@needs("processes")
@pytest.mark.skipif(not shutil.which("unshare"), reason="NOT TESTED: needs unshare of util-linux")
def test_e4_a_user_does_not_leave_the_confinement(node: NodeUnderTest, work: Path) -> None:
    """Neither by user namespaces, in which everybody is root, nor by what others have left open."""
    outside = Path(tempfile.mkstemp(prefix="outside-", dir="/tmp")[1])
    with subprocess.Popen(["sleep", "600"]) as victim:
        lines = [f"({way}) > {number} 2> {number}.err" for number, way in enumerate(ESCAPES.values())]
        script = "\n".join(lines).replace("OUTSIDE", outside.name).replace("VICTIM", str(victim.pid))
        try:
            run(node, work, script + "\necho tried")
        finally:
            victim.kill()
            outside.unlink()
    assert said(work) == "tried\n"
    assert {name: text for number, name in enumerate(ESCAPES) if (text := (work / str(number)).read_text())} == {}


DAEMON = f"""{SYSTEM_PYTHON} -I - <<'X'
import ctypes, os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open("daemon", "w").write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
traced = ctypes.CDLL(None).ptrace(0x4206, int(open("pid").read()), 0, 0)
open("traced", "w").write(str(traced))
time.sleep(600)
X
"""


@needs("kill")
def test_e2_a_job_whose_process_another_job_traces_leaves_nothing(node: NodeUnderTest, work: Path) -> None:
    """Both jobs are of one account. The second also leaves a daemon."""
    controller = Controller(node)
    fields = {"confine": share(), "work_dir": str(work), "user": ACCOUNT}
    first = controller.launch("echo $$ > pid; exec sleep 600", token=new_token(), **fields)
    wait_until(lambda: (work / "pid").exists() and (work / "pid").read_text(), what="the first job")
    second = controller.launch(DAEMON, token=new_token(job=2), **fields)
    for name in ("traced", "daemon"):
        wait_until(lambda name=name: (work / name).exists() and (work / name).read_text(), what=name)
    for job, token in ((1, first), (2, second)):
        controller.send(protocol.EndJob(INCARNATION, job, 0, 0.0))
        controller.final(token)
    for name in ("pid", "daemon"):
        stat = process.read_stat(int((work / name).read_text()))
        assert stat is None or stat.state == "Z"  # its shepherd lives until its report is acknowledged


PASS_TMP_ON = """python3 - <<'X'
import os, socket
for number in range(40):
    os.makedirs("/tmp/%d/swapped/folder" % number)
os.symlink("VICTIM", "/tmp/link")
with socket.socket(socket.AF_UNIX) as outside:
    outside.connect("outside.sock")
    socket.send_fds(outside, [b"x"], [os.open("/tmp", os.O_RDONLY)])
    outside.recv(1)
X
"""
RENAME_EXCHANGE = 2


def _swap_for_ever(tmp: int) -> None:
    """Swap directories with a link to the victim's directory, as the account of the jobs."""
    entry = pwd.getpwnam(ACCOUNT)
    os.setgroups([])
    os.setresgid(entry.pw_gid, entry.pw_gid, entry.pw_gid)
    os.setresuid(entry.pw_uid, entry.pw_uid, entry.pw_uid)
    libc = ctypes.CDLL(None)
    while True:
        for number in range(40):
            libc.renameat2(tmp, b"%d/swapped" % number, tmp, b"link", RENAME_EXCHANGE)


@needs("tmp")
def test_b4_a_tmp_that_is_changed_while_it_is_deleted_takes_nothing_along(
    node: NodeUnderTest, work: Path, place: Path
) -> None:
    """The job has given a descriptor of its /tmp to a process that outlives it."""
    victim = place / "victim"
    (victim / "folder").mkdir(parents=True)
    (victim / "file").touch()
    controller = Controller(node)
    with socket.create_server(str(work / "outside.sock"), family=socket.AF_UNIX) as server:
        (work / "outside.sock").chmod(0o666)
        for job in range(1, 4):
            script = PASS_TMP_ON.replace("VICTIM", str(victim))
            token = controller.launch(
                script, token=new_token(job=job), confine=share(), work_dir=str(work), user=ACCOUNT
            )
            with server.accept()[0] as connection:
                _, (tmp,), _, _ = socket.recv_fds(connection, 1, 1)
                swapper = os.fork()
                if swapper == 0:
                    connection.close()  # the job waits for its end
                    _swap_for_ever(tmp)
                os.close(tmp)
            try:
                controller.final(token)
                wait_until(
                    lambda: not list((node.root / "tmp").iterdir()) or len(os.listdir(victim)) < 2,
                    what="the removal of the job's /tmp",
                )
            finally:
                os.kill(swapper, signal.SIGKILL)
                os.waitpid(swapper, 0)
            assert set(os.listdir(victim)) == {"folder", "file"}, f"job {job}"


@needs("tmp")
def test_a_job_keeps_its_work_directory_and_output_below_tmp(node: NodeUnderTest) -> None:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    other = folder.with_name(folder.name + ".out")
    folder.chmod(0o777)
    try:
        run(node, folder, "echo kept > kept; ls /tmp; echo err >&2", stderr=str(other), user="")
        assert (folder / "kept").read_text() == "kept\n"
        assert said(folder) == folder.name + "\n"
        assert other.read_text() == "err\n"
    finally:
        shutil.rmtree(folder)
        other.unlink(missing_ok=True)


@needs("tmp")
def test_b3_a_link_in_the_private_tmp_is_not_mounted_over(node: NodeUnderTest, work: Path) -> None:
    """The job puts a link to /etc where the next step's work directory is mounted."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o777)
    controller = Controller(node)
    fields = {"confine": share(), "user": ACCOUNT}
    script = f"ln -s /etc /tmp/{folder.name} && touch made && sleep 60"
    controller.launch(script, token=new_token(), work_dir=str(work), **fields)
    wait_until((work / "made").exists)
    step = controller.launch(token=new_token(step="0"), argv=["true"], work_dir=str(folder), **fields)
    ended = controller.final(step)
    folder.rmdir()
    assert ended.status == protocol.REFUSED
    assert "Not a directory" in (ended.why or "")


@needs("shm")
def test_steps_of_a_job_share_its_dev_shm_and_other_jobs_do_not(node: NodeUnderTest, work: Path) -> None:
    controller = Controller(node)
    fields = {"confine": share(), "work_dir": str(work), "user": ACCOUNT}
    controller.launch("echo hello > /dev/shm/x; touch made; sleep 60", token=new_token(), **fields)
    wait_until((work / "made").exists)
    for job, name in ((1, "mine"), (2, "other")):
        argv = ["sh", "-c", "cat /dev/shm/x /tmp/y; true"]
        controller.final(controller.launch(token=new_token(job=job, step="0"), argv=argv, stdout=name, **fields))
    assert "hello" in (work / "mine").read_text()
    assert "hello" not in (work / "other").read_text()


IPC = """/usr/bin/python3 - %d <<'X'
import ctypes, sys
key = int(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
libc.mq_open.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p]
segment = libc.shmget(key, 64 << 20, 0o1600)
ctypes.memset(ctypes.c_void_p(libc.shmat(segment, None, 0)), 1, 64 << 20)
assert libc.semget(key, 1, 0o1600) >= 0 and libc.msgget(key, 0o1600) >= 0
assert libc.mq_open(b"/hpcsched-%%d" %% key, 0o102, 0o600, None) >= 0
X
"""
SEES = "grep -cw %d /proc/sysvipc/shm /proc/sysvipc/sem /proc/sysvipc/msg"


def _ipc_objects(key: int) -> list[str]:
    """Return where the node has objects of this key."""
    libc = ctypes.CDLL(None)
    found = [
        name for name in ("shm", "sem", "msg") if re.search(rf"\b{key}\b", Path("/proc/sysvipc", name).read_text())
    ]
    return [*found, "mqueue"] if libc.mq_open(b"/hpcsched-%d" % key, os.O_RDONLY) >= 0 else found


def _shared_kib() -> int:
    return int(re.search(r"Shmem: +([0-9]+) kB", Path("/proc/meminfo").read_text())[1])  # type: ignore[index]


@needs("shm")
def test_b9_no_shared_memory_or_message_queue_stays_while_another_job_runs(node: NodeUnderTest, work: Path) -> None:
    """Also: the steps of a job share System V objects, and another job does not see them."""
    key = 0x10000000 + os.getpid()
    controller = Controller(node)
    fields = {"confine": share(mem_mib=300), "work_dir": str(work), "user": ACCOUNT}
    script = IPC % key + "head -c 64M /dev/zero > /dev/shm/x; touch made; sleep 600"
    token = controller.launch(script, token=new_token(), **fields)
    wait_until((work / "made").exists, what="the objects")
    argv = ["sh", "-c", f"echo $$ > pid; {SEES % key}; sleep 600"]
    other = controller.launch(token=new_token(job=2, step="0"), argv=argv, stdout="other", **fields)
    controller.final(
        controller.launch(token=new_token(step="0"), argv=argv[:2] + [SEES % key], stdout="mine", **fields)
    )
    assert (work / "mine").read_text().count(":1") == 3
    wait_until(lambda: (work / "other").read_text().count(":0") == 3, what="the other job")
    assert _ipc_objects(key) == []
    highest_kib = _shared_kib()
    controller.send(protocol.EndJob(INCARNATION, 1, 0, 0.0))
    controller.final(token)
    wait_until(lambda: _shared_kib() < highest_kib - (90 << 10), what="the end of the shared memory")
    controller.send(protocol.EndJob(INCARNATION, 2, 0, 0.0))
    controller.final(other)


def test_e4_a_node_says_what_it_cannot_enforce(place: Path) -> None:
    """As root and as a plain user: the agent's facts have a reason for each thing that it cannot do."""
    with running_node(place / "plain", user="nobody" if AS_ROOT else "") as node:
        facts = {word: (can, why) for word, can, why in Controller(node).welcome.facts["abilities"]}
        run(node, place / "work", "echo $HPCSCHED_NOT_ENFORCED", user="")
    shown = said(place / "work").strip().split(",")
    assert set(shown) == {word for word in (*EVERYTHING, "memory", "hugepages") if not facts[word][0]}
    assert facts["shm"] == (False, "the agent is not root")
    assert set(facts) >= {*EVERYTHING, "memory", "kill", "logins"}
    assert all(can or why for can, why in facts.values())


LOOK = """stat -f -c '%S %b' /dev/shm; ls /dev/shm; wc -l < /proc/sysvipc/shm
touch made; while [ ! -e go ]; do sleep 0.02; done; rm made go
"""


@needs("shm")
@needs("processes")
def test_b9_a_job_finds_nothing_of_the_job_that_had_its_sandbox_before(node: NodeUnderTest, work: Path) -> None:
    """The second job has the groups and mounts of the first, with limits of its own; what is left over is not reused."""
    controller, names = Controller(node), []
    tree = confinement.survey(str(node.root), "n1", _boot_id(node)).tree
    for job, leave in enumerate(("ipcmk -M 4096 >/dev/null", "touch /dev/shm/left", "true"), 1):
        fields = {"confine": share(mem_mib=20 * job, max_processes=100 + job), "mem_mib": 20 * job, "stdout": "out"}
        token = controller.launch(
            LOOK + leave, token=new_token(job=job), append=False, work_dir=str(work), user=ACCOUNT, **fields
        )
        wait_until((work / "made").exists)
        names.append(_sandbox(node, job))
        group = Path(tree.controllers["pids"]) / f"job-{names[-1]}"
        assert (group / "pids.max").read_text() == f"{100 + job}\n"
        (work / "go").touch()
        assert controller.final(token).codes == [0]
        size, segments = said(work).splitlines()
        assert int(size.split()[0]) * int(size.split()[1]) == 20 * job << 20
        assert segments == "1"  # the line above the first
    assert names[0] == names[1] != names[2]


@needs("kill")
@pytest.mark.parametrize("leave", ["exec sleep 600", "setsid sleep 600 &"], ids=["killed", "left over"])
def test_a_job_runs_after_one_whose_processes_were_killed(node: NodeUnderTest, work: Path, leave: str) -> None:
    """Some kernels kill every process that is born in a cgroup that was killed once."""
    controller = Controller(node)
    fields = {"confine": share(), "work_dir": str(work), "user": ACCOUNT}
    token = controller.launch(f"touch made; {leave}", token=new_token(), **fields)
    wait_until((work / "made").exists)
    if leave.startswith("exec"):
        controller.send(protocol.EndJob(INCARNATION, 1, 0, 0.0))
    controller.final(token)
    assert controller.final(controller.launch("true", token=new_token(job=2), **fields)).codes == [0]


@needs("cpus")
def test_a_sandbox_whose_groups_somebody_removed_is_made_anew(node: NodeUnderTest, work: Path) -> None:
    """Another agent does that if nothing ran in them for an hour."""
    run(node, work, "true", confine=share(cpus=0))
    tree = confinement.survey(str(node.root), "n1", _boot_id(node)).tree
    for name in cgroup.jobs(tree):
        assert cgroup.remove_job(tree, name)
    controller = Controller(node)
    fields = {"confine": share(cpus=0), "work_dir": str(work), "user": ACCOUNT}
    assert controller.final(controller.launch("true", token=new_token(job=2), **fields)).codes == [0]


@needs("cpus")
def test_b9_a_killed_agent_s_sandboxes_stay_with_their_jobs(node: NodeUnderTest, work: Path) -> None:
    """The next agent removes the sandboxes of jobs that are over, and keeps those of jobs that run."""
    controller = Controller(node)
    fields = {"confine": share(), "work_dir": str(work), "user": ACCOUNT}
    controller.final(controller.launch("true", token=new_token(job=2), **fields))
    token = controller.launch("touch made; while [ ! -e go ]; do sleep 0.05; done", token=new_token(), **fields)
    wait_until((work / "made").exists)
    sandbox = _sandbox(node)
    node.kill()
    node.start()
    tree = confinement.survey(str(node.root), "n1", _boot_id(node)).tree
    controller = Controller(node)
    wait_until(lambda: cgroup.jobs(tree) == {sandbox}, what="the removal of idle sandboxes")
    step = controller.launch(token=new_token(step="0"), argv=["cat", "/proc/self/cgroup"], stdout="step", **fields)
    assert controller.final(step).codes == [0]
    assert f"job-{sandbox}" in (work / "step").read_text()
    (work / "go").touch()
    assert controller.final(token).codes == [0]
    wait_until(lambda: not cgroup.jobs(tree), what="the removal of the job's groups")


@needs("shm")
@pytest.mark.parametrize("killed", ["shepherd", "agent", "both"])
def test_b9_nothing_stays_if_a_part_of_the_node_is_killed(node: NodeUnderTest, work: Path, killed: str) -> None:
    key = 0x20000000 + os.getpid()
    controller = Controller(node)
    script = IPC % key + "head -c 64M /dev/zero > /dev/shm/x; touch /tmp/x made; sleep 600"
    token = controller.launch(script, confine=share(mem_mib=300), work_dir=str(work), user=ACCOUNT)
    wait_until((work / "made").exists, what="the objects")
    highest_kib = _shared_kib()
    if killed in ("agent", "both"):
        node.kill()
    if killed in ("shepherd", "both"):
        os.kill(node.shepherds()[token], signal.SIGKILL)
    if killed in ("agent", "both"):
        node.start()
        controller = Controller(node, epoch=2)
    controller.send(protocol.EndJob(INCARNATION, 1, 0, 0.0))
    wait_until(lambda: _shared_kib() < highest_kib - (90 << 10), what="the end of the shared memory")
    wait_until(lambda: not list((node.root / "tmp").glob("*")), what="the removal of the job's /tmp")
    assert _ipc_objects(key) == []
    wait_until(
        lambda: not cgroup.jobs(confinement.survey(str(node.root), "n1", _boot_id(node)).tree), what="the groups"
    )


@needs("cpus")
def test_e4_jobs_together_have_the_weight_of_the_cpus_of_the_node(node: NodeUnderTest, work: Path) -> None:
    """Else a busy process outside of jobs would take a cpu of a large node from the job that has it."""
    controller = Controller(node)
    token = controller.launch("touch made; sleep 60", confine=share(), work_dir=str(work), user=ACCOUNT)
    wait_until((work / "made").exists, what="the job")
    group = Path(confinement.survey(str(node.root), "n1", _boot_id(node)).tree.controllers["cpu"])
    weights = {"cpu.weight": 100, "cpu.shares": 1024}
    name = next(name for name in weights if (group / name).exists())
    most = min(10_000, 100 * (os.cpu_count() or 1)) if name == "cpu.weight" else 1024 * (os.cpu_count() or 1)
    assert [int((path / name).read_text()) for path in (group, group.parent)] == [most, most]
    assert int((group / f"job-{_sandbox(node)}" / name).read_text()) == weights[name]
    controller.send(protocol.EndJob(INCARNATION, 1, 0, 0.0))
    controller.final(token)


def test_e4_a_job_is_told_what_its_node_cannot_enforce(node: NodeUnderTest, work: Path) -> None:
    """And the variable of another job, say of the one that submitted it, is not kept."""
    able = {word for word, can, _ in Controller(node).welcome.facts["abilities"] if can}
    env = {"PATH": "/usr/bin:/bin", "HPCSCHED_NOT_ENFORCED": "everything"}
    run(node, work, "echo ${HPCSCHED_NOT_ENFORCED-nothing}", env=env, confine=share(words=["shm", "proc"]))
    missing = {"shm", "proc", "memory", "hugepages"} - able
    assert set(said(work).strip().split(",")) == (missing or {"nothing"})


@needs("cpus")
def test_a_job_leaves_no_group(node: NodeUnderTest, work: Path) -> None:
    run(node, work, "true")
    tree = confinement.survey(str(node.root), "n1", _boot_id(node)).tree
    wait_until(lambda: not cgroup.jobs(tree), what="the removal of the job's groups")
