"""Texts of others, for terminals and logs: a client chooses names, and a terminal obeys what it prints."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return the text with control characters, and others that are not printable, written as escapes."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )
