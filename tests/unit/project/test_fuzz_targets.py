"""Any bytes, for everything that is parsed: a value or a named refusal. `python -m tests.fuzz` goes deeper."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import CORPORA, TARGETS


@pytest.mark.parametrize("target", TARGETS)
@given(data=st.binary(max_size=2_000))
@settings(max_examples=100)
def test_any_bytes(target: str, data: bytes) -> None:
    TARGETS[target](data)


@pytest.mark.parametrize("target", CORPORA)
@given(cuts=st.lists(st.tuples(st.integers(0, 1 << 16), st.binary(max_size=8)), max_size=4))
@settings(max_examples=50)
def test_good_examples_and_what_is_nearly_one(target: str, cuts: list[tuple[int, bytes]]) -> None:
    for path in sorted(CORPORA[target].iterdir()):
        data = bytearray(path.read_bytes()) if path.is_file() else bytearray()
        for at, replacement in cuts:
            at %= len(data) + 1
            data[at : at + len(replacement)] = replacement
        TARGETS[target](bytes(data))
