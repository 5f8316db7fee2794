"""Checkpoints on a share that is only NFS: bases and increments, written in the background, restored bit by bit.

The way of one: `snapshot` copies, `pack` shrinks, `write` publishes by the rules of `files` if `fence` allows it,
`retain` removes old ones, `restore` finds the newest that verifies.  The format is in hpcsched-checkpoint(5).
"""

from __future__ import annotations

from hpctrain.checkpoint.background import BackgroundWriter, Report
from hpctrain.checkpoint.fence import Claim, claim
from hpctrain.checkpoint.manifest import Facts
from hpctrain.checkpoint.restore import Restored, restore_newest
from hpctrain.checkpoint.retain import Retention

__all__ = ["BackgroundWriter", "Claim", "Facts", "Report", "Restored", "Retention", "claim", "restore_newest"]
