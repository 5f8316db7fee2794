"""Frozen values that begin as drafts: as dataclasses that are frozen in the usual way."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, asdict, dataclass, field, fields

import pytest

from hpcsched.model.frozen import copies, frozen, replace


@frozen
class Point:
    """A place."""

    x: int
    y: int = 0
    marks: tuple[str, ...] = field(default_factory=tuple)
    note: str = field(default="", compare=False)

    @property
    def sum(self) -> int:
        return self.x + self.y


@dataclass(frozen=True, slots=True, kw_only=True)
class Usual:
    x: int
    y: int = 0
    marks: tuple[str, ...] = field(default_factory=tuple)
    note: str = field(default="", compare=False)


def test_a_value_is_what_a_frozen_dataclass_is() -> None:
    point, usual = Point(x=1, note="n"), Usual(x=1, note="n")
    assert type(point) is Point
    assert (Point.__name__, Point.__doc__, Point.__module__) == ("Point", "A place.", __name__)
    assert repr(point) == repr(usual).replace("Usual", "Point")
    assert asdict(point) == asdict(usual)
    assert [one.name for one in fields(Point)] == [one.name for one in fields(Usual)]
    assert point.sum == 1
    assert not hasattr(point, "__dict__")


def test_values_are_equal_and_hashed_by_the_fields_that_are_compared() -> None:
    assert Point(x=1, note="a") == Point(x=1, note="b") != Point(x=2)
    assert len({Point(x=1), Point(x=1, note="b"), Point(x=2)}) == 2
    assert Point(x=1) != Usual(x=1)


@pytest.mark.parametrize("point", [Point(x=1), replace(Point(x=2), x=1)])
def test_no_field_can_be_set_or_deleted(point: Point) -> None:
    with pytest.raises(FrozenInstanceError):
        point.x = 3  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        del point.x
    with pytest.raises(FrozenInstanceError):
        point.more = 3  # type: ignore[attr-defined]
    assert point.x == 1


def test_wrong_fields_are_refused() -> None:
    with pytest.raises(TypeError):
        Point(y=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        Point(x=1, more=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        Point(1)  # type: ignore[misc]
    for name in ("more", "sum"):
        with pytest.raises(AttributeError):
            replace(Point(x=1), **{name: 2})


def test_replace_changes_a_copy() -> None:
    before = Point(x=1, y=2, marks=("a",), note="n")
    after = replace(before, x=5, note="m")
    assert (after, after.note, type(after)) == (Point(x=5, y=2, marks=("a",)), "m", Point)
    assert (before, before.note) == (Point(x=1, y=2, marks=("a",)), "n")


def test_copies_differ_in_the_named_fields_alone() -> None:
    point = Point(x=1, marks=("a",), note="n")
    made = copies(point, ("x", "y"), [(2, 3), (4, 5)])
    assert made == [replace(point, x=2, y=3), replace(point, x=4, y=5)]
    assert [one.note for one in made] == ["n", "n"]
    assert made[0].marks is point.marks
    assert type(made[0]) is Point
    with pytest.raises(FrozenInstanceError):
        made[0].x = 3  # type: ignore[misc]
