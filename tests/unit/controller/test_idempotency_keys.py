"""Changes with an idempotency key: done once, answered each time, and forgotten in the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from cluster import ANN, BOB, ROOT, Cluster

from hpcsched.auth.authorize import Identity, RepeatableRequest
from hpcsched.controller import tick
from hpcsched.controller.views import backend as backend_module
from hpcsched.controller.views.backend import ControllerBackend
from hpcsched.errors import ConflictError, HpcschedError, NotFoundError, RequestError
from hpcsched.state.transaction import Transaction


@pytest.fixture
def cluster(tmp_path: Any) -> Cluster:
    return Cluster("n1", path=tmp_path / "hpcsched.db")


@pytest.fixture
def backend(cluster: Cluster) -> ControllerBackend:
    return cluster.backend()


def keyed(identity: Identity, key: str, content: str = "c") -> Identity:
    return replace(identity, request=RepeatableRequest(key, content))


def play(cluster: Cluster, *asked: Callable[[], Awaitable[Any]]) -> list[Any]:
    """Return the answers, or the errors, of requests that are sent at once."""

    async def whole() -> list[Any]:
        tasks = [asyncio.ensure_future(one()) for one in asked]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            cluster.tick()
        return await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(whole())


def requeue(backend: ControllerBackend, identity: Identity, job: int) -> Callable[[], Awaitable[Any]]:
    return lambda: backend.once(identity, lambda who: backend.act(who, "requeue", {"jobs": [str(job)]}))


def test_a_repeated_request_is_done_once_and_answered_again(cluster: Cluster, backend: ControllerBackend) -> None:
    job = cluster.submit(ANN)
    cluster.run(job)
    first, at_once = play(cluster, *[requeue(backend, keyed(ANN, "k"), job)] * 2)
    assert first == at_once
    assert first["jobs"] == [job]
    restarts = cluster.store.audit_records(0, 100)
    later = cluster.backend()  # of another controller: nothing is in memory
    assert play(cluster, requeue(later, keyed(ANN, "k"), job)) == [first]
    assert cluster.store.audit_records(0, 100) == restarts
    assert [record.action for record in restarts] == ["Submitted", "requeue"]


def test_a_key_belongs_to_one_content_and_one_user(cluster: Cluster, backend: ControllerBackend) -> None:
    job = cluster.submit(ANN)
    cluster.run(job)
    play(cluster, requeue(backend, keyed(ANN, "k"), job))
    for identity, kind in ((keyed(ANN, "k", "other"), ConflictError), (keyed(BOB, "k"), HpcschedError)):
        (answer,) = play(cluster, requeue(backend, identity, job))
        assert isinstance(answer, kind) or answer["errors"], identity
    with pytest.raises(ConflictError, match="another change"):
        cluster.submit(ANN, "k")
    cluster.submit(ANN, "of a job")
    (answer,) = play(cluster, requeue(backend, keyed(ANN, "of a job"), job))
    assert isinstance(answer, ConflictError)


def test_two_requests_of_one_key_at_once_are_done_once(cluster: Cluster, backend: ControllerBackend) -> None:
    one, two = (cluster.submit(ANN, begin_at_s=int(cluster.now_s) + 1000) for _ in range(2))
    hold = [
        lambda job=job: backend.once(
            keyed(ANN, "k", f"hold {job}"), lambda who: backend.act(who, "hold", {"jobs": [str(job)]})
        )
        for job in (one, two)
    ]
    first, second = play(cluster, *hold)
    assert first["jobs"] == [one]
    assert isinstance(second, ConflictError)
    assert cluster.job(two).hold.value == "none"


def test_a_request_that_changes_nothing_may_be_done_again(cluster: Cluster, backend: ControllerBackend) -> None:
    def drain(identity: Identity, nodes: str) -> Callable[[], Awaitable[Any]]:
        return lambda: backend.once(
            identity, lambda who: backend.act_on_nodes(who, "drain", {"nodes": nodes, "why": "x"})
        )

    (refused,) = play(cluster, drain(keyed(ROOT, "k"), "nowhere"))
    assert isinstance(refused, RequestError)
    assert cluster.store.request(ROOT.uid, "k") is None
    assert play(cluster, drain(keyed(ROOT, "k", "other"), "n1")) == [{"nodes": ["n1"]}]


def test_an_error_after_a_change_is_the_answer_again(cluster: Cluster, backend: ControllerBackend) -> None:
    async def half(who: Identity) -> Any:
        await backend.act_on_nodes(who, "drain", {"nodes": "n1", "why": "x"})
        raise NotFoundError("cannot do the rest")

    for _ in range(2):
        (error,) = play(cluster, lambda: backend.once(keyed(ROOT, "k"), half))
        assert (type(error), str(error)) == (NotFoundError, "cannot do the rest")


def test_a_client_that_leaves_finds_the_answer_later(cluster: Cluster, backend: ControllerBackend) -> None:
    job = cluster.submit(ANN)
    cluster.run(job)

    async def leave() -> None:
        asked = asyncio.ensure_future(requeue(backend, keyed(ANN, "k"), job)())
        await asyncio.sleep(0)
        asked.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
            cluster.tick()

    asyncio.run(leave())
    (answer,) = play(cluster, requeue(cluster.backend(), keyed(ANN, "k"), job))
    assert answer["jobs"] == [job]


def test_a_lost_and_a_long_answer_are_named(
    cluster: Cluster, backend: ControllerBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.ask(lambda tx: tx.note_request(ANN.uid, "k", [], "c"))  # and the controller died
    (lost,) = play(cluster, requeue(backend, keyed(ANN, "k"), 1))
    assert isinstance(lost, ConflictError)
    assert "lost when the controller stopped" in str(lost)
    monkeypatch.setattr(backend_module, "MAX_KEPT_ANSWER", 10)
    job = cluster.submit(ANN)
    cluster.run(job)
    first, again = (play(cluster, requeue(backend, keyed(ANN, "long"), job))[0] for _ in range(2))
    assert first["jobs"] == [job]
    assert "too long to be kept" in str(again)


def test_old_keys_and_those_of_a_user_with_too_many_are_forgotten(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tick, "REQUESTS_OF_USER", 5)

    def note(tx: Transaction, uid: int, count: int) -> None:
        for number in range(count):
            tx.note_request(uid, f"{tx.now_s:.0f}-{number}", [], "c")

    def known(uid: int) -> int:
        rows = cluster.store.connection.execute("SELECT count(*) FROM requests WHERE uid = ?", [uid])
        return int(rows.fetchone()[0])

    cluster.ask(lambda tx: note(tx, 7, 3))
    for _ in range(8):
        cluster.tick(1.0)
        cluster.ask(lambda tx: note(tx, 8, 1))
    cluster.tick(tick.PURGE_REQUESTS_EVERY_S)
    assert (known(7), known(8)) == (3, 5)
    cluster.tick(tick.REQUEST_S + tick.PURGE_REQUESTS_EVERY_S)
    assert (known(7), known(8)) == (0, 0)
