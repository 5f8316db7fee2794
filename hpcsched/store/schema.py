"""The tables, for SQLAlchemy Core.

Times are Unix seconds. Lists and composite values are JSON text.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Float, ForeignKey, Index, Integer, LargeBinary, MetaData, Table, Text

metadata = MetaData()

meta = Table(
    "meta",
    metadata,
    Column("key", Text, primary_key=True),
    Column("value", Text, nullable=False),
    sqlite_with_rowid=False,
)

# Environments of jobs, each once: they are most of a specification, and jobs of a user share them.
environments = Table(
    "environments",
    metadata,
    Column("sha256", Text, primary_key=True),
    Column("env", Text, nullable=False),  # JSON of JobSpec.env
)

specs = Table(
    "specs",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("spec", Text, nullable=False),  # without its environment and fields that have their default
    Column("env_sha256", Text, nullable=False),  # "": an empty environment
)

scripts = Table(
    "scripts",
    metadata,
    Column("sha256", Text, primary_key=True),
    Column("text", LargeBinary, nullable=False),
)

# Waiting jobs that have not changed since they were submitted: they have no row in `jobs`. A row here
# is a job, or all tasks of an array, of which those that have changed are in `jobs`.
submissions = Table(
    "submissions",
    metadata,
    Column("id", Integer, primary_key=True),  # of the job, or of the array's first task
    Column("last_id", Integer, nullable=False),
    Column("spec_id", Integer, ForeignKey("specs.id"), nullable=False),
    Column("name", Text, nullable=False),  # of the spec, repeated here for searches of the history
    Column("uid", Integer, nullable=False),
    Column("user", Text, nullable=False),
    Column("submitted_at_s", Float, nullable=False),
    Column("partition", Text, nullable=False),
    Column("time_limit_s", Integer),
)

jobs = Table(
    "jobs",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("spec_id", Integer, ForeignKey("specs.id"), nullable=False),
    Column("array_job_id", Integer),
    Column("array_task_id", Integer),
    Column("name", Text, nullable=False),  # of the spec, repeated here for searches of the history
    Column("uid", Integer, nullable=False),
    Column("user", Text, nullable=False),
    Column("account", Text, nullable=False),
    Column("submitted_at_s", Float, nullable=False),
    Column("state", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("reason_detail", Text, nullable=False),
    Column("hold", Text, nullable=False),
    Column("priority_set", Integer),
    Column("nice", Integer, nullable=False),
    Column("time_limit_s", Integer),
    Column("partition", Text, nullable=False),
    Column("eligible_at_s", Float),
    Column("not_before_s", Float),
    Column("attempt", Integer, nullable=False),
    Column("token", Text, nullable=False),
    Column("shares", Text, nullable=False),
    Column("held_nodes", Text, nullable=False),
    Column("claimed_nodes", Text, nullable=False),
    Column("lease_s", Float),
    Column("allocated_at_s", Float),
    Column("started_at_s", Float),
    Column("ended_at_s", Float),
    Column("exit_code", Integer),
    Column("exit_signal", Integer),
    Column("outcome", Text),
    Column("requeue_wanted", Integer, nullable=False),
    Column("ended_by_uid", Integer),
    Column("restarts", Integer, nullable=False),
    Column("suspended_at_s", Float),
    Column("suspended_s", Float),
    Column("suspended_for", Integer),
    Column("preempted_by", Integer),
    Column("save_s", Float),
    Column("reserved_shares", Text, nullable=False),
    Column("leaving", Text, nullable=False),
    Column("joining", Text, nullable=False),
    Column("left_nodes", Text, nullable=False),
    Column("wanted_nodes", Text, nullable=False),
    Column("generation", Integer, nullable=False),
    Column("charged_until_s", Float),
    Column("charged_cpu_s", Float, nullable=False),
    Column("charged_mem_mib_s", Float, nullable=False),
    Column("charged_gpu_s", Float, nullable=False),
    # Changes since submission; NULL: as in the spec.
    Column("partition_asked", Text, nullable=False),
    Column("dependency_set", Text),
    Column("array_limit_set", Integer),
    Column("deadline_set_s", Integer),
    Column("reservation_set", Text),
    Column("account_set", Text),
    Column("qos_set", Text),
    Column("time_min_set_s", Integer),
    Column("asked_limit_s", Integer),  # before the limit was lowered
    Column("site", Integer, nullable=False),  # the admin's addition to the priority
    Column("aged_s", Float, nullable=False),
    Column("barred_nodes", Text, nullable=False),
    Column("wanted_at_s", Float),
    Column("deaths", Integer, nullable=False),  # attempts that ended because a rank was killed
    Column("saved_step", Integer, nullable=False),  # of the last checkpoint of those attempts
    Column("refusals", Text, nullable=False),  # JSON of hpcsched.model.job.Refusal
    Index("jobs_by_state", "state"),
    Index("jobs_by_end", "ended_at_s"),
    Index("jobs_by_array", "array_job_id"),
)

events = Table(
    "events",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("at_s", Float, nullable=False),
    Column("job_id", Integer, nullable=False),
    Column("kind", Text, nullable=False),
    Column("data", Text, nullable=False),
    Index("events_by_job", "job_id"),
)

node_events = Table(
    "node_events",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("at_s", Float, nullable=False),
    Column("node", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("data", Text, nullable=False),
    Index("node_events_by_node", "node"),
)

nodes = Table(
    "nodes",
    metadata,
    Column("name", Text, primary_key=True),
    Column("drained", Integer, nullable=False),
    Column("drained_why", Text, nullable=False),
    Column("drained_by", Text, nullable=False),
    Column("drained_at_s", Float),
    Column("boot_id", Text, nullable=False),
    Column("machine_id", Text, nullable=False),
    Column("link_since_s", Float, nullable=False),
    Column("link_why", Text, nullable=False),
    Column("spool", Text, nullable=False),
    Column("hardware", Text, nullable=False),
    Column("reach", Text, nullable=False),  # JSON of the address part of its description
    Column("launch_failures", Text, nullable=False),  # JSON of hpcsched.model.node.LaunchFailure
    Column("has_orphans", Integer, nullable=False),
)

steps = Table(
    "steps",
    metadata,
    Column("job_id", Integer, primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("step", Text, primary_key=True),  # "batch" or a number
    Column("name", Text, nullable=False),
    Column("nodes", Text, nullable=False),
    Column("ntasks", Integer, nullable=False),
    Column("started_at_s", Float),
    Column("ended_at_s", Float),
    Column("state", Text, nullable=False),
    Column("exit_code", Integer),
    Column("exit_signal", Integer),
    Column("cpu_user_s", Float),
    Column("cpu_system_s", Float),
    Column("max_rss_kib", Integer),  # of the task with the highest value
    Column("disk_read_bytes", BigInteger),
    Column("disk_write_bytes", BigInteger),
    Column("kept", Text),  # JSON of hpcsched.steps.service
    sqlite_with_rowid=False,
)

requests = Table(
    "requests",
    metadata,
    Column("uid", Integer, primary_key=True),
    Column("request_id", Text, primary_key=True),
    Column("job_ids", Text, nullable=False),
    Column("at_s", Float, nullable=False),
    sqlite_with_rowid=False,
)

usage = Table(
    "usage",
    metadata,
    Column("account", Text, primary_key=True),
    Column("user", Text, primary_key=True),
    Column("qos", Text, primary_key=True),
    Column("at_s", Float, nullable=False),
    Column("amounts", Text, nullable=False),
    sqlite_with_rowid=False,
)

training = Table(
    "training",
    metadata,
    Column("job_id", Integer, primary_key=True),
    Column("attempt", Integer, nullable=False),
    Column("at_s", Float, nullable=False),
    Column("step", Integer, nullable=False),
    Column("total_steps", Integer, nullable=False),
    Column("loss", Float),
    Column("samples_per_s", Float, nullable=False),
    Column("steps_per_s", Float, nullable=False),
    Column("checkpoint_step", Integer, nullable=False),
    Column("checkpoint_at_s", Float),
    Column("note", Text, nullable=False),
    Column("goodput", Float),
    Column("directory", Text, nullable=False),
)

failures = Table(
    "failures",
    metadata,
    Column("job_id", Integer, primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("rank", Integer, primary_key=True),
    Column("ranks", Integer, nullable=False),
    Column("node", Text, nullable=False),
    Column("at_s", Float, nullable=False),
    Column("echo", Integer, nullable=False),
    Column("text", Text, nullable=False),
    sqlite_with_rowid=False,
)

reservations = Table(
    "reservations",
    metadata,
    Column("name", Text, primary_key=True),
    Column("start_s", Integer, nullable=False),  # of the present or next occurrence
    Column("end_s", Integer, nullable=False),
    Column("nodes", Text, nullable=False),
    Column("users", Text, nullable=False),
    Column("accounts", Text, nullable=False),
    Column("partition", Text, nullable=False),
    Column("features", Text, nullable=False),
    Column("node_count", Integer, nullable=False),
    Column("flags", Text, nullable=False),
    Column("made_by", Text, nullable=False),
    Column("made_at_s", Float, nullable=False),
)

crontabs = Table(
    "crontabs",
    metadata,
    Column("uid", Integer, primary_key=True),
    Column("user", Text, nullable=False),
    Column("text", Text, nullable=False),
    Column("entries", Text, nullable=False),  # JSON, as `hpcsched.model.cron.Entry`
)

triggers = Table(
    "triggers",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("value", Text, nullable=False),  # JSON, as `hpcsched.model.trigger.Trigger`
)
