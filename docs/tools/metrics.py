"""Write what is made of the table of series: a man page, Grafana dashboards, Prometheus' files.

Run it after a change of `hpcsched/metrics/series.py` or of the panels here:

    .venv/bin/python docs/tools/metrics.py

A test compares its output with the files, and runs the query of each panel and alert in a real
Prometheus. Grafana itself is not run: that a dashboard looks right was not seen by a test.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from hpcsched.metrics.series import TABLE, Group, SeriesKind

ROOT = Path(__file__).parents[2]
RATE = "[$__rate_interval]"


class Panel(NamedTuple):
    """One panel: its queries by legend. `unit` is one of Grafana's."""

    title: str
    unit: str
    queries: dict[str, str]
    kind: str = "timeseries"


BOARDS: dict[str, tuple[str, list[Panel]]] = {
    "overview": (
        "hpcsched: overview",
        [
            Panel("Nodes up", "none", {"up": "sum(hpcsched_node_up)", "all": "count(hpcsched_node_up)"}, "stat"),
            Panel("Nodes by state", "none", {"{{state}}": "sum by (state) (hpcsched_node_state)"}),
            Panel("Jobs by state", "none", {"{{state}}": "sum by (state) (hpcsched_jobs)"}),
            Panel("Why jobs wait", "none", {"{{reason}}": "sum by (reason) (hpcsched_jobs_pending)"}),
            Panel("Oldest waiting job", "s", {"{{partition}}": "hpcsched_oldest_pending_seconds"}),
            Panel(
                "Allocated",
                "percentunit",
                {
                    "cpus": "sum(hpcsched_node_cpus_allocated) / sum(hpcsched_node_cpus)",
                    "memory": "sum(hpcsched_node_memory_allocated_bytes) / sum(hpcsched_node_memory_bytes)",
                    "gpus": "sum(hpcsched_node_gpus_allocated) / (sum(hpcsched_node_gpus) > 0)",
                },
            ),
            Panel(
                "Ended jobs", "none", {"{{state}}": f"sum by (state) (rate(hpcsched_jobs_ended_total{RATE})) * 3600"}
            ),
            Panel(
                "Wait, median of started jobs",
                "s",
                {
                    "{{partition}}": "histogram_quantile(0.5, sum by (partition, le) "
                    f"(rate(hpcsched_job_wait_seconds_bucket{RATE})))"
                },
            ),
            Panel(
                "Controller, 99th percentile",
                "s",
                {
                    what: f"histogram_quantile(0.99, sum by (le) (rate(hpcsched_{what}_seconds_bucket{RATE})))"
                    for what in ("tick", "plan", "commit", "http_request")
                },
            ),
            Panel("Licenses used", "none", {"{{license}}": "hpcsched_licenses_used"}),
        ],
    ),
    "nodes": (
        "hpcsched: nodes",
        [
            Panel(
                "CPU",
                "percentunit",
                {
                    "{{node}}": "sum by (node) (rate("
                    f'hpcsched_node_cpu_seconds_total{{node=~"$node",mode!~"idle|iowait"}}{RATE}))'
                    ' / on (node) hpcsched_node_cpus{node=~"$node"}'
                },
            ),
            Panel(
                "Memory in use",
                "bytes",
                {
                    "{{node}}": 'hpcsched_node_memory_total_bytes{node=~"$node"}'
                    ' - hpcsched_node_memory_available_bytes{node=~"$node"}'
                },
            ),
            Panel(
                "Pressure",
                "percentunit",
                {
                    "{{node}} {{resource}}": f'rate(hpcsched_node_pressure_seconds_total{{node=~"$node",kind="some"}}{RATE})'
                },
            ),
            Panel(
                "Network",
                "Bps",
                {
                    "{{node}} {{device}} in": f'rate(hpcsched_node_network_receive_bytes_total{{node=~"$node"}}{RATE})',
                    "{{node}} {{device}} out": f'rate(hpcsched_node_network_transmit_bytes_total{{node=~"$node"}}{RATE})',
                },
            ),
            Panel(
                "Network faults",
                "cps",
                {
                    "{{node}} errors": f'sum by (node) (rate(hpcsched_node_network_errors_total{{node=~"$node"}}{RATE}))',
                    "{{node}} sent again": f'rate(hpcsched_node_tcp_retransmits_total{{node=~"$node"}}{RATE})',
                },
            ),
            Panel(
                "Disks",
                "Bps",
                {
                    "{{node}} {{device}} read": f'rate(hpcsched_node_disk_read_bytes_total{{node=~"$node"}}{RATE})',
                    "{{node}} {{device}} written": f'rate(hpcsched_node_disk_written_bytes_total{{node=~"$node"}}{RATE})',
                },
            ),
            Panel("Free space", "bytes", {"{{node}} {{mount}}": 'hpcsched_node_filesystem_free_bytes{node=~"$node"}'}),
            Panel(
                "Temperature", "celsius", {"{{node}} {{sensor}}": 'hpcsched_node_temperature_celsius{node=~"$node"}'}
            ),
            Panel(
                "Slowed down for heat",
                "cps",
                {"{{node}} {{kind}}": f'rate(hpcsched_node_throttled_total{{node=~"$node"}}{RATE})'},
            ),
            Panel(
                "Killed for lack of memory",
                "none",
                {"{{node}}": 'increase(hpcsched_node_oom_kills_total{node=~"$node"}[1h])'},
            ),
        ],
    ),
    "gpus": (
        "hpcsched: GPUs",
        [
            Panel("Utilization", "percentunit", {"{{node}} {{gpu}}": 'hpcsched_gpu_utilization_ratio{node=~"$node"}'}),
            Panel("Memory in use", "bytes", {"{{node}} {{gpu}}": 'hpcsched_gpu_memory_used_bytes{node=~"$node"}'}),
            Panel("Power", "watt", {"{{node}} {{gpu}}": 'hpcsched_gpu_power_watts{node=~"$node"}'}),
            Panel("Temperature", "celsius", {"{{node}} {{gpu}}": 'hpcsched_gpu_temperature_celsius{node=~"$node"}'}),
            Panel("Slowed down", "none", {"{{node}} {{gpu}} {{reason}}": 'hpcsched_gpu_throttle{node=~"$node"}'}),
            Panel(
                "Memory errors", "none", {"{{node}} {{gpu}} {{kind}}": 'hpcsched_gpu_ecc_errors_total{node=~"$node"}'}
            ),
            Panel(
                "Held by jobs and used",
                "percentunit",
                {
                    "held": "sum(hpcsched_node_gpus_allocated) / (sum(hpcsched_node_gpus) > 0)",
                    "used": "avg(hpcsched_gpu_utilization_ratio)",
                },
            ),
        ],
    ),
    "jobs": (
        "hpcsched: jobs",
        [
            Panel("CPUs in use", "none", {"{{job}}": f"rate(hpcsched_job_cpu_seconds_total{RATE})"}),
            Panel(
                "CPU efficiency",
                "percentunit",
                {"{{job}}": f"rate(hpcsched_job_cpu_seconds_total{RATE}) / on (job) hpcsched_job_cpus"},
            ),
            Panel("Memory", "bytes", {"{{job}}": "hpcsched_job_memory_bytes"}),
            Panel("GPU utilization", "percentunit", {"{{job}}": "hpcsched_job_gpu_utilization_ratio"}),
            Panel(
                "Disk",
                "Bps",
                {
                    "{{job}} read": f"rate(hpcsched_job_read_bytes_total{RATE})",
                    "{{job}} written": f"rate(hpcsched_job_written_bytes_total{RATE})",
                },
            ),
            Panel("Running jobs", "none", {"": "hpcsched_job_info"}, "table"),
            Panel("Training: samples per second", "none", {"{{job}}": "hpcsched_job_training_samples_per_second"}),
            Panel("Training: loss", "none", {"{{job}}": "hpcsched_job_training_loss"}),
            Panel("Training: goodput", "percentunit", {"{{job}}": "hpcsched_job_training_goodput_ratio"}),
        ],
    ),
}

# name: expression, how long, severity, summary
ALERTS: dict[str, tuple[str, str, str, str]] = {
    "ControllerDown": ('up{job="hpcsched"} == 0', "2m", "critical", "The gateway or the controller does not answer."),
    "NodeDown": (
        'hpcsched_node_up == 0 unless on (node) hpcsched_node_state{state=~"power.*"} == 1', "5m", "warning",
        "Node {{ $labels.node }} is not connected, and was not switched off to save power.",
    ),
    "BackupOld": (
        "time() - hpcsched_backup_newest_time_seconds > 2 * hpcsched_backup_interval_seconds", "15m", "critical",
        "No scheduled backup of the cluster was made for two intervals: see hhealth.",
    ),
    "NodeSilent": (
        "hpcsched_node_sample_age_seconds > 300 and on (node) hpcsched_node_up == 1", "5m", "warning",
        "Node {{ $labels.node }} is connected and sends no samples.",
    ),
    "ClockOff": (
        "abs(hpcsched_node_time_seconds + hpcsched_node_sample_age_seconds - timestamp(hpcsched_node_time_seconds)) > 60",
        "5m", "warning", "The clock of node {{ $labels.node }} is off by more than a minute.",
    ),
    "FileSystemHangs": (
        "hpcsched_node_filesystem_answers == 0", "2m", "critical",
        "{{ $labels.mount }} on node {{ $labels.node }} does not answer.",
    ),
    "FileSystemFull": (
        "hpcsched_node_filesystem_free_bytes / (hpcsched_node_filesystem_size_bytes > 0) < 0.03", "10m", "warning",
        "{{ $labels.mount }} on node {{ $labels.node }} is 97 % full.",
    ),
    "InodesFull": (
        "hpcsched_node_filesystem_free_inodes < 10000 and hpcsched_node_filesystem_free_inodes > 0", "10m", "warning",
        "{{ $labels.mount }} on node {{ $labels.node }} has few inodes left.",
    ),
    "FileSystemReadOnly": (
        'hpcsched_node_filesystem_read_only{mount!="/"} == 1', "5m", "warning",
        "{{ $labels.mount }} on node {{ $labels.node }} is read-only.",
    ),
    "MemoryErrors": (
        'increase(hpcsched_node_ecc_errors_total{kind="uncorrected"}[1h]) > 0', "0m", "critical",
        "Node {{ $labels.node }} has uncorrected memory errors.",
    ),
    "OutOfMemory": (
        "increase(hpcsched_node_oom_kills_total[15m]) > 3", "0m", "warning",
        "Processes on node {{ $labels.node }} are killed for lack of memory.",
    ),
    "NodeHot": (
        "rate(hpcsched_node_throttled_total[10m]) > 0.1", "10m", "warning",
        "The CPUs of node {{ $labels.node }} are slowed down for heat.",
    ),
    "GpuDriverHangs": (
        "hpcsched_gpu_driver_answers == 0", "2m", "critical", "The GPU driver of node {{ $labels.node }} does not answer.",
    ),
    "GpuMemoryErrors": (
        'increase(hpcsched_gpu_ecc_errors_total{kind="uncorrected"}[1h]) > 0', "0m", "critical",
        "GPU {{ $labels.gpu }} of node {{ $labels.node }} has uncorrected memory errors.",
    ),
    "GpuHot": (
        'hpcsched_gpu_throttle{reason="heat"} == 1', "10m", "warning",
        "GPU {{ $labels.gpu }} of node {{ $labels.node }} is slowed down for heat.",
    ),
    "GpuHeldAndIdle": (
        "max_over_time(hpcsched_job_gpu_utilization_ratio[30m]) < 0.05", "30m", "info",
        "Job {{ $labels.job }} holds GPUs and does not use them.",
    ),
    "JobWithoutProcesses": (
        "hpcsched_job_processes == 0", "10m", "info", "Job {{ $labels.job }} holds nodes and has no process.",
    ),
    "ControllerSlow": (
        "histogram_quantile(0.99, sum by (le) (rate(hpcsched_tick_seconds_bucket[10m]))) > 1", "10m", "warning",
        "Ticks of the controller take more than a second.",
    ),
}  # fmt: skip

SCRAPE = """\
# Prometheus: how to scrape hpcsched. Copy the job into scrape_configs of prometheus.yml.
# The token:  hctl token create --scope=metrics --name=prometheus > /etc/prometheus/hpcsched.token
# Its user sees what its role may see. To see all, give it the role of a service in hpcsched.toml:
#   [roles]
#   services = ["prometheus"]
scrape_configs:
  - job_name: hpcsched
    scheme: https
    metrics_path: /metrics
    scrape_interval: 15s
    honor_labels: true          # our label "job" is the number of a job
    authorization:
      credentials_file: /etc/prometheus/hpcsched.token
    tls_config:
      ca_file: /etc/prometheus/hpcsched-ca.crt
    static_configs:
      - targets: ["head.example.org:6820"]

rule_files:
  - alerts.yml
"""


def dashboard(name: str) -> str:
    """Return a Grafana dashboard as JSON."""
    title, panels = BOARDS[name]
    source = {"type": "prometheus", "uid": "${datasource}"}
    shown = [
        {
            "id": number + 1,
            "type": panel.kind,
            "title": panel.title,
            "description": " ".join(_helps(panel)),
            "datasource": source,
            "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)},
            "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
            "options": {},
            "targets": [
                {
                    "refId": chr(ord("A") + place),
                    "datasource": source,
                    "expr": query,
                    "legendFormat": legend,
                    **({"format": "table", "instant": True} if panel.kind == "table" else {}),
                }
                for place, (legend, query) in enumerate(panel.queries.items())
            ],
        }
        for number, panel in enumerate(panels)
    ]
    variables: list[dict[str, Any]] = [{"name": "datasource", "type": "datasource", "query": "prometheus"}]
    if any("$node" in query for panel in panels for query in panel.queries.values()):
        variables.append(
            {
                "name": "node",
                "type": "query",
                "datasource": source,
                "query": "label_values(hpcsched_node_up, node)",
                "refresh": 2,
                "multi": True,
                "includeAll": True,
                "current": {"text": "All", "value": "$__all"},
            }
        )
    board = {
        "uid": f"hpcsched-{name}",
        "title": title,
        "tags": ["hpcsched"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": variables},
        "panels": shown,
    }
    return json.dumps(board, indent=1) + "\n"


def _helps(panel: Panel) -> list[str]:
    """Return the help of each series in a panel's queries, once."""
    names = re.findall(r"hpcsched_([a-z0-9_]+)", " ".join(panel.queries.values()))
    found = (TABLE.get(name) or TABLE.get(name.removesuffix("_bucket")) for name in names)
    return list(dict.fromkeys(series.help for series in found if series is not None))


def alerts() -> str:
    """Return the rules of the alerts."""
    lines = ["# Prometheus: alerts for hpcsched. Copy to rule_files.", "groups:", "  - name: hpcsched", "    rules:"]
    for name, (expression, wait, severity, summary) in ALERTS.items():
        lines += [
            f"      - alert: Hpcsched{name}",
            f"        expr: {json.dumps(expression)}",
            f"        for: {wait}",
            f"        labels: {{severity: {severity}}}",
            f"        annotations: {{summary: {json.dumps(summary)}}}",
        ]
    return "\n".join(lines) + "\n"


def man_page() -> str:
    """Return hpcsched-metrics(7)."""
    return _HEAD + "".join(_section(group) for group in Group) + _TAIL


def _roff(text: str) -> str:
    return text.replace("\\", "\\e").replace("-", "\\-")


def _section(group: Group) -> str:
    lines = [f".SS {group.value}\n"]
    for series in TABLE.values():
        if series.group is group:
            kind = {SeriesKind.INFO: "information, always 1"}.get(series.kind, series.kind.value)
            labels = f" by {', '.join(series.labels)}" if series.labels else ""
            lines.append(f".TP\n.B {series.full_name}\n{_roff(series.help)}\n({kind}{labels})\n")
    return "".join(lines)


_HEAD = """\
.TH HPCSCHED\\-METRICS 7 "" "hpcsched" "hpcsched manual"
.SH NAME
hpcsched\\-metrics \\- the series of /metrics
.SH DESCRIPTION
The controller answers
.B GET /metrics
on its socket, and the gateway at
.BR https://HEAD:6820/metrics ,
in the text format of Prometheus, or in OpenMetrics if the client asks for that.
A request over the network needs a token with the scope
.BR metrics :
.PP
.nf
.RS
hctl token create \\-\\-scope=metrics
.RE
.fi
.PP
Each identity sees what it may see: what
.B [privacy]
of
.BR hpcsched.toml (5)
hides is not on the page.
.PP
The agent of each node sends a sample of the node and its jobs each
.B interval_s
of
.BR [metrics] ,
besides everything else: a sample that the connection has no room for is dropped.
A value that cannot be read is absent, never 0. Of the running jobs, the page has the
.B max_jobs
that have run for longest.
.PP
.B /metrics/jobs /metrics/nodes /metrics/partitions /metrics/scheduler
and
.B /metrics/jobs\\-users\\-accts
are the pages of Slurm 25.11, with its names and labels. What does not exist here is 0 there.
.PP
Dashboards for Grafana, a scrape configuration and alerts for Prometheus are in
.I share/hpcsched/grafana
and
.IR share/hpcsched/prometheus .
.SH SERIES
A counter of a node starts again when the node boots, and one of a job when the job is requeued.
"""
_TAIL = """\
.SH EXAMPLES
.nf
curl \\-\\-unix\\-socket /run/hpcsched/api.sock http://head/metrics
.fi
.SH SEE ALSO
.BR hpcsched.toml (5),
.BR hpcsched\\-gateway (8),
.BR hctl (8)
"""


def files() -> dict[str, str]:
    """Return the text of each file by its path."""
    return {
        "man/hpcsched-metrics.7": man_page(),
        "etc/prometheus/scrape.yml": SCRAPE,
        "etc/prometheus/alerts.yml": alerts(),
        **{f"etc/grafana/{name}.json": dashboard(name) for name in BOARDS},
    }


if __name__ == "__main__":
    for path, text in files().items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text)
