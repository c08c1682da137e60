"""Which of the listed places are peers: by summary, then by hash, and changed rarely (ADR 84, ADR 85)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvdepot.server.tiers.peer.choice import EXCHANGE_SECONDS, Choice
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
    assert world.choice.names == {useful: 10}
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
