"""`hpcsched backup`, `restore` and `seal`: copies of a cluster, and its database keys.

    DIR/CLUSTER-20260102T030405/           0700, whole or not there
        manifest.json                      what is in it, with checksums, and where it was
        hpcsched.db                        the database at one moment
        etc/hpcsched.toml, id_ed25519 ...  the configuration directory
        etc/named/1 ...                    other files named by the configuration: keys of nodes, the SSH configuration

Rules: a backup is written under a temporary name, synced, verified, and only then renamed. Old backups are deleted after that,
and only directories that are backups of the same cluster. All files are 0600, because they include keys and job scripts. A
restored database is another incarnation of the cluster (man/adr/0003).

Other files of a head (known_hosts, user accounts, the unit file) are listed in hpcsched-recovery(7), not copied. The keys that
seal the environments of jobs are in no backup.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import tarfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

import click

import hpcsched
from hpcnode.os.durable import sync_folder
from hpcnode.os.trust import check_path
from hpcsched import client, paths
from hpcsched.cli.admin.init import give_to_controller, seal_keys_of
from hpcsched.cli.output import print_json
from hpcsched.config.keys import BadValue, is_remote, remote_directory
from hpcsched.config.load import Config, load_config
from hpcsched.controller.lock import StateLock
from hpcsched.controller.recovery import load_state
from hpcsched.errors import ConfigError, HpcschedError, RequestError, UnavailableError
from hpcsched.launch import as_controller, ssh_settings
from hpcsched.launch.pipe import Abort
from hpcsched.model.ids import NodeName
from hpcsched.model.node import NodeSpec
from hpcsched.model.retention import kept_times
from hpcsched.model.units import format_time_s
from hpcsched.sched.sentences import plural
from hpcsched.state.cluster import ClusterState
from hpcsched.store import backup as database_copy
from hpcsched.store.engine import open_database, open_read_only, tables_to_add
from hpcsched.store.sealing import SealingKeys, sealing_keys
from hpcsched.store.store import Store

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
@click.argument("directory", metavar="DIR", required=False)
@click.option(
    "--keep", metavar="N", type=click.IntRange(1), help="Keep only the newest N backups of this cluster in DIR."
)
@click.option(
    "--encrypt",
    metavar="KEY|FILE",
    multiple=True,
    help="Encrypt it for this public key (age or SSH), or those of the file.",
)
@click.option("--scheduled", is_flag=True, help="Back up as [backup] of hpcsched.toml says, and print JSON.")
@click.option("--due", is_flag=True, help="With --scheduled: only where the newest one is old enough.")
@click.option("--look", is_flag=True, help="With --scheduled: make no backup.")
def back_up(
    directory: str | None, keep: int | None, encrypt: tuple[str, ...], scheduled: bool, due: bool, look: bool
) -> int:
    """Back up the cluster into a new directory below DIR.

    With --encrypt, it is one encrypted file (age) in DIR, which may then be on another machine: ssh://USER@HOST/DIR.

    A backup contains the database with queue, history and job scripts; hpcsched.toml, conf.d and nodes.d; the launch key;
    the keys that node files name (identity_file), and ssh_config. It does not contain output files, checkpoints, known_hosts or
    user accounts.
    """
    config = load_config(paths.find_config_dir(os.environ, os.getuid()))
    if scheduled:
        return _back_up_scheduled(config, look=look, due=due)
    if directory is not None and is_remote(directory):
        with _remote(config, directory) as place:
            made = place.back_up(encrypt)
            if keep:
                found = place.stamped()
                place.delete(name for at in sorted(found)[:-keep] for name in found[at])
        click.echo(f"backed up the cluster to {made}: {ENCRYPTED_WORDS}")
        return 0
    if directory is None or not Path(directory).is_dir():
        raise RequestError(f"cannot back up into {directory or 'nothing'}: there is no such directory")
    made_here = back_up_cluster(config, Path(directory).absolute(), keep, encrypt)
    click.echo(f"backed up the cluster to {made_here}: {contents_in_words(made_here)}")
    return 0


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
@click.option("--identity", metavar="FILE", type=click.Path(path_type=Path), help="Private key of an encrypted backup.")
@click.option(
    "--drill", is_flag=True, help="Restore into a temporary directory, say whether all is there, and delete it."
)
def restore(source: Path, force: bool, strays: str, identity: Path | None, drill: bool) -> int:
    """Restore the files of a cluster from a backup (DIR), or only its database (FILE).

    The controller must be down. DIR is a backup made by hctl backup or hpcsched backup, or a directory of such backups: then
    the newest one is restored.
    """
    now = datetime.now()
    if source.is_dir():
        source = _newest(source.absolute())
    _check_source(source)
    if source.is_dir() or source.name.endswith(SUFFIX):
        with _folder_of(source, identity) as folder:
            if drill:
                return _drill(source, folder)
            _restore_cluster(folder, now, force=force, strays=strays)
        return 0
    if drill:
        raise RequestError(
            f"cannot try {source}: it is a copy of the database only; name a backup made by hctl backup DIR"
        )
    config = load_config(paths.find_config_dir(os.environ, os.getuid()))
    state_dir = config.controller.state_dir
    if not state_dir.is_dir():
        raise ConfigError(
            f"cannot restore into {state_dir}: there is no such directory; make the cluster with hpcsched init"
        )
    with ExitStack() as held:
        _lock(config, now, held)
        _restore_database(source, config, now, force=force, strays=strays)
    click.echo(f"start it with 'hpcsched up': what the nodes still run {STRAYS[strays]}")
    return 0


def _check_source(source: Path) -> None:
    """Check, as root, that others could not have exchanged the backup.

    Root obeys its configuration. That it is encrypted proves nothing: everybody who has the public key can make one.

    Raises RequestError.
    """
    if os.geteuid() != 0:
        return
    config_dir = paths.own_config_dir(os.environ, 0)
    account = None
    with suppress(ConfigError):  # there is none yet, or it is damaged
        account = load_config(config_dir).controller.account()
    try:
        real = Path(check_path(source.absolute(), 0 if account is None else account.pw_uid))
        for path in (real, *real.rglob("*")):
            check_path(path, 0 if account is None else account.pw_uid)
    except OSError as error:
        raise RequestError(
            f"cannot restore from {source}: {error}. If it is the right one, copy it to where only root may write "
            "(cp -r, not cp -a), and restore the copy"
        ) from None


@contextmanager
def _folder_of(source: Path, identity: Path | None) -> Iterator[Path]:
    """Yield the directory of a backup, which is opened if it is encrypted."""
    if source.is_dir():
        yield source
        return
    with opened(source, identity) as folder:
        yield folder


def _newest(directory: Path) -> Path:
    if (directory / MANIFEST).exists():
        return directory
    found = backups_in(directory) + [path for path in directory.glob(f"*{SUFFIX}") if _ENCRYPTED.match(path.name)]
    if not found:
        raise ConfigError(f"cannot restore from {directory}: there is no backup of a cluster in it")
    return max(found, key=lambda path: path.name.removesuffix(SUFFIX)[-15:])


def _restore_cluster(source: Path, now: datetime, *, force: bool, strays: str) -> None:
    """Restore the configuration, where this user's commands read it, and the database."""
    verify(source)
    manifest = read_manifest(source)
    load_config(source / ETC)
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
                _lock(former, now, held)
        with ExitStack() as undo:
            _place_configuration(source / ETC, config_dir, aside, undo)
            config = load_config(config_dir)
            state_dir = config.controller.state_dir
            state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            give_to_controller(config, state_dir, *(path for path in (config.launch_key,) if path.exists()))
            if former is None or former.controller.state_dir != state_dir:
                _lock(config, now, held)
            _restore_database(source / paths.DATABASE_FILE, config, now, force=force, strays=strays)
            undo.pop_all()
        _place_named(source, manifest["named"], config)
    _say_what_next(config, manifest, strays)


def _place_named(source: Path, named: dict[str, str], config: Config) -> None:
    """Restore missing files outside the configuration directory that it names.

    Existing ones are not changed.
    """
    wanted = {str(path) for path in (*named_files(config), *named_files(config, missing=True))}
    for name, path in named.items():
        if path not in wanted:
            continue
        place, data = Path(path), (source / name).read_bytes()
        try:
            if not place.exists():
                place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_private(place, data)
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
    return load_config(config_dir) if any(configuration_files(config_dir)) else None


def _place_configuration(source: Path, config_dir: Path, aside: str, undo: ExitStack) -> None:
    """Copy the files of a backup into `config_dir`; existing files are renamed.

    `undo` renames them back.
    """
    public = 0o755 if os.getuid() == 0 else 0o700
    try:
        config_dir.mkdir(mode=public, parents=True, exist_ok=True)
        for name in PLACES:
            place, former = config_dir / name, config_dir / f"{name}.{aside}"
            if place.exists():
                os.rename(place, former)
                undo.callback(os.rename, former, place)
            if (source / name).exists():
                undo.callback(_remove, place)
        for path in configuration_files(source):
            target = config_dir / path.relative_to(source)
            target.parent.mkdir(mode=public, exist_ok=True)
            write_private(target, path.read_bytes())
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


def _lock(config: Config, now: datetime, held: ExitStack) -> None:
    lock = StateLock(config.controller.state_dir)
    with as_controller(config):
        lock.acquire(now.isoformat(sep=" ", timespec="seconds"), "restore")
    held.callback(lock.release)


def _restore_database(file: Path, config: Config, now: datetime, *, force: bool, strays: str) -> None:
    database = config.controller.state_dir / paths.DATABASE_FILE
    if not force:
        _check_nothing_is_lost(database)
    suffix = f"before-{now:%Y%m%dT%H%M%S}"
    with _readable(file, config) as copy, as_controller(config):
        done = database_copy.restore(copy, database, now_s=time.time(), suffix=suffix, strays=strays)
    contents = done.contents
    click.echo(f"{database} is {file}: {contents.jobs} jobs, {contents.unfinished} of them unfinished, as of")
    click.echo(
        f"{datetime.fromtimestamp(contents.last_event_at_s):%Y-%m-%d %H:%M:%S}, now as incarnation {done.incarnation}"
    )
    if done.kept is not None:
        click.echo(f"the previous one is kept as {done.kept}")


# ----- a restore that is tried, and an upgrade


class TriedRestore(NamedTuple):
    """Result of a restore into a temporary directory. `problems`: what an admin must mend."""

    contents: database_copy.Contents
    nodes: int
    problems: tuple[str, ...]


def _drill(source: Path, folder: Path) -> int:
    began_s = time.monotonic()
    tried = try_restore(folder)
    contents = tried.contents
    click.echo(f"{source} can be restored ({time.monotonic() - began_s:.1f} s){_age_words(source)}")
    click.echo(
        f"  {plural(contents.jobs, 'job')}, {contents.unfinished} of them unfinished, all read; {plural(tried.nodes, 'node')}"
    )
    newest = _newest_job()
    if newest is not None and newest > contents.last_job_id:
        click.echo(f"  jobs submitted since, which a restore would lose: {newest - contents.last_job_id}")
    for problem in tried.problems:
        click.echo(f"! {problem}")
    return 1 if tried.problems else 0


def _age_words(source: Path) -> str:
    """Return how old a backup is by its name, "" if it was renamed."""
    try:
        made = datetime.strptime(source.name.removesuffix(SUFFIX)[-15:], STAMP)
    except ValueError:
        return ""
    return f"; it is {format_time_s(max(0.0, (datetime.now() - made).total_seconds()))} old"


def _newest_job() -> int | None:
    """Return the highest job id of the cluster here, None if there is none."""
    with suppress(HpcschedError):
        config = load_config(paths.own_config_dir(os.environ, os.getuid()))
        with closing(Store(open_read_only(config.controller.state_dir / paths.DATABASE_FILE))) as store:
            return store.last_ids()[0]
    return None


def try_restore(folder: Path) -> TriedRestore:
    """Restore a backup into a temporary directory, and read it as a controller would.

    Raises ConfigError if something of the backup cannot be read or is not all there.
    """
    contents = verify(folder)
    with TemporaryDirectory(prefix="hpcsched-drill-") as scratch:
        etc, database = Path(scratch) / ETC, Path(scratch) / "state" / paths.DATABASE_FILE
        try:
            database.parent.mkdir()
            shutil.copytree(folder / ETC, etc)
            config = load_config(etc)
            key = _tried_key(config, etc)
            keys = sealing_keys(key, database.parent, key.stat().st_uid if key.exists() else os.geteuid())
            database_copy.restore(folder / paths.DATABASE_FILE, database, now_s=time.time(), suffix="before")
        except OSError as error:
            raise UnavailableError(f"cannot try the backup in {scratch}: {error.strerror}; set TMPDIR") from None
        with closing(Store(open_database(database), keys)) as store:
            cluster = ClusterState(config=config, incarnation="", epoch=0)
            load_state(cluster, store, time.time())
            jobs, read = store.counts()[1], len(cluster.pending) + len(cluster.active)
            unopened = sum(count for key_id, count in store.key_uses().items() if key_id not in keys.ids)
    if (jobs, read) != (contents.jobs, contents.unfinished):
        raise ConfigError(
            f"cannot use {folder}: of {contents.jobs} jobs, {contents.unfinished} unfinished, {jobs} and {read} were read"
        )
    return TriedRestore(contents, len(config.nodes), tuple(_missing(config, unopened)))


def _tried_key(config: Config, etc: Path) -> Path:
    """Return the file of the sealing keys; that of the cluster here if the backup has none."""
    key = config.controller.seal_key
    here = paths.own_config_dir(os.environ, os.getuid()) / key.name
    return here if key.is_relative_to(etc) and here.exists() else key


def _missing(config: Config, unopened: int) -> Iterator[str]:
    if unopened:
        yield (
            f"the key that seals {plural(unopened, 'environment')} of jobs is not in {config.controller.seal_key.name}, and "
            "in no backup: without it their waiting jobs are held; see hpcsched seal"
        )
    if config.share and not Path(config.share).is_dir():
        yield f"the share {config.share} is missing on this machine"


@click.command()
@click.option(
    "--check", is_flag=True, required=True, help="Try this version on a copy of the database; change nothing."
)
def upgrade(check: bool) -> int:
    """Say what an upgrade to this version of hpcsched would do.

    Install the new version beside the old one (python3 -m venv), and run this command from there.
    """
    config = load_config(paths.find_config_dir(os.environ, os.getuid()))
    with TemporaryDirectory(prefix="hpcsched-upgrade-") as scratch:
        made = back_up_cluster(config, Path(scratch))
        tried, added = try_restore(made), tables_to_add(made / paths.DATABASE_FILE)
    try:
        runs = f"hpcschedd {client.call('GET', '/v1/ping')['hpcsched']} runs"
    except UnavailableError:
        runs = "no controller runs"
    contents = tried.contents
    click.echo(f"{runs}, this is hpcsched {hpcsched.__version__}")
    click.echo(f"configuration: read, with {plural(tried.nodes, 'node')}")
    click.echo(
        f"database: a copy with {plural(contents.jobs, 'job')}, {contents.unfinished} of them unfinished, was read and counted"
    )
    click.echo(
        f"  the first start adds {plural(len(added), 'table')}: {', '.join(added)}"
        if added
        else "  its form does not change"
    )
    click.echo("jobs and steps continue meanwhile; each node gets the newer agent when it reconnects")
    for problem in tried.problems:
        click.echo(f"! {problem}")
    click.echo("To upgrade: hctl backup DIR; hpcsched down; install it; hpcsched up")
    return 1 if tried.problems else 0


@contextmanager
def _readable(file: Path, config: Config) -> Iterator[Path]:
    """Yield `file`, or a copy that the controller's account can read."""
    if os.getuid() != 0 or config.controller.user is None or not file.is_file():
        yield file
        return
    with TemporaryDirectory() as directory:
        copy = Path(directory) / file.name
        shutil.copyfile(file, copy)
        give_to_controller(config, copy, Path(directory))
        yield copy


def _say_what_next(config: Config, manifest: dict[str, Any], strays: str) -> None:
    click.echo(
        f"{config.config_dir} has the configuration of cluster {config.name!r}, {len(config.nodes)} nodes, and its key"
    )
    keys = {Path(spec.identity_file).expanduser() for spec in config.nodes if spec.identity_file}
    for path in sorted(key for key in keys if not key.exists()):
        click.echo(f"! the key {path}, named by node files, is missing: copy it here, or name another one")
    if config.share and not Path(config.share).is_dir():
        click.echo(f"! the share {config.share} is missing: mount it before the start")
    if not config.controller.seal_key.exists():
        click.echo(
            f"! the key of jobs' environments, {config.controller.seal_key}, is in no backup: copy it here before the start, "
            "with mode 0600; without it, waiting jobs are held"
        )
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
        present = database_copy.contents_of(database)
    except HpcschedError:
        return  # missing or damaged: a reason to restore
    if present.jobs:
        at = datetime.fromtimestamp(present.last_event_at_s).strftime("%Y-%m-%d %H:%M:%S")
        raise RequestError(
            f"cannot restore: the present database {database} is whole, with {present.jobs} jobs and events up to {at}; "
            "--force sets it aside"
        )


# ----- backups of a whole cluster in a directory: database, configuration, node files and keys


FORMAT = 1
MANIFEST = "manifest.json"
STAMP = "%Y%m%dT%H%M%S"
ETC = "etc"
NAMED = f"{ETC}/named"
_NAME = re.compile(r".+-\d{8}T\d{6}\Z")
_ENCRYPTED = re.compile(r".+-\d{8}T\d{6}\.tar\.age\Z")


def back_up_cluster(config: Config, directory: Path, keep: int | None = None, encrypt: tuple[str, ...] = ()) -> Path:
    """Write a backup into a new directory below `directory`, and return it.

    With public keys to `encrypt` for, it is an encrypted file. Only the newest `keep` backups are
    kept. Raises HpcschedError.
    """
    if encrypt:
        return _back_up_encrypted(config, directory, keep, encrypt)
    database = config.controller.state_dir / paths.DATABASE_FILE
    target = directory / f"{config.name}-{datetime.now():%Y%m%dT%H%M%S}"
    part = directory / f".{target.name}.{secrets.token_hex(4)}.part"
    _check_place(config, directory)
    if target.exists():
        raise RequestError(f"cannot back up into {target}: it is there already; try again in a second")
    try:
        part.mkdir(mode=0o700)
        try:
            _fill(config, database, part)
            verify(part)
            os.rename(part, target)
            sync_folder(str(directory))
        finally:
            shutil.rmtree(part, ignore_errors=True)
        if keep is not None:
            _delete_old(config.name, directory, keep)
    except OSError as error:
        raise UnavailableError(f"cannot back up into {directory}: {error.filename}: {error.strerror}") from None
    return target


def _check_place(config: Config, directory: Path) -> None:
    """Check that others cannot exchange a backup for one of theirs: root would restore it.

    Raises RequestError. The cluster of one user is that user's own business.
    """
    account = config.controller.account()
    if os.geteuid() != 0 and account is None:
        return
    try:
        check_path(directory.absolute(), os.geteuid() if account is None else account.pw_uid)
    except OSError as error:
        raise RequestError(f"cannot back up into {directory}: {error}. Or encrypt the backup (--encrypt)") from None


def _back_up_encrypted(config: Config, directory: Path, keep: int | None, encrypt: tuple[str, ...]) -> Path:
    """Write an encrypted backup; its plain text is never in `directory`."""
    recipients = recipients_of(encrypt)
    target = directory / f"{config.name}-{datetime.now():%Y%m%dT%H%M%S}{SUFFIX}"
    part = directory / f".{target.name}.{secrets.token_hex(4)}.part"
    try:
        with _verified(config) as folder:
            try:
                encrypt_folder(folder, part, recipients)
                os.link(part, target)  # unlike a rename, it never replaces a backup
            finally:
                part.unlink(missing_ok=True)
        sync_folder(str(directory))
        own = _own_encrypted(config)
        for path in sorted(path for path in directory.glob(f"*{SUFFIX}") if own.match(path.name))[: -(keep or 10**9)]:
            path.unlink()
    except FileExistsError:
        raise RequestError(f"cannot back up into {target}: it is there already; try again in a second") from None
    except OSError as error:
        raise UnavailableError(f"cannot back up into {directory}: {error.filename}: {error.strerror}") from None
    return target


@contextmanager
def _verified(config: Config) -> Iterator[Path]:
    """Yield a backup in a private directory, in plain text, for its encryption."""
    with TemporaryDirectory(prefix=".backup-", dir=config.controller.state_dir) as temporary:
        folder = Path(temporary) / "backup"
        folder.mkdir(mode=0o700)
        _fill(config, config.controller.state_dir / paths.DATABASE_FILE, folder)
        verify(folder)
        yield folder


def _fill(config: Config, database: Path, part: Path) -> None:
    database_copy.back_up(database, part / paths.DATABASE_FILE)
    for path in configuration_files(config.config_dir):
        copy_private(path, part / ETC / path.relative_to(config.config_dir))
    named = {f"{NAMED}/{number}": path for number, path in enumerate(named_files(config), 1)}
    for name, path in named.items():
        copy_private(path, part / name)
    files = sorted(path for path in part.rglob("*") if path.is_file())
    manifest = {
        "format": FORMAT,
        "hpcsched": hpcsched.__version__,
        "cluster": config.name,
        "made_at_s": time.time(),
        "host": os.uname().nodename,
        "config_dir": str(config.config_dir),
        "state_dir": str(config.controller.state_dir),
        "files": {str(path.relative_to(part)): _checksum(path) for path in files},
        "named": {name: str(path) for name, path in named.items()},
    }
    write_private(part / MANIFEST, json.dumps(manifest, indent=2).encode() + b"\n")
    for folder in (part, *(path for path in part.rglob("*") if path.is_dir())):
        sync_folder(str(folder))


def configuration_files(config_dir: Path) -> Iterator[Path]:
    """Yield the files of a configuration directory that belong to the cluster."""
    for name in (paths.CONFIG_FILE, paths.CLUSTER_ID_FILE, paths.LAUNCH_KEY, paths.LAUNCH_KEY + ".pub"):
        if (config_dir / name).exists():
            yield config_dir / name
    for name in (paths.EXTRA_DIR, paths.NODES_DIR):
        yield from sorted((config_dir / name).glob("*.toml"))


def named_files(config: Config, *, missing: bool = False) -> list[Path]:
    """Return the existing files that the configuration names elsewhere, or the `missing` ones."""
    keys = sorted({Path(spec.identity_file).expanduser() for spec in config.nodes if spec.identity_file})
    named = dict.fromkeys([config.controller.ssh_config, *(path for key in keys for path in (key, public_half(key)))])
    own = set(configuration_files(config.config_dir))
    return [path for path in named if path not in own and path.is_file() is not missing]


def public_half(key: Path) -> Path:
    """Return the path of the public half of a private key."""
    return key.with_name(key.name + ".pub")


def read_manifest(directory: Path) -> dict[str, Any]:
    """Return the manifest of a backup. Raises ConfigError if this version cannot read it."""
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        files = manifest["files"]
        if manifest["format"] != FORMAT or not all(isinstance(value, str) for value in (*files, *files.values())):
            raise ConfigError(
                f"cannot use {directory}: its manifest has format {manifest['format']!r:.20}, not {FORMAT}"
            )
        named = manifest.setdefault("named", {})
        whole = (
            all(_is_inside(name) for name in files)
            and named.keys() <= files.keys()
            and isinstance(manifest["cluster"], str)
        )
        if not whole or not all(isinstance(value, str) and os.path.isabs(value) for value in named.values()):
            raise ConfigError(f"cannot use {directory}: its manifest names files elsewhere")
    except OSError as error:
        raise ConfigError(
            f"cannot use {directory}: it is not a backup of a cluster: {path}: {error.strerror}"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"cannot use {directory}: its manifest {path} is damaged") from None
    return dict(manifest)


def _is_inside(name: str) -> bool:
    parts = Path(name).parts
    return name == paths.DATABASE_FILE or (len(parts) > 1 and parts[0] == ETC and ".." not in parts)


def contents_in_words(directory: Path) -> str:
    """Return the contents of a backup in words."""
    if directory.name.endswith(SUFFIX):
        return ENCRYPTED_WORDS
    named = read_manifest(directory)["named"]
    others = f", and {', '.join(named.values())}" if named else ""
    return f"database, configuration (conf.d too), node files and launch key{others}"


def verify(directory: Path) -> database_copy.Contents:
    """Read the whole backup and compare its checksums; return the contents of its database.

    Raises ConfigError.
    """
    manifest = read_manifest(directory)
    for name, known in manifest["files"].items():
        try:
            found = _checksum(directory / name)
        except OSError as error:
            raise ConfigError(f"cannot use {directory}: {name}: {error.strerror}") from None
        if found != known:
            raise ConfigError(f"cannot use {directory}: {name} is damaged: its checksum differs from the manifest")
    return database_copy.contents_of(directory / paths.DATABASE_FILE)


def backups_in(directory: Path, cluster: str = "") -> list[Path]:
    """Return the backups of the cluster below `directory`, the oldest first."""
    found = []
    for path in sorted(directory.iterdir()):
        if path.is_symlink() or not path.is_dir() or not _NAME.match(path.name):
            continue
        try:
            manifest = read_manifest(path)
        except ConfigError:
            continue
        if not cluster or manifest["cluster"] == cluster:
            found.append((path.name[-15:], path))
    return [path for _, path in sorted(found)]


def _delete_old(cluster: str, directory: Path, keep: int) -> None:
    for path in backups_in(directory, cluster)[: -max(1, keep)]:
        shutil.rmtree(path)


def copy_private(source: Path, target: Path) -> None:
    """Copy a file durably, readable only by its owner; create its directories. Raises OSError."""
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(target, source.read_bytes())


def write_private(path: Path, data: bytes) -> None:
    """Write a new file durably, readable only by its owner. Raises OSError."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ----- scheduled backups, in a child of the controller


def _back_up_scheduled(config: Config, *, look: bool, due: bool) -> int:
    """Back up into each directory of [backup], then delete what is not kept there. Print JSON.

    A directory that fails keeps its old backups, and the others get theirs.
    """
    made: list[str] = []
    problems, newest = [], []
    for target in config.backup.to:
        found: Mapping[datetime, list[Any]] = {}
        try:
            with _place(config, target) as place:
                found = place.stamped()
                if not look and not (due and _is_recent(config, max(found, default=None))):
                    made.append(place.back_up(config.backup.encrypt))
                    found = place.stamped()
                    kept = kept_times(list(found), config.backup.keep, datetime.now())
                    place.delete(one for at in found.keys() - kept for one in found[at])
        except HpcschedError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"cannot back up into {target}: {error.strerror or error}")
        newest.append(max(found, default=None))
    times = [time.timestamp() for time in newest if time is not None]
    at_s = min(times) if len(times) == len(config.backup.to) else 0.0
    print_json({"version": 1, "made": made, "why": "; ".join(problems), "newest_at_s": at_s})
    return 1 if problems else 0


def _is_recent(config: Config, newest: datetime | None) -> bool:
    """Return whether the next backup after `newest` is not due yet."""
    return newest is not None and time.time() - newest.timestamp() < config.backup.every * SLACK


SLACK = 0.99  # of the schedule's clock


class BackupPlace(Protocol):
    """A directory of backups, here or on another machine."""

    def stamped(self) -> Mapping[datetime, list[Any]]:
        """Return the backups of the cluster, by their time."""

    def back_up(self, encrypt: tuple[str, ...]) -> str:
        """Make a backup, read all of it, and return where it is."""

    def delete(self, backups: Iterable[Any]) -> None:
        """Delete some of those that `stamped` returns."""


@contextmanager
def _place(config: Config, target: str) -> Iterator[BackupPlace]:
    if is_remote(target):
        with _remote(config, target) as place:
            yield place
    else:
        yield _LocalPlace(config, Path(target))


class _LocalPlace:
    def __init__(self, config: Config, directory: Path) -> None:
        if not directory.is_dir():
            raise RequestError(f"cannot back up into {directory}: there is no such directory")
        self._config, self._directory = config, directory

    def stamped(self) -> dict[datetime, list[Path]]:
        found: dict[datetime, list[Path]] = {}
        own = _own_encrypted(self._config)
        encrypted = [path for path in self._directory.glob(f"*{SUFFIX}") if own.match(path.name)]
        for path in [*backups_in(self._directory, self._config.name), *encrypted]:
            found.setdefault(_time_of(path.name), []).append(path)
        return found

    def back_up(self, encrypt: tuple[str, ...]) -> str:
        """Make a backup, and read all of it as a controller would."""
        for part in self._directory.glob(f".{self._config.name}-*.part"):  # of a child that was killed
            if time.time() - part.lstat().st_mtime > LEFT_S:
                shutil.rmtree(part) if part.is_dir() else part.unlink()
        made = back_up_cluster(self._config, self._directory, encrypt=encrypt)
        if made.is_dir():  # an encrypted one was read before it was encrypted, and cannot be opened here
            try_restore(made)
        return str(made)

    def delete(self, backups: Iterable[Path]) -> None:
        for path in backups:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


LEFT_S = 86400.0


def _own_encrypted(config: Config) -> re.Pattern[str]:
    return re.compile(re.escape(config.name) + r"-\d{8}T\d{6}\.tar\.age\Z")


def _time_of(name: str) -> datetime:
    return datetime.strptime(name.removesuffix(SUFFIX)[-15:], STAMP)


# ----- a directory on another machine, by SFTP
# Only encrypted backups go there: the private key to open them is not needed here, and must not be there.  Each is written
# under a temporary name, read back and compared, and only then renamed.  The controller's account logs in with its own SSH
# keys and configuration, not with the launch key; the host key must be known.


STALL_S = 120.0  # of a server that answers nothing
MOST_NAMES = 100_000


@contextmanager
def _remote(config: Config, target: str) -> Iterator[_RemotePlace]:
    """Yield the directory on another machine.

    Raises UnavailableError: it cannot be reached, or refuses.
    """
    import paramiko  # it takes a quarter of a second to load

    from hpcsched.launch.ssh import close_all, connect

    try:
        at = remote_directory(target)
    except BadValue as error:
        raise RequestError(f"cannot back up: {error}") from None
    spec = NodeSpec(name=NodeName(at.host), host=at.host, port=at.port, user=at.user, host_key="", cpus=1, mem_mib=1)
    with as_controller(config):
        transports = connect(spec, replace(ssh_settings(config), launch_key=None), Abort(), lambda _: None)
    try:
        channel = transports[-1].open_session(timeout=STALL_S)
        channel.settimeout(STALL_S)
        channel.invoke_subsystem("sftp")
        with closing(paramiko.SFTPClient(channel)) as sftp:
            yield _RemotePlace(config, target, at.path, sftp)
    except (paramiko.SSHException, EOFError, OSError) as error:
        why = getattr(error, "strerror", None) or str(error) or "the connection ended"
        at_file = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""  # it is a file here
        raise UnavailableError(f"cannot back up into {target}: {at_file}{why}") from None
    finally:
        close_all(transports)


class _RemotePlace:
    def __init__(self, config: Config, target: str, path: str, sftp: Any) -> None:
        self._config, self._target, self._path, self._sftp = config, target.rstrip("/"), path.rstrip("/"), sftp

    def stamped(self) -> dict[datetime, list[str]]:
        own, found = _own_encrypted(self._config), dict[datetime, list[str]]()
        for name in self._names():
            if own.match(name):
                found[_time_of(name)] = [name]
        return found

    def _names(self) -> list[str]:
        names = [entry.filename for entry in islice(self._sftp.listdir_iter(self._path or "/"), MOST_NAMES + 1)]
        if len(names) > MOST_NAMES:
            raise UnavailableError(f"cannot back up into {self._target}: it has more than {MOST_NAMES} files")
        return names

    def back_up(self, encrypt: tuple[str, ...]) -> str:
        if not encrypt:
            raise RequestError(
                f"cannot back up into {self._target}: a backup has keys and job scripts: name public keys (--encrypt)"
            )
        recipients, config = recipients_of(encrypt), self._config
        self._delete_parts()
        name = f"{config.name}-{datetime.now():%Y%m%dT%H%M%S}{SUFFIX}"
        part, target = f"{self._path}/.{name}.{secrets.token_hex(4)}.part", f"{self._path}/{name}"
        with _verified(config) as folder:
            sealed = folder.with_name("sealed")
            encrypt_folder(folder, sealed, recipients)
            try:
                self._send(sealed, part)
                self._sftp.rename(part, target)  # it does not replace a backup
            except BaseException:
                with suppress(Exception):  # the first error is told; the next backup removes the rest
                    self._sftp.remove(part)
                raise
        return f"{self._target}/{name}"

    def _delete_parts(self) -> None:
        """Delete what a child that was killed has left."""
        for name in self._names():
            path = f"{self._path}/{name}"
            is_part = name.startswith(f".{self._config.name}-") and name.endswith(".part")
            if is_part and time.time() - (self._sftp.lstat(path).st_mtime or 0) > LEFT_S:
                self._sftp.remove(path)

    def _send(self, sealed: Path, part: str) -> None:
        """Copy a file there, read it back and compare."""
        with open(sealed, "rb") as source, self._sftp.open(part, "wx") as copy:
            copy.chmod(0o600)
            copy.set_pipelined(True)
            shutil.copyfileobj(source, copy, COPY_BYTES)
        size = sealed.stat().st_size
        checksum, left = hashlib.sha256(), size
        with self._sftp.open(part, "rb") as copy:
            if copy.stat().st_size == size:
                copy.prefetch(size)
                while left > 0 and (piece := copy.read(min(left, COPY_BYTES))):
                    checksum.update(piece)
                    left -= len(piece)
        if left or checksum.hexdigest() != _checksum(sealed):
            raise UnavailableError(f"cannot back up into {self._target}: what it holds is not what was written")

    def delete(self, backups: Iterable[str]) -> None:
        for name in backups:
            self._sftp.remove(f"{self._path}/{name}")


COPY_BYTES = 1 << 18


# ----- one encrypted file of the age format
# A file is encrypted for recipients: age public keys (age1...), or ssh-ed25519 and ssh-rsa public keys. Only their private
# keys open it, so the head itself needs no secret to make it. It is authenticated: an altered or truncated file is refused as
# a whole. Files are streamed, so their size does not matter.
# Source: age-encryption.org/v1; the library is pyrage, extra `backup`.


SUFFIX = ".tar.age"
ENCRYPTED_WORDS = "encrypted; restore it with: hpcsched restore --identity FILE"
MOST_KEY_BYTES = 1 << 20
MOST_MEMBERS = 50_000  # of an archive: one for each node, and some


def _pyrage() -> Any:
    try:
        import pyrage
    except ImportError:
        raise ConfigError(
            "cannot encrypt or open a backup: pyrage is missing: pip install 'hpcsched[backup]'"
        ) from None
    return pyrage


def recipients_of(words: tuple[str, ...]) -> list[Any]:
    """Return the recipients; a word is a public key or a file with one in each line.

    Raises RequestError.
    """
    pyrage, found = _pyrage(), []
    for word in words:
        lines = [word] if word.startswith(("age1", "ssh-")) else _lines_of(Path(word))
        for line in lines:
            try:
                found.append((pyrage.ssh if line.startswith("ssh-") else pyrage.x25519).Recipient.from_str(line))
            except pyrage.RecipientError:
                raise RequestError(
                    f"cannot encrypt for {line[:80]!r}: it is not a public key of age (age1...) or SSH (ssh-ed25519 ...)"
                ) from None
    if words and not found:
        raise RequestError(f"cannot encrypt a backup: there is no public key in {', '.join(words)}")
    return found


def _lines_of(path: Path) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MOST_KEY_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read the key {path}: {error}") from None
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def encrypt_folder(folder: Path, target: Path, recipients: list[Any]) -> None:
    """Write the files of `folder` encrypted to `target`, which only its owner can read.

    Raises: OSError.
    """
    plain = folder.with_name(folder.name + ".tar")
    try:
        with (
            open(os.open(plain, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file,
            tarfile.open(fileobj=file, mode="w") as archive,
        ):
            archive.add(folder, arcname=".")
        with (
            open(plain, "rb") as source,
            open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as sealed,
        ):
            _pyrage().encrypt_io(source, sealed, recipients)
            sealed.flush()
            os.fsync(sealed.fileno())
    finally:
        plain.unlink(missing_ok=True)


@contextmanager
def opened(file: Path, identity: Path | None) -> Iterator[Path]:
    """Yield a private directory with the files of an encrypted backup.

    Raises ConfigError: the private key is missing, readable by others or another one, or the file was altered or truncated.
    """
    pyrage = _pyrage()
    if identity is None:
        raise ConfigError(
            f"cannot open {file}: it is encrypted; name the file of your private key (age or SSH): --identity FILE"
        )
    identities = _identities_of(identity)
    with TemporaryDirectory(prefix="hpcsched-restore-") as directory:
        plain, folder = Path(directory) / "backup.tar", Path(directory) / "backup"
        try:
            with open(file, "rb") as source, open(plain, "wb") as target:
                pyrage.decrypt_io(source, target, identities)
            with tarfile.open(plain, "r:") as archive:  # as `encrypt_folder` writes it: a compressed one may be a bomb
                _extract(archive, folder)
        except (OSError, tarfile.TarError, pyrage.DecryptError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise ConfigError(f"cannot open {file}: {error.strerror}") from None
            raise ConfigError(
                f"cannot open {file}: it was encrypted for another key than {identity}, or was altered or truncated"
            ) from None
        plain.unlink()
        yield folder


def _extract(archive: tarfile.TarFile, folder: Path) -> None:
    """Write the directories and files of an archive below `folder`.

    Everybody who has the public key can make an archive, so nothing else in it is accepted. (The filter of `extractall` is
    missing in Python 3.11.0 to 3.11.3.)

    Raises: TarError for another kind of member or a name that leaves `folder`, OSError.
    """
    for number, member in enumerate(archive):
        name = PurePosixPath(member.name)
        if number >= MOST_MEMBERS:
            raise tarfile.TarError(f"it has more than {MOST_MEMBERS} files")
        if member.issparse():  # some bytes stand for any number of zeros
            raise tarfile.TarError(f"{member.name!r} is larger than the archive")
        if name.is_absolute() or ".." in name.parts or not (member.isreg() or member.isdir()):
            raise tarfile.TarError(f"{member.name!r} is not a file or directory of a backup")
        path = folder / name
        (path if member.isdir() else path.parent).mkdir(mode=0o700, parents=True, exist_ok=True)
        if (content := archive.extractfile(member)) is not None:
            mode = member.mode & 0o755 | 0o600
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "wb") as file:
                shutil.copyfileobj(content, file)


def _identities_of(path: Path) -> list[Any]:
    pyrage = _pyrage()
    try:
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(f"cannot use the private key {path}: other accounts can read it; run: chmod 600 {path}")
        content = path.read_bytes()[:MOST_KEY_BYTES]
        if content.startswith(b"-----BEGIN"):
            return [pyrage.ssh.Identity.from_buffer(content)]
        return [pyrage.x25519.Identity.from_str(line) for line in _lines_of(path)]
    except OSError as error:
        raise ConfigError(f"cannot read the private key {path}: {error.strerror}") from None
    except pyrage.IdentityError:
        raise ConfigError(
            f"cannot use the private key {path}: it is not a private key of age or SSH, or it has a passphrase"
        ) from None


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
