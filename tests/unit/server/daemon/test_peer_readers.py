"""What is shown of the daemons that load from here."""

from __future__ import annotations

from kvdepot.core.report import ReaderStatus
from kvdepot.server.daemon.peer_readers import READERS_MAX, PeerReaders
from kvdepot.server.io.peer_wire import Refusal, Sent


def test_a_reader_has_what_it_is_lent_until_the_lease_ends_and_then_what_it_was_sent() -> None:
    readers = PeerReaders()
    readers.leased("URI:a", "one", 1, 4096)
    readers.leased("URI:a", "one", 2, 4096)
    readers.refused("URI:b", None, Refusal.BUSY)
    readers.refused("URI:b", None, Refusal.BUSY)
    first, second = readers.statuses()
    assert first == ReaderStatus("URI:a", "one", 2, 8192)
    assert second == ReaderStatus("URI:b", refused_objects={"busy": 2})
    readers.ended(1, Sent.WHOLE, 4096)
    readers.ended(2, Sent.CUT, 100)
    assert readers.statuses()[0] == ReaderStatus("URI:a", "one", 0, 0, 1, 4196, {"cut": 1})


def test_leases_end_with_the_process_that_sends() -> None:
    readers = PeerReaders()
    readers.leased("URI:a", None, 1, 4096)
    readers.leased("URI:b", None, 2, 4096)
    readers.ended_all()
    assert [(one.leases, one.leased_bytes, one.refused_objects) for one in readers.statuses()] == [
        (0, 0, {"cut": 1})
    ] * 2
    readers.ended_all()


def test_those_that_were_sent_most_are_shown() -> None:
    readers = PeerReaders()
    for number in range(READERS_MAX + 10):
        readers.leased(f"URI:{number}", None, number, 1)
        readers.ended(number, Sent.WHOLE, number)
    found = readers.statuses()
    assert len(found) == READERS_MAX and found[0].name == f"URI:{READERS_MAX + 9}"
