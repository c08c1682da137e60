"""Lookups that name the daemon which has the objects, between real daemons (ADR 80)."""

from __future__ import annotations

from itertools import count

import pytest
from kvdepot.core.misses import MissReason

from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import wait_until
from tests.rigs.peer_fleet import Fleet, payloads, port_of, stopped, stored
from tests.rigs.raw_client import CHUNK_TOKENS, RawEngine, keys_of, status_of

REMEMBERED = '[policy]\nnegative_ttl = "1h"\n'
"""So long a daemon does not ask again for what was absent."""


def arena_of(daemon: DaemonProcess) -> int:
    return status_of(daemon.socket).arena_id


@pytest.mark.requirement("B3")
def test_what_was_absent_a_moment_ago_is_found_at_the_named_peer(fleet: Fleet) -> None:
    source = fleet.source()
    reader = fleet.reader(port_of(source), more=REMEMBERED)
    keys = keys_of("p", 3)
    with RawEngine(reader.socket) as engine:
        assert engine.located_at(keys).miss == MissReason.PROBE_ABSENT
        stored(source, keys)
        assert engine.locate_at(keys, 0).boundary_tokens == 0
        stranger = engine.locate_at(keys, arena_of(source) ^ 1)
        assert (stranger.boundary_tokens, stranger.source_tier) == (0, "")
        own = engine.locate_at(keys, arena_of(reader))
        assert (own.boundary_tokens, own.source_tier) == (0, "")
        assert engine.counter("named_sources.unknown") == 2
        assert engine.counter("named_sources.peer") == 0
        found = engine.located_at(keys, arena_of(source))
        assert (found.boundary_tokens, found.source_tier) == (3 * CHUNK_TOKENS, "peer-0")
        assert engine.load(keys) == payloads(keys)
        assert engine.counter("named_sources.unknown") == 2
        assert engine.counter("named_sources.peer") > 0


@pytest.mark.requirement("B3")
def test_a_named_peer_is_not_kept_waiting_by_a_stopped_one(fleet: Fleet) -> None:
    source, other = fleet.source(), fleet.source()
    reader = fleet.reader(port_of(source), port_of(other), deadline="1h")
    prompts = (keys_of(f"p{number}", 40) for number in count())  # of which one question asks for the first few

    def is_found() -> bool:
        """Ask for a prompt that nobody has asked for: what is answered too late would serve the next lookup."""
        stored(source, keys := next(prompts))
        found = engine.locate_at(keys, arena_of(source))
        return (found.boundary_tokens, found.source_tier) == (40 * CHUNK_TOKENS, "peer-0")

    with RawEngine(reader.socket) as engine, stopped(other):
        wait_until(is_found, "the named one's answer is in time")


@pytest.mark.requirement("B3")
def test_what_the_named_peer_lacks_is_looked_for_at_the_others(fleet: Fleet) -> None:
    source, other = fleet.source(), fleet.source()
    reader = fleet.reader(port_of(source), port_of(other))
    keys = keys_of("p", 6)
    stored(source, keys[:3])
    stored(other, keys)
    with RawEngine(reader.socket) as engine:
        found = engine.located_at(keys, arena_of(source))
        assert (found.boundary_tokens, found.source_tier) == (6 * CHUNK_TOKENS, "peer-0")
        assert engine.load(keys) == payloads(keys)


@pytest.mark.requirement("B3")
def test_a_named_peer_that_is_stopped_is_a_miss_in_time(fleet: Fleet) -> None:
    source = fleet.source()
    reader = fleet.reader(port_of(source), deadline="60s")
    keys = keys_of("p", 3)
    stored(source, keys)
    arena = arena_of(source)
    with RawEngine(reader.socket) as engine:
        with stopped(source):
            missed = engine.locate_at(keys, arena)
        assert (missed.boundary_tokens, missed.miss) == (0, MissReason.PROBE_LATE)
        assert missed.source_tier == "peer-0"
        wait_until(lambda: engine.locate(keys) == 3 * CHUNK_TOKENS, "it is found as soon as the peer answers")


@pytest.mark.requirement("B3")
def test_a_peer_that_begins_anew_is_known_by_its_new_arena(fleet: Fleet) -> None:
    port = fleet.port()
    source = fleet.source(port=port)
    before = arena_of(source)
    reader = fleet.reader(port)
    source.close()
    later = fleet.source(port=port)
    keys = keys_of("p", 2)
    stored(later, keys)
    with RawEngine(reader.socket) as engine:
        wait_until(
            lambda: engine.locate_at(keys, arena_of(later)).source_tier == "peer-0", "the reader knows who answers"
        )
        assert arena_of(later) != before
        assert engine.locate_at(keys, before).source_tier == ""
