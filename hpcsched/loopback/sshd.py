"""OpenSSH's sshd as the SSH server of one loopback node.

Of the system's own sshd only the program is used: port, host key, authorized key and log are the node's own, in its directory. No
process is started here. Sources: sshd(8), sshd_config(5).
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
from pathlib import Path

# Sessions must not run the account's real start-up files: version managers take locks in the home directory, and switching off
# the node would kill them with the lock held. For sshd, bash reads ~/.bashrc only in an outermost shell; zsh always reads
# ~/.zshenv unless ZDOTDIR is elsewhere.
NO_START_UP = {"SHLVL": "1", "ZDOTDIR": "/nonexistent"}

RUN_DIR = Path("/run/sshd")
SEARCH_PATH = os.pathsep.join([os.defpath, "/usr/sbin", "/usr/local/sbin", "/sbin"])

CONFIG = """\
AddressFamily inet
ListenAddress 127.0.0.1:{port}
HostKey {host_key}
AuthorizedKeysFile {authorized_keys}
AllowUsers {user}
PidFile none
LogLevel VERBOSE
UsePAM no
StrictModes no
UseDNS no
PubkeyAuthentication yes
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
PermitUserRC no
X11Forwarding no
PrintMotd no
MaxSessions 1000
MaxStartups 1000
Subsystem sftp internal-sftp
SetEnv {environment}
"""


def find_sshd() -> str | None:
    """Return the absolute path of sshd, or None."""
    return shutil.which("sshd") or shutil.which("sshd", path=SEARCH_PATH)


def why_no_sshd(user: str) -> str | None:
    """Return why sshd cannot log in `user` on this machine, and what to do; None if it can."""
    if find_sshd() is None:
        return "sshd is not installed (Debian: apt-get install openssh-server)"
    try:
        account = pwd.getpwnam(user)
    except KeyError:
        return f"there is no account {user!r} in the password database, and sshd wants one"
    if os.path.basename(account.pw_shell) in ("nologin", "false"):
        return f"the account {user!r} has the login shell {account.pw_shell}, with which it can run nothing"
    if os.geteuid() == 0 and _is_locked(user):
        return f"the account {user!r} is locked (a '!' before its password in /etc/shadow)"
    return None


def _is_locked(user: str) -> bool:
    try:
        lines = Path("/etc/shadow").read_text().splitlines()
    except OSError:
        return False
    return any(line.startswith(f"{user}:!") for line in lines)


def write_sshd_config(
    path: Path, *, port: int, user: str, host_key: Path, authorized_keys: Path, environment: dict[str, str]
) -> None:
    """Write the configuration of one node's sshd; `environment` is added to every session."""
    text = CONFIG.format(
        port=port,
        user=user,
        host_key=_quoted(str(host_key)),
        authorized_keys=_quoted(str(authorized_keys).replace("%", "%%")),
        environment=" ".join(_quoted(f"{name}={value}") for name, value in (NO_START_UP | environment).items()),
    )
    if _version() >= (9, 8):
        text += "PerSourcePenalties no\n"  # a refused login must not block the next one
    path.write_text(text)


def _quoted(word: str) -> str:
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _version() -> tuple[int, int]:
    sshd = find_sshd()
    assert sshd is not None
    # Before 9.2 sshd has no -V, but its error message has the version.
    said = subprocess.run([sshd, "-V"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    found = re.search(r"OpenSSH_(\d+)\.(\d+)", said.stderr + said.stdout)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def sshd_command(config: Path, log: Path) -> list[str]:
    """Return the command that runs sshd in the foreground.

    As root, create the directory that it requires.
    """
    sshd = find_sshd()
    assert sshd is not None
    if os.geteuid() == 0:
        RUN_DIR.mkdir(mode=0o755, parents=True, exist_ok=True)
    return [sshd, "-D", "-f", str(config), "-E", str(log)]
