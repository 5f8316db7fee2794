"""Track job scripts: where each text is stored, and which jobs use it.

A text is in the database once, under its SHA-256, and not in memory. A specification in the queue
has its hash and length. A script stays until the last job in memory that uses it is purged
(``min_job_age_s`` after its end). Scripts of ended jobs are deleted earlier if all scripts of their
account together exceed its limit.

Knows no database: `hpcsched.store.store` writes, reads and deletes the texts.
"""

from __future__ import annotations

from collections.abc import Collection
from hashlib import sha256

from hpcsched.model.frozen import replace
from hpcsched.model.job import FINAL, Job
from hpcsched.model.spec import JobSpec


def set_apart(spec: JobSpec) -> tuple[JobSpec, bytes]:
    """Return the specification as queued, and the text of its script (empty if it has none)."""
    if any(one.has_script for one in spec.components):  # components run the script of their job
        bare = tuple(replace(one, script="", script_sha256="", script_bytes=0) for one in spec.components)
        spec = replace(spec, components=bare)
    if not spec.script:
        return spec, b""
    text = spec.script.encode("utf-8", "surrogateescape")
    return replace(spec, script="", script_sha256=sha256(text).hexdigest(), script_bytes=len(text)), text


class ScriptUses:
    """Counts the jobs in memory that use each script, by account and hash.

    Jobs that have not ended are counted separately.
    """

    def __init__(self) -> None:
        self._unended: dict[tuple[int, str], int] = {}
        self._ended: dict[tuple[int, str], int] = {}  # oldest script first
        self._users: dict[str, int] = {}  # by hash: entries in both
        self._sizes: dict[str, int] = {}
        self._unended_bytes: dict[int, int] = {}  # by account; each script counts once
        self._ended_bytes: dict[int, int] = {}
        self._unused: dict[str, None] = {}

    def add(self, job: Job, count: int = 1) -> None:
        """Add `count` jobs like `job` to the counts."""
        sha256 = job.spec.script_sha256
        if not sha256:
            return
        key = (job.uid, sha256)
        ended = job.state in FINAL
        table, in_bytes = (self._ended, self._ended_bytes) if ended else (self._unended, self._unended_bytes)
        if key in table:
            table[key] += count
            return
        table[key] = count
        in_bytes[job.uid] = in_bytes.get(job.uid, 0) + job.spec.script_bytes
        self._users[sha256] = self._users.get(sha256, 0) + 1
        self._sizes[sha256] = job.spec.script_bytes
        self._unused.pop(sha256, None)

    def remove(self, job: Job) -> None:
        """Remove `job` from the counts."""
        key = (job.uid, job.spec.script_sha256)
        table = self._ended if job.state in FINAL else self._unended
        if key not in table:
            return  # it has no script, or the script was deleted early
        table[key] -= 1
        if not table[key]:
            self._drop(table, key)

    def _drop(self, table: dict[tuple[int, str], int], key: tuple[int, str]) -> None:
        uid, sha256 = key
        in_bytes = self._ended_bytes if table is self._ended else self._unended_bytes
        del table[key]
        in_bytes[uid] -= self._sizes[sha256]
        if not in_bytes[uid]:
            del in_bytes[uid]
        self._users[sha256] -= 1
        if not self._users[sha256]:
            del self._users[sha256], self._sizes[sha256]
            self._unused[sha256] = None

    def has(self, job: Job) -> bool:
        """Return whether the script of `job` is still stored."""
        return not job.spec.script_sha256 or job.spec.script_sha256 in self._users

    def unended_bytes(self, uid: int) -> int:
        """Return the bytes of the different scripts of the account's waiting and running jobs."""
        return self._unended_bytes.get(uid, 0)

    def let_go(self, most_bytes: int) -> bool:
        """Drop the oldest scripts of ended jobs for accounts that use more than `most_bytes`.

        Return whether any was dropped.
        """
        over = [uid for uid, ended in self._ended_bytes.items() if ended + self._unended_bytes.get(uid, 0) > most_bytes]
        for uid in over:
            # Drop a quarter more than needed, so that the next ended job does not scan all scripts
            # again.
            least = min(most_bytes - self._unended_bytes.get(uid, 0), most_bytes * 3 // 4)
            for key in [key for key in self._ended if key[0] == uid]:
                if self._ended_bytes.get(uid, 0) <= least:
                    break
                self._drop(self._ended, key)
        return bool(over)

    def keep_only(self, stored: Collection[str]) -> None:
        """Drop scripts of ended jobs that are not among the `stored` hashes.

        These were deleted before the last restart.
        """
        for key in [key for key in self._ended if key[1] not in stored]:
            self._drop(self._ended, key)

    def take_unused(self) -> list[str]:
        """Return the hashes of scripts that no job uses any more, each once."""
        unused = list(self._unused)
        self._unused.clear()
        return unused

    def put_back(self, unused: list[str]) -> None:
        """Queue hashes for `take_unused` again, because they could not be deleted."""
        self._unused |= dict.fromkeys(sha256 for sha256 in unused if sha256 not in self._users)

    def unknown(self, stored: list[str]) -> list[str]:
        """Return those of the `stored` hashes that no job uses."""
        return [sha256 for sha256 in stored if sha256 not in self._users]
