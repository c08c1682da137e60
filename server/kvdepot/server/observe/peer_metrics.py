"""The metrics of peers: a part of the table of `metric_families`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from kvdepot.core.report import PeerStatus, ReaderStatus
from kvdepot.server.io.peer_wire import UNCONNECTED, Lane, Refusal, Sent
from kvdepot.server.io.scout_wire import Asked
from kvdepot.server.observe.metric_family import PEER, Family, counter, tier_counter
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.tiers.peer.choice import Guest

_OUTCOMES: Final = tuple(one for one in IoOutcome if one is not IoOutcome.OK)
_REASONS: Final = (Sent.CUT, Sent.LATE, *(one for one in Refusal if one is not Refusal.NOT_ALLOWED))


def _peer(
    type_: Literal["counter", "gauge"], name: str, text: str, value: Callable[[PeerStatus], float]
) -> Family:  # fmt: skip
    """Return a family of the peers that a tier has now. A counter begins again when its peer is found again."""
    return Family(
        f"peer_{name}", type_, text, ("tier", "peer"),
        samples=lambda scrape: [
            ((tier.name, one.address), value(one)) for tier in scrape.status.tiers for one in tier.peers
        ],
    )  # fmt: skip


def _reader(
    type_: Literal["counter", "gauge"], name: str, text: str, value: Callable[[ReaderStatus], float]
) -> Family:  # fmt: skip
    """Return a family of the daemons that load from this one, by a name of their certificate."""
    return Family(
        f"reader_{name}", type_, text, ("reader",),
        samples=lambda scrape: [((one.name,), value(one)) for one in scrape.status.readers],
    )  # fmt: skip


PEERS: Final = (
    counter(
        "peer_located_objects",
        "Objects that peers asked for, by outcome. Pending ones cannot be lent yet.",
        "outcome",
        ("found", "absent", "pending"),
    ),
    counter(
        "peer_pulls",
        "Objects that peers asked to be sent, or to borrow, by outcome.",
        "outcome",
        (*Sent, *Refusal),
    ),
    counter(
        "peer_disk_reads",
        "Objects that were read from a disk for a peer, by outcome.",
        "outcome",
        ("read", Refusal.BUSY, Refusal.GONE),
    ),
    counter("peer_sent_bytes", "Bytes of objects that were sent to peers, by what they went over.", "lane", Lane),
    counter(
        "peer_given_summaries",
        "Summaries that peers asked for, by outcome: whether names were gathered for this one.",
        "outcome",
        ("new", "kept"),
    ),
    tier_counter(
        "peer_loaded_bytes",
        "Bytes of objects that were loaded from peers and verified, by what they came over.",
        "lane",
        Lane,
        kinds=(PEER,),
    ),
    tier_counter(
        "peer_summaries",
        "Questions to peers of a long list for a summary of what they have, by outcome.",
        "outcome",
        Asked,
        kinds=(PEER,),
    ),
    tier_counter(
        "peer_guests",
        "Peers that joined for a lookup, by whether they had some of its objects, or a request named them.",
        "outcome",
        Guest,
        kinds=(PEER,),
    ),
    counter(
        "peer_refused_connections",
        "Refusals of peers, by reason. no_answer: the daemon did not answer a question within 10 s.",
        "reason",
        (*UNCONNECTED, "not_allowed"),
    ),
    counter(
        "peer_servers",
        "Processes that send to peers, by what happened to them. killed: by the daemon, while it serves.",
        "event",
        ("started", "crashed", "killed"),
    ),
    counter(
        "peer_lenders",
        "Processes that lend RAM to peers over NIXL, by what happened to them.",
        "event",
        ("started", "crashed"),
    ),
    _peer(
        "gauge",
        "usable",
        "1 while the peer can be asked, or is this daemon itself.",
        lambda one: one.state != "disabled",
    ),
    _peer("gauge", "reading_objects", "Objects that are being loaded from the peer.", lambda one: one.reading_objects),
    _peer("counter", "lookups", "Lookups that the peer has answered.", lambda one: one.lookups),
    _peer("counter", "lookup_seconds", "Seconds that these took, in total.", lambda one: one.lookup_seconds),
    _peer("counter", "loads", "Objects that were loaded from the peer and verified.", lambda one: one.loaded_objects),
    _peer("counter", "load_bytes", "Bytes of these objects.", lambda one: one.loaded_bytes),
    _peer("counter", "load_seconds", "Seconds that these loads took, in total.", lambda one: one.load_seconds),
    Family(
        "peer_failed_loads",
        "counter",
        "Loads from the peer without a result, by outcome.",
        ("tier", "peer", "outcome"),
        _OUTCOMES,
        samples=lambda scrape: [
            ((tier.name, one.address, outcome), one.failed_objects.get(outcome, 0))
            for tier in scrape.status.tiers
            for one in tier.peers
            for outcome in _OUTCOMES
        ],
    ),
    _reader("gauge", "leases", "Objects that this reader may read now.", lambda one: one.leases),
    _reader("gauge", "leased_bytes", "Bytes of these objects.", lambda one: one.leased_bytes),
    _reader(
        "counter",
        "sent_objects",
        "Objects that the reader was sent whole, or has borrowed.",
        lambda one: one.sent_objects,
    ),
    _reader("counter", "sent_bytes", "Bytes of objects that the reader was sent.", lambda one: one.sent_bytes),
    Family(
        "reader_refused_objects",
        "counter",
        "Objects that the reader was not sent, or not whole, by reason.",
        ("reader", "reason"),
        _REASONS,
        samples=lambda scrape: [
            ((one.name, reason), one.refused_objects.get(reason, 0))
            for one in scrape.status.readers
            for reason in _REASONS
        ],
    ),
)
