"""A cluster whose nodes find a fake nvidia-smi: GPUs without a driver, which say what the test wants."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self
from unittest import mock

from hpcsched.loopback import cluster as loopback
from hpcsched.loopback.cluster import LocalCluster, LoopbackNode

TOOL = """#!/bin/sh
case "$*" in
-L) ;;
*--loop=*)
    look=0
    while :; do
        cat '{folder}/look'$look
        look=$((1 - look))
        sleep 0.7
    done ;;
*) cat '{folder}/list' ;;
esac
"""
HEAT = 0x40


class FakeGpu(NamedTuple):
    """A GPU: its type in the node's file, and in per cent how busy it is, in turns."""

    type: str
    busy: tuple[int, int] = (0, 0)
    is_hot: bool = False


class GpuCluster(LocalCluster):
    """A cluster of nodes with these GPUs each."""

    def __init__(self, base: Path, names: Sequence[str], gpus: Sequence[FakeGpu], **more: Any) -> None:
        super().__init__(base, names, **more)
        self._gpus = gpus
        folder = base / "driver"
        folder.mkdir()
        folder.chmod(0o755)
        tool = folder / "nvidia-smi"
        tool.write_text(TOOL.format(folder=folder))
        tool.chmod(0o755)
        (folder / "list").write_text("".join(f"{at}, Fake, GPU-{at}, 16384\n" for at in range(len(gpus))))
        for look in range(2):
            lines = (
                f"{at}, GPU-{at}, Fake, {gpu.busy[look]}, 16384, 8192, 60, 250.50, 300.00, 1001, "
                f"{HEAT if gpu.is_hot else 0:#018x}, 0, 0\n"
                for at, gpu in enumerate(gpus)
            )
            (folder / f"look{look}").write_text("".join(lines))
        path = f"{folder}:{loopback._node_path()}"
        self._path = mock.patch.object(loopback, "_node_path", return_value=path)

    def node_values(self, node: LoopbackNode) -> dict[str, object]:
        return super().node_values(node) | {"gpus": [gpu.type for gpu in self._gpus]}

    def start(self) -> Self:
        with self._path:
            return super().start()
