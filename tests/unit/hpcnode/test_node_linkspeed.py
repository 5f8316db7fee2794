"""One end sends zeros, the other counts them, briefly and on loopback."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from hpcnode.agent import probe


@pytest.fixture
def giver() -> Iterator[int]:
    """Send zeros to a peer with the token "right", in a thread; return the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=probe.serve_zeros_once, args=(listener, "right", 0.5))
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


def test_only_a_peer_with_the_token_gets_a_rate(giver: int) -> None:
    for wrong in ("wrong", "r" * 500):
        with pytest.raises((ValueError, OSError)):
            probe.rate_mbps("127.0.0.1", giver, wrong, warm_up_s=0.0)
    with socket.create_connection(("127.0.0.1", giver)):
        pass  # one who says nothing and goes
    assert probe.rate_mbps("127.0.0.1", giver, "right", warm_up_s=0.0) >= 1


def test_the_port_is_known_before_a_peer_connects() -> None:
    port = probe.link_facts("right", "", 0)["link_port"]
    assert probe.link_facts("right", "127.0.0.1", port)["rate_mbps"] >= 1
    with pytest.raises(OSError):  # it gave once
        probe.rate_mbps("127.0.0.1", port, "right")
