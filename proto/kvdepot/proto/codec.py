"""The only translator between the wire (protobuf) and the plain values of `kvdepot.core`, by reflection.

A value is a dataclass, and each of its fields has a field of the same name in its message. The type of the field says
how it travels:

=====================  ==================================================================
field of the value     field of the message
=====================  ==================================================================
bool, number, text     the same, singular
`IntEnum`, `StrEnum`   a number or a string. Any other value is refused
dataclass              a message. An absent one is decoded like an empty one
`X | None`             `optional`, or a message that may be absent
`tuple[X, ...]`        `repeated`
`Mapping[K, V]`        `map`, decoded in the order of its keys
=====================  ==================================================================

`encode` accepts whatever the value can hold. `decode` believes nothing: every bound of a field (`kvdepot.core.bounds`)
and `check_fields` of the value are checked. A text is a name, without control characters, unless its bound says
`Prose`. Whatever is too many or too long raises LimitExceeded, whatever is
malformed InvalidArgument. Both name the field and the bound, on either side of the wire.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import IntEnum, StrEnum
from functools import cache
from typing import Annotated, Any, Final, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from kvdepot.core import limits
from kvdepot.core.bounds import Bound, Prose, bad, check_name
from kvdepot.core.calls import AttachCall, AttachReply
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.limits import check_limit
from kvdepot.proto.v1 import depot_pb2 as pb

T = TypeVar("T")
M = TypeVar("M", bound=Message)
_Encode = Callable[[Any], Any]
_Decode = Callable[[str, Any], Any]
_Check = Callable[[str, Any], None]
_TEXT_SHOWN: Final = 64
_CODECS: Final[dict[tuple[type, type[Message]], Codec[Any]]] = {}


class Codec(Generic[T]):
    """One kind of value and its message. Get one from `codec_of`."""

    def __init__(self, value_type: type[T], message_type: type[Message]) -> None:
        """Raise TypeError unless the two have the same fields, of types that belong together."""
        self._value_type = value_type
        self._message_type = message_type
        hints = get_type_hints(value_type, include_extras=True)
        descriptors: Mapping[str, Any] = message_type.DESCRIPTOR.fields_by_name
        names = [field.name for field in fields(value_type)]  # type: ignore[arg-type]
        if set(names) != set(descriptors):
            raise TypeError(f"{value_type.__name__} and {message_type.__name__}: {set(names) ^ set(descriptors)}")
        self._fields = [(name, *_coders(hints[name], descriptors[name])) for name in names]
        self._check_fields: Callable[[T], None] | None = getattr(value_type, "check_fields", None)

    def __str__(self) -> str:
        return self._message_type.DESCRIPTOR.name

    def encode(self, value: T) -> Any:
        """Return the message. Raise ValueError for what a field of the message cannot hold."""
        plain = {}
        for name, encode, _ in self._fields:
            of_field = getattr(value, name)
            plain[name] = of_field if encode is None else encode(of_field)
        return self._message_type(**plain)

    def decode(self, message: Message, within: str = "") -> T:
        """Return the value. `within`: the path of a nested message, with a dot at its end.

        Raise InvalidArgument or LimitExceeded.
        """
        plain = {}
        for name, _, decode in self._fields:
            plain[name] = getattr(message, name) if decode is None else decode(within + name, message)
        value = self._value_type(**plain)
        if self._check_fields is not None:
            self._check_fields(value)
        return value

    def parse(self, data: bytes) -> T:
        """Decode a message without a call around it, as `decode` does."""
        return self.decode(parse(self._message_type, data))


def parse(message_type: type[M], data: bytes) -> M:
    """Return the message that these bytes are, undecoded. Raise InvalidArgument."""
    message = message_type()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise bad("message", f"its {len(data)} bytes are no {message_type.DESCRIPTOR.name}") from error
    return message


def codec_of(value_type: type[T], message_type: type[Message]) -> Codec[T]:
    """Return the codec of a type. It is built at the first use, because a command needs few of them."""
    found: Codec[T] | None = _CODECS.get((value_type, message_type))
    if found is None:
        found = _CODECS[value_type, message_type] = Codec(value_type, message_type)
    return found


def _coders(hint: Any, descriptor: FieldDescriptor) -> tuple[_Encode | None, _Decode | None]:
    """Return how a field is encoded, and how it is taken from its message; None: unchanged."""
    hint, checks = _checks_of(hint)
    name = descriptor.name
    optional = get_origin(hint) in (Union, types.UnionType)
    if optional:
        hint, inner_checks = _checks_of(next(one for one in get_args(hint) if one is not type(None)))
        checks += inner_checks
    encode, decode = _entry_coders(hint, descriptor)
    if optional:
        if not descriptor.has_presence:
            raise TypeError(f"{descriptor.full_name} is always present")
        inner_encode = encode
        encode = (lambda value: None if value is None else inner_encode(value)) if inner_encode is not None else None
    elif descriptor.has_presence and descriptor.message_type is None:
        raise TypeError(f"{descriptor.full_name} may be absent")
    if not checks and decode is None and not optional:
        return encode, None

    def take(field: str, message: Any) -> Any:
        if optional and not message.HasField(name):
            return None
        value = getattr(message, name)
        for check in checks:
            check(field, value)
        return value if decode is None else decode(field, value)

    return encode, take


def _entry_coders(hint: Any, descriptor: FieldDescriptor) -> tuple[_Encode | None, _Decode | None]:
    """Return the coders of a field without its bounds: a value, a tuple or a mapping."""
    origin = get_origin(hint)
    if origin is tuple:
        return _tuple_coders(get_args(hint)[0], descriptor)
    if origin is Mapping:
        key_hint, value_hint = get_args(hint)
        return _mapping_coders(key_hint, value_hint, descriptor)
    if _is_repeated(descriptor):
        raise TypeError(f"{descriptor.full_name} is repeated")
    return _value_coders(hint, descriptor)


def _tuple_coders(hint: Any, descriptor: FieldDescriptor) -> tuple[_Encode | None, _Decode | None]:
    if not _is_repeated(descriptor):
        raise TypeError(f"{descriptor.full_name} is not repeated")
    hint, checks = _checks_of(hint)
    encode, decode = _value_coders(hint, descriptor)
    nested = is_dataclass(hint)

    def decode_all(field: str, values: Any) -> tuple[Any, ...]:
        found = tuple(values)
        for check in checks:
            for value in found:
                check(f"{field}[]", value)
        if decode is None:
            return found
        if nested:
            return tuple(decode(f"{field}[{index}]", value) for index, value in enumerate(found))
        return tuple(decode(f"{field}[]", value) for value in found)

    return (None if encode is None else lambda values: [encode(value) for value in values]), decode_all


def _mapping_coders(key_hint: Any, value_hint: Any, descriptor: FieldDescriptor) -> tuple[_Encode, _Decode]:
    key_hint, key_checks = _checks_of(key_hint)
    value_hint, value_checks = _checks_of(value_hint)
    entry = descriptor.message_type
    if entry is None or not entry.GetOptions().map_entry:
        raise TypeError(f"{descriptor.full_name} is no map")
    _, decode_key = _value_coders(key_hint, entry.fields_by_name["key"])
    if is_dataclass(value_hint):
        raise TypeError(f"{descriptor.full_name}: a map of messages has no value here")

    def decode(field: str, values: Any) -> dict[Any, Any]:
        found = dict(sorted(values.items()))
        for key, value in found.items():
            for check in key_checks:
                check(field, key)
            for check in value_checks:
                check(f"{field}[]", value)
        return found if decode_key is None else {decode_key(field, key): value for key, value in found.items()}

    return dict, decode


def _value_coders(hint: Any, descriptor: FieldDescriptor) -> tuple[_Encode | None, _Decode | None]:
    """Return the coders of one value."""
    if is_dataclass(hint):
        if descriptor.message_type is None:
            raise TypeError(f"{descriptor.full_name} is no message")
        codec: Codec[Any] = codec_of(hint, GetMessageClass(descriptor.message_type))  # type: ignore[arg-type]
        return codec.encode, lambda field, message: codec.decode(message, f"{field}.")
    if hint not in _WIRE_TYPES and not issubclass(hint, IntEnum | StrEnum):
        raise TypeError(f"{descriptor.full_name}: {hint} has no form on the wire")
    plain = next(kind for kind in (bool, int, float, str, bytes) if issubclass(hint, kind))
    if descriptor.type not in _WIRE_TYPES[plain]:
        raise TypeError(f"{descriptor.full_name} is no {plain.__name__}")
    if not issubclass(hint, IntEnum | StrEnum):
        return None, None
    members = {member.value: member for member in hint}

    def decode(field: str, value: Any) -> Any:
        if value not in members:
            shown = repr(value[:_TEXT_SHOWN]) if isinstance(value, str) else value
            raise bad(field, f"{shown} is none of {list(members)}")
        return members[value]

    return None, decode


_WIRE_TYPES: Final[dict[type, frozenset[int]]] = {
    bool: frozenset({FieldDescriptor.TYPE_BOOL}),
    int: frozenset(
        {
            FieldDescriptor.TYPE_INT32,
            FieldDescriptor.TYPE_UINT32,
            FieldDescriptor.TYPE_UINT64,
            FieldDescriptor.TYPE_FIXED64,
        }
    ),
    float: frozenset({FieldDescriptor.TYPE_DOUBLE}),
    str: frozenset({FieldDescriptor.TYPE_STRING}),
    bytes: frozenset({FieldDescriptor.TYPE_BYTES}),
}
"""The types of fields that a value of each type may have. Other types are in no .proto file of ours."""


def _is_repeated(descriptor: FieldDescriptor) -> bool:
    return descriptor.name in _repeated(descriptor.containing_type)


@cache
def _repeated(message: Descriptor) -> frozenset[str]:
    """Return the repeated fields of a message. The supported versions of `FieldDescriptor` name them differently."""
    proto = DescriptorProto()
    message.CopyToProto(proto)
    return frozenset(field.name for field in proto.field if field.label == FieldDescriptorProto.LABEL_REPEATED)


def _checks_of(hint: Any) -> tuple[Any, list[_Check]]:
    """Return a type without its bounds, and the checks of a value."""
    bounds: tuple[Bound, ...] = ()
    if get_origin(hint) is Annotated:
        hint, bounds = hint.__origin__, tuple(hint.__metadata__)
    checks: list[_Check] = [bound.check for bound in bounds]
    if hint is str and not any(isinstance(bound, Prose) for bound in bounds):
        checks.append(check_name)
    return hint, checks


# --- messages that travel alone ---


def encode_attach_call(call: AttachCall) -> bytes:
    return codec_of(AttachCall, pb.AttachRequest).encode(call).SerializeToString()  # type: ignore[no-any-return]


def decode_attach_call(datagram: bytes) -> AttachCall:
    check_limit("datagram", len(datagram), limits.ATTACH_DATAGRAM_BYTES_MAX)
    return codec_of(AttachCall, pb.AttachRequest).parse(datagram)


def encode_attach_reply(reply: AttachReply) -> bytes:
    return codec_of(AttachReply, pb.AttachResponse).encode(reply).SerializeToString()  # type: ignore[no-any-return]


def decode_attach_reply(datagram: bytes) -> AttachReply:
    check_limit("datagram", len(datagram), limits.ATTACH_DATAGRAM_BYTES_MAX)
    return codec_of(AttachReply, pb.AttachResponse).parse(datagram)


def encode_spec(spec: NamespaceSpec) -> bytes:
    """Return the bytes of a spec. Equal specs have equal bytes."""
    return codec_of(NamespaceSpec, pb.NamespaceSpec).encode(spec).SerializeToString(deterministic=True)  # type: ignore[no-any-return]


def decode_spec(data: bytes) -> NamespaceSpec:
    check_limit("spec bytes", len(data), limits.SPEC_BYTES_MAX)
    return codec_of(NamespaceSpec, pb.NamespaceSpec).parse(data)
