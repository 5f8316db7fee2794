"""Retention: the removal of old checkpoints, in two phases.

A chain is a base with all its increments, and is removed as a whole.
Rules: first a manifest is renamed, so that no reader starts on it; the next pass, at least one base later, removes its data
and then the renamed manifest.  A crash leaves work for the next pass, but never a manifest without its data.  Leftovers of
dead writers are removed too, if their attempt is fenced and two passes have seen them.
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
# Data files and drafts have the attempt in their names.
LEFTOVER = re.compile(
    r"(?:data-|part-)?(step-\d{10,}\.a(\d{4,}))(?:-[0-9a-f]+\.bin|\.r\d+\.json|(?:\.r\d+)?\.json\.[0-9a-f]+\.tmp)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """The chains to keep: the newest `keep`, and one per `every_s` seconds (0: none)."""

    keep: int
    every_s: float = 0.0

    def kept(self, written_at_s: Mapping[str, float]) -> set[str]:
        """Return the chains to keep, given newest first with the time of their base."""
        names = list(written_at_s)
        kept = names[: max(1, self.keep)]
        if self.every_s > 0:
            first_of: dict[float, str] = {}
            for name in reversed(names):
                first_of.setdefault(written_at_s[name] // self.every_s, name)
            kept += first_of.values()
        return set(kept)


class Retention:
    """Applies the policy: one pass after each base."""

    def __init__(self, claim: fence.Claim, policy: RetentionPolicy, distrusted: Collection[str] = ()) -> None:
        self._claim = claim
        self._policy = policy
        self._distrusted = frozenset(distrusted)  # damaged at the start: they do not count as kept
        self._seen_unused: frozenset[str] = frozenset()

    def sweep(self) -> list[str]:
        """Finish the last pass, begin the next one, and return the names of removed files.

        Raises:
            StaleAttemptError: a later attempt has taken over; nothing was changed.
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
        """Return files that no manifest can refer to: of checkpoints that were never published."""
        names = os.listdir(directory)
        published = {name.removesuffix(DOOMED).removesuffix(SUFFIX) for name in names}
        found = ((LEFTOVER.fullmatch(name), name) for name in names)
        return frozenset(
            name for match, name in found if match and match[1] not in published and int(match[2]) < self._claim.attempt
        )


def prune(directory: Path, policy: RetentionPolicy, damaged: Collection[str]) -> list[str]:
    """Remove now what the policy does not keep, and return the names of removed files.

    `damaged` chains do not count as kept.  For people: readers begin with the newest chains, which stay.
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
    # Newest first, so that no manifest ever lacks its parent.
    for name in sorted(manifests, key=lambda name: order_of(name) or (), reverse=True):
        if manifests[name].base in newest and manifests[name].base not in kept:
            with suppress(FileNotFoundError):  # another process does the same
                os.rename(directory / (name + SUFFIX), directory / (name + SUFFIX + DOOMED))
    files.sync_directory(directory)


def remove_doomed(directory: Path) -> list[str]:
    """Remove renamed manifests, and those of their files that no other one refers to."""
    doomed = sorted(name for name in os.listdir(directory) if name.endswith(DOOMED))
    used = {data.file for manifest in _readable(directory).values() for data in manifest.data} if doomed else set()
    removed = []
    for name in doomed:
        try:
            data = [one.file for one in from_bytes((directory / name).read_bytes()).data]
        except (DamagedError, FileNotFoundError):
            data = []  # its data files become leftovers
        removed += [gone for gone in (*data, name) if gone not in used and files.remove(directory / gone)]
    return removed


def _readable(directory: Path) -> dict[str, Manifest]:
    manifests = {}
    for name in checkpoint_names(directory):
        try:
            manifests[name] = from_bytes((directory / (name + SUFFIX)).read_bytes())
        except (DamagedError, FileNotFoundError):
            continue  # unreadable: neither use nor remove it
    return manifests
