"""A Slurm of eight nodes on this machine, from Debian's packages slurm-wlm and munge, tuned for throughput. Needs root.

What helps it, and what does not: `sched_interval=1` and `batch_sched_delay=0` start a job within half a second instead of two, a
deep `default_queue_depth` refills the nodes. More slots than these do not help: the processors are its limit.

Source: slurm.conf(5), munged(8); Slurm's documentation of high throughput computing.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

NODES, CPUS = 8, 8
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
START_S = 60.0

CONF = """\
ClusterName=bench
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={base}/munge.socket
SlurmUser=root
SlurmctldPort=17917
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/slurmd-%n.pid
SlurmdSpoolDir={base}/spool-%n
StateSaveLocation={base}/state
SlurmctldLogFile={base}/slurmctld.log
SlurmdLogFile={base}/slurmd-%n.log
SlurmctldDebug=error
SlurmdDebug=error
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={base}/ended
MpiDefault=none
ReturnToService=2
PriorityType=priority/basic
MinJobAge=10
MaxJobCount=50000
MaxArraySize=20000
SchedulerParameters=batch_sched_delay=0,sched_min_interval=50000,sched_interval=1,default_queue_depth=10000,partition_job_depth=10000,bf_interval=5,bf_max_job_test=1000,max_rpc_cnt=100
{nodes}
PartitionName=main Nodes=n[1-{count}] Default=YES MaxTime=INFINITE State=UP
"""


def is_installed() -> bool:
    """Return whether a Slurm can be started here."""
    return os.geteuid() == 0 and all(shutil.which(program) for program in PROGRAMS)


class SlurmCluster:
    """Slurm with its files below `base`. The end of the `with` block ends it."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.env = {**os.environ, "SLURM_CONF": str(base / "slurm.conf")}
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        base = self.base
        for name in ("state", *(f"spool-n{number}" for number in range(1, NODES + 1))):
            (base / name).mkdir()
        nodes = "\n".join(
            f"NodeName=n{number} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={17920 + number} CPUs={CPUS} "
            f"RealMemory=8192 State=UNKNOWN"
            for number in range(1, NODES + 1)
        )
        text = CONF.format(host=socket.gethostname(), base=base, nodes=nodes, count=NODES)
        (base / "slurm.conf").write_text(text)
        key = base / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        files = [f"--{name}-file={base}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        try:
            self._start("munged", "--foreground", "--force", f"--socket={base}/munge.socket", *files)
            self._until((base / "munge.socket").exists, "munged")
            self._start("slurmctld", "-D")
            for number in range(1, NODES + 1):
                self._start("slurmd", "-D", "-N", f"n{number}")
            self._until(lambda: self.output("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == str(NODES), "its nodes")
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    @property
    def ended(self) -> int:
        """The number of jobs that have ended."""
        path = self.base / "ended"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def output(self, *command: str) -> str:
        """Run a command of Slurm and return what it prints."""
        return subprocess.run(command, env=self.env, capture_output=True, text=True, check=False).stdout

    def _start(self, *command: str) -> None:
        log = (self.base / f"{command[0]}.out").open("ab")
        self._running.append(subprocess.Popen(command, env=self.env, stdout=log, stderr=log))

    def _stop(self) -> None:
        for process in reversed(self._running):
            process.terminate()
        for process in self._running:
            process.wait()

    @staticmethod
    def _until(holds: object, what: str) -> None:
        deadline_s = time.monotonic() + START_S
        while not holds():  # type: ignore[operator]
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{what} did not start")
            time.sleep(0.05)
