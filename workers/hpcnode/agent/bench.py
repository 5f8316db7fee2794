"""The assessment of a node: how fast its cpus, memory, disk and GPUs are.

    cpu         GB/s      BLAKE2b of one cpu, by its cpu time (`probe.cpu_speed`)
    cpus        GB/s      BLAKE2b of all cpus at once, by the clock
    memory      GB/s      copies of large anonymous mappings by all cpus at once; bytes read and written count, as in STREAM
    disk_write  MB/s      4 MiB blocks with O_DIRECT in the agent's root
    disk_read   MB/s      the same file again
    fsync       ms        median of 4 KiB pwrite and fsync; `fsync_p95`: 95th percentile
    gemm_KIND   GFLOP/s   matrix product by torch or numpy of the users' Python; `gpuN_KIND` and `gpuN_copy` (GB/s) of GPUs

Each test has rounds. `spread` is (p90 - p10) / median of them, `notes` say what was not measured and why, `busy` what else used
the node. Call it in a child of the agent: all its processes are in the child's process group, which is killed at a deadline.

Sources: McCalpin, STREAM (the count of bytes); proc(5); open(2) on O_DIRECT.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import signal
import struct
import subprocess
import tempfile
import time
from typing import Any, Callable, Dict, List, Tuple

from hpcnode.agent import probe, sampler
from hpcnode.os import account

QUICK, FULL = "quick", "full"
TIMES = {QUICK: 1, FULL: 5}  # the rounds
ALARM_S = 300  # of each forked process
CPU_WINDOWS, CPU_WINDOW_S = 5, 0.2
MEMORY_WINDOWS, MEMORY_WINDOW_S = 10, 0.2
ARRAY_BYTES = 256 << 20  # of one copying process, far above the caches
LEAST_ARRAY_BYTES = 8 << 20
BLOCK_BYTES = 4 << 20
DISK_WINDOWS, DISK_WINDOW_S = 6, 0.1
FILE_BYTES = 1 << 30  # at most
FSYNCS, FSYNC_S = 60, 1.5
GEMM_S = 10.0
NOBODY = 65534
BUSY_LOAD, BUSY_PART = 0.2, 0.05  # per cpu: load before, use by others during the tests
MAX_SAID_BYTES = 1 << 16

Work = Callable[[], int]  # does some work, and returns how many bytes it was


class _Others:
    """The cpu time that other processes used since this was made, as a part of all cpus."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._used_s, self._own_s = _used_s(), _own_s()

    def part(self) -> float:
        """Return the part; children count as our own after they were waited for."""
        took_s = max(time.monotonic() - self._began_s, 1e-3)
        others_s = (_used_s() - self._used_s) - (_own_s() - self._own_s)
        return others_s / took_s / (os.cpu_count() or 1)


def bench(root: str, how: str, python: str) -> Dict[str, Any]:
    """Measure this node. `python`: of the users' environment, "" for none.

    Raises OSError, ValueError.
    """
    if how not in TIMES:
        raise ValueError("there are quick and full runs")
    times = TIMES[how]
    began_s = time.monotonic()
    busy = busy_before()
    others, throttled = _Others(), _throttled()
    rounds: Dict[str, List[float]] = {}
    notes: Dict[str, str] = {}
    count = len(os.sched_getaffinity(0))
    rounds["cpu"] = [probe.cpu_speed(rounds=1) for _ in range(5 * times)]
    rounds["cpus"] = together(count, _hashing, CPU_WINDOWS * times, CPU_WINDOW_S)
    size = array_bytes(probe.memory().get("mem_free_mib", 0) << 20, count)
    rounds["memory"] = together(count, lambda: _copying(size), MEMORY_WINDOWS * times, MEMORY_WINDOW_S)
    try:
        rounds.update(disk(root, times, notes))
    except OSError as error:
        notes["disk"] = "not measured: %s" % (error.strerror or error)
    rounds.update(_products(python, times, notes))
    part = others.part()
    if not busy and part > BUSY_PART:
        busy = "other processes used %.0f %% of its cpus meanwhile" % (100 * part)
    found = summary(rounds)
    found.update(busy=busy, notes=notes, cpu_model=_cpu_model(), throttled=max(0, _throttled() - throttled))
    found.update(battery=sampler.has_battery(), how=how, took_s=round(time.monotonic() - began_s, 2))
    return found


def busy_before(loadavg: str = "/proc/loadavg", pressure: str = "/proc/pressure/cpu") -> str:
    """Return what else uses the node before the tests; "" for nothing."""
    load = _first_number(loadavg, "")
    if load > BUSY_LOAD * (os.cpu_count() or 1):
        return "its load was %.1f before" % load
    waited = _first_number(pressure, "avg10=")
    return "cpu pressure was %.0f %% before" % waited if waited > 100 * BUSY_PART else ""


def summary(rounds: Dict[str, List[float]]) -> Dict[str, Any]:
    """Return the values and spreads of the rounds.

    Of cpus and memory the best round counts, else the median.
    """
    values: Dict[str, float] = {}
    spread: Dict[str, float] = {}
    for name, all_ in rounds.items():
        if not all_:
            continue
        best = name in ("cpu", "cpus", "memory")
        values[name] = max(all_) if best else quantile(all_, 0.5)
        if name == "fsync":
            values["fsync_p95"] = quantile(all_, 0.95)
        middle = quantile(all_, 0.5)
        spread[name] = round((quantile(all_, 0.9) - quantile(all_, 0.1)) / middle, 3) if middle > 0 else 0.0
    return {"values": {name: float("%.4g" % value) for name, value in values.items()}, "spread": spread}


def quantile(values: List[float], part: float) -> float:
    """Return the value below which `part` of the values are, without interpolation."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(part * (len(ordered) - 1)))]


# ----- cpus and memory: forked processes that work in the same windows of time


def together(count: int, prepare: Callable[[], Work], windows: int, window_s: float) -> List[float]:
    """Return the GB/s of `count` processes at once, for each window.

    Each calls `prepare` and waits for the others; all begin at the same time.
    """
    children = [_Worker(prepare, windows, window_s) for _ in range(count)]
    for child in children:
        child.await_ready()
    start_s = time.monotonic() + 0.02
    for child in children:
        child.begin(start_s)
    rates = [child.rates() for child in children]
    return [sum(column) / 1e9 for column in zip(*rates)]


class _Worker:
    """A forked process that works for some windows of time."""

    def __init__(self, prepare: Callable[[], Work], windows: int, window_s: float) -> None:
        self._format = "%dd" % windows
        started, self._start = os.pipe()
        self._said, say = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._start)  # so that it sees the end of its parent
                signal.alarm(ALARM_S)
                work = prepare()
                os.write(say, b"r")
                start_s = struct.unpack("d", os.read(started, 8))[0]
                os.write(say, struct.pack(self._format, *_windows(work, start_s, windows, window_s)))
            finally:
                os._exit(0)
        os.close(started)
        os.close(say)

    def await_ready(self) -> None:
        if os.read(self._said, 1) != b"r":
            raise OSError("a process of the test could not begin: too little memory?")

    def begin(self, start_s: float) -> None:
        os.write(self._start, struct.pack("d", start_s))

    def rates(self) -> List[float]:
        """Return the bytes per second of each window."""
        size = struct.calcsize(self._format)
        said = b""
        while len(said) < size:
            more = os.read(self._said, size - len(said))
            if not more:
                break
            said += more
        os.close(self._said)
        os.close(self._start)
        os.waitpid(self._pid, 0)
        if len(said) < size:
            raise OSError("a process of the test ended early")
        return list(struct.unpack(self._format, said))


def _windows(work: Work, start_s: float, windows: int, window_s: float) -> List[float]:
    rates = []
    time.sleep(max(0.0, start_s - time.monotonic()))
    for number in range(windows):
        until_s = start_s + (number + 1) * window_s
        began_s = now_s = time.monotonic()
        done = 0
        while not done or now_s < until_s:
            done += work()
            now_s = time.monotonic()
        rates.append(done / (now_s - began_s))
    return rates


def _hashing() -> Work:
    import hashlib  # in a child; see `agent` on the cost of imports

    digest = hashlib.blake2b()

    def work() -> int:
        for _ in range(16):
            digest.update(probe.CHUNK)
        return 16 * len(probe.CHUNK)

    return work


def array_bytes(free_bytes: int, count: int) -> int:
    """Return the size of an array; each of `count` processes has two.

    All together are at most an eighth of the free memory, but for `LEAST_ARRAY_BYTES`.
    """
    return max(LEAST_ARRAY_BYTES, min(ARRAY_BYTES, free_bytes // 8 // (2 * count)) & ~(BLOCK_BYTES - 1))


def _copying(size: int) -> Work:
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # as memory of programs: shared memory has small pages only
    source, target = memoryview(mmap.mmap(-1, size, private)), memoryview(mmap.mmap(-1, size, private))
    source[:] = b"\x5a" * size  # all pages are there before the test
    target[:] = source

    def work() -> int:
        target[:] = source
        return 2 * size

    return work


# ----- disk


def disk(folder: str, times: int, notes: Dict[str, str]) -> Dict[str, List[float]]:
    """Return MB/s of writes and reads, and ms of fsyncs, in a deleted file of `folder`.

    Raises OSError.
    """
    info = os.statvfs(folder)
    limit = min(FILE_BYTES, info.f_bavail * info.f_frsize // 10) // BLOCK_BYTES * BLOCK_BYTES
    if limit < BLOCK_BYTES:
        notes["disk"] = "not measured: less than 40 MiB are free"
        return {}
    fd, path = tempfile.mkstemp(prefix=".bench-", dir=folder)
    try:
        os.truncate(fd, limit)  # else each block is also a change of the file's size
        direct = _reopened(path, os.O_DIRECT)
        if direct < 0:
            notes["disk"] = "through the page cache: the file system has no O_DIRECT"
            direct = _reopened(path, 0)
    finally:
        os.unlink(path)
    try:
        block = mmap.mmap(-1, BLOCK_BYTES)  # aligned to a page
        block[:] = os.urandom(BLOCK_BYTES)  # a file system may compress
        written, length = _streamed(direct, block, limit, times, os.pwrite)
        os.fdatasync(direct)
        os.posix_fadvise(direct, 0, 0, os.POSIX_FADV_DONTNEED)
        read, _ = _streamed(direct, block, length, times, _read_block)
        return {"disk_write": written, "disk_read": read, "fsync": _fsyncs(fd, times)}
    finally:
        os.close(direct)
        os.close(fd)


def _reopened(path: str, flag: int) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | flag)
    except OSError:
        if flag:
            return -1
        raise


def _read_block(fd: int, block: mmap.mmap, offset: int) -> int:
    return os.preadv(fd, [block], offset)


def _streamed(
    fd: int, block: mmap.mmap, limit: int, times: int, move: Callable[[int, mmap.mmap, int], int]
) -> Tuple[List[float], int]:
    """Return the MB/s of each window, and up to where the file was reached.

    It begins again at `limit`.
    """
    rates, offset, furthest = [], 0, 0
    for _ in range(DISK_WINDOWS * times):
        began_s = now_s = time.monotonic()
        done = 0
        while now_s - began_s < DISK_WINDOW_S:
            moved = move(fd, block, offset)
            if moved != BLOCK_BYTES:
                raise OSError("a block was moved in part: is the disk full?")
            done += moved
            offset += moved
            furthest = max(furthest, offset)
            if offset >= limit:
                offset = 0
            now_s = time.monotonic()
        rates.append(done / 1e6 / (now_s - began_s))
    return rates, furthest


def _fsyncs(fd: int, times: int) -> List[float]:
    until_s = time.monotonic() + FSYNC_S * times
    took_ms: List[float] = []
    data = os.urandom(4096)
    while len(took_ms) < FSYNCS * times and (not took_ms or time.monotonic() < until_s):
        began_s = time.monotonic()
        os.pwrite(fd, data, len(took_ms) * len(data))
        os.fsync(fd)
        took_ms.append(1e3 * (time.monotonic() - began_s))
    return took_ms


# ----- matrix products, by the users' Python

_PRODUCTS = """
import json, sys, time
until, found, notes = time.time() + float(sys.argv[1]), {}, {}
def rounds(name, work, amount, sync, most=12, each_s=1.5):
    work(); sync()
    end, got = time.time() + each_s, []
    while len(got) < most and (len(got) < 3 or time.time() < end) and time.time() < until:
        began = time.perf_counter(); work(); sync(); got.append(amount / (time.perf_counter() - began) / 1e9)
    found[name] = got
try:
    import torch
except ImportError:
    torch = None
none = lambda: None
if torch is not None:
    n = 1024
    for name, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        a = torch.ones(n, n, dtype=kind); b = torch.ones(n, n, dtype=kind)
        rounds("gemm_" + name, lambda: a @ b, 2.0 * n ** 3, none)
    for gpu in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        try:
            n, sync = 8192, lambda: torch.cuda.synchronize(gpu)
            for name, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
                a = torch.ones(n, n, dtype=kind, device=gpu); b = torch.ones_like(a)
                rounds("gpu%d_%s" % (gpu, name), lambda: a @ b, 2.0 * n ** 3, sync)
            a = torch.ones(1 << 28, device=gpu); b = torch.empty_like(a)
            rounds("gpu%d_copy" % gpu, lambda: b.copy_(a), 8.0 * (1 << 28), sync)
            del a, b
        except RuntimeError as error:
            notes["gpu%d" % gpu] = "not measured: " + str(error)[:200]
else:
    try:
        import numpy
    except ImportError:
        notes["gemm"] = "not measured: no numpy"
    else:
        n = 1024
        a = numpy.ones((n, n), "float32"); b = numpy.ones((n, n), "float32")
        rounds("gemm_fp32", lambda: a @ b, 2.0 * n ** 3, none)
json.dump({"rounds": found, "notes": notes}, sys.stdout)
"""


def _products(python: str, times: int, notes: Dict[str, str]) -> Dict[str, List[float]]:
    if not python:
        notes["gemm"] = "not measured: no numpy; name the users' Python with --python"
        return {}
    try:
        said = _said_by([python, "-I", "-c", _PRODUCTS, str(GEMM_S * times)], 3 * GEMM_S * times)
        answer = json.loads(said)
        notes.update({str(name)[:20]: str(why)[:200] for name, why in answer["notes"].items()})
        return {str(name)[:20]: [float(one) for one in all_] for name, all_ in answer["rounds"].items()}
    except (
        *(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError),
        *(subprocess.SubprocessError, account.UserError),
    ) as error:
        notes["gemm"] = "not measured: %s: %s" % (python, error)
        return {}


def _said_by(argv: List[str], timeout_s: float) -> bytes:
    """Return what a program of the users prints; root runs it as nobody."""
    as_nobody: Dict[str, Any] = {}
    if os.geteuid() == 0:
        account.check_policy("nobody", NOBODY)
        as_nobody = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    environ = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/nonexistent"}
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        status = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, cwd="/", env=environ, timeout=timeout_s,
            check=False, preexec_fn=_bound_files, **as_nobody,  # noqa: PLW1509 - this process has no threads
        ).returncode  # fmt: skip
        errors.seek(0)
        if status:
            raise ValueError("exit status %d: %s" % (status, errors.read(300).decode("utf-8", "replace").strip()))
        output.seek(0)
        return output.read(MAX_SAID_BYTES)


def _bound_files() -> None:
    """Keep this process from filling the disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_SAID_BYTES, MAX_SAID_BYTES))


# ----- what the kernel knows


def _throttled() -> float:
    return sum(value for name, value in sampler.sensors().items() if name.startswith("node_throttled_total"))


def _cpu_model(cpuinfo: str = "/proc/cpuinfo") -> str:
    try:
        with open(cpuinfo) as file:
            named = [line.partition(":")[2] for line in file if line.startswith(("model name", "Model", "cpu model"))]
    except OSError:
        named = []
    return " ".join(named[0].split())[:100] if named else os.uname().machine


def _own_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _used_s(stat: str = "/proc/stat") -> float:
    """Return the seconds of all cpus since boot that were not idle."""
    try:
        with open(stat) as file:
            words = file.readline().split()[1:9]
    except OSError:
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(float, (words + ["0"] * 8)[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _first_number(path: str, before: str) -> float:
    """Return the first number of a file, after `before`; 0 if there is none."""
    try:
        with open(path) as file:
            line = file.readline()
        return float((line.partition(before)[2] if before else line).split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0
