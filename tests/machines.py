"""Make machines on this one, each with its own files, network, processes and sshd.

This needs root. A machine is an overlay of this one's file system in namespaces. The machines are on one network, 10.213.9.0/24,
that reaches nothing else. They share the kernel, with its settings in /proc/sys: a machine cannot set those of its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import CompletedProcess

SUBNET = "10.213.9"
# Process 1 of a machine. It waits for its standard input to close, so the machine ends with the process that made it.
BOOT = """
set -e
base=$1 root=$1/root name=$2
hostname "$name"
mount --make-rprivate /
mount -t overlay overlay -o "lowerdir=/,upperdir=$base/upper,workdir=$base/work" "$root"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=755 none "$root/run"
mount -t tmpfs -o mode=1777 none "$root/tmp"
mount -t proc proc "$root/proc"
mount --bind "$base/../srv" "$root/srv"
mount -t tmpfs -o mode=755 none "$root/home"
cp "$base/../hosts" "$root/etc/hosts"
echo "$name" > "$root/etc/hostname"
rm -rf "$root"/etc/ssh/ssh_host_* "$root"/root/.ssh "$root"/root/.[bp]*rc "$root"/root/.*profile
rm -rf "$root"/etc/hpcsched "$root"/var/lib/hpcsched*
mkdir -p -m 700 "$root/root/.ssh" "$root/run/sshd"
ssh-keygen -q -t ed25519 -N "" -f "$root/etc/ssh/ssh_host_ed25519_key"
cd "$root"
echo up
exec chroot . sh -c '/usr/sbin/sshd -D -e 2>/run/sshd.log & cat; kill $!'
"""


class Machine:
    """A machine that runs until `stop`."""

    def __init__(self, base: Path, name: str) -> None:
        self.name, self.base = name, base / name
        for part in ("upper", "work", "root"):
            (self.base / part).mkdir(parents=True)
        unshare = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--net", "--fork", "--kill-child"]
        self.process = subprocess.Popen(
            [*unshare, "sh", "-c", BOOT, "boot", str(self.base), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        )
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "up\n":
            raise RuntimeError(f"the machine {name} did not start")
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        self.pid = int(children[0])

    def path(self, path: str) -> Path:
        """Return where this machine's `path` is for processes of this one."""
        return Path(f"/proc/{self.pid}/root{path}")

    def words(self, words: Sequence[str], user: str = "root") -> list[str]:
        """Return the command that runs `words` on the machine in a user's login environment."""
        enter = ["nsenter", "-t", str(self.pid), "-m", "-u", "-i", "-n", "-p", "-r", "-w"]
        become = ["setpriv", "--reuid", user, "--regid", user, "--init-groups"] if user != "root" else []
        home = "/root" if user == "root" else f"/home/{user}"
        path = "/opt/hpcsched/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return [*enter, *become, "env", "-i", "-C", home, f"PATH={path}", f"HOME={home}", f"USER={user}", *words]

    def run(
        self, command: str, user: str = "root", *, check: bool = True, given: str | None = None
    ) -> CompletedProcess[str]:
        """Run a line for the shell on the machine."""
        done = subprocess.run(
            self.words(["sh", "-c", command], user),
            input=given,
            stdin=subprocess.DEVNULL if given is None else None,
            capture_output=True,
            text=True,
        )
        if check and done.returncode:
            raise AssertionError(f"{self.name}: {command}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def stop(self) -> None:
        """End all processes of the machine; its mounts go with them."""
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def machines(names: Sequence[str]) -> Iterator[dict[str, Machine]]:
    """Make machines that reach each other as NAME and NAME.lab; the first has the bridge."""
    with tempfile.TemporaryDirectory(prefix="lab-") as directory:
        base = Path(directory)
        base.chmod(0o755)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "none", base], check=True)
        found: dict[str, Machine] = {}
        try:
            (base / "srv").mkdir()
            lines = [f"{SUBNET}.{at} {name}.lab {name}\n" for at, name in enumerate(names, 1)]
            (base / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
            for name in names:
                found[name] = Machine(base, name)
            _connect(list(found.values()))
            yield found
        finally:
            for machine in found.values():
                machine.stop()
            subprocess.run(["umount", "-l", base], check=False)


def _connect(made: Sequence[Machine]) -> None:
    first = made[0]
    first.run(f"ip link set lo up; ip link add lan type bridge; ip addr add {SUBNET}.1/24 dev lan; ip link set lan up")
    for at, machine in enumerate(made[1:], 2):
        first.run(f"ip link add to{at} type veth peer name eth0; ip link set to{at} master lan up")
        subprocess.run(
            ["nsenter", "-t", str(first.pid), "-n", "ip", "link", "set", "eth0", "netns", str(machine.pid)], check=True
        )
        machine.run(f"ip link set lo up; ip addr add {SUBNET}.{at}/24 dev eth0; ip link set eth0 up")


def can_make_machines() -> bool:
    """Return whether this process may make machines."""
    wanted = ("unshare", "nsenter", "ip", "sshd", "setpriv", "useradd")
    if os.geteuid() or any(shutil.which(word, path="/usr/sbin:/usr/bin:/sbin:/bin") is None for word in wanted):
        return False
    options = "lowerdir=/,upperdir=/mnt/u,workdir=/mnt/w"
    trial = f"mount -t tmpfs none /mnt && mkdir /mnt/u /mnt/w && mount -t overlay o -o {options} /mnt"
    return subprocess.run(["unshare", "--mount", "--net", "sh", "-c", trial], capture_output=True).returncode == 0
