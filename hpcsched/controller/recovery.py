"""What a controller knows when it starts: the rows of the database, the nodes and partitions of the configuration.

Recovery is this, and the ordinary ticks that follow. Knows no planner and no connections: it is read, and may be told, before
those are there.
"""

from __future__ import annotations

from hpcsched.config import Config
from hpcsched.controller.configured import node_of
from hpcsched.model.ids import JobId
from hpcsched.model.training import Training
from hpcsched.store.engine import asks_about_strays, incarnation, raise_epoch, restored_last_id
from hpcsched.store.store import Store
from hpcsched.store.world import World


def begin_term(config: Config, store: Store, now_s: float) -> World:
    """Raise the epoch and return the world as the store and the configuration have it."""
    database = store.connection
    world = World(config=config, incarnation=incarnation(database), epoch=raise_epoch(database))
    world.restored_last_id = restored_last_id(database)
    world.ask_strays = asks_about_strays(database)
    stored = store.load_nodes()
    for spec in config.nodes:
        world.nodes[spec.name] = node_of(spec, stored.get(spec.name))
    world.partitions = {partition.name: partition for partition in config.partitions}
    load_world(world, store, now_s)
    return world


def load_world(world: World, store: Store, now_s: float) -> None:
    """Fill `world` with what the store has."""
    world.last_job_id, world.last_spec_id = store.last_ids()
    world.last_job_id += sum(len(job.spec.components) for job in store.jobs([world.last_job_id]))
    world.adopted = store.adopted()
    for job in store.load_jobs(now_s - world.config.controller.min_job_age_s):
        world.put(job)
    world.usage = {used.key: used for used in store.load_usage()}
    world.reservations = {reservation.name: reservation for reservation in store.load_reservations()}
    world.training = _told_before(world, store)


def _told_before(world: World, store: Store) -> dict[JobId, Training]:
    """Return what was told of the jobs that run, before this start of the controller."""
    told = store.load_training(world.active)
    return {
        job.id: told[job.id] for job in world.active_jobs() if job.id in told and told[job.id].attempt == job.attempt
    }
