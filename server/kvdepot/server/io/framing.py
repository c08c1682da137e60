"""Frames between the daemon and its child processes, over a socketpair of streams.

A frame is the length of its body (u32), its type (u8), a number (u64) and the body. The number says which request an
answer is for; where nothing needs one, it is 0. The body is a dataclass: its fields one after the other, little-endian.

=========================  ==========================================================
field                      in the body
=========================  ==========================================================
bool, float                u8, f64
int                        u64; u8 or u32 if `AtMost` allows no more; i64 if `Signed`
`StrEnum`                  u8: the position of the member
`bytes` with `Exactly`     these bytes
str, bytes                 u32 length, then the bytes. A text is UTF-8
dataclass, `tuple[A, B]`   its fields
`tuple[X, ...]`            u32 count, then the entries
`X | None`                 u8: whether there is one, then the value
anything with `As`         as another type
=========================  ==========================================================

Both ends bound a frame before they read it, and believe nothing that they read. The bounds of a field
(`kvdepot.core.bounds`) and `check_fields` of a value are checked before it is sent and after it arrived.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from dataclasses import fields as fields_of
from enum import StrEnum
from functools import cache, partial
from itertools import groupby
from operator import attrgetter, itemgetter, methodcaller
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Generic, NamedTuple, Protocol, TypeVar, Union, get_args, get_origin
from typing import get_type_hints as hints_of

from kvdepot.core.bounds import Exactly
from kvdepot.core.errors import KvDepotError

HEAD: Final = struct.Struct("<IBQ")
_COUNT: Final = struct.Struct("<I")
_INTEGERS: Final = {0xFF: "B", 0xFFFF_FFFF: "I"}
_LAYOUTS: Final[dict[type, str]] = {bool: "?", float: "d"}
_REFUSED: Final = (struct.error, ValueError, LookupError, OverflowError, KvDepotError)
T = TypeVar("T")


class FrameError(ValueError):
    """Bytes that are no frame, or a message over a bound."""


@dataclass(frozen=True, slots=True)
class As:
    """A mark: the value is sent as one of another type. Both functions may raise ValueError."""

    hint: Any
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class _Signed:
    """A mark of an integer that may be below 0."""


Signed = Annotated[int, _Signed()]
Digest = Annotated[
    int,
    As(
        Annotated[bytes, Exactly(16)],
        methodcaller("to_bytes", 16, "little"),
        partial(int.from_bytes, byteorder="little"),
    ),
]
"""A number of 128 bits."""


class Stream(Protocol):
    """What `Framing.read` reads from, such as a binary file."""

    def read(self, size: int, /) -> bytes:
        """Return so many bytes, or fewer at the end."""
        ...


class Framing(Generic[T]):
    """The messages of one direction, or of both. Their types are numbered in the order given."""

    def __init__(self, *message_types: type[Any], bytes_max: int) -> None:
        """Build the coders of these messages. `bytes_max`: of a body."""
        self._types = message_types
        self._records = [_record_of(message_type) for message_type in message_types]
        self._numbers = {message_type: number for number, message_type in enumerate(message_types)}
        self._bytes_max = bytes_max

    def pack(self, message: T, number: int = 0) -> bytes:
        """Return a frame. Raise FrameError for a message over a bound."""
        kind = self._numbers[type(message)]
        try:
            body = self._records[kind].encode(message)
            head = HEAD.pack(len(body), kind, number)
        except _REFUSED as error:
            raise FrameError(f"{type(message).__name__}: {error}") from error
        if len(body) > self._bytes_max:
            raise FrameError(f"{type(message).__name__}: a body of {len(body)} bytes; the limit is {self._bytes_max}")
        return head + body

    def unpack(self, kind: int, body: bytes) -> T:
        """Return the message of a frame. Raise FrameError."""
        if kind >= len(self._records):
            raise FrameError(f"type {kind} is unknown")
        try:
            message, end = self._records[kind].decode(body, 0)
        except _REFUSED as error:
            raise FrameError(f"{self._types[kind].__name__}: {error}") from error
        if end != len(body):
            raise FrameError(f"{self._types[kind].__name__}: {len(body) - end} bytes after its end")
        return message  # type: ignore[no-any-return]

    def take(self, received: bytearray) -> Iterator[tuple[int, T]]:
        """Yield number and message of each whole frame at the start of `received`, which loses it. Raise FrameError."""
        while len(received) >= HEAD.size:
            length, kind, number = self._head(received)
            end = HEAD.size + length
            if len(received) < end:
                return
            message = self.unpack(kind, bytes(received[HEAD.size : end]))
            del received[:end]  # not before: after a bad frame nothing more is believed
            yield number, message

    def read(self, stream: Stream) -> tuple[int, T] | None:
        """Wait for one frame. Return None at the end of the stream. Raise FrameError."""
        head = stream.read(HEAD.size)
        if len(head) < HEAD.size:
            return None
        length, kind, number = self._head(head)
        body = stream.read(length)
        return None if len(body) < length else (number, self.unpack(kind, body))

    def _head(self, data: bytes | bytearray) -> tuple[int, int, int]:
        length, kind, number = HEAD.unpack_from(data)
        if length > self._bytes_max:
            raise FrameError(f"a body of {length} bytes; the limit is {self._bytes_max}")
        return length, kind, number


class _Coder(NamedTuple):
    """`decode` is given the body and where the value starts, and returns the value and where it ends."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes, int], tuple[Any, int]]


class _Field(NamedTuple):
    name: str
    coder: str | _Coder  # a layout: `struct` packs it, together with its neighbours
    checks: list[Callable[[str, Any], None]]
    encode: Callable[[Any], Any] | None = None  # to what `coder` takes
    decode: Callable[[Any], Any] | None = None


class _Record:
    """Values one after the other: the fields of a dataclass, the entries of a tuple, or one value alone."""

    def __init__(self, fields: Sequence[_Field], pick: Callable[..., Callable[[Any], Any]], make: Any) -> None:
        """Build the coder of a record.

        `pick` of positions returns a function for these values of a record. `make` returns a record of all.
        """
        self._make = make
        self._check_fields: Callable[[Any], None] | None = getattr(make, "check_fields", None)
        self._checks = [(at, field.name, check) for at, field in enumerate(fields) for check in field.checks]
        self._decoded = [(at, field.decode) for at, field in enumerate(fields) if field.decode is not None]
        self._steps: list[tuple[struct.Struct | None, _Coder | None]] = []
        self._encoders: list[Callable[[Any], bytes]] = []
        self.encode: Callable[[Any], bytes] = self._join
        for packed, entries in groupby(range(len(fields)), lambda at: isinstance(fields[at].coder, str)):
            for positions in [[*entries]] if packed else [[at] for at in entries]:
                self._add([fields[at] for at in positions], pick(*positions))
        if len(self._encoders) == 1 and self._check_fields is None:
            (self.encode,) = self._encoders

    def _add(self, fields: Sequence[_Field], get: Callable[[Any], Any]) -> None:
        coder = fields[0].coder
        if isinstance(coder, _Coder):
            self._steps.append((None, coder))
            self._encoders.append(_encoder(fields[0], coder.encode, get))
        else:
            layout = struct.Struct("<" + "".join(str(field.coder) for field in fields))
            self._steps.append((layout, None))
            self._encoders.append(_packer(fields, layout.pack, get))

    @property
    def layout(self) -> struct.Struct | None:
        """Return the layout of a record that `struct` packs with nothing else to do; else None."""
        bare = len(self._steps) == 1 and not (self._checks or self._decoded or self._check_fields)
        return self._steps[0][0] if bare else None

    def _join(self, record: Any) -> bytes:
        if self._check_fields is not None:
            self._check_fields(record)
        return b"".join([encode(record) for encode in self._encoders])

    def decode(self, body: bytes, at: int) -> tuple[Any, int]:
        values: list[Any] = []
        for layout, coder in self._steps:
            if coder is not None:
                value, at = coder.decode(body, at)
                values.append(value)
            elif layout is not None:
                values += layout.unpack_from(body, at)
                at += layout.size
        for index, decode in self._decoded:
            values[index] = decode(values[index])
        for index, name, check in self._checks:
            check(name, values[index])
        record = self._make(*values)
        if self._check_fields is not None:
            self._check_fields(record)
        return record, at


def _encoder(field: _Field, encode: Callable[[Any], bytes], get: Callable[[Any], Any]) -> Callable[[Any], bytes]:
    name, checks, convert = field.name, field.checks, field.encode

    def checked(record: Any) -> bytes:
        value = get(record)
        for check in checks:
            check(name, value)
        return encode(value if convert is None else convert(value))

    if checks:
        return checked
    return (lambda record: encode(get(record))) if convert is None else lambda record: encode(convert(get(record)))


def _packer(fields: Sequence[_Field], pack: Callable[..., bytes], get: Callable[[Any], Any]) -> Callable[[Any], bytes]:
    """Return a function that packs these fields. Common cases have no loops, because every job is packed here.

    `get` returns a tuple, unless there is only one field.
    """
    checks = [(at, field.name, check) for at, field in enumerate(fields) for check in field.checks]
    single = len(fields) == 1
    conversions = [(at, field.encode) for at, field in enumerate(fields) if field.encode is not None]
    layouts = [str(field.coder) for field in fields]
    lengths = [(at, int(layout[:-1])) for at, layout in enumerate(layouts) if layout.endswith("s")]

    def packed(record: Any) -> bytes:
        values = [get(record)] if single else [*get(record)]
        for at, name, check in checks:
            check(name, values[at])
        for at, convert in conversions:
            values[at] = convert(values[at])
        for at, length in lengths:  # `struct` would cut and fill
            if len(values[at]) != length:
                raise FrameError(f"{fields[at].name}: {len(values[at])} bytes, not {length}")
        return pack(*values)

    if single and not lengths:
        return _encoder(fields[0], pack, get)
    return packed if checks or conversions or lengths else lambda record: pack(*get(record))


def _make_record(hint: Any) -> _Record:
    if is_dataclass(hint):
        assert isinstance(hint, type)
        hints = hints_of(hint, include_extras=True)
        names = [field.name for field in fields_of(hint)]
        return _Record(
            [_field_of(name, hints[name]) for name in names], lambda *at: attrgetter(*(names[i] for i in at)), hint
        )
    if get_origin(hint) is tuple:
        entries = [_field_of("entry", entry) for entry in get_args(hint)]
        return _Record(entries, itemgetter, lambda *values: values)
    return _Record([_field_of("value", hint)], lambda _: lambda value: value, lambda value: value)


_record_of: Final[Callable[[Any], _Record]] = cache(_make_record)


def _field_of(name: str, hint: Any) -> _Field:
    hint, marks = _marks_of(hint)
    checks = [mark.check for mark in marks if hasattr(mark, "check")]
    form = next((mark for mark in marks if isinstance(mark, As)), None)
    if form is not None:
        sent, sent_marks = _marks_of(form.hint)
        return _Field(name, _coder_of(sent, sent_marks), checks, form.encode, form.decode)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        numbers = {member: number for number, member in enumerate(hint)}
        return _Field(name, "B", checks, numbers.__getitem__, list(hint).__getitem__)
    coder = _coder_of(hint, marks)
    bounded = isinstance(coder, str) and (coder in _INTEGERS.values() or coder.endswith("s"))  # by the layout
    return _Field(name, coder, [] if bounded else checks)


def _coder_of(hint: Any, marks: Sequence[Any]) -> str | _Coder:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        (inner,) = (one for one in get_args(hint) if one is not NoneType)
        return _optional(_record_of(inner))
    if origin is tuple and get_args(hint)[1:] == (...,):
        return _several(get_args(hint)[0])
    if origin is tuple or is_dataclass(hint):
        record = _record_of(hint)
        return _Coder(record.encode, record.decode)
    return _plain(hint, marks)


def _plain(hint: type[Any], marks: Sequence[Any]) -> str | _Coder:
    if hint is int:
        if any(isinstance(mark, _Signed) for mark in marks):
            return "q"
        return next((_INTEGERS[mark.maximum] for mark in marks if getattr(mark, "maximum", 0) in _INTEGERS), "Q")
    if hint is bytes:
        exact = next((mark for mark in marks if isinstance(mark, Exactly)), None)
        return _sized(bytes, bytes) if exact is None else f"{exact.length}s"
    if hint is str:
        return _sized(lambda text: text.encode("utf-8", "replace"), lambda data: str(data, "utf-8"))
    if hint in _LAYOUTS:
        return _LAYOUTS[hint]
    raise TypeError(f"{hint} has no form in a frame")


def _sized(encode: Callable[[Any], bytes], decode: Callable[[bytes], Any]) -> _Coder:
    def encoded(value: Any) -> bytes:
        data = encode(value)
        return _COUNT.pack(len(data)) + data

    def decoded(body: bytes, at: int) -> tuple[Any, int]:
        start, end = _span(body, at, 1)
        return decode(body[start:end]), end

    return _Coder(encoded, decoded)


def _several(hint: Any) -> _Coder:
    record = _record_of(hint)
    layout = record.layout

    def encoded(values: tuple[Any, ...]) -> bytes:
        return _COUNT.pack(len(values)) + b"".join(map(record.encode, values))

    def decoded(body: bytes, at: int) -> tuple[Any, int]:
        (count,) = _COUNT.unpack_from(body, at)
        at += _COUNT.size
        values = []
        for _ in range(count):  # each takes a byte at least, so that the body bounds them
            value, at = record.decode(body, at)
            values.append(value)
        return tuple(values), at

    if layout is None or is_dataclass(hint):
        return _Coder(encoded, decoded)
    single = get_origin(hint) is not tuple

    def encoded_at_once(values: tuple[Any, ...]) -> bytes:
        entries = [layout.pack(value) for value in values] if single else [layout.pack(*value) for value in values]
        return _COUNT.pack(len(values)) + b"".join(entries)

    def decoded_at_once(body: bytes, at: int) -> tuple[Any, int]:
        start, end = _span(body, at, layout.size)
        entries = layout.iter_unpack(body[start:end])
        return tuple(value for (value,) in entries) if single else tuple(entries), end

    return _Coder(encoded_at_once, decoded_at_once)


def _optional(record: _Record) -> _Coder:
    def decoded(body: bytes, at: int) -> tuple[Any, int]:
        (there,) = struct.unpack_from("<?", body, at)
        return record.decode(body, at + 1) if there else (None, at + 1)

    return _Coder(lambda value: b"\0" if value is None else b"\1" + record.encode(value), decoded)


def _span(body: bytes, at: int, entry_bytes: int) -> tuple[int, int]:
    """Return where the entries after their count start and end. Raise FrameError if the body ends before.

    So a body that is too short is refused before its entries are made.
    """
    (count,) = _COUNT.unpack_from(body, at)
    start = at + _COUNT.size
    end = start + count * entry_bytes
    if end > len(body):
        raise FrameError(f"a body of {len(body)} bytes ends before its byte {end}")
    return start, end


def _marks_of(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return (hint.__origin__, hint.__metadata__) if get_origin(hint) is Annotated else (hint, ())
