"""The commands as a user types them, on three nodes behind real SSH servers."""

from __future__ import annotations

import getpass
import json
import os
import re
import select
import subprocess
import termios
import time
from collections.abc import Callable
from typing import Any

import pytest
from waiting import PATIENCE_S, wait_until

from hpcsched.loopback.cluster import LocalCluster
from hpcsched.model.codec import spec_to_json
from hpcsched.model.spec import JobSpec

Sub = Callable[..., int]
Ended = Callable[..., dict[str, Any]]
Output = Callable[[int], str]


def test_a_script_is_submitted_run_and_accounted_for(cluster: LocalCluster, ended: Ended, output: Output) -> None:
    script = cluster.share / "job.sh"
    script.write_text(
        "#!/bin/bash\n#SBATCH --job-name=first\n#HSUB -c 2\necho args: $1 cpus: $SLURM_CPUS_PER_TASK\nexit 3\n"
    )
    said = cluster.run("hsub", "job.sh", "a b")
    assert said.stderr == ""
    words = said.stdout.split()
    assert words[:-1] == ["Submitted", "batch", "job"]
    job_id = int(words[-1])
    assert (ended(job_id)["state"], ended(job_id)["exit_code"]) == ("FAILED", 3)
    assert output(job_id) == "args: a b cpus: 2\n"
    history = cluster.json("hacct", "-j", str(job_id), "--json")
    assert history["version"] == 1
    (record,) = history["jobs"]
    assert (record["name"], record["state"], record["exit_code"]) == ("first", "FAILED", 3)
    assert [step["step"] for step in record["steps"]] == ["batch"]
    assert record["steps"][0]["max_rss_kib"] > 0


def test_wrap_stdin_and_wait(cluster: LocalCluster, ended: Ended, output: Output) -> None:
    wrapped = int(cluster.run("hsub", "--parsable", "--wrap", "echo wrapped").stdout)
    assert ended(wrapped)["name"] == "wrap"
    assert output(wrapped) == "wrapped\n"
    waited = cluster.run("hsub", "--wait", stdin="#!/bin/sh\nexit 5\n", check=False)
    assert waited.returncode == 5


def test_the_queue_the_nodes_and_a_job_are_shown(cluster: LocalCluster, sub: Sub, running: Any) -> None:
    job_id = sub("sleep 600", "-N2", "--job-name=shown", "--time=5")
    running(job_id)
    waiting = sub("true", "-N3", "--exclusive")
    wait_until(lambda: "Resources" in cluster.run("hqueue").stdout, what="the reason to be known")
    queue = cluster.json("hqueue", "--json")
    assert queue["version"] == 1
    states = {one["id"]: one["state"] for one in queue["jobs"]}
    assert (states[job_id], states[waiting]) == ("RUNNING", "PENDING")
    shown = cluster.json("hctl", "show", "job", str(job_id), "--json")
    assert shown["version"] == 1
    assert shown["jobs"][0]["node_list"] == "n[1-2]"
    assert "JobId=" + str(job_id) in cluster.run("hctl", "show", "job", str(job_id)).stdout
    assert "n3" in cluster.run("hinfo", "-N").stdout
    assert "NodeName=n1" in cluster.run("hctl", "show", "node", "n1").stdout
    assert "shown" in cluster.run("hqueue", str(job_id)).stdout
    assert "free" in cluster.run("hwhy", str(waiting)).stdout
    cluster.run("hcancel", str(job_id), str(waiting))


def test_top_shows_the_cluster_and_a_job_until_q_is_pressed(cluster: LocalCluster, sub: Sub, running: Any) -> None:
    job_id = sub("echo step 7 of it; sleep 600", "--job-name=watched", "--time=5")
    running(job_id)
    wait_until(lambda: "step 7" in cluster.run("hlogs", str(job_id)).stdout, what="the job's output")
    once = cluster.run("hpcsched", "top", str(job_id)).stdout
    for part in ("n1 ", "hpcschedd is running", f"job {job_id}  watched", "| step 7 of it"):
        assert part in once
    assert "\x1b" not in once
    assert cluster.run("hpcsched", "top", "no-such-job", check=False).returncode == 1
    controller_end, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    env = cluster.env | {"TERM": "xterm", "LANG": "C.UTF-8", "PYTHONUTF8": "1"}
    seen = b""
    words = ["hpcsched", "top", str(job_id)]
    with subprocess.Popen(words, stdin=terminal, stdout=terminal, stderr=terminal, env=env) as process:
        os.close(terminal)
        deadline_s = time.monotonic() + PATIENCE_S
        while not (b"watched" in seen and b"step 7 of it" in seen and b"nodes take jobs" in seen):
            assert select.select([controller_end], [], [], deadline_s - time.monotonic())[0], seen.decode()
            seen += os.read(controller_end, 65536)
        os.write(controller_end, b"j\x1b[Aqq")  # back to the screens, and out
        while select.select([controller_end], [], [], PATIENCE_S)[0]:  # else it could not write the last screen
            try:
                os.read(controller_end, 65536)
            except OSError:  # the terminal was closed
                break
        assert process.wait(PATIENCE_S) == 0
    os.close(controller_end)
    cluster.run("hcancel", str(job_id))


def test_the_log_is_followed_to_its_end(cluster: LocalCluster, sub: Sub) -> None:
    job_id = sub("for i in 1 2 3; do echo line $i; sleep 0.3; done", "-o", "deep/er/%x-%j.log", "-J", "lg")
    followed = cluster.run("hlogs", "-f", str(job_id))
    assert followed.stdout == "line 1\nline 2\nline 3\n"
    assert (cluster.share / "deep" / "er" / f"lg-{job_id}.log").exists()


def test_cancel_ends_the_whole_tree_on_all_nodes(
    cluster: LocalCluster, sub: Sub, running: Any, ended: Ended, output: Output
) -> None:
    stubborn = "trap '' TERM INT; (setsid bash -c \"trap '' TERM; while :; do sleep 1; done\" &) ; "
    job_id = sub(f"{stubborn} hrun bash -c \"trap '' TERM; echo up; while :; do sleep 1; done\"", "-N2")
    running(job_id)
    wait_until(lambda: output(job_id).count("up") == 2, what="the tasks to be up")
    assert cluster.machines is not None
    before = {name: len(cluster.machines.processes(name)) for name in ("n1", "n2")}
    cluster.run("hcancel", str(job_id))
    assert ended(job_id)["state"] == "CANCELLED"
    after = {name: len(cluster.machines.processes(name)) for name in ("n1", "n2")}
    assert all(after[name] < before[name] for name in before)
    left = [line for name in after for line in _commands(cluster, name) if "while :" in line]
    assert left == []


def _commands(cluster: LocalCluster, name: str) -> list[str]:
    assert cluster.machines is not None
    lines = []
    for pid in cluster.machines.processes(name):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as stream:
                lines.append(stream.read().replace(b"\0", b" ").decode())
        except OSError:  # it has ended
            continue
    return lines


def test_the_time_limit_and_the_signal_before_it(cluster: LocalCluster, sub: Sub, ended: Ended, output: Output) -> None:
    job_id = sub("trap 'echo got USR1' USR1\necho up\nwhile :; do sleep 0.1; done", "--signal=B:USR1@60", "--time=60")
    wait_until(lambda: output(job_id) == "up\n", what="the script to have set its trap")
    cluster.run("hctl", "update", "job", str(job_id), "TimeLimit=1")
    wait_until(lambda: "got USR1" in output(job_id), what="the signal")
    cluster.run("hcancel", str(job_id))
    # What a person can write is a minute at least; the API takes seconds.
    spec = JobSpec(name="short", script="#!/bin/sh\nsleep 100\n", work_dir=str(cluster.share), time_limit_s=1)
    answer = cluster.api("POST", "/v1/submit", {"request_id": "", "jobs": [spec_to_json(spec)]})
    assert ended(answer["jobs"][0]["job_id"])["state"] == "TIMEOUT"


def test_arrays_dependencies_and_holds(cluster: LocalCluster, sub: Sub, job: Any, ended: Ended) -> None:
    array = sub("echo $SLURM_ARRAY_TASK_ID > task-$SLURM_ARRAY_JOB_ID-$HPCSCHED_ARRAY_TASK_ID", "--array=1-6:2%1")
    after = sub("true", f"--dependency=afterok:{array}")
    never = sub("true", f"--dependency=afternotok:{array}")
    held = sub("true", "--hold")
    assert ended(after)["state"] == "COMPLETED"
    assert sorted(path.name for path in cluster.share.glob(f"task-{array}-*")) == [
        f"task-{array}-{i}" for i in (1, 3, 5)
    ]
    wait_until(lambda: job(never)["reason"] == "DependencyNeverSatisfied", what="the dependency to be judged")
    assert job(held)["reason"] == "JobHeldUser"
    cluster.run("hctl", "release", str(held))
    assert ended(held)["state"] == "COMPLETED"
    cluster.run("hcancel", str(never))


def test_steps_run_on_all_nodes_in_a_job_and_alone(
    cluster: LocalCluster, sub: Sub, ended: Ended, output: Output
) -> None:
    job_id = sub("hrun -l hostname | sort; hrun -n1 sh -c 'exit 9'; echo code $?", "-N2", "--ntasks-per-node=2")
    assert ended(job_id)["state"] == "COMPLETED"
    lines = output(job_id).splitlines()
    assert [line.split(":")[0] for line in lines[:4]] == ["0", "1", "2", "3"]
    assert "code 9" in lines
    alone = cluster.run("hrun", "-N2", "-n4", "sh", "-c", "echo $SLURM_PROCID of $SLURM_NTASKS on $SLURMD_NODENAME")
    told = [line.split(" on ") for line in sorted(alone.stdout.splitlines())]
    assert [text for text, _ in told] == [f"{i} of 4" for i in range(4)]
    assert told[0][1] == told[1][1] != told[2][1] == told[3][1]
    fed = cluster.run("hrun", "-n1", "tr", "a-z", "A-Z", stdin="shout\n")
    assert fed.stdout == "SHOUT\n"
    failed = cluster.run("hrun", "-n2", "sh", "-c", "exit $SLURM_PROCID", check=False)
    assert failed.returncode == 1
    steps = cluster.json("hacct", "-j", str(job_id), "--json")["jobs"][0]["steps"]
    assert [step["step"] for step in steps] == ["batch", "0", "1"]


def test_a_node_is_drained_and_resumed(cluster: LocalCluster) -> None:
    cluster.run("hctl", "drain", "n3", "new fan")
    shown = cluster.run("hinfo", "-R").stdout
    assert "new fan" in shown
    assert "n3" in shown
    cluster.run("hctl", "resume", "n3")

    def state() -> str:
        return next(node["state"] for node in cluster.api("GET", "/v1/nodes")["nodes"] if node["name"] == "n3")

    wait_until(lambda: state() == "IDLE", what="the node to be idle")


@pytest.mark.parametrize(
    ("command", "status", "says"),
    [
        (["hsub", "--nodse=2", "job.sh"], 2, "--nodes"),
        (["hsub", "--wrap", "true", "--nodes=9"], 1, "nine nodes: partition 'main' has 3"),
        (["hsub", "--wrap", "true", "-p", "nope"], 1, "main"),
        (["hsub", "--wrap", "true", "--mem=100G"], 1, "100"),
        (["hsub", "--wrap", "true", "--dependency=afterok:99999"], 1, "99999"),
        (["hsub", "nosuch.sh"], 1, "nosuch.sh"),
        (["hcancel", "99999"], 1, "Invalid job id specified"),
        (["hqueue", "99999"], 1, "Invalid job id specified"),
        (["hqueue", "--staes=all"], 2, "--states"),
        (["hctl", "drain", "n9", "x"], 1, "n9"),
        (["hrun", "-N9", "true"], 1, "partition 'main' has 3"),
        (["hrun", "--nodse=1", "true"], 2, "--nodes"),
    ],
)
def test_bad_input_is_refused_with_what_to_do(
    cluster: LocalCluster, command: list[str], status: int, says: str
) -> None:
    result = cluster.run(*command, check=False)
    assert (result.returncode, says in result.stderr) == (status, True), result.stderr
    assert "Traceback" not in result.stderr


def test_a_script_without_an_interpreter_and_an_unknown_directive_are_refused(cluster: LocalCluster) -> None:
    refused = cluster.run("hsub", stdin="echo hello\n", check=False)
    assert refused.returncode == 1
    assert "#!" in refused.stderr
    unknown = cluster.run("hsub", stdin="#!/bin/sh\n#SBATCH --tiem=5\ntrue\n", check=False)
    assert unknown.returncode != 0
    assert "--time" in unknown.stderr


def test_test_only_says_when_and_submits_nothing(cluster: LocalCluster, sub: Sub, ended: Ended) -> None:
    before = sub("true")
    ended(before)
    said = cluster.run("hsub", "--test-only", "--wrap", "true", "-N2")
    assert "n[1-2]" in said.stdout + said.stderr
    assert sub("true") == before + 1


def test_test_only_says_what_would_keep_the_job_waiting(cluster: LocalCluster) -> None:
    held = cluster.run("hsub", "--test-only", "--wrap", "true", "--hold")
    assert "would wait in partition main (JobHeldUser)" in held.stderr
    later = cluster.run("hsub", "--test-only", "--wrap", "true", "--begin=2040-01-02")
    assert later.stderr.rstrip().endswith("its begin time has not come yet; not before 2040-01-02T00:00:00")


def test_a_reservation_for_a_user_of_whom_nobody_has_heard_is_refused(cluster: LocalCluster) -> None:
    words = ["ReservationName=typo", "StartTime=now+1hour", "Duration=60", "Nodes=n1", "Users=nobody-at-all"]
    refused = cluster.run("hctl", "create", "reservation", *words, check=False)
    assert (refused.returncode, "cannot reserve for user 'nobody-at-all': Invalid user" in refused.stderr) == (1, True)


def test_a_job_is_shown_to_end_with_its_reservation_and_is_ended(
    cluster: LocalCluster, sub: Sub, running: Any, ended: Ended, output: Output
) -> None:
    words = ["StartTime=now", "Duration=60", "Nodes=n1", f"Users={getpass.getuser()}"]
    cluster.run("hctl", "create", "reservation", "ReservationName=soon", *words)
    ends_s = cluster.json("hctl", "show", "reservation", "soon", "--json")["reservations"][0]["end_s"]
    job_id = sub("echo $SLURM_JOB_END_TIME; sleep 60", "--reservation=soon", "--time=60")
    assert running(job_id)["cut_at_s"] == ends_s
    wait_until(lambda: output(job_id) == f"{ends_s}\n", what="the job to say when it ends")
    cluster.run("hctl", "update", "reservation", "soon", "EndTime=now+1")
    assert ended(job_id)["state"] == "TIMEOUT"
    assert "its reservation 'soon' ended" in cluster.run("hctl", "story", str(job_id)).stdout
    cluster.run("hctl", "update", "job", str(sub("true", "--hold")), "nice=5")


def test_json_is_versioned_everywhere(cluster: LocalCluster) -> None:
    for command in (["hqueue", "--json"], ["hacct", "--json"], ["hinfo", "--json"], ["hctl", "show", "node", "--json"]):
        assert json.loads(cluster.run(*command).stdout)["version"] == 1


def test_a_reservation_from_its_making_to_its_end(
    cluster: LocalCluster, sub: Sub, job: Any, ended: Ended, output: Output
) -> None:
    made = cluster.run(
        *["hctl", "create", "reservation", "ReservationName=course", "StartTime=now", "Duration=60", "Nodes=n1"],
        f"Users={getpass.getuser()}",
    )
    assert made.stdout == "Reservation created: course\n"
    assert "course" in cluster.run("hinfo", "-T").stdout
    assert cluster.run("hinfo", "-h", "-N", "-n", "n1").stdout.split()[1] == "RESERVED"
    outside = sub("true", "--nodelist=n1", "--time=1")
    inside = sub("echo in $SLURM_JOB_RESERVATION", "--reservation=course", "--time=1")
    assert ended(inside)["state"] == "COMPLETED"
    assert output(inside) == "in course\n"
    assert job(outside)["reason"] == "Reservation"
    assert "n1 is reserved now" in cluster.run("hwhy", str(outside)).stdout
    refused = cluster.run("hsub", "--reservation=nosuch", "--wrap=true", check=False)
    assert "Requested reservation is invalid" in refused.stderr
    cluster.run("hctl", "delete", "reservation", "course")
    assert ended(outside)["state"] == "COMPLETED"


def test_a_deadline_several_partitions_and_a_circle(cluster: LocalCluster, sub: Sub, job: Any) -> None:
    first = sub("true", "--hold", "--time=2", "--deadline=now+1hour")
    second = sub("true", f"--dependency=afterok:{first}", "--kill-on-invalid-dep=yes")
    refused = cluster.run("hctl", "update", str(first), f"dependency=afterok:{second}", check=False)
    assert "that is a circle" in refused.stderr
    late = cluster.run("hsub", "--time=60", "--deadline=now+1minute", "--wrap=true", check=False)
    assert "cannot end by the deadline" in late.stderr
    assert re.search(r"Deadline=\d{4}-", cluster.run("hctl", "show", "job", str(first)).stdout)
    cluster.run("hcancel", str(first))
    wait_until(lambda: job(second)["state"] == "CANCELLED", what="the end of a job that could never start")


def test_jobs_that_never_ran_are_explained(cluster: LocalCluster, sub: Sub) -> None:
    held = sub("true", "--hold", "--job-name=never")
    after = int(cluster.run("hsub", "--parsable", "-d", "afterok:last", "--wrap", "true").stdout)
    assert f"afterok:{held}" in cluster.run("hctl", "show", "job", str(after)).stdout
    by_name = int(cluster.run("hsub", "--parsable", "-d", "afterany:never", "--wrap", "true").stdout)
    assert f"afterany:{held}" in cluster.run("hctl", "show", "job", str(by_name)).stdout
    assert (
        "Invalid job id specified: nosuch"
        in cluster.run("hsub", "-d", "afterok:nosuch", "--wrap", "true", check=False).stderr
    )
    assert "has not started; hwhy" in cluster.run("hlogs", str(held)).stderr
    me = getpass.getuser()
    said = cluster.run("hcancel", "-u", me, "-t", "PENDING").stdout  # jobs of other tests may wait, too
    assert {str(held), str(after), str(by_name)} <= set(
        re.fullmatch(r"cancelled \d+ jobs: (.*)\n", said).group(1).split()
    )
    assert "was cancelled before it started" in cluster.run("hlogs", str(held)).stderr
    shown = cluster.run("hacct", "-X", "-j", str(held)).stdout
    assert f"CANCELLED by {me}" in shown
    assert {"Start", "End", "Elapsed"} <= set(shown.splitlines()[0].split())
    assert cluster.run("hcancel", "-u", me, "-t", "PENDING").stdout == "no job matches\n"


def test_a_program_is_no_script_and_a_misspelled_directive_is_named(cluster: LocalCluster) -> None:
    refused = cluster.run("hsub", "/bin/ls", check=False)
    assert (
        refused.returncode,
        "it is a program and not a script. To run a program: hsub --wrap" in refused.stderr,
    ) == (1, True)
    said = cluster.run("hsub", "-v", stdin="#!/bin/sh\n#SBTACH --nodes=2\ntrue\n")
    assert "line 2 of the script is a comment, but looks like a directive" in said.stderr


def test_accounts_users_and_qos_are_shown(cluster: LocalCluster) -> None:
    assert cluster.run("hctl", "show", "qos", "normal").stdout.startswith("QOSName=normal\n   Priority=0 ")
    me = getpass.getuser()
    assert cluster.run("hctl", "show", "user", me).stdout.startswith(f"User={me}\n   Account=")
    assert cluster.run("hctl", "show", "account").stdout.startswith("Account=root\n")
    refused = cluster.run("hctl", "show", "qos", "nosuch", check=False)
    assert "there is no qos of that name: nosuch; there are: normal" in refused.stderr


def test_the_status_names_a_configuration_file_that_cannot_be_used(cluster: LocalCluster) -> None:
    path = cluster.config_dir / "hpcsched.toml"
    good = path.read_text()
    try:
        path.write_text(good + "\n[nosuch]\n")
        assert "the configuration on disk is invalid" in cluster.run("hpcsched", "status").stdout
        path.write_text(good + '\n[accounts.x]\nusers = ["nosuchuser"]\n')
        assert "this machine has no account nosuchuser" in cluster.run("hctl", "reconfigure").stdout
    finally:
        path.write_text(good)
        cluster.run("hctl", "reconfigure")
    assert "configuration on disk" not in cluster.run("hpcsched", "status").stdout


def test_a_report_counts_what_a_job_used_and_the_events_say_so(cluster: LocalCluster, ended: Ended, sub: Sub) -> None:
    job_id = sub("true", "--job-name=counted")
    ended(job_id)
    found = cluster.json("hreport", "--json", "--by=user,node")
    assert found["total"]["cpu_hours"] > 0
    assert found["capacity"]["capacity_cpu_hours"] >= found["capacity"]["allocated_cpu_hours"] > 0
    assert cluster.run("hreport", "--html").stdout.startswith("<!doctype html>")
    lines = [json.loads(line) for line in cluster.run("hctl", "events", "--json").stdout.splitlines()]
    actions = [line["event"]["action"] for line in lines if line["labels"].get("job_id") == str(job_id)]
    assert actions[:3] == ["job-submitted", "job-allocated", "job-started"]
