"""Messages that no honest engine sends: any field of a method with any value, and bytes that were changed after it."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

_TEXTS: Final = ("", "r", "a\x1b]0;x\x07", "\u202e", "x" * 513, "*", "/", "../..", "dense", "ram")
_WHOLE: Final = (0, 1, 2, 255, 256, 16_383, 2**31 - 1, 2**32 - 1, 2**63, 2**64 - 1)
_REAL: Final = (0.0, 0.01, 1.0, -1.0, float("nan"), float("inf"), 1e308)
_REPEATED: Final = (0, 1, 1, 2, 5, 40)
_DEPTH_MAX: Final = 4
_BITS: Final = {
    FieldDescriptor.TYPE_INT32: (31, True), FieldDescriptor.TYPE_SINT32: (31, True),
    FieldDescriptor.TYPE_INT64: (63, True), FieldDescriptor.TYPE_SINT64: (63, True),
    FieldDescriptor.TYPE_UINT32: (32, False), FieldDescriptor.TYPE_FIXED32: (32, False),
    FieldDescriptor.TYPE_UINT64: (64, False), FieldDescriptor.TYPE_FIXED64: (64, False),
}  # fmt: skip
_BROKEN: Final = (b"\xff" * 10, b"\x80" * 9 + b"\x01", bytes(16), b"\xff\xff\xff\xff\x0f", b"\x7f" * 5)


class Messages:
    """Draws messages.

    `known`: bytes that fit somewhere, such as the token of a session, a namespace and keys. `honest`: messages that an
    honest engine may send, by method.
    """

    def __init__(
        self, random: Random, known: Sequence[bytes], honest: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self._random = random
        self._known = known
        self._honest = honest

    def draw(self, method: MethodDescriptor) -> bytes:
        """Return a message of the method.

        Half of those that have an honest form are like it in all fields but one or two. One of ten has changed bytes,
        and one of twenty has no form at all.
        """
        random, kind = self._random, GetMessageClass(method.input_type)
        if random.random() < 0.05:
            return random.randbytes(random.choice((0, 1, 10, 500, 5000)))
        honest = self._honest.get(method.name)
        if honest is not None and random.random() < 0.5:
            message = kind()
            message.CopyFrom(honest)
            fields: list[FieldDescriptor] = list(method.input_type.fields)
            for field in random.sample(fields, min(random.randrange(3), len(fields))):
                message.ClearField(field.name)
                self._fill(message, field, 0, 0.3)
        else:
            message = self._message(kind, 0, random.choice((0.15, 0.5, 0.85)))
        data: bytes = message.SerializeToString()
        return self.changed(data) if random.random() < 0.1 else data

    def changed(self, data: bytes) -> bytes:
        """Return `data` with bytes replaced, added, repeated or left out."""
        random, changed = self._random, bytearray(data)
        for _ in range(random.randint(1, 6)):
            at = random.randint(0, len(changed))
            match random.randrange(5):
                case 0:
                    changed[at : at + 1] = random.randbytes(1)
                case 1:
                    changed[at:at] = random.randbytes(random.choice((1, 2, 8, 100)))
                case 2:
                    del changed[at : at + random.randint(1, 20)]
                case 3:
                    changed[at:at] = changed[at : at + random.randint(1, 64)] * random.randint(1, 8)
                case 4:
                    changed[at:at] = random.choice(_BROKEN)
        return bytes(changed)

    def _message(self, kind: type[Any], depth: int, left_out: float) -> Any:
        """Return a message of which that share of the fields is left out."""
        message = kind()
        for field in kind.DESCRIPTOR.fields:
            if self._random.random() >= left_out:
                self._fill(message, field, depth, left_out)
        return message

    def _fill(self, message: Any, field: FieldDescriptor, depth: int, left_out: float) -> None:
        count = self._random.choice(_REPEATED)
        if field.message_type is None:
            if field.is_repeated:
                getattr(message, field.name).extend(self._value(field) for _ in range(count))
            else:
                setattr(message, field.name, self._value(field))
        elif depth < _DEPTH_MAX and not field.message_type.GetOptions().map_entry:
            inner = GetMessageClass(field.message_type)
            if field.is_repeated:
                for _ in range(count):
                    getattr(message, field.name).append(self._message(inner, depth + 1, left_out))
            else:
                getattr(message, field.name).CopyFrom(self._message(inner, depth + 1, left_out))

    def _value(self, field: FieldDescriptor) -> Any:
        random = self._random
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self._bytes()
        if field.type == FieldDescriptor.TYPE_STRING:
            return random.choice(_TEXTS)
        if field.type == FieldDescriptor.TYPE_BOOL:
            return random.random() < 0.5
        if field.type == FieldDescriptor.TYPE_ENUM:
            return random.randrange(20)
        if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
            return random.choice(_REAL)
        bits, signed = _BITS[field.type]
        value = random.choice((*_WHOLE, random.getrandbits(bits))) % 2**bits
        return -value if signed and random.random() < 0.3 else value

    def _bytes(self) -> bytes:
        random = self._random
        match random.randrange(6):
            case 0:
                return random.randbytes(random.choice((0, 1, 15, 16, 17, 64)))
            case 1:
                return bytes(random.choice((0, 1, 1, 1, 2, 3, 255)) for _ in range(random.choice(_REPEATED)))
            case 2:
                count = random.choice(_REPEATED)
                return b"".join(struct.pack("<I", random.choice((0, 1, 256, 512, 2**32 - 1))) for _ in range(count))
            case 3:
                return b"".join(random.choice(self._known) for _ in range(random.choice(_REPEATED)))
            case _:
                return random.choice(self._known)
