"""A tier over a group of peers: what it remembers of answers that no peer has given (ADR 84)."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from kvdepot.core.objectfile import ObjectName, object_bytes
from kvdepot.server.io.jobs import ABSENT, Answer, StatFiles
from kvdepot.server.storage.base import IoOutcome, Read
from kvdepot.server.tiers.conformance_harness import RecordingListener, RecordingLoan, extents_of, name_of
from kvdepot.server.tiers.peer.places import Place
from kvdepot.server.tiers.shared.config import SharedConfig
from kvdepot.server.tiers.shared.tier import SharedTier

from tests.fakes.peer_group import A, B, Peers, with_peers
from tests.rigs.patience import until
from tests.rigs.shared_rig import InlineCoordinator

NAME = name_of(1)
LENGTH = object_bytes(NAME.raw_bytes)


class Node:
    """A tier whose workers are the peers."""

    def __init__(self, root: Path, peers: Peers) -> None:
        coordinator = InlineCoordinator(root)
        self.peers = peers
        self.tier = SharedTier(
            SharedConfig("peers", root, 1 << 30, negative_ttl_seconds=3600.0), data=peers.group,
            coordinator=coordinator, log=logging.getLogger("tests.g"), count=lambda *_: None,
        )  # fmt: skip
        self.listener = RecordingListener()
        self.tier.start(self.listener)
        coordinator.open()

    @property
    def handle(self) -> tuple[int, ObjectName]:
        ((handle, name),) = self.listener.found_objects
        return handle, name

    async def look_up(self) -> bool:
        """Return whether the object is found."""
        self.listener.found_objects.clear()
        answered = asyncio.Event()
        self.tier.look_up([NAME], answered.set)
        await answered.wait()
        return bool(self.listener.found_objects)

    def answer_next(self, place: Place, length: int) -> None:
        """Have a peer answer the next lookup, which asks both."""
        ((job, _, _),) = self.peers.of[place].jobs
        assert isinstance(job, StatFiles)
        self.peers.of[place].has(length)

    async def read(self) -> IoOutcome:
        handle, name = self.handle
        answers: list[Read] = []
        self.tier.read(handle, name, extents_of(name), RecordingLoan(), answers.append)
        await until(lambda: answers, "it is answered")
        return answers[0].outcome


@pytest.mark.requirement("T3")
def test_an_object_whose_owner_cannot_be_asked_is_looked_up_again_at_the_others(tmp_path: Path) -> None:
    async def test(peers: Peers) -> None:
        node = Node(tmp_path, peers)
        looking = asyncio.ensure_future(node.look_up())
        await until(lambda: peers.of[A].jobs and peers.of[B].jobs, "both are asked")
        node.answer_next(A, LENGTH)
        node.answer_next(B, ABSENT)
        assert await looking
        peers.of[A].why_unusable = "disabled: timeout"
        assert await node.read() is IoOutcome.GONE, "nobody waits for the owner"
        looking = asyncio.ensure_future(node.look_up())
        await until(lambda: peers.of[B].jobs or looking.done(), "the other one is asked")
        node.answer_next(B, LENGTH)
        assert await looking, "it has computed the object since"

    with_peers(test, A, B)


def test_an_object_that_its_owner_has_evicted_is_not_looked_up_for_a_while(tmp_path: Path) -> None:
    async def test(peers: Peers) -> None:
        node = Node(tmp_path, peers)
        looking = asyncio.ensure_future(node.look_up())
        await until(lambda: peers.of[A].jobs, "it is asked")
        node.answer_next(A, LENGTH)
        assert await looking
        reading = asyncio.ensure_future(node.read())
        await until(lambda: peers.of[A].jobs, "it is read")
        peers.of[A].answer(Answer(IoOutcome.GONE))
        assert await reading is IoOutcome.GONE
        assert not await node.look_up() and not peers.of[A].jobs

    with_peers(test, A)
