"""hprio and hshare over what a controller really answers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from fake_api import FakeApi
from unit.controller.cluster import ANN, BOB, ROOT, Cluster

from hpcsched import client
from hpcsched.cli import hprio, hshare
from hpcsched.controller.views.queue import priority_views, share_views
from hpcsched.model.accounting import Account, Accounting, Qos, UserRules

LAB = Accounting(
    accounts=(
        Account(name="science", shares=3),
        Account(name="physics", parent="science", users=("ann",), qos=("normal", "high", "mid")),
        Account(name="guests", users=("*",), priority=5, qos=("normal", "high")),
    ),
    users=(UserRules(name="ann", shares=4, priority=10),),
    qos=(Qos(name="normal"), Qos(name="high", priority=8), Qos(name="mid", priority=4)),
    half_life_s=None,
)


@pytest.fixture
def cluster() -> Cluster:
    made = Cluster("n1")
    made.state.config = replace(made.state.config, accounting=LAB)
    made.controller.policy = replace(
        made.controller.policy, weight_fairshare=1000, weight_qos=100, weight_assoc=10, weights_tres=(("cpu", 50.0),)
    )
    job = made.submit(ANN, ntasks=2)
    made.run(job)
    made.tick(3600.0)
    return made


@pytest.fixture
def answers(api: FakeApi, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr(client, "my_name", lambda: "ann")

    def priorities(body: object, given: dict[str, str]) -> dict:
        snapshot = cluster.controller.snapshot(cluster.state.jobs_to_plan(), cluster.now_s)
        return priority_views(snapshot, cluster.controller.policy, cluster.state.pending)

    api.answers["GET /v1/priorities"] = priorities
    api.answers["GET /v1/shares"] = lambda body, given: share_views(cluster.state, ROOT, cluster.now_s)
    return cluster


def test_hprio_shows_what_a_priority_is_made_of(
    answers: Cluster, api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    answers.submit(ANN, ntasks=2, qos="mid", nice=7)
    answers.submit(BOB, ntasks=1, qos="high")
    answers.tick(6.0)  # factors are made anew every few seconds
    assert hprio.main([]) == 0
    assert capsys.readouterr().out == (
        "JOBID PART PRIORITY   SITE AGE ASSOC FAIRSHARE PARTITION QOS NICE TRES\n"
        "3     main   102130 100000   0     5      1000      1000 100    0   25\n"
        "2     main   101603 100000   0    10       500      1000  50   -7   50\n"
    )
    assert hprio.main(["-n", "-h", "-u", "ann,bob"]) == 0
    first = capsys.readouterr().out.splitlines()[0].split()
    assert [first[0], *first[2:3]] == ["3", "102130"]
    assert first[4:] == ["0.5000000", "1.0000000", "1.0000000", "1.0000000", "cpu=0.500000"]
    assert api.parameters("GET /v1/priorities") == {"user": "ann,bob"}
    assert hprio.main(["-w"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["100000", "1000", "10", "1000", "1000", "100", "cpu=50"]
    assert hprio.main(["-l", "-h"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:6] == ["2", "main", "ann", "physics", "mid", "101603"]
    assert hprio.main(["-o", "%.6i %Y %A %F %N %n %f", "-h"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "     2 101603 0 500 7 mid 0.5000000"
    assert hprio.main(["-o", "%Z"]) == 2


def test_hprio_marks_a_fixed_priority(answers: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    job = answers.submit(ANN, ntasks=2)
    answers.state.put(replace(answers.job(job), priority_set=77))
    assert hprio.main(["-h"]) == 0
    assert capsys.readouterr().out.split()[:4] == ["2", "main", "77*", "-"]
    assert hprio.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)["jobs"][0]["fixed"] is True


def test_hshare_shows_the_tree(answers: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    answers.submit(BOB, hold=True)
    assert hshare.main(["-a"]) == 0
    assert capsys.readouterr().out == (
        "Account    User RawShares NormShares RawUsage EffectvUsage FairShare\n"
        "root                    1   1.000000     7200     1.000000\n"
        " science                3   0.750000     7200     1.000000\n"
        "  physics               1   1.000000     7200     1.000000\n"
        "   physics ann          4   1.000000     7200     1.000000  0.500000\n"
        " guests                 1   0.250000        0     0.000000\n"
        "  guests   bob          1   1.000000        0     0.000000  1.000000\n"
    )
    assert hshare.main(["-n"]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if " ann " in line or "bob" in line] == [
        "ann"
    ]
    assert hshare.main(["-n", "-P", "-U", "-u", "bob", "-o", "account,fairshare,levelfs,cpuhours"]) == 0
    assert capsys.readouterr().out == "guests|1.000000|inf|0.0\n"
    assert hshare.main(["-U", "--format", "Account%10", "--noheader"]) == 0
    assert capsys.readouterr().out == "   physics\n"
    assert hshare.main(["-l", "-a", "-A", "physics", "--json"]) == 0
    physics, ann = json.loads(capsys.readouterr().out)["shares"]
    assert (physics["user"], ann["tres_seconds"]["cpu"], ann["level_fs"]) == ("", 7200.0, 1.0)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["-o", "shares"], "Invalid field requested: 'shares'"),
        (["-o", "user%x"], "its width must be a number"),
        (["ann"], "-u USER"),
    ],
)
def test_what_hshare_cannot_show_is_refused(
    argv: list[str], says: str, api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hshare.main(argv) == 2
    assert says in capsys.readouterr().err


def test_sprio_has_sprios_columns(answers: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    answers.submit(ANN, ntasks=2, qos="mid")
    answers.tick(6.0)
    assert hprio.sprio([]) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header == (
        "          JOBID PARTITION   PRIORITY       SITE        AGE      ASSOC  FAIRSHARE  PARTITION        QOS"
        "                 TRES"
    )
    assert line.startswith("              2 main    ")
    assert [line[: header.index(name) + len(name)][-6:].strip() for name in ("ASSOC", "QOS", "TRES")] == [
        "10",
        "50",
        "cpu=50",
    ]
    assert hprio.sprio(["-n", "-l"]) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.split()[2:] == [
        "USER",
        "PRIORITY",
        "SITE",
        "AGE",
        "ASSOC",
        "FAIRSHARE",
        "JOBSIZE",
        "PARTITION",
        "QOS",
        "TRES",
    ]
    assert line.split()[3].startswith("0.0000")
    assert hprio.sprio(["-h", "-o", "%i %r"]) == 0
    assert capsys.readouterr().out == "2 main\n"


def test_sshare_has_sshares_columns(answers: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert hshare.sshare(["-A", "physics", "-a"]) == 0
    header, rule, account, user = capsys.readouterr().out.split("\n")[:4]
    assert header == "Account                    User  RawShares  NormShares    RawUsage  EffectvUsage  FairShare "
    assert rule == "-------------------- ---------- ---------- ----------- ----------- ------------- ---------- "
    assert account[:32] == "  physics                       "
    assert user[:42] == "   physics                  ann          4"
    assert hshare.sshare(["-U", "--format", "Account%256", "--noheader"]) == 0
    assert capsys.readouterr().out == f"{'   physics':256} \n"
    assert hshare.sshare(["-n", "-P", "-U", "-o", "account,user"]) == 0
    assert capsys.readouterr().out == "physics|ann\n"
