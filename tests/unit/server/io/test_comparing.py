"""The rule of the audit, by element type: noise passes, other bytes do not (design.md#audit, ADR 0037)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from kvdepot.core.elements import ELEMENT_BYTES, OPAQUE, ElementRun
from kvdepot.server.io import comparing
from kvdepot.server.io.comparing import Comparison, compare, decoded

NUMBERS = 64 * 1024
FLOATS = tuple(name for name in ELEMENT_BYTES if name != "int8")
SIXTEEN_UP = ("bfloat16", "float16", "float32", "float64")
Values = npt.NDArray[np.float64]


def values(seed: int = 0, numbers: int = NUMBERS) -> Values:
    """As keys and values are: channels of different sizes."""
    random = np.random.default_rng(seed)
    found: Values = random.standard_normal(numbers) * np.tile(np.exp(random.standard_normal(128)), numbers // 128)
    return found


def encoded(numbers: Values, dtype: str) -> bytes:
    if dtype == "int8":
        return np.clip(np.round(numbers * 24), -127, 127).astype(np.int8).tobytes()
    raw: bytes = torch.from_numpy(numbers).to(getattr(torch, dtype)).view(torch.uint8).numpy().tobytes()
    return raw


def compared(stored: bytes, recomputed: bytes, *runs: ElementRun) -> Comparison:
    arena = memoryview(stored + recomputed)
    return compare(arena, [(0, len(stored))], [(len(stored), len(recomputed))], runs)


def whole(stored: bytes, recomputed: bytes, dtype: str) -> Comparison:
    return compared(stored, recomputed, ElementRun(dtype, len(stored)))


def noisy(of: Values, share: float, seed: int = 9) -> Values:
    """As a sum in another order is: off by a share of what its channel usually is."""
    sizes = np.tile(np.sqrt((of.reshape(-1, 128) ** 2).mean(0)), len(of) // 128)
    return of + share * sizes * np.random.default_rng(seed).standard_normal(len(of))


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_code_is_read_as_torch_reads_it(dtype: str) -> None:
    size = ELEMENT_BYTES[dtype]
    raw = np.arange(256, dtype=np.uint8) if size == 1 else np.random.default_rng(1).integers(0, 256, 1 << 14, np.uint8)
    with np.errstate(invalid="ignore"):  # signalling NaN
        ours = decoded(raw, dtype).astype(np.float64)
    torchs = torch.from_numpy(raw.copy()).view(getattr(torch, dtype)).to(torch.float64).numpy()
    assert np.array_equal(ours, torchs, equal_nan=True)


def test_every_comparable_type_has_a_tolerance_below_what_is_other_bytes() -> None:
    assert comparing.TOLERANCE.keys() == ELEMENT_BYTES.keys()
    assert max(comparing.TOLERANCE.values()) < comparing.BROKEN < 1


@pytest.mark.parametrize("dtype", ELEMENT_BYTES)
def test_equal_bytes_pass_whatever_they_are(dtype: str) -> None:
    noise = np.random.default_rng(2).bytes(NUMBERS)
    assert whole(noise, noise, dtype) == Comparison(drifted=False)


@pytest.mark.parametrize("dtype", ELEMENT_BYTES)
@pytest.mark.parametrize("share", [0.001, 0.02, 0.1])
def test_recomputing_noise_passes(dtype: str, share: float) -> None:
    """Measured in 20 layers of bfloat16: at most 0.023 (ADR 0037)."""
    found = whole(encoded(values(), dtype), encoded(noisy(values(), share), dtype), dtype)
    assert not found.drifted, found


@pytest.mark.parametrize("dtype", ELEMENT_BYTES)
def test_a_few_tokens_that_went_to_another_expert_pass(dtype: str) -> None:
    """In one slice of forty each token is a quarter off, and the rest of them a little."""
    other = noisy(values(), 0.01).reshape(-1, 1024)
    other[::40] = noisy(values(), 0.25, 5).reshape(-1, 1024)[::40]
    assert not whole(encoded(values(), dtype), encoded(other.reshape(-1), dtype), dtype).drifted


@pytest.mark.parametrize("dtype", ELEMENT_BYTES)
def test_another_chunks_bytes_are_drift(dtype: str) -> None:
    found = whole(encoded(values(), dtype), encoded(values(1), dtype), dtype)
    assert found.drifted and found.worst > 0.9


@pytest.mark.parametrize("dtype", ELEMENT_BYTES)
def test_another_chunks_bytes_are_drift_where_all_keys_are_nearly_alike(dtype: str) -> None:
    """A bias that all tokens share hides the keys' difference, not the values'."""

    def object_of(seed: int) -> bytes:
        keys = 2 + 0.05 * values(seed)
        return encoded(np.concatenate((keys, 0.5 * values(seed + 10))), dtype)

    assert whole(object_of(0), object_of(1), dtype).drifted


@pytest.mark.parametrize("dtype", ELEMENT_BYTES)
@pytest.mark.parametrize("at", [0, 1111])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_page_of_zeros_is_drift(dtype: str, at: int, swapped: bool) -> None:
    right = encoded(values(), dtype)
    wrong = right[: at * 8] + bytes(4096) + right[at * 8 + 4096 :]
    found = whole(wrong, right, dtype) if swapped else whole(right, wrong, dtype)
    assert found.drifted and found.worst == 1


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("swapped", [False, True])
def test_something_that_is_no_number_is_drift(dtype: str, swapped: bool) -> None:
    right, wrong = values(), values()
    wrong[12345] = np.nan
    pair = (encoded(wrong, dtype), encoded(right, dtype)) if swapped else (encoded(right, dtype), encoded(wrong, dtype))
    found = whole(*pair, dtype)
    assert found.drifted and found.worst == np.inf


@pytest.mark.parametrize("dtype", SIXTEEN_UP)
@pytest.mark.parametrize("swapped", [False, True])
def test_one_flipped_upper_bit_of_an_exponent_is_drift(dtype: str, swapped: bool) -> None:
    right = encoded(values(), dtype)
    wrong = bytearray(right)
    number = int(np.argmax((abs(values()) > 0.5) & (abs(values()) < 1.9)))
    wrong[number * ELEMENT_BYTES[dtype] + ELEMENT_BYTES[dtype] - 1] ^= 0x40
    pair = (bytes(wrong), right) if swapped else (right, bytes(wrong))
    assert whole(*pair, dtype).drifted


@pytest.mark.parametrize("dtype", ELEMENT_BYTES)
def test_blocks_in_another_order_are_drift(dtype: str) -> None:
    right = encoded(values(), dtype)
    half = len(right) // 2
    assert whole(right, right[half:] + right[:half], dtype).drifted


def test_one_drifted_layer_of_many_is_drift() -> None:
    right = [encoded(values(seed), "bfloat16") for seed in range(16)]
    wrong = [*right[:5], encoded(noisy(values(5), 0.5), "bfloat16"), *right[6:]]
    found = compared(b"".join(right), b"".join(wrong), ElementRun("bfloat16", 2 * NUMBERS, 16))
    assert found.drifted
    assert found.slices == found.beyond == NUMBERS // 1024  # the others are equal: nothing to measure


def test_a_state_of_two_types_is_read_part_by_part() -> None:
    """Mamba: a convolution in bfloat16, then a scan in float32; and a last slice that is short."""
    conv, scan = encoded(values(0, 384), "bfloat16"), encoded(values(1, 4096), "float32")
    runs = (ElementRun("bfloat16", len(conv)), ElementRun("float32", len(scan)))
    near = encoded(noisy(values(0, 384), 0.02), "bfloat16") + encoded(noisy(values(1, 4096), 0.02), "float32")
    found = compared(conv + scan, near, *runs)
    assert not found.drifted and found.slices == 1 + 8
    assert compared(conv + scan, conv + scan[4096:] + scan[:4096], *runs).drifted
    assert compared(conv + scan, bytes(len(conv)) + scan, *runs).drifted


def test_what_nearly_cancels_out_is_measured_by_its_part() -> None:
    """A head that is all but dead: there only noise is left, and that is 1 away from itself."""
    dead = 1e-4 * values(3, 2048)
    other = 1e-4 * values(4, 2048)
    living = values()
    assert not whole(
        encoded(np.concatenate((living, dead)), "bfloat16"), encoded(np.concatenate((living, other)), "bfloat16"),
        "bfloat16",
    ).drifted  # fmt: skip


def test_opaque_bytes_and_types_of_later_versions_are_not_looked_at() -> None:
    right, wrong = encoded(values(), "bfloat16"), encoded(values(1), "bfloat16")
    for dtype in (OPAQUE, "float4_e2m1"):
        assert whole(right, wrong, dtype) == Comparison(drifted=False)
        runs = (ElementRun(dtype, len(right)), ElementRun("bfloat16", len(right)))
        assert not compared(right + right, wrong + right, *runs).drifted
        assert compared(right + right, right + wrong, *runs).drifted


def test_objects_are_put_together_from_their_extents() -> None:
    stored, near = encoded(values(), "float16"), encoded(noisy(values(), 0.01), "float16")
    arena = memoryview(near[4096:] + stored[:8192] + near[:4096] + stored[8192:])
    size = len(stored)
    recomputed = [(size + 4096, 4096), (0, size - 4096)]
    extents: list[Any] = [(size - 4096, 8192), (size + 8192, size - 8192)]
    found = compare(arena, extents, recomputed, (ElementRun("float16", size),))
    assert found == whole(stored, near, "float16") and not found.drifted
    assert compare(arena, extents, recomputed[::-1], (ElementRun("float16", size),)).drifted
