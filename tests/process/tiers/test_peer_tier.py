"""A peer tier with its real workers, in the loop of a test: what the daemon may ask of it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from kvdepot.core.objectfile import ObjectName, payload_sum
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.tiers.conformance_harness import name_of, payload_of

from tests.fakes.lying_source import LyingSource
from tests.rigs.certificates import Authority
from tests.rigs.peer_fleet import PEER
from tests.rigs.peer_live import NEGATIVE_SECONDS, PeerLive


@pytest.mark.requirement("I1")
def test_bytes_that_were_doubtful_here_are_not_taken_back_from_a_peer_that_may_have_them_from_here(
    tmp_path: Path,
) -> None:
    name, other = name_of(1), name_of(2)
    payloads = {one.key: payload_of(one) for one in (name, other)}

    async def test(source: LyingSource) -> None:
        live = PeerLive(tmp_path, source.port)
        try:
            await live.until(lambda: live.tier.readable, "it serves")
            handles = await live.look_up(name, other)
            assert await live.read(handles[name], name) == (IoOutcome.OK, payloads[name.key])
            live.tier.drop(handles[name])
            doubted_at = time.monotonic()
            live.tier.quarantine(name, (1, payload_sum([memoryview(payloads[name.key])])))
            answers = live.submit_look_up(name)
            seconds = time.monotonic() - doubted_at
            assert answers or seconds > NEGATIVE_SECONDS, "for a while nobody is asked"
            await live.until(lambda: answers, "looked up")
            again: dict[ObjectName, int] = {}
            while not again:
                again.update(await live.look_up(name))
            assert (await live.read(again[name], name))[0] is IoOutcome.CORRUPT
            assert await live.read(handles[other], other) == (IoOutcome.OK, payloads[other.key])
        finally:
            await live.close()

    authority = Authority(tmp_path)
    with LyingSource(authority.issue("peer", PEER), authority.pem, payloads.__getitem__) as source:
        source.keys.update(payloads)
        asyncio.run(test(source))
