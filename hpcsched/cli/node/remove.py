"""`hpcsched node remove`: frees the node of jobs, then deletes its file, always in this order.

A running controller frees the node: it refuses, ends jobs, or fences the node. Without a controller, the database has the
jobs on the node, and records the admin's decision for the next start.
"""

from __future__ import annotations

import os
import time
from contextlib import closing
from datetime import datetime
from pathlib import Path

import click

from hpcsched import client, paths
from hpcsched.api.identity import user_name
from hpcsched.config.load import Config, load_config
from hpcsched.controller.lock import StateLock
from hpcsched.errors import HpcschedError, NotFoundError, RequestError, UnavailableError
from hpcsched.listing.text import clean
from hpcsched.store.engine import open_database
from hpcsched.store.store import Store

ENDING_S = 30.0  # beyond the grace period of jobs
ASK_EVERY_S = 0.3


def remove_node(config: Config, name: str, *, force: bool) -> None:
    """Remove the node, and print what happens to its jobs.

    Raises HpcschedError; then its file is unchanged.
    """
    path = config.config_dir / paths.NODES_DIR / f"{name}.toml"
    running = _known_to_controller()
    if name not in [spec.name for spec in config.nodes] and name not in (running or ()):
        if running is not None and _free(config, name, force=force):
            return  # its file was deleted by hand while it held jobs
        there = ", ".join(spec.name for spec in config.nodes) or "none"
        raise NotFoundError(f"cannot remove {name[:60]!r}: there is no node of that name; there are: {there}")
    load_config(config.config_dir, without=name)  # a partition may list it
    if running is None:
        _note_for_next_start(config, name, force=force)
        path.unlink(missing_ok=True)
        click.echo(f"removed {path}")
        click.echo("the controller is not running; it reads this at its start: hpcsched up")
        return
    _free(config, name, force=force)
    _delete(path, name)
    click.echo(f"removed {path}")
    click.echo("controller notified")


def _known_to_controller() -> list[str] | None:
    """Return the nodes of the controller, None if it is not running."""
    try:
        return [view["name"] for view in client.call("GET", "/v1/nodes")["nodes"]]
    except client.NoControllerError:
        return None


def _free(config: Config, name: str, *, force: bool) -> bool:
    """Have the controller free the node of jobs, and wait for that.

    Return whether there were any.
    """
    deadline_s = time.monotonic() + config.controller.kill_wait_s + ENDING_S
    told = ""
    held = False
    while True:
        answer = client.call("POST", "/v1/nodes/remove", {"nodes": name, "force": force})
        for line in answer["became"]:
            click.echo(clean(line))
        held = held or bool(answer["became"] or answer["ending"])
        if not answer["ending"]:
            return held
        waiting = f"waiting for jobs to end on {name}: {', '.join(answer['ending'][:10])}"
        if waiting != told:
            click.echo(clean(waiting))
            told = waiting
        if time.monotonic() > deadline_s:
            raise UnavailableError(
                f"cannot remove node {name}: it is still ending its jobs; its file is there as before, and it gets no new "
                "jobs. Try again, or switch the machine off first"
            )
        time.sleep(ASK_EVERY_S)


def _delete(path: Path, name: str) -> None:
    """Delete the file and notify the controller; restore the file if the controller refuses."""
    aside = path.with_suffix(".removed")
    there = path.exists()
    if there:
        os.replace(path, aside)
    try:
        client.call("POST", "/v1/reconfigure", {})
    except HpcschedError:
        if there:
            os.replace(aside, path)
        client.call("POST", "/v1/nodes/resume", {"nodes": name, "only_by": "hpcschedd"})
        raise
    aside.unlink(missing_ok=True)


def _note_for_next_start(config: Config, name: str, *, force: bool) -> None:
    """Fail if the node holds jobs.

    With `force`, record that the next controller fences the node.
    """
    state_dir = config.controller.state_dir
    database = state_dir / paths.DATABASE_FILE
    if not database.exists():
        return
    lock = StateLock(state_dir)
    lock.acquire(datetime.now().isoformat(sep=" ", timespec="seconds"), f"remove node {name}")
    try:
        with closing(Store(open_database(database))) as store:
            jobs = [str(job_id) for job_id in store.held_on(name)]
            if jobs and not force:
                raise RequestError(
                    f"cannot remove node {name}: {len(jobs)} jobs are held there ({', '.join(jobs[:5])}). Start the "
                    f"controller (hpcsched up) and let them end (hctl drain {name} WHY); or give them up with the node: "
                    f"hpcsched node remove --force {name}"
                )
            if jobs:
                store.give_up(name, user_name(os.getuid()))
    finally:
        lock.release()
    if jobs:
        click.echo(f"the next controller gives up the jobs on the node: {', '.join(jobs[:10])}")
