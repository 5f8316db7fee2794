"""`hpcsched backup` and `hpcsched restore`: back up a whole cluster; restore it, or only its database.

A restored database is another incarnation of the cluster (man/adr/0003).
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import click

from hpcsched import paths
from hpcsched.cli.admin import backup as cluster_backup
from hpcsched.config.load import Config, load_config
from hpcsched.controller.lock import StateLock
from hpcsched.errors import ConfigError, HpcschedError, RequestError
from hpcsched.store import backup

PLACES = (  # in the configuration directory
    paths.CONFIG_FILE,
    paths.CLUSTER_ID_FILE,
    paths.LAUNCH_KEY,
    paths.LAUNCH_KEY + ".pub",
    paths.EXTRA_DIR,
    paths.NODES_DIR,
)
STRAYS = {
    "adopt": "of these jobs continues as they answer; anything else waits for your decision (hctl strays)",
    "ask": "runs on until you decide (hctl strays)",
    "end": "is ended as they answer (see hhealth)",
}


@click.command("backup")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--keep", metavar="N", type=click.IntRange(1), help="Keep only the newest N backups of this cluster in DIR."
)
def back_up(directory: Path, keep: int | None) -> None:
    """Back up the cluster into a new directory below DIR.

    A backup contains the database with queue, history and job scripts; hpcsched.toml, conf.d and nodes.d; the launch key;
    the keys that node files name (identity_file), and ssh_config. It does not contain output files, checkpoints, known_hosts or
    user accounts.
    """
    config = load_config(paths.find_config_dir(os.environ, os.getuid()))
    if not directory.is_dir():
        raise RequestError(f"cannot back up into {directory}: there is no such directory")
    made = cluster_backup.back_up_cluster(config, directory.absolute(), keep)
    click.echo(f"backed up the cluster to {made}: {cluster_backup.contents_in_words(made)}")


@click.command()
@click.argument("source", metavar="DIR|FILE", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Set aside an existing configuration, or a database with jobs.")
@click.option(
    "--strays",
    type=click.Choice(list(STRAYS)),
    default="adopt",
    show_default=True,
    help="What becomes of what the nodes still run: jobs that the backup knows continue and the rest waits for hctl strays; "
    "all of it waits; or all of it is ended.",
)
def restore(source: Path, force: bool, strays: str) -> None:
    """Restore the files of a cluster from a backup (DIR), or only its database (FILE).

    The controller must be down. DIR is a backup made by hctl backup or hpcsched backup, or a directory of such backups: then
    the newest one is restored.
    """
    now = datetime.now()
    if source.is_dir():
        _restore_cluster(_newest(source.absolute()), now, force=force, strays=strays)
        return
    config = load_config(paths.find_config_dir(os.environ, os.getuid()))
    state_dir = config.controller.state_dir
    if not state_dir.is_dir():
        raise ConfigError(
            f"cannot restore into {state_dir}: there is no such directory; make the cluster with hpcsched init"
        )
    with ExitStack() as held:
        _lock(state_dir, now, held)
        _restore_database(source, config, now, force=force, strays=strays)
    click.echo(f"start it with 'hpcsched up': what the nodes still run {STRAYS[strays]}")


def _newest(directory: Path) -> Path:
    if (directory / cluster_backup.MANIFEST).exists():
        return directory
    found = cluster_backup.backups_in(directory)
    if not found:
        raise ConfigError(f"cannot restore from {directory}: there is no backup of a cluster in it")
    return found[-1]


def _restore_cluster(source: Path, now: datetime, *, force: bool, strays: str) -> None:
    """Restore the configuration, where this user's commands read it, and the database."""
    cluster_backup.verify(source)
    manifest = cluster_backup.read_manifest(source)
    load_config(source / cluster_backup.ETC)
    config_dir = paths.own_config_dir(os.environ, os.getuid()).absolute()
    while any(config_dir.glob(f"*.{(aside := f'before-{now:%Y%m%dT%H%M%S}')}")):
        now += timedelta(seconds=1)  # two restores within a second: keep the files that the first one set aside
    with ExitStack() as held:
        former = _former_config(config_dir)
        if former is not None:
            if not force:
                raise RequestError(
                    f"cannot restore into {config_dir}: there is a configuration (cluster {former.name!r}); --force sets it aside"
                )
            if former.controller.state_dir.is_dir():
                _lock(former.controller.state_dir, now, held)
        with ExitStack() as undo:
            _place_configuration(source / cluster_backup.ETC, config_dir, aside, undo)
            config = load_config(config_dir)
            state_dir = config.controller.state_dir
            state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            if former is None or former.controller.state_dir != state_dir:
                _lock(state_dir, now, held)
            _restore_database(source / paths.DATABASE_FILE, config, now, force=force, strays=strays)
            undo.pop_all()
        _place_named(source, manifest["named"], config)
    _say_what_next(config, manifest, strays)


def _place_named(source: Path, named: dict[str, str], config: Config) -> None:
    """Restore missing files outside the configuration directory that it names.

    Existing ones are not changed.
    """
    wanted = {
        str(path) for path in (*cluster_backup.named_files(config), *cluster_backup.named_files(config, missing=True))
    }
    for name, path in named.items():
        if path not in wanted:
            continue
        place, data = Path(path), (source / name).read_bytes()
        try:
            if not place.exists():
                place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                cluster_backup.write_private(place, data)
                click.echo(f"restored {place}")
            elif place.read_bytes() != data:
                click.echo(
                    f"! {place} is not as in the backup, and was left alone; the backup has it as {source / name}"
                )
        except OSError as error:
            click.echo(f"! cannot write {place}: {error.strerror}; the backup has it as {source / name}")


def _former_config(config_dir: Path) -> Config | None:
    """Return the existing configuration, None if there is none.

    Raises ConfigError if it cannot be read.
    """
    return load_config(config_dir) if any(cluster_backup.configuration_files(config_dir)) else None


def _place_configuration(source: Path, config_dir: Path, aside: str, undo: ExitStack) -> None:
    """Copy the files of a backup into `config_dir`; existing files are renamed.

    `undo` renames them back.
    """
    public = 0o755 if os.getuid() == 0 else 0o700
    try:
        config_dir.mkdir(mode=public, parents=True, exist_ok=True)
        for name in PLACES:
            place, kept = config_dir / name, config_dir / f"{name}.{aside}"
            if place.exists():
                os.rename(place, kept)
                undo.callback(os.rename, kept, place)
            if (source / name).exists():
                undo.callback(_remove, place)
        for path in cluster_backup.configuration_files(source):
            target = config_dir / path.relative_to(source)
            target.parent.mkdir(mode=public, exist_ok=True)
            cluster_backup.write_private(target, path.read_bytes())
            if path.name != paths.LAUNCH_KEY:
                target.chmod(0o644)  # like node add and init; commands of users read hpcsched.toml
        (config_dir / paths.NODES_DIR).mkdir(mode=public, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename or config_dir}: {error.strerror}") from None


def _remove(path: Path) -> None:
    if path.is_dir():
        for each in path.iterdir():
            each.unlink()
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def _lock(state_dir: Path, now: datetime, held: ExitStack) -> None:
    lock = StateLock(state_dir)
    lock.acquire(now.isoformat(sep=" ", timespec="seconds"), "restore")
    held.callback(lock.release)


def _restore_database(file: Path, config: Config, now: datetime, *, force: bool, strays: str) -> None:
    database = config.controller.state_dir / paths.DATABASE_FILE
    if not force:
        _check_nothing_is_lost(database)
    done = backup.restore(file, database, now_s=time.time(), suffix=f"before-{now:%Y%m%dT%H%M%S}", strays=strays)
    contents = done.contents
    click.echo(f"{database} is {file}: {contents.jobs} jobs, {contents.unfinished} of them unfinished, as of")
    click.echo(
        f"{datetime.fromtimestamp(contents.last_event_at_s):%Y-%m-%d %H:%M:%S}, now as incarnation {done.incarnation}"
    )
    if done.kept is not None:
        click.echo(f"the previous one is kept as {done.kept}")


def _say_what_next(config: Config, manifest: dict[str, Any], strays: str) -> None:
    click.echo(
        f"{config.config_dir} has the configuration of cluster {config.name!r}, {len(config.nodes)} nodes, and its key"
    )
    keys = {Path(spec.identity_file).expanduser() for spec in config.nodes if spec.identity_file}
    for path in sorted(key for key in keys if not key.exists()):
        click.echo(f"! the key {path}, named by node files, is missing: copy it here, or name another one")
    if config.share and not Path(config.share).is_dir():
        click.echo(f"! the share {config.share} is missing: mount it before the start")
    click.echo("")
    click.echo("Next (see hpcsched-recovery(7)):")
    click.echo(f"  1. make sure that the former head ({manifest.get('host', '?')}) no longer runs the controller")
    click.echo(f"  2. nodes must accept this key, as before: {_public_key(config)}")
    for spec in config.nodes:
        user, port = f"{spec.user}@" if spec.user else "", f":{spec.port}" if spec.port else ""
        click.echo(f"       {spec.name:<12} {user}{spec.host}{port}")
    click.echo(f"  3. hpcsched up     what the nodes still run {STRAYS[strays]}")
    click.echo("  4. hhealth; hctl strays")


def _public_key(config: Config) -> str:
    try:
        return config.launch_key.with_name(config.launch_key.name + ".pub").read_text(encoding="utf-8").strip()
    except OSError:
        return "none is in the backup; nodes are reached as their files say"


def _check_nothing_is_lost(database: Path) -> None:
    """Raise RequestError if there is an intact database with jobs."""
    try:
        present = backup.contents_of(database)
    except HpcschedError:
        return  # missing or damaged: a reason to restore
    if present.jobs:
        at = datetime.fromtimestamp(present.last_event_at_s).strftime("%Y-%m-%d %H:%M:%S")
        raise RequestError(
            f"cannot restore: the present database {database} is whole, with {present.jobs} jobs and events up to {at}; "
            "--force sets it aside"
        )
