"""Which checkpoints may go, and their removal in two phases.

A chain is a base with all that stands on it, and goes as a whole.
Rules: first a manifest is renamed so that no reader starts on it; only the next pass, at least one base later, removes
its data and then the renamed manifest.  A crash anywhere leaves work for the next pass and never a manifest without its
data.  What writers that died have left is removed too, if their attempt is fenced, when it was seen twice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

from hpctrain.checkpoint import fence, files
from hpctrain.checkpoint.listing import checkpoint_names
from hpctrain.checkpoint.manifest import SUFFIX, Manifest, from_bytes, order_of
from hpctrain.errors import DamagedError

DOOMED = ".doomed"
# Data files and drafts bear the attempt that made them.
LEFTOVER = re.compile(r"(?:data-)?(step-\d{10,}\.a(\d{4,}))(?:-[0-9a-f]+\.bin|\.json\.[0-9a-f]+\.tmp)")


class Retention:
    """Keeps the last `keep` chains; one pass after each base."""

    def __init__(self, claim: fence.Claim, keep: int, distrusted: Collection[str] = ()) -> None:
        self._claim = claim
        self._keep = max(1, keep)
        self._distrusted = frozenset(distrusted)  # found damaged at the start: they do not count as kept ones
        self._seen_unused: frozenset[str] = frozenset()

    def sweep(self) -> list[str]:
        """This will finish what the last pass doomed, doom what is too old, and return the names of removed files.

        Raises:
            StaleAttemptError: a later attempt has taken over, nothing was touched.
        """
        fence.check(self._claim)
        directory = self._claim.directory
        removed = self._remove_doomed(directory)
        manifests = _readable(directory)
        self._doom(directory, manifests)
        unused = self._leftovers(directory)
        removed += [name for name in sorted(unused & self._seen_unused) if files.remove(directory / name)]
        self._seen_unused = unused
        return removed

    def _remove_doomed(self, directory: Path) -> list[str]:
        doomed = sorted(name for name in os.listdir(directory) if name.endswith(DOOMED))
        used = {manifest.data_file for manifest in _readable(directory).values()} if doomed else set()
        removed = []
        for name in doomed:
            try:
                data_file = from_bytes((directory / name).read_bytes()).data_file
            except DamagedError:
                data_file = None  # its data file will turn up as a leftover
            for gone in (data_file, name):
                if gone is not None and gone not in used and files.remove(directory / gone):
                    removed.append(gone)
        return removed

    def _doom(self, directory: Path, manifests: dict[str, Manifest]) -> None:
        newest: dict[str, tuple[int, int]] = {}
        for name, manifest in manifests.items():
            if name not in self._distrusted:
                newest[manifest.base] = max(newest.get(manifest.base, (-1, -1)), order_of(name) or (-1, -1))
        kept = set(sorted(newest, key=lambda base: newest[base], reverse=True)[: self._keep])
        # From the newest on, so that no manifest ever lacks the one it stands on.
        for name in sorted(manifests, key=lambda name: order_of(name) or (), reverse=True):
            if manifests[name].base in newest and manifests[name].base not in kept:
                os.rename(directory / (name + SUFFIX), directory / (name + SUFFIX + DOOMED))
        files.sync_directory(directory)

    def _leftovers(self, directory: Path) -> frozenset[str]:
        """What no manifest, be it readable or not, can refer to: files of checkpoints that were never published."""
        names = os.listdir(directory)
        published = {name.removesuffix(DOOMED).removesuffix(SUFFIX) for name in names}
        found = ((LEFTOVER.fullmatch(name), name) for name in names)
        return frozenset(
            name for match, name in found if match and match[1] not in published and int(match[2]) < self._claim.attempt
        )


def _readable(directory: Path) -> dict[str, Manifest]:
    manifests = {}
    for name in checkpoint_names(directory):
        try:
            manifests[name] = from_bytes((directory / (name + SUFFIX)).read_bytes())
        except (DamagedError, FileNotFoundError):
            continue  # not ours to judge: what cannot be read is neither used nor removed
    return manifests
