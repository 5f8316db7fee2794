"""A start of hpcschedd up to its first answers: lock, sockets, the rows of the database; then all the rest.

The queue is answered from what has been read, before the planner, the connections to nodes and what they need have even been
imported: that takes as long again. Whoever asks for something else waits until it is there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from hpcsched import paths
from hpcsched.api.connection_limits import Doors
from hpcsched.api.listener import listening_socket
from hpcsched.config.load import Config
from hpcsched.controller.lock import StateLock
from hpcsched.controller.nodes.edits import gone_notes
from hpcsched.controller.recovery import begin_epoch
from hpcsched.controller.views.queue import Reading
from hpcsched.controller.views.routes import make_server
from hpcsched.errors import ConfigError, ProtocolError
from hpcsched.store.engine import damaged, open_database
from hpcsched.store.store import Store

if TYPE_CHECKING:
    from hpcsched.controller.views.backend import ControllerBackend

log = logging.getLogger("hpcsched.daemon")

OPEN_FILES = 65_536
LOOK_S = 0.02
FIRST_ANSWERS_S = 1.0  # who asks again and again may put off the rest of a start by so much, and not longer


async def serve(config: Config, clock: Callable[[], float] = time.time) -> int:
    """Serve until a signal or a broken invariant; return the exit status."""
    settings = config.controller
    _allow_open_files()
    make_own_dir(settings.state_dir)
    lock = StateLock(settings.state_dir)
    lock.acquire(datetime.fromtimestamp(clock()).isoformat(sep=" ", timespec="seconds"))
    mode = _make_run_dir(settings.run_dir)
    listener = listening_socket(config.api_socket, mode)
    try:
        return await _serve(config, listener, mode, clock)
    finally:
        config.api_socket.unlink(missing_ok=True)
        listener.close()
        lock.release()


async def _serve(config: Config, listener: socket.socket, mode: int, clock: Callable[[], float]) -> int:
    database = config.controller.state_dir / paths.DATABASE_FILE
    store = Store(open_database(database))
    check_cluster_id(config, store, database)
    try:
        cluster = begin_epoch(config, store, clock())
    except (ValueError, TypeError, KeyError, LookupError, ProtocolError) as error:
        log.debug("what is wrong with the database", exc_info=True)
        raise damaged(database, f"a row cannot be read: {error!r:.200}") from None
    config = cluster.config  # not in all what the files say, if jobs are held
    log.info("term %d of cluster %s, %d jobs known", cluster.epoch, config.name, len(cluster.jobs))
    for note in (*cluster.not_taken, *gone_notes(cluster)):
        log.error("%s", note)
    coming: asyncio.Future[ControllerBackend] = asyncio.get_running_loop().create_future()
    reading = Reading(cluster, clock)
    doors = Doors()
    doors.set_rate(config.controller.request_rate, config.controller.request_burst)
    server = make_server(reading, coming, doors)

    async def answered() -> None:
        await first_answers(lambda: bool(reading.under_way or server.unread_bytes))

    try:
        await server.serve(listener)
        await answered()
        from hpcsched.controller.daemon import Daemon  # a hundred modules

        return await Daemon(config, cluster, store, doors, clock).run(coming, mode, server.router, answered)
    finally:
        await server.close()
        store.close()


def check_cluster_id(config: Config, store: Store, database: Path) -> None:
    """Refuse the database of another cluster; note which cluster's it is, if that is not known yet. Raises ConfigError.

    The id is kept in the database and beside hpcsched.toml. The name alone does not tell: a cluster may be renamed.
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
        with suppress(OSError):  # the configuration may be read-only: then the database alone knows
            path.write_text(store.cluster_id() + "\n", encoding="ascii")


async def first_answers(under_way: Callable[[], bool], most_s: float = FIRST_ANSWERS_S) -> None:
    """Let those who have waited for our start be answered, and wait until no answer is `under_way`, `most_s` at most.

    What comes next keeps the processor for as long as a whole answer takes.
    """
    loop = asyncio.get_running_loop()
    until_s = loop.time() + most_s
    await asyncio.sleep(LOOK_S)
    while under_way() and loop.time() < until_s:
        await asyncio.sleep(LOOK_S)


def _allow_open_files() -> None:
    """Have room for many who ask at once: many systems let a process have 1,024 open files, but more if it says so."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, OPEN_FILES)), hard))


def _make_run_dir(run_dir: Path) -> int:
    """Make the directory of the sockets; return the sockets' mode: for everybody if we serve everybody."""
    for_all = os.getuid() == 0
    make_own_dir(run_dir, 0o755 if for_all else 0o700)
    return 0o666 if for_all else 0o600


def make_own_dir(path: Path, mode: int = 0o700) -> None:
    """Make the directory, by default for us alone. Raises ConfigError if it is somebody else's, or cannot be made."""
    try:
        path.mkdir(mode=mode, parents=True, exist_ok=True)
        status = path.stat()
        if status.st_uid != os.getuid():
            raise ConfigError(f"cannot use {path}: it belongs to uid {status.st_uid}, we are uid {os.getuid()}")
        path.chmod(mode)
    except OSError as error:
        raise ConfigError(f"cannot use {path}: {error.strerror}") from None
