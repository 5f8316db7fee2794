"""The spool: one directory for each token of this node, on the node's own disk.

    ROOT/epochs               the incarnations and epochs of controllers that were seen
    ROOT/seq                  every report number below this may have been used
    ROOT/spool/TOKEN/spec     the Launch; the directory itself is the claim
                     lock     a second name of that file, locked by the shepherd as long as it lives, and by forked tasks
                              until their release
                     started  which processes run; written before the tasks are released
                     final    how the step ended, or that it never runs
                     lease    when the lease was renewed last (see `lease`)
    ROOT/spool/identity       which spool this is, see `identity_of`
    ROOT/spool/done_log[.1]   ended and acknowledged tokens, see `DoneLog`
    ROOT/scripts/JOB          the prolog and epilog of a job here, see `hpcnode.agent.job_scripts`
    ROOT/jobs/TOKEN           the batch script; its user may read and run it
    ROOT/spare/UID.TOKEN      removed entries, for reuse, with the script of that user, if there was one

What is durable when, and why that is enough for "never twice":
- A claim need not survive a power failure by itself: nothing was released before `started` is durable, and nothing runs after a
  power failure. So `mkdir` and `spec` are only written. The fsyncs of `started` (file, entry, spool) make the claim durable
  with it, before the release. They run in the shepherds, in parallel.
- `final` is durable before it is reported. A tombstone is durable before it is reported; on a full disk, the removal of `spec`
  takes its place (`invalidate`).
- An epoch is durable before an order of that controller is carried out.
- An entry is removed only after its final report was acknowledged and the done log has its token.

Some file systems are slow to create files (ext4 searches recently deleted inodes), so a removed entry is used again by a later
token, with its files: `claim` writes `spec`, then gives the entry its name. The other files wait as `started.new` and
`final.new`, which are never read, and are emptied, written and synced before they get their final name. After a power failure
a file might still have its old name or content. So each file says its token, a file of another token counts as missing, and a
new agent uses no spare entries that it finds. A script belongs to its user, who may hold it open, so it is reused for the same
user only, and not if it has another name (a link of the user's) or attributes. The user may also hold a lease on it, so that an
open for writing would wait: then a new file is made. Source: fcntl(2), F_SETLEASE.

It knows nothing of processes, sockets and clocks. Its directories are 0700 and the agent's own, `jobs` is 0711. No job's user
can make or replace a name in them, so paths are safe here.
"""

from __future__ import annotations

import os
import stat
import time
from typing import Any, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Set, Tuple

from hpcnode.lease import read_renewal, write_renewal
from hpcnode.os.durable import read_object, sync_folder, sync_way_to, to_bytes, write_all, write_durably, write_plainly
from hpcnode.os.faults import CrashPoints
from hpcnode.paths import remove_tree
from hpcnode.wire import protocol
from hpcnode.wire.protocol import Life, Token, read_token

# ----- the done log: keeps a late or doubled Launch from running again after its entry was removed
# Two kinds of lines, in `spool/done_log` and (older) `spool/done_log.1`:
#     t TOKEN                       this token is over and was acknowledged
#     j INCARNATION JOB ATTEMPT     no attempt of this job up to this one may start here (ATTEMPT-STAY: see `Token`)
#
# The log is durable before an entry is removed, and before an EndJob is carried out. It is bounded: at LINES lines `done_log`
# replaces `done_log.1`, so at least the last LINES facts are known. Later launches are excluded by the channel: it keeps
# the order, the controller sends an Ack only after it has committed the end of that token and never launches it again, a lower
# epoch is refused, and a restored controller has another incarnation. The log covers frames that are doubled or delayed
# within one epoch.


LINES = 32_768
NEVER = (-1, 0)


class _DoneFile:
    """One of the two files, in memory."""

    def __init__(self) -> None:
        self.nonces: Set[bytes] = set()
        self.floors: Dict[Tuple[str, int], Life] = {}
        self.lines = 0

    def take(self, line: str) -> None:
        """Add one line. A line that a power failure cut off is ignored: its fsync never returned."""
        self.lines += 1
        words = line.split(" ")
        if words[0] == "t" and len(words) == 2:
            token = read_token(words[1])
            if token is not None:
                self.learn(token)
        elif words[0] == "j" and len(words) == 4 and words[2].isdigit():
            attempt, _, stay = words[3].partition("-")
            if attempt.isdigit() and (stay or "0").isdigit():
                self.raise_floor((words[1], int(words[2])), (int(attempt), int(stay or 0)))  # int: of our own log

    def learn(self, token: Token) -> None:
        self.nonces.add(_name(token))
        if token.step == "batch":
            self.raise_floor(token.job, token.life)

    def raise_floor(self, job: Tuple[str, int], life: Life) -> None:
        self.floors[job] = max(life, self.floors.get(job, NEVER))


class DoneLog:
    """The ended tokens and attempts of this node."""

    def __init__(self, folder: str, faults: CrashPoints, lines: int = LINES) -> None:
        self._folder = folder
        self._path = os.path.join(folder, "done_log")
        self._limit = lines
        self._faults = faults
        self._older = _read_done(self._path + ".1")
        self._newer = _read_done(self._path)

    def is_over(self, token: Token) -> bool:
        """Return whether this token may not start because it, or its attempt, is over."""
        name = _name(token)
        return any(
            name in part.nonces or token.life <= part.floors.get(token.job, NEVER)
            for part in (self._newer, self._older)
        )

    def is_noted(self, text: str) -> bool:
        """Return whether exactly this token was added."""
        token = read_token(text)
        return token is not None and any(_name(token) in part.nonces for part in (self._newer, self._older))

    def add(self, tokens: Iterable[str]) -> None:
        """Add these tokens durably."""
        self._append(["t " + text for text in tokens])

    def end_attempts(self, job: Tuple[str, int], life: Life) -> None:
        """Record durably that no attempt and stay of the job up to this may start here."""
        if all(part.floors.get(job, NEVER) < life for part in (self._newer, self._older)):
            attempt, stay = life
            self._append(["j %s %d %d%s" % (*job, attempt, "-%d" % stay if stay else "")])

    def _append(self, lines: List[str]) -> None:
        if not lines:
            return
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            # The leading newline ends a line that an earlier failure may have cut off.
            write_all(fd, ("\n" + "\n".join(lines) + "\n").encode())
            os.fdatasync(fd)
        finally:
            os.close(fd)
        if self._newer.lines == 0:
            sync_folder(self._folder)
        for line in lines:
            self._newer.take(line)
        if self._newer.lines >= self._limit:
            self._turn()

    def _turn(self) -> None:
        os.rename(self._path, self._path + ".1")
        sync_folder(self._folder)
        self._faults.reached("done.turned")
        self._older, self._newer = self._newer, _DoneFile()


def _name(token: Token) -> bytes:
    """Return bytes that are unique to the token: claims of an attempt share a nonce."""
    return bytes.fromhex(token.nonce) + (b"%d" % token.stay if token.stay else b"")


def _read_done(path: str) -> _DoneFile:
    part = _DoneFile()
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            for line in file:
                if line.strip():
                    part.take(line.rstrip("\n"))
    except FileNotFoundError:
        pass
    return part


SEQ_BLOCK = 1_000_000
TRY_BYTES = 64 << 10  # size of an entry with a script
MAX_FORMER_INCARNATIONS = 64
MAX_EPOCHS_BYTES, MAX_EPOCH, MAX_SEQ = 64 << 10, 1 << 53, 1 << 53
KEPT = frozenset({"spec", "lock", "started", "final"})
REUSED = ("spec", "started", "final")
MAX_SPARE = 128  # entries
# Ends of names beside the record of a job with scripts.
SCRIPT_STATE, SCRIPT_RESULT, SCRIPT_LOCK, SCRIPT_POWER, NEW_RECORD = ".state", ".result", ".lock", ".power", ".new"
BESIDE_RECORD = (SCRIPT_STATE, SCRIPT_RESULT, SCRIPT_LOCK, SCRIPT_POWER, NEW_RECORD)
NOBODY = -1  # the user of a spare entry without a script


class Found(NamedTuple):
    """One entry on disk. Files that are missing or were cut off by a power failure are None."""

    token: str
    launch: Optional[protocol.Launch]
    boot_id: str  # the boot in which it was claimed
    started: Optional[Dict[str, Any]]
    final: Optional[Dict[str, Any]]


class Epochs(NamedTuple):
    """The accepted controller: `epoch` of `incarnation`. Incarnations in `former` are refused.

    `start`: which of the controllers that have this epoch, "" if it did not say.
    """

    incarnation: str
    epoch: int
    former: Tuple[str, ...]
    start: str = ""


def _read_epochs(obj: Mapping[str, Any]) -> Optional[Epochs]:
    """Return the epochs of a record, None if it is damaged."""
    incarnation, epoch, former, start = ({"start": "", **obj}.get(name) for name in Epochs._fields)
    if not isinstance(incarnation, str) or not isinstance(start, str) or not isinstance(former, list):
        return None
    if type(epoch) is not int or not 0 <= epoch <= MAX_EPOCH or not all(isinstance(one, str) for one in former):
        return None
    return Epochs(incarnation, epoch, tuple(former), start)


class Spool:
    """The spool below one root directory."""

    def __init__(self, root: str, faults: CrashPoints) -> None:
        self.root = root
        self.path = os.path.join(root, "spool")
        self.jobs = os.path.join(root, "jobs")
        self.spare = os.path.join(root, "spare")
        self.scripts = os.path.join(root, "scripts")
        self._spare_names: List[str] = []
        self._faults = faults
        os.makedirs(self.path, 0o700, exist_ok=True)
        os.makedirs(self.jobs, 0o711, exist_ok=True)
        os.makedirs(self.spare, 0o700, exist_ok=True)
        sync_way_to(os.path.abspath(root))  # a name is only as durable as the names above it
        os.chmod(self.jobs, 0o711 if os.geteuid() == 0 else 0o700)
        self.done_log = DoneLog(self.path, faults)

    # ----- the node's own numbers

    def epochs(self) -> Epochs:
        """Return the stored epochs. Raises ValueError if they are damaged."""
        obj = self._own_object("epochs")
        if obj is None:
            return Epochs("", 0, ())
        epochs = _read_epochs(obj)
        if epochs is None:
            raise ValueError("cannot read %s: it is damaged" % os.path.join(self.root, "epochs"))
        return epochs

    def _own_object(self, name: str) -> Optional[Dict[str, Any]]:
        """Return the object in a file of numbers, None if there is no file.

        Raises ValueError if it is not a small regular file.
        """
        path = os.path.join(self.root, name)
        try:
            found = os.lstat(path)
            if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_EPOCHS_BYTES:
                raise ValueError("cannot read %s: it is not a file of at most %d bytes" % (path, MAX_EPOCHS_BYTES))
            return read_object(path) or {}
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ValueError("cannot read %s: %s" % (path, error.strerror)) from None

    def store_epochs(self, epochs: Epochs) -> None:
        """Make the epochs durable."""
        self._faults.reached("epoch.before")
        kept = epochs._replace(former=epochs.former[-MAX_FORMER_INCARNATIONS:])
        write_durably(self.root, "epochs", to_bytes(kept._asdict()))
        self._faults.reached("epoch.after")

    def reserve_seqs(self, used_below: int = 0) -> Tuple[int, int]:
        """Reserve report numbers durably; return [first, end), above all numbers ever used."""
        try:
            obj = self._own_object("seq")
            stored = 1 if obj is None else obj.get("end")
        except ValueError:
            stored = None
        if not isinstance(stored, int) or not 0 < stored < MAX_SEQ:
            stored = int(time.time() * 1e6)  # the file is damaged: no node has reserved so many
        first = max(stored, used_below)
        write_durably(self.root, "seq", to_bytes({"end": first + SEQ_BLOCK}))
        return first, first + SEQ_BLOCK

    # ----- entries

    def entry(self, token: str) -> str:
        """Return the path of a token's entry."""
        return self.path + "/" + token

    def script(self, token: str) -> str:
        """Return the path of the batch script."""
        return self.jobs + "/" + token

    def claim(self, launch: protocol.Launch, script: bytes, boot: str, owner: Tuple[int, int]) -> bool:
        """Claim the token; return False if it was claimed or revoked before.

        Its user may read and run the script.
        """
        entry = self.entry(launch.token)
        self._faults.reached("claim.before")
        spare = self._take_spare(owner[0] if script else NOBODY) if launch.step != protocol.ALLOC else None
        if spare is None:
            try:
                os.mkdir(entry, 0o700)
            except FileExistsError:
                return False
        elif os.path.exists(entry):  # only the agent makes entries, so nothing comes between this and the rename
            self._spare_names.append(os.path.basename(spare))
            return False
        folder = spare or entry
        self._faults.reached("claim.made")
        if script:
            self._keep_script(launch.token, script, owner, spare)
        spec = dict(protocol.to_json(launch), boot_id=boot)
        write_plainly(os.path.join(folder, "spec.new"), to_bytes(spec), 0o600, new=False)
        os.rename(os.path.join(folder, "spec.new"), os.path.join(folder, "spec"))
        if spare is not None:
            os.rename(spare, entry)
        self._faults.reached("claim.written")
        return True

    def _take_spare(self, uid: int) -> Optional[str]:
        """Return the path of an entry to reuse, None if there is none.

        The script in it, if any, is of this user.
        """
        self._spare_names = self._spare_names or os.listdir(self.spare)
        if not self._spare_names:
            return None
        mine = "%d." % uid
        name = next((name for name in reversed(self._spare_names) if name.startswith(mine)), self._spare_names[-1])
        self._spare_names.remove(name)
        spare = os.path.join(self.spare, name)
        if not name.startswith((mine, "%d." % NOBODY)):
            remove_file(os.path.join(spare, "script"))  # a claim that found the disk full may have taken it
        return spare

    def _keep_script(self, token: str, script: bytes, owner: Tuple[int, int], spare: Optional[str]) -> None:
        path = self.script(token)
        if spare is None or not _rewrite(os.path.join(spare, "script"), script):
            write_plainly(path, script, 0o500)
        else:
            os.rename(os.path.join(spare, "script"), path)
        if os.geteuid() == 0:
            os.chown(path, *owner, follow_symlinks=False)

    def revoke(self, token: str, final: Dict[str, Any]) -> bool:
        """Write a tombstone for a token without a claim; return False if it has an entry."""
        self._faults.reached("revoke.before")
        try:
            os.mkdir(self.entry(token), 0o700)
        except FileExistsError:
            return False
        self._faults.reached("revoke.made")
        self.write_final(token, final)
        return True

    def invalidate(self, token: str) -> None:
        """Remove the launch of an entry durably, so that no later agent starts it.

        Needs no disk space.
        """
        entry = self.entry(token)
        try:
            os.unlink(os.path.join(entry, "spec"))
        except FileNotFoundError:
            return  # it never had one, or there is no entry
        sync_folder(entry)

    def write_started(self, token: str, record: Dict[str, Any]) -> None:
        """Make durable which processes run, and with them the claim."""
        self._faults.reached("started.before")
        write_durably(self.entry(token), "started", to_bytes(dict(record, token=token)), parents=(self.path,))
        self._faults.reached("started.after")

    def write_final(self, token: str, record: Dict[str, Any]) -> None:
        """Make durable how the step ended. An existing record stays."""
        self._faults.reached("final.before")
        entry = self.entry(token)
        if not os.path.exists(os.path.join(entry, "final")):
            named = os.path.exists(os.path.join(entry, "started"))  # then the entry's name is durable already
            write_durably(entry, "final", to_bytes(dict(record, token=token)), parents=() if named else (self.path,))
        self._faults.reached("final.after")

    def renew(self, token: str, asked_s: float) -> None:
        """Record when the step's lease was renewed."""
        write_renewal(self.entry(token), asked_s)

    def renewed_s(self, token: str) -> Optional[float]:
        """Return when the step's lease was renewed last, None if that was not recorded."""
        return read_renewal(self.entry(token))

    def try_to_write(self) -> None:
        """Try to write as much as a claim needs. Raises OSError."""
        write_durably(self.path, "try", bytes(TRY_BYTES))
        os.unlink(os.path.join(self.path, "try"))

    def read(self, token: str) -> Found:
        """Return the entry of a token on disk."""
        launch, boot = self._read_spec(token)
        return Found(
            token=token,
            launch=launch,
            boot_id=boot,
            started=self._read_file(token, "started"),
            final=self._read_file(token, "final"),
        )

    def read_launch(self, token: str) -> Optional[protocol.Launch]:
        """Return the launch of a claimed token, None if its entry has none."""
        return self._read_spec(token)[0]

    def _read_spec(self, token: str) -> Tuple[Optional[protocol.Launch], str]:
        spec = self._read_file(token, "spec")
        if spec is None:
            return None, ""
        boot = spec.pop("boot_id", "")
        return _launch(dict(spec, token=token)), boot

    def _read_file(self, token: str, name: str) -> Optional[Dict[str, Any]]:
        """Return the object in a file of the entry, without its token.

        None: it is missing, was cut off, or is of a token that had the entry before.
        """
        found = read_object(os.path.join(self.entry(token), name))
        return found if found is not None and found.pop("token", None) == token else None

    def open_lock(self, token: str) -> int:
        """Return a descriptor of the entry's lock file for the caller to lock.

        The lock is a second name of the spec, because creating a file can take a good part of a launch.
        """
        entry = self.entry(token)
        path = os.path.join(entry, "lock")
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(path, flags)
        except FileNotFoundError:
            pass
        try:
            os.link(os.path.join(entry, "spec"), path, follow_symlinks=False)
        except OSError:
            flags |= os.O_CREAT  # a file system without hard links, or an entry without a spec
        return os.open(path, flags, 0o600)

    # ----- the records of jobs with a prolog or an epilog

    def note_scripts(self, name: str, record: Dict[str, Any], durably: bool) -> None:
        """Write the record of a job with scripts.

        What is written durably stays whole in a power failure, so later states are in a file of their own.
        """
        self._faults.reached("scripts.before")
        path, data = os.path.join(self.scripts, name + SCRIPT_STATE), to_bytes(record)
        if durably:
            os.makedirs(self.scripts, 0o700, exist_ok=True)
            remove_file(path)
            write_durably(self.scripts, name, data, parents=(self.root,))
        else:
            write_plainly(path + NEW_RECORD, data, 0o600, new=False)
            os.rename(path + NEW_RECORD, path)
        self._faults.reached("scripts.%s" % record["state"])

    def forget_scripts(self, name: str) -> None:
        """Remove the record of a job whose scripts are over."""
        for path in (os.path.join(self.scripts, name), os.path.join(self.scripts, name + SCRIPT_STATE)):
            if os.path.isdir(path) and not os.path.islink(path):
                remove_tree(path)  # a damaged disk
            else:
                remove_file(path)
        self._faults.reached("scripts.over")

    def script_records(self) -> List[Tuple[str, List[Dict[str, Any]]]]:
        """Return the name of each job with scripts and its record.

        The record is what can be read of it, newest first.
        """
        try:
            names = os.listdir(self.scripts)
        except FileNotFoundError:
            return []
        found = []
        for name in sorted(name for name in names if not name.endswith(BESIDE_RECORD)):
            records = []
            for path in (os.path.join(self.scripts, name + SCRIPT_STATE), os.path.join(self.scripts, name)):
                try:
                    records.append(read_object(path))
                except OSError:
                    continue  # a damaged disk: as if it was cut off
            found.append((name, [record for record in records if record is not None]))
        return found

    def load(self) -> List[Found]:
        """Return all entries. Remove empty ones: their agent died before it reported anything."""
        for name in os.listdir(self.spare):
            remove_tree(os.path.join(self.spare, name))
        names = [name for name in sorted(os.listdir(self.path)) if read_token(name) is not None]
        empty = {name for name in names if not KEPT.intersection(os.listdir(self.entry(name)))}
        for name in empty:
            self._remove(name)
        left = [name for name in names if name not in empty]
        over = [name for name in left if self.done_log.is_noted(name)]
        for name in over:
            self._remove(name)  # an earlier agent had no time for it
        for name in set(os.listdir(self.jobs)).difference(left):
            os.unlink(self.script(name))  # a power failure took its entry
        return [self.read(name) for name in left if name not in over]

    def note_finished(self, tokens: List[str]) -> None:
        """Make durable that these tokens are over, so that their entries may be removed."""
        self._faults.reached("forget.before")
        self.done_log.add(tokens)
        self._faults.reached("forget.noted")

    def remove(self, tokens: Iterable[str]) -> None:
        """Remove entries.

        A child of the agent does it, because it can be slow; a new agent finds what is left.
        """
        room = MAX_SPARE - len(os.listdir(self.spare))
        for token in tokens:
            self._remove(token, reuse=room > 0)
            room -= 1
        self._faults.reached("forget.after")

    def _remove(self, token: str, reuse: bool = False) -> None:
        entry, script = self.entry(token), self.script(token)
        uid = _only_owner(script) if reuse else NOBODY
        if uid != NOBODY:
            os.rename(script, os.path.join(entry, "script"))
        else:
            remove_file(script)  # a step has none
        if not reuse:
            remove_tree(entry)
            return
        for name in os.listdir(entry):
            if name in REUSED:
                os.rename(os.path.join(entry, name), os.path.join(entry, name + ".new"))
                os.truncate(os.path.join(entry, name + ".new"), 0)  # a spec has the job's environment
            elif name != "script":
                os.unlink(os.path.join(entry, name))
        os.rename(entry, os.path.join(self.spare, "%d.%s" % (uid, token)))


def _only_owner(script: str) -> int:
    """Return the user of a script that can be reused, NOBODY if it cannot, or there is none."""
    try:
        about = os.lstat(script)
        return about.st_uid if about.st_nlink == 1 and not os.listxattr(script, follow_symlinks=False) else NOBODY
    except OSError:
        return NOBODY


def _rewrite(path: str, data: bytes) -> bool:
    """Replace the contents of a script, or remove it and return False.

    False: that is not possible at once.

    The tasks of an array have one script, so it often contains this already. It is compared, because its user may change it.
    """
    try:
        os.chmod(path, 0o700)
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        remove_file(path)
        return False
    try:
        if os.pread(fd, len(data) + 1, 0) != data:
            os.ftruncate(fd, 0)
            write_all(fd, data)
        os.fchmod(fd, 0o500)
    finally:
        os.close(fd)
    return True


def _launch(spec: Dict[str, Any]) -> Optional[protocol.Launch]:
    try:
        launch = protocol.from_json(spec)
    except protocol.WireError:
        return None  # written by an agent of another version
    return launch if isinstance(launch, protocol.Launch) else None


def token_of(found: Found) -> Token:
    """Return the token of an entry that `load` found."""
    token = read_token(found.token)
    assert token is not None
    return token


# ----- the identity of a spool: no other directory has it, on this machine or on another one
#     ROOT/spool/identity   {"id": 32 random hex digits}
#
# The controller remembers for each launch the spool that it was sent to. The inventory of another spool proves nothing about the
# launch: it may still run in a directory, or on a machine, that the node's name does not lead to any more.
#
# The machine's id and the file's inode are parts of the identity, so a copied directory, and a directory that several machines
# see through a network file system, are other spools. `hardware` tells machines apart that were cloned from one image and share
# /etc/machine-id; it is empty if nothing can be found out (in a container, for example). The controller keeps hashes only.
#
# The file is made once, by link(2): a crash leaves it whole or absent. It is never replaced. Source: machine-id(5).


IDENTITY = "identity"
MACHINE_IDS = ("/etc/machine-id", "/var/lib/dbus/machine-id")
NETWORK = "/sys/class/net"
PRODUCT_UUID = "/sys/class/dmi/id/product_uuid"


def identity_of(spool: str, environ: Mapping[str, str]) -> Dict[str, Any]:
    """Return the identity of the spool directory; create it if there is none. Raises OSError."""
    path = os.path.join(spool, IDENTITY)
    record = read_object(path)
    if record is None:
        make_identity(spool)
        record = read_object(path) or {}
    return {
        "id": record.get("id", ""),
        "inode": os.stat(path).st_ino,
        "machine": machine_id(environ),
        "hardware": hardware(environ),
    }


def make_identity(spool: str) -> None:
    """Create the file durably; a file that another process created meanwhile stays.

    Raises OSError.
    """
    path = os.path.join(spool, IDENTITY)
    data = to_bytes({"id": os.urandom(16).hex()})
    temporary = "%s.%s" % (path, os.urandom(8).hex())
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        try:
            os.link(temporary, path, follow_symlinks=False)
        except FileExistsError:
            pass
        except OSError:
            os.rename(temporary, path)  # a file system without hard links; the agent's lock excludes others
    finally:
        remove_file(temporary)
    sync_folder(spool)


def machine_id(environ: Mapping[str, str]) -> str:
    """Return /etc/machine-id, or the host name if there is none.

    HPCNODE_MACHINE_ID overrides it for simulated machines.
    """
    if environ.get("HPCNODE_MACHINE_ID"):
        return environ["HPCNODE_MACHINE_ID"]
    for path in MACHINE_IDS:
        found = _first_line(path)
        if found:
            return found
    return "host " + os.uname().nodename


def hardware(environ: Mapping[str, str]) -> List[str]:
    """Return ids of the firmware and the network devices; empty if there are none."""
    if environ.get("HPCNODE_MACHINE_ID"):
        return ["simulated"]
    return [mark for mark in (_first_line(PRODUCT_UUID), *sorted(_addresses())) if mark]


def _addresses() -> Iterator[str]:
    """Yield the addresses of hardware network devices."""
    try:
        names = os.listdir(NETWORK)
    except OSError:
        return
    for name in names:
        if os.path.exists(os.path.join(NETWORK, name, "device")):
            yield _first_line(os.path.join(NETWORK, name, "address")) or ""


def _first_line(path: str) -> Optional[str]:
    try:
        with open(path) as file:
            return file.readline(256).strip()
    except (OSError, ValueError):
        return None


def remove_file(path: str) -> None:
    """Remove a file if it is there."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
