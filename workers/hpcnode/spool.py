"""The node's memory of what it was asked to run: one directory for each token, on the node's own disk.

    ROOT/epochs               the controllers' terms that were seen, by incarnation
    ROOT/seq                  every report number below this may have been used
    ROOT/spool/TOKEN/spec     the Launch; the directory itself is the claim
                     lock     another name of the same file, held by the shepherd as long as it lives, and by what it has
                              forked but not released
                     started  who runs: written before the program is released
                     final    how it ended, or that it never will run
                     lease    when the controller was heard of last (see `lease`)
    ROOT/spool/identity       which spool this is (see `identity`)
    ROOT/spool/done_log, .1     tokens that are over and were acknowledged
    ROOT/jobs/TOKEN           the batch script, its user's to read and to run
    ROOT/spare                files of removed entries, to be written anew: see below

What is durable when, and why that is enough for *never twice*:
- A claim need not survive a power failure by itself: until `started` is durable nothing was released, and after a power
  failure nothing runs. So `mkdir` and `spec` are only written (they survive the agent), and the fsyncs of `started` (file,
  entry, spool) make the claim durable with it, before the program is released. They run in the shepherds, side by side.
- `final` is durable before it is reported. A tombstone (bar) is durable before it is reported; on a full disk, instead of it,
  that the entry has no `spec` any more (`void`).
- An epoch is durable before a command of that controller is obeyed.
- An entry goes only when its final report was acknowledged, and after the log has it.

To make a file takes some file systems longer than all the rest (ext4 looks through what was deleted of late), so what held
`started` and `final` of a removed entry is lent to a later one, as `started.new` and `final.new`. Nobody reads those; they are
emptied, written and synced before they get a name that counts, as new ones would be. After a power failure a file might still
have its name here, too: so no agent uses what it finds, and scripts and specs, which are not synced, are never lent.

Knows nothing of processes, sockets and clocks. Its directories are 0700 and the agent's own, `jobs` 0711: no job's user can
make or replace a name in them, so paths are safe here.
"""

from __future__ import annotations

import os
from typing import Any, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Set, Tuple

from hpcnode.lease import read_renewal, write_renewal
from hpcnode.os.durable import read_object, sync_folder, sync_way_to, to_bytes, write_all, write_durably, write_plainly
from hpcnode.os.faults import CrashPoints
from hpcnode.wire import protocol
from hpcnode.wire.tokens import Life, Token, read_token

# ----- what is over for good: the log that keeps a late, doubled Launch from running again after its entry has gone
# Two kinds of lines, in `spool/done_log` and (older) `spool/done_log.1`:
#     t TOKEN                       this token is over and was acknowledged
#     j INCARNATION JOB ATTEMPT     nothing of this job's attempts up to this one may start here (ATTEMPT-STAY: see `tokens`)
#
# The log is durable before an entry is removed, and before an EndJob is obeyed. It is bounded: when `done_log` has LINES lines it
# becomes `done_log.1` and that is dropped, so at least the last LINES facts are known. What makes a launch later than that
# impossible is not this log but the channel: it keeps order, the controller sends an Ack only after it has committed the end of
# that token and never launches it after that, an older controller is refused by its epoch, and a restored one is of another
# incarnation. The log is for what remains: a frame that was doubled or delayed within one controller's term.


LINES = 32_768
NEVER = (-1, 0)


class _DoneFile:
    """One of the two files, in memory."""

    def __init__(self) -> None:
        self.nonces: Set[bytes] = set()
        self.floors: Dict[Tuple[str, int], Life] = {}
        self.lines = 0

    def take(self, line: str) -> None:
        """Learn one line; a line cut off by a power failure says nothing (its fsync never returned)."""
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
    """The tokens and attempts that are over on this node."""

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
        """Return whether this very token was noted."""
        token = read_token(text)
        return token is not None and any(_name(token) in part.nonces for part in (self._newer, self._older))

    def add(self, tokens: Iterable[str]) -> None:
        """Note these tokens durably."""
        self._append(["t " + text for text in tokens])

    def end_attempts(self, job: Tuple[str, int], life: Life) -> None:
        """Note durably that no attempt of the job up to this one (of its last: no stay up to this) may start here."""
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
    """Return what no other token of this node has: the claims of one attempt share a nonce, each has a stay of its own."""
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
TRY_BYTES = 64 << 10  # what an entry with a script may take
MAX_FORMER_INCARNATIONS = 64
KEPT = frozenset({"spec", "lock", "started", "final"})
RECORDS = ("started", "final")
MAX_SPARE = 256  # files


class Found(NamedTuple):
    """One entry as it is on the disk. Whatever is missing or was cut off by a power failure is None."""

    token: str
    launch: Optional[protocol.Launch]
    boot_id: str  # of the boot in which it was claimed
    started: Optional[Dict[str, Any]]
    final: Optional[Dict[str, Any]]


class Epochs(NamedTuple):
    """Which controller this node obeys: `epoch` of `incarnation`; those in `former` never again."""

    incarnation: str
    epoch: int
    former: Tuple[str, ...]


class Spool:
    """The spool below one root directory."""

    def __init__(self, root: str, faults: CrashPoints) -> None:
        self.root = root
        self.path = os.path.join(root, "spool")
        self.jobs = os.path.join(root, "jobs")
        self.spare = os.path.join(root, "spare")
        self._spare_names: List[str] = []
        self._faults = faults
        os.makedirs(self.path, 0o700, exist_ok=True)
        os.makedirs(self.jobs, 0o711, exist_ok=True)
        os.makedirs(self.spare, 0o700, exist_ok=True)
        sync_way_to(os.path.abspath(root))  # what is durable below is only as durable as the way to it
        os.chmod(self.jobs, 0o711 if os.geteuid() == 0 else 0o700)
        self.done_log = DoneLog(self.path, faults)

    # ----- the node's own numbers

    def epochs(self) -> Epochs:
        """Return the stored epochs."""
        obj = read_object(os.path.join(self.root, "epochs")) or {}
        return Epochs(obj.get("incarnation", ""), obj.get("epoch", 0), tuple(obj.get("former", ())))

    def store_epochs(self, epochs: Epochs) -> None:
        """Make the epochs durable."""
        self._faults.reached("epoch.before")
        kept = epochs._replace(former=epochs.former[-MAX_FORMER_INCARNATIONS:])
        write_durably(self.root, "epochs", to_bytes(kept._asdict()))
        self._faults.reached("epoch.after")

    def reserve_seqs(self, used_below: int = 0) -> Tuple[int, int]:
        """Reserve numbers for reports: returns [first, end), durably ours, above all that were ever used."""
        stored = (read_object(os.path.join(self.root, "seq")) or {}).get("end", 1)
        first = max(stored, used_below)
        write_durably(self.root, "seq", to_bytes({"end": first + SEQ_BLOCK}))
        return first, first + SEQ_BLOCK

    # ----- entries

    def entry(self, token: str) -> str:
        """Return the path of a token's entry."""
        return os.path.join(self.path, token)

    def script(self, token: str) -> str:
        """Return the path of the batch script."""
        return os.path.join(self.jobs, token)

    def claim(self, launch: protocol.Launch, script: bytes, boot: str, owner: Tuple[int, int]) -> bool:
        """Claim the token; False if it was claimed or revoked before. The script is its user's to read and to run."""
        entry = self.entry(launch.token)
        self._faults.reached("claim.before")
        try:
            os.mkdir(entry, 0o700)
        except FileExistsError:
            return False
        self._faults.reached("claim.made")
        if script:
            self._keep_script(launch.token, script, owner)
        spec = dict(protocol.to_json(launch), boot_id=boot)
        write_plainly(os.path.join(entry, "spec.new"), to_bytes(spec), 0o600)
        os.rename(os.path.join(entry, "spec.new"), os.path.join(entry, "spec"))
        self._faults.reached("claim.written")
        if launch.step != protocol.ALLOC:
            self._reuse_files(entry)
        return True

    def _reuse_files(self, entry: str) -> None:
        """Put spare files where the entry's records are going to be written, if there are some."""
        for record in RECORDS:
            self._spare_names = self._spare_names or os.listdir(self.spare)
            if not self._spare_names:
                return
            try:
                os.rename(os.path.join(self.spare, self._spare_names.pop()), os.path.join(entry, record + ".new"))
            except OSError:
                return  # then the record's writer makes one

    def _keep_script(self, token: str, script: bytes, owner: Tuple[int, int]) -> None:
        path = self.script(token)
        write_plainly(path, script, 0o500)
        if os.geteuid() == 0:
            os.chown(path, *owner, follow_symlinks=False)

    def revoke(self, token: str, final: Dict[str, Any]) -> bool:
        """Leave a tombstone for a token without a claim; False if there is an entry."""
        self._faults.reached("revoke.before")
        try:
            os.mkdir(self.entry(token), 0o700)
        except FileExistsError:
            return False
        self._faults.reached("revoke.made")
        self.write_final(token, final)
        return True

    def invalidate(self, token: str) -> None:
        """Take the launch out of an entry, durably, so that no later agent starts it. Needs no room on the disk."""
        entry = self.entry(token)
        try:
            os.unlink(os.path.join(entry, "spec"))
        except FileNotFoundError:
            return  # it never had one, or is no entry at all
        sync_folder(entry)

    def write_started(self, token: str, record: Dict[str, Any]) -> None:
        """Make durable who runs, and with it the claim."""
        self._faults.reached("started.before")
        write_durably(self.entry(token), "started", to_bytes(record), parents=(self.path,))
        self._faults.reached("started.after")

    def write_final(self, token: str, record: Dict[str, Any]) -> None:
        """Make durable how it ended; whatever stood there first stays."""
        self._faults.reached("final.before")
        entry = self.entry(token)
        if not os.path.exists(os.path.join(entry, "final")):
            named = os.path.exists(os.path.join(entry, "started"))  # then the entry's own name is durable already
            write_durably(entry, "final", to_bytes(record), parents=() if named else (self.path,))
        self._faults.reached("final.after")

    def renew(self, token: str, asked_s: float) -> None:
        """Note when the step's lease was renewed last."""
        write_renewal(self.entry(token), asked_s)

    def renewed_s(self, token: str) -> Optional[float]:
        """Return when the step's lease was renewed last, as far as that is noted."""
        return read_renewal(self.entry(token))

    def try_to_write(self) -> None:
        """Find out whether a claim could be kept. Raises OSError if it could not."""
        write_durably(self.path, "try", bytes(TRY_BYTES))
        os.unlink(os.path.join(self.path, "try"))

    def read(self, token: str) -> Found:
        """Return what the disk says of a token that has an entry."""
        entry = self.entry(token)
        launch, boot = self._read_spec(entry)
        return Found(
            token=token,
            launch=launch,
            boot_id=boot,
            started=read_object(os.path.join(entry, "started")),
            final=read_object(os.path.join(entry, "final")),
        )

    def read_launch(self, token: str) -> Optional[protocol.Launch]:
        """Return what a claimed token is to run, None if its entry does not say."""
        return self._read_spec(self.entry(token))[0]

    def _read_spec(self, entry: str) -> Tuple[Optional[protocol.Launch], str]:
        spec = read_object(os.path.join(entry, "spec"))
        boot = spec.pop("boot_id", "") if spec else ""
        return _launch(spec), boot

    def open_lock(self, token: str) -> int:
        """Return a descriptor of the entry's lock file, to be locked by the caller.

        The lock is a second name of the spec: a file system may take a good part of a launch to make one file more.
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
            flags |= os.O_CREAT  # a file system without second names, or an entry without a spec
        return os.open(path, flags, 0o600)

    def load(self) -> List[Found]:
        """Return all entries. One that holds nothing yet says nothing: its maker died before it had answered anybody."""
        for name in os.listdir(self.spare):
            os.unlink(os.path.join(self.spare, name))
        names = [name for name in sorted(os.listdir(self.path)) if read_token(name) is not None]
        empty = {name for name in names if not KEPT.intersection(os.listdir(self.entry(name)))}
        for name in empty:
            self._remove(name)
        left = [name for name in names if name not in empty]
        over = [name for name in left if self.done_log.is_noted(name)]
        for name in over:
            self._remove(name)  # an agent before us had not come to it
        for name in set(os.listdir(self.jobs)).difference(left):
            os.unlink(self.script(name))  # a power failure took its entry
        return [self.read(name) for name in left if name not in over]

    def note_finished(self, tokens: List[str]) -> None:
        """Make durable that these acknowledged tokens are over: their entries may go."""
        self._faults.reached("forget.before")
        self.done_log.add(tokens)
        self._faults.reached("forget.noted")

    def remove(self, tokens: Iterable[str]) -> None:
        """Remove entries. Slow on some file systems, so the agent lets a child do it; what stays is found at its start."""
        room = MAX_SPARE - len(os.listdir(self.spare))
        for token in tokens:
            self._remove(token, keep_records=room > 0)
            room -= len(RECORDS)
        self._faults.reached("forget.after")

    def _remove(self, token: str, keep_records: bool = False) -> None:
        entry = self.entry(token)
        try:
            os.unlink(self.script(token))
        except FileNotFoundError:
            pass  # a step without one
        for name in os.listdir(entry):
            if keep_records and name in RECORDS:
                os.rename(os.path.join(entry, name), os.path.join(self.spare, "%s.%s" % (token, name)))
            else:
                os.unlink(os.path.join(entry, name))
        os.rmdir(entry)


def _launch(spec: Optional[Dict[str, Any]]) -> Optional[protocol.Launch]:
    if spec is None:
        return None
    try:
        launch = protocol.from_json(spec)
    except protocol.WireError:
        return None  # an agent of another version wrote it
    return launch if isinstance(launch, protocol.Launch) else None


def token_of(found: Found) -> Token:
    """Return the token of an entry that `load` found."""
    token = read_token(found.token)
    assert token is not None
    return token


IDENTITY = "identity"
MACHINE_IDS = ("/etc/machine-id", "/var/lib/dbus/machine-id")
NETWORK = "/sys/class/net"
PRODUCT_UUID = "/sys/class/dmi/id/product_uuid"


def identity_of(spool: str, environ: Mapping[str, str]) -> Dict[str, Any]:
    """Return the identity of the spool directory; make it if there is none. Raises OSError."""
    path = os.path.join(spool, IDENTITY)
    record = read_object(path)
    if record is None:
        make_identity(spool)
        record = read_object(path) or {}
    return {
        "id": record.get("id", ""),
        "upgraded": record.get("upgraded", False),
        "inode": os.stat(path).st_ino,
        "machine": machine_id(environ),
        "hardware": hardware(environ),
    }


def make_identity(spool: str) -> None:
    """Make the file, durably; one that another process has made meanwhile stays. Raises OSError."""
    path = os.path.join(spool, IDENTITY)
    upgraded = os.path.exists(os.path.join(os.path.dirname(spool), "epochs"))
    data = to_bytes({"id": os.urandom(16).hex(), "upgraded": upgraded})
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
            os.rename(temporary, path)  # a file system without second names; the agent's lock keeps others away
    finally:
        _unlink(temporary)
    sync_folder(spool)


def machine_id(environ: Mapping[str, str]) -> str:
    """Return what /etc/machine-id says, or the host's name where there is none.

    HPCNODE_MACHINE_ID is for machines that are simulated on one.
    """
    if environ.get("HPCNODE_MACHINE_ID"):
        return environ["HPCNODE_MACHINE_ID"]
    for path in MACHINE_IDS:
        found = _first_line(path)
        if found:
            return found
    return "host " + os.uname().nodename


def hardware(environ: Mapping[str, str]) -> List[str]:
    """Return what the firmware and the network devices say of the machine; empty if nothing does."""
    if environ.get("HPCNODE_MACHINE_ID"):
        return ["simulated"]
    return [mark for mark in (_first_line(PRODUCT_UUID), *sorted(_addresses())) if mark]


def _addresses() -> Iterator[str]:
    """Yield the addresses of network devices that are more than software."""
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


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
