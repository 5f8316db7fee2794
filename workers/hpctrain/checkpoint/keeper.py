"""The process that writes a trainer's checkpoints: `python -m hpctrain.checkpoint.keeper DESCRIPTOR [LISTENER]`.

It packs, hashes and writes what the trainer has copied into memory that both have.  Does not know torch.
Rules: what was handed over whole is published, also if the trainer is killed meanwhile: a job's signals, which go to all of
its processes, are not for this one.  It ends when the trainer has, after what it is about.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

from hpctrain.checkpoint.group import First, Other
from hpctrain.checkpoint.handing import Handing
from hpctrain.checkpoint.maker import Maker, Order, Task
from hpctrain.checkpoint.retain import Retention
from hpctrain.errors import StaleAttemptError

NICE = 5  # the trainer's own work comes first


def main(descriptor: int, listener: int | None = None) -> int:
    """This will make checkpoints until the trainer is gone; at `listener` other ranks' keepers tell what they have written."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    line = Handing(socket.socket(fileno=descriptor))
    try:
        task = line.receive()
        assert isinstance(task, Task)
        retention = Retention(task.claim, task.policy, task.distrusted)
        maker = Maker(task.claim, task.parent, task.base_every, retention, task.chunk_bytes, _group(task, listener))
        while True:
            order = line.receive()
            assert isinstance(order, Order)
            try:
                said: object = maker.make(order)
            except StaleAttemptError as error:
                said = error
            line.send((said, maker.standing))
            maker.tidy()
    except (EOFError, ConnectionError):
        return 0


def _group(task: Task, listener: int | None) -> First | Other | None:
    if task.seat is not None:
        return Other(task.seat)
    return First(task.ranks, socket.socket(fileno=listener), task.secret) if listener is not None else None


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
