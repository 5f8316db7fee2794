"""The usage of a step, measured on real processes below this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import wait_until

from hpcnode.shepherd.process_tree import LAST_LOOK_S, Usage

HOLD = "x = bytearray({mib} << 20)\nfor at in range(0, len(x), 4096): x[at] = 1\n"


def ended(process: subprocess.Popen[bytes]) -> object:
    """Return the usage of an ended child."""
    process.returncode = 0  # it is ours to wait for
    return os.wait4(process.pid, 0)[2]


@pytest.mark.skipif(
    not Path("/proc/self/io").exists(), reason="this kernel does not count what processes read and write"
)
def test_bytes_read_and_written_are_those_of_all_descendants(tmp_path: Path) -> None:
    usage = Usage()
    (tmp_path / "own").write_bytes(b"x" * 5_000_000)  # by the shepherd itself: not the step's
    inner = f"open({str(tmp_path / 'copy')!r}, 'wb').write(open({str(tmp_path / 'own')!r}, 'rb').read())"
    begin = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    writes = f"{begin}; open({str(tmp_path / 'b')!r}, 'w').write('x' * 3_000_000)"
    usage.add(ended(subprocess.Popen([sys.executable, "-S", "-c", writes])))  # type: ignore[arg-type]
    found = usage.as_dict()
    assert 8_000_000 <= found["disk_write_bytes"] < 9_000_000
    assert found["disk_read_bytes"] >= 5_000_000
    assert found["cpu_user_s"] > 0


def test_memory_is_the_highest_sum_of_a_task_and_all_below_it(tmp_path: Path) -> None:
    held = tmp_path / "held"
    script = (
        "import os, sys\n"
        "pids = []\n"
        "for _ in range(2):\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        f"        exec({HOLD.format(mib=40)!r})\n"
        f"        open({str(held)!r}, 'a').write('x')\n"
        "        sys.stdin.read()\n"
        "        os._exit(0)\n"
        "    pids.append(pid)\n"
        "for pid in pids: os.waitpid(pid, 0)\n"
    )
    child = subprocess.Popen([sys.executable, "-S", "-c", script], stdin=subprocess.PIPE)
    wait_until(lambda: held.exists() and held.read_text() == "xx", what="both to hold their memory")
    usage = Usage()
    pauses_s = [usage.look([child.pid]) for _ in range(6)]
    assert pauses_s == sorted(pauses_s)
    assert pauses_s[-1] == LAST_LOOK_S
    assert 80 * 1024 <= usage.as_dict()["max_rss_kib"] < 160 * 1024
    assert child.stdin is not None
    child.stdin.close()
    usage.add(ended(child))  # type: ignore[arg-type]
    assert usage.as_dict()["max_rss_kib"] >= 80 * 1024


def test_the_largest_process_between_two_measurements_counts() -> None:
    usage = Usage()
    usage.look([2**22 + 1])  # none such: it has ended already
    usage.add(ended(subprocess.Popen([sys.executable, "-S", "-c", HOLD.format(mib=50)])))  # type: ignore[arg-type]
    assert usage.as_dict()["max_rss_kib"] >= 50 * 1024
