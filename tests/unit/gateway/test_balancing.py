"""Which replica gets a request: versions by weight, known prompts, loads, and requests that name a version."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from hpcsched.gateway.balancing import (
    BLOCK_CHARS,
    LOAD_CAP,
    RecentMap,
    ReplicaChoice,
    ReplicaState,
    drawn,
    prompt_blocks,
    prompt_of,
)

WEIGHTS = {"v1": 100}


def replica(
    job: int, active: int = 0, version: str = "v1", *, ready: bool = True, drained: bool = False
) -> ReplicaState:
    return ReplicaState(job=job, version=version, is_ready=ready, is_drained=drained, active=active)


def test_the_replica_with_the_fewest_requests_is_chosen_among_ready_ones() -> None:
    replicas = [replica(1, 3), replica(2, 1), replica(3, 0, ready=False), replica(4, 0, drained=True)]
    assert ReplicaChoice().choose(replicas, WEIGHTS, (), b"") == 2
    assert ReplicaChoice().choose(replicas, WEIGHTS, (), b"", without={2}) == 1
    assert ReplicaChoice().choose(replicas[2:], WEIGHTS, (), b"") is None


def test_a_known_prompt_goes_where_it_was_unless_that_replica_is_too_busy() -> None:
    choice, prompt = ReplicaChoice(), prompt_blocks("a" * 3 * BLOCK_CHARS, "ann")
    assert choice.choose([replica(1, 0), replica(2, 1)], WEIGHTS, prompt, b"x") == 1
    longer = prompt_blocks("a" * 3 * BLOCK_CHARS + "b" * BLOCK_CHARS, "ann")
    assert choice.choose([replica(1, 3), replica(2, 2)], WEIGHTS, longer, b"x") == 1
    assert choice.choose([replica(1, 9), replica(2, 2)], WEIGHTS, longer, b"x") == 2
    assert choice.choose([replica(1, 3), replica(2, 2)], WEIGHTS, prompt_blocks("c" * BLOCK_CHARS, "ann"), b"x") == 2


def test_a_conversation_keeps_its_version_until_that_has_no_replica() -> None:
    choice, both = ReplicaChoice(), [replica(1), replica(2, version="v2")]
    assert choice.choose(both, {"v1": 100, "v2": -1}, (), b"one") == 1
    assert choice.choose(both, {"v1": 0, "v2": 100}, (), b"one") == 1
    assert choice.choose(both, {"v1": 0, "v2": 100}, (), b"two") == 2
    assert choice.choose(both[1:], {"v2": 100}, (), b"one") == 2


def test_a_version_that_is_not_checked_yet_gets_only_requests_that_name_it() -> None:
    choice, both = ReplicaChoice(), [replica(1, ready=False), replica(2, version="v2")]
    assert choice.choose(both, {"v1": 100, "v2": -1}, (), b"one") is None
    assert choice.choose(both, {"v1": 100, "v2": -1}, (), b"one", version="v2") == 2
    assert choice.choose(both, {"v1": 100, "v2": -1}, (), b"one", version="v3") is None


def test_new_conversations_are_dealt_by_weight() -> None:
    counts = Counter(drawn({"v1": 90, "v2": 10}, str(number).encode()) for number in range(5_000))
    assert 350 < counts["v2"] < 650
    assert drawn({"v2": 0, "v10": 0}, b"x") == "v10"


@settings(max_examples=50, deadline=None)
@given(prompts=st.lists(st.integers(0, 3), min_size=20, max_size=80), replicas=st.integers(1, 4))
def test_affinity_never_gives_a_replica_much_more_than_the_mean(prompts: list[int], replicas: int) -> None:
    choice, active = ReplicaChoice(), dict.fromkeys(range(1, replicas + 1), 0)
    for prompt in prompts:
        states = [replica(job, count) for job, count in active.items()]
        job = choice.choose(states, WEIGHTS, prompt_blocks(str(prompt) * BLOCK_CHARS, "ann"), b"%d" % prompt)
        assert job is not None
        active[job] += 1
        assert active[job] <= LOAD_CAP * sum(active.values()) / replicas + 2


def test_what_is_remembered_is_bounded() -> None:
    known: RecentMap[int] = RecentMap(2)
    for number in (b"1", b"2", b"1", b"3"):
        known.put(number, 1)
    assert (len(known), known.get(b"2"), known.get(b"1")) == (2, None, 1)


def test_a_conversation_is_told_by_its_beginning_and_odd_prompts_are_read_too() -> None:
    first = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]}
    later = {"messages": [*first["messages"], {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]}
    assert prompt_of(first)[1] == prompt_of(later)[1] == "system:s\nuser:a"
    for odd in ({}, {"messages": [3, None, {}]}, {"prompt": [[1, 2], "x"]}, {"prompt": None}, {"messages": "x"}):
        assert isinstance(prompt_of(odd)[0], str)
