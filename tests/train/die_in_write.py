"""Forks one child per file operation of a checkpoint: each is killed with SIGKILL at its own.

The parent never computes with torch: a child of a process with a thread pool would wait for threads that it lacks.
Usage: die_in_write.py DIRECTORY OPERATIONS; child n works in DIRECTORY/n.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from test_train_checkpoint import write

MORTAL_OPERATIONS = ("fsync", "link", "replace")


def die_at(count: int) -> None:
    """Make the n-th of the operations that matter the last one."""
    left = [count]

    def mortal(name: str) -> None:
        real = getattr(os, name)

        def operation(*arguments, **options):  # noqa: ANN002, ANN003, ANN202
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        setattr(os, name, operation)

    for name in MORTAL_OPERATIONS:
        mortal(name)


def main(directory: Path, operations: int) -> int:
    for number in range(1, operations + 1):
        pid = os.fork()
        if pid == 0:
            write(directory / str(number), [1, 2])
            die_at(number)
            write(directory / str(number), [3])
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        print(f"{number} {'killed' if os.WIFSIGNALED(status) else 'survived'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
