"""Limits that depend on each other agree."""

from __future__ import annotations

import pytest
from kvdepot.core import arena, limits
from kvdepot.core.calls import EXTENT_WORDS, KEY_BYTES
from kvdepot.core.errors import LimitExceeded

FIELD_BYTES = 4096  # names, tags and lengths of the other fields of a message


def test_the_largest_calls_and_replies_fit_a_message() -> None:
    room = limits.MESSAGE_BYTES_MAX - FIELD_BYTES
    assert room >= limits.KEYS_PER_CALL_MAX * KEY_BYTES
    assert room >= limits.OBJECTS_PER_LEASE_MAX * (2 * KEY_BYTES + 1 + 4)
    assert room >= limits.FRAGMENTS_PER_REPLY_MAX * EXTENT_WORDS * 8 + limits.OBJECTS_PER_LEASE_MAX
    assert room >= limits.SPEC_BYTES_MAX
    assert limits.FRAGMENTS_PER_REPLY_MAX >= limits.OBJECTS_PER_LEASE_MAX >= limits.KEYS_PER_CALL_MAX


def test_label_is_as_wide_as_its_column() -> None:
    widths = {name: int(dtype[1:]) for name, dtype in arena.NAMESPACE_COLUMNS if dtype.startswith("V")}
    assert widths["label"] == limits.LABEL_BYTES_MAX


def test_an_attach_datagram_holds_the_longest_engine_id() -> None:
    assert limits.ENGINE_ID_BYTES_MAX + 256 <= limits.ATTACH_DATAGRAM_BYTES_MAX


def test_advertised_limits_are_the_constants() -> None:
    for name, value in limits.advertised().items():
        assert value == getattr(limits, f"{name.upper()}_MAX")


def test_check_limit_refuses_only_above() -> None:
    limits.check_limit("ranks", 64, 64)
    with pytest.raises(LimitExceeded, match="ranks: 65 is more than 64"):
        limits.check_limit("ranks", 65, 64)
