"""What happens in a run, and in which order: drawn from the seed, so that a run's plan can be had again."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

_TOGETHER_SHARE: Final = 0.25
_FAULT_SECONDS_MIN: Final = 0.2
_FAULT_SECONDS_MORE: Final = 4.0
"""Most are short; some outlast the deadline of an I/O operation."""
_LOAD_SECONDS: Final = (0.3, 1.5)
ALONE: Final = "alone"
"""The group of faults that come by themselves."""
QUIET_EVERY: Final = 5
"""Phases, from one look at a quiet depot to the next."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One fault, or two at once: begun one after the other, ended in the same order. Seconds."""

    number: int
    faults: tuple[str, ...]
    load_seconds: float  # before it
    fault_seconds: float
    draw: int  # seeds what the faults themselves choose

    @property
    def quiet(self) -> bool:
        """Whether a look at the quiet depot follows."""
        return self.number % QUIET_EVERY == QUIET_EVERY - 1


def phases(seed: int, groups: Mapping[str, str]) -> Iterator[Phase]:
    """Without end. `groups`: fault -> group. Each comes once before any comes again; two at once are of two groups."""
    rng = random.Random(seed)
    deck: list[str] = []
    number = 0
    while True:
        if not deck:
            deck = rng.sample(sorted(groups), len(groups))
        faults: tuple[str, ...] = (deck.pop(),)
        others = [name for name in sorted(groups) if groups[name] not in (ALONE, groups[faults[0]])]
        if others and groups[faults[0]] != ALONE and rng.random() < _TOGETHER_SHARE:
            faults += (rng.choice(others),)
        seconds = _FAULT_SECONDS_MIN + _FAULT_SECONDS_MORE * rng.random() ** 2
        yield Phase(number, faults, rng.uniform(*_LOAD_SECONDS), seconds, rng.getrandbits(32))
        number += 1
