"""Daemons of two versions are peers: each message has the same bytes for as long as the protocol has the same name.

A frame says neither version nor fields. If a test here fails, give ALPN and ALPN_NIXL another number.
"""

from __future__ import annotations

import pytest
from kvdepot.core.objectfile import ObjectName
from kvdepot.server.io.chunk_words import words_of_names
from kvdepot.server.io.peer_wire import (
    ALPN,
    ALPN_NIXL,
    FROM_READER,
    TO_READER,
    Borrow,
    Leased,
    Lender,
    Lent,
    Locate,
    Located,
    Pull,
    Question,
    Refusal,
    Refused,
    Reply,
    Return,
    Returned,
    Summarize,
    Summary,
    Unchanged,
    Wanted,
)

ID, KEY = bytes(range(16)), bytes(range(16, 32))
IDS = (ID + KEY).hex()
NAME = ObjectName(ID, KEY, bytes(range(32, 48)), 3, 256, 4097)
NAMED = f"{IDS}202122232425262728292a2b2c2d2e2f03000100000110000000000000"
QUESTIONS: tuple[tuple[Question, str], ...] = (
    (Locate((Wanted(ID, KEY, 1),)), f"2500000000050000000000000001000000{IDS}01"),
    (Pull(NAME), f"3d000000010500000000000000{NAMED}"),
    (Borrow(NAME), f"3d000000020500000000000000{NAMED}"),
    (Return(), "00000000030500000000000000"),
    (Summarize(7), "080000000405000000000000000700000000000000"),
)
SUM = "00000000000000000000000010000000"
META = "040000006d65746103000000000000000000000000000000"
TWO_AND_THREE = "02000000000000000300000000000000"
REPLIES: tuple[tuple[Reply, str], ...] = (
    (
        Located((4097, -1, -2), 9),
        "24000000000500000000000000030000000110000000000000fffffffffffffffffeffffffffffffff0900000000000000",
    ),
    (Leased(4097, 1 << 100, 8), f"200000000105000000000000000110000000000000{SUM}0800000000000000"),
    *((Refused(reason), f"01000000020500000000000000{at:02x}") for at, reason in enumerate(Refusal)),
    (
        Lent(1 << 100, 8, Lender(b"meta", 3, 4096), ((8192, 4097),)),
        f"4c000000030500000000000000{SUM}0800000000000000{META}00100000000000000100000000200000000000000110000000000000",
    ),
    (Returned(), "00000000040500000000000000"),
    (
        Summary(9, 7, 2, 3, bytes(8)),
        f"2c00000005050000000000000009000000000000000700000000000000{TWO_AND_THREE}080000000000000000000000",
    ),
    (Unchanged(9), "080000000605000000000000000900000000000000"),
)


@pytest.mark.requirement("I8", "I1")
@pytest.mark.parametrize(("message", "frame"), QUESTIONS, ids=lambda value: type(value).__name__)
def test_golden_questions(message: Question, frame: str) -> None:
    assert FROM_READER.pack(message, 5).hex() == frame
    assert list(FROM_READER.take(bytearray.fromhex(frame))) == [(5, message)]


@pytest.mark.requirement("I8", "I1")
@pytest.mark.parametrize(("message", "frame"), REPLIES, ids=lambda value: type(value).__name__)
def test_golden_replies(message: Reply, frame: str) -> None:
    assert TO_READER.pack(message, 5).hex() == frame
    assert list(TO_READER.take(bytearray.fromhex(frame))) == [(5, message)]


@pytest.mark.requirement("I8")
def test_golden_reasons_words_and_names_of_the_protocols() -> None:
    assert list(Refusal) == ["gone", "foreign", "busy", "not_allowed", "not_lent"]  # by their positions
    assert words_of_names([(ID, KEY)]).tolist() == [16876056419280091183]
    assert (ALPN, ALPN_NIXL) == ("kvdepot-peer/1", "kvdepot-peer-nixl/1")
