"""`hpcsched init`: creates the files of a new cluster, and prints what to do next."""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import click

from hpcsched import paths
from hpcsched.api.identity import is_account
from hpcsched.client import my_name
from hpcsched.config.keys import BadValue
from hpcsched.config.keys import python as python_path
from hpcsched.config.load import Config, build_config, load_config, load_nodes, render_config
from hpcsched.errors import ConfigError
from hpcsched.jobscript.signing import public_line
from hpcsched.launch import as_controller
from hpcsched.launch.bundle import authorized_line, build_bundle
from hpcsched.launch.hostkeys import PRINCIPAL, certificate_of, make_key
from hpcsched.store.engine import create_database, open_database
from hpcsched.store.sealing import SealingKeys, sealing_keys
from hpcsched.store.store import Store

AUTHORITY_KEY = "ca_ed25519"  # in the configuration directory
SERVICE = "hpcsched"  # the account of systemd/sysusers.d/hpcsched.conf


@click.command()
@click.option(
    "--share", metavar="DIR", help="A directory that all nodes see under this path, for checkpoints and output."
)
@click.option("--name", metavar="NAME", default="cluster", show_default=True, help="Name of the cluster.")
@click.option(
    "--user",
    metavar="ACCOUNT",
    help="As root: the account that runs the controller for all users, or root. Default: hpcsched if there is that account.",
)
@click.option("--force", is_flag=True, help="Rewrite only hpcsched.toml; the old file is kept as hpcsched.toml.old.")
@click.option("--database", "only_database", is_flag=True, help="Create only the database, if it is missing.")
def init(share: str | None, name: str, user: str | None, force: bool, only_database: bool) -> None:
    """Create a cluster's configuration, database and launch key, and print what to do next."""
    if only_database:
        _make_missing_database()
        return
    config_dir = paths.own_config_dir(os.environ, os.getuid())
    path = config_dir / paths.CONFIG_FILE
    if path.exists() and not force:
        raise ConfigError(
            f"cannot make a cluster in {config_dir}: {path.name} is there already; --force writes it anew, and "
            "hpcsched key shows the line for authorized_keys again"
        )
    if share is not None:
        _check_share(Path(share))
    text = _config_text(share, name, _account(user))
    _check(config_dir, text)
    with ExitStack() as undo:  # on failure, remove what was created
        config = _write_config(config_dir, text, undo)
        public_key = _ensure_launch_key(config, undo)
        database = _make_state(config, undo)
        _make_cluster_id(config, database, undo)
        give_to_controller(config, config.launch_key)
        if not config.controller.seal_key.exists():
            undo.callback(config.controller.seal_key.unlink, missing_ok=True)
        seal_keys_of(config)
        undo.pop_all()
    click.echo("\n".join(_story(config, database, public_key)))


@click.command()
@click.option(
    "--python", metavar="PATH", default="python3", show_default=True, help="Python of the node, 3.9 or newer."
)
@click.option(
    "--from", "source", metavar="PATTERN", default="", help="Accept logins only from these addresses (sshd(8))."
)
@click.option("--bundle", is_flag=True, help="Print the SHA-256 of hpcnode.pyz instead, for bundles in node.json.")
@click.option(
    "--user", "own", is_flag=True, help="Print your own public key instead, for /etc/hpcsched/users of the nodes."
)
def key(python: str, source: str, bundle: bool, own: bool) -> None:
    """Print the line for authorized_keys on the nodes, which allows the controller to log in.

    The key then starts the agent there, and nothing else.
    """
    if own:
        click.echo(public_line(my_name()))
        return
    if bundle:
        click.echo(build_bundle().sha256)
        return
    config = load_config(paths.find_config_dir(os.environ, os.getuid()))
    public = _public_half(config.launch_key)
    try:
        words = python_path(python), _addresses(source)
        click.echo(authorized_line(public.read_text(encoding="utf-8").strip(), *words))
    except BadValue as error:
        raise ConfigError(f"cannot make a line for authorized_keys: {error}") from None
    except FileNotFoundError:
        raise ConfigError(
            f"cannot show the launch key: {public} is not there; "
            f"write it with: ssh-keygen -y -f {config.launch_key} > {public}"
        ) from None


@click.group()
def ca() -> None:
    """Let the launch key in with certificates of ten minutes, from an authority on the head."""


@ca.command("init")
@click.option(
    "--python", metavar="PATH", default="python3", show_default=True, help="Python of the node, 3.9 or newer."
)
@click.option(
    "--from", "source", metavar="PATTERN", default="", help="Accept logins only from these addresses (sshd(8))."
)
def ca_init(python: str, source: str) -> None:
    """Make the authority's key if there is none, and print its line for authorized_keys."""
    config = load_config(paths.find_config_dir(os.environ, os.getuid()))
    authority = config.config_dir / AUTHORITY_KEY
    try:
        if not authority.exists():
            make_key(authority, f"hpcsched-ca:{config.name}")
        public = _public_half(authority).read_text(encoding="utf-8").strip()
        click.echo(authorized_line(public, python_path(python), _addresses(source), PRINCIPAL))
    except (OSError, BadValue) as error:
        raise ConfigError(f"cannot make the authority {authority}: {error}") from None


@ca.command("sign")
def ca_sign() -> None:
    """Sign the launch key for ten minutes. Root runs it every five."""
    config = load_config(paths.find_config_dir(os.environ, os.getuid()))
    authority, public = config.config_dir / AUTHORITY_KEY, _public_half(config.launch_key)
    try:
        text = public.read_text(encoding="utf-8").strip()
        signed = certificate_of(text, authority, f"hpcsched:{config.name}", time.time())
    except FileNotFoundError as error:
        missing = Path(error.filename or authority)
        remedy = "hpcsched ca init" if missing == authority else f"ssh-keygen -y -f {config.launch_key} > {public}"
        raise ConfigError(f"cannot sign the launch key: {missing} is not there; make it: {remedy}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot sign {public} with {authority}: {error}") from None
    write_file(config.launch_key.with_name(f"{config.launch_key.name}-cert.pub"), signed + "\n")


def _addresses(source: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9.:,*?!/_-]{0,1000}", source):
        raise BadValue("--from wants host names, addresses or patterns, separated by commas")
    return source


def _make_missing_database() -> None:
    config = load_config(paths.find_config_dir(os.environ, os.getuid()))
    database = config.controller.state_dir / paths.DATABASE_FILE
    if database.exists() and database.stat().st_size:
        raise ConfigError(f"cannot make the database {database}: it is there already")
    with ExitStack() as undo:
        made = _make_state(config, undo)
        undo.pop_all()
    click.echo(f"created {made} without jobs; start the controller with: hpcsched up")


def _check_share(share: Path) -> None:
    if not share.is_absolute():
        raise ConfigError(f"cannot use {share} as share: it must be an absolute path, the same on every node")
    if not share.is_dir():
        raise ConfigError(f"cannot use {share} as share: no such directory; create or mount it first")
    if not os.access(share, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot use {share} as share: uid {os.getuid()} may not write there")


def _account(user: str | None) -> str:
    """Return the account of the controller, "" for the one that starts it."""
    if os.getuid() != 0:
        if user is not None:
            raise ConfigError(f"cannot make a cluster whose controller runs as {user!r}: only root can")
        return ""
    if user is None:
        return SERVICE if is_account(SERVICE) else ""
    return "" if user == "root" else user


def _config_text(share: str | None, name: str, account: str) -> str:
    cluster = {"name": name} | ({} if share is None else {"share": share})
    controller = {"user": account} if account else {}
    main = {"nodes": "all", "default": True}
    return render_config({"cluster": cluster, "controller": controller, "partitions.main": main})


def _check(config_dir: Path, text: str) -> None:
    """Raise ConfigError if the cluster cannot be created."""
    nodes = load_nodes(config_dir)
    config = build_config(tomllib.loads(text), nodes, config_dir=config_dir, environ=os.environ)
    config.controller.account()
    _check_state(config.controller.state_dir)
    key = config.launch_key
    if key.exists() != _public_half(key).exists():
        missing, there = sorted((key, _public_half(key)), key=Path.exists)
        raise ConfigError(
            f"cannot make the launch key: {there} is there and {missing} is not; move the one away, or bring the other back"
        )
    for directory in (config_dir, config.controller.state_dir):
        nearest = next(parent for parent in (directory, *directory.parents) if parent.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            raise ConfigError(f"cannot make {directory}: uid {os.getuid()} may not write to {nearest}")


def _check_state(state_dir: Path) -> None:
    if state_dir.exists() and state_dir.stat().st_mode & 0o077:
        raise ConfigError(f"cannot use {state_dir}: other users can read it; run: chmod 700 {state_dir}")


def _write_config(config_dir: Path, text: str, undo: ExitStack) -> Config:
    """Write hpcsched.toml; an existing one is renamed to hpcsched.toml.old."""
    for directory in (config_dir, config_dir / paths.NODES_DIR):
        _make_dir(directory, 0o755 if os.getuid() == 0 else 0o700, undo)
    path = config_dir / paths.CONFIG_FILE
    old = path.with_name(path.name + ".old")
    if path.exists():
        os.replace(path, old)
        undo.callback(os.replace, old, path)
    else:
        undo.callback(path.unlink, missing_ok=True)
    write_file(path, text)
    return load_config(config_dir)


def _ensure_launch_key(config: Config, undo: ExitStack) -> str:
    public = _public_half(config.launch_key)
    if config.launch_key.exists():
        return public.read_text(encoding="utf-8").strip()
    for path in (config.launch_key, public):
        undo.callback(path.unlink, missing_ok=True)
    return make_key(config.launch_key, f"hpcsched:{config.name}@{socket.gethostname()}")


def seal_keys_of(config: Config) -> SealingKeys:
    """Return the keys of jobs' environments.

    If they are missing, they are made for the controller's account. Raises ConfigError.
    """
    account = config.controller.account() if os.getuid() == 0 else None
    owner = os.geteuid() if account is None else account.pw_uid
    return sealing_keys(config.controller.seal_key, config.controller.state_dir, owner)


def _public_half(key: Path) -> Path:
    return key.with_name(key.name + ".pub")


def _make_state(config: Config, undo: ExitStack) -> Path:
    state_dir = config.controller.state_dir
    _check_state(state_dir)
    _make_dir(state_dir, 0o700, undo)
    database = state_dir / paths.DATABASE_FILE
    if not database.exists():
        for suffix in ("", "-wal", "-shm"):
            made = database.with_name(database.name + suffix)
            if not made.exists():
                undo.callback(made.unlink, missing_ok=True)
    give_to_controller(config, state_dir)
    with as_controller(config):
        create_database(database)
    return database


def _make_cluster_id(config: Config, database: Path, undo: ExitStack) -> None:
    """Write the cluster's id now: the controller's account cannot write it there."""
    path = config.config_dir / paths.CLUSTER_ID_FILE
    if config.controller.user is None or path.exists():
        return
    with as_controller(config), closing(Store(open_database(database))) as store:
        if not store.cluster_id():
            store.put_cluster_id(secrets.token_hex(8))
        cluster_id = store.cluster_id()
    write_file(path, cluster_id + "\n")
    undo.callback(path.unlink, missing_ok=True)


def give_to_controller(config: Config, *files: Path) -> None:
    """Give files in a directory of root to the controller's account.

    In a directory of that account root must not do it, nor write there: see `as_controller`. Raises ConfigError.
    """
    account = config.controller.account()
    if os.getuid() != 0 or account is None:
        return
    for path in files:
        try:
            if path.lstat().st_uid == 0:
                os.chown(path, account.pw_uid, account.pw_gid, follow_symlinks=False)
        except OSError as error:
            raise ConfigError(f"cannot give {path} to {account.pw_name}: {error.strerror}") from None


def _make_dir(path: Path, mode: int, undo: ExitStack) -> None:
    """Create a directory and its missing parents."""
    try:
        for above in reversed([parent for parent in path.parents if not parent.exists()]):
            above.mkdir()
            undo.callback(_remove_dir, above)
        if not path.is_dir():
            path.mkdir(mode=mode)
            undo.callback(_remove_dir, path)
    except OSError as error:
        raise ConfigError(f"cannot make {path}: {error.strerror}") from None


def _remove_dir(path: Path) -> None:
    with suppress(OSError):  # not empty: another process has written into it
        path.rmdir()


def write_file(path: Path, text: str) -> None:
    """Write `path` atomically: temporary file, fsync, rename. Raises ConfigError."""
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
        config.controller.seal_key: "the key of jobs' environments; in no backup, so keep a copy elsewhere",
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
    yield "  1. For each node, let in the key, to the account that is to run the jobs"
    yield "     (root's, if jobs are to run as the users who submit them):"
    yield ""
    yield '       hpcsched key | ssh user@host "umask 077; mkdir -p ~/.ssh; cat >> ~/.ssh/authorized_keys"'
    yield ""
    yield "     The line of hpcsched key lets the key start the agent there: no shell, no other command, no"
    yield "     file transfer, no forwarding. The key is"
    yield f"       {public_key}"
    yield "  2. hpcsched node add user@host     for each node: shows its host key, and what it has"
    yield "  3. hpcsched up                     starts the controller"
    if os.getuid() == 0:
        yield f"     (it runs as {config.controller.user or 'root; to run it as an account of its own, see hpcschedd(8)'})"
    first = "sudo -u USER hsub --wrap id" if os.getuid() == 0 else "hsub --wrap hostname"
    yield f"  4. {first:<31} the first job; hqueue shows it, hlogs its output"
    if os.getuid() == 0:
        yield "     (as an ordinary user: jobs of root are refused, see allow_uid_below in hpcsched.toml)"
