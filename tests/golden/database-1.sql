-- A database of version 0.1.0 (schema 1), as sqlite3's .dump writes it. Recorded once; never changed.
PRAGMA application_id = 1752195955;
BEGIN TRANSACTION;
CREATE TABLE crontabs (
        uid INTEGER PRIMARY KEY, user TEXT NOT NULL, text TEXT NOT NULL, entries TEXT NOT NULL);
CREATE TABLE events (
         seq INTEGER PRIMARY KEY, at_s REAL NOT NULL, job_id INTEGER NOT NULL, kind TEXT NOT NULL, data TEXT NOT
        NULL);
INSERT INTO "events" VALUES(1,1000000.0,1,'Submitted','{"spec_id":1,"uid":1000,"user":"ann","partition":"main","time_limit_s":null}');
INSERT INTO "events" VALUES(2,1000000.0,1,'Allocated','{"token":"25eae5ba16077762.1.0.batch.n1.00000000000000000000000000000001","epoch":1,"shares":[["n1",1,2000,[],1]]}');
INSERT INTO "events" VALUES(3,1000000.0,1,'Started','{}');
INSERT INTO "events" VALUES(4,1000005.0,1,'Exited','{"node":"n1","exit":[0,0],"ran_s":4.0,"timed_out":false,"out_of_memory":false,"requeue":false}');
INSERT INTO "events" VALUES(5,1000005.0,2,'Submitted','{"spec_id":2,"uid":1000,"user":"ann","partition":"main","time_limit_s":null}');
INSERT INTO "events" VALUES(6,1000005.0,2,'Allocated','{"token":"25eae5ba16077762.2.0.batch.n1.00000000000000000000000000000002","epoch":1,"shares":[["n1",2,4000,[],1]]}');
INSERT INTO "events" VALUES(7,1000005.0,2,'Started','{}');
INSERT INTO "events" VALUES(8,1000005.0,3,'Submitted','{"spec_id":3,"uid":1001,"user":"bob","partition":"main","time_limit_s":null}');
INSERT INTO "events" VALUES(9,1000005.0,3,'Allocated','{"token":"25eae5ba16077762.3.0.batch.n2.00000000000000000000000000000003","epoch":1,"shares":[["n2",1,2000,[],1]]}');
INSERT INTO "events" VALUES(10,1000005.0,3,'Started','{}');
INSERT INTO "events" VALUES(11,1000008.0,3,'Exited','{"node":"n2","exit":[3,0],"timed_out":false,"out_of_memory":false,"requeue":false}');
INSERT INTO "events" VALUES(12,1000008.0,4,'Submitted','{"spec_id":4,"uid":1000,"user":"ann","partition":"main","time_limit_s":null}');
INSERT INTO "events" VALUES(13,1000008.0,4,'Allocated','{"token":"25eae5ba16077762.4.0.batch.n2.00000000000000000000000000000004","epoch":1,"shares":[["n2",2,4000,[],1]]}');
INSERT INTO "events" VALUES(14,1000008.0,4,'Started','{}');
INSERT INTO "events" VALUES(15,1000008.0,5,'Submitted','{"spec_id":5,"uid":1000,"user":"ann","partition":"main","time_limit_s":null}');
INSERT INTO "events" VALUES(16,1000008.0,7,'Submitted','{"spec_id":6,"uid":1001,"user":"bob","partition":"main","time_limit_s":null}');
CREATE TABLE failures (
         job_id INTEGER NOT NULL, attempt INTEGER NOT NULL, rank INTEGER NOT NULL, ranks INTEGER NOT NULL, node TEXT
        NOT NULL, at_s REAL NOT NULL, echo INTEGER NOT NULL, text TEXT NOT NULL, PRIMARY KEY (job_id, attempt,
        rank)) WITHOUT ROWID;
CREATE TABLE jobs (
         id INTEGER PRIMARY KEY, spec_id INTEGER NOT NULL REFERENCES specs(id), array_job_id INTEGER, array_task_id
        INTEGER, name TEXT NOT NULL, uid INTEGER NOT NULL, user TEXT NOT NULL, account TEXT NOT NULL, submitted_at_s
        REAL NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL, reason_detail TEXT NOT NULL, hold TEXT NOT NULL,
        priority_set INTEGER, nice INTEGER NOT NULL, time_limit_s INTEGER, partition TEXT NOT NULL, eligible_at_s
        REAL, not_before_s REAL, attempt INTEGER NOT NULL, token TEXT NOT NULL, shares TEXT NOT NULL, held_nodes
        TEXT NOT NULL, claimed_nodes TEXT NOT NULL, lease_s REAL, allocated_at_s REAL, started_at_s REAL, ended_at_s
        REAL, exit_code INTEGER, exit_signal INTEGER, outcome TEXT, requeue_wanted INTEGER NOT NULL, ended_by_uid
        INTEGER, restarts INTEGER NOT NULL, charged_cpu_s REAL NOT NULL, charged_mem_mib_s REAL NOT NULL,
        charged_gpu_s REAL NOT NULL, partition_asked TEXT NOT NULL DEFAULT '', dependency_set TEXT, array_limit_set
        INTEGER, deadline_set_s INTEGER, reservation_set TEXT, suspended_at_s REAL, suspended_s REAL, suspended_for
        INTEGER, preempted_by INTEGER, save_s REAL, reserved_shares TEXT NOT NULL DEFAULT '[]', charged_until_s REAL,
        leaving TEXT NOT NULL DEFAULT '[]', joining TEXT NOT NULL DEFAULT '[]', left_nodes TEXT NOT NULL DEFAULT
        '[]', wanted_nodes TEXT NOT NULL DEFAULT '[]', generation INTEGER NOT NULL DEFAULT 0, account_set TEXT,
        qos_set TEXT, time_min_set_s INTEGER, asked_limit_s INTEGER, site INTEGER NOT NULL DEFAULT 0, aged_s REAL
        NOT NULL DEFAULT 0, barred_nodes TEXT NOT NULL DEFAULT '[]', wanted_at_s REAL, refusals TEXT NOT NULL
        DEFAULT '[]', deaths INTEGER NOT NULL DEFAULT 0, saved_step INTEGER NOT NULL DEFAULT 0);
INSERT INTO "jobs" VALUES(1,1,NULL,NULL,'done',1000,'ann','',1000000.0,'COMPLETED','None','','none',NULL,0,NULL,'main',1000000.0,NULL,0,'25eae5ba16077762.1.0.batch.n1.00000000000000000000000000000001','[["n1", 1, 2000, [], 1]]','[]','[]',NULL,1000000.0,1000000.0,1000004.0,0,0,'COMPLETED',0,NULL,0,5.0,10000.0,0.0,'',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,'[]',NULL,'[]','[]','[]','[]',0,NULL,NULL,NULL,NULL,0,0.0,'[]',NULL,'[]',0,0);
INSERT INTO "jobs" VALUES(2,2,NULL,NULL,'running',1000,'ann','',1000005.0,'RUNNING','None','','none',NULL,0,NULL,'main',1000005.0,NULL,0,'25eae5ba16077762.2.0.batch.n1.00000000000000000000000000000002','[["n1", 2, 4000, [], 1]]','["n1"]','[]',NULL,1000005.0,1000005.0,NULL,NULL,NULL,NULL,0,NULL,0,0.0,0.0,0.0,'',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,'[]',NULL,'[]','[]','[]','[]',0,NULL,NULL,NULL,NULL,0,0.0,'[]',NULL,'[]',0,0);
INSERT INTO "jobs" VALUES(3,3,NULL,NULL,'failed',1001,'bob','',1000005.0,'FAILED','NonZeroExitCode','','none',NULL,0,NULL,'main',1000005.0,NULL,0,'25eae5ba16077762.3.0.batch.n2.00000000000000000000000000000003','[["n2", 1, 2000, [], 1]]','[]','[]',NULL,1000005.0,1000005.0,1000008.0,3,0,'FAILED',0,NULL,0,3.0,6000.0,0.0,'',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,'[]',NULL,'[]','[]','[]','[]',0,NULL,NULL,NULL,NULL,0,0.0,'[]',NULL,'[]',0,0);
INSERT INTO "jobs" VALUES(4,4,NULL,NULL,'other',1000,'ann','',1000008.0,'RUNNING','None','','none',NULL,0,NULL,'main',1000008.0,NULL,0,'25eae5ba16077762.4.0.batch.n2.00000000000000000000000000000004','[["n2", 2, 4000, [], 1]]','["n2"]','[]',NULL,1000008.0,1000008.0,NULL,NULL,NULL,NULL,0,NULL,0,0.0,0.0,0.0,'',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,'[]',NULL,'[]','[]','[]','[]',0,NULL,NULL,NULL,NULL,0,0.0,'[]',NULL,'[]',0,0);
INSERT INTO "jobs" VALUES(5,5,5,1,'array',1000,'ann','',1000008.0,'PENDING','None','','none',NULL,0,NULL,'main',1000008.0,NULL,0,'','[]','[]','[]',NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,NULL,0,0.0,0.0,0.0,'',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,'[]',NULL,'[]','[]','[]','[]',0,NULL,NULL,NULL,NULL,0,0.0,'[]',NULL,'[]',0,0);
INSERT INTO "jobs" VALUES(6,5,5,4,'array',1000,'ann','',1000008.0,'PENDING','None','','none',NULL,0,NULL,'main',1000008.0,NULL,0,'','[]','[]','[]',NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,NULL,0,0.0,0.0,0.0,'',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,'[]',NULL,'[]','[]','[]','[]',0,NULL,NULL,NULL,NULL,0,0.0,'[]',NULL,'[]',0,0);
INSERT INTO "jobs" VALUES(7,6,NULL,NULL,'held',1001,'bob','',1000008.0,'PENDING','None','','user',NULL,0,NULL,'main',NULL,NULL,0,'','[]','[]','[]',NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,NULL,0,0.0,0.0,0.0,'',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,'[]',NULL,'[]','[]','[]','[]',0,NULL,NULL,NULL,NULL,0,0.0,'[]',NULL,'[]',0,0);
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO "meta" VALUES('epoch','1');
INSERT INTO "meta" VALUES('incarnation','25eae5ba16077762');
CREATE TABLE nodes (
         name TEXT PRIMARY KEY, drained INTEGER NOT NULL, drained_why TEXT NOT NULL, drained_by TEXT NOT NULL,
        drained_at_s REAL, boot_id TEXT NOT NULL, machine_id TEXT NOT NULL, link_since_s REAL NOT NULL, link_why
        TEXT NOT NULL, spool TEXT NOT NULL DEFAULT '', hardware TEXT NOT NULL DEFAULT '', reach TEXT NOT NULL
        DEFAULT '', launch_failures TEXT NOT NULL DEFAULT '[]', has_orphans INTEGER NOT NULL DEFAULT 0);
INSERT INTO "nodes" VALUES('n1',0,'','',NULL,'boot-1','',1000000.0,'','','','','[]',0);
INSERT INTO "nodes" VALUES('n2',1,'a fan','root',1000008.0,'boot-1','',1000000.0,'','','','','[]',0);
CREATE TABLE requests (
         uid INTEGER NOT NULL, request_id TEXT NOT NULL, job_ids TEXT NOT NULL, at_s REAL NOT NULL, PRIMARY KEY
        (uid, request_id)) WITHOUT ROWID;
INSERT INTO "requests" VALUES(1000,'one','[1]',1000000.0);
CREATE TABLE reservations (
         name TEXT PRIMARY KEY, start_s INTEGER NOT NULL, end_s INTEGER NOT NULL, nodes TEXT NOT NULL, users TEXT
        NOT NULL, accounts TEXT NOT NULL, partition TEXT NOT NULL, features TEXT NOT NULL, node_count INTEGER NOT
        NULL, flags TEXT NOT NULL, made_by TEXT NOT NULL, made_at_s REAL NOT NULL);
CREATE TABLE scripts (sha256 TEXT PRIMARY KEY, text BLOB NOT NULL);
INSERT INTO "scripts" VALUES('bfdeaeb08cffb6a36438bcd12dda25417e3cdd36f1e7e482a2849d539225288b',X'23212F62696E2F73680A6563686F2068656C6C6F0A');
CREATE TABLE specs (id INTEGER PRIMARY KEY, spec TEXT NOT NULL);
INSERT INTO "specs" VALUES(1,'{"name":"done","script":"","work_dir":"/tmp","script_args":[],"script_sha256":"bfdeaeb08cffb6a36438bcd12dda25417e3cdd36f1e7e482a2849d539225288b","script_bytes":21,"env":[],"submit_line":"","submit_dir":"","submit_host":"","account":"","partition":"","qos":"","comment":"","stdout":"","stderr":"","stdin":"","open_mode":"","time_limit_s":null,"nodes_min":1,"nodes_max":1,"nodes_given":false,"ntasks":null,"ntasks_per_node":null,"cpus_per_task":1,"cpus_per_task_given":false,"mem_per_node_mib":null,"mem_per_cpu_mib":null,"gpus_per_node":[],"gpus_total":[],"gpus_per_task":[],"exclusive":false,"nodelist":[],"exclude":[],"constraint":"","array":null,"dependency":[],"dependency_any":false,"begin_at_s":null,"hold":false,"nice":0,"priority":null,"requeue":null,"signal":null,"lease":"keep","mail_user":"","mail_type":[]}');
INSERT INTO "specs" VALUES(2,'{"name":"running","script":"","work_dir":"/tmp","script_args":[],"script_sha256":"bfdeaeb08cffb6a36438bcd12dda25417e3cdd36f1e7e482a2849d539225288b","script_bytes":21,"env":[],"submit_line":"","submit_dir":"","submit_host":"","account":"","partition":"","qos":"","comment":"","stdout":"","stderr":"","stdin":"","open_mode":"","time_limit_s":null,"nodes_min":1,"nodes_max":1,"nodes_given":true,"ntasks":null,"ntasks_per_node":null,"cpus_per_task":2,"cpus_per_task_given":false,"mem_per_node_mib":null,"mem_per_cpu_mib":null,"gpus_per_node":[],"gpus_total":[],"gpus_per_task":[],"exclusive":false,"nodelist":[],"exclude":[],"constraint":"","array":null,"dependency":[],"dependency_any":false,"begin_at_s":null,"hold":false,"nice":0,"priority":null,"requeue":null,"signal":null,"lease":"keep","mail_user":"","mail_type":[]}');
INSERT INTO "specs" VALUES(3,'{"name":"failed","script":"","work_dir":"/tmp","script_args":[],"script_sha256":"bfdeaeb08cffb6a36438bcd12dda25417e3cdd36f1e7e482a2849d539225288b","script_bytes":21,"env":[],"submit_line":"","submit_dir":"","submit_host":"","account":"","partition":"","qos":"","comment":"","stdout":"","stderr":"","stdin":"","open_mode":"","time_limit_s":null,"nodes_min":1,"nodes_max":1,"nodes_given":false,"ntasks":null,"ntasks_per_node":null,"cpus_per_task":1,"cpus_per_task_given":false,"mem_per_node_mib":null,"mem_per_cpu_mib":null,"gpus_per_node":[],"gpus_total":[],"gpus_per_task":[],"exclusive":false,"nodelist":[],"exclude":[],"constraint":"","array":null,"dependency":[],"dependency_any":false,"begin_at_s":null,"hold":false,"nice":0,"priority":null,"requeue":null,"signal":null,"lease":"keep","mail_user":"","mail_type":[]}');
INSERT INTO "specs" VALUES(4,'{"name":"other","script":"","work_dir":"/tmp","script_args":[],"script_sha256":"bfdeaeb08cffb6a36438bcd12dda25417e3cdd36f1e7e482a2849d539225288b","script_bytes":21,"env":[],"submit_line":"","submit_dir":"","submit_host":"","account":"","partition":"","qos":"","comment":"","stdout":"","stderr":"","stdin":"","open_mode":"","time_limit_s":null,"nodes_min":1,"nodes_max":1,"nodes_given":false,"ntasks":null,"ntasks_per_node":null,"cpus_per_task":2,"cpus_per_task_given":false,"mem_per_node_mib":null,"mem_per_cpu_mib":null,"gpus_per_node":[],"gpus_total":[],"gpus_per_task":[],"exclusive":false,"nodelist":[],"exclude":[],"constraint":"","array":null,"dependency":[],"dependency_any":false,"begin_at_s":null,"hold":false,"nice":0,"priority":null,"requeue":null,"signal":null,"lease":"keep","mail_user":"","mail_type":[]}');
INSERT INTO "specs" VALUES(5,'{"name":"array","script":"","work_dir":"/tmp","script_args":[],"script_sha256":"bfdeaeb08cffb6a36438bcd12dda25417e3cdd36f1e7e482a2849d539225288b","script_bytes":21,"env":[],"submit_line":"","submit_dir":"","submit_host":"","account":"","partition":"","qos":"","comment":"","stdout":"","stderr":"","stdin":"","open_mode":"","time_limit_s":null,"nodes_min":1,"nodes_max":1,"nodes_given":false,"ntasks":null,"ntasks_per_node":null,"cpus_per_task":1,"cpus_per_task_given":false,"mem_per_node_mib":null,"mem_per_cpu_mib":null,"gpus_per_node":[],"gpus_total":[],"gpus_per_task":[],"exclusive":false,"nodelist":[],"exclude":[],"constraint":"","array":{"indices":[1,4],"limit":1},"dependency":[],"dependency_any":false,"begin_at_s":null,"hold":false,"nice":0,"priority":null,"requeue":null,"signal":null,"lease":"keep","mail_user":"","mail_type":[]}');
INSERT INTO "specs" VALUES(6,'{"name":"held","script":"","work_dir":"/tmp","script_args":[],"script_sha256":"bfdeaeb08cffb6a36438bcd12dda25417e3cdd36f1e7e482a2849d539225288b","script_bytes":21,"env":[],"submit_line":"","submit_dir":"","submit_host":"","account":"","partition":"","qos":"","comment":"","stdout":"","stderr":"","stdin":"","open_mode":"","time_limit_s":null,"nodes_min":1,"nodes_max":1,"nodes_given":false,"ntasks":null,"ntasks_per_node":null,"cpus_per_task":1,"cpus_per_task_given":false,"mem_per_node_mib":null,"mem_per_cpu_mib":null,"gpus_per_node":[],"gpus_total":[],"gpus_per_task":[],"exclusive":false,"nodelist":[],"exclude":[],"constraint":"","array":null,"dependency":[],"dependency_any":false,"begin_at_s":null,"hold":true,"nice":0,"priority":null,"requeue":null,"signal":null,"lease":"keep","mail_user":"","mail_type":[]}');
CREATE TABLE steps (
         job_id INTEGER NOT NULL, attempt INTEGER NOT NULL, step TEXT NOT NULL, name TEXT NOT NULL, nodes TEXT NOT
        NULL, ntasks INTEGER NOT NULL, started_at_s REAL, ended_at_s REAL, state TEXT NOT NULL, exit_code INTEGER,
        exit_signal INTEGER, cpu_user_s REAL, cpu_system_s REAL, max_rss_kib INTEGER, disk_read_bytes INTEGER,
        disk_write_bytes INTEGER, kept TEXT, PRIMARY KEY (job_id, attempt, step)) WITHOUT ROWID;
INSERT INTO "steps" VALUES(1,0,'batch','batch','["n1"]',1,1000000.0,1000004.0,'COMPLETED',0,0,1.0,0.5,1000,NULL,NULL,NULL);
INSERT INTO "steps" VALUES(2,0,'batch','batch','["n1"]',1,1000005.0,NULL,'RUNNING',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "steps" VALUES(3,0,'batch','batch','["n2"]',1,1000005.0,1000008.0,'FAILED',3,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "steps" VALUES(4,0,'batch','batch','["n2"]',1,1000008.0,NULL,'RUNNING',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
CREATE TABLE training (
         job_id INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, at_s REAL NOT NULL, step INTEGER NOT NULL,
        total_steps INTEGER NOT NULL, loss REAL, samples_per_s REAL NOT NULL, steps_per_s REAL NOT NULL,
        checkpoint_step INTEGER NOT NULL, checkpoint_at_s REAL, note TEXT NOT NULL, goodput REAL, directory TEXT NOT
        NULL DEFAULT '');
CREATE TABLE triggers (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE usage (
         account TEXT NOT NULL, user TEXT NOT NULL, qos TEXT NOT NULL, at_s REAL NOT NULL, amounts TEXT NOT NULL,
        PRIMARY KEY (account, user, qos)) WITHOUT ROWID;
CREATE INDEX jobs_by_state ON jobs (state);
CREATE INDEX jobs_by_end ON jobs (ended_at_s);
CREATE INDEX jobs_by_array ON jobs (array_job_id);
CREATE INDEX events_by_job ON events (job_id);
CREATE TABLE node_events (
        seq INTEGER PRIMARY KEY, at_s REAL NOT NULL, node TEXT NOT NULL, kind TEXT NOT NULL, data TEXT NOT NULL
    );
CREATE INDEX node_events_by_node ON node_events (node);
COMMIT;
PRAGMA user_version=1;
