"""What a no-op job costs a node: N launches through a real agent's socket; jobs per second, CPU per job, latency.

Run: python tests/bench/bench_node.py [JOBS] [IN_FLIGHT]. Prints a table; judges nothing. CPU is that of agent, shepherds and
tasks (the shell itself included, and shown alone for comparison), from /proc and getrusage of reaped children.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "integration"), str(Path(__file__).parents[1])]

from agent_client import Controller, launch_of, new_token, running_node, script_of  # noqa: E402

from hpcnode import process, protocol  # noqa: E402

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def cpu_of(pid: int) -> float:
    """Return the CPU seconds of an agent, its workers, and all that those have reaped."""
    total = 0
    for each in (pid, *process.children_of(pid)):
        fields = Path("/proc", str(each), "stat").read_text().rpartition(")")[2].split()
        total += sum(int(word) for word in fields[11:15])
    return total * TICK_S


def shell_cost(rounds: int = 100) -> float:
    """Return the CPU seconds of forking and running a shell that does nothing, from a small process."""
    code = (
        f"import os\nfor i in range({rounds}):\n    os.waitpid(os.posix_spawn('/bin/sh', ['sh', '-c', ':'], {{}}), 0)\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)
    subprocess.run([sys.executable, "-I", "-S", "-c", "pass"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / rounds


def flood(root: Path, jobs: int, in_flight: int) -> dict[str, float]:
    """Run `jobs` no-op jobs, `in_flight` at a time."""
    with running_node(root) as node:
        controller = Controller(node)
        assert node.agent is not None
        script = script_of(":")
        cpu_before, started_s = cpu_of(node.agent.pid), time.perf_counter()
        sent = done = 0
        while done < jobs:
            batch = b""
            while sent < jobs and sent - done < in_flight:
                sent += 1
                batch += protocol.encode(launch_of(new_token(job=sent), stdout="/dev/null"), script)
            if batch:
                controller.sock.sendall(batch)
            controller.pump(5)
            reports = [m for m, _ in controller.messages if isinstance(m, protocol.Report)]
            controller.messages.clear()
            done += sum(report.status == protocol.ENDED for report in reports)
            controller.ack(*reports)
        wall_s = time.perf_counter() - started_s
        time.sleep(0.6)  # the last entries are removed
        return {
            "jobs_per_s": jobs / wall_s,
            "cpu_ms_per_job": (cpu_of(node.agent.pid) - cpu_before) / jobs * 1e3,
            "entries_left": len(list((root / "spool").glob("*.*.*"))),
            "agent_rss_mib": int(Path(f"/proc/{node.agent.pid}/statm").read_text().split()[1]) / 256,
        }


def latency(root: Path, jobs: int) -> dict[str, float]:
    """Run jobs one after the other on an idle node."""
    with running_node(root) as node:
        controller = Controller(node)
        first_ms, end_ms = [], []
        for number in range(1, jobs + 1):
            out = root / "out"
            out.unlink(missing_ok=True)
            sent_s = time.time()
            token = controller.launch("date +%s.%N", token=new_token(job=number), stdout=str(out))
            report = controller.final(token)
            end_ms.append((time.time() - sent_s) * 1e3)
            first_ms.append((float(out.read_text()) - sent_s) * 1e3)
            controller.ack(report)
            controller.messages.clear()
        return {"first_line_ms": statistics.median(first_ms), "reported_ms": statistics.median(end_ms)}


def main() -> None:
    jobs = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    in_flight = int(sys.argv[2]) if len(sys.argv) > 2 else 16
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        result = {
            **flood(Path(folder, "flood"), jobs, in_flight),
            **latency(Path(folder, "latency"), 30),
            "shell_cpu_ms": shell_cost() * 1e3,
        }
    print(json.dumps({key: round(value, 2) for key, value in result.items()}, indent=2))


if __name__ == "__main__":
    main()
