"""Which chunks a disk takes that RAM is about to drop, with `write = "auto"`.

Two things are compared. Both take O(1) and a fixed amount of memory, however many objects there are.

* **Expected reads** (`Returns`). Chunks with the same past form a class (`EvictionPolicy.use_class`). Of a sample of
  those that RAM dropped, it is counted how many an engine asked for again: by a read from the disk, or because an
  engine computed them again. A chunk counts while the disk would still have it: until as many bytes were written
  as the disk holds. So the estimate is the same for what was written and for what was not, and a class that was
  refused is found again when it returns.
* **Endurance** (`Allowance`). A token bucket holds what may be written now. It fills at the target. The less it
  has, the better a class must be, in proportion to the best class. So the bytes that a day allows go to the classes
  with the most expected reads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from enum import StrEnum
from typing import Final

from kvdepot.core.eviction_policy import USE_CLASSES

DRIVE_WRITES_PER_DAY: Final = 1.0
"""What most drives for data centres are rated for: the default target."""
DAY_SECONDS: Final = 86_400.0
BURST_SECONDS: Final = DAY_SECONDS / 4
"""What the bucket holds. A quiet night is made up for, and no day writes more than 1.25 times the target."""
READS_MIN: Final = 0.05
"""Expected reads of a chunk, below which it is not written: one hit in twenty writes."""
SAMPLE_MAX: Final = 4096
"""Chunks in the sample: less than 1 MiB."""
_PRIOR: Final = 8.0
"""Chunks that each class starts with, of which as many returned as of all ..."""
_START: Final = 0.5
"""... and of all so many."""
_KEPT: Final = 1 - 1 / 1000
"""What a chunk counts less with each later one of its class, so that the rates follow the workload."""
_MIX: Final = 0x9E37_79B9_7F4A_7C15
_WORD: Final = (1 << 64) - 1


class Verdict(StrEnum):
    """What becomes of a chunk that RAM drops. The values are labels of a counter."""

    ADMITTED = "admitted"
    UNLIKELY = "unlikely"  # too few chunks of its class return
    ENDURANCE = "endurance"  # the target leaves room for better classes only


class Allowance:
    """A token bucket of bytes. What was written beyond it is a debt."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._bytes: float | None = None  # None: nothing was asked yet
        self._at = 0.0

    def share(self, bytes_per_day: float, free_bytes: int, waiting_bytes: int) -> float:
        """Return how full the bucket is, without what waits to be written: 0 to 1, and 1 without a target.

        It starts with what the disk has free, so that a new disk is filled, and a restart allows nothing more.
        """
        if not bytes_per_day:
            self._bytes = None
            return 1.0
        burst_bytes = bytes_per_day * BURST_SECONDS / DAY_SECONDS
        now = self._clock()
        if self._bytes is None:
            self._bytes = min(burst_bytes, free_bytes)
        else:
            added_bytes = (now - self._at) * bytes_per_day / DAY_SECONDS
            self._bytes = min(self._bytes + added_bytes, burst_bytes)
        self._at = now
        return max(self._bytes - waiting_bytes, 0.0) / burst_bytes

    def spend(self, size_bytes: int) -> None:
        if self._bytes is not None:
            self._bytes -= size_bytes


class _Rate:
    """The chunks that RAM dropped, and those of them that came back. Each counts less with each later one."""

    def __init__(self) -> None:
        self.dropped = 0.0
        self.returned = 0.0

    def drop(self) -> None:
        self.dropped = self.dropped * _KEPT + 1
        self.returned *= _KEPT

    def of(self, prior: float) -> float:
        return (self.returned + _PRIOR * prior) / (self.dropped + _PRIOR)


class Returns:
    """How many of the chunks that RAM dropped came back while the disk could have had them, by class."""

    def __init__(self) -> None:
        self._all = _Rate()
        self._classes = [_Rate() for _ in range(USE_CLASSES)]
        # By mark: a bit for each class that the chunk was dropped in, its kind, `_written` and `_shift` at the first.
        self._sample: OrderedDict[int, tuple[int, int, int, int]] = OrderedDict()
        self._written = 0  # bytes, to the disk
        self._shift = 0  # a chunk is in the sample if so many bits of its mark's hash are 0
        self._steady = 0  # chunks noted since the shift changed

    def __len__(self) -> int:
        return len(self._sample)

    def rate(self, use_class: int) -> float:
        """Return the expected reads of a chunk of this class."""
        return self._classes[use_class].of(self._all.of(_START))

    @property
    def best(self) -> float:
        prior = self._all.of(_START)
        return max(one.of(prior) for one in self._classes)

    def wrote(self, size_bytes: int) -> None:
        """Note that so much was written to the disk."""
        self._written += size_bytes

    def dropped(self, mark: int, kind: int, use_class: int, reach_bytes: int) -> None:
        """Note a chunk that RAM drops. `reach_bytes`: how much is written before the disk drops it, too."""
        self._forget(reach_bytes)
        if not self._chosen(mark):
            return
        classes, kind, written, shift = self._sample.get(mark, (0, kind, self._written, self._shift))
        if classes >> use_class & 1:
            return
        self._sample[mark] = classes | 1 << use_class, kind, written, shift
        for rate in (self._all, self._classes[use_class]):
            rate.drop()
        self._steady += 1
        if len(self._sample) > SAMPLE_MAX:
            self._thin()

    def returned(self, mark: int, kind: int) -> None:
        """Note that an engine asked for an object of this kind that is not in RAM."""
        known = self._sample.get(mark)
        if known is not None and known[1] == kind:
            classes, _, _, shift = known
            stands_for = 1 << max(shift - self._shift, 0)  # of those in the sample now
            self._all.returned += stands_for * classes.bit_count()
            for use_class, rate in enumerate(self._classes):
                rate.returned += stands_for * (classes >> use_class & 1)

    def _forget(self, reach_bytes: int) -> None:
        """Forget what is beyond the disk's reach, and sample more once there is room for it."""
        while self._sample:
            mark, (_, _, written, _) = next(iter(self._sample.items()))
            if self._written - written < reach_bytes:
                break
            del self._sample[mark]
        if self._shift and len(self._sample) < SAMPLE_MAX // 4 and self._steady > SAMPLE_MAX // 4:
            self._shift -= 1
            self._steady = 0

    def _chosen(self, mark: int) -> bool:
        return not self._shift or (mark * _MIX & _WORD) >> (64 - self._shift) == 0

    def _thin(self) -> None:
        """Take half of the chunks into the sample from now on, and keep half of those that are there."""
        self._shift += 1
        self._steady = 0
        for mark in [one for one in self._sample if not self._chosen(one)]:
            del self._sample[mark]


class WriteAdmission:
    """The decisions of one disk. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.returns = Returns()
        self._allowance = Allowance(clock)

    def judge(self, use_class: int, bytes_per_day: float, free_bytes: int, waiting_bytes: int) -> Verdict:
        """Return what becomes of a chunk of this class.

        Args:
            use_class: of the chunk, as the eviction policy of RAM says it.
            bytes_per_day: that the disk is to be written. 0: without a limit.
            free_bytes: of the disk.
            waiting_bytes: of objects that are to be written before it.
        """
        share = self._allowance.share(bytes_per_day, free_bytes, waiting_bytes)
        expected = self.returns.rate(use_class)
        if expected < READS_MIN:
            return Verdict.UNLIKELY
        enough = share > 0 and expected >= (1 - share) * self.returns.best
        return Verdict.ADMITTED if enough else Verdict.ENDURANCE

    def wrote(self, size_bytes: int) -> None:
        """Note that so much was written to the disk, for whatever reason."""
        self.returns.wrote(size_bytes)
        self._allowance.spend(size_bytes)
