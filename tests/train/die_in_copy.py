"""Makes checkpoints of three steps, and is killed while it copies the fourth.

Usage: die_in_copy.py DIRECTORY
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from test_train_process_writer import KeptWorld

from hpctrain.checkpoint.writing.writer import ProcessWriter

if __name__ == "__main__":
    world = KeptWorld(Path(sys.argv[1]))
    writer = world.writer()
    for _ in range(3):
        world.move()
        world.write(writer)
    world.move()
    ProcessWriter._copy = lambda self, _, snapshot: (
        self._report_progress(snapshot, 64),
        os.kill(os.getpid(), signal.SIGKILL),
    )
    writer.begin(world.tensors(), world.facts(), base=True)
