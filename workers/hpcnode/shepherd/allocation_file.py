"""What a job is told of its nodes when they change while it runs: a file for each attempt, in ROOT/allocation.

It is JSON: `generation` grows with each change, `nodes` are those that the job has now, `wanted`, if there are any, those that it
is asked to keep alone. It is replaced in one step; until the first change there is none. Everybody may read it, as everybody
may ask for the queue.
"""

from __future__ import annotations

import json
import os

from hpcnode import paths
from hpcnode.wire import protocol


def path_of(root: str, incarnation: str, job_id: int, attempt: int) -> str:
    """Return where the file of the attempt is."""
    return os.path.join(root, "allocation", "%s.%d.%d" % (incarnation, job_id, attempt))


def note(root: str, order: protocol.Allocation) -> bool:
    """Write the file if it is news; return whether it is."""
    path = path_of(root, order.incarnation, order.job_id, order.attempt)
    if known_generation(path) >= order.generation:
        return False
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    os.chmod(folder, 0o755)  # noqa: S103 - users read it
    with open(path + ".new", "w") as file:
        json.dump({"generation": order.generation, "nodes": order.nodes, "wanted": order.wanted}, file)
        file.write("\n")
    os.chmod(path + ".new", 0o644)
    os.replace(path + ".new", path)
    return True


def known_generation(path: str) -> int:
    """Return of which generation the file is, 0 if there is none."""
    try:
        with open(path) as file:
            return int(json.load(file)["generation"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def forget_all(root: str) -> None:
    """Remove all files; no job may be running."""
    paths.remove_tree(os.path.join(root, "allocation"))
