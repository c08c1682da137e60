"""Two nodes' daemons on one directory, the second one's behind a FUSE mount that can be slow or hang."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from kvdepot.core.objectfile import HEADER_BYTES
from kvdepot.core.report import DaemonStatus

from demo.engine import ROOT, Engine
from demo.toys import DENSE, HYBRID
from tests.e2e.fleet import Fleet, Loaded
from tests.e2e.hybrid import LENGTHS, digests_by_place, wrong
from tests.fakes.fuse_directory import FuseDirectory, why_no_fuse

CHUNKS = {"hybrid": 384, "dense": 256}
TOYS = {"hybrid": HYBRID, "dense": DENSE}
LOAD_TIMEOUT_SECONDS = 15.0
LOOKUP_TIMEOUT_SECONDS = 5.0
"""The second node's mount is a Python process beside all others."""
DEADLINE_SECONDS = 5.0
WRITTEN_SECONDS = 60.0
TIER = """
[policy]
negative_ttl = "100ms"
[breaker]
failures = 2
probe_every = "500ms"
[[tier]]
name = "nfs"
kind = "shared"
path = "{path}"
capacity = "2GiB"
write = "commit"
deadline = "5s"
on_root_filesystem = true
"""

pytestmark = [pytest.mark.skipif(bool(why_no_fuse()), reason=why_no_fuse()), pytest.mark.long]


Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Reference:
    """A prompt's tokens: computed at once, and after a hit in the engine's own cache. A hybrid's rounding differs."""

    cold: Tokens
    hit: Tokens


@dataclass
class Node:
    """An engine and its daemon."""

    fleet: Fleet
    model: str

    @property
    def engine(self) -> Engine:
        return self.fleet.engine(self.model)

    def boundary(self, ids: list[int]) -> int:
        return (len(ids) - 1) // CHUNKS[self.model] * CHUNKS[self.model]

    def store(self, prompts: list[list[int]]) -> list[Reference]:
        """Compute prompts until all of them lies in the directory."""
        engine = self.engine
        cold = [engine.ask(ids).tokens for ids in prompts]
        hit = [engine.ask(ids).tokens for ids in prompts]
        self.fleet.forget(engine)
        self.fleet.daemon.wait(published, WRITTEN_SECONDS, "done publishing")
        return list(map(Reference, cold, hit))

    def ask(self, ids: list[int]) -> Loaded:
        return self.fleet.ask(self.engine, ids)


def published(status: DaemonStatus) -> bool:
    """Everything that RAM has is in the directory too."""
    return status.tiers[1].objects >= status.tiers[0].objects and not status.tiers[1].queued_objects


def serves(status: DaemonStatus) -> bool:
    return status.tiers[1].state == "ready" and status.tiers[1].breaker == "closed"


@dataclass
class Nodes:
    first: Node
    second: Node
    mount: FuseDirectory  # of the second; what lies behind it is the first one's path


@pytest.fixture(scope="module", params=["hybrid", "dense"])
def nodes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with FuseDirectory() as mount:
        names = [(f"{request.param}-first", mount.backing), (f"{request.param}-second", mount.path)]
        fleets = []
        for name, path in names:
            fleet = Fleet(tmp_path_factory.mktemp(name), ROOT / "build" / "toys", TIER.format(path=path))
            fleet.define(
                request.param, TOYS[request.param], {},
                load_timeout_seconds=LOAD_TIMEOUT_SECONDS, lookup_timeout_seconds=LOOKUP_TIMEOUT_SECONDS,
                lookup_min_seconds=LOOKUP_TIMEOUT_SECONDS,
            )  # fmt: skip
            fleets.append(fleet)
        with fleets[0], fleets[1]:
            for fleet in fleets:
                fleet.ensure_daemon()
                fleet.launch([request.param])
            try:
                yield Nodes(Node(fleets[0], request.param), Node(fleets[1], request.param), mount)
            finally:
                mount.go_on()


@pytest.fixture
def whole(nodes: Nodes) -> Nodes:
    """Both daemons run and read and write the directory."""
    for node in (nodes.first, nodes.second):
        node.fleet.ensure_daemon().wait(serves, WRITTEN_SECONDS, "on the shared directory")
    return nodes


def objects(mount: FuseDirectory) -> set[Path]:
    return set(mount.backing.glob("*/*/*.kvd"))


@pytest.mark.requirement("P4", "T3")
def test_ten_of_ten_across_two_daemons_that_share_a_directory(whole: Nodes) -> None:
    first, second = whole.first, whole.second
    prompts = [first.fleet.prompt(tokens) for tokens in LENGTHS]
    since = [(node.fleet, node.fleet.audited(node.model)) for node in (first, second)]
    for source, target, some in ((first, second, prompts[:5]), (second, first, prompts[5:])):
        reference = source.store(some)
        loaded = [target.ask(ids) for ids in some]
        expected = [target.boundary(ids) for ids in some]
        assert [one.external_tokens for one in loaded] == expected, target.fleet.told()
        assert [one.served.tokens for one in loaded] == [target.boundary(ids) for ids in some]
        assert [one.tokens for one in loaded] == [one.hit for one in reference]
    ids = [node.fleet.daemon.status().namespaces[0].namespace_id for node in (first, second)]
    assert ids[0] == ids[1]
    for node in (first, second):
        node.fleet.forget(node.engine)
    digests = digests_by_place([line for fleet, mark in since for line in fleet.audit(first.model, mark)])
    assert any(found["loaded"] for found in digests.values())
    assert wrong(digests) == {}


@pytest.mark.requirement("P6")
def test_files_that_went_bad_are_misses_and_are_quarantined(whole: Nodes) -> None:
    first, second = whole.first, whole.second
    damages = ("flipped", "cut off", "empty", "gone")
    before = objects(whole.mount)
    prompts = [first.fleet.prompt(2 * CHUNKS[first.model] + 40) for _ in damages]
    references = []
    for ids, how in zip(prompts, damages, strict=True):
        references += first.store([ids])
        files = objects(whole.mount) - before
        assert files
        for file in files:  # all of the prompt: whichever is read first is the miss
            damage(file, how)
        before |= files
    for ids, reference in zip(prompts, references, strict=True):
        asked = second.ask(ids)
        assert asked.tokens == reference.cold
        assert (asked.external_tokens, asked.served.bytes) == (0, 0)
    counters = second.fleet.daemon.status().counters
    reasons = {name.rpartition("/")[2] for name in counters if name.startswith("tier_damaged_objects.nfs/")}
    assert reasons == {"corrupt", "too_short"}
    assert list((whole.mount.backing / ".quarantine").iterdir())


def damage(file: Path, how: str) -> None:
    size = file.stat().st_size
    if how == "gone":
        file.unlink()
    elif how == "flipped":
        with file.open("r+b") as opened:
            opened.seek(HEADER_BYTES + (size - HEADER_BYTES) // 3)
            byte = opened.read(1)[0]
            opened.seek(-1, os.SEEK_CUR)
            opened.write(bytes([byte ^ 0x10]))
    else:
        os.truncate(file, size - 4096 if how == "cut off" else 0)


@pytest.mark.requirement("P5", "T4")
def test_a_mount_that_hangs_in_a_load_ends_it_by_its_deadline_and_comes_back(whole: Nodes) -> None:
    first, second, mount = whole.first, whole.second, whole.mount
    chunk = CHUNKS[first.model]
    known, ids, later = (first.fleet.prompt(3 * chunk + 40) for _ in range(3))
    tokens = first.store([known, ids, later])
    engine = second.engine
    # From here on in the second one's RAM, too.
    assert second.ask(known).external_tokens == 3 * chunk, second.fleet.told(1)
    second.fleet.forget(engine)
    cold_seconds = first.engine.ask(first.fleet.prompt(3 * chunk + 40)).completion.seconds
    daemon = second.fleet.daemon
    located = daemon.status().counters["locate_hits"]
    mount.fault(read=0, seconds=1.0)  # late enough to be met in the middle
    try:
        began = time.monotonic()
        begun = engine.begin([ids], 16)
        daemon.wait(lambda status: status.counters["locate_hits"] > located, 60, "asked for what the other has")
        mount.hang()
        (done,) = engine.finish(begun)
        seconds = time.monotonic() - began
        assert (done.error, done.tokens) == ("", tokens[1].cold)
        assert seconds < LOAD_TIMEOUT_SECONDS + 1.0 + cold_seconds
        daemon.wait(lambda status: status.tiers[1].breaker != "closed", 10 * DEADLINE_SECONDS, "out of use")
        # Until the mount answers, what a worker of it was lent stays lent: the daemon does not become idle.
        engine.reset_prefix_cache()
        again = second.fleet.ask(engine, known)
        assert (again.external_tokens, again.tokens) == (3 * chunk, tokens[0].hit)  # RAM does not notice
        computed = second.fleet.ask(engine, later)
        assert (computed.external_tokens, computed.tokens) == (0, tokens[2].cold)
        assert daemon.stop() == 0
        daemon.start()
        daemon.wait_attached(1)
        daemon.wait(lambda status: not status.tiers[0].unverified_objects, 60, "done verifying its arena")
        engine.reset_prefix_cache()
        adopted = second.fleet.ask(engine, known)
        assert (adopted.external_tokens, adopted.tokens) == (3 * chunk, tokens[0].hit)
        daemon.kill()
        daemon.start()
        daemon.wait_attached(1)
    finally:
        mount.fault()
        mount.go_on()
    daemon.wait(serves, WRITTEN_SECONDS, "back on the mount")
    fresh = first.fleet.prompt(2 * chunk + 40)
    (reference,) = first.store([fresh])
    back = second.ask(fresh)
    assert (back.external_tokens, back.tokens) == (2 * chunk, reference.hit), second.fleet.told(1)
