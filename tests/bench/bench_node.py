"""What a no-op job costs a node: N launches through a real agent's socket; jobs per second, CPU per job, latency.

CPU is that of agent, shepherds and tasks (the shell itself included, and shown alone for comparison), from /proc and
getrusage of reaped children. The controller has no part in it.
"""

from __future__ import annotations

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

from hpcnode.agent.agent import FORGET_S  # noqa: E402
from hpcnode.os import process  # noqa: E402
from hpcnode.wire import protocol  # noqa: E402
from tests.bench.figures import Figure  # noqa: E402

IN_FLIGHT = 16
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
        time.sleep(3 * FORGET_S)  # the last entries are removed
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


def run(quick: bool) -> list[Figure]:
    """Return what a no-op job costs a node: many at a time, and one after the other."""
    jobs = 200 if quick else 500
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        many = flood(Path(folder, "flood"), jobs, IN_FLIGHT)
        alone = latency(Path(folder, "latency"), 10 if quick else 30)
    shell_ms = shell_cost() * 1e3
    return [
        Figure(name=f"{jobs} no-op jobs through one agent", value=many["jobs_per_s"], unit="jobs/s"),
        Figure(
            name="CPU per no-op job on the node",
            value=many["cpu_ms_per_job"],
            unit="ms",
            floor=shell_ms,
            floor_name="a shell that does nothing",
        ),
        Figure(name="spool entries left behind", value=many["entries_left"], unit="", bar="0"),
        Figure(name="agent: RSS", value=many["agent_rss_mib"], unit="MiB"),
        Figure(name="launch sent -> first line of the script, idle", value=alone["first_line_ms"], unit="ms"),
        Figure(name="launch sent -> its end reported, idle", value=alone["reported_ms"], unit="ms"),
    ]
