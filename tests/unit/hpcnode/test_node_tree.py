"""All processes below a shepherd: killed until none is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import hpcnode

# Its own process, because all below it is killed. What is forked between two kills stands for what forks away from one.
KILLED_TWICE = """
import json, subprocess
from hpcnode.shepherd.process_tree import ProcessTree

class Loop:
    def later(self, delay_s, call):
        calls.append((delay_s, call))

calls = []
tree = ProcessTree(Loop())
early = subprocess.Popen(["sleep", "600"])
tree.kill()
late = subprocess.Popen(["sleep", "600"])
(first_s, again), = calls
again()
ends = [early.wait(), late.wait()]
assert not tree.is_empty
assert list(tree.reap()) == []
before = len(calls)
calls[-1][1]()
print(json.dumps({"ends": ends, "delays_s": [delay_s for delay_s, _ in calls], "after_the_end": len(calls) - before}))
"""


BY_GROUP = """
import json, subprocess, sys
from pathlib import Path
from hpcnode.shepherd.process_tree import ProcessTree

class Loop:
    def later(self, delay_s, call):
        calls.append(call)

calls, group = [], Path(sys.argv[1])
tree = ProcessTree(Loop())
tree.group = str(group)
living = subprocess.Popen(["sleep", "600"])
killed = []
tree.kill()
killed.append((group / "cgroup.kill").read_text())
(group / "cgroup.kill").write_text("")
calls.pop()()
killed.append((group / "cgroup.kill").read_text())
alive = living.poll() is None
(group / "cgroup.events").write_text("populated 0")
calls.pop()()
print(json.dumps({"killed": killed, "alive": alive, "end": living.wait()}))
"""


# A task that has not executed a program, such as one that waits for its epilog, beside the process that forks tasks.
UNUSUAL = """
import json, os, signal
from hpcnode.os import process
from hpcnode.shepherd.process_tree import ProcessTree
from hpcnode.shepherd.task import EXIT_SIGNAL

class Loop:
    def later(self, delay_s, call):
        calls.append(call)

def child():
    pid = process.clone(EXIT_SIGNAL)
    return pid or signal.pause()

calls, tree = [], ProcessTree(Loop())
forker, task = child(), child()
process.set_apart(forker)
tree.add_task(task)
found = [list(tree.reap()), tree.is_empty]
tree.kill()
os.waitid(os.P_PID, task, os.WEXITED | os.WNOWAIT | process.ANY_CHILD)
found += [[pid for pid, _, _ in tree.reap()] == [task], tree.is_empty, list(process.descendants([os.getpid()]))]
os.kill(forker, signal.SIGKILL)
os.waitid(os.P_PID, forker, os.WEXITED | os.WNOWAIT | process.ANY_CHILD)
found += [list(tree.reap()), process.end_apart(forker)]
print(json.dumps(found))
"""


def test_a_tree_has_tasks_that_have_not_executed_a_program_but_not_the_forker() -> None:
    environ = os.environ | {"PYTHONPATH": str(Path(hpcnode.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", UNUSUAL], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[], False, True, True, [], [], False]


def test_e2_a_tree_with_a_cgroup_is_killed_through_it_before_processes_are_sought(tmp_path: Path) -> None:
    """A directory stands for the group. What is left when it is empty has been moved out of it."""
    (tmp_path / "cgroup.kill").touch()
    (tmp_path / "cgroup.events").write_text("populated 1")
    environ = os.environ | {"PYTHONPATH": str(Path(hpcnode.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", BY_GROUP, tmp_path], env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"killed": ["1", "1"], "alive": True, "end": -9}


def test_a_kill_is_repeated_until_no_process_is_left() -> None:
    environ = os.environ | {"PYTHONPATH": str(Path(hpcnode.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", KILLED_TWICE], env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["ends"] == [-9, -9]
    assert said["after_the_end"] == 0
    first_s, second_s = said["delays_s"]
    assert 0 < first_s < second_s <= 1.0
