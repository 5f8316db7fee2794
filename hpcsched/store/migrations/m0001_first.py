"""The first schema: jobs, their specs and events, nodes, steps, request ids."""

from __future__ import annotations

from sqlite3 import Connection

STATEMENTS = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE specs (id INTEGER PRIMARY KEY, spec TEXT NOT NULL)",
    """CREATE TABLE jobs (
        id INTEGER PRIMARY KEY, spec_id INTEGER NOT NULL REFERENCES specs(id),
        array_job_id INTEGER, array_task_id INTEGER, name TEXT NOT NULL,
        uid INTEGER NOT NULL, user TEXT NOT NULL, account TEXT NOT NULL, submitted_at_s REAL NOT NULL,
        state TEXT NOT NULL, reason TEXT NOT NULL, reason_detail TEXT NOT NULL, hold TEXT NOT NULL,
        priority_set INTEGER, nice INTEGER NOT NULL, time_limit_s INTEGER, partition TEXT NOT NULL,
        eligible_at_s REAL, not_before_s REAL, attempt INTEGER NOT NULL, token TEXT NOT NULL,
        shares TEXT NOT NULL, held_nodes TEXT NOT NULL, claimed_nodes TEXT NOT NULL, lease_s REAL,
        allocated_at_s REAL, started_at_s REAL, ended_at_s REAL, exit_code INTEGER, exit_signal INTEGER,
        outcome TEXT, requeue_wanted INTEGER NOT NULL, ended_by_uid INTEGER, restarts INTEGER NOT NULL,
        charged_cpu_s REAL NOT NULL, charged_mem_mib_s REAL NOT NULL, charged_gpu_s REAL NOT NULL)""",
    "CREATE INDEX jobs_by_state ON jobs (state)",
    "CREATE INDEX jobs_by_end ON jobs (ended_at_s)",
    "CREATE INDEX jobs_by_array ON jobs (array_job_id)",
    """CREATE TABLE events (
        seq INTEGER PRIMARY KEY, at_s REAL NOT NULL, job_id INTEGER NOT NULL, kind TEXT NOT NULL, data TEXT NOT
        NULL)""",
    "CREATE INDEX events_by_job ON events (job_id)",
    """CREATE TABLE nodes (
        name TEXT PRIMARY KEY, drained INTEGER NOT NULL, drained_why TEXT NOT NULL, drained_by TEXT NOT NULL,
        drained_at_s REAL, boot_id TEXT NOT NULL, machine_id TEXT NOT NULL, link_since_s REAL NOT NULL,
        link_why TEXT NOT NULL)""",
    """CREATE TABLE steps (
        job_id INTEGER NOT NULL, attempt INTEGER NOT NULL, step TEXT NOT NULL, name TEXT NOT NULL, nodes TEXT NOT NULL,
        ntasks INTEGER NOT NULL, started_at_s REAL, ended_at_s REAL, state TEXT NOT NULL, exit_code INTEGER,
        exit_signal INTEGER, cpu_user_s REAL, cpu_system_s REAL, max_rss_kib INTEGER,
        PRIMARY KEY (job_id, attempt, step)) WITHOUT ROWID""",
    """CREATE TABLE requests (
        uid INTEGER NOT NULL, request_id TEXT NOT NULL, job_ids TEXT NOT NULL, at_s REAL NOT NULL,
        PRIMARY KEY (uid, request_id)) WITHOUT ROWID""",
)


def upgrade(connection: Connection) -> None:
    """Make the tables in an empty database."""
    for statement in STATEMENTS:
        connection.execute(statement)
