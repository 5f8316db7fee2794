"""What a user can have the controller read: expressions that would grow, long texts for regular expressions, SQL in names."""

from __future__ import annotations

import asyncio
import importlib
import json
import pkgutil
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields
from types import ModuleType
from typing import Any

import pytest
from unit.controller.cluster import ANN, BOB, ROOT, Cluster

import hpcnode
import hpcsched
from hpcnode.wire import protocol
from hpcsched.api.views import json_text
from hpcsched.config.load import build_config
from hpcsched.controller.nodes import links
from hpcsched.controller.nodes.links import Fleet
from hpcsched.controller.requests.job_ids import check_references
from hpcsched.controller.requests.jobs import cancel
from hpcsched.controller.requests.update import update
from hpcsched.controller.views.queue import selected
from hpcsched.errors import HpcschedError, RequestError, UnavailableError
from hpcsched.jobscript.values import checked_dependency, parse_array, parse_licenses
from hpcsched.launch.bundle import build_bundle
from hpcsched.launch.link import ControllerIdentity
from hpcsched.model.hostlist import expand_hostlist
from hpcsched.model.ids import NodeName
from hpcsched.model.spec import ArraySpec, Dependency, DependencyKind, JobSpec
from hpcsched.store.store import HistoryQuery

CPU_S = 0.5  # for a request of any kind


def cpu_s(work: Callable[[], Any]) -> float:
    before = time.thread_time()
    work()
    return time.thread_time() - before


def change(cluster: Cluster, job_id: int, **changes: str) -> None:
    outcome = cluster.ask(lambda tx: update(tx, ANN, [str(job_id)], changes))
    if outcome.errors:
        raise RequestError(outcome.errors[0]["error"])


# ----- expressions

BOMBS: dict[str, tuple[Callable[[str], Any], str]] = {
    "node range": (expand_hostlist, "n[0-999999999]"),
    "node product": (expand_hostlist, "a" + "[1-9]" * 12),
    "node brackets": (expand_hostlist, "[" * 50_000),
    "array range": (parse_array, "0-4294967295"),
    "array ranges": (parse_array, "0-4294967295," * 1000),
    "array step": (parse_array, "0-99999999999999999999:1"),
    "dependency chain": (checked_dependency, "afterok" + ":1" * 100_000),
    "dependency terms": (checked_dependency, "afterok:1," * 100_000),
    "licences": (parse_licenses, "a:1," * 10_000),
}


@pytest.mark.parametrize("name", BOMBS)
def test_d4_a_bomb_takes_little_time_and_is_refused(name: str) -> None:
    parse, text = BOMBS[name]

    def work() -> None:
        with pytest.raises(HpcschedError):
            parse(text)

    assert min(cpu_s(work) for _ in range(3)) < CPU_S


def test_d4_a_chain_and_a_circle_of_dependencies_hold_nobody_up() -> None:
    cluster = Cluster("n1")
    chain = [cluster.submit(hold=True)]
    for _ in range(500):
        after = Dependency(kind=DependencyKind.AFTER_OK, job_ids=(chain[-1],))
        chain.append(cluster.submit(dependency=(after,)))
    with pytest.raises(RequestError, match="circle|itself"):
        change(cluster, chain[0], dependency=f"afterok:{chain[-1]}")
    assert min(cpu_s(cluster.tick) for _ in range(3)) < CPU_S


WIDE = {
    "many columns": {"format": "%i" * 501},
    "wide columns": {"format": "%9999i" * 400},
    "long names": {"format": ",".join(["name"] * 400), "fit": "1"},
    "a long format of times": {"format": "%V", "time_format": "%Y" * 1000},
}


@pytest.mark.parametrize("query", WIDE.values(), ids=WIDE)
def test_d4_a_format_whose_lines_would_fill_the_memory_is_refused(query: dict[str, str]) -> None:
    cluster = Cluster("n1")
    cluster.submit(name="x" * 1024, hold=True)
    for _ in range(90):
        cluster.submit(hold=True)

    def work() -> None:
        with pytest.raises(HpcschedError, match="^cannot (show|write)"):
            asyncio.run(cluster.backend().queue(BOB, query))

    assert min(cpu_s(work) for _ in range(3)) < CPU_S


ARRAY = 2000
REFERENCES: dict[str, list[str]] = {
    "ranges of no job": [f"{number}_[0-99999]" for number in range(2, 102)],
    "ranges that overlap": [f"1_[{'0-99999,' * 1000}0]"] * 20,
    "tasks": [f"1_{number}" for number in range(10_000)],
    "one array in many ways": [
        f"{zeros}1+{more}" for zeros in ("", *("0" * n for n in range(18))) for more in ("00", "000")
    ],
    "more lists than allowed": [f"{number}_[0-99999]" for number in range(2, 2000)],
    "names": [f"a{number}" for number in range(10_000)],
    "long names": ["x" * 2_000_000],
    "steps": [f"1_[0-99999].{number}" for number in range(10_000)],
}


@pytest.mark.parametrize("references", REFERENCES.values(), ids=REFERENCES)
def test_d4_many_references_in_one_request_hold_nobody_up(references: list[str]) -> None:
    cluster = Cluster("n1")
    cluster.submit(BOB, array=ArraySpec(indices=tuple(range(ARRAY))), hold=True)

    def act() -> None:
        try:
            check_references(references, {})
        except RequestError:
            return
        refused = cancel_now(cluster, references)
        assert refused

    def look() -> None:
        with suppress(HpcschedError):
            selected(cluster.state, ANN, {"id": ",".join(references)})

    assert min(cpu_s(act) for _ in range(3)) < CPU_S
    assert min(cpu_s(look) for _ in range(3)) < CPU_S


def cancel_now(cluster: Cluster, references: list[str]) -> list[dict[str, str]]:
    errors: list[dict[str, str]] = cluster.ask(lambda tx: cancel(tx, ANN, references, {})).errors
    return errors


def test_d4_long_filters_are_refused() -> None:
    """Each job would be compared with all of them."""
    with pytest.raises(RequestError, match="the filters have more than"):
        check_references([], {"user": "a," * 10_000})


LARGE: dict[str, dict[str, Any]] = {
    "environment": {"env": tuple((f"V{number}", "x" * 100_000) for number in range(5))},
    "command line": {"submit_line": "x" * 500_000},
    "arguments": {"script_args": ("x" * 100_000,) * 5},
}


@pytest.mark.parametrize("large", LARGE.values(), ids=LARGE)
def test_e1_large_jobs_of_one_account_do_not_fill_the_memory(large: dict[str, Any]) -> None:
    """Neither if they are cancelled and submitted again: the controller remembers them for a while."""
    cluster = Cluster("n1")
    config = {"scheduler": {"max_scripts_per_user": "1M"}}
    cluster.state.config = build_config(config, [], config_dir=cluster.state.config.config_dir, environ={})
    kept = []
    for number in range(2):
        kept.append(cluster.submit(hold=True, comment=str(number), **large))
        cancel_now(cluster, [str(kept[-1])])
    with pytest.raises(RequestError, match="and max_scripts_per_user is 1 MiB"):
        cluster.submit(hold=True, **large)
    cluster.submit(BOB, hold=True, array=ArraySpec(indices=tuple(range(9))), **large)  # its tasks share it
    cluster.submit(hold=True)
    for job in kept:
        cluster.state.drop(job)
    cluster.submit(hold=True, **large)


def test_e1_the_tasks_of_an_array_are_shown_with_one_script() -> None:
    """An array of 10,000 tasks with a script of 4 MiB would be an answer of 40 GB, of which the controller dies."""
    cluster = Cluster("n1")
    script = "#!/bin/sh\n" + "x" * 100_000
    job_id = cluster.submit(
        hold=True, array=ArraySpec(indices=tuple(range(50))), script=script, env=(("A", "y" * 50_000),)
    )
    backend = cluster.backend()
    data = asyncio.run(backend.job_text(ANN, str(job_id)))
    assert len(data) < 2 * 150_000 + 50 * 4000
    found = json.loads(data)["jobs"]
    assert [one["array_task_id"] for one in found] == list(range(50))
    assert found == json.loads(json_text(backend.job(ANN, str(job_id))["jobs"]))
    assert found[0]["script"] == script
    assert all("script" not in one and "env" not in one for one in found[1:])
    assert backend.job(ANN, f"{job_id}_7")["jobs"][0]["script"] == script
    assert all("script" not in one for one in backend.job(BOB, str(job_id))["jobs"])
    assert backend.array_of(ANN, f"{job_id}_7") == job_id


class AskedFleet(Fleet):
    """Nodes that answer a probe when the test lets them."""

    def __init__(self) -> None:
        identity = ControllerIdentity(cluster="lab", incarnation="feedc0de", epoch=1)
        super().__init__(Cluster("n1").controller, bundle=build_bundle({}), identity=identity, clock=lambda: 5.0)
        self.asked: list[str] = []
        self.gate = asyncio.Event()

    async def call(self, node: NodeName, make: Callable[[int], Any], timeout_s: float) -> tuple[Any, bytes]:
        self.asked.append(node)
        await self.gate.wait()
        if node == "n2":
            raise UnavailableError("no answer")
        return protocol.Facts(0, {"cpus": len(self.asked)}), b""


def test_e1_a_flood_of_probes_is_two_probes_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lets the agent look at all processes of its node, and it has sixteen children at a time."""
    monkeypatch.setattr(links, "PROBE_GAP_S", 0.0)

    async def flood() -> None:
        fleet = AskedFleet()
        first = [asyncio.ensure_future(fleet.facts(NodeName("n1"), 9.0)) for _ in range(50)]
        lost = [asyncio.ensure_future(fleet.facts(NodeName("n2"), 9.0)) for _ in range(3)]
        while sorted(fleet.asked) != ["n1", "n2"]:
            await asyncio.sleep(0)
        later = [asyncio.ensure_future(fleet.facts(NodeName("n1"), 9.0)) for _ in range(50)]
        later[0].cancel()  # its client has left
        await asyncio.sleep(0)
        assert sorted(fleet.asked) == ["n1", "n2"]
        fleet.gate.set()
        before, after = await asyncio.gather(*first), await asyncio.gather(*later[1:])
        assert {facts["cpus"] for facts in before} == {2}
        assert {facts["cpus"] for facts in after} == {3}
        assert before[0] == {"cpus": 2, "asked_at_s": 5.0, "answered_at_s": 5.0}
        assert all(isinstance(error, UnavailableError) for error in await asyncio.gather(*lost, return_exceptions=True))
        assert sorted(fleet.asked) == ["n1", "n1", "n2"]

    asyncio.run(flood())


def test_d2_each_text_of_a_job_is_bounded_and_without_control_characters() -> None:
    """A text may be the name of a file, a variable or a part of a line on a terminal."""
    free = {"script", "submit_line", "script_sha256"}  # a line of commands; the last is refused with any value
    cluster = Cluster("n1")
    for field in fields(JobSpec):
        if field.type == "str" and field.name not in free:
            for text in ("a\x1b]0;x", "a\nb", "x" * 5000):
                with pytest.raises(HpcschedError):
                    cluster.submit(**{field.name: "/" * (field.name == "work_dir") + text})


# ----- regular expressions

BITS = (
    "a",
    "1",
    " ",
    ",",
    "[",
    "%",
    "-",
    "a1",
    "a,",
    "1-",
    "_",
    "/",
    "\\",
    "=",
    '"',
    "a=",
    "\n",
    "0:",
    "afterok:1,",
    ".",
)
LENGTH = 5000


def modules() -> Iterator[ModuleType]:
    for top in (hpcsched, hpcnode):
        for found in pkgutil.walk_packages(top.__path__, top.__name__ + "."):
            if (
                not found.name.endswith("__main__")
                and ".cli" not in found.name
                and not found.name.endswith("launch.bootstrap")
            ):
                yield importlib.import_module(found.name)


def test_d5_no_regular_expression_of_ours_takes_long_for_any_text() -> None:
    patterns = {
        value: f"{module.__name__}.{name}"
        for module in modules()
        for name, value in vars(module).items()
        if isinstance(value, re.Pattern)
    }
    assert len(patterns) > 40
    slow = set()
    for pattern, name in patterns.items():
        for bit in BITS:
            text: Any = bit * (LENGTH // len(bit)) + "\0"
            text = text.encode() if isinstance(pattern.pattern, bytes) else text
            for how in (pattern.match, pattern.fullmatch):
                if cpu_s(lambda how=how, text=text: how(text)) > CPU_S:
                    slow.add(name)
    assert not slow


# ----- SQL

INJECTIONS = [
    "' OR '1'='1",
    "x' UNION SELECT * FROM jobs --",
    "'; DROP TABLE jobs; --",
    "%",
    "_%",
    "$.a",
    '" OR ""="',
    "\\",
]


@pytest.mark.parametrize("text", INJECTIONS)
def test_d1_sql_in_a_name_is_a_name_and_in_a_question_finds_that_name_alone(text: str) -> None:
    cluster = Cluster("n1")
    mine = cluster.submit(ANN, name=text, comment=text, partition="")
    cluster.submit(BOB, name="other")
    store = cluster.store
    for query in (HistoryQuery(users=(text,)), HistoryQuery(states=(text,))):
        assert store.history(query) == []
    assert [job.id for job in store.history(HistoryQuery(names=(text,)))] == [mine]
    for field in ("user", "account", "qos", "partition", "state", "nodes", "id"):
        try:
            found = selected(cluster.state, ROOT, {field: text})
        except HpcschedError:
            continue
        assert found == []
    assert len(store.history(HistoryQuery())) == 2


# ----- priority


@pytest.mark.parametrize(
    ("asked", "why"),
    [({"nice": "-1"}, "negative nice"), ({"priority": "9"}, "needs the role"), ({"site_factor": "1"}, "site factor")],
)
def test_e6_a_user_cannot_raise_the_own_priority(asked: dict[str, str], why: str) -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit(ANN, hold=True)
    with pytest.raises(HpcschedError, match=why):
        change(cluster, job_id, **asked)
    if "nice" in asked:
        with pytest.raises(HpcschedError, match=why):
            cluster.submit(ANN, nice=-1)


def test_e6_a_job_that_is_cancelled_and_submitted_again_is_no_older() -> None:
    cluster = Cluster("n1")
    cluster.submit(ANN, ntasks=2)
    first = cluster.submit(ANN)
    cluster.tick(1000.0)
    cluster.ask(lambda tx: cancel(tx, ANN, [str(first)], {}))
    again = cluster.submit(ANN)
    cluster.tick()
    assert (cluster.job(again).accrued_from_s or cluster.now_s) > cluster.now_s - 10
