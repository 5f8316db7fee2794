"""The watcher of GPUs: a child of the agent that asks the driver and writes lines.

The driver of a broken GPU may hang, and whoever asks it then waits in the kernel and cannot be killed. So the agent never asks.
It reads the child's lines from a pipe. If no line comes for a while, `gpu_driver_answers` is 0, and the other values are
absent. A child that hangs stays behind; a new one is started only when it is gone.

The child uses NVIDIA's library by ctypes. Without the library it keeps one ``nvidia-smi --loop`` open: to start it for each
look would cost a second of a core. What a GPU does not report is absent.

Sources: NVML API reference (nvml.h), nvidia-smi(1).
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from typing import Any, Callable, Dict, Iterator, Mapping, Optional, Tuple, Union

from hpcnode.os import process
from hpcnode.os.loop import READ, Loop, Timer

Values = Dict[str, Union[int, float]]

LIBRARY = "libnvidia-ml.so.1"
DRIVER = "/proc/driver/nvidia/version"
SILENT_S = 30.0  # at least; then the driver does not answer
AGAIN_S, AGAIN_MOST_S = 10.0, 600.0
MAX_LINE = 256 << 10
MAX_GPUS = 32
MAX_TEXT = 80
LOOK_S = 0.5  # nvidia-smi lists all GPUs of a look within this time
# Bits of the reasons for a lower clock. The power limit that a user set is not among them: it is no fault.
THROTTLE = {"heat": 0x20 | 0x40}
CLOCK_SM = 1
INSUFFICIENT_SIZE = 7
_BASIC = ("index", "uuid", "name", "utilization.gpu", "memory.total", "memory.used", "temperature.gpu", "power.draw")
_MORE = (
    "enforced.power.limit",
    "clocks.sm",
    "clocks_throttle_reasons.active",
    "ecc.errors.corrected.volatile.total",
    "ecc.errors.uncorrected.volatile.total",
)


class GpuWatch:
    """The child, and what it said last."""

    def __init__(self, loop: Loop, environ: Mapping[str, str], library: str = LIBRARY) -> None:
        self._loop, self._environ, self._library = loop, environ, library
        self._interval_s = 0.0
        self._pid = 0
        self._ticks = 0  # with the pid: the child's identity
        self._began_s = 0.0  # when the child was started
        self._pipe = -1
        self._data = b""
        self._timer: Optional[Timer] = None
        self._pause_s = AGAIN_S
        self._said: Values = {}
        self._said_s = 0.0  # when, on the boot clock; that of the start before the first line

    @property
    def has_gpus(self) -> bool:
        """Return whether this node has a driver to ask."""
        path = self._environ.get("PATH", "/usr/bin:/bin")
        tools = (os.path.join(folder or ".", "nvidia-smi") for folder in path.split(":"))
        return os.path.exists(DRIVER) or any(os.access(tool, os.X_OK) for tool in tools)

    def start(self, interval_s: float) -> None:
        """Look at each interval from now on."""
        self._interval_s = interval_s
        self._pause_s = AGAIN_S
        self._said_s = process.boot_clock_s()
        if self.has_gpus:
            self._fork()

    def stop(self) -> None:
        """End the child."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._interval_s = 0.0
        self._said = {}
        self._end_child()

    def values(self, now_s: float) -> Values:
        """Return what the GPUs do; {} if there are none."""
        if not self._interval_s or (self._pid == 0 and self._timer is None):
            return {}
        patience_s = max(SILENT_S, 3 * self._interval_s)
        if now_s - self._said_s > patience_s:
            if self._pipe >= 0 and now_s - self._began_s > patience_s:
                self._fork_later()
            return {"gpu_driver_answers": 0}
        return {"gpu_driver_answers": 1, **self._said} if self._said else {}

    def _fork(self) -> None:
        self._timer = None
        if self._pid and self._hangs():
            self._timer = self._loop.later(self._pause_s, self._fork)
            return
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        try:
            pid = os.fork()
        except OSError:
            os.close(read_end)
            os.close(write_end)
            self._timer = self._loop.later(self._pause_s, self._fork)
            return
        if pid == 0:
            _child(write_end, self._interval_s, self._environ, self._library)
        os.close(write_end)
        os.set_blocking(read_end, False)
        self._began_s = process.boot_clock_s()
        stat = process.read_stat(pid)
        self._pid, self._ticks, self._pipe, self._data = pid, stat.ticks if stat is not None else 0, read_end, b""
        self._loop.watch(read_end, READ, lambda _events: self._read())

    def _hangs(self) -> bool:
        """Return whether the child that was killed is still there."""
        stat = process.read_stat(self._pid)
        return stat is not None and stat.ticks == self._ticks and stat.state not in "ZX"

    def _read(self) -> None:
        try:
            data = os.read(self._pipe, 1 << 16)
        except BlockingIOError:
            return
        self._data += data
        if not data or len(self._data) > MAX_LINE:
            self._fork_later()
            return
        *lines, self._data = self._data.split(b"\n")
        for line in lines:
            self._said = {**json.loads(line)}
            self._said_s = process.boot_clock_s()
            self._pause_s = AGAIN_S

    def _fork_later(self) -> None:
        self._end_child()
        self._timer = self._loop.later(self._pause_s, self._fork)
        self._pause_s = min(AGAIN_MOST_S, 2 * self._pause_s)

    def _end_child(self) -> None:
        if self._pipe >= 0:
            self._loop.watch(self._pipe, 0, lambda _events: None)
            os.close(self._pipe)
            self._pipe = -1
            try:
                os.killpg(self._pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass


# ----- in the child


def _child(pipe: int, interval_s: float, environ: Mapping[str, str], library: str) -> None:
    try:
        os.setpgid(0, 0)
        process.close_all_but([pipe])
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        process.die_with_parent()
        process.set_name("hpcnode-gpus")
        looks: Iterator[Values]
        try:
            looks = nvml_looks(interval_s, library)
        except OSError:
            looks = smi_looks(interval_s, environ)
        for found in looks:
            os.write(pipe, json.dumps(found).encode() + b"\n")
    finally:
        os._exit(0)


def nvml_looks(
    interval_s: float, library: str = LIBRARY, sleep: Callable[[float], None] = time.sleep
) -> Iterator[Values]:
    """Return an iterator over looks by NVIDIA's library. Raises OSError if there is none."""
    import ctypes  # in a child; see `agent` on the cost of imports

    nvml = Nvml(ctypes.CDLL(library))

    def looks() -> Iterator[Values]:
        while True:
            yield nvml.look()
            sleep(interval_s)

    return looks()


class Nvml:
    """The few functions of NVIDIA's library that are needed."""

    def __init__(self, library: Any) -> None:
        import ctypes  # in a child

        self._library, self._ctypes = library, ctypes
        self._is_ready = False

    def begin(self) -> bool:
        """Return whether the driver is loaded."""
        self._is_ready = self._is_ready or self._call("nvmlInit_v2") == 0
        return self._is_ready

    def device(self, gpu: str) -> Any:
        """Return the handle of a GPU by index or UUID, None if there is no such GPU."""
        c, device = self._ctypes, self._ctypes.c_void_p()
        if gpu.isdigit():
            status = self._call("nvmlDeviceGetHandleByIndex_v2", c.c_uint(int(gpu)), c.byref(device))
        else:
            status = self._call("nvmlDeviceGetHandleByUUID", c.c_char_p(gpu.encode()), c.byref(device))
        return device if status == 0 else None

    def power_limits(self, device: Any) -> Optional[Tuple[int, int, int]]:
        """Return the limit of a GPU, and the least and the most that it may be, in milliwatts."""
        c = self._ctypes
        now, least, most = c.c_uint(), c.c_uint(), c.c_uint()
        asked = self._call("nvmlDeviceGetPowerManagementLimit", device, c.byref(now))
        bounds = self._call("nvmlDeviceGetPowerManagementLimitConstraints", device, c.byref(least), c.byref(most))
        return None if asked or bounds else (now.value, least.value, most.value)

    def set_power_limit(self, device: Any, milliwatts: int) -> int:
        """Limit a GPU; return the driver's status, 0 if that is done."""
        return self._call("nvmlDeviceSetPowerManagementLimit", device, self._ctypes.c_uint(milliwatts))

    def look(self) -> Values:
        """Return the values of all GPUs; {} if the driver is not loaded."""
        self.begin()
        count = self._uint("nvmlDeviceGetCount_v2")
        if count is None:
            self._is_ready = False  # the driver was unloaded
        found: Values = {}
        for index in range(min(count or 0, MAX_GPUS)):
            device = self._ctypes.c_void_p()
            if self._call("nvmlDeviceGetHandleByIndex_v2", self._ctypes.c_uint(index), self._ctypes.byref(device)) == 0:
                self._look_at(str(index), device, found)
        return found

    def _look_at(self, gpu: str, device: Any, found: Values) -> None:
        c = self._ctypes
        put = found.__setitem__
        put(
            "gpu_info:%s:%s:%s"
            % (gpu, self._text("nvmlDeviceGetUUID", device), self._text("nvmlDeviceGetName", device)),
            1,
        )
        shares = (c.c_uint * 2)()
        if self._call("nvmlDeviceGetUtilizationRates", device, shares) == 0:
            put("gpu_utilization_ratio:" + gpu, min(shares[0], 100) / 100.0)
        memory = (c.c_ulonglong * 3)()
        if self._call("nvmlDeviceGetMemoryInfo", device, memory) == 0:
            put("gpu_memory_bytes:" + gpu, memory[0])
            put("gpu_memory_used_bytes:" + gpu, memory[2])
        scaled = (
            ("gpu_power_watts:" + gpu, "nvmlDeviceGetPowerUsage", (), c.c_uint, 1e-3),
            ("gpu_power_limit_watts:" + gpu, "nvmlDeviceGetEnforcedPowerLimit", (), c.c_uint, 1e-3),
            ("gpu_energy_joules_total:" + gpu, "nvmlDeviceGetTotalEnergyConsumption", (), c.c_ulonglong, 1e-3),
            ("gpu_temperature_celsius:" + gpu, "nvmlDeviceGetTemperature", (0,), c.c_uint, 1),
            ("gpu_clock_hertz:" + gpu, "nvmlDeviceGetClockInfo", (CLOCK_SM,), c.c_uint, 10**6),
            ("gpu_ecc_errors_total:%s:corrected" % gpu, "nvmlDeviceGetTotalEccErrors", (0, 0), c.c_ulonglong, 1),
            ("gpu_ecc_errors_total:%s:uncorrected" % gpu, "nvmlDeviceGetTotalEccErrors", (1, 0), c.c_ulonglong, 1),
        )
        for column, function, words, kind, scale in scaled:
            value = kind()
            if self._call(function, device, *map(c.c_uint, words), c.byref(value)) == 0:
                put(column, value.value * scale)
        reasons = c.c_ulonglong()
        if self._call("nvmlDeviceGetCurrentClocksThrottleReasons", device, c.byref(reasons)) == 0:
            for reason, bits in THROTTLE.items():
                put("gpu_throttle:%s:%s" % (gpu, reason), int(bool(reasons.value & bits)))
        self._count_processes(gpu, device, found)

    def _count_processes(self, gpu: str, device: Any, found: Values) -> None:
        """Ask with no room for the list: then the library answers how long it is."""
        count = self._ctypes.c_uint(0)
        for name in ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses"):
            if self._call(name, device, self._ctypes.byref(count), None) in (0, INSUFFICIENT_SIZE):
                found["gpu_processes:" + gpu] = count.value
                return

    def _call(self, name: str, *words: Any) -> int:
        """Return the function's status, -1 if this library is too old to have it."""
        function = getattr(self._library, name, None)
        return -1 if function is None else int(function(*words))

    def _uint(self, name: str) -> Optional[int]:
        value = self._ctypes.c_uint()
        return value.value if self._call(name, self._ctypes.byref(value)) == 0 else None

    def _text(self, name: str, device: Any) -> str:
        text = self._ctypes.create_string_buffer(MAX_TEXT)
        return _word(text.value.decode("utf-8", "replace")) if self._call(name, device, text, MAX_TEXT) == 0 else ""


def _word(text: str) -> str:
    """Return a text as one label of a column's name."""
    return "".join(one if one.isprintable() and one != ":" else "?" for one in text)


def smi_looks(interval_s: float, environ: Mapping[str, str]) -> Iterator[Values]:
    """Yield looks by one nvidia-smi, or end when it does."""
    for fields in (_BASIC + _MORE, _BASIC):
        looks = 0
        for found in _smi_looks(interval_s, environ, fields):
            looks += 1
            yield found
        if looks:
            return  # it worked; otherwise it does not know all of these fields


def _smi_looks(interval_s: float, environ: Mapping[str, str], fields: Tuple[str, ...]) -> Iterator[Values]:
    import subprocess  # in a child; see `agent` on the cost of imports

    argv = [
        "nvidia-smi",
        "--query-gpu=" + ",".join(fields),
        "--format=csv,noheader,nounits",
        "--loop=%d" % max(1, interval_s),
    ]
    try:
        tool = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**environ, "LC_ALL": "C"},
            preexec_fn=process.die_with_parent,  # noqa: PLW1509 - this child has one thread
        )
    except OSError:
        return
    assert tool.stdout is not None
    fd = tool.stdout.fileno()
    rest = b""
    found: Values = {}
    while True:
        if found and not select.select([fd], [], [], LOOK_S)[0]:  # all GPUs of this look have been listed
            yield found
            found = {}
        data = os.read(fd, 1 << 16)
        if not data:
            break
        *lines, rest = (rest + data)[-MAX_LINE:].split(b"\n")
        for line in lines:
            words = [word.strip() for word in line.decode("utf-8", "replace").split(", ")]
            index = _number(words[0])
            if len(words) == len(fields) and isinstance(index, int) and index < MAX_GPUS:
                found.update(smi_values(dict(zip(fields, words))))  # others: "GPU is lost", and what is for people
    if found:
        yield found


def smi_values(words: Mapping[str, str]) -> Values:
    """Return the values of one GPU's line of nvidia-smi; what is no number is absent."""
    gpu = words["index"]
    found: Values = {"gpu_info:%s:%s:%s" % (gpu, _word(words["uuid"]), _word(words["name"])): 1}
    for column, field, scale in (
        ("gpu_utilization_ratio:" + gpu, "utilization.gpu", 0.01),
        ("gpu_memory_bytes:" + gpu, "memory.total", 1 << 20),
        ("gpu_memory_used_bytes:" + gpu, "memory.used", 1 << 20),
        ("gpu_temperature_celsius:" + gpu, "temperature.gpu", 1),
        ("gpu_power_watts:" + gpu, "power.draw", 1),
        ("gpu_power_limit_watts:" + gpu, "enforced.power.limit", 1),
        ("gpu_clock_hertz:" + gpu, "clocks.sm", 10**6),
        ("gpu_ecc_errors_total:%s:corrected" % gpu, "ecc.errors.corrected.volatile.total", 1),
        ("gpu_ecc_errors_total:%s:uncorrected" % gpu, "ecc.errors.uncorrected.volatile.total", 1),
    ):
        value = _number(words.get(field, ""))
        if value is not None:
            found[column] = value * scale
    mask = words.get("clocks_throttle_reasons.active", "")
    if mask.startswith("0x") and len(mask) <= 18:
        try:
            reasons = int(mask, 16)
        except ValueError:
            return found
        for reason, bits in THROTTLE.items():
            found["gpu_throttle:%s:%s" % (gpu, reason)] = int(bool(reasons & bits))
    return found


def _number(text: str) -> Optional[float]:
    """Return a number as nvidia-smi prints it, None for "[N/A]", "ERR!" and the like."""
    whole, _, part = text.partition(".")
    if not whole.isdigit() or len(text) > 20 or (part and not part.isdigit()) or not text.isascii():
        return None
    return float(text) if part else int(text)
