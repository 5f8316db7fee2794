"""What hosts have kept while the share was away goes there, when a run begins.

Says what becomes of it; a share that does not take it yet keeps nobody from starting.
"""

from __future__ import annotations

from pathlib import Path

from hpctrain.checkpoint.writing import local_fallback, local_parts
from hpctrain.checkpoint.writing.fence import Claim
from hpctrain.errors import PublishError


def bring_parts(directory: Path) -> None:
    """This will bring the parts of checkpoints that ranks on this host have kept; each rank calls it, before one looks there."""
    try:
        local_parts.bring_parts(local_fallback.place_for(directory), directory)
    except (OSError, PublishError) as error:
        print(f"checkpoint: a part that this host has kept cannot be brought to the share: {error}", flush=True)


def bring_back(mine: Claim) -> None:
    """This will publish what this host has kept, and what all hosts have brought the parts of."""
    try:
        names = local_fallback.bring_back(local_fallback.place_for(mine.directory), mine) + local_parts.join_parts(mine)
    except (OSError, PublishError) as error:
        print(f"checkpoint: what this host has kept cannot be brought to the share: {error}", flush=True)
        return
    for name in names:
        print(f"checkpoint: {name}, which this run has kept on its hosts, is on the share now", flush=True)
