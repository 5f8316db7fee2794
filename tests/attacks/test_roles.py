"""The table of roles, cell by cell through the controller's socket; and what the audit log knows of it."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE_S

from hpcnode.wire import protocol
from hpcsched import client
from hpcsched.auth.authorize import MATRIX, Action, Reach, Role
from hpcsched.loopback.cluster import LocalCluster
from tests.e2e.test_users import as_user

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs to run as root: it acts as users")]

# Accounts that every Debian has. OWNER's jobs are in the account that `uucp` coordinates, STRANGER's are not.
USERS = {
    Role.VIEWER: "games",
    Role.USER: "backup",
    Role.COORDINATOR: "uucp",
    Role.OPERATOR: "lp",
    Role.ADMIN: "news",
    Role.SERVICE: "man",
}
OWNER, STRANGER = "daemon", "bin"
SETTINGS: dict[str, dict[str, object]] = {
    "roles": {"viewers": ["games"], "operators": ["lp"], "admins": ["news"], "services": ["man"]},
    "accounts.physics": {"users": [OWNER], "coordinators": ["uucp"]},
    "accounts.biology": {"users": ["*"]},
}
Request = tuple[str, str, dict[str, Any] | None]


def job_request(verb: str, **body: Any) -> Any:
    return lambda job: ("POST", f"/v1/{verb}", {"jobs": [str(job)], **body})


# What asks for each action; of actions on objects, a function of a job's number. None does harm where it is allowed.
REQUESTS: dict[Action, Any] = {
    Action.VIEW_JOBS: lambda job: ("GET", f"/v1/job/{job}", None),
    Action.VIEW_DETAILS: lambda job: ("GET", f"/v1/job/{job}/story", None),
    Action.VIEW_FILES: lambda job: ("GET", f"/v1/files?job={job}", None),
    Action.VIEW_NODES: ("GET", "/v1/nodes", None),
    Action.VIEW_USAGE: ("GET", "/v1/shares", None),
    Action.VIEW_RESERVATIONS: ("GET", "/v1/reservations", None),
    Action.SUBMIT: ("POST", "/v1/test", {"job": {"name": "j", "script": "#!/bin/sh\n", "work_dir": "/tmp"}}),
    Action.CANCEL: job_request("cancel", signal="USR1"),  # of a waiting job: it cannot be signalled
    Action.HOLD: job_request("hold"),
    Action.RELEASE: job_request("release"),
    Action.REQUEUE: job_request("requeue"),
    Action.UPDATE: job_request("update", changes={"comment": "x"}),
    Action.SET_TRIGGER: lambda job: (
        "POST",
        "/v1/triggers/set",
        {"event": "fini", "target": str(job), "program": ["/bin/true"]},
    ),
    Action.USE_SERVICE: lambda job: ("POST", "/v1/services/use", {"name": f"of-{job}"}),
    Action.MANAGE_SERVICE: lambda job: ("POST", "/v1/services/scale", {"name": f"of-{job}", "least": 0, "most": 1}),
    Action.SUSPEND: job_request("suspend"),
    Action.FAVOR: job_request("update", changes={"priority": "7"}),
    Action.DRAIN: ("POST", "/v1/nodes/resume", {"nodes": "n1"}),
    Action.UPDATE_PARTITION: ("POST", "/v1/partitions/update", {"name": "main", "state": "UP"}),
    Action.RESERVE: ("POST", "/v1/reservations/delete", {"name": "none"}),
    Action.SILENCE: ("POST", "/v1/alerts/test", {"receiver": "none"}),
    Action.POWER: ("POST", "/v1/nodes/power-up", {"nodes": "n1"}),
    Action.FENCE: ("POST", "/v1/nodes/fence", {"nodes": "n7"}),
    Action.REMOVE_NODE: ("POST", "/v1/nodes/remove", {"nodes": "n7"}),
    Action.BENCH_NODES: ("POST", "/v1/nodes/bench", {"node": "n7"}),
    Action.SYNC_NODES: ("POST", "/v1/nodes/sync", {"nodes": ["n7"], "files": {}, "command": "true"}),
    Action.PROBE_SHARE: ("GET", "/v1/nodes?share_file=x", None),
    Action.SETTLE_ORPHANS: ("GET", "/v1/strays", None),
    Action.RESET_USAGE: ("POST", "/v1/usage/reset", {"accounts": ["none"]}),
    Action.RECONFIGURE: ("POST", "/v1/reconfigure", {"same_machine": ["n7"]}),
    Action.BACK_UP: ("POST", "/v1/backup", {"path": "relative"}),
    Action.ACT_FOR_USER: ("GET", "/v1/crontab?user=sys", None),
    Action.USE_TOKENS: ("POST", "/v1/tokens/create", {"scopes": "read", "expires": "60"}),
    Action.REVOKE_TOKENS: ("GET", "/v1/tokens", None),
    Action.MANAGE_TOKENS: ("GET", "/v1/tokens?user=*", None),
    Action.READ_AUDIT: ("GET", "/v1/audit?limit=1", None),
    Action.OVERRULE_HOLD: job_request("release"),  # of a job that root holds
    Action.REACH_JOB: lambda job: ("POST", "/v1/reach", {"job": str(job)}),  # of a waiting job: nothing is prepared
    Action.RUN_STEP: lambda job: ("STEP", str(job), None),  # at the steps socket
}
REFUSALS = ("needs the role", "it belongs to", "that you may use")


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with tempfile.TemporaryDirectory(prefix="roles-") as directory:
        base = Path(directory)
        base.chmod(0o755)
        controller = {"run_dir": str(base / "run"), "allow_uid_below": 0}
        with LocalCluster(base, names=("n1",), settings=SETTINGS | {"controller": controller}) as started:
            yield started


def ask(cluster: LocalCluster, user: str, request: Request) -> str:
    """Return why the request of this user was refused, "" if it was not."""
    call = step_of if request[0] == "STEP" else client.call
    answer = as_user(user, partial(call, *request, where=cluster.api_socket))
    text = answer if isinstance(answer, str) else " ".join(error["error"] for error in answer.get("errors", ()))
    return text if any(words in text for words in REFUSALS) else ""


def step_of(_method: str, job: str, _body: None, where: str) -> str:
    """Return what the controller says to a step command on the head."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect(str(Path(where).with_name("steps.sock")))
        sock.sendall(
            protocol.encode(protocol.StepRequest(protocol.VERSION, int(job), {"ntasks": "1"}, ["true"], "/", {}))
        )
        framer = protocol.Framer()
        while data := sock.recv(1 << 16):
            for message, _ in framer.feed(data):
                if isinstance(message, protocol.StepEnded):
                    return message.error
    return ""


def submit(cluster: LocalCluster, user: str, begin_at_s: int = 4_000_000_000, **more: Any) -> int:
    job = {"name": "j", "script": "#!/bin/sh\n", "work_dir": "/tmp", "begin_at_s": begin_at_s, **more}
    body = {"request_id": "", "jobs": [job]}
    answer = as_user(user, partial(client.call, "POST", "/v1/submit", body, where=cluster.api_socket))
    assert not isinstance(answer, str), answer
    return int(answer["jobs"][0]["job_id"])


def submit_and_serve(cluster: LocalCluster, user: str) -> int:
    """Return the number of a new job of the user, who also has service `of-NUMBER`, which has no replicas."""
    number = submit(cluster, user)
    job = {"name": "j", "script": "#!/bin/sh\n", "work_dir": "/tmp"}
    body = {"name": f"of-{number}", "model": "/models/none", "job": job, "least": 0}
    answer = as_user(user, partial(client.call, "POST", "/v1/services/start", body, where=cluster.api_socket))
    assert not isinstance(answer, str), answer
    return number


def records(cluster: LocalCluster) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.call("GET", "/v1/audit?limit=5000", where=cluster.api_socket)["records"]
    return found


@pytest.mark.parametrize("role", Role, ids=lambda role: role.value)
def test_a3_a5_each_cell_of_the_table_holds_at_the_socket(cluster: LocalCluster, role: Role) -> None:
    user = USERS[role]
    may_submit = MATRIX[Action.SUBMIT][role] is not Reach.NONE
    jobs = {Reach.ACCOUNT: submit_and_serve(cluster, OWNER), Reach.ALL: submit_and_serve(cluster, STRANGER)}
    if may_submit:
        jobs[Reach.OWN] = submit_and_serve(cluster, user)
    wrong = []
    extents = list(Reach)
    for action, request in REQUESTS.items():
        cell = MATRIX[action][role]
        if not callable(request):
            if (ask(cluster, user, request) == "") != (cell is not Reach.NONE):
                wrong.append((action, cell))
            continue
        for owner, job in jobs.items():
            if action is Action.OVERRULE_HOLD:
                client.call("POST", "/v1/hold", {"jobs": [str(job)]}, where=cluster.api_socket)
            allowed = extents.index(cell) >= extents.index(owner)
            if role is not Role.COORDINATOR and owner is Reach.ACCOUNT:
                allowed = cell is Reach.ALL
            if (ask(cluster, user, request(job)) == "") != allowed:
                wrong.append((action, cell, owner))
    assert not wrong


def test_every_action_is_asked_for() -> None:
    assert set(REQUESTS) == set(Action)


@pytest.mark.parametrize("role", [Role.VIEWER, Role.SERVICE])
def test_a3_a_role_without_jobs_installs_no_crontab(cluster: LocalCluster, role: Role) -> None:
    spec = {"name": "j", "script": "#!/bin/sh\n", "work_dir": "/tmp"}
    for body in ({"text": "@daily true\n", "jobs": [spec]}, {"text": "", "jobs": []}):
        assert ask(cluster, USERS[role], ("POST", "/v1/crontab", body))
    assert ask(cluster, OWNER, ("POST", "/v1/crontab", {"text": "@daily true\n", "jobs": [spec]})) == ""


def job_of(cluster: LocalCluster, reference: object) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.call("GET", f"/v1/job/{reference}", where=cluster.api_socket)["jobs"]
    return found


def test_a3_a_bulk_request_changes_only_own_jobs(cluster: LocalCluster) -> None:
    """Others' jobs are named by number, array task, range, component, filter, and by a number not yet assigned."""
    another = "proxy"  # refusals of an account are recorded up to a bound, which another test needs
    single, array = submit(cluster, OWNER), submit(cluster, OWNER, array={"indices": [0, 1, 2]})
    own = submit(cluster, another)
    victims = {reference: job_of(cluster, reference) for reference in (single, array)}
    named = [f"{single}", f"{single}+0", f"{array}", f"{array}_1", f"{array}_[0-2]", f"{own}", f"{own + 1}"]

    def bulk(verb: str, **body: Any) -> dict[str, Any]:
        ask_all = partial(client.call, "POST", f"/v1/{verb}", body, where=cluster.api_socket)
        answer = as_user(another, ask_all)
        return answer if isinstance(answer, dict) else {"errors": [answer]}

    for verb in ("hold", "release", "requeue", "suspend", "resume"):
        assert bulk(verb, jobs=named)["errors"]
    assert bulk("update", jobs=named, changes={"comment": "mine"})["errors"]
    assert bulk("cancel", jobs=named, signal="USR1")["errors"]
    filters = ({"user": OWNER}, {"name": "j"}, {"state": "PENDING"}, {"account": "physics"}, {"user": f"{OWNER},bin"})
    for each in filters[1:] + filters[:1]:
        bulk("cancel", jobs=[], filters=each)
    assert {reference: job_of(cluster, reference) for reference in victims} == victims
    assert [(job["state"], job["comment"]) for job in job_of(cluster, own)] == [("CANCELLED", "mine")]
    guessed = submit(cluster, OWNER)
    assert guessed == own + 1
    assert job_of(cluster, guessed)[0]["state"] == "PENDING"


def test_a3_an_operators_hold_is_not_the_owners_to_release(cluster: LocalCluster) -> None:
    job = submit(cluster, OWNER)
    assert ask(cluster, USERS[Role.OPERATOR], job_request("hold")(job)) == ""
    answer = as_user(OWNER, partial(client.call, *job_request("release")(job), where=cluster.api_socket))
    assert "an admin holds it" in answer["errors"][0]["error"]
    assert client.call("GET", f"/v1/job/{job}", where=cluster.api_socket)["jobs"][0]["hold"] == "admin"


def test_a1_a_change_is_recorded_with_the_account_of_the_kernel(cluster: LocalCluster) -> None:
    job = submit(cluster, OWNER)
    body = {"jobs": [str(job)], "uid": 0, "user": "root", "role": "admin", "changes": {"time_limit": "5"}}
    as_user(OWNER, partial(client.call, "POST", "/v1/update", body, where=cluster.api_socket))
    record = records(cluster)[-1]
    assert (record["user"], record["role"], record["action"], record["object"]) == (
        OWNER,
        "user",
        "update",
        f"job {job}",
    )
    assert json.loads(record["before"])[f"job {job}"]["time_limit_s"] is None
    assert json.loads(record["after"])[f"job {job}"]["time_limit_s"] == 300


def test_a3_a_refusal_is_recorded_with_the_account_that_was_refused(cluster: LocalCluster) -> None:
    job = submit(cluster, OWNER)
    count = len(records(cluster))
    assert ask(cluster, STRANGER, job_request("cancel")(job))
    assert ask(cluster, STRANGER, ("POST", "/v1/nodes/drain", {"nodes": "n1", "why": "x"}))
    client.call("POST", "/v1/hold", {"jobs": [str(job)]}, where=cluster.api_socket)  # a commit after both
    new = [(record["user"], record["action"], record["outcome"][:7]) for record in records(cluster)[count:]]
    assert new == [
        (STRANGER, "cancel", "refused"),
        (STRANGER, "POST /v1/nodes/drain", "refused"),
        ("root", "hold", "done"),
    ]


def test_e8_a_flood_of_refusals_is_counted_and_not_written(cluster: LocalCluster) -> None:
    before = len(records(cluster))
    for _ in range(60):
        assert ask(cluster, "irc", ("GET", "/v1/strays", None))
    assert len(records(cluster)) - before <= 20


def test_f2_the_log_is_verified_and_the_first_altered_record_is_named(cluster: LocalCluster, tmp_path: Path) -> None:
    submit(cluster, OWNER)
    assert "the audit log is complete" in cluster.run("hctl", "audit", "verify").stdout
    export = tmp_path / "audit.jsonl"
    cluster.run("hctl", "audit", "export", str(export))
    lines = export.read_text().splitlines()
    export.write_text("\n".join([*lines[:2], lines[2].replace('"uid": ', '"uid": 1'), *lines[3:]]) + "\n")
    verified = cluster.run("hctl", "audit", "verify", f"log={export}", check=False)
    assert (verified.returncode, "record 3 was altered" in verified.stderr) == (1, True), verified.stderr
    database = cluster.config_dir / "state" / "hpcsched.db"
    assert (
        sqlite3.connect(f"file:{database}?mode=ro", uri=True).execute("SELECT max(seq) FROM audit").fetchone()[0] >= 3
    )
