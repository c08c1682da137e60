"""Which peers have most of what is asked for here, by their summaries (ADR 85).

A name that was asked for lately has a weight, which halves every 2.5 minutes. The most useful place is the one whose
names weigh most. The next one is the one that adds most to it, and so on: a copy of the first one adds nothing.

Nobody can use a chunk without those before it. So a place has a name of a lookup only if it has all that come before
it in this lookup. What nobody has seems to be somewhere by chance, but rarely more than its first name.
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
_RUN_MIN: Final = 1e-3
_WEIGHT_MIN: Final = 0.05
"""What adds less is not worth a member: less than one name that was asked for ten minutes ago."""
_CHANCE_MAX: Final = 0.001
"""Of a lookup of what nobody has, to be sent to a place all the same."""
_NONE: Final = -1
_DEPTH_MAX: Final = 63
"""A longer path counts as several, so that a summary is taken in with so few steps."""
Weights = npt.NDArray[np.float32]


def ranked(
    has: Weights, weights: Weights, depths: npt.NDArray[np.uint8], by_chance: Weights, members: Sequence[int], most: int
) -> list[int]:  # fmt: skip
    """Return columns of `has` (0 or 1 for each word and place) that add something, the most useful one first.

    `depths`: how many words come before each one, and must be there, too. `by_chance`: the part of first words that
    only seems to be in a place. Of equal ones the first column is returned.
    """
    found: list[int] = []
    left = weights.copy()
    kept = np.ones(has.shape[1], np.float32)
    kept[list(members)] = KEPT
    chance = by_chance ** np.arange(1, 1 + int(depths.max(initial=0)) + 1, dtype=np.float32)[:, None]  # by depth
    run = np.maximum(1.0 - by_chance, _RUN_MIN)  # a word that is there by chance may have more after it
    while len(found) < most:
        expected = np.bincount(depths, left, len(chance)) @ chance
        deviation = np.sqrt(np.bincount(depths, left * left, len(chance)) @ chance) / run
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
    """The names that were asked for lately, and which of them each place may have. A place is a column.

    A name follows another one: the one before it in the lookup that named it first.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._row_of: OrderedDict[int, int] = OrderedDict()  # by word, the one that was asked for last at the end
        self._words: list[int] = []  # by row
        self._asked_at = np.full(WORDS_MAX, -np.inf)
        self._has = np.zeros((WORDS_MAX, PLACES_MAX), np.float32)  # with all that it follows
        self._before = np.full(WORDS_MAX, _NONE, np.int32)  # by row: the row of what it follows
        self._depths = np.zeros(WORDS_MAX, np.uint8)
        self._by_chance = np.zeros(PLACES_MAX, np.float32)
        self._filters: dict[int, Filter] = {}

    def want(self, words: Sequence[int]) -> None:
        """Note that a lookup asks for these, the first ones of its prompt first."""
        rows: list[int] = []
        new: list[int] = []
        before = _NONE
        for word in words:
            row = self._row_of.get(word)
            if row is None:
                row = self._row()
                self._words[row] = word
                self._row_of[word] = row
                self._follow(row, before)
                new.append(len(rows))
            self._row_of.move_to_end(word)
            self._asked_at[row] = self._clock()
            rows.append(row)
            before = row
        if not new:
            return
        has = self._has[rows]
        has[new] = 0.0
        added = [words[at] for at in new]
        for column, known in self._filters.items():
            has[new, column] = known.has(added)
        for at in new:
            if self._before[rows[at]] != _NONE:
                has[at] *= has[at - 1]
        self._has[rows] = has

    def knows(self, column: int, known: Filter | None) -> None:
        """Note the summary of a place. None: it has none any more."""
        self._filters.pop(column, None)
        self._has[:, column] = self._by_chance[column] = 0.0
        if known is not None:
            self._filters[column] = known
            self._by_chance[column] = known.by_chance
            count = len(self._words)
            has = np.array(known.has(self._words), np.float32)
            depths, before = self._depths[:count], self._before[:count]
            for depth in range(1, int(depths.max(initial=0)) + 1):
                rows = np.flatnonzero((depths == depth) & (before != _NONE))
                has[rows] *= has[before[rows]]
            self._has[:count, column] = has

    def best(self, columns: Sequence[int], members: Sequence[int], most: int) -> list[tuple[int, int]]:
        """Return those of these columns that are worth asking, and about how many names each of them adds.

        The most useful one is first; of equal ones the first of `columns`.
        """
        count, at = len(self._words), list(columns)
        age = self._clock() - self._asked_at[:count]
        weights = np.where(age < WINDOW_SECONDS, 0.5 ** (age / HALF_SECONDS), 0.0).astype(np.float32)
        has = self._has[:count][:, at]
        members = [at.index(one) for one in members]
        found = ranked(has, weights, self._depths[:count], self._by_chance[at], members, most)
        left = weights > 0.0
        best = []
        for one in found:
            best.append((at[one], int((has[:, one] * left).sum())))
            left &= has[:, one] == 0.0
        return best

    def _follow(self, row: int, before: int) -> None:
        follows = before != _NONE and self._depths[before] < _DEPTH_MAX
        self._before[row] = before if follows else _NONE
        self._depths[row] = self._depths[before] + 1 if follows else 0

    def _row(self) -> int:
        """Return a row for another word: a free one, or that of the word that was asked for first."""
        if len(self._words) < WORDS_MAX:
            self._words.append(0)
            return len(self._words) - 1
        row = self._row_of.popitem(last=False)[1]
        after = np.flatnonzero(self._before == row)
        self._before[after] = _NONE
        self._depths[after] = 0
        return row
