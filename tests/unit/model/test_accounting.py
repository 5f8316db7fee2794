"""Which account and QOS a job gets, and who is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from hpcsched.errors import ProtocolError, RequestError
from hpcsched.model.accounting import NO_ACCOUNTING, Account, Accounting, Limits, Qos, UserRules, resolve
from hpcsched.model.codec import value_from_json, value_to_json
from hpcsched.sched.fairshare import UsedResources
from hpcsched.sched.snapshot import UsageLedger

LAB = Accounting(
    accounts=(
        Account(name="science", qos=("normal", "high"), default_qos="normal"),
        Account(name="physics", parent="science", users=("anna", "ben")),
        Account(name="maths", parent="science", users=("anna",), qos=("normal",)),
        Account(name="guests", users=("*",)),
    ),
    users=(UserRules(name="anna", default_account="maths"), UserRules(name="ben", qos=("low",), default_qos="low")),
    qos=(Qos(name="normal"), Qos(name="high"), Qos(name="low")),
)


def test_nothing_configured_takes_any_name() -> None:
    assert resolve(NO_ACCOUNTING, "anna", "whatever", "long") == ("whatever", "long")
    assert NO_ACCOUNTING.association_of("anna", "whatever") == ("", "anna")


def test_what_is_not_said_comes_from_the_user_then_the_account_then_its_parents() -> None:
    assert resolve(LAB, "anna", "", "") == ("maths", "normal")
    assert resolve(LAB, "anna", "physics", "high") == ("physics", "high")
    assert resolve(LAB, "ben", "", "") == ("physics", "low")
    assert resolve(LAB, "zoe", "", "") == ("guests", "normal")


@pytest.mark.parametrize(
    ("user", "account", "qos", "why"),
    [
        ("ben", "maths", "", "Invalid account or account/partition combination specified: ben is in physics"),
        ("zoe", "physics", "", "zoe is in guests"),
        ("anna", "physic", "", "did you mean physics?"),
        ("anna", "maths", "high", "Invalid qos specification: anna may use normal"),
        ("ben", "", "high", "ben may use low"),
        ("zoe", "", "hihg", "did you mean high?"),
    ],
)
def test_e6_what_is_not_one_s_own_is_refused(user: str, account: str, qos: str, why: str) -> None:
    with pytest.raises(RequestError) as caught:
        resolve(LAB, user, account, qos)
    assert why in str(caught.value)


OPEN_ACCOUNT = Accounting(accounts=(Account(name="all", users=("*",)),), qos=(Qos(name="normal"), Qos(name="urgent")))
NO_ACCOUNTS = Accounting(qos=(Qos(name="normal"), Qos(name="urgent")), users=(UserRules(name="anna", qos=("urgent",)),))


@pytest.mark.parametrize("accounting", [OPEN_ACCOUNT, NO_ACCOUNTS])
def test_a_qos_is_closed_to_those_who_do_not_have_it_in_their_list(accounting: Accounting) -> None:
    assert resolve(accounting, "zoe", "", "")[1] == "normal"
    assert resolve(accounting, "zoe", "", "normal")[1] == "normal"
    with pytest.raises(
        RequestError, match="cannot use QOS 'urgent': Invalid qos specification: zoe may use normal; an admin"
    ):
        resolve(accounting, "zoe", "", "urgent")


def test_a_qos_is_opened_by_the_list_that_the_refusal_names() -> None:
    with pytest.raises(RequestError, match=r"adding 'urgent' to qos in \[accounts.all\] of hpcsched.toml"):
        resolve(OPEN_ACCOUNT, "zoe", "", "urgent")
    opened = replace(OPEN_ACCOUNT, accounts=(replace(OPEN_ACCOUNT.accounts[0], qos=("normal", "urgent")),))
    assert resolve(opened, "zoe", "", "urgent") == ("all", "urgent")
    with pytest.raises(RequestError, match=r"adding 'urgent' to qos in \[users.zoe\] of hpcsched.toml"):
        resolve(NO_ACCOUNTS, "zoe", "", "urgent")
    assert resolve(NO_ACCOUNTS, "anna", "", "urgent") == ("", "urgent")


def test_a_default_qos_is_in_its_list() -> None:
    account = Account(name="all", users=("*",), default_qos="urgent")
    accounting = replace(OPEN_ACCOUNT, accounts=(account,))
    assert resolve(accounting, "zoe", "", "") == resolve(accounting, "zoe", "", "urgent") == ("all", "urgent")


def test_with_accounts_but_no_qos_only_slurm_s_own_name_is_taken() -> None:
    plain = Accounting(accounts=(Account(name="physics", users=("anna",)),))
    assert resolve(plain, "anna", "", "") == ("physics", "")
    assert resolve(plain, "anna", "", "normal") == ("physics", "normal")
    with pytest.raises(RequestError, match=r"cannot use QOS 'urgent'.* none is configured"):
        resolve(plain, "anna", "", "urgent")


def test_who_is_in_no_account_may_submit_nothing() -> None:
    closed = Accounting(accounts=(Account(name="physics", users=("anna",)),))
    with pytest.raises(RequestError, match="zoe is in no account"):
        resolve(closed, "zoe", "", "")


def test_a_ledger_survives_its_way_through_json() -> None:
    limits = Limits(grp_tres=(("cpu", 3),), max_jobs=0)
    accounting = replace(LAB, accounts=(replace(LAB.accounts[0], limits=limits),), licenses=(("matlab", 2),))
    used = UsedResources(account="maths", user="anna", qos="", at_s=1.5, amounts=(("cpu", 2.0),))
    ledger = UsageLedger(accounting=accounting, fairshare=((("maths", "anna"), 0.5),), used=(used,))
    obj = json.loads(json.dumps(value_to_json(ledger)))
    assert value_from_json(UsageLedger, obj) == ledger
    obj["fairshare"] = [[["maths", "anna"], 0.5, 1]]
    with pytest.raises(ProtocolError, match="a list of 2 is wanted"):
        value_from_json(UsageLedger, obj)
