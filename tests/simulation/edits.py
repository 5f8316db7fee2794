"""Edits that lead a node's name to another spool, or take the node out of the cluster, while its jobs may run.

The cluster's name is a part of its agents' directories: another one leads all nodes' names to other spools.

The spool to which the name led before lives on behind nobody's name, with its agent and what runs there: a `Machine` of its
own, that shares power and boots with the new one if it is the same machine (a renamed cluster, a moved directory). In the
end an admin who is right switches it off and fences the node.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hpcnode.wire import protocol
from hpcsched.controller.nodes import edits as safeguards
from hpcsched.controller.nodes.edits import spool_of
from hpcsched.controller.nodes.loss import remove_node
from hpcsched.controller.requests import jobs
from hpcsched.errors import RequestError
from hpcsched.model.ids import NodeName
from hpcsched.model.node import Link
from simulation.machine import Machine
from simulation.people import ROOT

if TYPE_CHECKING:
    from simulation.stage import Simulation

CLUSTERS = ("sim", "lab", "biglab")  # names that the cluster has by turns; the first one first


def spool_id(machine: Machine) -> str:
    """Return the spool of a machine as the controller names it."""
    facts = {"spool": machine.spool}
    return spool_of(protocol.Welcome(1, machine.name, machine.boot_id, "simulated", 1, 0, [], facts)).id


def lead_elsewhere(sim: Simulation, name: str, *, same_machine: bool) -> None:
    """The name leads to another spool from now on; the controller is not asked."""
    former = sim.machines[name]
    if former.fences:
        return  # an admin has it in hand
    sim.tell(f"{name} leads to another {'directory' if same_machine else 'machine'}")
    _lead(sim, former, _directory_beside(former) if same_machine else _made(sim, former))


def _made(sim: Simulation, former: Machine) -> Machine:
    made = 1 + sum(machine.name == former.name for machine in sim.every_machine())
    machine = Machine(sim, former.name, former.cpus, number=made)
    sim.disks.disks[machine.key] = machine.disk
    return machine


def _directory_beside(former: Machine) -> Machine:
    machine = _made(former.sim, former)
    former.twins.append(machine)
    machine.twins = former.twins
    machine.power, machine.booted_at_s = former.power, former.booted_at_s
    return machine


def _lead(sim: Simulation, former: Machine, machine: Machine) -> None:
    name = former.name
    others = sim.former.setdefault(name, [])
    others.append(former)
    if machine in others:
        others.remove(machine)
    sim.machines[name] = machine
    sim.wires.cut(former)
    sim.wires.late[name].clear()
    if sim.head is not None and name in sim.head.links:
        sim.head.links[NodeName(name)].machine = machine


def lead_to_cluster(sim: Simulation, cluster: str) -> None:
    """The names lead to the directories of the cluster of that name, as they do when its name has become this."""
    sim.cluster = cluster
    for former in list(sim.machines.values()):
        machine = former.by_cluster.get(cluster)
        if machine is None:
            machine = former.by_cluster[cluster] = _directory_beside(former)
            machine.by_cluster = former.by_cluster
        if machine is not former:
            _lead(sim, former, machine)


def rename_cluster(sim: Simulation, cluster: str) -> None:
    """An admin renames the cluster in its file, and has a running controller read that: it may refuse.

    The file says so still. A controller that starts takes the name if no job is held: see `Head.start`.
    """
    sim.cluster_on_file = cluster
    head = sim.head
    if head is None or not head.serving:
        return
    renamed = cluster != head.state.config.name
    specs = tuple(node.spec for node in head.state.nodes.values())
    refused = safeguards.refused_edits(head.state, replace(head.state.config, name=cluster, nodes=specs))
    check_rename(sim, bool(safeguards.jobs_held(head.state.active_jobs())), taken=not refused, renamed=renamed)
    if refused:
        sim.tell(f"the cluster is not renamed: {refused}")
    elif renamed:
        sim.tell(f"the cluster is renamed {cluster}")
        head.rename(cluster)


def check_rename(sim: Simulation, held: bool, *, taken: bool, renamed: bool) -> None:
    """See that the cluster takes another name if, and only if, no job is held."""
    if renamed and taken is held:
        sim.truth.broken("edit", f"{'jobs are' if held else 'no job is'} held, and a new name is taken: {taken}")


def edit_address(sim: Simulation, name: str, *, same_machine: bool) -> None:
    """An admin edits where the node is, and has a running controller read that: it may refuse."""
    head = sim.head
    if head is not None and head.serving and name in head.state.nodes:
        specs = [node.spec for node in head.state.nodes.values()]
        wanted = [replace(one, host=one.host + "x") if one.name == name else one for one in specs]
        refused = safeguards.refused_edits(head.state, replace(head.state.config, nodes=tuple(wanted)))
        held = any(job.held_nodes for job in head.state.jobs_on(NodeName(name)))
        if bool(refused) is not held:
            sim.truth.broken("edit", f"{name} has {'jobs' if held else 'no jobs'}, and the edit is answered: {refused}")
        if refused:
            sim.tell(f"the edit of {name} is refused")
            return
        head.controller.node_redialled(NodeName(name), "its description was changed")
    lead_elsewhere(sim, name, same_machine=same_machine)


def remove_and_add(sim: Simulation, name: str, away_s: float) -> None:
    """An admin removes the node with its jobs; its file goes when it is free. Later it is added again."""

    def work(tx: Any, _: Any) -> None:
        if name in tx.cluster.nodes and tx.cluster.nodes[name].link is not Link.UP:
            raise RequestError("the admin waits until it answers: else it would have to be off")
        if remove_node(tx, ROOT, NodeName(name), force=True)["ending"]:
            raise RequestError("the admin waits until its jobs have ended")

    def free() -> None:
        head = sim.head
        if head is not None and head.serving and head.state.jobs_on(NodeName(name)):
            sim.truth.broken("edit", f"{name} is free, and holds jobs")
        _forget_file(sim, name)
        sim.agenda.later(away_s, None, add_again, sim, name)

    sim.people.ask_until_it_is_done(f"fence and remove {name}", work, free)


def delete_file(sim: Simulation, name: str, away_s: float) -> None:
    """Somebody deletes the node's file while no controller runs. What runs there runs on, until the node is added again."""
    if sim.head is not None:
        sim.head.killed("to delete a node's file")
    _forget_file(sim, name)
    sim.agenda.later(away_s, None, add_again, sim, name)


def _forget_file(sim: Simulation, name: str) -> None:
    sim.tell(f"{name} has no file any more")
    sim.without_file.add(name)
    if sim.head is not None:
        sim.head.take_node_out(NodeName(name))


def add_again(sim: Simulation, name: str) -> None:
    """The node is added, if it has no file."""
    if name in sim.without_file:
        sim.tell(f"{name} is added again")
        sim.without_file.discard(name)
        if sim.head is not None and sim.head.serving:
            sim.head.take_node_in(NodeName(name))


def settle_former(sim: Simulation) -> None:
    """An admin who has switched the former machines off fences the nodes that wait for them."""
    for name, machines in sim.former.items():
        former = {spool_id(machine) for machine in machines}

        def work(tx: Any, _: Any, name: str = name, former: set[str] = former) -> None:
            node = tx.cluster.nodes[NodeName(name)]
            waits = any(job.spool_on(NodeName(name)) in former for job in tx.cluster.jobs_on(NodeName(name)))
            waits = waits or ((node.has_orphans or name in tx.cluster.unseen_nodes()) and node.spool in former)
            if waits and node.link is not Link.UP:
                jobs.fence(tx, ROOT, name, "")

        if name not in sim.without_file:
            sim.people.ask_once(f"settle {name}", work)
