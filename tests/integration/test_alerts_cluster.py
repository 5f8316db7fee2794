"""Alerts and job mail of a whole cluster, as a user and an administrator see them; with a real Alertmanager."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from gateway_server import free_port
from mail_server import MailServer
from waiting import wait_until

from hpcsched.loopback.cluster import LocalCluster

ALERTMANAGER = shutil.which("prometheus-alertmanager")


@pytest.fixture(scope="module")
def mail() -> Iterator[MailServer]:
    server = MailServer(free_port())
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def alertmanager() -> Iterator[str]:
    """A real Alertmanager; "": this machine has none."""
    if ALERTMANAGER is None:
        yield ""
        return
    with tempfile.TemporaryDirectory(prefix="am") as directory:
        config = Path(directory, "am.yml")
        config.write_text("route: {receiver: none}\nreceivers: [{name: none}]\n")
        port = free_port()
        words = [
            ALERTMANAGER,
            f"--config.file={config}",
            f"--storage.path={directory}/data",
            "--cluster.listen-address=",
        ]
        words.append(f"--web.listen-address=127.0.0.1:{port}")
        with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
            yield f"http://127.0.0.1:{port}"
            server.terminate()


@pytest.fixture(scope="module")
def cluster(mail: MailServer, alertmanager: str) -> Iterator[LocalCluster]:
    with tempfile.TemporaryDirectory(prefix="hpc") as directory:
        base = Path(directory)
        base.chmod(0o755)
        prolog = base / "prolog"
        prolog.write_text(f'#!/bin/sh\ntest ! -e "{base}/ill"\n')
        prolog.chmod(0o755)
        settings: dict[str, dict[str, object]] = {
            "controller": {"prolog": str(prolog), "allow_uid_below": 0},
            "alerts": {
                "on": True,
                "smtp": f"smtp://127.0.0.1:{mail.port}",
                "mail_domain": "lab.org",
                "mail_to": ["root@lab.org"],
                "interval": 0.5,
            },
        }
        if alertmanager:
            settings["alerts.receivers.am"] = {"kind": "alertmanager", "address": alertmanager}
        with LocalCluster(base, ["n1", "n2"], settings=settings) as started:
            yield started


def submit(cluster: LocalCluster, *words: str) -> str:
    return cluster.run("hsub", "--parsable", *words).stdout.strip()


def about(mail: MailServer, job: str) -> list[str]:
    """Return the subjects of the mail about a job."""
    return [subject for subject in mail.subjects() if f"Job_id={job} " in subject]


def view(cluster: LocalCluster) -> dict[str, Any]:
    answer: dict[str, Any] = cluster.json("hctl", "alerts", "--json")
    return answer


def test_the_mail_of_a_job_is_sent_with_what_it_used(cluster: LocalCluster, mail: MailServer) -> None:
    job = submit(cluster, "--mail-type=BEGIN,END", "--mail-user=ann", "-J", "fit", "--wrap", "echo hello")
    wait_until(lambda: len(about(mail, job)) == 2, what="two mails")
    began, ended = about(mail, job)
    assert began.startswith(f"demo Job_id={job} Name=fit Began, Queued time 00:")
    assert ended.startswith(f"demo Job_id={job} Name=fit Ended, Run time 00:")
    (body,) = [one.get_content() for one in mail.mails if one["Subject"] == ended]
    assert "COMPLETED" in body
    assert "It used" in body
    assert all(
        to == ["ann@lab.org"] for to, one in zip(mail.to, mail.mails, strict=True) if one["Subject"] in (began, ended)
    )


def test_a_job_without_mail_types_and_one_that_is_well_send_none(cluster: LocalCluster, mail: MailServer) -> None:
    jobs = [submit(cluster, *words, "--wrap", "true") for words in ((), ("--mail-type=NONE",), ("--mail-type=FAIL",))]
    last = submit(cluster, "--mail-type=FAIL", f"--dependency=afterany:{':'.join(jobs)}", "--wrap", "exit 3")
    wait_until(lambda: about(mail, last), what="a mail of the failed job")
    assert about(mail, last)[0].endswith("FAILED, ExitCode 3")
    assert [about(mail, job) for job in jobs] == [[], [], []]


def test_an_array_is_told_once_or_each_task(cluster: LocalCluster, mail: MailServer) -> None:
    whole = submit(cluster, "--mail-type=END", "--array=1-3", "--wrap", "true")
    each = submit(cluster, "--mail-type=END,ARRAY_TASKS", "--array=1-2", "--wrap", "true")
    wait_until(lambda: len(about(mail, f"{each}_1")) + len(about(mail, f"{each}_2")) == 2, what="a mail of each task")
    wait_until(lambda: about(mail, f"{whole}_*"), what="the mail of the array")
    assert about(mail, f"{whole}_*") == [f"demo Array Summary Job_id={whole}_* ({whole}) Name=wrap Ended, COMPLETED"]
    assert not about(mail, f"{whole}_1")


def child_of(cluster: LocalCluster) -> int:
    """Return the process id of the child that tells alerts."""
    controller = str(cluster.api("GET", "/v1/ping")["pid"])
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            if b"hpcsched.alerts" in words and parent == controller:
                return int(entry.name)
    return 0


def test_kills_of_controller_and_child_lose_and_double_no_mail(cluster: LocalCluster, mail: MailServer) -> None:
    jobs = []
    for turn in range(4):
        jobs.append(submit(cluster, "--mail-type=END", "--wrap", "true"))
        if turn % 2:
            cluster.down()
            cluster.up()
        else:
            os.kill(wait_until(lambda: child_of(cluster), what="the child"), signal.SIGKILL)
    wait_until(lambda: all(about(mail, job) for job in jobs), what="a mail of each job")
    last = submit(cluster, "--mail-type=END", "--wrap", "true")
    wait_until(lambda: about(mail, last), what="a mail after all others")
    ids = {str(one["Message-ID"]) for one in mail.mails}
    assert len(ids) == len(mail.mails)


def test_a_node_that_a_check_drains_is_told_and_a_silence_ends_that(
    cluster: LocalCluster, mail: MailServer, alertmanager: str
) -> None:
    said = cluster.run("hctl", "silence", "node=n2", "rule=Node*", "2h", "new", "fan").stdout
    assert said.startswith("silence 1 until ")
    (cluster.base / "ill").touch()
    jobs = [submit(cluster, "-w", node, "--wrap", "true") for node in ("n1", "n2")]
    wait_until(lambda: any("NodeDrained" in subject for subject in mail.subjects()), what="a mail of the drained node")
    found = wait_until(
        lambda: len(found := {one["labels"]["node"]: one for one in view(cluster)["alerts"]}) == 2 and found,
        what="the alerts of both nodes",
    )
    assert {name: (one["rule"], one["phase"], one["quiet"]) for name, one in found.items()} == {
        "n1": ("NodeDrained", "firing", ""),
        "n2": ("NodeDrained", "firing", "silence 1 by root"),
    }
    assert not any("n2" in subject for subject in mail.subjects())
    assert "silence 1 by root until" in cluster.run("hctl", "silence").stdout
    assert "NodeDrained" in cluster.run("hctl", "alerts").stdout
    if alertmanager:
        _is_in_alertmanager(cluster, alertmanager)
    cluster.run("hcancel", *jobs)
    (cluster.base / "ill").unlink()
    cluster.run("hctl", "silence", "end", "1")
    cluster.run("hctl", "resume", "n[1-2]")


def _is_in_alertmanager(cluster: LocalCluster, address: str) -> None:
    """The child posts each minute; a child that is started again posts at once."""
    os.kill(wait_until(lambda: child_of(cluster), what="the child"), signal.SIGKILL)

    def posted() -> list[Any]:
        with suppress(OSError), urllib.request.urlopen(f"{address}/api/v2/alerts", timeout=10) as answer:
            return [one for one in json.load(answer) if one["labels"]["alertname"] == "NodeDrained"]
        return []

    (one, *_) = wait_until(posted, what="the alert in the Alertmanager")
    assert (one["labels"]["severity"], one["labels"]["cluster"]) == ("warning", "demo")
    assert one["status"]["state"] in ("active", "unprocessed")
    assert "drained by hpcschedd/scripts" in one["annotations"]["summary"]


def test_a_receiver_is_tried_and_an_unknown_one_is_named(cluster: LocalCluster, mail: MailServer) -> None:
    assert cluster.run("hctl", "alerts", "test", "mail_to").stdout == "sent a test to mail_to\n"
    assert "[demo] test" in mail.subjects()
    said = cluster.run("hctl", "alerts", "test", "chat", check=False)
    assert said.returncode != 0
    assert "there is no such receiver" in said.stderr


def test_a_mail_server_that_does_not_answer_delays_no_job(cluster: LocalCluster, mail: MailServer) -> None:
    mail.stop()
    try:
        began_s = time.monotonic()
        jobs = [submit(cluster, "--mail-type=ALL", "--wrap", "true") for _ in range(5)]
        for job in jobs:
            wait_until(lambda job=job: cluster.json("hacct", "--json", "-j", job)["jobs"][0]["state"] == "COMPLETED")  # type: ignore[misc]
        assert time.monotonic() - began_s < 100
        trouble = wait_until(lambda: [one for one in view(cluster)["receivers"] if one["why"]], what="the trouble")
        assert "cannot reach the mail server" in trouble[0]["why"]
    finally:
        mail.start()


def test_alerts_that_are_switched_off_say_so(cluster: LocalCluster) -> None:
    config = cluster.config_dir / "hpcsched.toml"
    before = config.read_text()
    config.write_text(before.replace("\non = true\n", "\non = false\n", 1))
    cluster.run("hctl", "reconfigure")
    said = cluster.run("hctl", "alerts", check=False)
    assert "they are switched off; see [alerts] on" in said.stderr
    config.write_text(before)
    cluster.run("hctl", "reconfigure")
    wait_until(lambda: cluster.run("hctl", "alerts", check=False).returncode == 0, what="the alerts")
