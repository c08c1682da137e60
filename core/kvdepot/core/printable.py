"""Texts of others, for terminals and logs: a client chooses names, and a terminal obeys what it prints."""

from __future__ import annotations

import re
from typing import Final

_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f]")
"""Control characters, ends of lines and paragraphs, and the characters that change the direction of writing."""


def control_character(text: str) -> str:
    """Return the first character that a terminal obeys, which no name may have; empty: there is none."""
    if text.isprintable():
        return ""
    found = _CONTROL.search(text)
    return found[0] if found is not None else ""


def without_controls(text: str) -> str:
    """Return the text with a question mark for each such character, so that it gets no longer."""
    return _CONTROL.sub("?", text)


def printable(text: str) -> str:
    """Return the text with control characters, and others that are not printable, written as escapes."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )
