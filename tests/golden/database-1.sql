-- A database of version 0.1.0 (schema 1), as sqlite3's .dump writes it. Recorded once; never changed.
PRAGMA application_id = 1752195955;
BEGIN TRANSACTION;
CREATE TABLE crontabs (
	uid INTEGER NOT NULL, 
	user TEXT NOT NULL, 
	text TEXT NOT NULL, 
	entries TEXT NOT NULL, 
	PRIMARY KEY (uid)
);
CREATE TABLE credentials (
	id TEXT NOT NULL, 
	value TEXT NOT NULL, 
	PRIMARY KEY (id)
);
CREATE TABLE environments (
	mac TEXT NOT NULL, 
	key_id TEXT NOT NULL, 
	sealed BLOB NOT NULL, 
	PRIMARY KEY (mac)
);
CREATE TABLE events (
	seq INTEGER NOT NULL, 
	at_s FLOAT NOT NULL, 
	job_id INTEGER NOT NULL, 
	kind TEXT NOT NULL, 
	data TEXT NOT NULL, 
	PRIMARY KEY (seq)
);
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
	job_id INTEGER NOT NULL, 
	attempt INTEGER NOT NULL, 
	rank INTEGER NOT NULL, 
	ranks INTEGER NOT NULL, 
	node TEXT NOT NULL, 
	at_s FLOAT NOT NULL, 
	echo INTEGER NOT NULL, 
	text TEXT NOT NULL, 
	PRIMARY KEY (job_id, attempt, rank)
)
 WITHOUT ROWID

;
CREATE TABLE jobs (
	id INTEGER NOT NULL, 
	spec_id INTEGER NOT NULL, 
	array_job_id INTEGER, 
	array_task_id INTEGER, 
	name TEXT NOT NULL, 
	uid INTEGER NOT NULL, 
	user TEXT NOT NULL, 
	account TEXT NOT NULL, 
	submitted_at_s FLOAT NOT NULL, 
	state TEXT NOT NULL, 
	reason TEXT NOT NULL, 
	reason_detail TEXT NOT NULL, 
	hold TEXT NOT NULL, 
	priority_set INTEGER, 
	nice INTEGER NOT NULL, 
	time_limit_s INTEGER, 
	partition TEXT NOT NULL, 
	eligible_at_s FLOAT, 
	not_before_s FLOAT, 
	attempt INTEGER NOT NULL, 
	token TEXT NOT NULL, 
	shares TEXT NOT NULL, 
	held_nodes TEXT NOT NULL, 
	claimed_nodes TEXT NOT NULL, 
	lease_s FLOAT, 
	allocated_at_s FLOAT, 
	started_at_s FLOAT, 
	ended_at_s FLOAT, 
	exit_code INTEGER, 
	exit_signal INTEGER, 
	outcome TEXT, 
	requeue_wanted INTEGER NOT NULL, 
	ended_by_uid INTEGER, 
	restarts INTEGER NOT NULL, 
	suspended_at_s FLOAT, 
	suspended_s FLOAT, 
	suspended_for INTEGER, 
	preempted_by INTEGER, 
	save_s FLOAT, 
	reserved_shares TEXT NOT NULL, 
	leaving TEXT NOT NULL, 
	joining TEXT NOT NULL, 
	left_nodes TEXT NOT NULL, 
	wanted_nodes TEXT NOT NULL, 
	generation INTEGER NOT NULL, 
	charged_until_s FLOAT, 
	charged_cpu_s FLOAT NOT NULL, 
	charged_mem_mib_s FLOAT NOT NULL, 
	charged_gpu_s FLOAT NOT NULL, 
	partition_asked TEXT NOT NULL, 
	dependency_set TEXT, 
	array_limit_set INTEGER, 
	deadline_set_s INTEGER, 
	reservation_set TEXT, 
	account_set TEXT, 
	qos_set TEXT, 
	time_min_set_s INTEGER, 
	asked_limit_s INTEGER, 
	site INTEGER NOT NULL, 
	aged_s FLOAT NOT NULL, 
	barred_nodes TEXT NOT NULL, 
	wanted_at_s FLOAT, 
	deaths INTEGER NOT NULL, 
	saved_step INTEGER NOT NULL, 
	refusals TEXT NOT NULL, 
	PRIMARY KEY (id), 
	FOREIGN KEY(spec_id) REFERENCES specs (id)
);
INSERT INTO "jobs" VALUES(1,1,NULL,NULL,'done',1000,'ann','',1000000.0,'COMPLETED','None','','none',NULL,0,NULL,'main',1000000.0,NULL,0,'25eae5ba16077762.1.0.batch.n1.00000000000000000000000000000001','[["n1", 1, 2000, [], 1]]','[]','[]',NULL,1000000.0,1000000.0,1000004.0,0,0,'COMPLETED',0,NULL,0,NULL,NULL,NULL,NULL,NULL,'[]','[]','[]','[]','[]',0,NULL,5.0,10000.0,0.0,'',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,0.0,'[]',NULL,0,0,'[]');
INSERT INTO "jobs" VALUES(2,2,NULL,NULL,'running',1000,'ann','',1000005.0,'RUNNING','None','','none',NULL,0,NULL,'main',1000005.0,NULL,0,'25eae5ba16077762.2.0.batch.n1.00000000000000000000000000000002','[["n1", 2, 4000, [], 1]]','["n1"]','[]',NULL,1000005.0,1000005.0,NULL,NULL,NULL,NULL,0,NULL,0,NULL,NULL,NULL,NULL,NULL,'[]','[]','[]','[]','[]',0,NULL,0.0,0.0,0.0,'',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,0.0,'[]',NULL,0,0,'[]');
INSERT INTO "jobs" VALUES(3,3,NULL,NULL,'failed',1001,'bob','',1000005.0,'FAILED','NonZeroExitCode','','none',NULL,0,NULL,'main',1000005.0,NULL,0,'25eae5ba16077762.3.0.batch.n2.00000000000000000000000000000003','[["n2", 1, 2000, [], 1]]','[]','[]',NULL,1000005.0,1000005.0,1000008.0,3,0,'FAILED',0,NULL,0,NULL,NULL,NULL,NULL,NULL,'[]','[]','[]','[]','[]',0,NULL,3.0,6000.0,0.0,'',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,0.0,'[]',NULL,0,0,'[]');
INSERT INTO "jobs" VALUES(4,4,NULL,NULL,'other',1000,'ann','',1000008.0,'RUNNING','None','','none',NULL,0,NULL,'main',1000008.0,NULL,0,'25eae5ba16077762.4.0.batch.n2.00000000000000000000000000000004','[["n2", 2, 4000, [], 1]]','["n2"]','[]',NULL,1000008.0,1000008.0,NULL,NULL,NULL,NULL,0,NULL,0,NULL,NULL,NULL,NULL,NULL,'[]','[]','[]','[]','[]',0,NULL,0.0,0.0,0.0,'',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,0.0,'[]',NULL,0,0,'[]');
CREATE TABLE meta (
	"key" TEXT NOT NULL, 
	value TEXT NOT NULL, 
	PRIMARY KEY ("key")
)
 WITHOUT ROWID

;
INSERT INTO "meta" VALUES('epoch','1');
INSERT INTO "meta" VALUES('incarnation','25eae5ba16077762');
CREATE TABLE node_events (
	seq INTEGER NOT NULL, 
	at_s FLOAT NOT NULL, 
	node TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	data TEXT NOT NULL, 
	PRIMARY KEY (seq)
);
CREATE TABLE nodes (
	name TEXT NOT NULL, 
	drained INTEGER NOT NULL, 
	drained_why TEXT NOT NULL, 
	drained_by TEXT NOT NULL, 
	drained_at_s FLOAT, 
	boot_id TEXT NOT NULL, 
	machine_id TEXT NOT NULL, 
	link_since_s FLOAT NOT NULL, 
	link_why TEXT NOT NULL, 
	spool TEXT NOT NULL, 
	hardware TEXT NOT NULL, 
	reach TEXT NOT NULL, 
	launch_failures TEXT NOT NULL, 
	has_orphans INTEGER NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "nodes" VALUES('n1',0,'','',NULL,'boot-1','',1000000.0,'','','','','[]',0);
INSERT INTO "nodes" VALUES('n2',1,'a fan','root',1000008.0,'boot-1','',1000000.0,'','','','','[]',0);
CREATE TABLE requests (
	uid INTEGER NOT NULL, 
	request_id TEXT NOT NULL, 
	job_ids TEXT NOT NULL, 
	at_s FLOAT NOT NULL, 
	content TEXT NOT NULL, 
	answer TEXT NOT NULL, 
	PRIMARY KEY (uid, request_id)
)
 WITHOUT ROWID

;
INSERT INTO "requests" VALUES(1000,'one','[1]',1000000.0,'','');
CREATE INDEX requests_of_user ON requests (uid, at_s);
CREATE TABLE reservations (
	name TEXT NOT NULL, 
	start_s INTEGER NOT NULL, 
	end_s INTEGER NOT NULL, 
	nodes TEXT NOT NULL, 
	users TEXT NOT NULL, 
	accounts TEXT NOT NULL, 
	partition TEXT NOT NULL, 
	features TEXT NOT NULL, 
	node_count INTEGER NOT NULL, 
	flags TEXT NOT NULL, 
	made_by TEXT NOT NULL, 
	made_at_s FLOAT NOT NULL, 
	PRIMARY KEY (name)
);
CREATE TABLE scripts (
	sha256 TEXT NOT NULL, 
	text BLOB NOT NULL, 
	PRIMARY KEY (sha256)
);
INSERT INTO "scripts" VALUES('bfdeaeb08cffb6a36438bcd12dda25417e3cdd36f1e7e482a2849d539225288b',X'23212F62696E2F73680A6563686F2068656C6C6F0A');
CREATE TABLE specs (
	id INTEGER NOT NULL, 
	spec TEXT NOT NULL, 
	env_mac TEXT NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "specs" VALUES(1,'{"name":"done","script":"","work_dir":"/tmp","script_sha256":"bfdeaeb08cffb6a36438bcd12dda25417e3cdd36f1e7e482a2849d539225288b","script_bytes":21}','');
INSERT INTO "specs" VALUES(2,'{"name":"running","script":"","work_dir":"/tmp","script_sha256":"bfdeaeb08cffb6a36438bcd12dda25417e3cdd36f1e7e482a2849d539225288b","script_bytes":21,"nodes_given":true,"cpus_per_task":2}','');
INSERT INTO "specs" VALUES(3,'{"name":"failed","script":"","work_dir":"/tmp","script_sha256":"bfdeaeb08cffb6a36438bcd12dda25417e3cdd36f1e7e482a2849d539225288b","script_bytes":21}','');
INSERT INTO "specs" VALUES(4,'{"name":"other","script":"","work_dir":"/tmp","script_sha256":"bfdeaeb08cffb6a36438bcd12dda25417e3cdd36f1e7e482a2849d539225288b","script_bytes":21,"cpus_per_task":2}','');
INSERT INTO "specs" VALUES(5,'{"name":"array","script":"","work_dir":"/tmp","script_sha256":"bfdeaeb08cffb6a36438bcd12dda25417e3cdd36f1e7e482a2849d539225288b","script_bytes":21,"array":{"indices":[1,4],"limit":1}}','');
INSERT INTO "specs" VALUES(6,'{"name":"held","script":"","work_dir":"/tmp","script_sha256":"bfdeaeb08cffb6a36438bcd12dda25417e3cdd36f1e7e482a2849d539225288b","script_bytes":21,"hold":true}','');
CREATE TABLE steps (
	job_id INTEGER NOT NULL, 
	attempt INTEGER NOT NULL, 
	step TEXT NOT NULL, 
	name TEXT NOT NULL, 
	nodes TEXT NOT NULL, 
	ntasks INTEGER NOT NULL, 
	started_at_s FLOAT, 
	ended_at_s FLOAT, 
	state TEXT NOT NULL, 
	exit_code INTEGER, 
	exit_signal INTEGER, 
	cpu_user_s FLOAT, 
	cpu_system_s FLOAT, 
	max_rss_kib INTEGER, 
	disk_read_bytes BIGINT, 
	disk_write_bytes BIGINT, 
	kept TEXT, 
	PRIMARY KEY (job_id, attempt, step)
)
 WITHOUT ROWID

;
INSERT INTO "steps" VALUES(1,0,'batch','batch','["n1"]',1,1000000.0,1000004.0,'COMPLETED',0,0,1.0,0.5,1000,NULL,NULL,NULL);
INSERT INTO "steps" VALUES(2,0,'batch','batch','["n1"]',1,1000005.0,NULL,'RUNNING',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "steps" VALUES(3,0,'batch','batch','["n2"]',1,1000005.0,1000008.0,'FAILED',3,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "steps" VALUES(4,0,'batch','batch','["n2"]',1,1000008.0,NULL,'RUNNING',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
CREATE TABLE submissions (
	id INTEGER NOT NULL, 
	last_id INTEGER NOT NULL, 
	spec_id INTEGER NOT NULL, 
	name TEXT NOT NULL, 
	uid INTEGER NOT NULL, 
	user TEXT NOT NULL, 
	submitted_at_s FLOAT NOT NULL, 
	partition TEXT NOT NULL, 
	time_limit_s INTEGER, 
	PRIMARY KEY (id), 
	FOREIGN KEY(spec_id) REFERENCES specs (id)
);
INSERT INTO "submissions" VALUES(5,6,5,'array',1000,'ann',1000008.0,'main',NULL);
INSERT INTO "submissions" VALUES(7,7,6,'held',1001,'bob',1000008.0,'main',NULL);
CREATE TABLE training (
	job_id INTEGER NOT NULL, 
	attempt INTEGER NOT NULL, 
	at_s FLOAT NOT NULL, 
	step INTEGER NOT NULL, 
	total_steps INTEGER NOT NULL, 
	loss FLOAT, 
	samples_per_s FLOAT NOT NULL, 
	steps_per_s FLOAT NOT NULL, 
	checkpoint_step INTEGER NOT NULL, 
	checkpoint_at_s FLOAT, 
	note TEXT NOT NULL, 
	goodput FLOAT, 
	directory TEXT NOT NULL, 
	PRIMARY KEY (job_id)
);
CREATE TABLE triggers (
	id INTEGER NOT NULL, 
	value TEXT NOT NULL, 
	PRIMARY KEY (id)
);
CREATE TABLE usage (
	account TEXT NOT NULL, 
	user TEXT NOT NULL, 
	qos TEXT NOT NULL, 
	at_s FLOAT NOT NULL, 
	amounts TEXT NOT NULL, 
	PRIMARY KEY (account, user, qos)
)
 WITHOUT ROWID

;
CREATE INDEX events_by_job ON events (job_id);
CREATE INDEX node_events_by_node ON node_events (node);
CREATE INDEX jobs_by_state ON jobs (state);
CREATE INDEX jobs_by_array ON jobs (array_job_id);
CREATE INDEX jobs_by_end ON jobs (ended_at_s);
COMMIT;
PRAGMA user_version=1;
