"""Which ranks form the next generation, and who keeps which part: small worlds."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest

from hpcserve.config import ModelConfig, parse_config
from hpcserve.group.arrange import GroupArrangement, GroupSettings, even_split, part_bytes, spare_parts
from hpcserve.plan import ServeLoad
from hpcserve.split import ModelPart, ModelSplit
from hpctrain.elastic.roster import Member, MemberChoice
from tests.tiny_models import FAMILIES

LOAD = ServeLoad(streams=2, prompt_tokens=32, answer_tokens=32, context_tokens=128)


def config() -> ModelConfig:
    return parse_config({"model_type": "llama", **FAMILIES["llama"]})


def arranged(said: list[str] | None = None, **settings: Any) -> GroupArrangement:
    wanted = {"ranks": 3, "kind": "fp32", "load": LOAD, "shape": "tensor", **settings}
    return GroupArrangement(config(), GroupSettings(**wanted), (said if said is not None else []).append)


def members(*numbers: int, free_bytes: int = 1 << 40, hosts: Mapping[int, str] | None = None) -> list[Member]:
    """Return members of one host, or of those in `hosts` by number."""
    offer: dict[str, object] = {"node": "n", "free_bytes": free_bytes}
    return [
        Member(number=number, slot=number, offer=offer | {"host": (hosts or {}).get(number)}, heard_at_s=0.0)
        for number in numbers
    ]


def form(arrangement: GroupArrangement, choice: MemberChoice | None) -> dict[int, ModelPart]:
    """Form the generation of a choice; the part of each member by its number."""
    assert choice is not None
    news: dict[str, object] = {"members": [{"number": one.number} for one in choice.members], **choice.facts}
    arrangement.formed(news)
    split = ModelSplit.from_json(choice.facts["split"])
    return {one.number: split.part(rank) for rank, one in enumerate(choice.members)}


def test_the_first_generation_waits_for_all_ranks_while_there_is_patience() -> None:
    arrangement = arranged()
    assert arrangement([], members(0, 1), True) is None
    assert len(form(arrangement, arrangement([], members(0, 1), False))) == 2


def test_a_spare_takes_the_part_of_a_lost_rank_and_the_others_keep_theirs() -> None:
    arrangement = arranged()
    before = form(arrangement, arrangement([], members(0, 1, 2), True))
    after = form(arrangement, arrangement(members(0, 2), members(3), False))
    assert after == {0: before[0], 3: before[1], 2: before[2]}
    assert list(after) == [0, 3, 2]


def test_without_a_spare_the_model_is_planned_for_the_ranks_that_are_left() -> None:
    arrangement = arranged()
    form(arrangement, arrangement([], members(0, 1, 2), True))
    after = form(arrangement, arrangement(members(0, 2), [], False))
    assert list(after) == [0, 2]
    assert sum(len(part.ffn) for part in after.values()) == config().ffn


def test_a_rank_that_comes_to_a_reduced_group_is_taken_in() -> None:
    arrangement = arranged()
    form(arrangement, arrangement([], members(0, 1, 2), True))
    form(arrangement, arrangement(members(0, 2), [], False))
    choice = arrangement(members(0, 2), members(3), False)
    assert list(form(arrangement, choice)) == [0, 2, 3]


def test_a_rank_that_comes_to_a_whole_group_changes_nothing() -> None:
    arrangement = arranged()
    before = form(arrangement, arrangement([], members(0, 1, 2), True))
    assert form(arrangement, arrangement(members(0, 1, 2), members(3), False)) == before


@pytest.mark.parametrize("shape", ["auto", "pipeline"])
def test_the_ranks_of_any_shape_hold_the_whole_model(shape: str) -> None:
    arrangement = arranged(shape=shape, ranks=2)
    choice = arrangement([], members(0, 1), True)
    assert choice is not None
    whole = config()
    ModelSplit.from_json(choice.facts["split"]).check(
        layers=whole.layers, kv_groups=whole.kv_groups, ffn=whole.ffn, vocab=whole.vocab
    )


def test_too_little_memory_makes_no_generation_until_more_ranks_come() -> None:
    said: list[str] = []
    arrangement = arranged(said, shape="auto", ranks=2)
    small = members(0, 1, free_bytes=300_200_000)  # a rank needs 300 MB before it holds any weights
    assert arrangement([], small, False) is None
    assert "waits for more ranks: cannot fit the model" in said[0]
    assert arrangement([], small, False) is None
    assert len(said) == 1, "it is said once"


def test_a_spare_with_too_little_memory_does_not_take_a_part() -> None:
    arrangement = arranged(ranks=2)
    form(arrangement, arrangement([], members(0, 1), True))
    after = form(arrangement, arrangement(members(1), members(2, free_bytes=1000), False))
    assert list(after) == [1, 2], "planned anew for both, as tensor splits of any size are allowed here"


def test_a_slow_rank_gets_less_when_it_was_measured() -> None:
    arrangement = arranged(shape="auto", ranks=2, load=ServeLoad(streams=1, prompt_tokens=32, answer_tokens=32))
    shaped = even_split(config(), 2, "tensor")
    arrangement.formed(
        {
            "members": [{"number": 0}, {"number": 1}],
            "split": shaped.to_json(),
            "candidates": 2,
            "tokens_s": 100.0,
        }
    )
    assert arrangement.learn({0: 0.001, 1: 1.0}, members(0, 1)), "one of them takes a second for its part"
    after = form(arrangement, arrangement(members(0, 1), [], False))
    assert 1 not in after or len(after[0].ffn) > len(after[1].ffn)


def test_measurements_that_confirm_the_plan_do_not_change_it() -> None:
    arrangement = arranged(shape="tensor", ranks=2)
    form(arrangement, arrangement([], members(0, 1), True))
    assert not arrangement.learn({0: 0.01, 1: 0.01}, members(0, 1))


def test_a_spare_loads_the_parts_for_which_it_has_memory_beside_one_cache() -> None:
    split = even_split(config(), 3, "tensor")
    parts = [split.part(rank) for rank in range(3)]
    sizes = [part_bytes(config(), part, "fp32") for part in parts]
    cache = max(part_bytes(config(), part, "fp32", 8) - size for part, size in zip(parts, sizes, strict=True))

    def loaded(free: int) -> list[ModelPart]:
        return spare_parts(config(), split, "fp32", 8, first=1, free=free)

    assert loaded(sum(sizes) + cache) == [parts[1], parts[2], parts[0]]
    assert loaded(sum(sizes) + cache - 1) == [parts[1], parts[2]]
    assert loaded(sizes[1] + cache) == [parts[1]]
    assert loaded(sizes[1] + cache - 1) == []


HOSTS = {0: "a", 1: "b", 2: "b"}


def wide(ranks: int = 2, shape: str = "auto") -> GroupArrangement:
    """Return the arrangement of a model whose parts take longer to read than sums between hosts take."""
    large = {"hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 8}
    settings = GroupSettings(ranks=ranks, kind="fp32", load=LOAD, shape=shape)
    config = parse_config({"model_type": "llama", **FAMILIES["llama"], **large})
    return GroupArrangement(config, settings, lambda _: None)


def test_links_between_hosts_are_measured_once_if_the_planner_splits() -> None:
    arrangement = wide(3)
    choice = arrangement([], members(0, 1, 2, hosts=HOSTS), True)
    assert choice is not None
    assert len(choice.members) > 1
    numbers = [member.number for member in choice.members]
    apart = [
        [one, other]
        for one, other in itertools.combinations(range(len(numbers)), 2)
        if HOSTS[numbers[one]] != HOSTS[numbers[other]]
    ]
    assert choice.facts["measure"] == apart
    form(arrangement, choice)
    arrangement.learn_links([[one, other, 0.0002, 1.2e8] for one, other in apart])
    again = arrangement(members(0, 1, 2, hosts=HOSTS), [], False)
    assert again is not None
    assert again.facts["measure"] == []
    fixed = wide(3, "tensor")([], members(0, 1, 2, hosts=HOSTS), True)
    assert fixed is not None
    assert fixed.facts["measure"] == []


def test_a_measured_slow_link_ends_the_split_over_it() -> None:
    arrangement = wide()
    here = members(0, 1, hosts=HOSTS)
    before = form(arrangement, arrangement([], here, True))
    predicted = arrangement.tokens_s
    assert len(before) == 2
    arrangement.learn_links([[0, 1, 0.5, 1e5]])
    assert form(arrangement, arrangement(here, [], False)) == before, "nobody loads anything before it was slow twice"
    assert arrangement.learn({}, here)
    assert len(form(arrangement, arrangement(here, [], False))) == 1
    assert arrangement.tokens_s < predicted


def test_a_measured_link_that_keeps_the_plan_corrects_its_prediction() -> None:
    arrangement = wide()
    here = members(0, 1, hosts=HOSTS)
    form(arrangement, arrangement([], here, True))
    predicted = arrangement.tokens_s
    arrangement.learn_links([[0, 1, 0.0004, 1e8]])
    assert not arrangement.learn({}, here)
    assert 0 < arrangement.tokens_s < predicted


@pytest.mark.parametrize(
    "rows",
    [None, 3, [3], [[0, 1]], [[0, 9, 0.5, 1e5]], [[-1, 1, 0.5, 1e5]], [[1, 1, 0.5, 1e5]], [[0, 1, 0.5, 0.0]],
     [[0, 1, float("nan"), 1e5]], [[0, "1", 0.5, 1e5]]],
    ids=["none", "number", "numbers", "short", "no rank", "below 0", "itself", "link of zero", "nan", "text"],
)  # fmt: skip
def test_measurements_that_make_no_sense_are_dropped(rows: object) -> None:
    arrangement = wide()
    here = members(0, 1, hosts=HOSTS)
    choice = arrangement([], here, True)
    form(arrangement, choice)
    arrangement.learn_links(rows)
    again = arrangement(here, [], False)
    assert again is not None
    assert again.facts["measure"] == [[0, 1]]
