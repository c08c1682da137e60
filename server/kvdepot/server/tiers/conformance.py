"""What every tier below RAM must do: a suite to run an implementation through, no matter who wrote it.

Inherit `TierConformance` in a test module and give it a pytest fixture `harness` that yields a `TierHarness`
(`conformance_harness`) over an empty device.

Tiers whose traits say `shared` count handles, forget where others free, and are asked where others tell.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, cast

from kvdepot.core.allocator import Extent
from kvdepot.core.objectfile import HEADER_BYTES, ObjectHeader, object_bytes, payload_sum
from kvdepot.server.storage.base import DAMAGED, IoOutcome, Read, SharedTier
from kvdepot.server.tiers.conformance_harness import (
    DAMAGES,
    PAGE_BYTES,
    RecordingLoan,
    TierHarness,
    extents_of,
    fill,
    looked_up,
    name_of,
    path_of,
    payload_of,
    read,
    verified,
    written,
)

_FILL_MAX: Final = 100_000


class TierConformance:
    """The suite. Every test gets a fresh device."""

    # Round trips

    def test_what_was_written_is_read_back(self, harness: TierHarness) -> None:
        name = name_of(1)
        handle = written(harness, name).handle
        assert read(harness, handle, name) == (IoOutcome.OK, payload_of(name))

    def test_extents_may_be_several_and_in_any_order(self, harness: TierHarness) -> None:
        name = name_of(1, pages=3)
        pieces: list[Extent] = [(8 * PAGE_BYTES, PAGE_BYTES), (0, PAGE_BYTES), (4 * PAGE_BYTES, PAGE_BYTES)]
        handle = written(harness, name, pieces).handle
        whole: list[Extent] = [(16 * PAGE_BYTES, 2 * PAGE_BYTES), (2 * PAGE_BYTES, PAGE_BYTES)]
        assert read(harness, handle, name, whole) == (IoOutcome.OK, payload_of(name))

    def test_lengths_need_be_no_whole_pages(self, harness: TierHarness) -> None:
        name = replace(name_of(1), raw_bytes=2 * PAGE_BYTES + 777)
        handle = written(harness, name).handle
        assert read(harness, handle, name) == (IoOutcome.OK, payload_of(name))

    def test_both_answers_say_the_sum_of_the_payload(self, harness: TierHarness) -> None:
        name = name_of(1)
        total = payload_sum([payload_of(name)])
        answer = written(harness, name)
        assert answer.raw_sum == total
        answers: list[Read] = []
        harness.tier.read(answer.handle, name, extents_of(name), RecordingLoan(), answers.append)
        harness.settle()
        assert [one.raw_sum for one in answers] == [total]

    def test_what_lies_on_the_medium_is_the_object_format(self, harness: TierHarness) -> None:
        name = name_of(1)
        data = harness.peek(written(harness, name).handle)
        header = ObjectHeader.unpack(data[:HEADER_BYTES])
        header.check(name)
        assert header.stored_sum == payload_sum([data[HEADER_BYTES : HEADER_BYTES + header.stored_bytes]])
        assert header.raw_sum == payload_sum([payload_of(name)])

    def test_many_objects_keep_apart(self, harness: TierHarness) -> None:
        names = [name_of(number, pages=1 + number % 3) for number in range(20)]
        handles = [written(harness, name).handle for name in names]
        assert len(set(handles)) == len(names) and max(handles) < harness.tier.handles_max
        for handle, name in zip(handles, names, strict=True):
            assert read(harness, handle, name) == (IoOutcome.OK, payload_of(name))

    # I1: never wrong bytes

    def test_every_damage_is_told_apart_quarantined_and_ends_the_object(self, harness: TierHarness) -> None:
        other = written(harness, name_of(99)).handle
        for number, (expected, damage) in enumerate(DAMAGES.items()):
            name = name_of(number)
            handle = written(harness, name).handle
            used_bytes = harness.tier.used_bytes
            harness.poke(handle, damage(harness.peek(handle), harness.peek(other)))
            loan = RecordingLoan()
            outcome, _ = read(harness, handle, name, loan=loan)
            assert outcome in expected, f"{outcome}, expected one of {sorted(expected)}"
            assert outcome in DAMAGED
            assert not loan.held
            assert harness.tier.used_bytes < used_bytes, "a dead object takes no room"
            assert handle not in harness.listener.lost_handles, "the answer has said it"
        assert read(harness, other, name_of(99))[0] is IoOutcome.OK

    def test_verification_finds_every_damage_before_a_load_does(self, harness: TierHarness) -> None:
        other = written(harness, name_of(99)).handle
        assert verified(harness, other) is IoOutcome.OK
        for number, (expected, damage) in enumerate(DAMAGES.items()):
            handle = written(harness, name_of(number)).handle
            used_bytes = harness.tier.used_bytes
            harness.poke(handle, damage(harness.peek(handle), harness.peek(other)))
            assert verified(harness, handle) in expected
            assert harness.listener.lost_handles[-1] == handle, "who has asked is not the engine"
            assert harness.tier.used_bytes < used_bytes
            assert verified(harness, handle) is IoOutcome.CANCELLED
        assert read(harness, other, name_of(99))[0] is IoOutcome.OK
        assert other not in harness.listener.lost_handles

    def test_a_sum_that_does_not_hold_in_ram_stores_nothing(self, harness: TierHarness) -> None:
        name, used_bytes = name_of(1), harness.tier.used_bytes
        answer = written(harness, name, raw_sum=1)
        harness.settle()
        assert answer.outcome is IoOutcome.CORRUPT
        assert harness.tier.used_bytes == used_bytes
        assert written(harness, name, raw_sum=payload_sum([payload_of(name)])).outcome is IoOutcome.OK

    def test_a_read_for_another_name_is_refused(self, harness: TierHarness) -> None:
        name = name_of(1)
        handle = written(harness, name).handle
        asked = replace(name, namespace=b"another-namespac")
        assert read(harness, handle, asked)[0] is IoOutcome.IDENTITY

    # I6: a buffer outlives its I/O

    def test_a_refused_loan_touches_nothing_and_is_cancelled(self, harness: TierHarness) -> None:
        name = name_of(1)
        assert written(harness, name, loan=RecordingLoan(refuses=True)).outcome is IoOutcome.CANCELLED
        handle = written(harness, name).handle
        outcome, seen = read(harness, handle, name, loan=RecordingLoan(refuses=True))
        assert (outcome, seen) == (IoOutcome.CANCELLED, bytes(name.raw_bytes))
        assert read(harness, handle, name)[0] is IoOutcome.OK, "the object is none the worse"

    def test_loans_end_before_the_answer_and_once(self, harness: TierHarness) -> None:
        name, loan, held = name_of(1), RecordingLoan(), []
        fill(harness, name)
        harness.tier.write(name, extents_of(name), loan, None, lambda _: held.append(loan.held))
        harness.settle()
        assert (held, loan.begun, loan.ended) == ([False], 1, 1)

    # I4: bounded

    def test_a_full_tier_says_so_and_a_drop_makes_room(self, harness: TierHarness) -> None:
        tier, names, handles = harness.tier, [], []
        for number in range(_FILL_MAX):
            name = name_of(number, pages=32)
            answer = written(harness, name)
            if answer.outcome is not IoOutcome.OK:
                break
            names.append(name)
            handles.append(answer.handle)
            assert tier.used_bytes <= tier.capacity_bytes
        assert answer.outcome is IoOutcome.NO_SPACE and len(handles) > 2
        before = tier.used_bytes
        tier.drop(handles[1])
        assert tier.used_bytes <= before - (1 if tier.traits.shared else 32 * PAGE_BYTES)
        harness.settle()
        assert written(harness, name_of(_FILL_MAX, pages=32)).outcome is IoOutcome.OK
        assert read(harness, handles[0], names[0]) == (IoOutcome.OK, payload_of(names[0]))

    def test_an_object_costs_at_most_what_is_said(self, harness: TierHarness) -> None:
        for pages in (1, 2, 7):
            name, before = name_of(pages, pages=pages), harness.tier.used_bytes
            written(harness, name)
            taken = harness.tier.used_bytes - before
            if harness.tier.traits.shared:
                assert taken == harness.tier.cost_bytes(name.raw_bytes) == 1
                continue
            assert name.raw_bytes < taken <= harness.tier.cost_bytes(name.raw_bytes) >= object_bytes(name.raw_bytes)

    def test_a_dropped_object_that_is_being_read_is_still_answered(self, harness: TierHarness) -> None:
        name = name_of(1)
        handle = written(harness, name).handle
        answers: list[Read] = []
        harness.tier.read(handle, name, extents_of(name), RecordingLoan(), answers.append)
        harness.tier.drop(handle)
        again = written(harness, name_of(2))
        assert again.outcome is IoOutcome.OK
        assert [one.outcome for one in answers] in ([IoOutcome.OK], [IoOutcome.CANCELLED])

    # I8: restart freely

    def test_everything_answered_is_found_after_a_restart_parents_first(self, harness: TierHarness) -> None:
        for crash in (False, True):
            names = path_of(6, start=10 * crash)
            for name in names:
                written(harness, name)
            harness.reopen(crash=crash)
            if harness.tier.traits.shared:
                looked_up(harness, names)
            order = [name for _, name in harness.listener.found_objects]
            assert [name for name in order if name in names] == names
            for handle, name in harness.listener.found_objects:
                assert read(harness, handle, name) == (IoOutcome.OK, payload_of(name))

    def test_what_was_dropped_is_not_found_again(self, harness: TierHarness) -> None:
        names = path_of(3)
        handles = [written(harness, name).handle for name in names]
        harness.tier.drop(handles[2])
        harness.settle()
        harness.reopen(crash=True)
        assert [name for _, name in harness.listener.found_objects] == ([] if harness.tier.traits.shared else names[:2])

    def test_room_is_the_same_after_a_restart(self, harness: TierHarness) -> None:
        for name in path_of(4):
            written(harness, name)
        used_bytes = harness.tier.used_bytes
        harness.reopen(crash=False)
        if harness.tier.traits.shared:
            looked_up(harness, path_of(4))
        assert harness.tier.used_bytes == used_bytes
        assert written(harness, name_of(77)).outcome is IoOutcome.OK

    def test_status_tells_what_it_holds(self, harness: TierHarness) -> None:
        written(harness, name_of(1))
        status = harness.tier.status()
        assert (status.name, status.state) == (harness.tier.name, "ready")
        if not harness.tier.traits.shared:  # else it is about all that lies there, no matter who put it there
            assert 0 < status.used_bytes == harness.tier.used_bytes <= status.capacity_bytes

    # Tiers that others have too

    def test_a_look_up_finds_what_is_there_parents_first_and_ends_once(self, harness: TierHarness) -> None:
        if not harness.tier.traits.shared:
            return
        names = path_of(300)
        for name in names[:150]:
            harness.tier.drop(written(harness, name).handle)
        looked_up(harness, names)
        assert [name for _, name in harness.listener.found_objects] == names[:150]
        for handle, name in harness.listener.found_objects[::50]:
            assert read(harness, handle, name) == (IoOutcome.OK, payload_of(name))

    def test_what_was_dropped_is_forgotten_here_and_lies_there(self, harness: TierHarness) -> None:
        if not harness.tier.traits.shared:
            return
        (name,) = path_of(1)
        for _ in range(3):
            harness.tier.drop(written(harness, name).handle)
            assert harness.tier.used_bytes == 0
        looked_up(harness, [name])
        assert len(harness.listener.found_objects) == 1

    def test_verification_finds_what_others_took_away(self, harness: TierHarness) -> None:
        if not harness.tier.traits.shared:
            return
        handle = written(harness, name_of(1)).handle
        harness.take_away(handle)
        assert verified(harness, handle) is IoOutcome.GONE
        assert harness.tier.used_bytes == 0 and harness.listener.lost_handles == [handle]

    def test_an_object_that_others_took_away_is_gone_and_nothing_else(self, harness: TierHarness) -> None:
        if not harness.tier.traits.shared:
            return
        first, second = path_of(2)
        handles = [written(harness, name).handle for name in (first, second)]
        harness.take_away(handles[1])
        assert read(harness, handles[1], second)[0] is IoOutcome.GONE
        assert harness.tier.used_bytes == 1 and handles[1] not in harness.listener.lost_handles
        assert read(harness, handles[0], first) == (IoOutcome.OK, payload_of(first))
        assert harness.tier.status().state == "ready"

    def test_who_asks_with_another_parent_misses_and_the_object_stays(self, harness: TierHarness) -> None:
        if not harness.tier.traits.shared:
            return
        name = name_of(1)
        harness.tier.drop(written(harness, name).handle)
        wrong = replace(name, parent=name_of(2).key)
        looked_up(harness, [wrong])
        ((handle, _),) = harness.listener.found_objects
        assert read(harness, handle, wrong)[0] is IoOutcome.FOREIGN
        assert harness.tier.used_bytes == 0 and handle not in harness.listener.lost_handles
        assert written(harness, wrong).outcome is IoOutcome.FOREIGN
        assert harness.tier.used_bytes == 0
        looked_up(harness, [name])
        handle, _ = harness.listener.found_objects[-1]
        assert read(harness, handle, name) == (IoOutcome.OK, payload_of(name))

    def test_doubtful_bytes_are_refused_before_they_are_moved_aside(self, harness: TierHarness) -> None:
        if not harness.tier.traits.shared:
            return
        name = name_of(1)
        stored = written(harness, name)
        cast("SharedTier", harness.tier).quarantine(name, (stored.raw_sum,))
        assert read(harness, stored.handle, name)[0] in DAMAGED | {IoOutcome.GONE}
        harness.settle()
        stored = written(harness, name)
        assert read(harness, stored.handle, name) == (IoOutcome.OK, payload_of(name)), "nobody doubts these"
