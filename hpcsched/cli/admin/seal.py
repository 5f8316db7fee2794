"""`hpcsched seal`: list and rotate the keys of jobs' environments in the database."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import datetime

import click

from hpcsched import client, paths
from hpcsched.cli.admin.init import seal_keys_of
from hpcsched.config.load import Config, load_config
from hpcsched.controller.lock import StateLock
from hpcsched.errors import ConfigError
from hpcsched.launch import as_controller
from hpcsched.store.engine import open_database, open_read_only
from hpcsched.store.sealing import SealingKeys
from hpcsched.store.store import Store


@click.command()
@click.option("--rotate", is_flag=True, help="Make a new key, and seal all stored environments with it.")
@click.option(
    "--forget-old", is_flag=True, help="Delete the keys that no stored environment needs; backups may need them."
)
def seal(rotate: bool, forget_old: bool) -> None:
    """Show the keys that seal the environments of jobs in the database; rotate them.

    The key file (seal_key of hpcsched.toml) has mode 0600 and is in no backup. Keep a copy of it elsewhere: without it, the
    waiting jobs of a restored database are held.
    """
    config = load_config(paths.find_config_dir(os.environ, os.getuid()))
    keys = seal_keys_of(config)
    if rotate or forget_old:
        with _database_not_in_use(config) as is_free:
            if rotate:
                keys.rotate()
                _reseal(config, keys, by_us=is_free)
            if forget_old:
                _forget(config, keys)
    uses = _uses(config, keys)
    click.echo(f"{keys.path}:")
    for number, key_id in enumerate(keys.ids):
        click.echo(f"  {key_id}  {'newest' if not number else 'older '}  seals {uses.pop(key_id, 0)} environments")
    for key_id, count in uses.items():
        click.echo(
            f"! {key_id}  missing: {count} environments cannot be opened, and their waiting jobs are held; add its line"
        )
        click.echo("  of a copy of the file, and restart the controller; or cancel the jobs and submit them again")


@contextmanager
def _database_not_in_use(config: Config) -> Iterator[bool]:
    """Hold the lock of the database if no controller does; yield whether we hold it."""
    with ExitStack() as held:
        try:
            client.call("GET", "/v1/ping")
            yield False
        except client.NoControllerError:
            lock = StateLock(config.controller.state_dir)
            with as_controller(config):
                lock.acquire(f"{datetime.now():%Y-%m-%d %H:%M:%S}", "rotate the key")
            held.callback(lock.release)
            yield True


def _reseal(config: Config, keys: SealingKeys, *, by_us: bool) -> None:
    if not by_us:
        client.call("POST", "/v1/reconfigure", {})
    else:
        database = config.controller.state_dir / paths.DATABASE_FILE
        with as_controller(config), closing(Store(open_database(database), keys)) as store:
            store.load_jobs(0.0)
            store.reseal()
    click.echo(f"new environments get the key {keys.newest.id}; older backups need the older keys")


def _forget(config: Config, keys: SealingKeys) -> None:
    keys.read_again()
    for key_id in keys.forget(set(_uses(config, keys))):
        click.echo(f"deleted the key {key_id}: environments in backups that it sealed cannot be opened any more")


def _uses(config: Config, keys: SealingKeys) -> dict[str, int]:
    database = config.controller.state_dir / paths.DATABASE_FILE
    if not database.exists():
        raise ConfigError(f"cannot read the database {database}: there is no such file")
    with as_controller(config), closing(Store(open_read_only(database), keys)) as store:
        return store.key_uses()
