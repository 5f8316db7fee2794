"""Which account and QOS a job gets, and who is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from hpcsched.errors import ProtocolError, RequestError
from hpcsched.model.accounting import NO_ACCOUNTING, Account, Accounting, Limits, Qos, UserRules, resolve
from hpcsched.model.codec import value_from_json, value_to_json
from hpcsched.sched.snapshot import Ledger
from hpcsched.sched.usage import Used

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
def test_what_is_not_one_s_own_is_refused(user: str, account: str, qos: str, why: str) -> None:
    with pytest.raises(RequestError) as caught:
        resolve(LAB, user, account, qos)
    assert why in str(caught.value)


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
    used = Used(account="maths", user="anna", qos="", at_s=1.5, amounts=(("cpu", 2.0),))
    ledger = Ledger(accounting=accounting, fairshare=((("maths", "anna"), 0.5),), used=(used,))
    obj = json.loads(json.dumps(value_to_json(ledger)))
    assert value_from_json(Ledger, obj) == ledger
    obj["fairshare"] = [[["maths", "anna"], 0.5, 1]]
    with pytest.raises(ProtocolError, match="a list of 2 is wanted"):
        value_from_json(Ledger, obj)
