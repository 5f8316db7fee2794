"""Steps that the API prepares for the gateway: who may, a key once, limits, and when they must end."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jobs import T0
from step_bench import a_job
from waiting import PATIENCE_S

from hpcnode.wire import protocol
from hpcsched.auth.authorize import AccessPolicy, Action, Identity, Role
from hpcsched.auth.tokens import Credential, CredentialKind, Scope, actions_of
from hpcsched.controller.head_socket import HeadStreams
from hpcsched.controller.requests.reaches import (
    KEY_S,
    MAX_KEYS_PER_USER,
    MAX_STEPS_PER_CREDENTIAL,
    MAX_STEPS_PER_SERVICE,
    Reaches,
)
from hpcsched.errors import PermissionDeniedError, RequestError, UnauthenticatedError, UnavailableError
from hpcsched.model.ids import JobId
from hpcsched.model.job import JobState
from hpcsched.model.service import Service


class ReachBench:
    """One running job, and one session of its owner."""

    def __init__(self) -> None:
        self.now_s = T0
        self.job = a_job(12)
        self.session = Credential(
            id="s1",
            kind=CredentialKind.SESSION,
            uid=self.job.uid,
            user=self.job.user,
            scopes=(Scope.READ, Scope.SUBMIT),
            secret_sha256="",
            created_at_s=T0,
            created_by="",
            expires_at_s=T0 + 1000,
        )
        self.credentials = {"s1": self.session}
        config = SimpleNamespace(controller=SimpleNamespace(sign_jobs=False), access=AccessPolicy())
        self.cluster: Any = SimpleNamespace(config=config, credentials=self.credentials, jobs={JobId(12): self.job})
        self.reaches = Reaches(self.cluster, lambda: self.now_s)
        self.owner = self.identity(self.job.uid)

    def identity(self, uid: int, role: Role = Role.USER, *scopes: Scope) -> Identity:
        scope = actions_of(scopes or (Scope.READ, Scope.SUBMIT))
        return Identity(uid=uid, user=f"u{uid}", role=role, scope=scope)

    def key(self, **body: Any) -> str:
        return self.reaches.prepare(self.owner, self.job, {"job": "12", **body}, "s1")


@pytest.fixture
def bench() -> ReachBench:
    return ReachBench()


def test_only_the_owner_reaches_a_job_and_only_with_the_scope(bench: ReachBench) -> None:
    for role in Role:
        with pytest.raises(PermissionDeniedError):
            bench.reaches.prepare(bench.identity(bench.job.uid + 1, role, Scope.ADMIN), bench.job, {}, "")
    with pytest.raises(PermissionDeniedError, match="scope"):
        bench.reaches.prepare(bench.identity(bench.job.uid, Role.USER, Scope.READ), bench.job, {}, "s1")
    assert Action.REACH_JOB in actions_of([Scope.SUBMIT])
    assert bench.reaches.prepare(bench.owner, bench.job, {}, "s1")


def test_a_key_is_for_one_step_of_its_user_once_and_for_a_short_time(bench: ReachBench) -> None:
    key = bench.key()
    reach = bench.reaches.begin(1, key)
    assert (reach.identity.uid, reach.request.job_id) == (bench.job.uid, 12)
    assert reach.request.argv == ["htun", "served"]
    assert reach.request.env == {}
    late = bench.key()
    bench.now_s += KEY_S
    for wrong in (key, late, "", "x"):
        with pytest.raises(UnauthenticatedError):
            bench.reaches.begin(2, wrong)


def test_a_terminal_has_its_size_and_a_node_of_the_job(bench: ReachBench) -> None:
    request = bench.reaches.begin(1, bench.key(terminal=True, rows=50, columns=132)).request
    assert request.argv[:2] == ["hpty", "50x132"]
    assert request.options["nodelist"] == bench.job.shares[0].node
    for wrong in (
        {"node": "elsewhere"},
        {"rows": 0, "terminal": True},
        {"columns": 1e9},
        {"rows": True},
        {"terminal": 1},
        {"command": "id"},
        {"node": ["n1"]},
    ):
        with pytest.raises(RequestError):
            bench.key(**wrong)


def test_a_job_that_does_not_run_and_signed_steps_are_refused(bench: ReachBench) -> None:
    with pytest.raises(RequestError, match="it is PENDING"):
        bench.reaches.prepare(bench.owner, replace(bench.job, state=JobState.PENDING), {}, "s1")
    bench.cluster.config.controller.sign_jobs = True
    with pytest.raises(RequestError, match="hsh and htunnel"):
        bench.key()


def test_keys_of_a_user_and_steps_of_a_session_are_bounded(bench: ReachBench) -> None:
    keys = [bench.key() for _ in range(MAX_KEYS_PER_USER)]
    with pytest.raises(UnavailableError):
        bench.key()
    for stream, key in enumerate(keys[:MAX_STEPS_PER_CREDENTIAL]):
        bench.reaches.begin(stream, key)
    with pytest.raises(UnavailableError):
        bench.reaches.begin(99, keys[-1])
    bench.reaches.end(0)
    bench.reaches.begin(99, keys[-2])


def test_connections_to_a_service_are_bounded_and_do_not_count_as_their_owners(bench: ReachBench) -> None:
    service = Service(name="chat", uid=bench.job.uid, user=bench.job.user)
    keys = [bench.reaches.prepare_replica(service, bench.job) for _ in range(MAX_KEYS_PER_USER)]
    with pytest.raises(UnavailableError, match="cannot reach service chat: 32 of your requests wait"):
        bench.reaches.prepare_replica(service, bench.job)
    assert bench.key()
    for stream in range(MAX_STEPS_PER_SERVICE):
        bench.reaches.begin(stream, keys.pop())
        keys.append(bench.reaches.prepare_replica(service, bench.job))
    with pytest.raises(UnavailableError, match="256 terminals and connections to service chat are open"):
        bench.reaches.begin(MAX_STEPS_PER_SERVICE, keys.pop())


def test_a_step_ends_with_its_session_its_role_or_its_scope(bench: ReachBench) -> None:
    bench.reaches.begin(1, bench.key())
    assert bench.reaches.why_over(1) == ""
    assert bench.reaches.why_over(2) == ""  # another command
    bench.credentials["s1"] = replace(bench.session, revoked_at_s=bench.now_s)
    assert bench.reaches.why_over(1) == "its session is revoked"
    bench.credentials["s1"] = replace(bench.session, expires_at_s=bench.now_s)
    assert bench.reaches.why_over(1) == "its session has expired"
    del bench.credentials["s1"]
    assert bench.reaches.why_over(1) == "its credential is gone"
    bench.credentials["s1"] = bench.session
    bench.cluster.config.access = AccessPolicy(default=Role.VIEWER)
    assert "may not reach the job" in bench.reaches.why_over(1)


class Steps:
    """Takes the place of the step service."""

    def __init__(self) -> None:
        self.said: list[tuple[int, str]] = []

    def on_from_stream(self, node: str, said: protocol.FromStream, blob: bytes) -> None:
        self.said.append((said.uid, said.message["type"]))

    def on_stream_closed(self, origin: object) -> None:
        self.said.append((-1, "closed"))


def said_to(bench: ReachBench, path: Path, *messages: protocol.Message) -> tuple[list[tuple[int, str]], list[Any]]:
    """Return what the step service hears, and what the connection that says this gets."""

    async def talk() -> tuple[list[tuple[int, str]], list[Any]]:
        heads, steps = HeadStreams(), Steps()
        heads.stepping, heads.reaches = steps, bench.reaches  # type: ignore[assignment]
        await heads.serve(path / "steps.sock", 0o600)
        reader, writer = await asyncio.open_unix_connection(path / "steps.sock")
        for message in messages:
            writer.write(protocol.encode(message))
        writer.write(protocol.encode(protocol.Ping(7)))
        data, framer, got = b"", protocol.Framer(), []
        while not any(isinstance(one, protocol.Pong | protocol.Goodbye | protocol.StepEnded) for one in got):
            data = await asyncio.wait_for(reader.read(1 << 16), PATIENCE_S)
            got += [message for message, _ in framer.feed(data)]
        said = list(steps.said)
        await heads.close()
        return said, got

    return asyncio.run(talk())


REQUEST = protocol.StepRequest(protocol.VERSION, 12, {"ntasks": "1"}, ["id"], "/", {})


def test_a_connection_with_a_key_is_its_users_for_that_step_alone(bench: ReachBench, tmp_path: Path) -> None:
    said, got = said_to(bench, tmp_path, protocol.PreparedStep(bench.key()), protocol.StepSignal(15))
    assert said == [(bench.job.uid, "StepRequest"), (bench.job.uid, "StepSignal")]
    assert isinstance(got[-1], protocol.Pong)


@pytest.mark.parametrize("more", [REQUEST, protocol.StepAsked(), protocol.PreparedStep("x")])
def test_it_can_ask_for_nothing_else(bench: ReachBench, tmp_path: Path, more: protocol.Message) -> None:
    said, got = said_to(bench, tmp_path, protocol.PreparedStep(bench.key()), more)
    assert (bench.job.uid, type(more).__name__) not in said[1:]
    assert isinstance(got[-1], protocol.Goodbye)


def test_a_wrong_key_starts_nothing(bench: ReachBench, tmp_path: Path) -> None:
    said, got = said_to(bench, tmp_path, protocol.PreparedStep("x"))
    assert "its key is unknown" in got[0].error
    assert [one for one in said if one[0] >= 0] == []
