"""MACs of objects: keyed BLAKE3 over header and stored payload (docs/formats/object.md, ADR 68)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from hmac import compare_digest

from blake3 import blake3
from kvdepot.core.object_keys import KeyRing, key_id
from kvdepot.core.objectfile import Damage, ObjectDamageError, ObjectHeader, authenticated, sliced


class Mac:
    """The MAC of one object, while its payload goes by. The thread that uses it has no other one."""

    def __init__(self, key: bytes, page: bytes | memoryview) -> None:
        self._state = blake3(authenticated(page), key=key)

    def over(self, parts: Iterable[memoryview]) -> Iterator[memoryview]:
        """Yield the bytes of the parts in pieces that the MAC has taken in."""
        for piece in sliced(parts):
            self._state.update(piece)
            yield piece

    def check(self, header: ObjectHeader) -> None:
        """Raise ObjectDamageError if the header has another MAC."""
        if not compare_digest(self._state.digest(), header.mac):
            raise ObjectDamageError(Damage.FORGED, f"checksums hold, but not the MAC of key {header.key_id.hex()}")

    def written_to(self, header: ObjectHeader) -> ObjectHeader:
        return replace(header, mac=self._state.digest())


def mac_of(header: ObjectHeader, page: bytes | memoryview, keys: KeyRing) -> Mac | None:
    """Return the MAC to check an object by. None: neither the object nor the tier has a key.

    Raise ObjectDamageError for an object that this tier's keys say nothing of.
    """
    if not header.keyed:
        if keys:
            raise ObjectDamageError(Damage.UNKEYED, "header: no MAC, and the tier has a key")
        return None
    key = keys.find(header.key_id)
    if key is None:
        raise ObjectDamageError(Damage.UNKNOWN_KEY, f"header: written with key {header.key_id.hex()}")
    return Mac(key, page)


def with_mac(header: ObjectHeader, payload: Iterable[memoryview], keys: KeyRing) -> ObjectHeader:
    """Return the header with the MAC of the first key; unchanged without keys."""
    if not keys:
        return header
    header = replace(header, key_id=key_id(keys.keys[0]))
    mac = Mac(keys.keys[0], header.pack())
    for _ in mac.over(payload):
        pass
    return mac.written_to(header)
