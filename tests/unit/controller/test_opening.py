"""What comes first when a controller has started: answers to those who have waited for it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from unit.controller.cluster import ANN, Cluster

from hpcsched.api import connection_limits
from hpcsched.auth.authorize import Identity, Role
from hpcsched.controller.__main__ import first_answers
from hpcsched.controller.head_socket import HeadStreams
from hpcsched.controller.views.queue import Reading
from hpcsched.errors import ConfigError, NotFoundError


def test_the_rest_of_a_start_waits_until_no_answer_is_under_way() -> None:
    looks = iter([True, True, True, False])
    asyncio.run(first_answers(lambda: next(looks), most_s=600.0))
    assert list(looks) == []


def test_who_asks_again_and_again_does_not_put_it_off_for_ever() -> None:
    looks: list[bool] = []

    def asked_again() -> bool:
        looks.append(True)
        return True

    asyncio.run(asyncio.wait_for(first_answers(asked_again, most_s=0.1), 60))
    assert looks


@pytest.mark.parametrize("what", ["jobs", "queue"])
def test_an_answer_is_under_way_from_its_first_slice_to_its_last(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "SLICE_S", -1.0)  # a break after each job
    cluster = Cluster("n1")
    for _ in range(3):
        cluster.submit(hold=True)
    reading = Reading(cluster.state, lambda: cluster.now_s)

    async def play() -> list[int]:
        answer = asyncio.create_task(getattr(reading, what)(ANN, {"format": "id"} if what == "queue" else {}))
        seen = [reading.under_way]
        while not answer.done():
            await asyncio.sleep(0)
            seen.append(reading.under_way)
        return seen

    seen = asyncio.run(play())
    assert seen[0] == seen[-1] == 0
    assert set(seen[1:-1]) == {1}
    assert len(seen) > 4


def test_an_answer_that_is_an_error_is_not_under_way_any_more() -> None:
    cluster = Cluster("n1")
    reading = Reading(cluster.state, lambda: cluster.now_s)
    with pytest.raises(NotFoundError):
        asyncio.run(reading.jobs(ANN, {"id": "7"}))
    assert reading.under_way == 0


def test_the_jobs_are_told_as_one_json_object() -> None:
    cluster = Cluster("n1")
    ids = [cluster.submit(hold=True, name=name) for name in ("one", "two \N{SNOWMAN}")]
    bob = Identity(uid=1001, user="bob", role=Role.USER)
    told = json.loads(asyncio.run(Reading(cluster.state, lambda: cluster.now_s).jobs(bob, {})))
    assert (told["version"], told["now_s"]) == (1, cluster.now_s)
    assert [(job["id"], job["name"], job["work_dir"]) for job in told["jobs"]] == [
        (ids[0], "one", None),
        (ids[1], "two \N{SNOWMAN}", None),
    ]


def test_where_the_steps_socket_cannot_be_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 108)
    with pytest.raises(ConfigError, match=f"cannot serve at {path}: AF_UNIX path too long"):
        asyncio.run(HeadStreams().serve(path, 0o600))
