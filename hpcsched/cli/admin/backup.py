"""Backups of a whole cluster in a directory: database, configuration, node files and keys.

    DIR/CLUSTER-20260102T030405/           0700, whole or not there
        manifest.json                      what is in it, with checksums, and where it was
        hpcsched.db                        the database at one moment
        etc/hpcsched.toml, id_ed25519 ...  the configuration directory
        etc/named/1 ...                    other files named by the configuration: keys of nodes, the SSH configuration

Rules: a backup is written under a temporary name, synced, verified, and only then renamed. Old backups are deleted after that,
and only directories that are backups of the same cluster. All files are 0600, because they include keys and job scripts.

Other files of a head (known_hosts, user accounts, the unit file) are listed in hpcsched-recovery(7), not copied.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import hpcsched
from hpcnode.os.durable import sync_folder
from hpcsched import paths
from hpcsched.config.load import Config
from hpcsched.errors import ConfigError, RequestError, UnavailableError
from hpcsched.store import backup as database_copy

FORMAT = 1
MANIFEST = "manifest.json"
ETC = "etc"
NAMED = f"{ETC}/named"
_NAME = re.compile(r".+-\d{8}T\d{6}\Z")


def back_up_cluster(config: Config, directory: Path, keep: int | None = None) -> Path:
    """Write a backup into a new directory below `directory`, and return it.

    Only the newest `keep` backups are kept. Raises HpcschedError.
    """
    database = config.controller.state_dir / paths.DATABASE_FILE
    target = directory / f"{config.name}-{datetime.now():%Y%m%dT%H%M%S}"
    part = directory / f".{target.name}.{secrets.token_hex(4)}.part"
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
