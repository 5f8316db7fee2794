"""The MPI variables of batch steps, worked out once for each allocation shape: short jobs on the same nodes share them.

Without them a job runs all the same, only `mpirun` has to be told its hosts; so whatever is wrong here is logged, not fatal.
What the variables are is `mpienv`'s business.
"""

from __future__ import annotations

import json
import os
from typing import Callable, Dict

from hpcnode import place, protocol
from hpcnode.environment import bin_dir
from hpcnode.user import Account

MAX_KNOWN = 256


class MpiVariables:
    """The variables for allocations that were seen, and the host files that they name (ROOT/mpi)."""

    def __init__(self, root: str, log: Callable[[str], None]) -> None:
        self._root = root
        self._folder = os.path.join(root, "mpi")
        self._log = log
        self._known: Dict[str, Dict[str, str]] = {}

    def variables(self, launch: protocol.Launch, account: Account) -> Dict[str, str]:
        """Return what to add to the environment of this launch."""
        if launch.step != protocol.BATCH or not launch.hosts:
            return {}
        shape = json.dumps([launch.hosts, launch.same_machine, account.uid == 0])
        if shape not in self._known:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[shape] = self._make(launch, account)
        return self._known[shape]

    def remove_files(self) -> None:
        """Remove all host files; nobody may be using one."""
        self._known.clear()
        place.remove_tree(self._folder)

    def _make(self, launch: protocol.Launch, account: Account) -> Dict[str, str]:
        from hpcnode.mpienv import mpi_environment  # most agents never need it

        folder = os.path.join(self._folder, launch.token.rpartition(".")[2])  # its nonce: a name never used twice
        try:
            os.makedirs(folder, exist_ok=True)
            for path in (self._folder, folder):
                os.chmod(path, 0o755)
            return mpi_environment(
                hosts=launch.hosts,
                hrsh=os.path.join(bin_dir(self._root), "hrsh"),
                state_dir=folder,
                same_machine=launch.same_machine,
                as_root=account.uid == 0,
            )
        except (OSError, ValueError) as error:
            self._log("no MPI variables for %s: %s" % (launch.token, error))
            return {}
