"""Load the cluster from a database file, as the planner saw it at the last event.

No controller runs from the file. It is for questions about a backup, or about the database of a
controller that is down. Nodes and partitions are those of the configuration; a node answers unless
it was drained. The file is only read: if it has to be migrated, a temporary copy is migrated
instead.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hpcsched.config.load import Config
from hpcsched.controller.recovery import load_state, node_of, policy_of
from hpcsched.controller.tick import Controller
from hpcsched.model.ids import NodeName
from hpcsched.model.node import Link
from hpcsched.model.trigger import Trigger
from hpcsched.sched.policy import Policy
from hpcsched.sched.snapshot import Snapshot
from hpcsched.state.cluster import ClusterState
from hpcsched.store.backup import back_up, contents_of
from hpcsched.store.engine import incarnation, open_database
from hpcsched.store.store import Store


class _Nowhere:
    """Ports of a controller that answers questions and never acts."""

    def send(self, node: NodeName, message: Any, blob: bytes = b"") -> None: ...

    def wake(self, after_s: float) -> None: ...

    def nonce(self) -> str:
        return ""

    def run_trigger(self, trigger: Trigger) -> None: ...

    def monotonic_s(self) -> float:
        return 0.0

    def boot_clock(self) -> tuple[str, float]:
        return "", 0.0


def archived(database: Path, config: Config) -> tuple[Snapshot, Policy]:
    """Return the cluster in the file `database` and the policy of `config`.

    Raises: ConfigError if the file is not an hpcsched database, UnavailableError if it cannot be
    read.
    """
    now_s = contents_of(database).last_event_at_s
    with TemporaryDirectory() as directory:
        copy = Path(directory) / database.name
        back_up(database, copy)
        store = Store(open_database(copy))
        try:
            return _cluster(store, config, now_s)
        finally:
            store.close()


def _cluster(store: Store, config: Config, now_s: float) -> tuple[Snapshot, Policy]:
    cluster = ClusterState(config=config, incarnation=incarnation(store.connection), epoch=0)
    rows = store.load_nodes()
    for spec in config.nodes:
        cluster.nodes[spec.name] = replace(node_of(spec, rows.get(spec.name)), link=Link.UP)
    cluster.partitions = {partition.name: partition for partition in config.partitions}
    load_state(cluster, store, now_s)
    policy = policy_of(config)
    return Controller(cluster, store, _Nowhere(), policy).snapshot(cluster.jobs_to_plan(), now_s), policy
