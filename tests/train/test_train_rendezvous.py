"""Neighbours in the ring find each other whatever else connects, and no longer than that makes sense."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from waiting import PATIENCE_S

from hpctrain.comm.hosts import Offer, await_left, reach
from hpctrain.peers import prove_as_guest


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def offer_of(listener: socket.socket) -> Offer:
    address, port = listener.getsockname()
    return Offer(addresses=(address,), port=port, key=b"s" * 16)


def test_a_peer_that_gave_up_and_tried_again_is_met_at_its_new_connection(listener: socket.socket) -> None:
    """The one who is awaited was too slow to answer the first time: that connection leads nowhere."""
    offer = offer_of(listener)
    with socket.create_connection((offer.addresses[0], offer.port)) as stale:
        stale.sendall(b"n" * 16)
    found: list[socket.socket] = []
    until_s = time.monotonic() + PATIENCE_S
    waiter = threading.Thread(target=await_left, args=(listener, offer, until_s, found))
    waiter.start()
    with reach(offer, until_s) as right:  # type: ignore[union-attr]
        waiter.join()
        right.sendall(b"hello")
        assert found[0].recv(5) == b"hello"
    found[0].close()


def test_a_stranger_is_sent_away(listener: socket.socket) -> None:
    offer = offer_of(listener)
    found: list[socket.socket] = []
    waiter = threading.Thread(target=await_left, args=(listener, offer, time.monotonic() + PATIENCE_S, found))
    waiter.start()
    with socket.create_connection((offer.addresses[0], offer.port)) as stranger:
        stranger.settimeout(PATIENCE_S)
        assert prove_as_guest(stranger, b"x" * 16) is None
    with reach(offer, time.monotonic() + PATIENCE_S):  # type: ignore[union-attr]
        waiter.join()
    found[0].close()


def test_a_meeting_that_has_no_sense_any_more_ends(listener: socket.socket) -> None:
    """Nobody answers, and nobody comes; without a word from the roster either would go on for a long time."""
    offer = offer_of(listener)
    broken = threading.Event()
    until_s = time.monotonic() + 1e6
    found: list[socket.socket] = []
    waiter = threading.Thread(target=await_left, args=(listener, offer, until_s, found, broken.is_set), daemon=True)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        other = threading.Thread(target=reach, args=(offer_of(deaf), until_s, broken.is_set), daemon=True)
        for thread in (waiter, other):
            thread.start()
        broken.set()
        for thread in (waiter, other):
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
    assert not found
