"""Who is measured with whom, what is read from answers, and what is said about links."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import combinations
from typing import Any

import pytest

from hpcsched.errors import ProtocolError
from hpcsched.metrics.links import (
    LinkEnd,
    LinkRun,
    ends,
    failed_run,
    link_findings,
    link_from,
    link_from_json,
    link_run_of,
    link_text,
    rounds,
    slower_together,
    with_alone,
)

CARD = {"device": "eth0", "kind": "wired", "speed_mbps": 1000, "mtu": 1500, "duplex": "full"}
ANSWER = {"rtt_us": 120.0, "rtt_p99_us": 300.0, "up_mbps": 941.0, "down_mbps": 938.0, "lost": 0.0, "mtu": 1500}


def a_run(one: str, other: str, mbps: float = 940.0, **changes: Any) -> LinkRun:
    end = LinkEnd(device="eth0", kind="wired", speed_mbps=1000, mtu=1500)
    values = {"rtt_us": 120.0, "to_mbps": mbps, "from_mbps": mbps, "near": end, "far": end} | changes
    return LinkRun(one=one, other=other, at_s=1.0, **values)


@pytest.mark.parametrize("count", range(2, 20))
def test_each_pair_is_measured_once_and_a_node_is_in_one_pair_of_a_round(count: int) -> None:
    names = [f"n{number}" for number in range(count)]
    found = rounds(names)
    assert len(found) == count - 1 + count % 2
    for pairs in found:
        busy = [name for pair in pairs for name in pair]
        assert len(busy) == len(set(busy))
    assert sorted(map(sorted, sum(found, []))) == sorted(map(sorted, combinations(names, 2)))


def test_an_answer_is_read_and_kept_as_it_was() -> None:
    run = link_run_of(ANSWER | {"near": CARD, "far": CARD | {"kind": "wifi"}}, "n1", "n2", at_s=7.0)
    assert (run.to_mbps, run.from_mbps, run.mbps, run.mtu) == (941.0, 938.0, 938.0, 1500)
    assert run.end_of("n2").kind == "wifi"
    assert link_from(link_text(run)) == link_from_json(asdict(run)) == run


@pytest.mark.parametrize(
    "answer",
    [None, 7, [], "link", {}, ANSWER | {"up_mbps": "1"}, ANSWER | {"up_mbps": float("nan")}, ANSWER | {"rtt_us": True},
     ANSWER | {"down_mbps": 2**63}, ANSWER | {"down_mbps": -1}, ANSWER | {"up_mbps": float("inf")}],
)  # fmt: skip
def test_an_answer_without_rates_is_refused(answer: object) -> None:
    with pytest.raises(ProtocolError, match="n1 measured to n2"):
        link_run_of(answer, "n1", "n2", at_s=0.0)


def test_what_a_hostile_node_says_of_its_interface_is_bounded() -> None:
    hostile = {"device": "\x1b[31m" + "e" * 9000, "kind": "radio", "speed_mbps": 2**70, "mtu": [], "duplex": {}}
    run = link_run_of(ANSWER | {"near": hostile, "far": 3, "lost": 9e8, "mtu": "x"}, "n1", "n2", at_s=0.0)
    assert run.near == LinkEnd(device="?[31meeeeeeeeee")
    assert (run.far, run.lost, run.mtu) == (LinkEnd(), 1.0, 0)
    assert failed_run("n1", "n2", at_s=0.0, why="a\nb" * 900).why == ("a?b" * 900)[:200]


def all_pairs(slow: dict[str, float], **changes: Any) -> list[LinkRun]:
    """Return runs in which a pair is as fast as the slower of its nodes."""
    return [
        a_run(one, other, min(slow.get(one, 940.0), slow.get(other, 940.0)), **changes)
        for one, other in combinations(["n1", "n2", "n3", "n4", "n5"], 2)
    ]


def test_five_good_nodes_are_told_nothing() -> None:
    assert list(link_findings(all_pairs({}))) == []
    assert list(link_findings(all_pairs({}, near=LinkEnd(), far=LinkEnd()))) == []


def test_a_slow_node_is_named_and_its_peers_are_not() -> None:
    runs = all_pairs({"n3": 94.0})
    assert list(link_findings(runs)) == ["n3: its best link has 10 % of the usual rate: eth0 negotiated 1000 Mbit/s"]
    radio = LinkEnd(device="wlan0", kind="wifi", mtu=1500)
    wifi = [replace(run, far=radio) if run.other == "n3" else run for run in runs]
    wifi = [replace(run, near=radio) if run.one == "n3" else run for run in wifi]
    assert list(link_findings(wifi)) == ["n3: its best link has 10 % of the usual rate: it is on Wi-Fi"]
    assert ends(wifi)["n3"].kind == "wifi"


def test_two_nodes_alone_do_not_say_which_is_slow() -> None:
    assert list(link_findings([a_run("n1", "n2", 1.0)])) == []


def test_half_duplex_loss_mtu_and_failures_are_named() -> None:
    runs = all_pairs({})
    half = LinkEnd(device="eth1", kind="wired", speed_mbps=100, mtu=1500, duplex="half")
    jumbo = LinkEnd(device="eth0", kind="wired", speed_mbps=1000, mtu=9000)
    runs[0] = replace(runs[0], near=half, lost=0.031)
    runs = [replace(run, far=jumbo) if run.other == "n5" else run for run in runs]
    runs[1] = failed_run("n1", "n3", at_s=1.0, why="n1 cannot reach 10.0.0.3 port 4711: timed out")
    assert list(link_findings(runs)) == [
        "n1: eth1 is half duplex: replace the cable, or set both ends to negotiate",
        "n5: MTU 9000, others 1500: set the same on one network",
        "n1-n2: 3.1 % of the segments were sent again: a cable, a port, or the radio",
        "n1-n3: not measured: n1 cannot reach 10.0.0.3 port 4711: timed out",
    ]


def test_pairs_that_are_faster_alone_share_something() -> None:
    runs = [a_run("n1", "n2", 940.0), a_run("n3", "n4", 400.0), a_run("n1", "n3", 930.0), a_run("n2", "n4", 940.0)]
    (slow,) = slower_together(runs)
    assert slow.pair == ("n3", "n4")
    runs[1] = with_alone(slow, a_run("n3", "n4", 930.0))
    assert list(link_findings(runs)) == [
        "n3-n4: 400 Mbit/s while others send, 930 alone: it shares an uplink or an access point with them"
    ]
    assert slower_together([failed_run("n1", "n2", at_s=0.0, why="x")]) == []


def test_a_pair_is_compared_with_its_own_past_if_neither_was_busy() -> None:
    past = [a_run("n1", "n2", 940.0) for _ in range(3)]
    now = a_run("n1", "n2", 500.0)
    assert list(link_findings([now], past)) == ["n1-n2: 500 Mbit/s, 940 was usual"]
    assert list(link_findings([replace(now, busy="jobs were running: 7")], past)) == []
    assert list(link_findings([now], past[1:])) == []
    assert list(link_findings([now], [replace(run, busy="jobs") for run in past])) == []
