"""Unmodified clients of slurmrestd use a real gateway over TLS."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway_server import AS_ROOT, USER, Served, serving
from waiting import wait_until

pytest.importorskip("jwt")
pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
slurmrestapi = pytest.importorskip("slurmrestapi")
slurmrestpy = pytest.importorskip("slurmrestpy")

ENDED = {"COMPLETED", "FAILED", "CANCELLED"}
CLIENTS = [(slurmrestapi, version) for version in (41, 42, 43, 44)] + [
    (slurmrestpy, version) for version in (40, 41, 42)
]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as found:
        yield found


class SlurmClient:
    """A generated client of one version of slurmrestd's API, with short names of its methods."""

    def __init__(self, module: Any, version: int, served: Served, user: str = "") -> None:
        configuration = module.Configuration(host=f"https://localhost:{served.port}")
        configuration.ssl_ca_cert = str(served.base / "gateway.crt")
        configuration.api_key = {"user": user or USER}
        if module is slurmrestapi:  # both ways that slurmrestd takes a token
            configuration.api_key["token"] = served.token
        else:
            configuration.access_token = served.token
        client = module.ApiClient(configuration)
        self.name = f"v00{version}"
        self.errors = module.rest.ApiException
        self._slurm, self._slurmdb = module.SlurmApi(client), module.SlurmdbApi(client)
        self._module = module

    def model(self, name: str, /, **fields: Any) -> Any:
        return getattr(self._module, f"V00{self.name[3:]}{name}")(**fields)

    def ask(self, what: str, /, *words: Any, **named: Any) -> Any:
        return getattr(self._slurm, f"slurm_{self.name}_{what}")(*words, **named)

    def ask_history(self, what: str, /, *words: Any, **named: Any) -> Any:
        return getattr(self._slurmdb, f"slurmdb_{self.name}_{what}")(*words, **named)

    def submit(self, script: str, work_dir: Path, **fields: Any) -> int:
        described = self.model(
            "JobDescMsg", current_working_directory=str(work_dir), environment=["PATH=/usr/bin:/bin"], **fields
        )
        answer = self.ask("post_job_submit", self.model("JobSubmitReq", script=script, job=described))
        assert not answer.errors
        return int(answer.job_id)

    def state(self, job_id: int) -> str:
        job = self.ask("get_job", str(job_id)).jobs[0]
        return str(job.job_state[0])

    def refusal(self, what: str, /, *words: Any, **named: Any) -> tuple[int, int, str]:
        """Return status, Slurm's number and words of a refused request."""
        with pytest.raises(self.errors) as raised:
            self.ask(what, *words, **named)
        error = json.loads(raised.value.body)["errors"][0]
        return raised.value.status, error["error_number"], error["error"]


@pytest.fixture(params=CLIENTS, ids=lambda item: f"{item[0].__name__}-v0.0.{item[1]}")
def client(request: pytest.FixtureRequest, served: Served) -> SlurmClient:
    module, version = request.param
    return SlurmClient(module, version, served)


@pytest.fixture
def work_dir(served: Served) -> Path:
    """Return a directory that jobs can write to."""
    folder = Path(tempfile.mkdtemp(dir=served.cluster.share))
    if AS_ROOT:
        os.chown(folder, 65534, -1)
    return folder


def test_a_job_is_submitted_waited_for_and_read(client: SlurmClient, work_dir: Path) -> None:
    script = "#!/bin/sh\necho hello from $SLURM_JOB_NAME in $PWD; exit 3\n"
    job_id = client.submit(script, work_dir, name="greet", tasks=1, standard_output=str(work_dir / "out.txt"))
    wait_until(lambda: client.state(job_id) in ENDED)
    job = client.ask("get_job", str(job_id)).jobs[0]
    assert (job.name, job.job_state, job.user_name) == ("greet", ["FAILED"], USER)
    assert job.exit_code.return_code.number == 3
    assert job.partition == "main"
    assert job.nodes == "n1"
    assert (work_dir / "out.txt").read_text() == f"hello from greet in {work_dir}\n"
    ended = client.ask_history("get_job", str(job_id)).jobs[0]
    assert (ended.job_id, ended.name, ended.state.current, ended.user) == (job_id, "greet", ["FAILED"], USER)
    found = client.ask_history("get_jobs", users=USER, job_name="greet", start_time="0").jobs
    assert job_id in [one.job_id for one in found]


def test_a_job_is_listed_held_changed_and_cancelled(client: SlurmClient, work_dir: Path) -> None:
    job_id = client.submit("#!/bin/sh\nexec sleep 600\n", work_dir, name="sleeper", hold=True)
    listed = {job.job_id: job for job in client.ask("get_jobs").jobs}
    assert (listed[job_id].hold, listed[job_id].job_state) == (True, ["PENDING"])
    answer = client.ask("post_job", str(job_id), client.model("JobDescMsg", name="renamed", hold=False))
    assert [result.job_id for result in answer.results] == [job_id]
    wait_until(lambda: client.state(job_id) == "RUNNING")
    job = client.ask("get_job", str(job_id)).jobs[0]
    assert (job.name, job.hold, job.start_time.set) == ("renamed", False, True)
    assert not client.ask("delete_job", str(job_id)).errors
    wait_until(lambda: client.state(job_id) == "CANCELLED")


def test_the_cluster_is_shown(client: SlurmClient) -> None:
    assert client.ask("get_ping").pings[0].pinged == "UP"
    assert client.ask("get_diag").statistics.jobs_running is not None
    node = client.ask("get_nodes").nodes[0]
    assert node.name == client.ask("get_node", "n1").nodes[0].name == "n1"
    assert node.cpus >= 1
    assert set(node.state) <= {"IDLE", "MIXED", "ALLOCATED", "DRAIN"}
    assert (
        client.ask("get_partitions").partitions[0].name
        == client.ask("get_partition", "main").partitions[0].name
        == "main"
    )
    assert client.ask("get_reservations").reservations == []
    assert client.ask("get_licenses").licenses == []
    assert "root" in [share.name for share in client.ask("get_shares").shares.shares]


def test_jobs_are_cancelled_by_their_name(client: SlurmClient, work_dir: Path) -> None:
    job_id = client.submit("#!/bin/sh\nexec sleep 600\n", work_dir, name=f"many-{client.name}", hold=True)
    message = client.model("KillJobsMsg", job_name=f"many-{client.name}", jobs=[str(job_id), "999999"])
    refused = client.ask("delete_jobs", message).status
    assert [one.error.code for one in refused] == [2017]
    assert client.state(job_id) == "CANCELLED"


def test_wrong_input_has_slurms_number_and_words(client: SlurmClient, work_dir: Path) -> None:
    assert client.refusal("get_job", "999999") == (404, 2017, "Invalid job id specified")
    assert client.refusal("get_job", "greet") == (404, 2017, "Invalid job id specified")
    assert client.refusal("delete_job", "999999") == (404, 2017, "Invalid job id specified")
    assert client.refusal("get_node", "nowhere") == (404, 2018, "Invalid node name specified")
    assert client.refusal("get_partition", "nowhere") == (404, 2000, "Invalid partition name specified")
    for fields, expected in (
        ({"partition": "nowhere"}, (2000, "Invalid partition name specified")),
        ({"licenses": "nowhere:1"}, (2048, "Invalid license specification")),
        ({"reservation": "nowhere"}, (2053, "Requested reservation is invalid")),
        ({"dependency": "afterok:999999"}, (2038, "Job dependency problem")),
        ({"tasks": 1_000_000}, (2014, "Requested node configuration is not available")),
        ({"container": "/oci"}, (9001, "Failure during parsing")),
    ):
        described = client.model("JobDescMsg", current_working_directory=str(work_dir), **fields)
        request = client.model("JobSubmitReq", script="#!/bin/sh\n:\n", job=described)
        assert client.refusal("post_job_submit", request)[1:] == expected, fields
    no_script = client.model("JobSubmitReq", job=client.model("JobDescMsg", name="x"))
    assert client.refusal("post_job_submit", no_script) == (400, 2009, "Job script not specified")


def test_the_user_of_the_header_must_be_the_tokens(served: Served) -> None:
    for module, version in ((slurmrestapi, 44), (slurmrestpy, 40)):
        client = SlurmClient(module, version, served, user="root" if USER != "root" else "nobody")
        assert client.refusal("get_ping") == (401, 9008, "Authentication failure")


def test_every_path_of_slurm_needs_a_credential_and_others_are_not_there(served: Served) -> None:
    from hpcsched.gateway.slurmrestd import ROUTES

    for route in ROUTES:
        family, _, rest = route.path.replace("{", "").replace("}", "").partition("/")
        status, body, headers = served.ask(route.method, f"/{family}/v0.0.44/{rest}/", {}, token="")
        assert (status, body["errors"][0]["error_number"]) == (401, 9008), route
        assert headers["content-type"] == "application/json"
    for path in (
        "/slurm/v0.0.39/ping/",
        "/slurm/v0.0.44/job/allocate/x",
        "/slurmdb/v0.0.44/accounts/",
        "/slurm/",
    ):
        status, body, _ = served.ask("GET", path)
        assert (status, body["errors"][0]["error"]) == (404, "Unable to find requested URL"), path


@pytest.mark.parametrize(
    "body", ["x", [], {"job": 5}, {"job": {"tasks": [1]}, "script": "#!/bin/sh"}, {"job": {"environment": 3}}]
)
def test_malformed_bodies_are_refused(served: Served, body: object) -> None:
    status, answer, _ = served.ask("POST", "/slurm/v0.0.44/job/submit", body)
    assert status == 400
    assert answer["errors"][0]["error_number"] in (9001, 9002, 2009)
    assert answer["meta"]["slurm"]["release"]


def test_a_token_that_may_only_read_submits_nothing(served: Served) -> None:
    whose = [f"--user={USER}"] if AS_ROOT else []
    token = served.cluster.run("hctl", "token", "create", "--scope=read", *whose).stdout.strip()
    described = {"script": "#!/bin/sh\n:\n", "job": {"current_working_directory": "/tmp"}}
    status, answer, _ = served.ask("POST", "/slurm/v0.0.44/job/submit", described, token=token)
    assert (status, answer["errors"][0]["error_number"]) == (403, 2002)
    assert served.ask("GET", "/slurm/v0.0.44/jobs/", token=token)[0] == 200


def test_a_long_queue_comes_in_pages_and_whole(served: Served, work_dir: Path) -> None:
    described = {"current_working_directory": str(work_dir), "array": "0-449", "hold": True, "name": "long"}
    status, made, _ = served.ask("POST", "/slurm/v0.0.44/job/submit/", {"script": "#!/bin/sh\n:\n", "job": described})
    assert status == 200, made
    found = served.ask("GET", "/slurm/v0.0.44/jobs/")[1]["jobs"]
    assert sum(job["name"] == "long" for job in found) >= 1
    assert len({job["job_id"] for job in found}) == len(found)
    assert served.ask("DELETE", f"/slurm/v0.0.44/job/{made['job_id']}?signal=TERM")[0] in (200, 400)
    assert served.ask("DELETE", f"/slurm/v0.0.44/job/{made['job_id']}")[0] == 200


def test_every_page_of_the_queue_is_shown_once(served: Served, work_dir: Path) -> None:
    from hpcsched.gateway.slurmrestd import PAGE_JOBS

    spec = {"name": "paged", "script": "#!/bin/sh\n:\n", "work_dir": str(work_dir), "hold": True}
    wanted: list[int] = []
    for count in (PAGE_JOBS, PAGE_JOBS, 1):
        status, made, _ = served.ask("POST", "/api/v1/submit", {"jobs": [spec] * count})
        assert status == 200, made
        wanted += [job["job_id"] for job in made["jobs"]]
    listed = [job["job_id"] for job in served.ask("GET", "/slurm/v0.0.44/jobs/")[1]["jobs"] if job["name"] == "paged"]
    assert sorted(listed) == sorted(wanted)
    states = {job["job_id"]: job["state"] for job in served.ask("GET", "/slurm/v0.0.44/jobs/state/")[1]["jobs"]}
    assert [states[str(job_id)] for job_id in wanted] == [["PENDING"]] * len(wanted)
    assert served.ask("DELETE", "/slurm/v0.0.44/jobs/", {"job_name": "paged"})[1]["status"] == []


def test_a_node_is_drained_and_resumed(served: Served) -> None:
    admin = served.cluster.run("hctl", "token", "create", "--scope=read,admin").stdout.strip()
    path = "/slurm/v0.0.44/node/n1"
    for state, reason, found in ((["DRAIN"], "a fan", True), (["RESUME"], "", False)):
        status, answer, _ = served.ask("POST", path, {"state": state, "reason": reason}, token=admin)
        assert (status, answer["errors"]) == (200, []), answer
        node = served.ask("GET", path)[1]["nodes"][0]
        assert ("DRAIN" in node["state"], node["reason"]) == (found, reason)
    status, answer, _ = served.ask("POST", path, {"state": ["DRAIN"], "reason": "x"})  # of a user
    assert (status, answer["errors"][0]["error_number"]) == (403, 2002)
    for body in ({"state": ["DOWN"]}, {"state": "DRAIN"}, {"weight": 3}, {}):
        assert served.ask("POST", path, body, token=admin)[0] == 400, body
    status, answer, _ = served.ask(
        "POST", "/slurm/v0.0.44/node/nowhere", {"state": ["DRAIN"], "reason": "x"}, token=admin
    )
    assert (status, answer["errors"][0]["error_number"]) == (404, 2018)


def test_a_reservation_is_shown_and_deleted(served: Served) -> None:
    admin = served.cluster.run("hctl", "token", "create", "--scope=read,admin").stdout.strip()
    changes = {"starttime": "now+1day", "duration": "60", "users": USER, "nodes": "n1"}
    made = served.ask("POST", "/api/v1/reservations/create", {"name": "course", "changes": changes}, token=admin)
    assert made[0] == 200, made
    path = "/slurm/v0.0.44/reservation/course"
    assert served.ask("GET", path)[1]["reservations"][0]["name"] == "course"
    assert served.ask("DELETE", path)[0] == 403  # of a user
    assert served.ask("DELETE", path, token=admin)[0] == 200
    status, answer, _ = served.ask("DELETE", path, token=admin)
    assert (status, answer["errors"][0]["error_number"]) == (404, 2053)
    assert served.ask("GET", "/slurm/v0.0.44/reservations/")[1]["reservations"] == []


def test_a_queue_whose_later_pages_are_refused_comes_whole() -> None:
    with serving(request_rate=1, request_burst=3) as served:
        described = {"current_working_directory": "/tmp", "array": "0-449", "hold": True, "name": "long"}
        status, made, _ = served.ask(
            "POST", "/slurm/v0.0.44/job/submit/", {"script": "#!/bin/sh\n:\n", "job": described}
        )
        assert status == 200, made
        found = wait_until(lambda: (answer := served.ask("GET", "/slurm/v0.0.44/jobs/"))[0] == 200 and answer[1])
        assert (found["errors"], len(found["jobs"])) == ([], 450)


def test_a_queue_that_breaks_off_ends_with_slurms_error(served: Served) -> None:
    described = {"current_working_directory": "/tmp", "array": "0-3999", "hold": True, "name": "long"}
    status, made, _ = served.ask("POST", "/slurm/v0.0.44/job/submit/", {"script": "#!/bin/sh\n:\n", "job": described})
    assert status == 200, made
    connection = served.connect()
    connection.request("GET", "/slurm/v0.0.44/jobs/", headers={"Authorization": f"Bearer {served.token}"})
    stream = connection.getresponse()
    begun = stream.read(10)
    served.cluster.down()
    answer = json.loads(begun + stream.read())
    connection.close()
    assert 0 < len(answer["jobs"]) < 4000
    assert answer["errors"][0]["error"] == "Unable to contact slurm controller (connect failure)"
    served.cluster.up()
