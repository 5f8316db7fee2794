"""Frozen dataclasses of many fields that are quick to make and to change.

`dataclass(frozen=True)` sets every field by a call of `object.__setattr__`: a value of sixty takes ten microseconds, and
`dataclasses.replace` twice as long. Here a value begins as its *draft*, an instance of a plain dataclass with the same slots,
whose fields are set by assignments; then the draft is given the frozen class, which adds nothing to the layout, so Python
lets it. That is three times as quick, and a change ten times. For classes of which there are thousands: `Job`, `JobSpec`.

Rules: a draft never leaves this module. The classes are keyword-only, have slots and a hash, and no `__post_init__`.

Source: Python's data model (object.__class__, __slots__).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import FrozenInstanceError, dataclass, fields
from functools import cache
from typing import Any, NoReturn, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def frozen(cls: type[T]) -> type[T]:
    """Make a frozen, keyword-only dataclass with slots of a class. For decoration.

    Like `dataclass(frozen=True, slots=True, kw_only=True)`.
    """
    draft = dataclass(slots=True, kw_only=True, unsafe_hash=True)(cls)

    def init(self: Any, **given: Any) -> None:
        object.__setattr__(self, "__class__", draft)
        self.__init__(**given)
        self.__class__ = made

    members = {
        "__slots__": (),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__init__": init,
        "__setattr__": _set,
        "__delattr__": _delete,
    }
    meta: Any = type(cls)
    made: type[T] = meta(cls.__name__, (draft,), members)
    return made


def replace(value: T, **changes: Any) -> T:
    """Return `value`, of a class that `frozen` has made, with these fields changed.

    Raises AttributeError for others.
    """
    cls: Any = type(value)
    draft: T = _copier(cls)(value)
    for name, change in changes.items():
        setattr(draft, name, change)
    draft.__class__ = cls
    return draft


def copies(value: T, names: tuple[str, ...], changes: Iterable[tuple[Any, ...]]) -> list[T]:
    """Return copies of `value`; each of `changes` has the values of fields `names`.

    The class of `value` was made by `frozen`.
    """
    cls: Any = type(value)
    made: list[T] = _bulk_copier(cls, names)(value, changes)
    return made


@cache
def _copier(cls: Any) -> Callable[[Any], Any]:
    """Return a function that returns the draft of a copy.

    Its assignments are written out, as those of a dataclass's `__init__`.
    """
    lines = [f"    draft.{field.name} = value.{field.name}" for field in fields(cls)]
    return _function("copy(value)", ["    draft = new(base)", *lines, "    return draft"], cls)


@cache
def _bulk_copier(cls: Any, names: tuple[str, ...]) -> Callable[[Any, Any], Any]:
    """Return a function that returns copies.

    It reads the fields that they have in common once.
    """
    common = [field.name for field in fields(cls) if field.name not in names]
    head = [*[f"    {name}_ = value.{name}" for name in common], "    copies = []", "    append = copies.append"]
    loop = [f"    for {', '.join(f'{name}_' for name in names)} in changes:", "        draft = new(base)"]
    body = [f"        draft.{field.name} = {field.name}_" for field in fields(cls)]
    return _function(
        "copy(value, changes)",
        [*head, *loop, *body, "        draft.__class__ = cls", "        append(draft)", "    return copies"],
        cls,
    )


def _function(signature: str, lines: list[str], cls: Any) -> Callable[..., Any]:
    scope: dict[str, Any] = {"new": object.__new__, "base": cls.__base__, "cls": cls}
    exec("\n".join((f"def {signature}:", *lines)), scope)  # noqa: S102
    made: Callable[..., Any] = scope["copy"]
    return made


def _set(self: object, name: str, value: object) -> NoReturn:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _delete(self: object, name: str) -> NoReturn:
    raise FrozenInstanceError(f"cannot delete field {name!r}")
