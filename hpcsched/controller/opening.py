"""A start of hpcschedd up to its first answers: lock, sockets, the rows of the database; then all the rest.

The queue is answered from what has been read, before the planner, the connections to nodes and what they need have even been
imported: that takes as long again. Whoever asks for something else waits until it is there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from hpcsched import paths
from hpcsched.api.app import Backend, make_server
from hpcsched.config import Config
from hpcsched.controller.lock import StateLock
from hpcsched.controller.reading import Reading
from hpcsched.controller.recovery import begin_term
from hpcsched.errors import ConfigError
from hpcsched.store.engine import open_database
from hpcsched.store.store import Store

log = logging.getLogger("hpcsched.daemon")

BACKLOG = 1024
# Who has waited for our start is answered before the rest is imported.
FIRST_ANSWERS_S = 0.02


async def serve(config: Config, clock: Callable[[], float] = time.time) -> int:
    """Serve until a signal or a broken invariant; return the exit status."""
    settings = config.controller
    make_private_dir(settings.state_dir)
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
    store = Store(open_database(config.controller.state_dir / paths.DATABASE_FILE))
    world = begin_term(config, store, clock())
    log.info("term %d of cluster %s, %d jobs known", world.epoch, config.name, len(world.jobs))
    coming: asyncio.Future[Backend] = asyncio.get_running_loop().create_future()
    server = make_server(Reading(world, clock), coming)
    try:
        await server.serve(listener)
        await asyncio.sleep(FIRST_ANSWERS_S)
        from hpcsched.controller.daemon import Daemon  # a hundred modules

        return await Daemon(config, world, store, clock).run(coming, mode, server.router)
    finally:
        await server.close()
        store.close()


def _make_run_dir(run_dir: Path) -> int:
    """Make the directory of the sockets; return the sockets' mode: for everybody if we serve everybody."""
    for_all = os.getuid() == 0
    run_dir.mkdir(parents=True, exist_ok=True)
    status = run_dir.stat()
    if status.st_uid != os.getuid():
        raise ConfigError(f"cannot use {run_dir} for the sockets: it belongs to uid {status.st_uid}, not to us")
    run_dir.chmod(0o755 if for_all else 0o700)
    return 0o666 if for_all else 0o600


def listening_socket(path: Path, mode: int) -> socket.socket:
    """Return the API's socket: whoever connects to it while the database is read waits, rather than being refused."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot serve at {path}: {error.strerror or error}") from None
    path.chmod(mode)
    listener.listen(BACKLOG)
    return listener


def make_private_dir(path: Path) -> None:
    """Make the directory, for us alone. Raises ConfigError if it is somebody else's."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.getuid():
        raise ConfigError(f"cannot use {path}: it belongs to uid {status.st_uid}, we are uid {os.getuid()}")
    path.chmod(0o700)
