"""Jobs of root, system accounts and locked accounts are refused, where they would run as them, unless that is allowed."""

from __future__ import annotations

import asyncio
import pwd
from pathlib import Path

import pytest
from cluster import ANN, ROOT, Cluster, config

from hpcnode.os import account as user
from hpcnode.wire import protocol
from hpcsched.auth.authorize import Identity, Role
from hpcsched.errors import PermissionDeniedError

DAEMON = Identity(uid=1, user="daemon", role=Role.USER)
NOBODY = Identity(uid=65534, user="nobody", role=Role.USER)


def cluster_of(*, below: int = 1000, root_agent: bool = True) -> Cluster:
    cluster = Cluster("n1")
    cluster.state.config = config(allow_uid_below=below)
    cluster.welcome("n1", facts={"is_root": root_agent})
    return cluster


@pytest.mark.parametrize("identity", [ROOT, DAEMON, NOBODY])
def test_jobs_of_system_accounts_are_refused_with_what_to_do(identity: Identity) -> None:
    cluster = cluster_of()
    with pytest.raises(PermissionDeniedError) as refused:
        cluster.submit(identity)
    said = str(refused.value)
    assert said.startswith(f"cannot submit the job: jobs of {identity.user} are refused on this cluster, because it")
    assert "Submit it as an ordinary user: sudo -u USER hsub" in said
    assert (
        "set allow_uid_below = 0 in the section [controller] of /nonexistent/hpcsched.toml, and run: hctl reconfigure"
        in said
    )
    assert not cluster.state.jobs
    spec = cluster.job(cluster.submit(ANN, hold=True)).spec
    with pytest.raises(PermissionDeniedError, match="are refused on this cluster"):
        asyncio.run(cluster.backend().test(identity, spec))


@pytest.mark.parametrize("identity", [ROOT, DAEMON, NOBODY])
def test_an_admin_may_allow_them(identity: Identity) -> None:
    cluster_of(below=0).submit(identity)


def test_where_no_agent_is_root_nothing_runs_as_root() -> None:
    cluster_of(root_agent=False).submit(ROOT)


def test_a_request_that_comes_again_gets_its_answer() -> None:
    cluster = cluster_of(below=0)
    job_id = cluster.submit(ROOT, request_id="r")
    cluster.state.config = config()
    assert cluster.submit(ROOT, request_id="r") == job_id


@pytest.mark.parametrize("below", [0, 1000, 3000])
def test_the_node_is_told(below: int) -> None:
    cluster = cluster_of(below=below)
    cluster.submit(Identity(uid=3001, user="kim", role=Role.USER))
    cluster.tick()
    ((_, launch),) = cluster.sent(protocol.Launch)
    assert launch.allow_uid_below == below


def entry(name: str, uid: int, *, password: str = "x", login: str = "/bin/sh") -> pwd.struct_passwd:
    return pwd.struct_passwd((name, password, uid, uid, "", "/", login))


@pytest.mark.parametrize(
    ("account", "shadow", "why"),
    [
        (entry("root", 0), "", "its uid 0 is below allow_uid_below = 1000"),
        (entry("www-data", 33, login="/usr/sbin/nologin"), "", "its uid 33 is below"),
        (entry("nobody", 65534), "", "it is the account nobody"),
        (
            entry("svc", 1500, login="/usr/sbin/nologin"),
            "svc:!:1::::::",
            "it is locked, and its shell is /usr/sbin/nologin",
        ),
        (entry("svc", 1500, login="/bin/false"), "svc:*:1::::::", "it is locked"),
        (entry("svc", 1500, password="!", login="/bin/false"), "", "it is locked"),
        (entry("kim", 1500, login="/bin/bash"), "kim:!:1::::::", ""),  # logs in with a key
        (entry("kim", 1500, login="/bin/false"), "kim:$6$x:1::::::", ""),
        (entry("kim", 1500, login="/bin/false"), "kimberly:!:1::::::", ""),
        (entry("kim", 1500), "", ""),
    ],
)
def test_which_accounts_are_refused(
    account: pwd.struct_passwd, shadow: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shadow").write_text(f"other:*:1::::::\n{shadow}\n")
    monkeypatch.setattr(user, "SHADOW_PATH", str(tmp_path / "shadow"))
    said = user.why_refused(account, 1000)
    assert said.startswith(why)
    assert bool(said) == bool(why)
    assert user.why_refused(account, 0) == ""


def test_a_node_refuses_them_too() -> None:
    for name in ("root", "daemon", "nobody"):
        with pytest.raises(user.UserError, match=f"cannot run as {name}: it"):
            user.find_account(name, 0, 1000)
        assert user.find_account(name, 0, 0).name == name
