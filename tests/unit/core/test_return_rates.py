"""The comparison of two rates of return, which moves the exponent of the default policy."""

from __future__ import annotations

from random import Random

import pytest
from kvdepot.core.return_rates import ReturnRates


def seen(few: float, many: float, *, evictions: int = 400, seed: int = 0) -> ReturnRates:
    """Evictions of no use and of five in turn, which come back at these rates."""
    draw = Random(seed)
    rates = ReturnRates()
    for number in range(evictions):
        chance = many if number % 2 else few
        used = rates.evict(5 if number % 2 else 0)
        if draw.random() < chance:
            rates.come_back(used)
    return rates


def test_an_eviction_is_of_many_uses_if_it_had_more_than_the_latest_ones() -> None:
    rates = ReturnRates()
    assert [rates.evict(uses) for uses in (0, 5, 0, 5)] == [0, 1, 0, 1]
    for _ in range(200):
        rates.evict(5)
    assert rates.evict(6) == 1 and rates.evict(4) == 0


@pytest.mark.parametrize("seed", range(5))
def test_the_sign_says_which_come_back_more_often(seed: int) -> None:
    assert seen(0.05, 0.3, seed=seed).errors() > 3.0
    assert seen(0.3, 0.05, seed=seed).errors() < -3.0
    assert abs(seen(0.2, 0.2, seed=seed).errors()) < 3.0


def test_few_evictions_of_one_class_say_nothing_whatever_the_other_one_does() -> None:
    """A start with a fixed rate of return made the smaller class look as if it came back more often."""
    rates = ReturnRates()
    for _ in range(300):
        rates.evict(1)
    assert abs(rates.errors()) < 0.1
    rates.evict(7)
    assert abs(rates.errors()) < 0.2


def test_what_is_forgotten_counts_less() -> None:
    rates = seen(0.05, 0.3)
    before = rates.errors()
    rates.forget(0.1)
    assert 0.0 < rates.errors() < before / 2
    rates.forget(0.0)
    assert rates.errors() == 0.0


def test_rates_above_one_are_no_fault() -> None:
    """Parts of one unit may come back one after the other."""
    rates = ReturnRates()
    rates.evict(3)
    for _ in range(50):
        rates.come_back(1)
    assert rates.errors() > 0.0
