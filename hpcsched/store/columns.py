"""Column names of the tables: a class of rows for each table, in statement order.

For reads at the start and writes of each tick, which must not wait for SQLAlchemy.
`hpcsched.store.schema` describes each column.
"""

from __future__ import annotations

from collections import namedtuple

Meta = namedtuple("Meta", "key value")
Specs = namedtuple("Specs", "id spec")
Scripts = namedtuple("Scripts", "sha256 text")
Jobs = namedtuple(
    "Jobs",
    "id spec_id array_job_id array_task_id name uid user account submitted_at_s state reason "
    "reason_detail hold priority_set nice time_limit_s partition eligible_at_s not_before_s attempt token "
    "shares held_nodes claimed_nodes lease_s allocated_at_s started_at_s ended_at_s exit_code exit_signal "
    "outcome requeue_wanted ended_by_uid restarts suspended_at_s suspended_s suspended_for preempted_by "
    "save_s reserved_shares leaving joining left_nodes wanted_nodes generation charged_until_s charged_cpu_s "
    "charged_mem_mib_s charged_gpu_s partition_asked dependency_set array_limit_set deadline_set_s "
    "reservation_set account_set qos_set time_min_set_s asked_limit_s site aged_s barred_nodes wanted_at_s "
    "deaths saved_step refusals",
)
Events = namedtuple("Events", "seq at_s job_id kind data")
Node_Events = namedtuple("Node_Events", "seq at_s node kind data")
Nodes = namedtuple(
    "Nodes",
    "name drained drained_why drained_by drained_at_s boot_id machine_id link_since_s link_why spool hardware reach "
    "launch_failures has_orphans",
)
Steps = namedtuple(
    "Steps",
    "job_id attempt step name nodes ntasks started_at_s ended_at_s state exit_code exit_signal cpu_user_s "
    "cpu_system_s max_rss_kib disk_read_bytes disk_write_bytes kept",
)
Requests = namedtuple("Requests", "uid request_id job_ids at_s")
Usage = namedtuple("Usage", "account user qos at_s amounts")
Training = namedtuple(
    "Training",
    "job_id attempt at_s step total_steps loss samples_per_s steps_per_s checkpoint_step checkpoint_at_s note goodput "
    "directory",
)
Failures = namedtuple("Failures", "job_id attempt rank ranks node at_s echo text")
Reservations = namedtuple(
    "Reservations",
    "name start_s end_s nodes users accounts partition features node_count flags made_by made_at_s",
)
Crontabs = namedtuple("Crontabs", "uid user text entries")
Triggers = namedtuple("Triggers", "id value")
