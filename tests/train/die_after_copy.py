"""Makes checkpoints of three steps, copies the fourth, and is killed.

Usage: die_after_copy.py DIRECTORY
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from test_train_gradlog import World
from test_train_process_writer import KeptWorld

if __name__ == "__main__":
    world: World = KeptWorld(Path(sys.argv[1]))
    writer = world.writer()
    for _ in range(3):
        world.move()
        world.write(writer)
    world.move()
    writer.begin(None if writer.log_suffices() else world.tensors(), world.facts())
    os.kill(os.getpid(), signal.SIGKILL)
