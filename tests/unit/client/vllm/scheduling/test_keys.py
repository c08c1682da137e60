"""Which chunks of a request have a key, and what it covers, without and with draft layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kvdepot.client.vllm.scheduling.requests import RequestState, depot_id, tokens_before_items
from kvdepot.core.keys import chunk_key

CHUNK, HASH_BLOCK = 32, 16


def item(identifier: str, offset: int, length: int) -> Any:
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


def request(tokens: list[int], items: list[Any] | None = None) -> Any:
    hashes = [b"hash of %d" % end for end in range(HASH_BLOCK, len(tokens) + 1, HASH_BLOCK)]
    return SimpleNamespace(
        request_id="r",
        all_token_ids=tokens,
        block_hashes=hashes,
        mm_features=items or [],
        num_tokens=len(tokens),
    )


def keys(tokens: list[int], lookahead: int, *, items: list[Any] | None = None, salt: bytes = b"") -> list[bytes]:
    state = RequestState(request(tokens, items), 0.0, salt=salt)
    assert state.update_keys(CHUNK, HASH_BLOCK, lookahead) == len(state.keys)
    return state.keys


@pytest.mark.requirement("P2")
def test_without_lookahead_a_key_covers_the_prefix_alone() -> None:
    tokens = list(range(70))
    assert keys(tokens, 0) == [chunk_key(b"hash of 32"), chunk_key(b"hash of 64")]
    assert keys(tokens, 0, salt=b"adapter") == [
        chunk_key(b"hash of 32", b"adapter"),
        chunk_key(b"hash of 64", b"adapter"),
    ]
    assert keys(tokens, 0) == keys([*tokens[:64], 999], 0) == keys(tokens, 0, items=[item("a", 60, 8)])


@pytest.mark.requirement("P2", "C7")
def test_with_lookahead_a_key_covers_the_next_token() -> None:
    tokens = list(range(70))
    assert keys(tokens, 1) == [
        chunk_key(b"hash of 32", (32).to_bytes(4, "little")),
        chunk_key(b"hash of 64", (64).to_bytes(4, "little")),
    ]
    other = [*tokens[:64], 999, *tokens[65:]]
    assert keys(other, 1)[0] == keys(tokens, 1)[0]
    assert keys(other, 1)[1] != keys(tokens, 1)[1]
    assert keys([*tokens[:65], 999], 1) == keys(tokens, 1), "and no token after that"
    assert keys(tokens, 1, salt=b"adapter")[0] == chunk_key(b"hash of 32", b"adapter" + (32).to_bytes(4, "little"))


@pytest.mark.requirement("P2")
@pytest.mark.parametrize(("lookahead", "known"), [(0, [0, 1, 1, 1]), (1, [0, 0, 1, 1]), (2, [0, 0, 0, 1])])
def test_a_chunk_is_known_with_its_lookahead_tokens(lookahead: int, known: list[int]) -> None:
    state = RequestState(request([]), 0.0)
    for tokens, chunks in zip((31, 32, 33, 34), known, strict=True):
        state.request = request(list(range(tokens)))
        assert state.update_keys(CHUNK, HASH_BLOCK, lookahead) == chunks
        assert len(state.keys) == chunks
    assert state.keys == keys(list(range(34)), lookahead), "as of a request that arrives with all tokens"


@pytest.mark.requirement("P2")
def test_a_key_covers_the_item_in_the_place_of_its_next_token() -> None:
    """All items have the same placeholder tokens. A draft layer reads what is in their place."""
    tokens = [0] * 70
    plain = keys(tokens, 1)

    def with_item(identifier: str, offset: int, length: int = 8) -> list[bytes]:
        return keys(tokens, 1, items=[item("f" * 64, 2, 3), item(identifier, offset, length)])

    begins, goes_on, other = with_item("a" * 64, 64), with_item("a" * 64, 63), with_item("b" * 64, 64)
    assert len({plain[1], begins[1], goes_on[1], other[1]}) == 4
    assert plain[0] == begins[0] == goes_on[0] == other[0]
    assert with_item("a" * 64, 65)[1] == with_item("a" * 64, 56)[1] == plain[1], "after the token, and before it"


@pytest.mark.requirement("P2")
@pytest.mark.parametrize(("offset", "known"), [(0, 0), (31, 0), (32, 1), (63, 1), (64, 2), (69, 2)])
def test_chunks_that_reach_an_item_may_have_no_key(offset: int, known: int) -> None:
    state = RequestState(request(list(range(70)), [item("b" * 64, 69, 1), item("a" * 64, offset, 1)]), 0.0)
    state.keyed_tokens_max = tokens_before_items(state.request)
    assert state.update_keys(CHUNK, HASH_BLOCK) == len(state.keys) == known
    assert tokens_before_items(request([])) is None


@pytest.mark.requirement("S6")
@pytest.mark.parametrize(
    ("request_id", "sent"),
    [
        ("cmpl-my-id-0-1a2b3c4d", "cmpl-my-id-0-1a2b3c4d"),
        ("cmpl-caché", "cmpl-caché"),
        ("cmpl-é".encode().decode("latin-1"), "cmpl-Ã©"),
        ("cmpl-À".encode().decode("latin-1"), "cmpl-Ã\\x80"),  # as a header arrives that is not ASCII
        ("cmpl-\x1b[2J", "cmpl-\\x1b[2J"),
    ],
)
def test_a_user_s_request_id_reaches_the_daemon_without_control_characters(request_id: str, sent: str) -> None:
    assert depot_id(request_id) == sent


def test_a_request_id_whose_escapes_do_not_fit_becomes_a_digest() -> None:
    assert depot_id("\x80" * 200).startswith("digest-")
