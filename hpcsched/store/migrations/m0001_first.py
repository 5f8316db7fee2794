"""The first schema."""

from __future__ import annotations

from sqlite3 import Connection

STATEMENTS = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE specs (id INTEGER PRIMARY KEY, spec TEXT NOT NULL)",
    """CREATE TABLE jobs (
        id INTEGER PRIMARY KEY, spec_id INTEGER NOT NULL REFERENCES specs(id), array_job_id INTEGER,
        array_task_id INTEGER, name TEXT NOT NULL, uid INTEGER NOT NULL, user TEXT NOT NULL,
        account TEXT NOT NULL, submitted_at_s REAL NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL,
        reason_detail TEXT NOT NULL, hold TEXT NOT NULL, priority_set INTEGER, nice INTEGER NOT NULL,
        time_limit_s INTEGER, partition TEXT NOT NULL, eligible_at_s REAL, not_before_s REAL,
        attempt INTEGER NOT NULL, token TEXT NOT NULL, shares TEXT NOT NULL, held_nodes TEXT NOT NULL,
        claimed_nodes TEXT NOT NULL, lease_s REAL, allocated_at_s REAL, started_at_s REAL, ended_at_s REAL,
        exit_code INTEGER, exit_signal INTEGER, outcome TEXT, requeue_wanted INTEGER NOT NULL,
        ended_by_uid INTEGER, restarts INTEGER NOT NULL, charged_cpu_s REAL NOT NULL,
        charged_mem_mib_s REAL NOT NULL, charged_gpu_s REAL NOT NULL, partition_asked TEXT NOT NULL DEFAULT '',
        dependency_set TEXT, array_limit_set INTEGER, deadline_set_s INTEGER, reservation_set TEXT,
        suspended_at_s REAL, suspended_s REAL, suspended_for INTEGER, preempted_by INTEGER, save_s REAL,
        reserved_shares TEXT NOT NULL DEFAULT '[]', charged_until_s REAL, leaving TEXT NOT NULL DEFAULT '[]',
        joining TEXT NOT NULL DEFAULT '[]', left_nodes TEXT NOT NULL DEFAULT '[]',
        wanted_nodes TEXT NOT NULL DEFAULT '[]', generation INTEGER NOT NULL DEFAULT 0, account_set TEXT,
        qos_set TEXT, time_min_set_s INTEGER, asked_limit_s INTEGER, site INTEGER NOT NULL DEFAULT 0,
        aged_s REAL NOT NULL DEFAULT 0, barred_nodes TEXT NOT NULL DEFAULT '[]', wanted_at_s REAL,
        refusals TEXT NOT NULL DEFAULT '[]', deaths INTEGER NOT NULL DEFAULT 0,
        saved_step INTEGER NOT NULL DEFAULT 0)""",
    "CREATE INDEX jobs_by_state ON jobs (state)",
    "CREATE INDEX jobs_by_end ON jobs (ended_at_s)",
    "CREATE INDEX jobs_by_array ON jobs (array_job_id)",
    """CREATE TABLE events (
        seq INTEGER PRIMARY KEY, at_s REAL NOT NULL, job_id INTEGER NOT NULL, kind TEXT NOT NULL,
        data TEXT NOT NULL)""",
    "CREATE INDEX events_by_job ON events (job_id)",
    """CREATE TABLE node_events (
        seq INTEGER PRIMARY KEY, at_s REAL NOT NULL, node TEXT NOT NULL, kind TEXT NOT NULL, data TEXT NOT NULL
    )""",
    "CREATE INDEX node_events_by_node ON node_events (node)",
    """CREATE TABLE nodes (
        name TEXT PRIMARY KEY, drained INTEGER NOT NULL, drained_why TEXT NOT NULL, drained_by TEXT NOT NULL,
        drained_at_s REAL, boot_id TEXT NOT NULL, machine_id TEXT NOT NULL, link_since_s REAL NOT NULL,
        link_why TEXT NOT NULL, spool TEXT NOT NULL DEFAULT '', hardware TEXT NOT NULL DEFAULT '',
        reach TEXT NOT NULL DEFAULT '', launch_failures TEXT NOT NULL DEFAULT '[]',
        has_orphans INTEGER NOT NULL DEFAULT 0)""",
    """CREATE TABLE steps (
        job_id INTEGER NOT NULL, attempt INTEGER NOT NULL, step TEXT NOT NULL, name TEXT NOT NULL,
        nodes TEXT NOT NULL, ntasks INTEGER NOT NULL, started_at_s REAL, ended_at_s REAL, state TEXT NOT NULL,
        exit_code INTEGER, exit_signal INTEGER, cpu_user_s REAL, cpu_system_s REAL, max_rss_kib INTEGER,
        disk_read_bytes INTEGER, disk_write_bytes INTEGER, kept TEXT, PRIMARY KEY (job_id, attempt,
        step)) WITHOUT ROWID""",
    """CREATE TABLE requests (
        uid INTEGER NOT NULL, request_id TEXT NOT NULL, job_ids TEXT NOT NULL, at_s REAL NOT NULL,
        PRIMARY KEY (uid, request_id)) WITHOUT ROWID""",
    """CREATE TABLE usage (
        account TEXT NOT NULL, user TEXT NOT NULL, qos TEXT NOT NULL, at_s REAL NOT NULL, amounts TEXT NOT NULL,
        PRIMARY KEY (account, user, qos)) WITHOUT ROWID""",
    """CREATE TABLE reservations (
        name TEXT PRIMARY KEY, start_s INTEGER NOT NULL, end_s INTEGER NOT NULL, nodes TEXT NOT NULL,
        users TEXT NOT NULL, accounts TEXT NOT NULL, partition TEXT NOT NULL, features TEXT NOT NULL,
        node_count INTEGER NOT NULL, flags TEXT NOT NULL, made_by TEXT NOT NULL, made_at_s REAL NOT NULL)""",
    """CREATE TABLE training (
        job_id INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, at_s REAL NOT NULL, step INTEGER NOT NULL,
        total_steps INTEGER NOT NULL, loss REAL, samples_per_s REAL NOT NULL, steps_per_s REAL NOT NULL,
        checkpoint_step INTEGER NOT NULL, checkpoint_at_s REAL, note TEXT NOT NULL, goodput REAL,
        directory TEXT NOT NULL DEFAULT '')""",
    """CREATE TABLE failures (
        job_id INTEGER NOT NULL, attempt INTEGER NOT NULL, rank INTEGER NOT NULL, ranks INTEGER NOT NULL,
        node TEXT NOT NULL, at_s REAL NOT NULL, echo INTEGER NOT NULL, text TEXT NOT NULL, PRIMARY KEY (job_id,
        attempt, rank)) WITHOUT ROWID""",
    "CREATE TABLE scripts (sha256 TEXT PRIMARY KEY, text BLOB NOT NULL)",
    """CREATE TABLE crontabs (
        uid INTEGER PRIMARY KEY, user TEXT NOT NULL, text TEXT NOT NULL, entries TEXT NOT NULL)""",
    "CREATE TABLE triggers (id INTEGER PRIMARY KEY, value TEXT NOT NULL)",
)


def upgrade(connection: Connection) -> None:
    """Create the tables in an empty database."""
    for statement in STATEMENTS:
        connection.execute(statement)
