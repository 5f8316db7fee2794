"""Convert model values to JSON values and back, and check every field.

Knows nothing of JSON text, of what values make sense (`hpcsched.jobscript.build` checks that) or where they are sent. Rules: a
tuple is a list, a set a sorted list, an enum its value, a dataclass or a mapping an object (keys are text). An unknown
field, a missing field without a default, or a value of another type is rejected (`True` is not a number), so nothing is
guessed. The converters of a class are made from its annotations at first use, and kept.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from typing import Any, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

from hpcsched.errors import ProtocolError
from hpcsched.model.spec import JobSpec

T = TypeVar("T")
_Read = Callable[[Any], Any]  # raises _Mismatch
_Write = Callable[[Any], Any]


class _Mismatch(Exception):
    """A value does not match its annotation; the text says where and why.

    The innermost field is last.
    """


def spec_to_json(spec: JobSpec) -> dict[str, Any]:
    """Return `spec` as an object that ``json.dumps`` takes, all fields included."""
    return value_to_json(spec)


def spec_to_short_json(spec: JobSpec) -> dict[str, Any]:
    """Return `spec` as an object without fields that have their default.

    That is a sixth of the whole object.

    `spec_from_json` reads it. For the database, so a default of `JobSpec` must never change.
    """
    writers = _writers(JobSpec)
    return {
        field.name: value if (writer := writers[field.name]) is None else writer(value)
        for field in _FIELDS
        if (value := getattr(spec, field.name)) is not field.default and value != field.default
    }


def spec_from_json(obj: object) -> JobSpec:
    """Return the specification in `obj` (parsed JSON).

    Raises ProtocolError if it is malformed.
    """
    return value_from_json(JobSpec, obj)


def value_to_json(value: Any) -> dict[str, Any]:
    """Return `value`, an instance of one of the model's dataclasses, as a JSON object."""
    cls: Any = type(value)
    obj: dict[str, Any] = _class_converters(cls)[1](value)
    return obj


def value_from_json(cls: type[T], obj: object) -> T:
    """Return the value of the dataclass `cls` in `obj` (parsed JSON).

    Raises ProtocolError if it is malformed.
    """
    kind: Any = cls
    try:
        value: T = _class_converters(kind)[0](obj)
        return value
    except _Mismatch as error:
        raise ProtocolError(f"cannot read {cls.__name__}: {error}") from None


# ----- reading


def _class_reader(cls: type, readers: dict[str, _Read]) -> _Read:
    required = _fields_with_default(cls, dataclasses.MISSING)
    plain = {name: reader.kind for name, reader in readers.items() if isinstance(reader, _PlainReader)}
    null, empty = _fields_with_default(cls, None), _fields_with_default(cls, ())

    def read(obj: Any) -> Any:
        if type(obj) is not dict:
            raise _Mismatch(f"{_kind(obj)} where an object is wanted")
        if not required <= obj.keys():
            raise _Mismatch(f"it has no {min(required - obj.keys())!r}")
        kwargs = {}
        for name, value in obj.items():
            # The controller reads ten thousand of these when it starts: most fields are plain, or have their default.
            if plain.get(name) is type(value):
                kwargs[name] = value
                continue
            if (value is None and name in null) or (value == [] and name in empty):
                continue  # the default
            reader = readers.get(name)
            if reader is None:
                raise _Mismatch(f"unknown field {str(name)[:60]!r}")
            try:
                kwargs[name] = reader(value)
            except _Mismatch as error:
                raise _Mismatch(f"{name}: {error}") from None
        return cls(**kwargs)

    return read


def _fields_with_default(cls: type, default: object) -> frozenset[str]:
    """Return the names of the fields with this default; `MISSING`: of the fields without one."""
    return frozenset(
        field.name
        for field in dataclasses.fields(cls)
        if field.default == default and field.default_factory is dataclasses.MISSING
    )


class _PlainReader:
    """Reads a value that is its own JSON value."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __call__(self, value: Any) -> Any:
        if type(value) is not self.kind:
            raise _Mismatch(f"{_kind(value)} where {_WORDS[self.kind]} is wanted")
        return value


def _float_reader(value: Any) -> float:
    if type(value) is not float and type(value) is not int:
        raise _Mismatch(f"{_kind(value)} where a number is wanted")
    return float(value)


def _enum_reader(kind: type[Enum]) -> _Read:
    members = {member.value: member for member in kind}

    def read(value: Any) -> Any:
        if type(value) is not str or value not in members:
            raise _Mismatch(f"{str(value)[:60]!r} is none of {', '.join(members)}")
        return members[value]

    return read


def _plain_tuple_reader(kind: type) -> _Read:
    kinds = {kind}

    def read(value: Any) -> Any:
        if type(value) is not list or (value and set(map(type, value)) != kinds):
            raise _Mismatch(f"{_kind(value)} where a list, each item {_WORDS[kind]}, is wanted")
        return tuple(value)

    return read


def _tuple_reader(item: _Read) -> _Read:
    def read(value: Any) -> Any:
        if type(value) is not list:
            raise _Mismatch(f"{_kind(value)} where a list is wanted")
        return tuple(map(item, value))

    return read


def _fixed_tuple_reader(kinds: tuple[type, ...]) -> _Read:
    def read(value: Any) -> Any:
        if type(value) is not list or tuple(map(type, value)) != kinds:
            raise _Mismatch(f"{_kind(value)} where a list of {' and '.join(_WORDS[kind] for kind in kinds)} is wanted")
        return tuple(value)

    return read


def _mixed_tuple_reader(readers: list[_Read]) -> _Read:
    def read(value: Any) -> Any:
        if type(value) is not list or len(value) != len(readers):
            raise _Mismatch(f"{_kind(value)} where a list of {len(readers)} is wanted")
        return tuple(reader(item) for reader, item in zip(readers, value, strict=True))

    return read


def _set_reader(value: Any) -> Any:
    return frozenset(_plain_tuple_reader(str)(value))


def _mapping_reader(key: type, item: _Read) -> _Read:
    def read(value: Any) -> Any:
        if type(value) is not dict:
            raise _Mismatch(f"{_kind(value)} where an object is wanted")
        if key is int and not all(name.isdecimal() for name in value):
            raise _Mismatch("a key that is not a number")
        return {key(name): item(part) for name, part in value.items()}

    return read


def _optional_reader(inner: _Read) -> _Read:
    return lambda value: None if value is None else inner(value)


_WORDS = {str: "a text", int: "a whole number", bool: "true or false"}


def _kind(value: object) -> str:
    words = {dict: "an object", list: "a list", float: "a fraction", type(None): "null", **_WORDS}
    return words.get(type(value), type(value).__name__)


# ----- writing


def _class_writer(writers: dict[str, _Write | None]) -> _Write:
    """Return the function that writes an instance.

    A field whose writer is None is its own JSON value.
    """
    fields = list(writers.items())

    def write(value: Any) -> dict[str, Any]:
        return {
            name: getattr(value, name) if writer is None else writer(getattr(value, name)) for name, writer in fields
        }

    return write


def _enum_writer(value: Enum) -> Any:
    return value.value


def _tuple_writer(item: _Write | None) -> _Write:
    return list if item is None else lambda value: [item(part) for part in value]


def _mixed_tuple_writer(writers: list[_Write | None]) -> _Write:
    return lambda value: [item if writer is None else writer(item) for writer, item in zip(writers, value, strict=True)]


def _mapping_writer(item: _Write | None) -> _Write:
    return lambda value: {str(name): part if item is None else item(part) for name, part in value.items()}


def _optional_writer(inner: _Write | None) -> _Write | None:
    return None if inner is None else lambda value: None if value is None else inner(value)


# ----- one pair of converters per annotation


def _converters(hint: Any, inside: frozenset[type] = frozenset()) -> tuple[_Read, _Write | None]:
    """Return the reader and the writer of values annotated as `hint`.

    Raises TypeError for a type that the model does not use.

    `inside`: classes around it. Their converters are looked up at use, because a class may contain itself.
    """
    if isinstance(hint, NewType):
        return _converters(hint.__supertype__)
    if hint is float:
        return _float_reader, None
    if hint in _WORDS:
        return _PlainReader(hint), None
    if hint == frozenset[str]:
        return _set_reader, sorted
    if get_origin(hint) is not None:
        return _generic_converters(hint, inside)
    if issubclass(hint, tuple) and hasattr(hint, "_fields"):
        return _named_tuple_converters(hint, inside)
    if issubclass(hint, Enum):
        return _enum_reader(hint), _enum_writer
    if not (isinstance(hint, type) and dataclasses.is_dataclass(hint)):
        raise TypeError(f"no converter for {hint}")
    cls = hint
    if cls in inside:
        return lambda obj: _class_converters(cls)[0](obj), lambda value: _class_converters(cls)[1](value)
    return _class_converters(cls, inside)


def _generic_converters(hint: Any, inside: frozenset[type]) -> tuple[_Read, _Write | None]:
    """Return the reader and the writer of a tuple, a mapping or an optional value."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is tuple:
        return _tuple_converters(parts, inside)
    if origin is Mapping:
        key, item = parts
        reader, writer = _converters(item, inside)
        return _mapping_reader(getattr(key, "__supertype__", key), reader), _mapping_writer(writer)
    inner = [part for part in parts if part is not type(None)]
    if origin not in (Union, types.UnionType) or len(inner) != 1:
        raise TypeError(f"no converter for {hint}")
    reader, writer = _converters(inner[0], inside)
    return _optional_reader(reader), _optional_writer(writer)


def _named_tuple_converters(hint: Any, inside: frozenset[type]) -> tuple[_Read, _Write]:
    """Return the reader and the writer of a named tuple, as a list.

    Last items that have defaults may be missing.
    """
    types_of = get_type_hints(hint)
    pairs = [_converters(types_of[name], inside) for name in hint._fields]
    readers = [reader for reader, _ in pairs]
    least = len(readers) - len(hint._field_defaults)

    def read(value: Any) -> Any:
        if type(value) is not list or not least <= len(value) <= len(readers):
            raise _Mismatch(f"{_kind(value)} where a list of {len(readers)} is wanted")
        return hint(*[reader(item) for reader, item in zip(readers, value, strict=False)])

    return read, _mixed_tuple_writer([writer for _, writer in pairs])


def _tuple_converters(parts: tuple[Any, ...], inside: frozenset[type]) -> tuple[_Read, _Write]:
    plain: tuple[Any, ...] = tuple(part.__supertype__ if isinstance(part, NewType) else part for part in parts)
    if plain[-1] is not Ellipsis:
        if set(plain) <= _WORDS.keys():
            return _fixed_tuple_reader(plain), list
        pairs = [_converters(part, inside) for part in plain]
        return _mixed_tuple_reader([reader for reader, _ in pairs]), _mixed_tuple_writer(
            [writer for _, writer in pairs]
        )
    if plain[0] in _WORDS:
        return _plain_tuple_reader(plain[0]), list
    reader, writer = _converters(plain[0], inside)
    return _tuple_reader(reader), _tuple_writer(writer)


@cache
def _class_converters(cls: type, inside: frozenset[type] = frozenset()) -> tuple[_Read, _Write]:
    hints = get_type_hints(cls)
    pairs = {field.name: _converters(hints[field.name], inside | {cls}) for field in dataclasses.fields(cls)}
    readers = {name: reader for name, (reader, _) in pairs.items()}
    return _class_reader(cls, readers), _class_writer({name: writer for name, (_, writer) in pairs.items()})


@cache
def _writers(cls: Any) -> dict[str, _Write | None]:
    hints = get_type_hints(cls)
    return {field.name: _converters(hints[field.name], frozenset({cls}))[1] for field in dataclasses.fields(cls)}


_FIELDS = dataclasses.fields(JobSpec)
