"""What hit rate tiers of other capacities would have: miniature caches, over a sample of what requests ask for.

For each tier and each factor of its capacity there is a cache of a sample (Waldspurger et al., "Cache Modeling and
Optimization using Miniature Simulations", ATC '17): a point of a prompt is in the sample by a hash of its key, and the
capacity is scaled by the same rate. The caches run the tier's own eviction policy. What the sample has too many or too
few of is corrected for as in SHARDS-adj (Waldspurger et al., FAST '15). docs/adr/0079 says what is predicted, and how
well.

Nothing here reads a clock but `clock`, and `asked` only queues. `work` does the rest in slices. Where a cache has more
points than it may have, it starts again with half of its rate. Where `work` cannot keep up, all caches do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt
from kvdepot.core.calls import KEY_BYTES
from kvdepot.core.eviction import policy_by_name
from kvdepot.core.marks import KnownMarks, LatestMarks, Marks
from kvdepot.core.miniature_cache import MiniatureCache, Path
from kvdepot.core.report import CapacityFactor, WhatIfStatus

FACTORS: Final = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Of a tier's capacity."""
POINTS_MAX: Final = 1024
"""In each cache."""
WINDOW_SECONDS: Final = 3600.0
REQUESTS_MIN: Final = 500
"""Sampled requests within the window, below which a curve says nothing: fewer are more than 0.02 off by chance."""
_PARTS: Final = 12
"""Of the window: what leaves it leaves in steps of a twelfth."""
_GHOSTS_MIN, _GHOSTS_MAX = 64, 4 * POINTS_MAX
_QUEUED_BYTES_MAX: Final = 1 << 20
"""Of keys that wait for `work`."""
_BRANCHES_BITS, _CHUNKS_BITS = 15, 16
"""Of tables of marks: 768 KiB together."""
_PROMPT_POINTS_MAX: Final = 1024
"""Of one prompt. What lies beyond counts as computed."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the objects of a namespace take in a tier.

    `ends_bytes`: what a request needs at the boundary where it resumes, in addition to the attention before it: a
    state, or windows. 0: nothing, and a request resumes at each chunk.
    """

    chunk_tokens: int
    chunk_bytes: int
    ends_bytes: int = 0


@dataclass(slots=True)
class _Bucket:
    """One part of the window of one cache.

    `reusable`: tokens of all prompts that came before, so that a cache without a limit has them, by whether requests
    resume at ends only; `sampled`: of these, those of points in the sample. `hits`: of the sampled ones.
    `fresh`: tokens of chunks that came not before, as far as the table of marks remembers. Of these, `sampled_fresh`
    are in the sample, and `fresh_hits` are hits of sampled ones.
    """

    begins_at: float
    sampled_requests: int = 0
    prompt_tokens: int = 0
    reusable: list[int] = field(default_factory=lambda: [0, 0])
    sampled: list[int] = field(default_factory=lambda: [0, 0])
    hits: list[int] = field(default_factory=lambda: [0, 0])
    fresh: int = 0
    sampled_fresh: int = 0
    fresh_hits: int = 0

    def add(self, other: _Bucket) -> None:
        self.sampled_requests += other.sampled_requests
        self.prompt_tokens += other.prompt_tokens
        self.fresh += other.fresh
        self.sampled_fresh += other.sampled_fresh
        self.fresh_hits += other.fresh_hits
        for kind in (0, 1):
            self.reusable[kind] += other.reusable[kind]
            self.sampled[kind] += other.sampled[kind]
            self.hits[kind] += other.hits[kind]


@dataclass(slots=True)
class _Totals:
    """One part of the window, of all requests."""

    begins_at: float
    requests: int = 0
    prompt_tokens: int = 0
    offered_tokens: int = 0


_Timed = TypeVar("_Timed", _Bucket, _Totals)


class _Window(Generic[_Timed]):
    """The parts of the last `seconds`, the earliest first."""

    def __init__(self, seconds: float, make: Callable[[float], _Timed], now: float) -> None:
        self._seconds = seconds
        self._make: Callable[[float], _Timed] = make
        self.parts: deque[_Timed] = deque([make(now)])

    def at(self, now: float) -> _Timed:
        """Return the part that is filled now, without those that have left the window."""
        each = self._seconds / _PARTS
        if now >= self.parts[-1].begins_at + each:
            self.parts.append(self._make(now))
        while len(self.parts) > 1 and self.parts[0].begins_at + each <= now - self._seconds:
            self.parts.popleft()
        return self.parts[-1]


@dataclass(frozen=True, slots=True)
class _Asked:
    at: float
    salt: int
    geometry: Geometry
    keys: bytes
    prompt_tokens: int
    offered_tokens: int


@dataclass(frozen=True, slots=True)
class _Places:
    """Where a prompt has points: indexes of its chunks, and of each its mark, its hash, and the bytes before it.

    `reusable`: of each the tokens that came before and count if the point is in the sample.
    """

    at: npt.NDArray[np.int64]
    marks: Marks
    hashes: Marks
    sizes: npt.NDArray[np.int64]
    is_end: npt.NDArray[np.bool_]
    reusable: npt.NDArray[np.int64]

    @property
    def reusable_tokens(self) -> int:
        return int(self.reusable.sum())

    def sample(self, geometry: Geometry, threshold: np.uint64) -> tuple[Path, list[int]]:
        """Return the points below the threshold, at most so many, and the reusable tokens of each below it."""
        below = np.flatnonzero(self.hashes <= threshold)
        chosen = below[:_PROMPT_POINTS_MAX]
        branches = frozenset(np.flatnonzero(~self.is_end[chosen]).tolist()) if geometry.ends_bytes else frozenset()
        path = Path(
            self.marks[chosen].tolist(), self.sizes[chosen].tolist(),
            ((self.at[chosen] + 1) * geometry.chunk_tokens).tolist(), geometry.ends_bytes, branches,
        )  # fmt: skip
        return path, self.reusable[below].tolist()


class _Factor:
    """The cache of one capacity, with what it had of the sample."""

    def __init__(
        self, policy: str, room_bytes: float, ghosts: int, window_seconds: float, requests_min: int
    ) -> None:  # fmt: skip
        self._policy = policy
        self._room_bytes = room_bytes
        self._ghosts = ghosts
        self._window_seconds = window_seconds
        self._requests_min = requests_min

    def restart(self, rate: float, now: float) -> None:
        """Start again without points, at this rate."""
        self.rate = rate
        self._threshold = np.uint64(min(int(rate * 2.0**64), 2**64 - 1))
        self._window = _Window(self._window_seconds, _Bucket, now)
        ghosts = max(min(int(self._ghosts * rate), _GHOSTS_MAX), _GHOSTS_MIN)
        self.cache = MiniatureCache(policy_by_name(self._policy, ghosts), self._room_bytes * rate)

    def fit(self, point_bytes: int, points_max: int, now: float) -> None:
        """Choose the rate so that no more points than allowed find room."""
        rate = self.rate
        while rate * self._room_bytes > points_max * point_bytes:
            rate /= 2
        if rate < self.rate:
            self.restart(rate, now)

    def serve(self, asked: _Asked, places: _Places) -> Iterator[None]:
        geometry = asked.geometry
        path, known = places.sample(geometry, self._threshold)
        bucket = self._window.at(asked.at)
        kind = int(geometry.ends_bytes > 0)
        sampled = sum(known)
        bucket.prompt_tokens += asked.prompt_tokens
        bucket.reusable[kind] += places.reusable_tokens
        bucket.sampled[kind] += sampled
        if not kind:
            bucket.fresh += len(places.at) * geometry.chunk_tokens - places.reusable_tokens
            bucket.sampled_fresh += len(known) * geometry.chunk_tokens - sampled
        if not len(path):
            return
        bucket.sampled_requests += 1
        served = yield from self.cache.serve(path, asked.at)
        if kind:
            bucket.hits[kind] += path.depths[served - 1] if served and sampled else 0
        else:
            hits = sum(known[:served])
            bucket.hits[kind] += hits
            bucket.fresh_hits += served * geometry.chunk_tokens - hits

    def status(self, factor: float, capacity_bytes: int, now: float) -> CapacityFactor:
        self._window.at(now)
        whole = _Bucket(now)
        for part in self._window.parts:
            whole.add(part)
        enough = whole.sampled_requests >= self._requests_min and whole.prompt_tokens > 0
        return CapacityFactor(
            factor=factor,
            capacity_bytes=capacity_bytes,
            hit_ratio=self._ratio(whole) if enough else None,
            full=self.cache.evicted,
            sampled_requests=whole.sampled_requests,
            sample_ratio=self.rate,
        )

    def _ratio(self, whole: _Bucket) -> float:
        """Return the hit ratio. Where the sample has too few reusable tokens, the others count as hits.

        Such differences come from the chunks that are asked for most, which caches of all sizes have (SHARDS-adj).
        A cache may have chunks whose marks are forgotten. Their share is that of the sample.
        """
        tokens = sum(
            max((whole.hits[kind] - whole.sampled[kind]) / self.rate + whole.reusable[kind], 0.0) for kind in (0, 1)
        )
        if whole.sampled_fresh:
            tokens += whole.fresh_hits / whole.sampled_fresh * whole.fresh
        return min(tokens / whole.prompt_tokens, 1.0)


class WhatIf:
    """The sketch of one tier: at most about 2.5 MiB, for the points of all caches, and the tables."""

    def __init__(
        self, capacity_bytes: int, policy: str, clock: Callable[[], float], *, full: float = 1.0,
        least_bytes: float = 0.0, ghosts: int = POINTS_MAX, window_seconds: float = WINDOW_SECONDS,
        points_max: int = POINTS_MAX, requests_min: int = REQUESTS_MIN,
    ) -> None:  # fmt: skip
        """Make a sketch that has seen nothing.

        Args:
            capacity_bytes: of the tier.
            policy: the name of its eviction policy.
            clock: monotonic seconds.
            full: the share of the capacity that objects have once the tier is full.
            least_bytes: what the tiers above have, whatever this one has.
            ghosts: how many evicted nodes the tier's policy remembers.
            window_seconds: how long a request counts.
            points_max: in each cache.
            requests_min: sampled requests below which a cache says nothing.
        """
        self._capacity_bytes = capacity_bytes
        self._clock = clock
        self._window_seconds = window_seconds
        self._points_max = points_max
        self._requests_min = requests_min
        self._queue: deque[_Asked] = deque()
        self._running: Iterator[None] | None = None
        self._sized = False  # whether rates are chosen for the first namespace
        self._factors = [
            _Factor(
                policy,
                max(capacity_bytes * factor * full, least_bytes),
                int(ghosts * factor),
                window_seconds,
                requests_min,
            )
            for factor in FACTORS
        ]
        self._restart([1.0] * len(FACTORS))

    # What requests ask

    def asked(self, salt: int, geometry: Geometry, keys: bytes, prompt_tokens: int, offered_tokens: int) -> None:
        """Queue the first lookup of a request.

        Args:
            salt: 64 bits that tell the namespace from others.
            geometry: the sizes of the namespace's objects.
            keys: of the whole chunks of the prompt, in order.
            prompt_tokens: of the prompt, up to where a request can resume at most.
            offered_tokens: up to where the tiers could serve it.
        """
        if self._queued_bytes > _QUEUED_BYTES_MAX:
            return  # `work` will start again
        self._queue.append(_Asked(self._clock(), salt, geometry, keys, prompt_tokens, offered_tokens))
        self._queued_bytes += len(keys)

    @property
    def idle(self) -> bool:
        return not self._queue and self._running is None

    def work(self, seconds: float) -> None:
        """Serve queued requests for at most about so long, longer by one step of 0.5 ms."""
        if self._queued_bytes > _QUEUED_BYTES_MAX:
            self._restart([factor.rate / 2 for factor in self._factors])
            return
        until = self._clock() + seconds
        while not self.idle and self._clock() < until:
            if self._running is None:
                asked = self._queue.popleft()
                self._queued_bytes -= len(asked.keys)
                self._running = self._serve(asked)
            try:
                next(self._running)
            except StopIteration:
                self._running = None

    def _restart(self, rates: Sequence[float]) -> None:
        """Start again without points, at these rates. What was queued is lost."""
        now = self._clock()
        self._queue.clear()
        self._queued_bytes = 0
        self._running = None
        self._ends = LatestMarks()
        self._branches = KnownMarks(_BRANCHES_BITS)
        self._chunks = KnownMarks(_CHUNKS_BITS)
        self._window = _Window(self._window_seconds, _Totals, now)
        for factor, rate in zip(self._factors, rates, strict=True):
            factor.restart(rate, now)

    # Serving

    def _serve(self, asked: _Asked) -> Iterator[None]:
        """Serve one prompt from all caches, and count what they had. Yield about every 0.5 ms."""
        geometry = asked.geometry
        if not self._sized:
            self._sized = True
            for factor in self._factors:
                factor.fit(geometry.chunk_bytes + geometry.ends_bytes, self._points_max, asked.at)
        totals = self._window.at(asked.at)
        totals.requests += 1
        totals.prompt_tokens += asked.prompt_tokens
        totals.offered_tokens += asked.offered_tokens
        if not asked.keys:
            return
        words = np.frombuffer(asked.keys, "<u8").reshape(-1, KEY_BYTES // 8)
        marks: Marks = words[:, 0] ^ np.uint64(asked.salt)
        places = self._ends_of(geometry, marks, words[:, 1]) if geometry.ends_bytes else self._chunks_of(
            geometry, marks, words[:, 1]
        )  # fmt: skip
        for factor in self._factors:
            yield from factor.serve(asked, places)
            if len(factor.cache) > self._points_max:
                factor.restart(factor.rate / 2, asked.at)
            yield

    def _chunks_of(self, geometry: Geometry, marks: Marks, hashes: Marks) -> _Places:
        """Return a place for each chunk. Its tokens are reusable if it came before."""
        known = self._chunks.known(marks)
        self._chunks.add(marks)
        sizes = np.full(len(marks), geometry.chunk_bytes, np.int64)
        return _Places(np.arange(len(marks)), marks, hashes, sizes, known, known * np.int64(geometry.chunk_tokens))

    def _ends_of(self, geometry: Geometry, marks: Marks, hashes: Marks) -> _Places:
        """Return a place for each end of a prompt on the path of this one, its own included, and for each branch.

        A prompt could resume at the last end of an earlier one. All tokens before that end are reusable, and count if
        the end is in the sample: the ends before it are rarely there without it.
        """
        known, chunks = self._ends.known(marks), self._chunks.known(marks)
        is_end, is_branch = known.copy(), self._branches.known(marks)
        is_end[-1] = True
        self._ends.add(marks[-1])
        self._chunks.add(marks)
        if chunks.any() and not chunks[-1]:
            fork = int(np.flatnonzero(chunks)[-1])  # the last chunk that another prompt has, too
            self._branches.add(marks[fork : fork + 1])
            is_branch[fork] = True
        at = np.flatnonzero(is_end | is_branch)
        reusable = np.zeros(len(at), np.int64)
        ends = np.flatnonzero(known)
        if len(ends):
            reusable[np.searchsorted(at, ends[-1])] = (ends[-1] + 1) * geometry.chunk_tokens
        sizes = np.diff(at, prepend=-1) * geometry.chunk_bytes
        return _Places(at, marks[at], hashes[at], sizes, is_end[at], reusable)

    # What operators see

    def status(self) -> WhatIfStatus:
        """Return the curve of the window. A capacity of which too few requests are in the sample has no ratio."""
        now = self._clock()
        self._window.at(now)
        parts = self._window.parts
        prompt_tokens = sum(part.prompt_tokens for part in parts)
        requests = sum(part.requests for part in parts)
        offered_tokens = sum(part.offered_tokens for part in parts)
        return WhatIfStatus(
            window_seconds=min(now - parts[0].begins_at, self._window_seconds),
            requests=requests,
            requests_min=self._requests_min,
            measured_hit_ratio=offered_tokens / prompt_tokens
            if requests >= self._requests_min and prompt_tokens
            else None,
            points=tuple(
                one.status(factor, int(factor * self._capacity_bytes), now)
                for factor, one in zip(FACTORS, self._factors, strict=True)
            ),
        )
