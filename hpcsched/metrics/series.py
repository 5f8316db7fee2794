"""The table of series, and samples of nodes decoded by it.

`TABLE` has every series that the controller publishes: name, kind, unit, labels and help. The text
of `/metrics`, the man page, the Grafana dashboards and the recorder's columns are made from it.

A node sends a `Sample`: a list of column names, once, and then lists of values. A column's name is
the name of a series with the values of its labels: ``node_network_receive_bytes_total:eth0``. What
a node sends is not trusted: `SampleReader` bounds it, and ignores what the table does not have.

Rules: names have base units, counters end in ``_total``, and a value that is not known is absent.
A counter that falls, or whose node has another boot id, has a gap there: never a negative rate.

Sources: https://prometheus.io/docs/practices/naming/, the OpenMetrics 1.0 specification.
"""

from __future__ import annotations

import enum
import math
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hpcnode.wire import protocol
from hpcsched.model.ids import JobId, NodeName

PREFIX = "hpcsched_"
MAX_COLUMNS = 1024  # of one node; an 8-GPU node with 12 disks has about 250
MAX_JOB_COLUMNS = 64
MAX_JOBS = 1024  # of one node, in one sample
MAX_LABEL = 128  # characters of a label's value
MAX_COLUMN = 400  # characters of a column's name
MAX_VALUE = (1 << 63) - 1  # the largest that fits the wire; a node that sends it has overflowed
TICKS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
LAUNCHES_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
WAITS_S = (1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 10800.0, 21600.0, 43200.0, 86400.0, 259200.0, 604800.0)


class SeriesKind(enum.Enum):
    """The type of a series, in OpenMetrics' words."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


class Group(enum.Enum):
    """Where the values of a series come from: a heading of the man page."""

    CONTROLLER = "The controller"
    QUEUE = "The queue"
    CAPACITY = "Nodes as the scheduler sees them"
    NODE = "Samples of nodes"
    GPU = "Samples of GPUs"
    JOB = "Running jobs"
    TRAINING = "Training jobs"


SAMPLED = frozenset({Group.NODE, Group.GPU})  # columns of a node's sample; the label `node` is implied


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One series, without `PREFIX`. `labels` are in the order of the text."""

    name: str
    kind: SeriesKind
    group: Group
    labels: tuple[str, ...]
    help: str
    unit: str = ""
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        """Return the name that Prometheus sees."""
        return self.name if self.name.startswith("process_") else PREFIX + self.name

    @property
    def column_labels(self) -> tuple[str, ...]:
        """Return the labels of a column of a sample: all but those of its node and job."""
        return tuple(label for label in self.labels if label not in ("node", "job"))


def _table() -> dict[str, Series]:
    made = {}
    for group, rows in _ROWS.items():
        for name, kind, unit, labels, help_text, *buckets in rows:
            if group in SAMPLED:
                labels = f"node {labels}"
            elif group in (Group.JOB, Group.TRAINING):
                labels = f"job {labels}"
            made[name] = Series(
                name=name,
                kind=kind,
                group=group,
                labels=tuple(labels.split()),
                help=help_text,
                unit=unit,
                buckets=buckets[0] if buckets else (),
            )
    return made


_C, _G, _H, _I = SeriesKind.COUNTER, SeriesKind.GAUGE, SeriesKind.HISTOGRAM, SeriesKind.INFO
# name, kind, unit, labels, help, buckets of a histogram
_ROWS: dict[Group, list[tuple[Any, ...]]] = {
    Group.CONTROLLER: [
        ("build_info", _I, "", "version", "Version of the controller."),
        ("controller_start_time_seconds", _G, "seconds", "", "Start of the controller, in Unix time."),
        ("controller_epoch", _G, "", "", "Number of starts of the controller on this database."),
        ("backup_newest_time_seconds", _G, "seconds", "", "Time of the newest scheduled backup, in Unix time; 0: none."),
        ("backup_interval_seconds", _G, "seconds", "", "How often backups are made."),
        ("backup_failed", _G, "", "", "1 if the last scheduled backup failed, else 0."),
        ("tick_seconds", _H, "seconds", "", "Time that a tick of the controller took.", TICKS_S),
        ("plan_seconds", _H, "seconds", "", "Time that the parts of a scheduling pass took in one tick.", TICKS_S),
        ("commit_seconds", _H, "seconds", "", "Time that a commit of the database took.", TICKS_S),
        ("http_request_seconds", _H, "seconds", "route code", "Time until a request was answered.", TICKS_S),
        ("metrics_snapshot_seconds", _G, "seconds", "", "Time that the last snapshot for this page took."),
        ("node_samples_total", _C, "", "", "Samples of nodes that were accepted."),
        ("node_samples_rejected_total", _C, "", "", "Samples of nodes, or parts of them, that were rejected."),
        ("process_cpu_seconds_total", _C, "seconds", "", "Processor time of the controller, user and system."),
        ("process_resident_memory_bytes", _G, "bytes", "", "Resident memory of the controller."),
        ("process_virtual_memory_bytes", _G, "bytes", "", "Virtual memory of the controller."),
        ("process_open_fds", _G, "", "", "Open file descriptors of the controller."),
        ("process_start_time_seconds", _G, "seconds", "", "Start of the controller's process, in Unix time."),
    ],
    Group.QUEUE: [
        ("jobs", _G, "", "state partition", "Jobs that are not over, by state."),
        ("jobs_pending", _G, "", "reason", "Jobs that wait, by reason."),
        ("jobs_submitted_total", _C, "", "", "Jobs submitted since the controller started."),
        ("jobs_ended_total", _C, "", "state partition", "Jobs ended since the controller started."),
        ("job_wait_seconds", _H, "seconds", "partition", "Time from submission to start of started jobs.", WAITS_S),
        ("job_run_seconds", _H, "seconds", "partition", "Run time of ended jobs.", WAITS_S),
        ("job_launch_seconds", _H, "seconds", "", "Time from allocation to start of a job's program.", LAUNCHES_S),
        ("oldest_pending_seconds", _G, "seconds", "partition", "Age of the oldest job that waits."),
        ("preemptions_total", _C, "", "", "Jobs preempted since the controller started."),
        ("requeues_total", _C, "", "", "Jobs requeued since the controller started."),
        ("licenses", _G, "", "license", "Licenses that exist."),
        ("licenses_used", _G, "", "license", "Licenses that jobs hold."),
        ("reservation_active", _G, "", "reservation", "1 while the reservation is active, else 0."),
    ],
    Group.CAPACITY: [
        ("node_up", _G, "", "node", "1 if the node's agent is connected, else 0."),
        ("node_state", _G, "", "node state", "1 for the state that the node has."),
        ("node_cpus", _G, "", "node", "CPUs of the node."),
        ("node_cpus_allocated", _G, "", "node", "CPUs of the node that jobs hold."),
        ("node_memory_bytes", _G, "bytes", "node", "Memory of the node that jobs may hold."),
        ("node_memory_allocated_bytes", _G, "bytes", "node", "Memory of the node that jobs hold."),
        ("node_gpus", _G, "", "node", "GPUs of the node."),
        ("node_gpus_allocated", _G, "", "node", "GPUs of the node that jobs hold."),
        ("node_sample_age_seconds", _G, "seconds", "node", "Age of the node's last sample."),
    ],
    Group.NODE: [
        ("node_cpu_seconds_total", _C, "seconds", "mode", "Time of the node's CPUs by mode, as in /proc/stat."),
        ("node_forks_total", _C, "", "", "Processes and threads created."),
        ("node_processes_blocked", _G, "", "", "Threads that wait for a disk or a network file system."),
        ("node_boot_time_seconds", _G, "seconds", "", "Start of the node, in Unix time."),
        ("node_time_seconds", _G, "seconds", "", "Clock of the node, in Unix time."),
        ("node_load1", _G, "", "", "Load average of one minute."),
        ("node_memory_total_bytes", _G, "bytes", "", "Memory of the machine."),
        ("node_memory_available_bytes", _G, "bytes", "", "Memory that programs can get without swapping."),
        ("node_memory_cached_bytes", _G, "bytes", "", "Page cache."),
        ("node_swap_used_bytes", _G, "bytes", "", "Swap space in use."),
        ("node_major_faults_total", _C, "", "", "Page faults that read from disk."),
        ("node_swap_in_pages_total", _C, "", "", "Pages read from swap space."),
        ("node_swap_out_pages_total", _C, "", "", "Pages written to swap space."),
        ("node_oom_kills_total", _C, "", "", "Processes that the kernel killed for lack of memory."),
        ("node_pressure_seconds_total", _C, "seconds", "resource kind",
         "Time in which some or all (full) tasks waited for cpu, memory or io."),
        ("node_network_receive_bytes_total", _C, "bytes", "device", "Bytes received; device \"virtual\" is a sum."),
        ("node_network_transmit_bytes_total", _C, "bytes", "device", "Bytes sent."),
        ("node_network_errors_total", _C, "", "device", "Errors of a network device, received and sent."),
        ("node_network_drops_total", _C, "", "device", "Packets that a network device dropped."),
        ("node_network_carrier_changes_total", _C, "", "device", "Times that a link went up or down."),
        ("node_tcp_retransmits_total", _C, "", "", "TCP segments sent again."),
        ("node_tcp_segments_sent_total", _C, "", "", "TCP segments sent."),
        ("node_disk_read_bytes_total", _C, "bytes", "device", "Bytes read from a disk."),
        ("node_disk_written_bytes_total", _C, "bytes", "device", "Bytes written to a disk."),
        ("node_disk_busy_seconds_total", _C, "seconds", "device", "Time in which a disk had requests."),
        ("node_open_files", _G, "", "", "Open files of the machine."),
        ("node_filesystem_size_bytes", _G, "bytes", "mount", "Size of a file system."),
        ("node_filesystem_free_bytes", _G, "bytes", "mount", "Space that users can still fill."),
        ("node_filesystem_free_inodes", _G, "", "mount", "Free inodes of a file system."),
        ("node_filesystem_read_only", _G, "", "mount", "1 if the file system is read-only, else 0."),
        ("node_filesystem_answers", _G, "", "mount", "1 if the file system answered in time, else 0."),
        ("node_temperature_celsius", _G, "celsius", "sensor", "Temperature of a chip: of its hottest sensor."),
        ("node_throttled_total", _C, "", "kind", "Times that the CPUs were slowed down for heat."),
        ("node_ecc_errors_total", _C, "", "kind", "Memory errors, corrected or uncorrected."),
        ("node_on_mains", _G, "", "", "1 on mains power, 0 on battery."),
        ("node_energy_joules_total", _C, "joules", "domain", "Energy that a power domain used (RAPL)."),
        ("node_power_watts", _G, "watts", "sensor", "Power that a sensor measures."),
        ("node_samples_skipped_total", _C, "", "", "Samples that the agent dropped because its connection was full."),
    ],
    Group.GPU: [
        ("gpu_info", _I, "", "gpu uuid model", "Model of a GPU."),
        ("gpu_driver_answers", _G, "", "", "1 if the GPU driver answered within 30 s, else 0."),
        ("gpu_utilization_ratio", _G, "ratio", "gpu", "Share of time in which the GPU computed."),
        ("gpu_memory_bytes", _G, "bytes", "gpu", "Memory of the GPU."),
        ("gpu_memory_used_bytes", _G, "bytes", "gpu", "Memory of the GPU in use."),
        ("gpu_power_watts", _G, "watts", "gpu", "Power of the GPU."),
        ("gpu_power_limit_watts", _G, "watts", "gpu", "Power limit of the GPU."),
        ("gpu_energy_joules_total", _C, "joules", "gpu", "Energy that the GPU used since its driver was loaded."),
        ("gpu_temperature_celsius", _G, "celsius", "gpu", "Temperature of the GPU."),
        ("gpu_clock_hertz", _G, "hertz", "gpu", "Clock of the GPU's processors."),
        ("gpu_throttle", _G, "", "gpu reason", "1 while the GPU is slowed down for this reason: heat."),
        ("gpu_ecc_errors_total", _C, "", "gpu kind", "Memory errors of the GPU, corrected or uncorrected."),
        ("gpu_processes", _G, "", "gpu", "Processes that compute on the GPU."),
    ],
    Group.JOB: [
        ("job_info", _I, "", "user account partition name", "A running job."),
        ("job_cpu_seconds_total", _C, "seconds", "", "Processor time of the job's processes."),
        ("job_memory_bytes", _G, "bytes", "", "Memory of the job's processes."),
        ("job_memory_anonymous_bytes", _G, "bytes", "", "Memory of the job's processes that is not of files."),
        ("job_memory_limit_bytes", _G, "bytes", "", "Memory that the job holds."),
        ("job_read_bytes_total", _C, "bytes", "", "Bytes that the job read from disks."),
        ("job_written_bytes_total", _C, "bytes", "", "Bytes that the job wrote to disks."),
        ("job_processes", _G, "", "", "Processes of the job."),
        ("job_processes_blocked", _G, "", "", "Processes of the job that wait for a disk or a network file system."),
        ("job_major_faults_total", _C, "", "", "Page faults of the job that read from disk."),
        ("job_threads_runnable", _G, "", "", "Threads of the job that run or wait for a CPU."),
        ("job_cpus", _G, "", "", "CPUs that the job holds."),
        ("job_gpus", _G, "", "", "GPUs that the job holds."),
        ("job_gpu_utilization_ratio", _G, "ratio", "", "Mean utilization of the job's GPUs."),
        ("job_gpu_memory_used_bytes", _G, "bytes", "", "Memory in use on the job's GPUs."),
    ],
    Group.TRAINING: [
        ("job_training_step", _G, "", "", "Step that the training program reached."),
        ("job_training_steps", _G, "", "", "Steps that the training program will do."),
        ("job_training_samples_per_second", _G, "", "", "Samples trained each second."),
        ("job_training_loss", _G, "", "", "Last loss."),
        ("job_training_goodput_ratio", _G, "ratio", "", "Share of the run's time spent in steps that count."),
        ("job_training_checkpoint_step", _G, "", "", "Step of the last checkpoint."),
        ("job_training_report_age_seconds", _G, "seconds", "", "Age of the program's last report."),
    ],
}  # fmt: skip
TABLE: dict[str, Series] = _table()


class Column(NamedTuple):
    """A series with the values of its `column_labels`."""

    series: Series
    labels: tuple[str, ...]

    @property
    def key(self) -> str:
        """Return the name of the column, as nodes send it."""
        return ":".join((self.series.name, *self.labels))


Value = int | float | None  # None: the node could not read it


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """What one job used on one node. `columns` are of `Group.JOB`."""

    job_id: JobId
    attempt: int
    columns: tuple[Column, ...]
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSample:
    """One look at a node and its jobs.

    `columns` is the same object in all samples of a connection until the node has other columns.
    Counters are as the kernel counts them: since `boot_id`'s start, or that of the job.
    """

    node: NodeName
    boot_id: str
    received_at_s: float  # by the controller's clock, because the node's may be wrong
    columns: tuple[Column, ...]
    values: tuple[Value, ...]
    jobs: tuple[JobRow, ...] = ()

    def known(self) -> dict[str, int | float]:
        """Return the values that could be read, by `Column.key`."""
        return {column.key: value for column, value in zip(self.columns, self.values, strict=True) if value is not None}


def read_column(text: object, groups: frozenset[Group]) -> Column | None:
    """Return the column with this name, None if the table has none in `groups`."""
    if type(text) is not str or len(text) > MAX_COLUMN:
        return None
    name, *rest = text.split(":", 1)
    series = TABLE.get(name)
    if series is None or series.group not in groups:
        return None
    count = len(series.column_labels)
    labels = tuple(rest[0].split(":", count - 1)) if rest and count else tuple(rest)
    if len(labels) != count:
        return None
    return Column(series, tuple(label_value(label) for label in labels))


def label_value(text: str) -> str:
    """Return `text` as a bounded label value without control characters."""
    cut = text if len(text) <= MAX_LABEL else text[: MAX_LABEL - 3] + "..."
    if cut.isascii() and cut.isprintable():
        return cut
    return "".join("\ufffd" if unicodedata.category(one) in ("Cc", "Cs", "Co", "Cn") else one for one in cut)


class SampleReader:
    """Reads the samples of one node's connection.

    `rejected` counts samples, and parts of samples, that were not accepted; `why` is the last
    reason, "" if there was none.
    """

    def __init__(self, node: NodeName) -> None:
        self._node = node
        self._columns: tuple[Column, ...] = ()
        self._places: tuple[int, ...] = ()
        self._count = -1  # of the columns that the node named; -1: none yet
        self._job_columns: tuple[Column, ...] = ()
        self._job_places: tuple[int, ...] = ()
        self._job_count = 0
        self.rejected = 0
        self.why = ""

    def read(
        self, sample: protocol.Sample, boot_id: str, now_s: float, holds: Callable[[int, int], bool]
    ) -> NodeSample | None:
        """Return the decoded sample, None if it is rejected.

        `holds`: whether an attempt of a job is on this node. Rows of other jobs are dropped.
        """
        if sample.columns and not self._take_columns(sample):
            return None
        if self._count < 0 or len(sample.values) != self._count:
            self._reject(f"has {len(sample.values)} values for {max(self._count, 0)} columns")
            return None
        rows = sample.jobs
        if len(rows) > MAX_JOBS:
            self._reject(f"has {len(rows)} jobs, more than {MAX_JOBS}")
            rows = []
        return NodeSample(
            node=self._node,
            boot_id=boot_id,
            received_at_s=now_s,
            columns=self._columns,
            values=self._values(sample.values, self._places, self._columns),
            jobs=tuple(row for row in (self._job_row(row, holds) for row in rows) if row is not None),
        )

    def _take_columns(self, sample: protocol.Sample) -> bool:
        if len(sample.columns) > MAX_COLUMNS or len(sample.job_columns) > MAX_JOB_COLUMNS:
            self._count = -1
            self._reject(f"has {len(sample.columns)} columns, more than {MAX_COLUMNS}")
            return False
        self._columns, self._places = self._known(sample.columns, SAMPLED)
        self._job_columns, self._job_places = self._known(sample.job_columns, frozenset({Group.JOB}))
        self._count, self._job_count = len(sample.columns), len(sample.job_columns)
        return True

    def _known(self, names: Sequence[object], groups: frozenset[Group]) -> tuple[tuple[Column, ...], tuple[int, ...]]:
        """Return the columns that the table has, each once, and their places in the sample."""
        found: dict[Column, int] = {}
        for place, name in enumerate(names):
            column = read_column(name, groups)
            if column is None or column in found:
                self._reject(f"has the unknown column {str(name)[:60]!r}")
            else:
                found[column] = place
        return tuple(found), tuple(found.values())

    def _job_row(self, row: list[Any], holds: Callable[[int, int], bool]) -> JobRow | None:
        if len(row) != 2 + self._job_count or type(row[0]) is not int or type(row[1]) is not int:
            self._reject("has a job's row of another length")
            return None
        job_id, attempt = row[0], row[1]
        if not holds(job_id, attempt):
            self._reject(f"has attempt {attempt} of job {job_id}, which is not there")
            return None
        return JobRow(
            job_id=JobId(job_id),
            attempt=attempt,
            columns=self._job_columns,
            values=self._values(row[2:], self._job_places, self._job_columns),
        )

    def _values(
        self, values: Sequence[object], places: tuple[int, ...], columns: tuple[Column, ...]
    ) -> tuple[Value, ...]:
        found: list[Value] = []
        for place, column in zip(places, columns, strict=True):
            value = values[place]
            if value is None or (
                type(value) in (int, float) and is_possible(value, column.series)  # type: ignore[arg-type]
            ):
                found.append(value)  # type: ignore[arg-type]
            else:
                self._reject(f"has {str(value)[:40]!r} as {column.key[:80]}")
                found.append(None)
        return tuple(found)

    def _reject(self, why: str) -> None:
        self.rejected += 1
        self.why = why


def is_possible(value: float, series: Series) -> bool:
    """Return whether a series can have this value."""
    if not math.isfinite(value) or abs(value) >= MAX_VALUE:
        return False
    if series.unit == "celsius":
        return -100.0 < value < 300.0 and value != 0.0  # broken sensors say -273, 0 or 511
    if series.unit == "ratio":
        return 0.0 <= value <= 1.0
    return value >= 0.0


def rate(before: float, after: float, seconds: float, same_boot: bool = True) -> float | None:
    """Return the rate of a counter between two looks, None if it was reset."""
    if not same_boot or after < before or seconds <= 0.0:
        return None
    return (after - before) / seconds
