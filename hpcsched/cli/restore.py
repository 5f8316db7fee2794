"""`hpcsched restore`: a backup takes the place of the database, as another incarnation of the cluster."""

from __future__ import annotations

import os
import time
from datetime import datetime
from pathlib import Path

import click

from hpcsched import paths
from hpcsched.errors import ConfigError, RequestError


@click.command()
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Even if the present database is whole: what happened since is set aside.")
@click.option(
    "--strays",
    type=click.Choice(["end", "ask"]),
    default="end",
    show_default=True,
    help="What becomes of what the nodes run from before: it is ended, or waits for hctl strays.",
)
def restore(file: Path, force: bool, strays: str) -> None:
    """Put a backup that hctl made in the place of the database. The controller must be down."""
    from hpcsched.config import load_config
    from hpcsched.controller.lock import StateLock
    from hpcsched.store import backup

    config = load_config(paths.find_config_dir(os.environ, os.getuid()))
    state_dir = config.controller.state_dir
    if not state_dir.is_dir():
        raise ConfigError(
            f"cannot restore into {state_dir}: there is no such directory; make the cluster with hpcsched init"
        )
    database = state_dir / paths.DATABASE_FILE
    now = datetime.now()
    lock = StateLock(state_dir)
    lock.acquire(now.isoformat(sep=" ", timespec="seconds"), "restore")
    try:
        if not force:
            _check_nothing_is_lost(database)
        done = backup.restore(file, database, now_s=time.time(), suffix=f"before-{now:%Y%m%dT%H%M%S}", strays=strays)
    finally:
        lock.release()
    contents = done.contents
    click.echo(f"{database} is {file}: {contents.jobs} jobs, {contents.unfinished} of them unfinished, as of")
    click.echo(
        f"{datetime.fromtimestamp(contents.last_event_at_s):%Y-%m-%d %H:%M:%S}, now as incarnation {done.incarnation}"
    )
    if done.kept is not None:
        click.echo(f"the one before is kept as {done.kept}")
    ways = {"end": "is ended as they answer (see hhealth)", "ask": "runs on until you decide (see hctl strays)"}
    click.echo(f"start it with 'hpcsched up': what the nodes still run from before {ways[strays]}")


def _check_nothing_is_lost(database: Path) -> None:
    """Refuse to set aside a whole database that has jobs. Raises RequestError."""
    from hpcsched.store import backup

    try:
        present = backup.contents_of(database)
    except ConfigError:
        return  # it is not there, or damaged: that is what backups are for
    if present.jobs:
        at = datetime.fromtimestamp(present.last_event_at_s).strftime("%Y-%m-%d %H:%M:%S")
        raise RequestError(
            f"cannot restore: the present database {database} is whole, with {present.jobs} jobs and events up to {at}; "
            "--force sets it aside"
        )
