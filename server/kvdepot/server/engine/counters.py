"""Counters that only ever grow, by name and label."""

from __future__ import annotations


class Counters:
    """Monotonic figures; names are `family` or `family.label` (label: a reason, an outcome)."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}

    def add(self, name: str, amount: float = 1) -> None:
        """Raises ValueError when `amount` is negative: a counter never decreases (row P10)."""
        if amount < 0:
            raise ValueError(f"counter {name}: {amount} would make it decrease")
        self._values[name] = self._values.get(name, 0) + amount

    def get(self, name: str) -> float:
        return self._values.get(name, 0)

    def snapshot(self) -> dict[str, float]:
        return dict(self._values)
