"""A whole cluster on this machine, for the demo and for tests.

All files are below one directory. A cluster ends with its object. Commands run as a user runs them: as programs, with
HPCSCHED_CONFIG set to this cluster.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from hpcsched import client, paths
from hpcsched.config.load import load_config
from hpcsched.config.template import render_config, render_node
from hpcsched.errors import UnavailableError
from hpcsched.launch import as_controller
from hpcsched.loopback.nodes import LoopbackNode, LoopbackNodes, start_nodes
from hpcsched.store.engine import create_database

COMMAND_TIMEOUT_S = 120.0
# Variables of another cluster, or of a job around us: defaults of options, columns, the job's id.
FOREIGN_VARIABLES = (
    "HPCSCHED_", "SLURM_", "SLURMD_", "HSUB_", "SBATCH_", "SALLOC_", "SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_", "SPRIO_",
    "SSHARE_", "SRUN_", "SCONTROL_",
)  # fmt: skip


class LocalCluster:
    """Nodes `names` with `cpus` cpus each, and a controller, below `base`.

    The end of the `with` block ends all.
    """

    def __init__(
        self,
        base: Path,
        names: Sequence[str] = ("n1", "n2", "n3"),
        *,
        cpus: int = 2,
        mem_mib: int = 2048,
        server: Literal["auto", "sshd", "embedded"] = "auto",
        settings: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:
        self.base = base
        self.share = base / "share"
        self.config_dir = base / "etc"
        self._names = names
        self._cpus, self._mem_mib = cpus, mem_mib
        self._server = server
        self._settings = dict(settings or {})
        self.machines: LoopbackNodes | None = None

    @property
    def env(self) -> dict[str, str]:
        """The environment in which commands use this cluster."""
        bin_dir = str(Path(sys.executable).parent)
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN_VARIABLES)}
        return inherited | {
            "HPCSCHED_CONFIG": str(self.config_dir),
            "PATH": bin_dir + os.pathsep + os.environ.get("PATH", os.defpath),
        }

    @property
    def server(self) -> str:
        """The kind of SSH server: sshd or embedded."""
        return self.machines.server if self.machines is not None else self._server

    def start_machines(self) -> LoopbackNodes:
        """Switch on all nodes."""
        self.machines = start_nodes(self.base / "nodes", self._names, server=self._server)
        return self.machines

    def write_config(self) -> None:
        """Write the configuration that `hpcsched init` and `hpcsched node add` would write."""
        if self.machines is None:
            raise UnavailableError("cannot write the configuration: the nodes have not been started")
        for directory in (self.share, self.config_dir, self.config_dir / paths.NODES_DIR):
            directory.mkdir(mode=0o755, parents=True, exist_ok=True)
            directory.chmod(0o755)
        chosen: dict[str, Mapping[str, object]] = {
            "cluster": {"name": "demo", "share": str(self.share)},
            "partitions.main": {"nodes": "all", "default": True},
        }
        if os.getuid() == 0:
            chosen["controller"] = {"allow_uid_below": 0}  # root may submit jobs as root here
        for section, values in self._settings.items():
            chosen[section] = {**chosen.get(section, {}), **values}
        (self.config_dir / paths.CONFIG_FILE).write_text(render_config(chosen))
        for node in self.machines.nodes.values():
            text = render_node(node.name, self.node_values(node))
            (self.config_dir / paths.NODES_DIR / f"{node.name}.toml").write_text(text)
        self._make_database()

    def _make_database(self) -> None:
        config = load_config(self.config_dir)
        state_dir, account = config.controller.state_dir, config.controller.account()
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if account is not None and os.getuid() == 0:
            for path in (state_dir, *(Path(spec.identity_file) for spec in config.nodes if spec.identity_file)):
                os.chown(path, account.pw_uid, account.pw_gid)
        with as_controller(config):
            create_database(state_dir / paths.DATABASE_FILE)

    def node_values(self, node: LoopbackNode) -> dict[str, object]:
        """Return the entry of a node in nodes.d."""
        return {
            "host": node.host,
            "port": node.port,
            "user": node.user,
            "identity_file": str(node.identity_file),
            "host_key": node.host_key,
            "cpus": self._cpus,
            "memory": f"{self._mem_mib}M",
            "root": str(node.root / "agent"),
            "python": sys.executable,
        }

    def start(self) -> Self:
        """Start nodes and controller, and wait until every node answers."""
        try:
            self.start_machines()
            self.write_config()
            self.up()
            self.wait_for_nodes()
        except BaseException:
            self.stop()
            raise
        return self

    def up(self) -> None:
        """Start the controller."""
        self.run("hpcsched", "up")

    def down(self) -> None:
        """Stop the controller; jobs continue."""
        self.run("hpcsched", "down")

    def stop(self) -> None:
        """End the controller, then the nodes and all their processes."""
        try:
            if (self.config_dir / paths.CONFIG_FILE).exists():
                self.run("hpcsched", "down", check=False)
        finally:
            if self.machines is not None:
                self.machines.stop()

    def remove(self) -> None:
        """Delete the cluster's directory."""
        shutil.rmtree(self.base, ignore_errors=True)

    def wait_for_nodes(self, timeout_s: float = 60.0) -> None:
        """Wait until every node answers the controller."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            nodes = self.api("GET", "/v1/nodes")["nodes"]
            if all(node["link"] == "up" for node in nodes):
                return
            if time.monotonic() > deadline_s:
                why = "; ".join(f"{node['name']}: {node['link_why']}" for node in nodes if node["link"] != "up")
                raise UnavailableError(f"cannot start the cluster: nodes do not answer: {why}")
            time.sleep(0.05)

    def api(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a request to the controller's API."""
        return client.call(method, path, body, where=self.api_socket)

    @property
    def api_socket(self) -> Path:
        """The controller's socket."""
        return Path(paths.api_socket({"HPCSCHED_CONFIG": str(self.config_dir)}, os.getuid()))

    def run(
        self,
        *command: str,
        check: bool = True,
        stdin: str = "",
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = COMMAND_TIMEOUT_S,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as a user of this cluster.

        With `check`, raise UnavailableError if it fails.
        """
        result = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            cwd=cwd or (self.share if self.share.exists() else self.base),
            env=self.env | dict(env or {}),
            timeout=timeout_s,
        )
        if check and result.returncode != 0:
            raise UnavailableError(
                f"{' '.join(command)} ended with status {result.returncode}:\n{result.stdout}{result.stderr}"
            )
        return result

    def json(self, *command: str) -> Any:
        """Run a command and return its JSON output."""
        return json.loads(self.run(*command).stdout)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
