"""Which of the listed places are peers: by summary, then by hash, and changed rarely (ADR 84, ADR 85)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvdepot.server.tiers.peer.choice import EXCHANGE_SECONDS, GUEST_SECONDS, GUESTS_AT_ONCE, SHUNNED_SECONDS, Choice
from kvdepot.server.tiers.peer.places import Place, order_of

NODES = [(f"10.0.0.{number}", 7448) for number in range(1, 33)]


class World:
    """A choice, its clock, and who is read from."""

    def __init__(self, arena_id: int = 5, most: int = 4, places: Iterable[Place] = NODES) -> None:
        self.now = 0.0
        self.busy: set[Place] = set()
        self.choice = Choice(
            most, order=lambda place: order_of(place, arena_id), busy=self.busy.__contains__, clock=lambda: self.now
        )
        self.choice.list(places)

    @property
    def members(self) -> set[Place]:
        return set(self.choice.members)

    @property
    def others(self) -> list[Place]:
        """Those that are no members, the first one by hash first."""
        return [place for place in self.choice.listed if place not in self.members]

    def rank(self, *useful: Place) -> None:
        self.choice.rank([(place, 10 - at) for at, place in enumerate(useful)], ())

    def exchange(self, times: int = 1) -> list[bool]:
        """Try so many times, each when the time of an exchange is over."""
        waits = []
        for _ in range(times):
            waits.append(self.choice.exchange())
            self.now += EXCHANGE_SECONDS
        return waits


def test_each_daemon_takes_its_own_few_of_many_peers() -> None:
    uses = Counter(place for arena_id in range(64) for place in World(arena_id).members)
    assert uses.total() == 64 * 4
    assert len(uses) == len(NODES) and max(uses.values()) <= 20, "nobody is asked by all"
    assert World(places=NODES[:3]).members == set(NODES[:3])


def test_a_peer_that_goes_or_comes_changes_one_choice_at_most() -> None:
    for arena_id in range(16):
        world = World(arena_id)
        before = world.members
        world.choice.list([place for place in NODES if place != min(before)])
        assert world.members >= before - {min(before)} and len(world.members) == 4
        more = World(arena_id, places=[*NODES, ("10.0.1.1", 7448)])
        assert len(more.members - before) <= 1


def test_a_place_that_comes_does_not_push_out_a_peer() -> None:
    world = World(places=NODES[:8])
    before = world.members
    world.choice.list(NODES)
    assert world.members == before


def test_a_useful_place_takes_the_place_of_the_last_one_by_hash() -> None:
    world = World()
    before, useful = world.choice.members, world.others[-1]
    world.rank(useful)
    assert world.members == set(before), "to be exchanged in time"
    world.exchange()
    assert world.members == {*before[:-1], useful}
    assert world.choice.why(useful) == "by summary: 10 names" and world.choice.why(before[0]) == "by hash"
    assert world.exchange(3) == [False] * 3 and world.members == {*before[:-1], useful}


def test_one_peer_at_a_time_is_exchanged_and_the_most_useful_place_comes_first() -> None:
    world = World()
    useful = world.others[-6:]
    world.rank(*useful[:4])
    assert world.choice.exchange() and world.members & set(useful) == {useful[0]}
    world.now += EXCHANGE_SECONDS - 0.1
    assert world.choice.exchange() and world.members & set(useful) == {useful[0]}, "it waits for its time"
    world.now += 0.1
    world.exchange(4)
    assert world.members == set(useful[:4])


def test_a_useful_peer_stays_and_so_does_one_that_was_useful_and_is_replaced_by_nobody() -> None:
    world = World(most=2)
    one, other, third = world.others[:3]
    world.rank(one)
    world.exchange()
    world.rank(one, other)
    world.exchange()
    assert world.members == {one, other}
    world.rank()
    assert world.exchange(3) == [False] * 3
    assert world.members == {one, other}, "a start of workers would gain nothing"
    world.rank(third, other)
    world.exchange()
    assert world.members == {third, other}


def test_a_peer_that_is_read_from_is_not_exchanged() -> None:
    world = World()
    before, useful = world.choice.members, world.others[0]
    world.busy.update(before)
    world.rank(useful)
    assert world.exchange(3) == [True] * 3 and world.members == set(before)
    world.busy.discard(before[1])
    world.exchange()
    assert world.members == {*before, useful} - {before[1]}


def test_this_daemon_itself_has_no_seat() -> None:
    world = World()
    itself, following = world.choice.members[0], world.others[0]
    world.choice.rank([(itself, 5)], [itself])
    assert itself not in world.members and following in world.members
    assert not world.choice.exchange()


def test_a_useful_place_that_is_not_listed_any_more_is_not_chosen() -> None:
    world = World()
    gone = world.others[0]
    world.rank(gone, *world.others[1:3])
    world.choice.list([place for place in NODES if place != gone])
    world.exchange(4)
    assert gone not in world.members and len(world.members) == 4


def test_a_free_seat_is_for_a_useful_place_at_once() -> None:
    world = World()
    useful, leaves = world.others[-1], world.choice.members[0]
    world.exchange()
    world.rank(useful)
    world.choice.list([place for place in NODES if place != leaves])
    assert useful in world.members


def test_a_guest_is_one_more_member_until_it_is_known_what_it_has() -> None:
    world = World()
    before, guest = world.members, world.others[-1]
    assert world.choice.invites
    assert world.choice.invite(guest, 7)
    assert world.members == {*before, guest} and world.choice.full
    assert world.choice.why(guest) == "by lookup: 7 names"
    assert world.exchange() == [True] and world.members == {*before, guest}, "nobody leaves for a guest by chance"
    world.choice.judge(useful=False)
    assert world.members == before and world.choice.exchange() is False


def test_a_guest_that_has_something_stays_and_a_useless_peer_leaves_at_once() -> None:
    world = World()
    before, (guest, useful) = world.choice.members, world.others[:2]
    world.rank(useful)
    world.exchange()
    assert world.choice.invite(guest, 7)
    world.now += EXCHANGE_SECONDS
    world.choice.judge(useful=True)
    world.choice.exchange()
    assert world.members == {*before[:-2], useful, guest} and not world.choice.full


def test_a_guest_that_has_something_stays_for_a_while_also_if_it_is_not_ranked_yet() -> None:
    world = World(most=1)
    (before,), (first, second, third) = world.choice.members, world.others[:3]
    for guest in (first, second):
        assert world.choice.invite(guest, 7)
        world.choice.judge(useful=True)
        world.choice.exchange()
    assert world.members == {first, second} and before not in world.members
    assert not world.choice.invites and not world.choice.invite(third, 7), "there is one seat for guests"
    world.rank(second)
    assert world.choice.exchange() and world.members == {first, second}
    world.now += EXCHANGE_SECONDS
    world.busy.add(first)
    assert world.choice.exchange() and world.members == {first, second}, "it is being read from"
    world.busy.clear()
    world.choice.exchange()
    assert world.members == {second} and world.choice.invites


def test_several_lookups_may_have_the_same_guest_and_no_other_one_meanwhile() -> None:
    world = World()
    guest, other = world.others[:2]
    assert world.choice.invite(guest, 7)
    assert world.choice.invites and world.choice.invite(guest, 7) and not world.choice.invite(other, 7)
    assert world.choice.invite(world.choice.members[0], 7), "it joined while the scout was asked"
    world.choice.judge(useful=True)
    assert guest in world.members and world.choice.guest is None


def test_a_guest_that_had_nothing_is_not_invited_again_for_a_while() -> None:
    world = World()
    guest, other = world.others[:2]
    world.choice.invite(guest, 7)
    world.choice.judge(useful=False)
    assert not world.choice.invite(guest, 7) and world.choice.invite(other, 7)
    world.choice.judge(useful=False)
    world.now += SHUNNED_SECONDS
    assert world.choice.invite(guest, 7)


def test_guests_come_at_a_bounded_rate() -> None:
    world = World()
    guests = world.others
    for guest in guests[:GUESTS_AT_ONCE]:
        assert world.choice.invite(guest, 7)
        world.choice.judge(useful=False)
    for guest in guests[GUESTS_AT_ONCE : GUESTS_AT_ONCE + 3]:
        assert not world.choice.invites and not world.choice.invite(guest, 7)
        world.now += GUEST_SECONDS
        assert world.choice.invite(guest, 7)
        world.choice.judge(useful=False)


def test_who_is_not_listed_or_is_this_daemon_is_no_guest() -> None:
    world = World()
    itself, gone, guest = world.others[:3]
    world.choice.rank([], [itself])
    world.choice.list([place for place in NODES if place != gone])
    assert not world.choice.invite(itself, 7) and not world.choice.invite(gone, 7)
    assert world.choice.invite(guest, 7)
    world.choice.list([place for place in NODES if place != guest])
    assert guest not in world.members and world.choice.guest is None
    assert world.choice.invite(gone, 7), "it is back, and nobody else is a guest"
