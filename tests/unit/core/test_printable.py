"""What a client chose and a terminal would obey is written as escapes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvdepot.core.printable import control_character, printable, without_controls


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


@pytest.mark.requirement("S6")
@given(st.text())
def test_a_text_without_control_characters_is_a_name_and_gets_no_longer(text: str) -> None:
    tame = without_controls(text)
    assert not control_character(tame)
    assert len(tame) == len(text)
    assert (tame == text) is (not control_character(text))


@pytest.mark.parametrize(
    "name", ["caché 鍵", "no\u00a0break", "zero\u200bwidth", "🙂\u200d", "soft\u00adhyphen", "new\U0001fae9"]
)
def test_a_name_may_have_what_no_terminal_obeys(name: str) -> None:
    assert not control_character(name)
