"""The recorder: rows are combined, read and deleted as promised; whatever happens to its disk, clock or process."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import signal
import sqlite3
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from losing_disk import LosingDisk, why_not
from waiting import played

from hpcsched.child import MAX_QUEUED_BYTES
from hpcsched.errors import NotFoundError, RequestError, UnavailableError
from hpcsched.metrics.series import TABLE, Column, NodeSample
from hpcsched.model.ids import NodeName
from hpcsched.recorder import Recorder, RecorderSettings
from hpcsched.recorder.__main__ import LONG_KEPT, MetricsArchive, matching

START_S = 1_800_000_000.0
CPU, LOAD, NET = "node_cpu_seconds_total:user", "node_load1", "node_network_receive_bytes_total:eth0"
NAMES = (CPU, LOAD, NET)


class Clocked:
    """An archive with a clock that the test moves, and what it said."""

    def __init__(self, directory: Path, *, max_bytes: int = 1 << 30, keep_s: tuple[float, ...] = (2e5, 1e6, 4e7)):
        self.now_s = START_S
        self.monotonic_s = 1000.0
        self.said: list[str] = []
        self.settings = RecorderSettings(database=str(directory / "metrics.db"), keep_s=keep_s, max_bytes=max_bytes)
        self.archive = self.opened()

    def opened(self) -> MetricsArchive:
        return MetricsArchive(
            self.settings,
            lambda level, text: self.said.append(text),
            clock=lambda: self.now_s,
            monotonic_s=lambda: self.monotonic_s,
        )

    def take(self, node: str, *values: float | None, names: tuple[str, ...] = NAMES, boot: str = "b1") -> None:
        self.archive.take(node, boot, round(self.now_s * 1000), names, json.dumps(values))

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds
        self.monotonic_s += seconds

    def live(self, hours: float, *nodes: str, every_s: float = 10.0) -> None:
        """Let nodes be busy for so long: a cpu is used for half of the time, the load is 1 and now and then 5."""
        for step in range(round(hours * 3600 / every_s)):
            for node in nodes:
                self.take(node, round(self.now_s - START_S) / 2, 5.0 if step % 60 == 59 else 1.0, step * 1000)
            self.pass_s(every_s)
            if step % 30 == 0:
                self.work()
        self.work()

    def work(self) -> None:
        while self.archive.work():
            pass

    def ask(self, node: str, *series: str, hours: float = 1.0, **more: Any) -> dict[str, Any]:
        question = {
            "ask": "series",
            "kind": "node",
            "name": node,
            "target": node,
            "series": series,
            "of": "mean",
            "step_s": None,
        }
        return self.archive.answer(question | {"from_s": self.now_s - hours * 3600, "to_s": self.now_s} | more)

    def values(self, node: str, series: str, **more: Any) -> list[float | None]:
        return self.ask(node, series, **more)["series"][0]["values"]

    def tiers(self) -> list[int]:
        return [row[0] for row in self.archive._database().tiers()]


@pytest.fixture
def one(tmp_path: Path) -> Clocked:
    return Clocked(tmp_path)


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> Clocked:
    """A node that was busy for 26 hours."""
    clocked = Clocked(tmp_path_factory.mktemp("lived"))
    clocked.live(26, "n1")
    return clocked


def known(values: list[float | None]) -> set[float]:
    return {value for value in values if value is not None}


@pytest.mark.parametrize("step_s", [10, 60, 300, 900, 3600])
def test_every_tier_says_the_same_of_a_counter(lived: Clocked, step_s: int) -> None:
    values = lived.values("n1", CPU, hours=25, step_s=step_s)
    inner = values[2:-1]
    assert None not in inner
    assert all(abs(value - 0.5) < 0.01 for value in inner)


@pytest.mark.parametrize(("of", "expected"), [("max", {5.0}), ("min", {1.0})])
def test_extremes_survive_the_longer_steps(lived: Clocked, of: str, expected: set[float]) -> None:
    values = lived.values("n1", LOAD, hours=25, step_s=3600, of=of)
    assert set(values[1:-1]) == expected
    assert lived.tiers() == [0, 1, 2]


def test_no_row_is_in_two_places_or_none(lived: Clocked) -> None:
    history = lived.archive._database()
    ((source_id, _),) = history.sources("node", "n1")
    for tier in range(3):
        heads = [head for head in history.heads(source_id, 0, 1 << 60) if head.tier == tier]
        assert all(a.until_ms < b.from_ms for a, b in zip(heads, heads[1:], strict=False)), tier
    raw = [head for head in history.heads(source_id, 0, 1 << 60) if head.tier == 0]
    rows = sum(len(lived.archive._read(history, head).times_ms) for head in raw)
    assert rows + sum(len(piece.rows) for piece in lived.archive._open.values()) == 26 * 360


def test_a_day_of_ten_series_is_answered_from_minutes_and_samples(lived: Clocked) -> None:
    answer = lived.ask("n1", *NAMES, hours=24)
    assert answer["step_s"] == 300
    assert [one["key"] for one in answer["series"]] == list(NAMES)
    assert answer["series"][0]["unit"] == "seconds"
    assert answer["series"][2]["labels"] == {"device": "eth0"}


@pytest.mark.parametrize(
    "text", ["node_load1", "load1", "cpu", "cpu_seconds", "node_cpu_seconds_total:user", "network_receive"]
)
def test_names_are_completed_with_prefix_and_unit(text: str) -> None:
    assert len(matching([text], NAMES)) == 1


def test_an_unknown_series_names_the_nearest(one: Clocked) -> None:
    one.take("n1", 1.0, 2.0, 3)
    with pytest.raises(NotFoundError, match="did you mean node_load1"):
        one.ask("n1", "node_lod1")
    with pytest.raises(NotFoundError, match="there are: eth0"):
        one.ask("n1", "network_receive:eth7")
    with pytest.raises(NotFoundError, match="none in this period"):
        one.ask("n2", "load1")


def test_too_many_points_are_refused_with_a_step_that_fits(one: Clocked) -> None:
    one.take("n1", 1.0, 2.0, 3)
    with pytest.raises(RequestError, match="take steps of"):
        one.ask("n1", "load1", hours=1e5, step_s=10)


def test_samples_in_memory_are_read_at_once(one: Clocked) -> None:
    for step in range(6):
        one.take("n1", step * 5.0, float(step), step)
        one.pass_s(10)
    values = one.values("n1", LOAD, hours=0.1, step_s=10)
    assert known(values) == {0.0, 1.0, 2.0, 3.0, 4.0, 5.0}
    assert known(one.values("n1", CPU, hours=0.1, step_s=10)) == {0.5}


def test_a_value_that_was_not_read_is_absent_and_not_zero(one: Clocked) -> None:
    one.take("n1", 1.0, None, 3)
    one.pass_s(10)
    one.take("n1", 6.0, 2.0, 3)
    one.live(0.2, "n2")
    assert known(one.values("n1", LOAD, hours=1, step_s=10)) == {2.0}


def test_a_reboot_and_new_columns_keep_what_was_before(one: Clocked) -> None:
    one.take("n1", 100.0, 1.0, 3)
    one.pass_s(10)
    one.take("n1", 105.0, 1.0, names=(CPU, LOAD))
    one.pass_s(10)
    one.take("n1", 1.0, 1.0, names=(CPU, LOAD), boot="b2")
    one.pass_s(10)
    one.take("n1", 2.0, 1.0, names=(CPU, LOAD), boot="b2")
    values = one.values("n1", CPU, hours=0.1, step_s=10)
    assert sorted(known(values)) == [0.1, 0.5]
    assert min(known(values)) >= 0


def test_a_clock_set_back_a_day_loses_nothing_and_deletes_nothing(one: Clocked) -> None:
    one.live(0.5, "n1")
    one.now_s -= 86400
    one.live(0.5, "n1")
    assert None not in one.values("n1", LOAD, hours=0.4, step_s=60)[1:-1]
    one.now_s += 86400
    one.live(3, "n1")
    assert None not in one.values("n1", LOAD, hours=2.9, step_s=60)[1:-1]
    assert (
        None not in one.values("n1", LOAD, from_s=START_S - 86400 + 2000, to_s=START_S - 86400 + 3000, step_s=60)[1:-1]
    )


def test_a_clock_that_jumps_forwards_by_a_year_deletes_nothing_for_a_day(one: Clocked) -> None:
    one.live(3, "n1")
    one.now_s += 400 * 86400
    one.pass_s(4000)
    one.work()
    assert any("clock" in text for text in one.said)
    assert 0 in one.tiers()
    one.now_s -= 400 * 86400
    assert None not in one.values("n1", LOAD, from_s=START_S, to_s=START_S + 7200, step_s=60)[1:-1]


def test_each_tier_is_kept_for_its_time(tmp_path: Path) -> None:
    one = Clocked(tmp_path, keep_s=(3 * 3600, 30 * 3600, 4e7))
    one.live(50, "n1", every_s=60)
    one.pass_s(4000)
    one.work()
    oldest = {row[0]: (one.now_s - row[4] / 1000, one.now_s - row[3] / 1000) for row in one.archive._database().tiers()}
    assert oldest[0][1] < 6 * 3600
    assert 24 * 3600 < oldest[1][1] < 56 * 3600
    assert oldest[2][1] > 49 * 3600


def test_the_size_stays_below_its_cap_and_the_newest_rows_stay(tmp_path: Path) -> None:
    cap = 400_000
    one = Clocked(tmp_path, max_bytes=cap)
    chance = random.Random(1)
    names = tuple(f"node_filesystem_free_bytes:/disk{place}" for place in range(20))
    for step in range(3600):
        one.take("n1", *(chance.randrange(1 << 40) for _ in names), names=names)
        one.pass_s(30)
        if step % 60 == 0:
            one.work()
    one.work()
    assert one.archive._database().used_bytes() <= cap
    size = sum(Path(f"{one.settings.database}{end}").stat().st_size for end in ("", "-wal"))
    assert size <= cap + (4 << 20)
    assert 0 in one.tiers()  # a day of minutes is one chunk, and may be more than the share of so small a database
    for step_s in (30, 60):
        assert None not in one.values("n1", names[0], hours=1, step_s=step_s)[1:-1]


def test_one_greedy_node_does_not_cost_the_history_of_the_others(tmp_path: Path) -> None:
    one = Clocked(tmp_path, max_bytes=600_000)
    chance = random.Random(1)
    names = tuple(f"node_filesystem_free_bytes:/{place}" for place in range(60))
    for step in range(2000):
        one.take("evil", *(chance.randrange(1 << 60) for _ in names), names=names)
        for node in ("n1", "n2", "n3"):
            one.take(node, float(step), 1.0, step)
        one.pass_s(10)
        if step % 20 == 0:
            one.work()
    one.work()
    assert one.archive._database().used_bytes() <= 600_000
    assert None not in one.values("n1", LOAD, hours=5, step_s=60)[1:-1]


def test_samples_that_come_too_often_are_dropped_and_counted(one: Clocked) -> None:
    for _ in range(100):
        one.take("n1", 1.0, 1.0, 1)
        one.pass_s(0.01)
    assert one.archive.stats()["dropped"] >= 97


def test_jobs_have_a_history_for_each_node_and_short_ones_none(one: Clocked) -> None:
    names = ("job_cpu_seconds_total", "job_memory_bytes")
    for step in range(100):
        for node in ("n1", "n2"):
            one.archive.take_job(node, "b", round(one.now_s * 1000), 12, 0, names, json.dumps((step * 20, 4096)))
        if step < 2:
            one.archive.take_job("n1", "b", round(one.now_s * 1000), 13, 0, names, json.dumps((step, 4096)))
        one.pass_s(10)
    one.live(0.5, "n3")
    answer = one.ask("12", "job_cpu_seconds", kind="job", step_s=60)
    assert [(row["node"], known(row["values"])) for row in answer["series"]] == [("n1", {2.0}), ("n2", {2.0})]
    with pytest.raises(NotFoundError):
        one.ask("13", "job_cpu_seconds", kind="job", step_s=60)


def test_a_renamed_node_and_jobs_on_it_keep_their_history(one: Clocked) -> None:
    one.live(0.5, "n1", "n2")
    for step in range(9):
        one.archive.take_job("n1", "b1", round(one.now_s * 1000), 7, 1, (CPU,), json.dumps([step]))
        one.pass_s(10)
    before = known(one.values("n1", LOAD))
    one.archive.settings = replace(one.settings, renamed={"n1": "gpu1"})
    one.live(0.5, "n1")  # the agent is not connected under its new name yet
    one.live(0.5, "gpu1")
    values = one.values("gpu1", LOAD, hours=1.75, step_s=60)
    assert known(values) >= before
    assert sum(value is not None for value in values) > 85
    assert {source.node for _, source in one.archive._database().sources("job", "7")} == {"gpu1"}
    with pytest.raises(NotFoundError):
        one.values("n1", LOAD)
    one.archive.settings = one.settings  # another node gets the old name
    one.live(0.1, "n1")
    assert len(known(one.values("n1", CPU, hours=2.0, step_s=60))) < 10


def test_the_list_names_nodes_and_their_series(one: Clocked) -> None:
    one.take("n1", 1.0, 1.0, 1)
    assert one.archive.answer({"ask": "list", "kind": "node", "name": "", "target": ""}) == {"names": ["n1"]}
    series = one.archive.answer({"ask": "list", "kind": "node", "name": "n1", "target": "n1"})["series"]
    assert [row["key"] for row in series] == sorted(NAMES)
    assert series[0]["help"] == TABLE["node_cpu_seconds_total"].help


def test_the_series_that_are_kept_for_a_year_exist() -> None:
    assert LONG_KEPT - TABLE.keys() == set()


# ----- its disk


def test_a_damaged_database_is_put_aside_and_a_new_one_begun(one: Clocked) -> None:
    one.live(1, "n1")
    one.archive.finish()
    path = Path(one.settings.database)
    path.write_bytes(b"SQLite format 3\0" + random.Random(1).randbytes(20_000))
    one.archive = one.opened()
    one.live(1, "n1")
    assert path.with_name("metrics.db.damaged").exists()
    assert any("damaged" in text for text in one.said)
    assert None not in one.values("n1", LOAD, hours=0.9, step_s=60)[1:-1]


@pytest.mark.parametrize("seed", range(4))
def test_a_page_that_is_damaged_while_it_runs_costs_at_most_the_old_rows(one: Clocked, seed: int) -> None:
    one.live(3, "n1")
    one.archive.finish()
    path = Path(one.settings.database)
    whole = bytearray(path.read_bytes())
    chance = random.Random(seed)
    for _ in range(3):
        at = chance.randrange(4096, len(whole) - 4096)
        whole[at : at + 2048] = chance.randbytes(2048)
    path.write_bytes(whole)
    one.archive = one.opened()
    for _ in range(3):
        one.live(2.5, "n1")
    try:
        values = one.values("n1", LOAD, hours=2.4, step_s=60)
    except UnavailableError:  # the damaged file was found by this question
        one.live(2.5, "n1")
        values = one.values("n1", LOAD, hours=2.4, step_s=60)
    assert None not in values[1:-1]
    assert one.archive.counts.damaged or one.archive.counts.trouble or one.said


def test_a_database_of_a_newer_version_stays_as_it_is(one: Clocked) -> None:
    one.live(0.5, "n1")
    one.archive.finish()
    with sqlite3.connect(one.settings.database) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    before = Path(one.settings.database).read_bytes()
    one.archive = one.opened()
    one.live(0.5, "n1")
    assert Path(one.settings.database).read_bytes() == before
    assert any("schema 99" in text for text in one.said)
    assert "schema 99" in one.archive.stats()["trouble"]


def test_a_database_of_another_program_stays_as_it_is(one: Clocked) -> None:
    with sqlite3.connect(one.settings.database) as connection:
        connection.execute("PRAGMA application_id = 7")
        connection.execute("CREATE TABLE t(x)")
    connection.close()
    one.live(0.5, "n1")
    assert any("another program" in text for text in one.said)


def test_a_locked_database_is_tried_again_and_nothing_is_lost(one: Clocked) -> None:
    one.live(0.5, "n1")
    other = sqlite3.connect(one.settings.database, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    one.archive._database()._connection.execute("PRAGMA busy_timeout=1")
    one.live(0.6, "n1")
    assert "locked" in one.archive.stats()["trouble"]
    assert sum("locked" in text for text in one.said) == 1
    other.execute("ROLLBACK")
    other.close()
    one.live(0.2, "n1")
    assert one.archive.stats()["trouble"] == ""
    assert None not in one.values("n1", LOAD, hours=1.2, step_s=60)[1:-1]


def test_two_recorders_do_not_write_one_database(one: Clocked) -> None:
    one.live(0.5, "n1")
    other = one.opened()
    other.work()
    assert "another recorder" in other.stats()["trouble"]


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_full_or_failing_disk_is_tried_again(tmp_path: Path, code: int) -> None:
    with LosingDisk(tmp_path / "disk") as disk:
        one = Clocked(disk.path)
        one.live(0.5, "n1")
        disk.fail(code)
        one.live(0.6, "n1")
        assert one.archive.stats()["trouble"]
        assert one.archive.stats()["waiting_bytes"] > 0
        disk.fail(code, times=0)
        one.live(0.3, "n1")
        assert one.archive.stats()["trouble"] == ""
        assert None not in one.values("n1", LOAD, hours=1.3, step_s=60)[1:-1]
        one.archive.finish()


def test_what_waits_for_the_disk_is_bounded(one: Clocked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcsched.recorder.__main__.MAX_WAITING_BYTES", 3000)
    Path(one.settings.database).mkdir()
    one.live(6, "n1")
    stats = one.archive.stats()
    assert stats["waiting_bytes"] <= 3000
    assert stats["dropped"] > 0
    assert None not in one.values("n1", LOAD, hours=0.5, step_s=60)[1:-1]


# ----- its process


def sample(
    node: str, at_s: float, values: tuple[float, ...], columns: tuple[Column, ...], boot: str = "b"
) -> NodeSample:
    return NodeSample(node=NodeName(node), boot_id=boot, received_at_s=at_s, columns=columns, values=values)


COLUMNS = tuple(
    Column(TABLE[name], labels)
    for name, labels in [("node_cpu_seconds_total", ("user",)), ("node_load1", ()), ("node_forks_total", ())]
)


async def until(condition: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)


def settings_in(directory: Path) -> RecorderSettings:
    return RecorderSettings(database=str(directory / "metrics.db"), keep_s=(2e5, 1e6, 4e7), max_bytes=1 << 30)


QUESTION = {
    "ask": "series",
    "kind": "node",
    "name": "n1",
    "target": "n1",
    "series": ["load1"],
    "of": "mean",
    "step_s": 10.0,
}


async def asked(recorder: Recorder, since_s: float, until_s: float) -> list[float | None]:
    answer = json.loads(await recorder.ask(QUESTION | {"from_s": since_s, "to_s": until_s}))
    values: list[float | None] = answer["series"][0]["values"]
    return values


@played
async def test_the_child_answers_ends_with_its_controller_and_remembers(tmp_path: Path) -> None:
    recorder = Recorder(settings_in(tmp_path))
    recorder.start()
    await until(lambda: recorder.pid)
    now_s = time.time()
    for step in range(30):
        recorder.record(sample("n1", now_s + 10 * step, (step, float(step), step), COLUMNS))
    assert known(await asked(recorder, now_s, now_s + 290)) == {float(step) for step in range(30)}
    with pytest.raises(NotFoundError, match="did you mean node_load1"):
        await recorder.ask(QUESTION | {"series": ["lode1"], "from_s": now_s, "to_s": now_s + 290})
    pid = recorder.pid
    await recorder.close()
    assert not Path(f"/proc/{pid}").exists()
    again = Recorder(settings_in(tmp_path))
    again.start()
    await until(lambda: again.pid)
    await until(lambda: again.child.get("trouble") == "")
    values: list[float | None] = []
    for _ in range(200):  # the database is opened in a moment
        try:
            values = await asked(again, now_s, now_s + 290)
            break
        except NotFoundError:
            await asyncio.sleep(0.05)
    assert known(values) == {float(step) for step in range(30)}
    await again.close()


@played
async def test_a_child_that_is_killed_is_started_again_and_the_queue_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcsched.child.FIRST_PAUSE_S", 0.05)
    recorder = Recorder(settings_in(tmp_path))
    recorder.start()
    await until(lambda: recorder.pid)
    first = recorder.pid
    assert first
    os.kill(first, signal.SIGSTOP)  # it does not read any more
    wide = tuple(Column(TABLE["node_filesystem_free_bytes"], (f"/{place}",)) for place in range(500))
    longest_s = 0.0
    count = 0
    while not recorder.dropped:
        began_s = time.perf_counter()
        recorder.record(sample("n1", time.time() + count * 10, tuple(range(500)), wide))
        longest_s = max(longest_s, time.perf_counter() - began_s)
        count += 1
        assert count < 10_000
    assert recorder._queued_bytes <= MAX_QUEUED_BYTES + (1 << 16)
    assert longest_s < 1.0  # a send to a stopped child does not block
    with pytest.raises(UnavailableError):
        await recorder.ask(QUESTION | {"from_s": 0, "to_s": 1})
    os.kill(first, signal.SIGKILL)
    await until(lambda: recorder.pid and recorder.pid != first)
    assert recorder.starts == 2
    now_s = time.time()
    recorder.record(sample("n1", now_s, (1, 7.0, 1), COLUMNS))
    assert known(await asked(recorder, now_s - 20, now_s + 1)) == {7.0}
    await recorder.close()


def _written(path: Path) -> int:
    """Return the number of chunks in a database that another process writes, 0 if there is none yet."""
    try:
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        try:
            return int(connection.execute("SELECT max(id) FROM chunks").fetchone()[0] or 0)
        finally:
            connection.close()
    except sqlite3.Error:
        return 0


def test_a_kill_in_the_middle_of_a_write_leaves_the_database_whole(tmp_path: Path) -> None:
    """Rounds: a child writes pieces and combines them as fast as it can, and is killed at a random moment of that."""
    chance = random.Random(7)
    settings = settings_in(tmp_path)
    path = Path(settings.database)
    at_s = time.time() - 40 * 86400
    rounds = 6
    told: list[float] = []  # the times of all samples

    async def round_of(number: int) -> None:
        nonlocal at_s
        recorder = Recorder(settings)
        recorder.start()
        await until(lambda: recorder.pid)
        before = _written(path)
        goal = chance.randrange(1, 12)
        pid = recorder.pid
        assert pid is not None
        while _written(path) < before + goal:
            for _ in range(30):
                at_s += 30
                recorder.record(sample("n1", at_s, (at_s, 1.0, 1), COLUMNS))
                told.append(at_s)
            await asyncio.sleep(0.002)
        await asyncio.sleep(chance.uniform(0, 0.02))
        os.kill(pid, signal.SIGKILL)
        recorder._closed = True
        await until(lambda: recorder.pid is None)
        await recorder.close()

    for number in range(rounds):
        asyncio.run(asyncio.wait_for(round_of(number), 100))
        connection = sqlite3.connect(path)
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        connection.close()
    one = Clocked(tmp_path)
    one.now_s = at_s
    history = one.archive._database()
    ((source_id, _),) = history.sources("node", "n1")
    heads = history.heads(source_id, 0, 1 << 60)
    raw = [head for head in heads if head.tier == 0]
    assert all(a.until_ms < b.from_ms for a, b in zip(raw, raw[1:], strict=False))
    rows = [time_ms for head in raw for time_ms in one.archive._read(history, head).times_ms]
    assert len(rows) == len(set(rows))
    assert set(rows) <= {round(told_s * 1000) for told_s in told}
    assert any(head.tier == 1 for head in heads)
    for head in heads:
        one.archive._read(history, head)
