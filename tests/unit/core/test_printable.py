"""What a client chose and a terminal would obey is written as escapes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvdepot.core.printable import printable


@pytest.mark.requirement("S6")
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("engine-0", "engine-0"),
        ("caché 鍵", "caché 鍵"),
        ("evil\x1b[2Jid", "evil\\x1b[2Jid"),
        ("a\rforged", "a\\rforged"),
        ("two\nlines", "two\\nlines"),
        ("\x9b31m", "\\x9b31m"),  # a control sequence in one character
        ("\u202egnp.exe", "\\u202egnp.exe"),  # reverses what follows
        ("\udc80", "\\udc80"),
    ],
)
def test_control_characters_become_escapes(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text())
def test_the_result_is_printable_whatever_comes(text: str) -> None:
    assert printable(text).isprintable()
