"""What hit rate tiers of other capacities would have: miniature caches, over a sample of what requests ask for.

For each tier and each factor of its capacity there is a cache of a sample (Waldspurger et al., "Cache Modeling and
Optimization using Miniature Simulations", ATC '17): a point of a prompt is in the sample by a hash of its key, and the
capacity is scaled by the same rate. The caches run the tier's own eviction policy. What the sample has too many or too
few of is corrected for as in SHARDS-adj (Waldspurger et al., FAST '15). docs/adr/0079 says what is predicted, and how
well.

Nothing here reads a clock but `clock`, and `asked` only queues. `work` does the rest in slices. Where a cache has more
points than it may have, it starts again with half of its rate. Where `work` cannot keep up, all caches do. They get
such a half back after a window in which `work` was never near its limit.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from kvdepot.core.calls import KEY_BYTES
from kvdepot.core.eviction import policy_by_name
from kvdepot.core.marks import KnownMarks, LatestMarks, Marks
from kvdepot.core.miniature_cache import MiniatureCache, Path
from kvdepot.core.report import CapacityFactor, WhatIfStatus
from kvdepot.core.sliding_sums import SlidingSums

FACTORS: Final = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Of a tier's capacity."""
POINTS_MAX: Final = 1024
"""In each cache."""
WINDOW_SECONDS: Final = 3600.0
REQUESTS_MIN: Final = 500
"""Sampled requests within the window, below which a curve says nothing: fewer are more than 0.02 off by chance."""
_GHOSTS_MIN, _GHOSTS_MAX = 64, 4 * POINTS_MAX
_QUEUED_BYTES_MAX: Final = 4 << 20
"""Of keys that wait for `work`. All sketches of a daemon have the same keys, and share their bytes."""
_REQUEST_BYTES: Final = 256
"""What a request counts in the queue, in addition to its keys."""
_RATE_MIN: Final = 2.0**-24
"""Of a sample: 1,024 points are then 17 thousand million chunks."""
_END_CHUNKS: Final = 4
"""That the end of a prompt has at least, where a rate is chosen: the first prompt may be unusually short."""
_MARKS_AT_ONCE: Final = 2048
"""That are looked for among ends between two yields."""
_BRANCHES_BITS, _CHUNKS_BITS = 15, 16
"""Of tables of marks: 768 KiB together."""
_PROMPT_POINTS_MAX: Final = 1024
"""Of one prompt. What lies beyond counts as computed."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the objects of a namespace take in a tier.

    `ends_bytes`: what a request needs at the boundary where it resumes, in addition to the attention before it: a
    state, or windows. 0: nothing, and a request resumes at each chunk. `at_branches`: whether requests can resume
    where prompts part, too: windows are stored with each chunk, and a state with the last one of a prompt only.
    """

    chunk_tokens: int
    chunk_bytes: int
    ends_bytes: int = 0
    at_branches: bool = False


@dataclass(frozen=True, slots=True)
class _Asked:
    at: float
    salt: int
    geometry: Geometry
    keys: bytes
    prompt_tokens: int
    offered_tokens: int
    computed: bool = False  # whether an engine has just computed it: it is stored, and nobody looked it up


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

    def sample(self, geometry: Geometry, threshold: np.uint64) -> tuple[Path, npt.NDArray[np.int64]]:
        """Return the points below the threshold, at most so many, and the reusable tokens of each below it."""
        below = np.flatnonzero(self.hashes <= threshold)
        chosen = below[:_PROMPT_POINTS_MAX]
        bare = geometry.ends_bytes and not geometry.at_branches
        branches = frozenset(np.flatnonzero(~self.is_end[chosen]).tolist()) if bare else frozenset()
        path = Path(
            self.marks[chosen].tolist(), self.sizes[chosen].tolist(),
            ((self.at[chosen] + 1) * geometry.chunk_tokens).tolist(), geometry.ends_bytes, branches,
            geometry.at_branches,
        )  # fmt: skip
        return path, self.reusable[below]


class _Factor:
    """The cache of one capacity, with what it had of the sample.

    The sums are of chunks and of ends apart. `reusable`: tokens that came before, so that a cache without a limit has
    them. Of these, `sampled` are those of points in the sample, and `hits` those that this cache had. `fresh`: tokens
    of chunks that did not come before, as far as the table of marks remembers. Of these, `sampled_fresh` are in the
    sample, and `fresh_hits` are hits nevertheless.
    """

    def __init__(
        self, policy: str, room_bytes: float, ghosts: int, window_seconds: float, requests_min: int
    ) -> None:  # fmt: skip
        self._policy = policy
        self._room_bytes = room_bytes
        self._ghosts = ghosts
        self._window_seconds = window_seconds
        self._requests_min = requests_min

    def restart(self, rate: float, now: float) -> None:
        """Start again without points, at this rate or at the least one."""
        self.rate = max(rate, _RATE_MIN)
        self._threshold = np.uint64(min(int(self.rate * 2.0**64), 2**64 - 1))
        self._chunks, self._ends = (SlidingSums(self._window_seconds, now) for _ in range(2))
        ghosts = max(min(int(self._ghosts * self.rate), _GHOSTS_MAX), _GHOSTS_MIN)
        self.cache = MiniatureCache(policy_by_name(self._policy, ghosts), self._room_bytes * self.rate)

    def fit(self, point_bytes: int, points_max: int, now: float) -> None:
        """Choose the rate so that no more points than allowed find room."""
        rate = self.rate
        while rate > _RATE_MIN and rate * self._room_bytes > points_max * point_bytes:
            rate /= 2
        if rate < self.rate:
            self.restart(rate, now)

    def serve(self, asked: _Asked, places: _Places) -> Iterator[None]:
        geometry = asked.geometry
        path, found = places.sample(geometry, self._threshold)
        served = yield from self.cache.serve(path, asked.at, hit=not asked.computed)
        if asked.computed:
            return
        reusable, sampled = int(places.reusable.sum()), int(found.sum())
        requests = int(len(path) > 0)
        if geometry.ends_bytes:
            hits = path.depths[served - 1] if served and sampled else 0
            self._ends.add(
                asked.at, prompt=asked.prompt_tokens, requests=requests, reusable=reusable, sampled=sampled, hits=hits
            )
            return
        hits = int(found[:served].sum())
        self._chunks.add(
            asked.at, prompt=asked.prompt_tokens, requests=requests, reusable=reusable, sampled=sampled, hits=hits,
            fresh=len(places.at) * geometry.chunk_tokens - reusable,
            sampled_fresh=len(found) * geometry.chunk_tokens - sampled,
            fresh_hits=served * geometry.chunk_tokens - hits,
        )  # fmt: skip

    def status(self, factor: float, capacity_bytes: int, now: float) -> CapacityFactor:
        chunks, ends = self._chunks.sums(now), self._ends.sums(now)
        sampled_requests = chunks["requests"] + ends["requests"]
        prompt_tokens = chunks["prompt"] + ends["prompt"]
        enough = sampled_requests >= self._requests_min and prompt_tokens > 0
        return CapacityFactor(
            factor=factor,
            capacity_bytes=capacity_bytes,
            hit_ratio=min((self._tokens(chunks) + self._tokens(ends)) / prompt_tokens, 1.0) if enough else None,
            full=self.cache.evicted,
            sampled_requests=sampled_requests,
            sample_ratio=self.rate,
        )

    def _tokens(self, sums: Counter[str]) -> float:
        """Return the tokens of hits. Where the sample has too few reusable tokens, the others count as hits.

        Such differences come from the chunks that are asked for most, which caches of all sizes have (SHARDS-adj).
        A cache may have chunks whose marks are forgotten. Their share is that of the sample.
        """
        tokens = max((sums["hits"] - sums["sampled"]) / self.rate + sums["reusable"], 0.0)
        if sums["sampled_fresh"]:
            tokens += sums["fresh_hits"] / sums["sampled_fresh"] * sums["fresh"]
        return tokens


class WhatIf:
    """The sketch of one tier: less than 4 MiB for the points of all caches and the tables, and the queue."""

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
        self._queued_bytes = self._most_queued_bytes = 0  # now, and at most since `_watched_from`
        self._running: Iterator[None] | None = None
        self._sized = False  # whether rates are chosen for the first namespace
        self._halved = 0  # how often `work` has halved the rates, less how often they were doubled again
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
        self._put(_Asked(self._clock(), salt, geometry, keys, prompt_tokens, offered_tokens))

    def computed(self, salt: int, geometry: Geometry, keys: bytes) -> None:
        """Queue the path of a request that has ended, prompt and answer: what the engine computed is stored, too."""
        self._put(_Asked(self._clock(), salt, geometry, keys, 0, 0, computed=True))

    def _put(self, asked: _Asked) -> None:
        if self._queued_bytes > _QUEUED_BYTES_MAX:
            return  # `work` will start again
        self._queue.append(asked)
        self._queued_bytes += _REQUEST_BYTES + len(asked.keys)
        self._most_queued_bytes = max(self._most_queued_bytes, self._queued_bytes)

    @property
    def idle(self) -> bool:
        return not self._queue and self._running is None

    def work(self, seconds: float) -> None:
        """Serve queued requests for at most about so long, longer by one step of 0.5 ms."""
        if self._queued_bytes > _QUEUED_BYTES_MAX:
            self._halved += 1
            self._restart([factor.rate / 2 for factor in self._factors])
            return
        until = self._clock() + seconds
        while not self.idle and self._clock() < until:
            if self._running is None:
                asked = self._queue.popleft()
                self._queued_bytes -= _REQUEST_BYTES + len(asked.keys)
                self._running = self._serve(asked)
            try:
                next(self._running)
            except StopIteration:
                self._running = None
        if self._halved and self.idle and until >= self._watched_from + self._window_seconds:
            self._look_back(until)

    def _look_back(self, now: float) -> None:
        """Double all rates again after a window in which the queue was short."""
        if self._most_queued_bytes < _QUEUED_BYTES_MAX // 8:
            self._halved -= 1
            self._restart([min(2 * factor.rate, 1.0) for factor in self._factors])
        else:
            self._watched_from, self._most_queued_bytes = now, 0

    def _restart(self, rates: Sequence[float]) -> None:
        """Start again without points, at these rates. What was queued is lost."""
        now = self._clock()
        self._queue.clear()
        self._queued_bytes = self._most_queued_bytes = 0
        self._watched_from = now
        self._running = None
        self._ends = LatestMarks()
        self._branches = KnownMarks(_BRANCHES_BITS)
        self._chunks = KnownMarks(_CHUNKS_BITS)
        self._totals = SlidingSums(self._window_seconds, now)
        for factor, rate in zip(self._factors, rates, strict=True):
            factor.restart(rate, now)

    # Serving

    def _serve(self, asked: _Asked) -> Iterator[None]:
        """Serve one prompt from all caches, and count what they had. Yield about every 0.5 ms."""
        geometry = asked.geometry
        if not asked.computed:
            self._totals.add(asked.at, requests=1, prompt=asked.prompt_tokens, offered=asked.offered_tokens)
        if not asked.keys:
            return
        words = np.frombuffer(asked.keys, "<u8").reshape(-1, KEY_BYTES // 8)
        if not self._sized:
            self._sized = True
            chunks = max(len(words), _END_CHUNKS) if geometry.ends_bytes else 1
            for factor in self._factors:
                factor.fit(chunks * geometry.chunk_bytes + geometry.ends_bytes, self._points_max, asked.at)
        marks: Marks = words[:, 0] ^ np.uint64(asked.salt)
        if geometry.ends_bytes:
            places = yield from self._ends_of(geometry, marks, words[:, 1])
        else:
            places = self._chunks_of(geometry, marks, words[:, 1])
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

    def _ends_of(self, geometry: Geometry, marks: Marks, hashes: Marks) -> Generator[None, None, _Places]:
        """Return a place for each end of a prompt on the path of this one, its own included, and for each branch.

        A prompt could resume at the last end of an earlier one, or where they part. All tokens before that point are
        reusable, and count if the point is in the sample: those before it are rarely there without it.
        """
        known = np.zeros(len(marks), np.bool_)
        for start in range(0, len(marks), _MARKS_AT_ONCE):
            part = slice(start, start + _MARKS_AT_ONCE)
            known[part] = self._ends.known(marks[part])
            yield
        chunks = self._chunks.known(marks)
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
        ends = np.flatnonzero(known | is_branch if geometry.at_branches else known)
        if len(ends):
            reusable[np.searchsorted(at, ends[-1])] = (ends[-1] + 1) * geometry.chunk_tokens
        sizes = np.diff(at, prepend=-1) * geometry.chunk_bytes
        return _Places(at, marks[at], hashes[at], sizes, is_end[at], reusable)

    # What operators see

    def status(self) -> WhatIfStatus:
        """Return the curve of the window. A capacity of which too few requests are in the sample has no ratio."""
        now = self._clock()
        totals = self._totals.sums(now)
        enough = totals["requests"] >= self._requests_min and totals["prompt"] > 0
        return WhatIfStatus(
            window_seconds=self._totals.seconds(now),
            requests=totals["requests"],
            requests_min=self._requests_min,
            measured_hit_ratio=totals["offered"] / totals["prompt"] if enough else None,
            points=tuple(
                one.status(factor, int(factor * self._capacity_bytes), now)
                for factor, one in zip(FACTORS, self._factors, strict=True)
            ),
        )
