"""Ids of requests as vLLM makes them of what users send, and what is found by an id that a user knows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvdepot.core.request_ids import meant


@pytest.mark.parametrize(
    ("engine", "asked"),
    [
        ("cmpl-8fa7-0-1a2b3c4d", "cmpl-8fa7"),
        ("0_cmpl-8fa7-0-1a2b3c4d", "cmpl-8fa7"),
        ("12_cmpl-8fa7-3-1a2b3c4d", "8fa7"),
        ("0_cmpl-8fa7", "cmpl-8fa7"),
        ("cmpl-my-req-1", "my-req-1"),
        ("chatcmpl-my-req-1-1a2b3c4d", "my-req-1"),
        ("chatcmpl-my-req-1_4-1a2b3c4d", "my-req-1"),
        ("1_chatcmpl-my-req-1-1a2b3c4d", "my-req-1"),
        ("cmpl-plain-0", "cmpl-plain"),
        ("cmpl-plain-1a2b3c4d-beam-3-99999999", "plain"),
        ("resp_77_2-1a2b3c4d", "resp_77"),
        ("generate-tokens-x.y/z", "x.y/z"),
        ("transcribe-a b", "a b"),
        ("___prefill_addr_10.0.0.1:9___decode_addr_10.0.0.2:9_my-id", "my-id"),
        ("gateway:my-id", "my-id"),
    ],
)
def test_the_id_that_a_user_knows_is_found(engine: str, asked: str) -> None:
    assert meant(asked, ["cmpl-other-0", engine, "0_cmpl-another"]) == [1]


def test_the_nearest_meaning_is_taken() -> None:
    ids = [
        "req-1",
        "cmpl-req-1-0-1a2b3c4d",
        "1_chatcmpl-req-1",
        "req-10",
        "cmpl-req-10-0",
        "cmpl-my-req-1",
        "cmpl-xreq-1",
    ]
    assert meant("req-1", ids) == [0]
    assert meant("req-1", ids[1:]) == [0, 1]
    assert meant("req-1", ids[3:]) == [0]
    assert meant("req-1", ids[4:]) == [0, 1]
    assert meant("req-1", ids[6:]) == []
    assert meant("", []) == []


@given(
    user=st.text(min_size=1, max_size=20), verb=st.sampled_from(["", "cmpl-", "chatcmpl-", "embd-"]),
    prompt=st.sampled_from(["", "-0", "_3", "-17"]), random=st.sampled_from(["", "-1a2b3c4d"]),
    answer=st.sampled_from(["", "0_", "15_"]),
)  # fmt: skip
def test_whatever_a_user_sends_is_found(user: str, verb: str, prompt: str, random: str, answer: str) -> None:
    engine = f"{answer}{verb}{user}{prompt}{random}"
    assert meant(user, [engine]) == [0]
    assert meant(f"{verb}{user}", [engine]) == [0]
    assert meant(engine, [f"{engine}x", engine]) == [1]
