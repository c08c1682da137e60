"""Keys of the objects of a tier, and the file that names them (docs/formats/object.md, ADR 68).

A key is 32 bytes. Its id is public: it lies in the header of each object that was written with the key. No text of this
module ever has a key in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Annotated, Final

from kvdepot.core.bounds import Count, Exactly

KEY_BYTES: Final = 32
KEY_ID_BYTES: Final = 8
NO_KEY_ID: Final = bytes(KEY_ID_BYTES)
"""In the header of an object without a MAC."""
KEYS_MAX: Final = 8
RETIRED_MAX: Final = 32
FILE_BYTES_MAX: Final = 16 << 10
_RETIRED: Final = "retired"
_PERSON: Final = b"kvdepot-key-id"

Key = Annotated[bytes, Exactly(KEY_BYTES)]
KeyId = Annotated[bytes, Exactly(KEY_ID_BYTES)]


def key_id(key: bytes) -> bytes:
    """Return the id of a key: a keyed digest of nothing, which reveals nothing of the key."""
    return blake2b(key=key, digest_size=KEY_ID_BYTES, person=_PERSON).digest()


@dataclass(frozen=True, slots=True)
class KeyRing:
    """The keys of one tier. Without keys, the tier holds objects without a MAC."""

    keys: Annotated[tuple[Key, ...], Count(KEYS_MAX)] = field(default=(), repr=False)
    """The first one is for writing, all of them are for reading."""
    retired: Annotated[tuple[KeyId, ...], Count(RETIRED_MAX)] = ()
    """Ids of keys that nobody has any more. An object of these may be replaced."""

    def __bool__(self) -> bool:
        """Return whether the tier is keyed."""
        return bool(self.keys)

    def find(self, wanted: bytes) -> bytes | None:
        """Return the key of an id; None if it is not here."""
        return next((key for key in self.keys if key_id(key) == wanted), None)

    @property
    def shown(self) -> str:
        """Return the ids, for people."""
        return ", ".join(
            [key_id(key).hex() for key in self.keys] + [f"{_RETIRED} {retired.hex()}" for retired in self.retired]
        )


NO_KEYS: Final = KeyRing()


def parse_keys(text: str) -> KeyRing:
    """Return the keys of a key file's text. Raise ValueError, which names the line and never repeats it."""
    keys: list[bytes] = []
    retired: list[bytes] = []
    for number, words in _lines(text):
        value = _hexadecimal(words[-1])
        if len(words) == 1 and len(value) == KEY_BYTES:
            keys.append(value)
        elif len(words) == 2 and words[0] == _RETIRED and len(value) == KEY_ID_BYTES:
            retired.append(value)
        else:
            raise ValueError(
                f"line {number}: expected {2 * KEY_BYTES} hexadecimal digits, or {_RETIRED!r} and the"
                f" {2 * KEY_ID_BYTES} digits of a key's id"
            )
        if keys and (keys[-1] in keys[:-1] or not any(keys[-1])):
            raise ValueError(f"line {number}: the key is all zeros, or stands there twice")
    if not keys:
        raise ValueError(f"expected a key: a line of {2 * KEY_BYTES} hexadecimal digits")
    if len(keys) > KEYS_MAX or len(retired) > RETIRED_MAX:
        raise ValueError(f"expected at most {KEYS_MAX} keys and {RETIRED_MAX} retired ids")
    for key in keys:
        if key_id(key) in retired:
            raise ValueError(f"key {key_id(key).hex()} is also named as retired: delete one of the two lines")
    return KeyRing(tuple(keys), tuple(retired))


def _lines(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield number and words of each line with a word. A `#` begins a comment."""
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            yield number, words


def _hexadecimal(word: str) -> bytes:
    """Return the bytes; none if the word has other characters."""
    try:
        return bytes.fromhex(word)
    except ValueError:
        return b""
