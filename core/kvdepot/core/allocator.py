"""The extent allocator: which bytes of a region are free, for RAM and disk alike.

Algorithm: segregated best fit with immediate coalescing. Free runs are kept in
granules, in three dictionaries: by first granule, by end granule (the boundary
tags of Knuth, TAOCP 1, 2.5, but next to the region, not in it) and by size; the
sizes that occur are also in one sorted list. Live extents cost nothing here:
their holder (the arena's extent table) returns offset and length.

Cost: O(log d) comparisons and a memmove of d words, d being the number of distinct
sizes of free runs. d sizes need d * (d + 1) / 2 granules, so d < 5,800 in 64 GiB and
< 33,000 in 2 TiB: the list never gets long enough to deserve a tree.

Nothing is refused while bytes are free: a size that no single run holds is cut over
the fewest runs that do, largest first. There is no limit on the fragments, because
the only cure apart from refusing, moving live extents, is not open to a daemon that
never touches payload and whose readers hold addresses. It needs none: eviction keeps
free bytes between the watermarks, and there best fit hardly ever fragments. Measured
over 200,000 allocations of six sizes from 68 KiB to 4 MiB in 4 GiB, extents an object:
1.00 at 90 to 95 % full (evicting in LRU order or at random), 1.02 in LRU order at
100 % full; only random eviction at 100 % full grows (14, at most 300), and none is
ever refused. Address order within one size changed none of these figures and costs
time, so the run freed last is reused first, which is also the one still in caches.

The waste is what rounding to granules takes: less than 5 % for objects of 80 KiB and
more; nothing for those that are multiples of a granule.
"""

from __future__ import annotations

from bisect import bisect_left

GRANULE_BYTES = 4096

Extent = tuple[int, int]
"""(offset, length) in bytes."""


class ExtentError(ValueError):
    """A range was returned or claimed that the allocator does not have as used, or free, respectively.

    The caller's book-keeping (or an adopted extent table) is wrong. The allocator has changed nothing.
    """


class ExtentAllocator:
    """Free space of `[start_bytes, start_bytes + length_bytes)`, of which nothing is usable before `grow`.

    Offsets have the same origin as `start_bytes` (the start of the arena, of a segment
    file). Not thread-safe: one owner.
    """

    def __init__(self, start_bytes: int, length_bytes: int, granule_bytes: int = GRANULE_BYTES) -> None:
        if granule_bytes <= 0 or start_bytes < 0 or start_bytes % granule_bytes or length_bytes < 0:
            raise ValueError(f"start {start_bytes} must be a multiple of the granule of {granule_bytes} bytes")
        self.granule_bytes = granule_bytes
        self._first = start_bytes // granule_bytes
        self._limit = self._first + length_bytes // granule_bytes
        self._ready = self._first  # granules below it are usable
        self._free = 0
        self._length_at: dict[int, int] = {}  # first granule of a free run -> its length
        self._start_of: dict[int, int] = {}  # granule after a free run -> its first granule
        self._starts_by_length: dict[int, dict[int, None]] = {}  # a dict is a set that pops the newest
        self._lengths: list[int] = []  # keys of the above, sorted
        self._claimed_to = self._first  # where the last claim ended: the next one usually follows

    @property
    def free_bytes(self) -> int:
        """Return the bytes that `allocate` can hand out now."""
        return self._free * self.granule_bytes

    @property
    def used_bytes(self) -> int:
        """Return the bytes handed out, rounded to granules."""
        return (self._ready - self._first - self._free) * self.granule_bytes

    @property
    def ready_bytes(self) -> int:
        """Return the bytes made usable by `grow` so far, free or used."""
        return (self._ready - self._first) * self.granule_bytes

    @property
    def free_runs(self) -> int:
        """Return the number of free runs. No two of them touch."""
        return len(self._length_at)

    @property
    def largest_free_bytes(self) -> int:
        """Return the bytes that one extent can have at most now."""
        return self._lengths[-1] * self.granule_bytes if self._lengths else 0

    def rounded(self, size_bytes: int) -> int:
        """Return the bytes of `free_bytes` that an object of `size_bytes` takes."""
        return -(-size_bytes // self.granule_bytes) * self.granule_bytes

    def grow(self, upto_bytes: int) -> None:
        """Make everything below the offset `upto_bytes` usable. Beyond the region, or backwards: no effect."""
        upto = min(upto_bytes // self.granule_bytes, self._limit)
        if upto > self._ready:
            start, self._ready = self._ready, upto
            self._add(start, upto - start)

    def allocate(self, size_bytes: int) -> list[Extent] | None:
        """Return extents of exactly `size_bytes` in total; None only if fewer than `rounded(size_bytes)` are free.

        Returns one extent if a free run has room for it, and otherwise the fewest possible. Each extent starts
        on a granule. Only the length of the last one may be no multiple of a granule.
        """
        if size_bytes <= 0:
            raise ValueError(f"cannot allocate {size_bytes} bytes")
        granule = self.granule_bytes
        need = -(-size_bytes // granule)
        if need > self._free:
            return None
        extents: list[Extent] = []
        while True:
            at = bisect_left(self._lengths, need)
            if at < len(self._lengths):
                extents.append((self._take(at, need) * granule, size_bytes))
                return extents
            length = self._lengths[-1]
            taken_bytes = length * granule
            extents.append((self._take(at - 1, length) * granule, taken_bytes))
            need -= length
            size_bytes -= taken_bytes

    def free(self, offset_bytes: int, length_bytes: int) -> None:
        """Give one extent back, by the offset and length that `allocate` gave or `claim` took."""
        start, length = self._granules(offset_bytes, length_bytes)
        if start in self._length_at or start + length in self._start_of or length > self._used():
            raise ExtentError(f"extent of {length_bytes} bytes at {offset_bytes} is free already")
        self._add(start, length)

    def claim(self, offset_bytes: int, length_bytes: int) -> None:
        """Take exactly this free range, as adoption does with the extents of an arena that was in use.

        ExtentError if a byte of it is used or beyond the usable region. O(1) when called in
        ascending order of offsets, right after `grow`; in any other order a search over all free runs.
        """
        start, length = self._granules(offset_bytes, length_bytes)
        run = self._run_with(start, length)
        if run is None:
            raise ExtentError(f"extent of {length_bytes} bytes at {offset_bytes} overlaps another one")
        run_length = self._length_at[run]
        self._remove(run, run_length)
        self._free -= length
        if start > run:
            self._insert(run, start - run)
        if start + length < run + run_length:
            self._insert(start + length, run + run_length - start - length)
        self._claimed_to = start + length

    def check(self) -> None:
        """Walk everything and assert that it is consistent. For tests; O(n log n) in free runs."""
        runs = sorted(self._length_at.items())
        end = self._first - 1
        for start, length in runs:
            assert length > 0 and start > end, "free runs overlap or touch"
            assert self._start_of[start + length] == start, "a run's end does not name its start"
            assert start in self._starts_by_length[length], "a run is not filed under its size"
            end = start + length
        assert not runs or end <= self._ready, "a free run reaches beyond the usable region"
        assert self._free == sum(length for _, length in runs), "the free granules are miscounted"
        assert len(self._start_of) == len(runs) == sum(map(len, self._starts_by_length.values())), "stale entries"
        assert self._lengths == sorted(self._starts_by_length), "the sorted sizes differ from the sizes filed"
        assert all(self._starts_by_length.values()), "a size without runs is filed"

    def _used(self) -> int:
        return self._ready - self._first - self._free

    def _granules(self, offset_bytes: int, length_bytes: int) -> Extent:
        """Return first granule and number of granules of a range. Raise ExtentError outside the usable region."""
        start, inside = divmod(offset_bytes, self.granule_bytes)
        length = -(-length_bytes // self.granule_bytes)
        if inside or length <= 0 or start < self._first or start + length > self._ready:
            raise ExtentError(f"no extent can have {length_bytes} bytes at {offset_bytes}")
        return start, length

    def _run_with(self, start: int, length: int) -> int | None:
        """Return the first granule of the free run that contains the range."""
        end = start + length
        at = self._claimed_to
        if at <= start < at + self._length_at.get(at, 0):
            return at if end <= at + self._length_at[at] else None
        for run, run_length in self._length_at.items():
            if run <= start < run + run_length:
                return run if end <= run + run_length else None
        return None

    def _take(self, at: int, need: int) -> int:
        """Cut `need` granules off the front of the newest run of the size at index `at`."""
        length = self._lengths[at]
        starts = self._starts_by_length[length]
        start, _ = starts.popitem()
        if not starts:
            del self._starts_by_length[length], self._lengths[at]
        del self._length_at[start], self._start_of[start + length]
        self._free -= need
        if length > need:
            self._insert(start + need, length - need)
        return start

    def _add(self, start: int, length: int) -> None:
        """Make granules free, joined with the free runs that touch them."""
        self._free += length
        right = self._length_at.get(start + length)
        if right is not None:
            self._remove(start + length, right)
            length += right
        left = self._start_of.get(start)
        if left is not None:
            self._remove(left, start - left)
            length += start - left
            start = left
        self._insert(start, length)

    def _insert(self, start: int, length: int) -> None:
        self._length_at[start] = length
        self._start_of[start + length] = start
        starts = self._starts_by_length.get(length)
        if starts is None:
            self._starts_by_length[length] = {start: None}
            self._lengths.insert(bisect_left(self._lengths, length), length)
        else:
            starts[start] = None

    def _remove(self, start: int, length: int) -> None:
        del self._length_at[start], self._start_of[start + length]
        starts = self._starts_by_length[length]
        del starts[start]
        if not starts:
            del self._starts_by_length[length], self._lengths[bisect_left(self._lengths, length)]
