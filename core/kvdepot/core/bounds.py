"""Bounds of fields that cross a process boundary, declared at the field: `keys: Annotated[bytes, Packed(16, 1024)]`.

`kvdepot.proto.codec` checks them on every message that it decodes. A text without a bound is checked like a name
(`check_name`). Every other field without a bound accepts whatever its wire type can hold. What several fields say
together is checked by a method `check_fields(self) -> None` of the dataclass.

Each failure names the field and the bound. A count or a length above its limit raises LimitExceeded. Anything else
raises InvalidArgument.
"""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from math import inf
from typing import Annotated, Any, Final, Protocol

from kvdepot.core import limits
from kvdepot.core.errors import InvalidArgument
from kvdepot.core.kinds import Kind
from kvdepot.core.limits import check_limit
from kvdepot.core.printable import control_character

KEY_BYTES: Final = 16


def bad(field: str, why: str) -> InvalidArgument:
    return InvalidArgument(f"{field}: {why}")


def check_name(field: str, text: str) -> None:
    """Raise InvalidArgument if a terminal or a log would obey the text, or show it in another order."""
    if character := control_character(text):
        raise bad(field, f"it has the control character U+{ord(character):04X}, and no name may have one")


class Bound(Protocol):
    """What the values of a field have to satisfy."""

    def check(self, field: str, value: Any) -> None:
        """Raise InvalidArgument or LimitExceeded, naming `field`."""


@dataclass(frozen=True, slots=True)
class Exactly:
    """Bytes of one length, or none at all where `or_empty`."""

    length: int
    or_empty: bool = False

    def check(self, field: str, value: bytes) -> None:
        if len(value) != self.length and (value or not self.or_empty):
            raise bad(field, f"{len(value)} bytes, not {self.length}")


@dataclass(frozen=True, slots=True)
class Packed:
    """Bytes that are entries of one length, at most `count_max` of them."""

    entry_bytes: int
    count_max: int

    def check(self, field: str, value: bytes) -> None:
        count, rest = divmod(len(value), self.entry_bytes)
        if rest:
            raise bad(field, f"{len(value)} bytes are no multiple of an entry's {self.entry_bytes}")
        check_limit(field, count, self.count_max)


@dataclass(frozen=True, slots=True)
class OneOf:
    """Bytes of which each is one of these, at most `count_max` of them."""

    allowed: bytes
    count_max: int

    def check(self, field: str, value: bytes) -> None:
        check_limit(field, len(value), self.count_max)
        strange = value.translate(None, self.allowed)
        if strange:
            raise bad(field, f"{strange[0]} is none of {list(self.allowed)}")


@dataclass(frozen=True, slots=True)
class Prose:
    """A text of the daemon for people, of at most so many bytes of UTF-8.

    It may have several lines. The code that shows it has to care.
    """

    bytes_max: int

    def check(self, field: str, value: str) -> None:
        if 4 * len(value) > self.bytes_max:  # a character has at most 4
            check_limit(f"{field} bytes", len(value.encode("utf-8", "surrogatepass")), self.bytes_max)


@dataclass(frozen=True, slots=True)
class Text(Prose):
    """A name of at most so many bytes of UTF-8, without control characters."""

    def check(self, field: str, value: str) -> None:
        Prose.check(self, field, value)  # `super` does not work in a class with slots
        check_name(field, value)


@dataclass(frozen=True, slots=True)
class Count:
    """At most so many entries of a tuple or a mapping, or so many bytes."""

    count_max: int

    def check(self, field: str, value: Sized) -> None:
        if len(value) > self.count_max:
            check_limit(field, len(value), self.count_max)


@dataclass(frozen=True, slots=True)
class AtMost:
    """An integer of at most this."""

    maximum: int

    def check(self, field: str, value: int) -> None:
        if value > self.maximum:
            check_limit(field, value, self.maximum)


@dataclass(frozen=True, slots=True)
class Between:
    """An integer of at least `minimum` and at most `maximum`."""

    minimum: int
    maximum: int

    def check(self, field: str, value: int) -> None:
        if not self.minimum <= value <= self.maximum:
            raise bad(field, f"{value} is not from {self.minimum} to {self.maximum}")


@dataclass(frozen=True, slots=True)
class Duration:
    """A finite number of seconds from 0 up."""

    def check(self, field: str, value: float) -> None:
        if not 0 <= value < inf:
            raise bad(field, f"{value} is no finite number of seconds from 0 up")


@dataclass(frozen=True, slots=True)
class DrawnId:
    """A random 64-bit number. 0 is what a field that was forgotten has."""

    def check(self, field: str, value: int) -> None:
        if value == 0:
            raise bad(field, f"0 is not a {field.replace('_', ' ')}; draw a random 64-bit number")


@dataclass(frozen=True, slots=True)
class MessageBytes:
    """A message of at most so many bytes on the wire."""

    bytes_max: int

    def check(self, field: str, value: Any) -> None:
        check_limit(f"{field} bytes", value.ByteSize(), self.bytes_max)


# Fields that many messages have.
SessionToken = Annotated[bytes, Exactly(limits.SESSION_TOKEN_BYTES)]
NamespaceId = Annotated[bytes, Exactly(limits.NAMESPACE_ID_BYTES)]
NamespaceIdOrNone = Annotated[bytes, Exactly(limits.NAMESPACE_ID_BYTES, or_empty=True)]
ChunkKey = Annotated[bytes, Exactly(KEY_BYTES)]
ChunkKeyOrNone = Annotated[bytes, Exactly(KEY_BYTES, or_empty=True)]
LeaseId = Annotated[int, DrawnId()]
Kinds = Annotated[bytes, OneOf(bytes(Kind), limits.OBJECTS_PER_LEASE_MAX)]
"""Of the objects of a call."""
ChunkKinds = Annotated[bytes, OneOf(bytes(Kind), len(Kind))]
"""Of the objects of one chunk."""
Seconds = Annotated[float, Duration()]
EngineId = Annotated[str, Text(limits.ENGINE_ID_BYTES_MAX)]
RequestId = Annotated[str, Text(limits.REQUEST_ID_BYTES_MAX)]
Label = Annotated[str, Text(limits.LABEL_BYTES_MAX)]
Tenant = Annotated[str, Text(limits.TENANT_BYTES_MAX)]
Epoch = Annotated[str, Text(limits.EPOCH_BYTES_MAX)]
Version = Annotated[str, Text(limits.VERSION_BYTES_MAX)]
Reason = Annotated[str, Text(limits.REASON_BYTES_MAX)]
"""A reason from a list, or a tier's name."""
Explanation = Annotated[str, Prose(limits.REASON_BYTES_MAX)]
"""A reason or an error in the daemon's own words."""
