"""Messages: values with named, typed fields, and the codec for their frames.

A frame is two big-endian 32-bit lengths, then a JSON object, then raw bytes (output, input, a script). The JSON of a message
is its fields plus ``"type"``, without the fields that have their default.

A message class has annotations and defaults only. `Message` gives it what a frozen dataclass has, by methods that all classes
share: `dataclasses` would import `inspect` and compile functions for each class, which takes longer than Python's start.

Rules:
- What is read is checked against the annotations, of which only the shapes in `_SHAPES` are known. Unknown types and fields,
  missing fields, wrong types, duplicate keys, NaN, long frames and deep nesting raise WireError; the connection must close.
- Frames are bounded before they are held in memory.
- Runs on Python 3.9 with the standard library only. It knows no particular message, no socket, clock or file.
"""

from __future__ import annotations

import json
import struct
from typing import (
    Any,
    Callable,
    Dict,
    FrozenSet,
    Iterator,
    List,
    Mapping,
    NoReturn,
    Optional,
    Sequence,
    Tuple,
    Type,
    TypeVar,
)

from hpcnode.wire import gate

MAX_JSON_BYTES = 8 << 20
MAX_BLOB_BYTES = 8 << 20
_HEADER = struct.Struct("!II")
MAX_FRAME_BYTES = MAX_JSON_BYTES + MAX_BLOB_BYTES + _HEADER.size
LARGEST = 1 << 63  # whole numbers fit into 64 bits
Check = Callable[[Any], Any]  # JSON -> value; raises _UnfitError


class WireError(Exception):
    """The peer sent something that is not of this protocol."""


class UnknownMessageError(WireError):
    """A frame has a type that this version does not know."""


T = TypeVar("T")


class _Fresh:
    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make


def fresh(make: Callable[[], T]) -> T:
    """Return a default that is made anew for each message: ``codes: List[int] = fresh(list)``."""
    default: Any = _Fresh(make)
    return default


class Message:
    """A frozen value. Its fields are the annotations of its class, in their order."""

    _usual: Dict[str, Any] = {}  # defaults by field
    _fresh: Dict[str, Callable[[], Any]] = {}  # what makes a default, by field: that in `_usual` is only compared with
    _checks: Dict[str, Check]  # made at the first read, because evaluating all annotations takes a while
    __match_args__: Tuple[str, ...] = ()

    def __init_subclass__(cls) -> None:
        cls.__match_args__ = tuple(cls.__dict__.get("__annotations__", {}))  # type: ignore[misc]  # a constant elsewhere
        cls._usual = {name: cls.__dict__[name] for name in cls.__match_args__ if name in cls.__dict__}
        cls._fresh = {name: usual.make for name, usual in cls._usual.items() if isinstance(usual, _Fresh)}
        cls._usual.update({name: make() for name, make in cls._fresh.items()})

    def __init__(self, *values: Any, **named: Any) -> None:
        names, state = self.__match_args__, self.__dict__
        if len(values) > len(names):
            _misuse(self, "takes %d values, not %d" % (len(names), len(values)))
        state.update(zip(names, values))
        for name in names[len(values) :]:
            if name in named:
                state[name] = named.pop(name)
            elif name in self._fresh:
                state[name] = self._fresh[name]()
            elif name in self._usual:
                state[name] = self._usual[name]
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
    """Return `message` with these fields changed."""
    return type(message)(**{**message.__dict__, **fields})


def to_fields(message: Message) -> Dict[str, Any]:
    """Return the fields of `message` that differ from their default, for JSON."""
    usual = message._usual
    return {
        name: dict(value.__dict__) if isinstance(value, Message) else value
        for name, value in message.__dict__.items()
        if name not in usual or value != usual[name]
    }


def from_fields(cls: Type[M], fields: Dict[str, Any]) -> M:
    """Return the message of this class with these fields (parsed JSON). Raises WireError."""
    if "_checks" not in cls.__dict__:
        cls._checks = {name: _check_of(text) for name, text in cls.__dict__.get("__annotations__", {}).items()}
    message = cls.__new__(cls)
    state = message.__dict__
    read = 0
    for name, check in cls._checks.items():
        if name in fields:
            read += 1
            try:
                state[name] = check(fields[name])
            except _UnfitError as error:
                raise WireError("cannot read %s: %s %s" % (cls.__name__, name, error)) from None
        elif name in cls._fresh:
            state[name] = cls._fresh[name]()
        elif name in cls._usual:
            state[name] = cls._usual[name]
        else:
            raise WireError("cannot read %s: it has no %s" % (cls.__name__, name))
    if read < len(fields):
        unknown = next(name for name in fields if name not in cls._checks)
        raise WireError("cannot read %s: unknown field %.60r" % (cls.__name__, unknown))
    return message


class _UnfitError(Exception):
    """A value that its field cannot have; the text says what is wrong with it."""


def _misuse(message: Message, why: str) -> NoReturn:
    raise TypeError("%s %s" % (type(message).__name__, why))


def _check_of(annotation: str) -> Check:
    """Return the check of an annotation: the annotation, evaluated with checks for its names."""
    check: Check = eval(annotation, {"__builtins__": {}}, _SHAPES)  # noqa: S307 - our own source
    return check


_TYPES: Dict[Check, FrozenSet[type]] = {}  # check -> the only type that it accepts, and as it is


def _anything(value: Any) -> Any:
    return value


def _exactly(wanted: type) -> Check:
    def check(value: Any) -> Any:
        if type(value) is not wanted:
            raise _UnfitError("is %s, not %s" % (type(value).__name__, wanted.__name__))
        return value

    _TYPES[check] = frozenset({wanted})
    return check


def _whole(value: Any) -> Any:
    if type(value) is not int:
        raise _UnfitError("is %s, not int" % type(value).__name__)
    if not -LARGEST <= value < LARGEST:
        raise _UnfitError("has more than 64 bits")
    return value


def _number(value: Any) -> Any:
    if type(value) is float:
        return value
    if type(value) is not int:
        raise _UnfitError("is %s, not float" % type(value).__name__)
    return float(_whole(value))


class _ListOf:
    def __class_getitem__(cls, of: Check) -> Check:
        def check(value: Any) -> List[Any]:
            if type(value) is not list:
                raise _UnfitError("is not a list")
            return [of(item) for item in value]

        return check


class _DictOf:
    def __class_getitem__(cls, of: Tuple[Check, Check]) -> Check:
        of_value = of[1]
        only = _TYPES.get(of_value, frozenset())

        def check(value: Any) -> Dict[str, Any]:
            if type(value) is not dict:
                raise _UnfitError("is not an object")
            if only.issuperset(map(type, value.values())):  # an environment, without a call for each variable
                return dict(value)
            return {key: of_value(item) for key, item in value.items()}

        return check


class _TupleOf:
    def __class_getitem__(cls, of: Tuple[Check, ...]) -> Check:
        def check(value: Any) -> Tuple[Any, ...]:
            if type(value) is not list or len(value) != len(of):
                raise _UnfitError("has not %d parts" % len(of))
            return tuple(part(item) for part, item in zip(of, value))

        return check


class _OptionalOf:
    def __class_getitem__(cls, of: Check) -> Check:
        return lambda value: None if value is None else of(value)


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
    """Let other messages have fields of this class; a decorator."""

    def check(value: Any) -> Any:
        if type(value) is not dict:
            raise _UnfitError("is not an object")
        return from_fields(cls, value)

    _SHAPES[cls.__name__] = check
    return cls


# ----- the codec


class Codec:
    """Encodes and reads the messages of one protocol.

    `quoting`: messages whose texts are for people; what is not UTF-8 in them is the name of a file that they mention, and is
    replaced. `bounds`: the least and the greatest value of fields with these names, in all messages.
    """

    def __init__(
        self,
        messages: Sequence[Type[Message]],
        quoting: Tuple[Type[Message], ...] = (),
        bounds: Optional[Mapping[str, Tuple[float, float]]] = None,
    ) -> None:
        self._by_name = {cls.__name__: cls for cls in messages}
        self._quoting = quoting
        self._bounds = bounds or {}

    def to_json(self, message: Message) -> Dict[str, Any]:
        """Return the JSON object of `message` with its type, without defaults.

        A step command of an older version, in a job that outlives an upgrade, must not be sent newer fields needlessly.
        """
        return {"type": type(message).__name__, **to_fields(message)}

    def from_json(self, obj: Any) -> Message:
        """Return the message of `obj` (parsed JSON). Raises WireError if it is none."""
        if not isinstance(obj, dict):
            raise WireError("cannot read a message: not a JSON object")
        kind = obj.get("type")
        if type(kind) is not str:
            raise WireError("cannot read a message: its type is not a text")
        cls = self._by_name.get(kind)
        if cls is None:
            raise UnknownMessageError("cannot read a message: unknown type %.60r" % kind)
        fields = dict(obj)
        del fields["type"]
        message = from_fields(cls, fields)
        self._check_bounds(message)
        return message

    def _check_bounds(self, message: Message) -> None:
        for name, (least, greatest) in self._bounds.items():
            value = message.__dict__.get(name)
            if value is not None and not least <= value <= greatest:
                kind = type(message).__name__
                raise WireError("cannot take %s: its %s is not between %g and %g" % (kind, name, least, greatest))

    def encode(self, message: Message, blob: bytes = b"") -> bytes:
        """Return the frame of `message` and `blob`.

        Raises WireError if the other end would not take it.
        """
        self._check_bounds(message)
        words = json.dumps(self.to_json(message), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        try:
            text = words.encode()
        except UnicodeEncodeError:
            text = self._as_text(message, words).encode()
        if len(text) > MAX_JSON_BYTES or len(blob) > MAX_BLOB_BYTES:
            raise WireError(
                "cannot send %s: %d + %d bytes are too many" % (type(message).__name__, len(text), len(blob))
            )
        return _HEADER.pack(len(text), len(blob)) + text + blob

    def _as_text(self, message: Message, words: str) -> str:
        """Return the JSON of a message that is not UTF-8 as text, if it only quotes a file name.

        Raises WireError if not.
        """
        if isinstance(message, self._quoting):
            return gate.replaced(words)
        try:
            gate.check_texts(self.to_json(message))
        except gate.GateError as error:
            raise WireError("cannot send %s: %s" % (type(message).__name__, error)) from None
        return words

    def parse(self, text: bytes) -> Message:
        """Return the message of one frame's JSON text. Raises WireError."""
        try:
            return self.from_json(gate.read_json(text))
        except gate.GateError as error:
            raise WireError("cannot read a message: %s" % error) from None


class FrameReader:
    """Turns received bytes into messages.

    Holds at most one frame; does not recover from an error.

    `limit`: the greatest size of a frame in bytes. `max_values`: the most values in its JSON, approximately; 0: any number.
    `skips_unknown`: messages of an unknown type are dropped, because the peer may be of another version.
    """

    def __init__(
        self, codec: Codec, limit: int = MAX_FRAME_BYTES, max_values: int = 0, skips_unknown: bool = False
    ) -> None:
        self.limit = limit
        self.max_values = max_values
        self._codec = codec
        self._skips_unknown = skips_unknown
        self._buffer = bytearray()

    @property
    def pending_bytes(self) -> int:
        """How many bytes of an incomplete frame have come."""
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[Tuple[Message, bytes]]:
        """Yield each (message, blob) that is complete after `data`.

        Raises WireError; the connection must then close.
        """
        self._buffer += data
        while True:
            frame = self.next_frame()
            if frame is None:
                return
            try:
                message = self._codec.parse(frame[0])
            except UnknownMessageError:
                if not self._skips_unknown:
                    raise
                continue
            yield message, frame[1]

    def push(self, data: bytes) -> None:
        """Add `data` for `next_frame`."""
        self._buffer += data

    def next_frame(self) -> Optional[Tuple[bytes, bytes]]:
        """Return JSON text and blob of the next complete frame, or None. Raises WireError."""
        if len(self._buffer) < _HEADER.size:
            return None
        json_size, blob_size = _HEADER.unpack_from(self._buffer)
        end = _HEADER.size + json_size + blob_size
        if json_size > MAX_JSON_BYTES or blob_size > MAX_BLOB_BYTES or end > self.limit:
            raise WireError("cannot read a frame of %d + %d bytes: too long" % (json_size, blob_size))
        if len(self._buffer) < end:
            return None
        text = bytes(self._buffer[_HEADER.size : _HEADER.size + json_size])
        blob = bytes(self._buffer[_HEADER.size + json_size : end])
        del self._buffer[:end]
        if self.max_values and text.count(b",") + text.count(b"[") + text.count(b"{") > self.max_values:
            raise WireError("cannot read a message: it has more than %d values" % self.max_values)
        return text, blob
