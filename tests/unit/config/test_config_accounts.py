"""Accounts, users, QOS, limits and licences in hpcsched.toml: read, and refused with the table and what is there."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from hpcsched.config.load import Config, build_config
from hpcsched.errors import ConfigError
from hpcsched.model.accounting import Fairness, PreemptMode

LAB = """
[fairshare]
algorithm = "classic"
half_life = "1-0"
billing = "cpu=1,mem=0.25G,gpu=4"
[accounts.physics]
shares = 10
users = ["anna", "ben"]
grp_tres = "cpu=100,mem=1T,gpu:a100=4,license/matlab=2"
[accounts.lasers]
parent = "physics"
users = ["anna"]
max_jobs = 0
[users.anna]
default_account = "lasers"
shares = { physics = 3 }
max_wall = "2:00:00"
[qos.low]
preempt_mode = "checkpoint"
[qos.high]
priority = 5
preempt = ["low"]
exempt_time_s = 60
max_tres_per_user = { gpu = 2, mem = "10G" }
[partitions.main]
grp_jobs = 4
billing = "gpu=8"
priority_job_factor = 3
allow_accounts = ["physics"]
allow_qos = ["low", "high"]
[licenses]
matlab = 4
"""


def load(text: str) -> Config:
    return build_config(tomllib.loads(text), (), config_dir=Path("/etc/hpcsched"), environ={"HOME": "/home/x"})


def test_all_of_it_is_read() -> None:
    accounting = load(LAB).accounting
    assert (accounting.fairness, accounting.half_life_s) == (Fairness.CLASSIC, 86400)
    assert accounting.billing == (("cpu", 1.0), ("mem", 0.25), ("gres/gpu", 4.0))
    physics, lasers = accounting.accounts
    tres = (("cpu", 100), ("mem", 1 << 20), ("gres/gpu:a100", 4), ("license/matlab", 2))
    assert (physics.shares, physics.limits.grp_tres, physics.limits.max_jobs) == (10, tres, None)
    assert (lasers.parent, lasers.limits.max_jobs) == ("physics", 0)
    assert accounting.default_account("anna") == "lasers"
    assert accounting.default_account("ben") == "physics"
    assert [accounting.shares_of("anna", account) for account in ("physics", "lasers")] == [3, 1]
    assert accounting.users[0].limits.max_wall_s == 7200
    low, high = accounting.qos
    assert (low.preempt_mode, high.preempt_mode, high.preempt) == (PreemptMode.CHECKPOINT, None, ("low",))
    assert high.limits.max_tres_per_user == (("gres/gpu", 2), ("mem", 10240))
    assert accounting.licenses == (("matlab", 4),)
    assert accounting.token_billing == ()
    (main,) = load(LAB).partitions
    assert (main.limits.grp_jobs, main.billing) == (4, (("gres/gpu", 8.0),))
    assert (main.priority_job_factor, main.allow_accounts, main.allow_qos) == (3, ("physics",), ("low", "high"))


def test_nothing_said_is_no_accounts_and_no_limits() -> None:
    accounting = load("").accounting
    assert (accounting.accounts, accounting.qos, accounting.licenses) == ((), (), ())
    assert accounting.fairness is Fairness.FAIR_TREE


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            '[partitions.p]\nallow_accounts = ["a"]',
            "[partitions.p] allow_accounts names 'a', and there is no such account",
        ),
        ('[partitions.p]\nallow_qos = ["hgih"]\n[qos.high]', "no such QOS (did you mean high?)"),
        ('[accounts.a]\nparent = "b"', "[accounts.a] parent names 'b', and there is no such account"),
        ('[accounts.a]\nparent = "b"\n[accounts.b]\nparent = "a"', "its own ancestor: a in b in a"),
        ('[accounts.a]\nparent = "a"', "its own ancestor"),
        ('[accounts.a]\nusers = ["x y"]', "wants user names"),
        ('[accounts.a]\nusers = ["u"]\n[users.v]\nshares = 2', "no account has v among its users"),
        ('[accounts.a]\nusers = ["u"]\n[users.u]\ndefault_account = "b"', "no such account of this user"),
        ('[accounts.a]\nqos = ["hihg"]\n[qos.high]', "no such QOS (did you mean high?)"),
        ('[qos.high]\npreempt = ["high"]', "names itself"),
        ('[qos.high]\npreempt = ["low"]', "there is no such QOS"),
        ('[qos.high]\npreempt_mode = "kill"', "wants one of off, requeue"),
        ('[qos.high]\ngrp_tres = "gpus=3"', "knows no resource 'gpus'"),
        ('[qos.high]\ngrp_tres = "cpu=3,cpu=4"', "names a resource twice"),
        ('[qos.high]\ngrp_tres = "cpu=many"', "wants a whole number for cpu"),
        ('[qos.high]\ngrp_tres_mins = "node=3"', "wants only cpu, mem, gres/gpu, billing"),
        ("[qos.high]\nmax_jobs = -2", "-1 for no limit"),
        ("[qos.high]\nmax_job = 2", "unknown key 'max_job' (did you mean"),
        ('[fairshare]\nbilling = "billing=1"', "wants no weight of billing"),
        ("[licenses]\nmatlab = -1", "[licenses] matlab = -1"),
        ('[licenses]\n"a/b" = 1', "is not a name"),
        ("accounts = 3", "should be a table"),
    ],
)
def test_what_is_wrong_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert why in str(caught.value)


@pytest.mark.parametrize("value", ['"prompt=0.001,completion=0.01"', "{ prompt = 0.001, completion = 0.01 }"], ids=str)
def test_tokens_have_a_price_in_billing_seconds(value: str) -> None:
    found = load(f"[fairshare]\ntoken_billing = {value}\n").accounting
    assert found.token_billing == (("prompt", 0.001), ("completion", 0.01))


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ('"cpu=1"', "knows no tokens 'cpu'; there are prompt, completion"),
        ('"prompt=1,prompt=2"', "names prompt twice"),
        ('"prompt=-1"', "wants a number for prompt, zero or more"),
        ("{ completion = nan }", "wants a number for completion, zero or more"),
        ("3", 'wants a text as "prompt=0.001,completion=0.01"'),
    ],
    ids=str,
)
def test_a_price_of_tokens_that_is_none_is_refused(value: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"token_billing.*{why}"):
        load(f"[fairshare]\ntoken_billing = {value}\n")
