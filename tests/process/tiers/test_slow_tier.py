"""A real daemon over a disk of 20 MB/s: what is offered is read sooner than computed (llm-d-router#2833)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle

import pytest
from kvdepot.core.calls import LocateCall, LocateReply
from kvdepot.core.report import TierStatus
from kvdepot.proto.methods import decode_reply
from kvdepot.server.depot.loads.offers import WORTH_SHARE

from tests.fakes.fuse_directory import FuseDirectory, why_no_fuse
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.known_objects import Known, KnownEngine, dense
from tests.rigs.patience import patient, wait_until
from tests.rigs.raw_client import CHUNK_TOKENS

pytestmark = pytest.mark.skipif(bool(why_no_fuse()), reason=why_no_fuse())
WAIT_SECONDS = 60.0
OBJECT_BYTES = 512 << 10
CHUNKS = 6
BYTES_PER_SECOND = 20e6
CONFIG = f"""
[[tier]]
name = "slow"
kind = "disk"
path = "{{path}}"
capacity = "256MiB"
write = "commit"
io_workers = 1
deadline = "60s"
[[quota]]
tier = "ram"
capacity = "{CHUNKS * OBJECT_BYTES}B"
[policy]
prefetch_share = 0
[scrub]
rate = "0"
quarantine_capacity = "32MiB"
"""


@dataclass
class Slow:
    """An engine whose prompts lie on the tier, and one of them in RAM too: there is no room for two."""

    engine: KnownEngine
    _others: Iterator[int] = field(default_factory=lambda: cycle((3, 4)))

    def tier(self) -> TierStatus:
        return self.engine.status().tiers[1]

    def load(self, number: int) -> None:
        wait_until(lambda: self.engine.get_prompt(number) > 0, "it is read", WAIT_SECONDS)

    def ask(self, bytes_per_second: float = 0.0) -> LocateReply:
        """For the first prompt, by an engine that computes so many bytes of KV a second; 0: it does not say.

        Another one is loaded before, so that the tier was measured just now and RAM has nothing of this one.
        """
        self.load(next(self._others))
        keys = [known.key for known in self.engine.prompt(0, CHUNKS)]
        token_seconds = OBJECT_BYTES / CHUNK_TOKENS / bytes_per_second if bytes_per_second else 0.0
        call = self.engine.locate_call(keys, token_seconds=token_seconds)
        reply: LocateReply = decode_reply(LocateCall, self.engine.stub.Locate(call, timeout=patient(WAIT_SECONDS)))
        return reply


@pytest.fixture(scope="module")
def slow() -> Iterator[Slow]:
    with (
        FuseDirectory() as mount,
        DaemonProcess(ram="512MiB", config=CONFIG.format(path=mount.path / "store")) as daemon,
        KnownEngine(daemon.socket, dense(OBJECT_BYTES)) as engine,
    ):
        slow = Slow(engine)
        wait_until(lambda: slow.tier().state == "ready", "the tier is open", WAIT_SECONDS)
        written = set[Known]()
        for number in (0, 3, 4):
            written.update(engine.prompt(number, CHUNKS))
            engine.put_until(engine.prompt(number, CHUNKS), lambda: slow.tier().objects == len(written), WAIT_SECONDS)
        mount.fault(bytes_per_second=BYTES_PER_SECOND)
        for number in (0, 3, 4):
            slow.load(number)
        yield slow


@pytest.mark.requirement("I2")
def test_an_engine_that_computes_faster_than_the_tier_reads_is_offered_nothing_of_it(slow: Slow) -> None:
    counted = slow.engine.counter("misses.not_worth_it")
    reply = slow.ask(10 * BYTES_PER_SECOND)
    assert (reply.boundary_tokens, reply.miss) == (0, "not_worth_it")
    assert slow.engine.counter("misses.not_worth_it") == counted + 1


@pytest.mark.requirement("I2")
@pytest.mark.parametrize("megabytes_per_second", [0.5, 2.0, 8.0, 15.0, 18.0, 25.0])
def test_what_is_offered_takes_a_part_of_the_time_of_computing_it(slow: Slow, megabytes_per_second: float) -> None:
    """However slow the machine makes the tier besides."""
    reply = slow.ask(megabytes_per_second * 1e6)
    computed_seconds = reply.boundary_tokens / CHUNK_TOKENS * OBJECT_BYTES / (megabytes_per_second * 1e6)
    if reply.boundary_tokens:
        assert reply.tier == "slow"
        assert 0 < reply.estimate_seconds <= WORTH_SHARE * computed_seconds
    else:
        assert reply.miss == "not_worth_it"


@pytest.mark.requirement("I2")
def test_an_engine_that_computes_much_slower_is_offered_all_that_there_is(slow: Slow) -> None:
    reply, whole = slow.ask(BYTES_PER_SECOND / 1000), slow.ask()
    assert (reply.boundary_tokens, reply.tier) == (whole.boundary_tokens, "slow")
    assert whole.boundary_tokens > 0
