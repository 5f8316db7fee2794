"""Run hpcschedd: start up to the first answers (lock, sockets, rows), then the rest.

Queue queries are answered from these rows before the planner, the links to nodes and their modules
are imported, because the imports take as long again. All other requests wait until the import is
done.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import resource
import secrets
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

import hpcsched
from hpcsched import paths
from hpcsched.api.connection_limits import SocketLimits, listening_socket
from hpcsched.config.load import Config, load_config
from hpcsched.controller.credentials import Credentials
from hpcsched.controller.lock import StateLock
from hpcsched.controller.logfile import start_log
from hpcsched.controller.nodes.edits import gone_notes
from hpcsched.controller.recovery import begin_epoch
from hpcsched.controller.views.queue import Reading
from hpcsched.controller.views.routes import make_server
from hpcsched.errors import ConfigError, HpcschedError, ProtocolError
from hpcsched.store.engine import damaged, open_database
from hpcsched.store.sealing import SealingKeys, sealing_keys
from hpcsched.store.store import Store

if TYPE_CHECKING:
    from hpcsched.controller.views.backend import ControllerBackend


PR_SET_DUMPABLE = 4  # prctl.h
M_MMAP_THRESHOLD = -3  # malloc.h
LARGE_BLOCK_BYTES = 1 << 20


log = logging.getLogger("hpcsched.daemon")
OPEN_FILES = 65_536
LOOK_S = 0.02
FIRST_ANSWERS_S = 1.0  # clients that ask repeatedly can delay the rest of a start by this much


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", "config_dir", metavar="DIR", type=click.Path(path_type=Path), help="Configuration directory.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="How much to log (default: log_level of the configuration).",
)
@click.option(
    "--log-file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write the log to this file, which rotates (log_max_size, log_files), and not to stderr.",
)
@click.version_option(hpcsched.__version__, "-V", "--version", prog_name="hpcschedd")
def command(config_dir: Path | None, log_level: str | None, log_file: Path | None) -> None:
    """Run the hpcsched controller in the foreground until SIGTERM or SIGINT.

    Jobs run on when it ends.
    """
    gc.disable()  # objects of a start are not garbage; the daemon enables it afterwards
    config = load_config(config_dir or paths.find_config_dir(os.environ, os.getuid()))
    settings = config.controller
    try:
        start_log(
            log_level or settings.log_level,
            log_file,
            settings.log_max_size << 20,
            settings.log_files,
            is_ecs=config.log_format == "ecs",
        )
    except OSError as error:
        raise ConfigError(f"cannot write the log {log_file}: {error.strerror}") from None
    return_large_blocks()
    forbid_core_files()
    sys.exit(asyncio.run(serve(config)))


def return_large_blocks() -> None:
    """Return freed blocks of 1 MiB and more to the system.

    By default, after the first such block, glibc keeps up to 32 MiB of each, in pieces.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


def forbid_core_files() -> None:
    """Keep this process's memory out of core files and debuggers.

    It has the environments of users.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # the limit does not count if a program gets the core


def main() -> None:
    """Run the command, and print errors for users on stderr."""
    os.umask(0o077)
    try:
        command(prog_name="hpcschedd")
    except HpcschedError as error:
        print(f"hpcschedd: error: {error}", file=sys.stderr)
        sys.exit(1)


async def serve(config: Config, clock: Callable[[], float] = time.time) -> int:
    """Serve until a signal or a broken invariant; return the exit status."""
    settings = config.controller
    check_account(config)
    _allow_open_files()
    make_own_dir(settings.state_dir)
    lock = StateLock(settings.state_dir)
    lock.acquire(datetime.fromtimestamp(clock()).isoformat(sep=" ", timespec="seconds"))
    mode = _make_run_dir(config)
    listener = listening_socket(config.api_socket, mode)
    try:
        return await _serve(config, listener, mode, clock)
    finally:
        config.api_socket.unlink(missing_ok=True)
        listener.close()
        lock.release()


async def _serve(config: Config, listener: socket.socket, mode: int, clock: Callable[[], float]) -> int:
    database = config.controller.state_dir / paths.DATABASE_FILE
    store = Store(open_database(database), sealing_keys(config.controller.seal_key, config.controller.state_dir))
    check_cluster_id(config, store, database)
    try:
        cluster = begin_epoch(config, store, clock())
    except (ValueError, TypeError, KeyError, LookupError, ProtocolError) as error:
        log.debug("what is wrong with the database", exc_info=True)
        raise damaged(database, f"a row cannot be read: {error!r:.200}") from None
    config = cluster.config  # may differ from the files if jobs are held
    if sealed := cluster.sealed_jobs():
        log.error("%s", sealed_note(len(sealed), store.keys))
    log.info("term %d of cluster %s, %d jobs known", cluster.epoch, config.name, len(cluster.jobs))
    for note in (*cluster.not_taken, *gone_notes(cluster)):
        log.error("%s", note)
    coming: asyncio.Future[ControllerBackend] = asyncio.get_running_loop().create_future()
    reading = Reading(cluster, clock)
    socket_limits = SocketLimits()
    socket_limits.set_rate(config.controller.request_rate, config.controller.request_burst)
    credentials = Credentials(cluster, config.controller.state_dir, store.cluster_id(), clock)

    def observe(route: str, status: int, took_s: float) -> None:
        if coming.done() and not coming.cancelled() and coming.exception() is None:
            coming.result().metrics.request(route, status, took_s)

    server = make_server(reading, coming, socket_limits, credentials.identify, observe)

    async def answered() -> None:
        await first_answers(lambda: bool(reading.under_way or server.unread_bytes))

    try:
        await server.serve(listener)
        await answered()
        from hpcsched.controller.daemon import Daemon  # a hundred modules

        return await Daemon(config, cluster, store, socket_limits, clock).run(
            coming, mode, server.router, answered, credentials
        )
    finally:
        await server.close()
        store.close()


def sealed_note(count: int, keys: SealingKeys) -> str:
    """Return what to do about waiting jobs whose environment no key opens."""
    return (
        f"{count} waiting jobs are held: their environments are sealed with a key that is not in {keys.path}. Add the lines of "
        "a copy of that file to it and restart the controller; or cancel the jobs and submit them again"
    )


def check_cluster_id(config: Config, store: Store, database: Path) -> None:
    """Reject the database of another cluster; record the cluster's id if it is not known yet.

    The id is kept in the database and beside hpcsched.toml. The name is not enough, because a
    cluster may be renamed.

    Raises: ConfigError.
    """
    path = config.config_dir / paths.CLUSTER_ID_FILE
    try:
        own = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        own = ""
    known = store.cluster_id()
    if own and known and own != known:
        raise ConfigError(
            f"cannot use the database {database}: it is of another cluster, {store.cluster() or 'without a name'!r} "
            f"({known}), and {path} says {own}. Bring back this cluster's own database, or a backup of it: hpcsched restore "
            "FILE. If this one is to be this cluster's from now on, move it away and restore it as well"
        )
    if not known:
        store.put_cluster_id(own or secrets.token_hex(8))
    if not own:
        # The configuration may be read-only: then only the database has the id.
        with suppress(OSError):
            path.write_text(store.cluster_id() + "\n", encoding="ascii")


async def first_answers(under_way: Callable[[], bool], most_s: float = FIRST_ANSWERS_S) -> None:
    """Answer the requests that waited for the start.

    Wait until no answer is `under_way`, at most `most_s` seconds. The rest of the start then keeps
    the processor for as long as a whole answer takes.
    """
    loop = asyncio.get_running_loop()
    until_s = loop.time() + most_s
    await asyncio.sleep(LOOK_S)
    while under_way() and loop.time() < until_s:
        await asyncio.sleep(LOOK_S)


def _allow_open_files() -> None:
    """Raise the limit of open files, so that many clients can connect at once.

    Many systems start a process with 1,024 but let it raise the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, OPEN_FILES)), hard))


def check_account(config: Config) -> None:
    """Raise ConfigError if this process has not the account of the controller."""
    account, uid = config.controller.account(), os.getuid()
    if account is not None and account.pw_uid != uid:
        raise ConfigError(
            f"cannot start hpcschedd as uid {uid}: user = {account.pw_name!r} in [controller]; start it as root with "
            "'hpcsched up', which changes the account, or with systemd"
        )
    if account is None and uid != 0 and str(config.config_dir) == paths.SYSTEM_CONFIG:
        raise ConfigError(
            f"cannot start hpcschedd as uid {uid} on {paths.SYSTEM_CONFIG}, whose controller serves all users: name its account "
            f"as user in [controller] of {paths.CONFIG_FILE} (see hpcschedd(8)), or start it as root"
        )


def _make_run_dir(config: Config) -> int:
    """Create the directory of the sockets; return the mode of the sockets.

    The sockets are open to all users if the controller serves all users.
    """
    run_dir = config.controller.run_dir
    for_all = os.getuid() == 0 or config.controller.user is not None
    make_own_dir(run_dir, 0o755 if for_all else 0o700)
    return 0o666 if for_all else 0o600


def make_own_dir(path: Path, mode: int = 0o700) -> None:
    """Create the directory, by default for our account only.

    Raises: ConfigError if it belongs to another account or cannot be created.
    """
    try:
        path.mkdir(mode=mode, parents=True, exist_ok=True)
        status = path.stat()
        if status.st_uid != os.getuid():
            raise ConfigError(f"cannot use {path}: it belongs to uid {status.st_uid}, we are uid {os.getuid()}")
        path.chmod(mode)
    except OSError as error:
        raise ConfigError(f"cannot use {path}: {error.strerror}") from None


if __name__ == "__main__":
    main()
