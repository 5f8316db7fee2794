"""What a message is: a value with named, typed fields, and how it becomes JSON and is read again.

A message class has nothing but annotations and defaults; `Message` gives it the rest of what a frozen dataclass has, by
methods that all share. `dataclasses` would import `inspect` and compile functions for each class: that takes a step command
longer than Python takes to start.

Rules: what is read is checked against the annotations (only the shapes in `_SHAPES` are known) and refused with WireError; a
field that is as usual is not written. Runs on Python 3.9 with the standard library only. Knows no particular message.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NoReturn, Tuple, Type, TypeVar

LARGEST = 1 << 63  # of whole numbers: no field needs one that 64 bits do not hold
Check = Callable[[str, Any], Any]  # from where it stands (for the error) and JSON to the value; raises WireError


class WireError(Exception):
    """The peer sent what is not of this protocol."""


T = TypeVar("T")


class _Fresh:
    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make


def fresh(make: Callable[[], T]) -> T:
    """Return a default that each message has its own of: ``codes: List[int] = fresh(list)``."""
    default: Any = _Fresh(make)
    return default


class Message:
    """A frozen value; its fields are its class's annotations, in their order."""

    _usual: Dict[str, Any] = {}  # what a field is where nothing is said
    _checks: Dict[str, Check]  # made when one is first read: to evaluate all annotations takes a while
    __match_args__: Tuple[str, ...] = ()

    def __init_subclass__(cls) -> None:
        cls.__match_args__ = tuple(cls.__dict__.get("__annotations__", {}))  # type: ignore[misc]  # a constant elsewhere
        cls._usual = {name: cls.__dict__[name] for name in cls.__match_args__ if name in cls.__dict__}

    def __init__(self, *values: Any, **named: Any) -> None:
        names, state = self.__match_args__, self.__dict__
        if len(values) > len(names):
            _misuse(self, "takes %d values, not %d" % (len(names), len(values)))
        state.update(zip(names, values))
        for name in names[len(values) :]:
            if name in named:
                state[name] = named.pop(name)
            elif name in self._usual:
                usual = self._usual[name]
                state[name] = usual.make() if isinstance(usual, _Fresh) else usual
            else:
                _misuse(self, "needs %s" % name)
        if named:
            _misuse(self, "cannot take %s" % ", ".join(named))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("cannot assign to field %r" % name)

    def __delattr__(self, name: str) -> None:
        raise AttributeError("cannot delete field %r" % name)

    def __eq__(self, other: object) -> bool:
        return self.__dict__ == other.__dict__ if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self.__dict__.values()))

    def __repr__(self) -> str:
        return "%s(%s)" % (type(self).__name__, ", ".join("%s=%r" % item for item in self.__dict__.items()))


M = TypeVar("M", bound=Message)


def changed(message: M, **fields: Any) -> M:
    """Return `message` with other values of these fields."""
    return type(message)(**{**message.__dict__, **fields})


def to_fields(message: Message) -> Dict[str, Any]:
    """Return the fields of `message` that are not as usual, as JSON has them."""
    fields: Dict[str, Any] = {}
    for name, value in message.__dict__.items():
        if name in message._usual:
            usual = message._usual[name]
            if value == (usual.make() if isinstance(usual, _Fresh) else usual):
                continue
        fields[name] = dict(value.__dict__) if isinstance(value, Message) else value
    return fields


def from_fields(cls: Type[M], fields: Dict[str, Any]) -> M:
    """Return the message of this class that has these fields (parsed JSON). Raises WireError if there is none."""
    if "_checks" not in cls.__dict__:
        cls._checks = {name: _check_of(text) for name, text in cls.__dict__.get("__annotations__", {}).items()}
    for name in cls.__match_args__:
        if name not in fields and name not in cls._usual:
            raise WireError("cannot read %s: it has no %s" % (cls.__name__, name))
    values = {}
    for name, value in fields.items():
        if name not in cls._checks:
            raise WireError("cannot read %s: unknown field %.60r" % (cls.__name__, name))
        values[name] = cls._checks[name]("%s: %s" % (cls.__name__, name), value)
    return cls(**values)


def _misuse(message: Message, why: str) -> NoReturn:
    raise TypeError("%s %s" % (type(message).__name__, why))


def _check_of(annotation: str) -> Check:
    """Return how a field is read that is annotated so: the annotation, evaluated where its names are checks."""
    check: Check = eval(annotation, {"__builtins__": {}}, _SHAPES)  # noqa: S307 - of our own source
    return check


def _anything(where: str, value: Any) -> Any:
    return value


def _exactly(wanted: type) -> Check:
    def check(where: str, value: Any) -> Any:
        if type(value) is not wanted:
            raise WireError("cannot read %s is %s, not %s" % (where, type(value).__name__, wanted.__name__))
        return value

    return check


def _whole(where: str, value: Any) -> Any:
    if not -LARGEST <= _exactly(int)(where, value) < LARGEST:
        raise WireError("cannot read %s has more than 64 bits" % where)
    return value


def _number(where: str, value: Any) -> Any:
    return float(_whole(where, value)) if type(value) is int else _exactly(float)(where, value)


class _ListOf:
    def __class_getitem__(cls, of: Check) -> Check:
        def check(where: str, value: Any) -> List[Any]:
            if type(value) is not list:
                raise WireError("cannot read %s is not a list" % where)
            return [of(where, item) for item in value]

        return check


class _DictOf:
    def __class_getitem__(cls, of: Tuple[Check, Check]) -> Check:
        def check(where: str, value: Any) -> Dict[str, Any]:
            if type(value) is not dict:
                raise WireError("cannot read %s is not an object" % where)
            return {key: of[1](where, item) for key, item in value.items()}

        return check


class _TupleOf:
    def __class_getitem__(cls, of: Tuple[Check, ...]) -> Check:
        def check(where: str, value: Any) -> Tuple[Any, ...]:
            if type(value) is not list or len(value) != len(of):
                raise WireError("cannot read %s has not %d parts" % (where, len(of)))
            return tuple(part(where, item) for part, item in zip(of, value))

        return check


class _OptionalOf:
    def __class_getitem__(cls, of: Check) -> Check:
        return lambda where, value: None if value is None else of(where, value)


_SHAPES: Dict[str, Any] = {
    "Any": _anything,
    "Dict": _DictOf,
    "List": _ListOf,
    "Optional": _OptionalOf,
    "Tuple": _TupleOf,
    "bool": _exactly(bool),
    "float": _number,
    "int": _whole,
    "str": _exactly(str),
}


def part(cls: Type[M]) -> Type[M]:
    """Let other messages have fields of this class: a decorator."""

    def check(where: str, value: Any) -> Any:
        if type(value) is not dict:
            raise WireError("cannot read %s is not an object" % where)
        return from_fields(cls, value)

    _SHAPES[cls.__name__] = check
    return cls
