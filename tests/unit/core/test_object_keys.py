"""Key files: what they may say, and that nothing repeats a key (S5)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvdepot.core.object_keys import KEYS_MAX, NO_KEYS, RETIRED_MAX, KeyRing, key_id, parse_keys

A, B = bytes(range(32)), bytes(range(1, 33))


def test_the_first_key_writes_and_all_of_them_read() -> None:
    ring = parse_keys(f"# of the pool\n{A.hex()}  # 2026\n\n  {B.hex().upper()}\nretired 0123456789abcdef\n")
    assert ring == KeyRing((A, B), (bytes.fromhex("0123456789abcdef"),))
    assert (ring.find(key_id(A)), ring.find(key_id(B)), ring.find(bytes(8))) == (A, B, None)
    assert ring and not NO_KEYS


def test_an_id_is_known_and_is_not_the_key() -> None:
    """It is in every header: what was written with it has to stay readable."""
    assert key_id(A).hex() == "bdbd955cb94c830e"
    assert key_id(A) != key_id(B)
    assert parse_keys(A.hex()).shown == key_id(A).hex()
    assert A.hex() not in f"{parse_keys(A.hex())!r}" and repr(A)[2:20] not in f"{parse_keys(A.hex())!r}"


REFUSED = {
    "nothing": ("", "expected a key"),
    "a comment": ("# none yet\n", "expected a key"),
    "too short": (A.hex()[2:], "line 1"),
    "too long": (A.hex() + "00", "line 1"),
    "no digits": (f"\n{A.hex()[:-1]}g", "line 2"),
    "two in a line": (f"{A.hex()} {B.hex()}", "line 1"),
    "a word of no meaning": (f"key {A.hex()}", "line 1"),
    "a retired key instead of its id": (f"{B.hex()}\nretired {A.hex()}", "line 2"),
    "zeros": ("00" * 32, "line 1"),
    "one twice": (f"{A.hex()}\n{B.hex()}\n{A.hex()}", "line 3"),
    "only retired ones": ("retired 0123456789abcdef", "expected a key"),
    "one that is retired": (f"{A.hex()}\nretired {key_id(A).hex()}", "also named as retired"),
    "too many": ("\n".join(bytes([number] * 32).hex() for number in range(1, KEYS_MAX + 2)), "at most"),
    "too many retired": (A.hex() + f"\nretired {'01' * 8}" * (RETIRED_MAX + 1), "at most"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_key_file_is_refused_without_repeating_it(case: str) -> None:
    text, reason = REFUSED[case]
    with pytest.raises(ValueError, match=reason) as refused:
        parse_keys(text)
    assert not any(key.hex()[:16] in str(refused.value) for key in (A, B))


digits = st.from_regex(r"([0-9a-f ]{60,70}\n){0,3}", fullmatch=True)


@given(st.text(st.characters(codec="ascii"), max_size=300) | digits)
def test_any_text_has_keys_or_is_refused(text: str) -> None:
    try:
        ring = parse_keys(text)
    except ValueError:
        return
    assert all(len(key) == 32 and any(key) for key in ring.keys) and ring.keys
