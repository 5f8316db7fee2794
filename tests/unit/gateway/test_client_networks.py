"""What the gateway counts as one address."""

from __future__ import annotations

import pytest

pytest.importorskip("starlette")

from hpcsched.gateway.app import network_of


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("192.0.2.1", "192.0.2.1", True),
        ("192.0.2.1", "192.0.2.2", False),
        ("192.0.2.1", "::ffff:192.0.2.1", True),
        ("127.0.0.1", "127.200.3.4", True),
        ("127.0.0.1", "::1", True),
        ("127.0.0.1", "::ffff:127.0.0.9", True),
        ("2001:db8::1", "2001:db8::2", True),
        ("2001:db8::1", "2001:db8:0:0:ffff::", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("", "192.0.2.1", False),
    ],
)
def test_e1_addresses_of_one_client_count_as_one(one: str, other: str, is_same: bool) -> None:
    assert (network_of(one) == network_of(other)) is is_same
