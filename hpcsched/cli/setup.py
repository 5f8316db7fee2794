"""`hpcsched init`: the files of a new cluster, each explained, and what to do next."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import click

from hpcsched import paths
from hpcsched.config import Config, load_config
from hpcsched.config_template import render_config
from hpcsched.errors import ConfigError


@click.command()
@click.option(
    "--share", metavar="DIR", help="A directory that all nodes see under this path: for checkpoints and outputs."
)
@click.option("--name", metavar="NAME", default="cluster", show_default=True, help="What the cluster is called.")
@click.option(
    "--force", is_flag=True, help="Write hpcsched.toml anew; the old one is kept as hpcsched.toml.old. Nothing else."
)
@click.option("--database", "only_database", is_flag=True, help="Make the database alone, where it is missing.")
def init(share: str | None, name: str, force: bool, only_database: bool) -> None:
    """Make a cluster's configuration, database and launch key, and say what each is."""
    if only_database:
        _make_missing_database()
        return
    config_dir = paths.own_config_dir(os.environ, os.getuid())
    path = config_dir / paths.CONFIG_FILE
    if path.exists() and not force:
        raise ConfigError(
            f"cannot make a cluster in {config_dir}: {path.name} is there already; --force writes it anew"
        )
    if share is not None:
        _check_share(Path(share))
    config = _write_config(config_dir, share, name)
    public_key = _ensure_launch_key(config)
    database = _make_state(config)
    click.echo("\n".join(_story(config, database, public_key)))


def _make_missing_database() -> None:
    config = load_config(paths.find_config_dir(os.environ, os.getuid()))
    database = config.controller.state_dir / paths.DATABASE_FILE
    if database.exists() and database.stat().st_size:
        raise ConfigError(f"cannot make the database {database}: it is there already")
    click.echo(f"{_make_state(config)} is made, with no jobs in it; start it with: hpcsched up")


def _check_share(share: Path) -> None:
    if not share.is_absolute():
        raise ConfigError(f"cannot use {share} as share: it must be an absolute path, the same on every node")
    if not share.is_dir():
        raise ConfigError(f"cannot use {share} as share: there is no such directory; make it, or mount it, first")
    if not os.access(share, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot use {share} as share: uid {os.getuid()} may not write there")


def _write_config(config_dir: Path, share: str | None, name: str) -> Config:
    """Write hpcsched.toml, checked before it takes its place."""
    _make_dir(config_dir, 0o755 if os.getuid() == 0 else 0o700)
    _make_dir(config_dir / paths.NODES_DIR, 0o755 if os.getuid() == 0 else 0o700)
    cluster = {"name": name} | ({} if share is None else {"share": share})
    text = render_config({"cluster": cluster, "partitions.main": {"nodes": "all", "default": True}})
    path = config_dir / paths.CONFIG_FILE
    old = path.with_name(path.name + ".old")
    kept = path.exists()
    if kept:
        os.replace(path, old)
    write_file(path, text)
    try:
        return load_config(config_dir)
    except ConfigError:
        if kept:
            os.replace(old, path)
        else:
            path.unlink()
        raise


def _ensure_launch_key(config: Config) -> str:
    from hpcsched.launch.keyfile import make_key

    public = config.launch_key.with_name(config.launch_key.name + ".pub")
    if config.launch_key.exists() and public.exists():
        return public.read_text(encoding="utf-8").strip()
    try:
        return make_key(config.launch_key, f"hpcsched:{config.name}@{socket.gethostname()}")
    except FileExistsError as error:
        raise ConfigError(
            f"cannot make the launch key: of {config.launch_key} and its .pub only {error.filename} is there; "
            "move it away, or bring the other back"
        ) from None


def _make_state(config: Config) -> Path:
    from hpcsched.store.engine import create_database

    state_dir = config.controller.state_dir
    _make_dir(state_dir, 0o700)
    if state_dir.stat().st_mode & 0o077:
        raise ConfigError(f"cannot use {state_dir}: others may look into it; run: chmod 700 {state_dir}")
    database = state_dir / paths.DATABASE_FILE
    create_database(database)
    return database


def _make_dir(path: Path, mode: int) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=mode, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {path}: {error.strerror}") from None


def write_file(path: Path, text: str) -> None:
    """Write `path` whole or not at all: temporary file, fsync, rename. Raises ConfigError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            with open(fd, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(fd)
            os.replace(temporary, path)
        except OSError:
            temporary.unlink()
            raise
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def _story(config: Config, database: Path, public_key: str) -> Iterator[str]:
    made = {
        config.config_dir / paths.CONFIG_FILE: "the configuration; every key is explained in it",
        config.config_dir / paths.NODES_DIR: "one file per node, written by: hpcsched node add",
        config.launch_key: "the private key with which the controller logs in to the nodes; keep it secret",
        config.launch_key.with_name(config.launch_key.name + ".pub"): "its public half, for the nodes",
        database: "the database of jobs; back it up",
    }
    width = max(len(str(path)) for path in made)
    yield f"The cluster {config.name!r} is made:"
    yield ""
    yield from (f"  {path!s:<{width}}  {what}" for path, what in made.items())
    if config.share:
        yield f"  {config.share:<{width}}  the share: every node must see it under this path"
    else:
        yield "  (no share: set share in hpcsched.toml once there is a directory that all nodes see)"
    yield ""
    yield "Next:"
    yield ""
    yield "  1. On each node, add this line to ~/.ssh/authorized_keys of the account that is to run the jobs"
    yield "     (root's, if jobs are to run as the users who submit them):"
    yield ""
    yield f"       restrict {public_key}"
    yield ""
    yield '     "restrict" takes from it what hpcsched does not need: terminals, forwarding of ports and agents.'
    yield "  2. hpcsched node add user@host     for each node: shows its host key, and what it has"
    yield "  3. hpcsched up                     starts the controller"
    yield "  4. hsub --wrap hostname            the first job; hqueue shows it, hlogs its output"
