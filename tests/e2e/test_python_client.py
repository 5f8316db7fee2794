"""`hpcsched.Client` and `AsyncClient`: functions and scripts as jobs of a real cluster, and their results."""

from __future__ import annotations

import asyncio
import math
import os
import re
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE_S, played

from hpcsched import AsyncClient, Client, errors
from hpcsched.loopback.cluster import LocalCluster


@pytest.fixture
def here(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Submit from the cluster's share, with its environment."""
    monkeypatch.chdir(cluster.share)
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_DATA_HOME", str(cluster.base / "data"))


@pytest.fixture(params=["pickle", "json"])
def client(cluster: LocalCluster, here: None, request: pytest.FixtureRequest) -> Client:
    return Client(socket=cluster.api_socket, results=request.param)


class OddError(Exception):
    """An exception that its own pickle cannot make again."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def fail_oddly() -> None:
    raise OddError(1, 2)


def test_a_function_runs_as_a_job_and_its_result_comes_back(client: Client) -> None:
    factor = 3

    def scaled(value: int, *, plus: int = 0) -> dict[str, object]:
        print("computing")
        return {"value": factor * value + plus, "job": os.environ["HPCSCHED_JOB_ID"]}

    job = client.submit(scaled, 5, kwargs={"plus": 1}, cpus_per_task=2, time="5", job_name="scale")
    assert job.result(PATIENCE_S) == {"value": 16, "job": str(job.id)}
    info = job.info()
    assert (info.state, info.name, info.num_cpus, info.time_limit_s) == ("COMPLETED", "scale", 2, 300)
    assert job.stdout().strip() == "computing"
    again = Client(socket=os.environ.get("HPCSCHED_API"), results="json").job(job.id)
    assert again.result(PATIENCE_S) == {"value": 16, "job": str(job.id)}


def test_the_exception_of_a_function_comes_back_with_its_traceback(client: Client) -> None:
    with pytest.raises(errors.JobFailedError, match=r"its function raised ValueError: math domain error") as raised:
        client.submit(math.sqrt, -1).result(PATIENCE_S)
    assert "Traceback" in raised.value.traceback
    assert raised.value.state == "FAILED"
    with pytest.raises(errors.JobFailedError, match="its function raised OddError: 1 and 2"):
        client.submit(fail_oddly).result(PATIENCE_S)


def test_a_map_is_one_array(client: Client) -> None:
    tasks = client.map(divmod, [17, 9], [5, 2], array="%1")
    assert len(tasks) == 2
    assert [tuple(result) for result in tasks.results(PATIENCE_S)] == [(3, 2), (4, 1)]
    assert set(tasks.states()) == {f"{tasks.id}_0", f"{tasks.id}_1"}
    assert tasks[1].info().array_job_id == tasks.id


def test_a_result_that_cannot_be_sent_is_an_error(client: Client) -> None:
    with pytest.raises(errors.JobFailedError, match="cannot send back the result, of type generator"):
        client.submit(lambda: (i for i in range(3))).result(PATIENCE_S)


def test_a_job_that_is_killed_has_no_result(client: Client) -> None:
    def kill_itself() -> None:
        os.kill(os.getpid(), 9)

    with pytest.raises(errors.JobFailedError, match="it is FAILED") as raised:
        client.submit(kill_itself).result(PATIENCE_S)
    assert raised.value.state == "FAILED"


def test_a_wait_that_takes_too_long_leaves_the_job(client: Client) -> None:
    job = client.submit("#!/bin/sh\nexec sleep 600\n")
    with pytest.raises(TimeoutError, match=rf"cannot wait longer for job {job.id}: after 0 s it is"):
        job.wait(0)
    with pytest.raises(errors.RequestError, match="it runs a script"):
        job.result()
    job.cancel()
    assert job.wait(PATIENCE_S).state == "CANCELLED"
    job.cancel()  # as it has ended, nothing is left to do
    assert job.done()


def test_a_script_is_submitted_with_its_words_and_its_output_followed(client: Client, cluster: LocalCluster) -> None:
    path = cluster.share / "greet.sh"
    path.write_text("#!/bin/sh\n#HSUB --job-name=greeting\necho hello $1\nsleep 0.2\necho bye\n")
    job = client.submit(path, "ann", output=str(cluster.share / "greet.out"))
    assert "".join(job.logs(follow=True)) == "hello ann\nbye\n"
    assert job.info().name == "greeting"
    assert job.id in [one.id for one in client.jobs(name="greeting")]
    tasks = client.submit_array("#!/bin/sh\necho $HPCSCHED_ARRAY_TASK_ID\n", array="3,5")
    assert set(tasks.wait(PATIENCE_S).values()) == {"COMPLETED"}
    assert [task.stdout() for task in tasks] == ["3\n", "5\n"]


def test_g5_one_request_id_makes_one_job(client: Client) -> None:
    first, second = (client.submit("#!/bin/sh\n:\n", request_id=f"once-{os.getpid()}") for _ in range(2))
    assert first.id == second.id


def test_bad_requests_say_what_to_change(client: Client, cluster: LocalCluster) -> None:
    for bad, why in (
        ({"nonsense": 1}, "nonsense"),
        ({"wait": True}, "cannot take the option wait: it is for the command hsub"),
        ({"mem": "lots"}, "lots"),
        ({"array": "0-3"}, "submit_array"),
    ):
        with pytest.raises(errors.RequestError, match=why):
            client.submit("#!/bin/sh\n:\n", **bad)
    with pytest.raises(errors.RequestError, match="cannot read script .*missing.sh: No such file"):
        client.submit("missing.sh")
    with pytest.raises(errors.NotFoundError):
        client.job(999_999)
    with pytest.raises(errors.UnavailableError, match="Unable to contact"):
        Client(socket=cluster.base / "none").nodes()
    assert not list((cluster.base / "data").rglob("*.part"))


def test_nodes_are_values(client: Client) -> None:
    nodes = client.nodes()
    assert [node.name for node in nodes] == sorted(node.name for node in nodes)
    assert all(node.cpus >= 1 and "main" in node.partitions for node in nodes)


def test_a_result_that_others_could_have_written_is_not_loaded(cluster: LocalCluster, here: None) -> None:
    job = Client(socket=cluster.api_socket).submit(math.sqrt, 4)
    job.wait(PATIENCE_S)
    assert job._call is not None
    assert job._call.folder is not None
    path = job._call.result_path(None)
    path.chmod(0o666)
    with pytest.raises(errors.RequestError, match="others may open it"):
        job.result()
    path.chmod(0o600)
    job._call.folder.chmod(0o770)
    with pytest.raises(errors.RequestError, match="others may open it"):
        job.result()
    job._call.folder.chmod(0o700)
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))
    with pytest.raises(errors.RequestError, match="cannot read the result"):
        job.result()


def test_asyncio_waits_for_many_jobs_at_once_without_threads(cluster: LocalCluster, here: None) -> None:
    @played
    async def scene() -> None:
        client = AsyncClient(socket=cluster.api_socket)
        import threading

        before = threading.active_count()
        jobs = [await client.submit(math.sqrt, value) for value in (1, 4, 9)]
        tasks = await client.map(math.sqrt, [16, 25])
        script = await client.submit("#!/bin/sh\necho one; sleep 0.2; echo two\n")
        results = await asyncio.gather(*jobs, tasks.results(PATIENCE_S))
        assert results == [1, 2, 3, [4, 5]]
        assert "".join([piece async for piece in script.logs(follow=True)]) == "one\ntwo\n"
        assert threading.active_count() == before
        assert (await script.wait()).state == "COMPLETED"
        assert await script.stdout() == "one\ntwo\n"
        assert {node.name for node in await client.nodes()} >= {"n1"}
        assert script.id in [job.id for job in await client.jobs(state="COMPLETED")]
        slow = await client.submit("#!/bin/sh\nexec sleep 600\n")
        with pytest.raises(TimeoutError):
            await slow.wait(0)
        await slow.cancel()
        assert (await slow.wait(PATIENCE_S)).state == "CANCELLED"
        with pytest.raises(errors.JobFailedError, match="math domain error") as raised:
            await (await client.submit(math.sqrt, -1)).result(PATIENCE_S)
        assert isinstance(raised.value.__cause__, ValueError)
        assert Path("/proc/self/fd").exists()

    scene()


def test_the_programs_of_the_guide_print_what_it_says(cluster: LocalCluster) -> None:
    page = (Path(__file__).parents[2] / "docs/python.md").read_text()
    program = "\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    (cluster.share / "guide.py").write_text(program)
    home = {"HOME": str(cluster.share), "XDG_DATA_HOME": ""}
    printed = cluster.run(sys.executable, "guide.py", env=home).stdout
    for said in re.findall(r"print\(.*\)  # (.*)", program):
        shape = re.escape(said.replace("/home/ann", str(cluster.share)))
        assert re.search(re.sub(r"job\\ \d+", r"job \\d+", shape).replace(r"\.\.\.", ".*"), printed), said
    assert "working\ndone\n" in printed
    assert (cluster.share / ".local/share/hpcsched/calls").stat().st_mode & 0o777 == 0o700
