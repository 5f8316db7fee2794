"""Where other nodes reach a node."""

from __future__ import annotations

from dataclasses import replace

import pytest
from jobs import node

from hpcsched.model.node import address_of


@pytest.mark.parametrize(("host", "address"), [("local", "127.0.0.1"), ("node7.lab", "node7.lab")])
def test_a_node_is_reached_at_its_host_and_one_without_ssh_on_this_machine(host: str, address: str) -> None:
    assert address_of(replace(node().spec, host=host)) == address
