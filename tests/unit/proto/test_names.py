"""No text that a client says may have a character that a terminal obeys, whichever field it is in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from kvdepot.core.calls import AttachCall
from kvdepot.core.errors import InvalidArgument, LimitExceeded
from kvdepot.core.keys import NamespaceSpec
from kvdepot.proto.codec import Codec, codec_of
from kvdepot.proto.methods import BY_CALL
from kvdepot.proto.v1 import depot_pb2 as pb

Path = tuple[FieldDescriptor, ...]

_SAID: Final[list[Codec[Any]]] = [
    *(method.call for method in BY_CALL.values()),
    codec_of(AttachCall, pb.AttachRequest),
    codec_of(NamespaceSpec, pb.NamespaceSpec),  # of an export, and of a namespace's page
]
_NEEDED: Final = {"session": bytes(16), "namespace_id": bytes(16), "key": bytes(16), "lease_id": 1, "kind": 1}
"""Fields without which a call is refused before its names are read. Later fields with such a bound belong here."""
_OBEYED: Final = [*"\0\a\n\r\x7f\u061c\u200f\u2028\u202e\u2066", "\x1b[2J", "\x9b31m"]


def _message(wire: Codec[Any]) -> Descriptor:
    return pb.DESCRIPTOR.pool.FindMessageTypeByName(f"kvdepot.v1.{wire}")


def _texts(message: Descriptor) -> Iterator[Path]:
    """Yield the way to each text of a message."""
    for field in message.fields:
        if field.type == FieldDescriptor.TYPE_STRING:
            yield (field,)
        elif field.message_type is not None:
            yield from ((field, *rest) for rest in _texts(field.message_type))


def _fill(message: Any) -> None:
    for name, value in _NEEDED.items():
        field = message.DESCRIPTOR.fields_by_name.get(name)
        if field is not None and field.message_type is None:
            plain = b"" if field.type == FieldDescriptor.TYPE_BYTES else 0
            setattr(message, name, value if isinstance(value, type(plain)) else plain)


def _say(message: Any, path: Path, text: str) -> None:
    """Set the text at the end of the path, and what is needed on the way."""
    _fill(message)
    field, *rest = path
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        entry = field.message_type.fields_by_name
        default = {"key": "k", "value": "v" if entry["value"].type == FieldDescriptor.TYPE_STRING else 1}
        said = {**default, rest[0].name: text}
        value[said["key"]] = said["value"]
    elif field.message_type is not None:
        _say(value.add() if hasattr(value, "add") else value, tuple(rest), text)
    elif isinstance(value, str):
        setattr(message, field.name, text)
    else:
        value.append(text)


_PATHS: Final = [(wire, path) for wire in _SAID for path in _texts(_message(wire))]
_IDS: Final = [f"{wire}.{'.'.join(field.name for field in path)}" for wire, path in _PATHS]


def _refusal(wire: Codec[Any], path: Path, text: str) -> str:
    message: Message = GetMessageClass(_message(wire))()
    _say(message, path, text)
    try:
        wire.parse(message.SerializeToString())
    except (InvalidArgument, LimitExceeded) as error:
        return error.message
    return ""


@pytest.mark.requirement("S6")
@pytest.mark.parametrize("text", _OBEYED, ids=[f"{ord(text[0]):04x}" for text in _OBEYED])
@pytest.mark.parametrize(("wire", "path"), _PATHS, ids=_IDS)
def test_a_text_with_a_control_character_is_refused_by_its_field(wire: Codec[Any], path: Path, text: str) -> None:
    refused = _refusal(wire, path, f"a{text}")
    inner = path[-1].containing_type
    in_map = inner is not None and inner.GetOptions().map_entry
    name = path[-2 if in_map else -1].name  # a map is named, not its entry
    assert name in refused.partition(": ")[0], refused
    assert "control character" in refused or "is none of" in refused
    assert refused.isprintable()


@pytest.mark.requirement("S6")
@pytest.mark.parametrize(("wire", "path"), _PATHS, ids=_IDS)
def test_other_texts_are_no_names_with_control_characters(wire: Codec[Any], path: Path) -> None:
    assert "control character" not in _refusal(wire, path, "caché 鍵\u00a0🙂 [red]")


def test_every_kind_of_text_is_met() -> None:
    assert {"AttachRequest.engine_id", "EndRequestRequest.end.miss", "RegisterNamespaceRequest.spec.label"} <= set(_IDS)
    assert {"NamespaceSpec.identity.key", "NamespaceSpec.identity.value", "NamespaceSpec.groups.layers"} <= set(_IDS)
