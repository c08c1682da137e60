"""Which peers have most of what is asked for here, by their summaries (ADR 85).

A name that was asked for lately has a weight, which halves every 2.5 minutes. The most useful place is the one whose
names weigh most. The next one is the one that adds most to it, and so on: a copy of the first one adds nothing.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from kvdepot.server.io.peer_summary import Filter
from kvdepot.server.io.scout_wire import PLACES_MAX

WORDS_MAX: Final = 8_192
"""Names that are remembered, the latest ones."""
HALF_SECONDS: Final = 150.0
WINDOW_SECONDS: Final = 600.0
"""A name that was asked for earlier does not count."""
KEPT: Final = 1.25
"""What a member has counts so much more: it is not replaced for a small gain."""
_DEVIATIONS: Final = 3.0
"""So many standard deviations of what is there by chance do not count either."""
_WEIGHT_MIN: Final = 0.05
"""What adds less is not worth a member: less than one name that was asked for ten minutes ago."""
_CHANCE_MAX: Final = 0.001
"""Of a lookup of what nobody has, to be sent to a place all the same."""
Weights = npt.NDArray[np.float32]


def ranked(has: Weights, weights: Weights, by_chance: Weights, members: Sequence[int], most: int) -> list[int]:
    """Return columns of `has` (0 or 1 for each word and place) that add something, the most useful one first.

    `by_chance`: the part of all words that only seems to be in a place. Of equal ones the first column is returned.
    """
    found: list[int] = []
    left = weights.copy()
    kept = np.ones(has.shape[1], np.float32)
    kept[list(members)] = KEPT
    while len(found) < most:
        expected, deviation = by_chance * left.sum(), np.sqrt(by_chance * (left @ left))
        adds = (left @ has - expected - _DEVIATIONS * deviation) * kept
        adds[found] = 0.0
        best = int(adds.argmax()) if len(adds) else 0
        if not len(adds) or adds[best] < _WEIGHT_MIN:
            break
        found.append(best)
        left = left * (1.0 - has[:, best])
    return found


def leading(filters: Sequence[Filter], words: list[int]) -> list[tuple[int, int]]:
    """Return which filters have the first of these words, and how many of the first; the one with most first.

    A filter with so few that one of them all may have them by chance does not count.
    """
    found = ((at, known.leading(words)) for at, known in enumerate(filters))
    sure = [(at, count) for at, count in found if len(filters) * filters[at].by_chance ** count < _CHANCE_MAX]
    return sorted(sure, key=lambda one: -one[1])


class Wanted:
    """The names that were asked for lately, and which of them each place may have. A place is a column."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._row_of: OrderedDict[int, int] = OrderedDict()  # by word, the one that was asked for last at the end
        self._words: list[int] = []  # by row
        self._asked_at = np.full(WORDS_MAX, -np.inf)
        self._has = np.zeros((WORDS_MAX, PLACES_MAX), np.float32)
        self._by_chance = np.zeros(PLACES_MAX, np.float32)
        self._filters: dict[int, Filter] = {}

    def want(self, words: Sequence[int]) -> None:
        """Note that a lookup asks for these."""
        new = {}
        for word in words:
            row = self._row_of.get(word)
            if row is None:
                row = new[word] = self._row()
                self._words[row] = word
                self._row_of[word] = row
            self._row_of.move_to_end(word)
            self._asked_at[row] = self._clock()
        rows = list(new.values())
        self._has[rows] = 0.0
        for column, known in self._filters.items():
            self._has[rows, column] = known.has(list(new))

    def knows(self, column: int, known: Filter | None) -> None:
        """Note the summary of a place. None: it has none any more."""
        self._filters.pop(column, None)
        self._has[:, column] = self._by_chance[column] = 0.0
        if known is not None:
            self._filters[column] = known
            self._by_chance[column] = known.by_chance
            self._has[: len(self._words), column] = known.has(self._words)

    def best(self, columns: Sequence[int], members: Sequence[int], most: int) -> list[tuple[int, int]]:
        """Return those of these columns that are worth asking, and about how many names each of them adds.

        The most useful one is first; of equal ones the first of `columns`.
        """
        count, at = len(self._words), list(columns)
        age = self._clock() - self._asked_at[:count]
        weights = np.where(age < WINDOW_SECONDS, 0.5 ** (age / HALF_SECONDS), 0.0).astype(np.float32)
        has = self._has[:count][:, at]
        found = ranked(has, weights, self._by_chance[at], [at.index(one) for one in members], most)
        left = weights > 0.0
        best = []
        for one in found:
            best.append((at[one], int((has[:, one] * left).sum())))
            left &= has[:, one] == 0.0
        return best

    def _row(self) -> int:
        """Return a row for another word: a free one, or that of the word that was asked for first."""
        if len(self._words) < WORDS_MAX:
            self._words.append(0)
            return len(self._words) - 1
        return self._row_of.popitem(last=False)[1]
