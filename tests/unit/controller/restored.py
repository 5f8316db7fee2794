"""A cluster, its backup, and the cluster that was restored from it."""

from __future__ import annotations

from pathlib import Path

from cluster import Cluster

from hpcsched.controller.recovery import load_state, node_of
from hpcsched.model.ids import NodeName
from hpcsched.store.backup import back_up, restore
from hpcsched.store.engine import adopts_known, asks_about_orphans, restored_last_id


class Restored:
    """A cluster of two nodes, and what comes of it; `strays` is what the restore does with what runs from before."""

    def __init__(self, path: Path, strays: str) -> None:
        self._path = path
        self._strays = strays
        self.before = Cluster("n1", "n2", path=path / "h.db")

    def back_up(self) -> None:
        back_up(self._path / "h.db", self._path / "copy")

    def restore(self) -> Cluster:
        """Put the backup in the place of the database, and start a controller on it."""
        self.before.store.close()
        now_s = self.before.now_s
        restore(self._path / "copy", self._path / "h.db", now_s=now_s, suffix="old", strays=self._strays)
        return self.start()

    def start(self) -> Cluster:
        """Start a controller on what was restored, as the daemon does."""
        after = Cluster("n1", "n2", path=self._path / "h.db", up=False)
        after.state.restored_last_id = restored_last_id(after.store.connection)
        after.state.ask_about_orphans = asks_about_orphans(after.store.connection)
        after.state.adopts_known = adopts_known(after.store.connection)
        load_state(after.state, after.store, after.now_s)
        for name, row in after.store.load_nodes().items():
            after.state.nodes[NodeName(name)] = node_of(after.state.nodes[NodeName(name)].spec, row)
        return after
