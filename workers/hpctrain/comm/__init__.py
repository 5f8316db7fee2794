"""How ranks talk: one small interface over our MPI ring, torch.distributed and a single process."""

from __future__ import annotations

from hpctrain.comm.background import Work
from hpctrain.comm.base import Communicator
from hpctrain.comm.choose import BACKENDS, connect

__all__ = ["BACKENDS", "Communicator", "Work", "connect"]
