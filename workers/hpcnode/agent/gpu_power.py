"""Limit the power of the GPUs of a job, and set their former limits back.

The former limits are on disk before the first GPU is changed, and are never replaced by those of a second try. So the agent that
finishes the job, even after a crash, sets back what was there before. Use it in a child: a driver may hang. Only root may set
limits.

Source: NVML API reference (nvmlDeviceSetPowerManagementLimit).
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any, Dict, List, Sequence, Tuple

from hpcnode.agent.gpu_watch import LIBRARY, Nvml
from hpcnode.os.durable import read_object, to_bytes, write_durably
from hpcnode.spool import remove_file

GPU_POWER = "GPU power: "  # begins each reason that is not a fault of the node
STATUSES = {
    2: "the driver refuses this value",
    3: "this GPU has no adjustable limit",
    4: "only root may",
    15: "the GPU is lost",
}


class _PowerError(Exception):
    """A GPU cannot be limited; the text says why."""


def limit(path: str, gpus: Sequence[str], watts: int, library: str = LIBRARY) -> str:
    """Limit GPUs, by index or UUID, to so many watts each; return why not, "" if it is done.

    `path`: the file that keeps their former limits. Raises OSError if it cannot be written.
    """
    try:
        nvml = _loaded(library)
        known = [(gpu, nvml.device(gpu)) for gpu in gpus]
        before: Dict[str, int] = {}
        for gpu, device in known:
            before[gpu], least, most = _limits(nvml, gpu, device)
            if not least <= watts * 1000 <= most:
                bounds = "%.0f to %.0f W" % (least / 1000, most / 1000)
                raise _PowerError("GPU %s takes a limit of %s, not %d W" % (gpu, bounds, watts))
        if read_object(path) is None:
            write_durably(os.path.dirname(path), os.path.basename(path), to_bytes(before))
        for gpu, device in known:
            _set(nvml, gpu, device, watts * 1000)
    except _PowerError as error:
        return "%s%s" % (GPU_POWER, error)
    return ""


def restore(path: str, library: str = LIBRARY) -> str:
    """Set the limits back that `limit` has noted, if any; return why not, "" if that is done."""
    before = read_object(path)
    if before is None:
        return ""
    failed: List[str] = []
    for gpu, milliwatts in before.items():
        try:
            nvml = _loaded(library)
            if type(milliwatts) is not int:
                raise _PowerError("the note of its limit is damaged")
            _set(nvml, gpu, nvml.device(gpu), milliwatts)
        except _PowerError as error:
            failed.append("cannot set the limit of GPU %s back to %s mW: %s" % (gpu, milliwatts, error))
    if not failed:
        with suppress(OSError):
            remove_file(path)
    return "; ".join(failed)


def _loaded(library: str) -> Nvml:
    import ctypes  # in a child; see `agent` on the cost of imports

    try:
        nvml = Nvml(ctypes.CDLL(library))
    except OSError:
        raise _PowerError("there is no NVIDIA driver") from None
    if not nvml.begin():
        raise _PowerError("the NVIDIA driver is not loaded")
    return nvml


def _limits(nvml: Nvml, gpu: str, device: Any) -> Tuple[int, int, int]:
    found = nvml.power_limits(device) if device is not None else None
    if found is None:
        raise _PowerError("the driver tells no limits of GPU %s" % gpu)
    return found


def _set(nvml: Nvml, gpu: str, device: Any, milliwatts: int) -> None:
    status = nvml.set_power_limit(device, milliwatts) if device is not None else 15
    if status:
        why = STATUSES.get(status, "the driver answers with status %d" % status)
        raise _PowerError("cannot limit GPU %s: %s" % (gpu, why))
