"""Which checkpoints may go, and their removal in two phases.

A chain is a base with all that stands on it, and goes as a whole.
Rules: first a manifest is renamed so that no reader starts on it; only the next pass, at least one base later, removes
its data and then the renamed manifest.  A crash anywhere leaves work for the next pass and never a manifest without its
data.  What writers that died have left is removed too, if their attempt is fenced, when it was seen twice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpctrain.checkpoint.format.manifest import SUFFIX, Manifest, checkpoint_names, from_bytes, order_of
from hpctrain.checkpoint.writing import fence, files
from hpctrain.errors import DamagedError

DOOMED = ".doomed"
# Data files and drafts bear the attempt that made them.
LEFTOVER = re.compile(
    r"(?:data-|part-)?(step-\d{10,}\.a(\d{4,}))(?:-[0-9a-f]+\.bin|\.r\d+\.json|(?:\.r\d+)?\.json\.[0-9a-f]+\.tmp)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """Which chains stay: the newest `keep`, and of the others one in each stretch of `every_s` seconds; 0: none of them."""

    keep: int
    every_s: float = 0.0

    def kept(self, written_at_s: Mapping[str, float]) -> set[str]:
        """Choose among chains, given from the newest to the oldest with the time of their base."""
        names = list(written_at_s)
        kept = names[: max(1, self.keep)]
        if self.every_s > 0:
            first_of: dict[float, str] = {}
            for name in reversed(names):
                first_of.setdefault(written_at_s[name] // self.every_s, name)
            kept += first_of.values()
        return set(kept)


class Retention:
    """Keeps what the policy says; one pass after each base."""

    def __init__(self, claim: fence.Claim, policy: RetentionPolicy, distrusted: Collection[str] = ()) -> None:
        self._claim = claim
        self._policy = policy
        self._distrusted = frozenset(distrusted)  # found damaged at the start: they do not count as kept ones
        self._seen_unused: frozenset[str] = frozenset()

    def sweep(self) -> list[str]:
        """Finish what the last pass doomed, doom what is too old, and return the names of removed files.

        Raises:
            StaleAttemptError: a later attempt has taken over, nothing was touched.
        """
        fence.check(self._claim)
        directory = self._claim.directory
        removed = remove_doomed(directory)
        doom(directory, self._policy, self._distrusted)
        unused = self._leftovers(directory)
        removed += [name for name in sorted(unused & self._seen_unused) if files.remove(directory / name)]
        self._seen_unused = unused
        return removed

    def _leftovers(self, directory: Path) -> frozenset[str]:
        """What no manifest, be it readable or not, can refer to: files of checkpoints that were never published."""
        names = os.listdir(directory)
        published = {name.removesuffix(DOOMED).removesuffix(SUFFIX) for name in names}
        found = ((LEFTOVER.fullmatch(name), name) for name in names)
        return frozenset(
            name for match, name in found if match and match[1] not in published and int(match[2]) < self._claim.attempt
        )


def prune(directory: Path, policy: RetentionPolicy, damaged: Collection[str]) -> list[str]:
    """Remove now what the policy does not keep, and return the names of removed files.

    `damaged` do not count as kept ones.  For people: readers begin with the newest chains, which stay.
    """
    doom(directory, policy, damaged)
    return remove_doomed(directory)


def doom(directory: Path, policy: RetentionPolicy, distrusted: Collection[str]) -> None:
    """Rename the manifests that the policy does not keep, so that no reader starts on them."""
    manifests = _readable(directory)
    newest: dict[str, tuple[int, int]] = {}
    for name, manifest in manifests.items():
        if name not in distrusted:
            newest[manifest.base] = max(newest.get(manifest.base, (-1, -1)), order_of(name) or (-1, -1))
    bases = sorted(newest, key=lambda base: newest[base], reverse=True)
    times = {base: manifests[base].facts.written_at_s if base in manifests else 0.0 for base in bases}
    kept = policy.kept(times)
    # From the newest on, so that no manifest ever lacks the one it stands on.
    for name in sorted(manifests, key=lambda name: order_of(name) or (), reverse=True):
        if manifests[name].base in newest and manifests[name].base not in kept:
            with suppress(FileNotFoundError):  # somebody else is at it too
                os.rename(directory / (name + SUFFIX), directory / (name + SUFFIX + DOOMED))
    files.sync_directory(directory)


def remove_doomed(directory: Path) -> list[str]:
    """Remove the data of doomed manifests that no other one refers to, then them."""
    doomed = sorted(name for name in os.listdir(directory) if name.endswith(DOOMED))
    used = {data.file for manifest in _readable(directory).values() for data in manifest.data} if doomed else set()
    removed = []
    for name in doomed:
        try:
            data = [one.file for one in from_bytes((directory / name).read_bytes()).data]
        except (DamagedError, FileNotFoundError):
            data = []  # its data files will turn up as leftovers
        removed += [gone for gone in (*data, name) if gone not in used and files.remove(directory / gone)]
    return removed


def _readable(directory: Path) -> dict[str, Manifest]:
    manifests = {}
    for name in checkpoint_names(directory):
        try:
            manifests[name] = from_bytes((directory / (name + SUFFIX)).read_bytes())
        except (DamagedError, FileNotFoundError):
            continue  # not ours to judge: what cannot be read is neither used nor removed
    return manifests
