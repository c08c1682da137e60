"""Token buckets: a burst, then a rate, for each key on its own (S4, I4)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvdepot.server.platform.token_bucket import TokenBuckets


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.requirement("S4", "I4")
@given(
    st.lists(st.tuples(st.integers(0, 2), st.floats(0, 3)), max_size=60), st.integers(1, 4),
    st.sampled_from([0.5, 1.0, 4.0]),
)  # fmt: skip
def test_a_key_never_takes_more_than_a_burst_and_what_its_rate_gives(
    tries: list[tuple[int, float]], burst: int, per_second: float
) -> None:
    clock = Clock()
    buckets = TokenBuckets(per_second=per_second, burst=burst, clock=clock)
    tokens = dict.fromkeys(range(3), float(burst))
    for key, pause in tries:
        clock.now += pause
        tokens = {one: min(count + pause * per_second, float(burst)) for one, count in tokens.items()}
        if abs(tokens[key] - 1) < 1e-6:
            clock.now += 1e-3  # neither rounds up
            tokens = {one: min(count + 1e-3 * per_second, float(burst)) for one, count in tokens.items()}
        assert buckets.take(key) is (tokens[key] >= 1)
        tokens[key] -= tokens[key] >= 1


def test_a_full_bucket_is_forgotten() -> None:
    clock = Clock()
    buckets = TokenBuckets(per_second=1, burst=4, clock=clock)
    for key in range(100):
        assert buckets.take(key)
    clock.now += 1.5
    assert buckets.take(0)
    assert list(buckets._full_at) == [0]
