"""The sampler: what the node and its jobs use, for `Sample` messages.

`Counters` reads /proc through descriptors that stay open. `slow_look` reads what may block: file systems, because a share may
hang, and sensors, because some drivers take their time. It runs in a child with a deadline. `JobTrees` sums the processes
below the shepherds of each job. `NodeSampler` puts them together at each interval.

Columns are names of series with labels, as in `hpcsched.metrics.series`: ``node_load1``, ``node_disk_read_bytes_total:sda``.

Rules:
- Best effort: a sample that the connection has no room for is dropped and counted. A report never waits for a sample.
- A value that cannot be read is absent. A counter is sent as the kernel has it, in base units.
- The number of columns is bounded: virtual network devices are one sum, and so are devices beyond the first ones.
- All paths are below `proc` and `sys`, so that tests can give other ones.

Sources: proc(5); Documentation/admin-guide/iostats.rst, accounting/psi.rst, hwmon/sysfs-interface.rst and
admin-guide/pm/intel-rapl of the kernel.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Callable, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Set, Tuple, Union

from hpcnode.agent import ipmi
from hpcnode.agent.gpu_watch import GpuWatch
from hpcnode.agent.helpers import Answer, Helpers
from hpcnode.entry import Entry
from hpcnode.os import process
from hpcnode.os.loop import Loop, Timer
from hpcnode.wire import protocol

Number = Union[int, float]
Values = Dict[str, Number]

LEAST_INTERVAL_S = 0.5
ROOM_BYTES = 256 << 10  # unsent to the controller: above it a sample is dropped
SLOW_S = 60.0
FORGET_SLOW_S = 3 * SLOW_S  # values of a slow look that is older are absent
STAT_DEADLINE_S = 5.0  # for a file system to answer
MAX_MOUNTS = 32
MAX_DEVICES = 16  # of one kind with columns of their own
MAX_SENSORS = 64
MAX_COLUMNS = 512  # the controller takes no more than twice as many
MAX_LINE = 1 << 20
SECTOR_BYTES = 512
MAX_LABEL = 100
MACHINE_POWER = "node_power_watts:power_meter"  # the name of the hwmon chip of such meters
RANGE = "range of "  # with an energy counter: where it starts again
HUNG_AGAIN_S, HUNG_MOST_S = 120.0, 3600.0  # a file system that hung is asked again after a pause that doubles
JOB_SHARE = 5e-4  # of a core: looks at jobs take less than this part of the time
EXIT_SIGNAL, THREADS = 35, 17  # of the fields of /proc/PID/stat after the name
MAX_THREADS = 256  # of a process
COUNTERS = 4  # of the fields of `JobUse`: the first
OTHERS_LOOKS = 12  # then all processes are read again, because pids are used again
CPU_MODES = ("user", "nice", "system", "idle", "iowait", "irq", "steal")
JOB_COLUMNS = [
    "job_cpu_seconds_total",
    "job_memory_bytes",
    "job_read_bytes_total",
    "job_written_bytes_total",
    "job_processes",
    "job_processes_blocked",
    "job_major_faults_total",
    "job_threads_runnable",
    "job_memory_anonymous_bytes",
]
_MEMINFO = {
    b"MemTotal:": "node_memory_total_bytes",
    b"MemAvailable:": "node_memory_available_bytes",
    b"Cached:": "node_memory_cached_bytes",
    b"SwapTotal:": "node_swap_used_bytes",
}
_VMSTAT = {
    b"pgmajfault": "node_major_faults_total",
    b"pswpin": "node_swap_in_pages_total",
    b"pswpout": "node_swap_out_pages_total",
    b"oom_kill": "node_oom_kills_total",
}
_STAT = {
    b"processes": "node_forks_total",
    b"procs_blocked": "node_processes_blocked",
    b"btime": "node_boot_time_seconds",
}
_NET = ("receive_bytes", "transmit_bytes", "errors", "drops")


class Sums:
    """Counters of many devices as one that never falls when a device goes.

    What a device counted before it came is not added: after a rename it would be its whole past at once.
    """

    def __init__(self) -> None:
        self._last: Optional[Dict[str, Tuple[int, ...]]] = None
        self._totals: List[int] = []

    def add(self, now: Mapping[str, Tuple[int, ...]]) -> List[int]:
        """Return the sums after this look at all of the devices."""
        for name, counts in now.items():
            before = (0,) * len(counts) if self._last is None else self._last.get(name, counts)
            if not self._totals:
                self._totals = [0] * len(counts)
            for i, count in enumerate(counts):
                self._totals[i] += count - before[i] if count >= before[i] else count
        self._last = dict(now)
        return self._totals


class Counters:
    """Counters of /proc. Its descriptors stay open until `close`."""

    def __init__(self, proc: str = "/proc", sys: str = "/sys") -> None:
        self._proc, self._sys = proc, sys
        self._fds: Dict[str, int] = {}
        self._own: Dict[str, bool] = {}  # devices: whether they have columns of their own
        self._virtual = Sums()
        self._ticks_s = 1.0 / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """Close the descriptors. The next look opens them again."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def look(self) -> Values:
        """Return all values that can be read now."""
        found: Values = {}
        for name, parse in (
            ("stat", self._stat),
            ("meminfo", _meminfo),
            ("vmstat", _vmstat),
            ("loadavg", _loadavg),
            ("net/dev", self._net),
            ("net/snmp", _snmp),
            ("diskstats", self._disks),
            ("sys/fs/file-nr", _file_nr),
            ("pressure/cpu", _pressure),
            ("pressure/memory", _pressure),
            ("pressure/io", _pressure),
        ):
            text = self._read(name)
            if text:
                try:
                    parse(text, found, name)
                except (ValueError, IndexError):
                    continue  # not the kernel's format: absent
        return found

    def _read(self, name: str) -> bytes:
        fd = self._fds.get(name)
        try:
            if fd is None:
                fd = self._fds[name] = os.open("%s/%s" % (self._proc, name), os.O_RDONLY | os.O_CLOEXEC)
            text = os.pread(fd, 1 << 14, 0)
            more = text
            while len(more) == 1 << 14 and len(text) < MAX_LINE:
                more = os.pread(fd, 1 << 14, len(text))
                text += more
            return text
        except OSError:
            return b""

    def _stat(self, text: bytes, found: Values, _name: str) -> None:
        times = text[: text.index(b"\n")].split()
        ticks = [int(word) for word in times[1:9]]
        ticks[5:7] = [ticks[5] + ticks[6]]  # interrupts, hard and soft
        for mode, count in zip(CPU_MODES, ticks):
            found["node_cpu_seconds_total:" + mode] = round(count * self._ticks_s, 2)
        for word, column in _STAT.items():
            begin = text.find(b"\n" + word + b" ")
            if begin >= 0:
                end = text.find(b"\n", begin + 1)
                found[column] = int(text[begin + len(word) + 2 : end if end > 0 else len(text)])

    def _net(self, text: bytes, found: Values, _name: str) -> None:
        own: Dict[str, Tuple[int, ...]] = {}
        virtual: Dict[str, Tuple[int, ...]] = {}
        for line in text.splitlines()[2:]:
            name, _, rest = line.rpartition(b":")
            words = rest.split()
            if len(words) < 16 or name.strip() == b"lo":
                continue
            device = label(name.strip())
            counts: Tuple[int, ...] = (
                int(words[0]),
                int(words[8]),
                int(words[2]) + int(words[10]),
                int(words[3]) + int(words[11]),
            )
            (own if self._has_own(device, "class/net", "/device", len(own)) else virtual)[device] = counts
        for device, counts in own.items():
            for what, count in zip(_NET, counts):
                found["node_network_%s_total:%s" % (what, device)] = count
        for what, count in zip(_NET[:2], self._virtual.add(virtual)):
            found["node_network_%s_total:virtual" % what] = count

    def _disks(self, text: bytes, found: Values, _name: str) -> None:
        count = 0
        for line in text.splitlines():
            words = line.split()
            if len(words) < 13:
                continue
            device = label(words[2])
            if self._has_own(device, "block", "/device", count):
                count += 1
                found["node_disk_read_bytes_total:" + device] = int(words[5]) * SECTOR_BYTES
                found["node_disk_written_bytes_total:" + device] = int(words[9]) * SECTOR_BYTES
                found["node_disk_busy_seconds_total:" + device] = int(words[12]) / 1000.0

    def _has_own(self, device: str, kind: str, mark: str, count: int) -> bool:
        """Return whether a device is a physical one, and one of the first."""
        if count >= MAX_DEVICES:
            return False
        key = "%s/%s/%s%s" % (self._sys, kind, device, mark)
        if key not in self._own:
            if len(self._own) > 4096:
                self._own.clear()  # virtual devices come and go
            self._own[key] = "/" not in device and os.path.exists(key)
        return self._own[key]


def label(text: Union[str, bytes]) -> str:
    """Return a label's value: text without control characters, bounded."""
    words = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    if len(words) > MAX_LABEL or not words.isprintable():
        words = "".join(c if c.isprintable() else "?" for c in words[:MAX_LABEL])
    return words


def _meminfo(text: bytes, found: Values, _name: str) -> None:
    for line in text.splitlines():
        words = line.split()
        column = _MEMINFO.get(words[0]) if words else None
        if column:
            found[column] = int(words[1]) << 10
        elif words and words[0] == b"SwapFree:" and "node_swap_used_bytes" in found:
            found["node_swap_used_bytes"] -= int(words[1]) << 10


def _vmstat(text: bytes, found: Values, _name: str) -> None:
    for word, column in _VMSTAT.items():
        begin = text.find(b"\n" + word + b" ")
        if begin >= 0:
            found[column] = int(text[begin + len(word) + 2 : text.index(b"\n", begin + 1)])


def _loadavg(text: bytes, found: Values, _name: str) -> None:
    found["node_load1"] = float(text.split()[0])


def _file_nr(text: bytes, found: Values, _name: str) -> None:
    found["node_open_files"] = int(text.split()[0])


def _snmp(text: bytes, found: Values, _name: str) -> None:
    lines = [line.split() for line in text.splitlines() if line.startswith(b"Tcp:")]
    values = dict(zip(lines[0], lines[1]))
    found["node_tcp_segments_sent_total"] = int(values[b"OutSegs"])
    found["node_tcp_retransmits_total"] = int(values[b"RetransSegs"])


def _pressure(text: bytes, found: Values, name: str) -> None:
    resource = name.rpartition("/")[2]
    for line in text.splitlines():
        kind, total = line.partition(b" ")[0], line.rpartition(b"total=")[2]
        if kind == b"some" or (kind == b"full" and resource != "cpu"):
            found["node_pressure_seconds_total:%s:%s" % (resource, kind.decode())] = int(total) / 1e6


# ----- what may block: call it in a child


def slow_look(mounts: Iterable[str], sys: str = "/sys") -> Values:
    """Return values of file systems and sensors. Call it in a child: it may block."""
    found = sensors(sys)
    found.update(file_systems(mounts))
    return found


def file_systems(mounts: Iterable[str], deadline_s: float = STAT_DEADLINE_S) -> Values:
    """Return the values of these file systems, each asked by a thread of its own."""
    import threading  # in a child; see `agent` on the cost of imports

    answers: Dict[str, Values] = {}
    ids: Dict[str, int] = {}  # of file systems; equal for directories of the same one

    def ask(mount: str) -> None:
        try:
            info = os.statvfs(mount)
        except OSError:
            answers[mount] = {}  # not there: it answered
            return
        ids[mount] = info.f_fsid
        answers[mount] = {
            "size_bytes": info.f_blocks * info.f_frsize,
            "free_bytes": info.f_bavail * info.f_frsize,
            "read_only": int(bool(info.f_flag & os.ST_RDONLY)),
        }
        if info.f_files:  # some file systems count no inodes
            answers[mount]["free_inodes"] = info.f_favail

    asked = list(dict.fromkeys(mounts))[:MAX_MOUNTS]
    threads = [threading.Thread(target=ask, args=(mount,), daemon=True) for mount in asked]
    for thread in threads:
        thread.start()
    until_s = time.monotonic() + deadline_s
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
    found: Values = {}
    for place, mount in enumerate(asked):
        values = answers.get(mount)
        if ids.get(mount) and ids[mount] in [ids.get(other) for other in asked[:place]]:
            continue  # shown already
        if values is None or values:
            found["node_filesystem_answers:" + label(mount)] = int(values is not None)
        for what, value in (values or {}).items():
            found["node_filesystem_%s:%s" % (what, label(mount))] = value
    return found


def sensors(sys: str = "/sys", watts: Callable[[], Optional[float]] = ipmi.measured_watts) -> Values:
    """Return temperatures, power, energy, throttling, memory errors and link changes.

    `watts` asks the management board, if no other meter measures the whole machine.
    """
    found: Values = {}
    for part in (_hwmon, _thermal_zones, _throttling, _edac, _power_supply, _rapl, _carriers):
        try:
            part(sys, found)
        except (OSError, ValueError):
            continue
    if not any(column.startswith(MACHINE_POWER) for column in found):
        with suppress(OSError):
            found.update((MACHINE_POWER + "/dcmi", value) for value in (watts(),) if value is not None)
    return found


def _hwmon(sys: str, found: Values) -> None:
    base = sys + "/class/hwmon"
    for chip in _names(base):
        name = _text("%s/%s/name" % (base, chip)) or chip
        for file in _names("%s/%s" % (base, chip)):
            sensor, _, what = file.partition("_")
            if len(found) >= MAX_SENSORS or what not in ("input", "average"):
                continue
            value = _number("%s/%s/%s" % (base, chip, file))
            mark = "%s/%s" % (name, _text("%s/%s/%s_label" % (base, chip, sensor)) or sensor)
            if value is None:
                continue
            if sensor.startswith("temp"):
                column = "node_temperature_celsius:" + label(name)
                if is_plausible(value):
                    found[column] = max(found.get(column, 0), value / 1000.0)
            elif sensor.startswith("power"):
                found["node_power_watts:" + label(mark)] = value / 1e6


def is_plausible(millidegrees: int) -> bool:
    """Return whether a sensor can be right: broken ones say -273, 0 or 511 degrees."""
    return -100_000 < millidegrees < 300_000 and millidegrees != 0


def _thermal_zones(sys: str, found: Values) -> None:
    base = sys + "/class/thermal"
    if any(column.startswith("node_temperature_celsius") for column in found):
        return  # the same sensors by another name
    for zone in _names(base):
        value = _number("%s/%s/temp" % (base, zone)) if zone.startswith("thermal_zone") else None
        if value is not None and is_plausible(value) and len(found) < MAX_SENSORS:
            kind = _text("%s/%s/type" % (base, zone))
            found["node_temperature_celsius:" + label("%s/%s" % (zone, kind))] = value / 1000.0


def _throttling(sys: str, found: Values) -> None:
    """Sum the counts of each core and package once: CPUs of a core show the same count."""
    base = sys + "/devices/system/cpu"
    counts: Dict[Tuple[str, str, str], int] = {}
    for cpu in _names(base):
        folder = "%s/%s" % (base, cpu)
        package = _text(folder + "/topology/physical_package_id")
        for kind, core in (("core", _text(folder + "/topology/core_id")), ("package", "")):
            count = _number("%s/thermal_throttle/%s_throttle_count" % (folder, kind))
            if count is not None:
                counts[kind, package, core] = int(count)
    for (kind, _, _), count in counts.items():
        column = "node_throttled_total:" + kind
        found[column] = found.get(column, 0) + count


def _edac(sys: str, found: Values) -> None:
    base = sys + "/devices/system/edac/mc"
    for name, kind in (("ce_count", "corrected"), ("ue_count", "uncorrected")):
        counts = [_number("%s/%s/%s" % (base, mc, name)) for mc in _names(base)]
        known = [count for count in counts if count is not None]
        if known:
            found["node_ecc_errors_total:" + kind] = sum(known)


def _power_supply(sys: str, found: Values) -> None:
    base = sys + "/class/power_supply"
    online = [
        _number("%s/%s/online" % (base, one))
        for one in _names(base)
        if _text("%s/%s/type" % (base, one)) in ("Mains", "USB")
    ]
    if online:
        found["node_on_mains"] = int(any(online))


def has_battery(sys: str = "/sys") -> bool:
    """Return whether the machine has a battery; those of mice do not count."""
    base = sys + "/class/power_supply"
    return any(
        _text("%s/%s/type" % (base, one)) == "Battery" and _text("%s/%s/scope" % (base, one)) != "Device"
        for one in _names(base)
    )


def _rapl(sys: str, found: Values) -> None:
    base = sys + "/class/powercap"
    for zone in _names(base):
        value = _number("%s/%s/energy_uj" % (base, zone)) if zone.startswith("intel-rapl:") else None
        if value is not None and zone.count(":") == 1:
            name = _text("%s/%s/name" % (base, zone)) or zone
            found["node_energy_joules_total:" + label(name)] = value / 1e6
            found[RANGE + label(name)] = (_number("%s/%s/max_energy_range_uj" % (base, zone)) or 0) / 1e6


def _carriers(sys: str, found: Values) -> None:
    base = sys + "/class/net"
    devices = [name for name in _names(base) if os.path.exists("%s/%s/device" % (base, name))]
    for device in devices[:MAX_DEVICES]:
        value = _number("%s/%s/carrier_changes" % (base, device))
        if value is not None:
            found["node_network_carrier_changes_total:" + label(device)] = value


def _names(path: str) -> List[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def _text(path: str) -> str:
    try:
        return process.read_file(path).decode("utf-8", "replace").strip()
    except OSError:
        return ""


def _number(path: str) -> Optional[int]:
    """Return the whole number in a file, None if there is none."""
    text = _text(path)
    return int(text) if text.lstrip("-").isdigit() and len(text) < 20 else None


# ----- jobs


class JobUse(NamedTuple):
    """What the processes of one step use. Counters include processes that have ended."""

    cpu_ticks: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    faults: int = 0  # that read from disk
    rss_pages: int = 0
    processes: int = 0
    blocked: int = 0
    runnable: int = 0  # threads
    anonymous_pages: int = 0

    def past(self) -> "JobUse":
        """Return the counters alone."""
        return JobUse(*self[:COUNTERS])


class JobTrees:
    """Sums what the processes below each shepherd use.

    The kernel adds what a process used to its parent when the parent collects it. So the sum over a shepherd's tree, with the
    collected children of the shepherd, counts each process once. A step that has ended is added to its job's past.
    """

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = proc
        self._others: Set[int] = set()  # processes of no job: what is born below a shepherd has a new pid
        self._shepherds: Set[int] = set()
        self._looks = 0
        self._read: Set[int] = set()  # processes of jobs in this look
        self._steps: Dict[str, JobUse] = {}  # by token
        self._past: Dict[Tuple[int, int], JobUse] = {}  # by job and attempt
        self._ticks_s = 1.0 / os.sysconf("SC_CLK_TCK")

    def look(self, steps: Mapping[str, Tuple[int, int, int]]) -> List[List[Number]]:
        """Return a row for each job.

        `steps`: job, attempt and shepherd's pid by token; pid 0: none lives.
        """
        shepherds = {pid for _, _, pid in steps.values() if pid}
        if not shepherds <= self._shepherds:
            self._others.clear()  # it may have been there, as that of no job yet
        self._shepherds = shepherds
        table = self._table() if shepherds else {}
        children: Dict[int, List[int]] = {}
        for pid, fields in table.items():
            children.setdefault(int(fields[1]), []).append(pid)
        self._read = set()
        jobs: Dict[Tuple[int, int], List[JobUse]] = {}
        for token, (job, attempt, pid) in steps.items():
            use = self._tree(pid, table, children) if pid in table else None
            before = self._steps.get(token, JobUse())
            if use is None:
                use = before.past()
            use = JobUse(*map(max, use[:COUNTERS], before), *use[COUNTERS:])
            self._steps[token] = use
            jobs.setdefault((job, attempt), []).append(use)
        self._others.update(pid for pid in table if pid not in self._read)
        self._forget(steps, jobs)
        return [[*key, *self._values(key, uses)] for key, uses in jobs.items()]

    def _forget(self, steps: Mapping[str, Tuple[int, int, int]], jobs: Mapping[Tuple[int, int], object]) -> None:
        for token in [token for token in self._steps if token not in steps]:
            key = _job_of(token)
            use = self._steps.pop(token)
            if key in jobs:
                self._past[key] = _sum([self._past.get(key, JobUse()), use.past()])
        for key in [key for key in self._past if key not in jobs]:
            del self._past[key]

    def _values(self, key: Tuple[int, int], uses: List[JobUse]) -> List[Number]:
        total = _sum([self._past.get(key, JobUse()), *uses])
        return [
            round(total.cpu_ticks * self._ticks_s, 2),
            total.rss_pages * _PAGE_BYTES,
            total.read_bytes,
            total.written_bytes,
            total.processes,
            total.blocked,
            total.faults,
            total.runnable,
            total.anonymous_pages * _PAGE_BYTES,
        ]

    def _table(self) -> Dict[int, List[bytes]]:
        """Return the fields of /proc/PID/stat after the name, by pid.

        Processes that were no job's at an earlier look are left out.
        """
        self._looks += 1
        if self._looks % OTHERS_LOOKS == 0:
            self._others.clear()
        found = {}
        for name in os.listdir(self._proc):
            if not name.isdigit() or int(name) in self._others:
                continue
            try:
                fields = process.read_file("%s/%s/stat" % (self._proc, name)).rpartition(b")")[2].split()
            except OSError:
                continue
            if len(fields) >= 40:
                found[int(name)] = fields
        return found

    def _tree(self, shepherd: int, table: Mapping[int, List[bytes]], children: Mapping[int, List[int]]) -> JobUse:
        own = table[shepherd]
        self._read.add(shepherd)
        uses = [JobUse(cpu_ticks=int(own[13]) + int(own[14]), faults=int(own[10]))]
        io = self._io(shepherd)
        # The shepherd's own helper, and a task that has not executed its program yet, have another exit signal.
        self._read.update(children.get(shepherd, ()))
        todo = [pid for pid in children.get(shepherd, ()) if table[pid][EXIT_SIGNAL] == _SIGCHLD]
        while todo:
            pid = todo.pop()
            self._read.add(pid)
            todo += children.get(pid, ())
            fields = table[pid]
            read, written = self._io(pid)
            io = io[0] + read, io[1] + written
            state = fields[0]
            uses.append(
                JobUse(
                    cpu_ticks=sum(map(int, fields[11:15])),
                    faults=int(fields[9]) + int(fields[10]),
                    rss_pages=int(fields[21]),
                    processes=int(state not in (b"Z", b"X")),
                    blocked=int(state == b"D"),
                    runnable=int(state == b"R") if fields[THREADS] == b"1" else self._runnable(pid),
                    anonymous_pages=self._anonymous_pages(pid),
                )
            )
        return _sum(uses)._replace(read_bytes=io[0], written_bytes=io[1])

    def _runnable(self, pid: int) -> int:
        """Return how many threads of a process run or wait for a CPU."""
        threads = "%s/%d/task" % (self._proc, pid)
        found = 0
        with suppress(OSError):  # it has ended
            for name in os.listdir(threads)[:MAX_THREADS]:
                with suppress(OSError):
                    text = process.read_file("%s/%s/stat" % (threads, name))
                    found += text.rpartition(b")")[2].startswith(b" R")
        return found

    def _anonymous_pages(self, pid: int) -> int:
        """Return the memory of a process that the kernel cannot take back without swap."""
        try:
            words = process.read_file("%s/%d/statm" % (self._proc, pid)).split()
        except OSError:
            return 0
        return max(0, int(words[1]) - int(words[2])) if len(words) > 2 else 0

    def _io(self, pid: int) -> Tuple[int, int]:
        """Return the bytes that a process read from and wrote to disks; 0 if it is another user's."""
        try:
            text = process.read_file("%s/%d/io" % (self._proc, pid))
        except OSError:
            return 0, 0
        found = dict(line.split(b": ") for line in text.splitlines() if b": " in line)
        return int(found.get(b"read_bytes", 0)), int(found.get(b"write_bytes", 0))


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_SIGCHLD = b"%d" % signal.SIGCHLD


def _sum(uses: List[JobUse]) -> JobUse:
    return JobUse(*map(sum, zip(*uses)))


def _job_of(token: str) -> Tuple[int, int]:
    key = protocol.read_token(token)
    return (key.job_id, key.attempt) if key is not None else (0, 0)


# ----- all together


class NodeSampler:
    """Sends a sample at each interval, as long as a controller wants them."""

    def __init__(
        self,
        loop: Loop,
        helpers: Helpers,
        gpus: GpuWatch,
        own_mounts: List[str],
        entries: Callable[[], Iterator[Entry]],
        send: Callable[[protocol.Message], bool],
        unsent: Callable[[], int],
    ) -> None:
        self._loop, self._helpers, self._gpus = loop, helpers, gpus
        self._own_mounts = own_mounts
        self._entries, self._send, self._unsent = entries, send, unsent
        self._counters, self._trees = Counters(), JobTrees()
        self._order = protocol.SampleEvery(0.0)
        self._timer: Optional[Timer] = None
        self._columns: List[str] = []  # that the controller knows
        self._skipped = 0
        self._slow: Values = {}
        self._growth: Values = {}  # of counters, between the last two slow looks
        self._slow_at_s = float("-inf")
        self._slow_due_s = float("-inf")
        self._is_looking = False  # a slow look has not answered yet
        self._hung: Dict[str, Tuple[float, float]] = {}  # mounts: when to ask again, the pause after that
        self._energy = Energy()
        self._jobs_due_s = float("-inf")

    def every(self, order: protocol.SampleEvery) -> None:
        """Sample at another interval; 0: not at all."""
        self.stop()
        self._order = order
        self._columns = []
        if order.interval_s > 0:
            interval_s = max(LEAST_INTERVAL_S, order.interval_s)
            self._gpus.start(interval_s)
            share = int.from_bytes(os.urandom(2), "big") / 65536  # the nodes do not all answer at once
            self._timer = self._loop.later(interval_s * share, self._due)

    def stop(self) -> None:
        """Stop: there is no controller."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._order = protocol.SampleEvery(0.0)
        self._gpus.stop()
        self._counters.close()

    def _due(self) -> None:
        self._timer = self._loop.later(max(LEAST_INTERVAL_S, self._order.interval_s), self._due)
        now_s = process.boot_clock_s()
        if now_s >= self._slow_due_s and not self._is_looking:
            self._look_slowly(now_s)
        if self._unsent() > ROOM_BYTES:
            self._skipped += 1
            return
        values = self._counters.look()
        if now_s - self._slow_at_s < FORGET_SLOW_S:
            values.update(self._slow)
        values.update(self._gpus.values(now_s))
        values["node_samples_skipped_total"] = self._skipped
        values["node_time_seconds"] = int(time.time())
        known = set(self._columns)
        new = [column for column in values if column not in known]
        columns = self._columns + new if new or not self._columns else []
        if len(columns) > MAX_COLUMNS:  # devices have come and gone
            columns = list(values)
        self._columns = columns or self._columns
        self._send(
            protocol.Sample(
                values=[values.get(column) for column in self._columns],
                jobs=self._job_rows(now_s) if self._order.jobs else [],
                columns=columns,
                job_columns=JOB_COLUMNS if columns else [],
            )
        )

    def _job_rows(self, now_s: float) -> List[List[Number]]:
        if now_s < self._jobs_due_s:
            return []
        began_s = time.process_time()
        steps = {
            entry.token: (entry.key.job_id, entry.key.attempt, _shepherd_of(entry))
            for entry in self._entries()
            if not entry.is_final  # with claims: a job that holds the node and runs nothing is worth knowing
        }
        rows = self._trees.look(steps)
        self._jobs_due_s = now_s + (time.process_time() - began_s) / JOB_SHARE - self._order.interval_s
        return rows

    def _look_slowly(self, now_s: float) -> None:
        self._is_looking = True
        self._slow_due_s = now_s + SLOW_S
        mounts = list(dict.fromkeys([*self._own_mounts, *self._order.mounts]))[:MAX_MOUNTS]
        hung = [mount for mount in mounts if self._hung.get(mount, (0.0, 0.0))[0] > now_s]
        asked = [mount for mount in mounts if mount not in hung]

        def look() -> Answer:
            return protocol.Facts(0, dict(slow_look(asked))), b""

        def looked(answer: Answer) -> None:
            self._looked(answer[0].__dict__["facts"], asked, hung)

        self._helpers.ask(look, lambda why: (protocol.Facts(0, {}), b""), looked)

    def _looked(self, found: Values, asked: List[str], hung: List[str]) -> None:
        self._is_looking = False
        self._slow_at_s = process.boot_clock_s()
        for mount in asked:
            if found.get("node_filesystem_answers:" + label(mount)) == 0:
                pause_s = self._hung.get(mount, (0.0, HUNG_AGAIN_S))[1]
                self._hung[mount] = (self._slow_at_s + pause_s, min(HUNG_MOST_S, 2 * pause_s))
            else:
                self._hung.pop(mount, None)
        found.update(("node_filesystem_answers:" + label(mount), 0) for mount in hung)
        before, self._slow = self._slow, self._energy.unwrapped(found)
        self._growth = {
            column: value - before[column]
            for column, value in self._slow.items()
            if "_total" in column and column in before
        }

    def latest(self) -> Values:
        """Return what the GPUs did at the last look; {} if it is not known."""
        return self._gpus.values(process.boot_clock_s())

    def growth(self) -> Values:
        """Return how much the slow counters have grown in the last minute; {} if it is not known."""
        return self._growth if process.boot_clock_s() - self._slow_at_s < FORGET_SLOW_S else {}


class Energy:
    """Energy counters, which start again after minutes, as counters that do not."""

    def __init__(self) -> None:
        self._last: Dict[str, Tuple[Number, Number]] = {}  # by column: as read, and what was added

    def unwrapped(self, found: Values) -> Values:
        """Return the values without the ranges of counters, with their wraps added."""
        made = {column: value for column, value in found.items() if not column.startswith(RANGE)}
        for name in [column[len(RANGE) :] for column in found if column.startswith(RANGE)]:
            column = "node_energy_joules_total:" + name
            value = made[column]
            last, added = self._last.get(column, (value, 0))
            added += found[RANGE + name] if value < last else 0
            self._last[column] = (value, added)
            made[column] = value + added
        return made


def _shepherd_of(entry: Entry) -> int:
    shepherd = entry.record.get("shepherd")
    return int(shepherd[0]) if entry.supervised and shepherd else 0
