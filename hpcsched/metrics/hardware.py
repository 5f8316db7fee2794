"""Find the problems of a machine in its last samples.

Pure. `hhealth` shows them as checks of a node, and the alerts (`hpcsched.alerts.rules`) tell them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

FEW_INODES = 1000
MANY_ERRORS = 100  # corrected or repeated, in an hour
MANY_LINK_CHANGES = 3
MUCH_SWAP = 0.1  # of the memory


class HardwareProblem(NamedTuple):
    """A problem: the check of hhealth that has it, in words, and the series that shows it."""

    check: str
    is_critical: bool
    text: str
    series: str
    label: str


def hardware_problems(conditions: Mapping[str, float], errors: Mapping[str, float]) -> Iterator[HardwareProblem]:
    """Yield the problems of a machine.

    `conditions`: the last value by column. `errors`: how much a count has grown in the last hour.
    """
    for key, value in conditions.items():
        name, _, label = key.partition(":")
        found: tuple[str, bool, str] | None = None
        if name == "node_filesystem_answers" and not value:
            found = "file systems", True, f"{label} does not answer: mount it again, or look at its server"
        elif name == "node_filesystem_read_only" and value:
            found = "file systems", True, f"{label} is read-only: see dmesg, and check its file system"
        elif name == "node_filesystem_free_inodes" and 0 <= value < FEW_INODES:
            found = "file systems", not value, f"{label} has {value:.0f} free inodes: delete small files"
        elif name == "gpu_driver_answers" and not value:
            found = "GPU driver", True, "does not answer: restart the node"
        elif name == "gpu_throttle" and value and label.endswith(":heat"):
            found = "heat", False, f"GPU {label.partition(':')[0]} is slowed down for heat"
        elif name == "node_on_mains" and not value:
            found = "power", False, "it runs on battery"
        if found is not None:
            yield HardwareProblem(*found, name, label)
    memory, swap = conditions.get("node_memory_total_bytes", 0), conditions.get("node_swap_used_bytes", 0)
    if memory and swap > MUCH_SWAP * memory:
        text = f"{swap / 2**30:.1f} GiB of swap space are in use: jobs are slow"
        yield HardwareProblem("swap", False, text, "node_swap_used_bytes", "")
    yield from _counted_problems(errors)


def _counted_problems(errors: Mapping[str, float]) -> Iterator[HardwareProblem]:
    """Yield problems of which the last hour had more than usual."""
    for key, count in errors.items():
        name, _, label = key.partition(":")
        found: tuple[str, bool, str] | None = None
        if count <= 0:
            continue
        if name in ("node_ecc_errors_total", "gpu_ecc_errors_total"):
            where = f"of GPU {label.partition(':')[0]} " if name.startswith("gpu") else ""
            if label.endswith("uncorrected"):
                found = "memory errors", True, f"{count:.0f} {where}uncorrected: replace it"
            elif count > MANY_ERRORS:
                found = "memory errors", False, f"{count:.0f} {where}corrected in an hour: it will fail"
        elif name == "node_network_errors_total" and count > MANY_ERRORS:
            found = "network", False, f"{count:.0f} errors of {label} in an hour: change cable or port"
        elif name == "node_network_carrier_changes_total" and count >= MANY_LINK_CHANGES:
            found = "network", False, f"the link of {label} changed {count:.0f} times in an hour: see its cable"
        elif name == "node_throttled_total":
            found = "heat", False, f"CPUs were slowed down for heat {count:.0f} times in an hour: see its fans"
        elif name == "node_oom_kills_total":
            found = "memory", False, f"the kernel killed {count:.0f} processes in an hour for lack of memory"
        if found is not None:
            yield HardwareProblem(*found, name, label)
