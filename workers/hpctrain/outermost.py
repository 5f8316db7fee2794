"""The outermost edge of a rank: an error ends all ranks at once, and its reason is printed first.

Without this the others would wait in a collective for a rank that is gone.  In a job the scheduler is told the reason too, and
whether it is one or only the echo of another rank's end: hlogs(1) shows the first cause first.
"""

from __future__ import annotations

import array
import fcntl
import os
import stat
import sys
import termios
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import hpctrain.comm
from hpctrain.comm import Communicator
from hpctrain.env import place
from hpctrain.errors import EXIT_FAILED, EXIT_REQUEUE, TrainError
from hpctrain.heartbeat import Heartbeat

READ_LIMIT_S = 2.0  # the other ranks wait meanwhile


@contextmanager
def all_or_none(comm: Communicator) -> Iterator[None]:
    """This will run the body and, if it raises, print why with the rank's number and end every rank."""
    try:
        yield
    except SystemExit as exiting:
        numbered = isinstance(exiting.code, int)
        text = f"the script ended with status {exiting.code}" if numbered else str(exiting.code)
        _say(comm, f"{text}\n")
        _tell(comm, text, exiting)
        comm.abort(exiting.code if numbered else EXIT_FAILED)
    except KeyboardInterrupt:
        _say(comm, "interrupted\n")
        comm.abort(130)
    except TrainError as error:
        _say(comm, f"{error}\n")
        _tell(comm, str(error), error)
        comm.abort(EXIT_FAILED)
    except Exception as error:  # whatever it is, the others must not wait for us
        text = traceback.format_exc()
        _say(comm, text)
        _tell(comm, text, error)
        comm.abort(EXIT_FAILED)


@contextmanager
def orderly_exit() -> Iterator[list[SystemExit]]:
    """This will run the body and put into the list how it ended, if by `sys.exit` and for no error."""
    found: list[SystemExit] = []
    try:
        yield found
    except SystemExit as exiting:
        if exiting.code not in (None, 0, EXIT_REQUEUE):
            raise
        found.append(exiting)


def tell_unmet(environ: Mapping[str, str], error: TrainError) -> None:
    """This will tell the scheduler why ranks could not meet; which rank this is, only its launcher knows."""
    with suppress(TrainError):  # what the launcher says may be the very error
        here = place(environ)
        Heartbeat(environ).fail(here.rank, here.world, str(error), echo=False)


def is_echo(error: BaseException) -> bool:
    """This will say whether the error came up while ranks were exchanging: then another rank is gone, most likely."""
    frames = traceback.extract_tb(error.__traceback__)
    here = str(Path(hpctrain.comm.__file__).parent)
    return not isinstance(error, TrainError) and any(frame.filename.startswith(here) for frame in frames)


def wait_until_read(descriptor: int, limit_s: float = READ_LIMIT_S) -> bool:
    """This will wait until the other end of a pipe, socket or terminal has taken what was written to it, or the limit is over.

    A launcher that is told to abort ends at once (MPICH's does) and loses what its ranks wrote and it has not read yet.
    """
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor)):
        return True
    request = (
        termios.FIONREAD if stat.S_ISFIFO(mode) else termios.TIOCOUTQ
    )  # ioctl_tty(2), unix(7): bytes not taken yet
    unread = array.array("i", [0])
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        fcntl.ioctl(descriptor, request, unread)
        if unread[0] == 0:
            return True
        time.sleep(0.001)
    return False


def _say(comm: Communicator, text: str) -> None:
    label = f"rank {comm.rank} of {comm.size}: " if comm.size > 1 else ""
    with suppress(BrokenPipeError):  # nobody listens any more; all ranks end all the same
        sys.stdout.flush()
    with suppress(BrokenPipeError):
        sys.stderr.write(f"hpctrain: {label}{text}")
        sys.stderr.flush()
        for stream in (sys.__stdout__, sys.__stderr__):
            wait_until_read(stream.fileno())


def _tell(comm: Communicator, text: str, error: BaseException) -> None:
    Heartbeat(os.environ).fail(comm.rank, comm.size, text, echo=is_echo(error))
