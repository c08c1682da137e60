"""The read rate of a lower tier, as its answers show it. Promises are computed from it.

There are two figures. Bytes a second are measured while anything is asked for, and older
answers fade. The latency is what an answer took beyond the transfer of what was queued before
it. Until the first answers, both figures are those of a slow disk, and again after a while
without any. Otherwise a tier of which nothing is promised would be asked for nothing, and could
never show that it has recovered. Whether a load is worth its time is another question. Its answer uses
what was measured last, however long ago.
"""

from __future__ import annotations

from math import exp, inf
from typing import Final, overload

import numpy as np
import numpy.typing as npt
from kvdepot.server.storage.base import IoOutcome

FIRST_BYTES_PER_SECOND: Final = 100e6
FIRST_LATENCY_SECONDS: Final = 0.02
UNMEASURED_BYTES_PER_SECOND: Final = 20e6
"""What a tier is taken for, where a request would lose time if it were slower than believed."""
MEASURED_READS: Final = 4
"""Answers after which the first figures count no more in what a load is weighed by."""
_MEMORY_SECONDS: Final = 4.0
"""Of reading; what was seen so long ago counts for a third."""
_LATENCY_WEIGHT: Final = 0.2
_SILENCE_SECONDS: Final = 2.0
_SILENCE_TIMES: Final = 4.0
"""Silent for this long, and for so many times what the answer should have taken: it may never come."""
_SECONDS_MIN: Final = 1e-4
_STALE_SECONDS: Final = 30.0
"""Without a read: then what was seen before says nothing any more."""
_DOUBT_SECONDS: Final = 5.0
"""How long nothing is promised after a read that missed its deadline, unless another one is answered."""

Numbers = npt.NDArray[np.float64]


class ReadRate:
    """The read rate of one tier. All times are seconds of the depot's clock."""

    def __init__(self) -> None:
        self.reads = 0  # asked for and not answered
        self.bytes = 0  # of these
        self._remembered = (UNMEASURED_BYTES_PER_SECOND, FIRST_LATENCY_SECONDS)  # while nothing newer is measured
        self._forget()
        self._heard_at = 0.0  # the last answer, or the first read that was asked for after it
        self._doubted_until = -inf

    def _forget(self) -> None:
        self._bytes = FIRST_BYTES_PER_SECOND * _MEMORY_SECONDS
        self._seconds = _MEMORY_SECONDS
        self._latency_seconds = FIRST_LATENCY_SECONDS
        self._first_share = 1.0  # of the first figures, that is left in them
        self._answers = 0  # since

    @property
    def measured(self) -> bool:
        return self._answers >= MEASURED_READS

    @property
    def bytes_per_second(self) -> float:
        return max(self._bytes, 1.0) / self._seconds

    @property
    def measured_bytes_per_second(self) -> float:
        """The bytes a second that were measured, without the first figures."""
        first_seconds = self._first_share * _MEMORY_SECONDS
        size_bytes = self._bytes - first_seconds * FIRST_BYTES_PER_SECOND
        return max(size_bytes, 1.0) / max(self._seconds - first_seconds, _SECONDS_MIN)

    def asked(self, size_bytes: int, now: float) -> float:
        """Note that a read was asked for. Return the seconds of transfer until its answer, for `answered`."""
        if not self.reads:
            self._heard_at = now
        self.reads += 1
        self.bytes += size_bytes
        return self.bytes / self.bytes_per_second

    def answered(
        self, size_bytes: int, outcome: IoOutcome, *, asked_at: float, expected_seconds: float, now: float
    ) -> None:
        self.reads -= 1
        self.bytes -= size_bytes
        busy_seconds, self._heard_at = now - self._heard_at, now
        fading = exp(-busy_seconds / _MEMORY_SECONDS)
        self._bytes *= fading
        self._seconds = max(self._seconds * fading + busy_seconds, _SECONDS_MIN)
        self._first_share *= fading
        if outcome is IoOutcome.OK:
            self._bytes += size_bytes
            self._answers += 1
            self._doubted_until = -inf
            latency = max(now - asked_at - expected_seconds, 0.0)
            self._latency_seconds += _LATENCY_WEIGHT * (latency - self._latency_seconds)
        elif outcome is IoOutcome.TIMEOUT:
            self._doubted_until = now + _DOUBT_SECONDS

    def answers(self, now: float) -> bool:
        """Return whether reads of the tier are promised.

        They are not if the tier has been silent for too long, or has missed a deadline lately.
        """
        if now < self._doubted_until:
            return False
        expected = self._latency_seconds + self.bytes / self.bytes_per_second
        return not self.reads or now - self._heard_at <= _SILENCE_SECONDS + _SILENCE_TIMES * expected

    @overload
    def seconds(self, size_bytes: int, now: float) -> float: ...
    @overload
    def seconds(self, size_bytes: Numbers, now: float) -> Numbers: ...
    def seconds(self, size_bytes: int | Numbers, now: float) -> float | Numbers:
        """Return the seconds until so many more bytes are here, after what was asked for already.

        Return inf where nothing is promised.
        """
        if not self.answers(now):
            return size_bytes * 0.0 + inf
        if not self.reads and now - self._heard_at > _STALE_SECONDS:
            if self.measured:
                self._remembered = (self.measured_bytes_per_second, self._latency_seconds)
            self._forget()
        return self._latency_seconds + (self.bytes + size_bytes) / self.bytes_per_second

    def weighed_seconds(self, size_bytes: Numbers, now: float, *, explored: bool) -> Numbers:
        """Return the seconds as `seconds` does, to be compared with recomputing.

        A tier that is not measured now counts as it was measured before, or as slow, if prefetch measures it
        (`explored`). Else it counts as free, because the caller has to measure it.
        """
        promised = self.seconds(size_bytes, now)
        bytes_per_second, latency_seconds = self._remembered
        if self.measured:
            bytes_per_second, latency_seconds = self.measured_bytes_per_second, self._latency_seconds
        known = latency_seconds + (self.bytes + size_bytes) / bytes_per_second
        return np.where(np.isfinite(promised), known if self.measured or explored else 0.0, inf)
