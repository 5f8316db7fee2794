"""srun on the head: `hpcnode.srun`, which jobs find on their nodes, too."""

from __future__ import annotations

from hpcnode.srun import main

__all__ = ["main"]
