"""Sizes, durations and rates carry units."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvdepot.core import units
from kvdepot.core.errors import InvalidArgument


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("64GiB", 64 << 30),
        ("4MiB", 4 << 20),
        (" 512 KiB ", 512 << 10),
        ("1.5GiB", 3 << 29),
        ("7B", 7),
        ("2TiB", 2 << 40),
        ("1PiB", 1 << 50),
        ("0", 0),
        (0, 0),
        ("0MiB", 0),
    ],
)
def test_sizes_are_read(text: str | int, size_bytes: int) -> None:
    assert units.parse_size_bytes(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        "64",
        64,
        "64GB",
        "64gib",
        "",
        "GiB",
        "-1GiB",
        "0.3B",
        "1e3B",
        "1,5GiB",
        "0x10B",
        True,
        "64 GiB GiB",
        "\uff11GiB",
        "8192PiB",
    ],
)
def test_sizes_without_a_known_unit_are_refused(text: str | int) -> None:
    with pytest.raises(InvalidArgument, match="64GiB"):  # the message shows what is accepted
        units.parse_size_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("120s", 120.0), ("50ms", 0.05), ("5m", 300.0), ("7d", 604800.0), ("1.5h", 5400.0), ("10us", 1e-5), ("0", 0.0)],
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert units.parse_duration_seconds(text) == seconds


@pytest.mark.parametrize("text", ["120", 5, "5min", "-5s", "s", "5M", "1d2h", False])
def test_durations_without_a_known_unit_are_refused(text: str | int) -> None:
    with pytest.raises(InvalidArgument, match="120s"):
        units.parse_duration_seconds(text)


@pytest.mark.parametrize(("text", "rate"), [("50MiB/s", 50 << 20), ("1 KiB / s", 1024), ("0", 0), (0, 0), ("0/s", 0)])
def test_rates_are_read(text: str | int, rate: int) -> None:
    assert units.parse_rate_bytes_per_second(text) == rate


@pytest.mark.parametrize("text", ["50MiB", "50/s", "50MiB/m", "/s", 50])
def test_rates_without_a_unit_are_refused(text: str | int) -> None:
    with pytest.raises(InvalidArgument, match="write a"):
        units.parse_rate_bytes_per_second(text)


@given(st.integers(0, 1 << 62))
def test_a_formatted_size_or_rate_reads_back(size_bytes: int) -> None:
    assert units.parse_size_bytes(units.format_size(size_bytes)) == size_bytes
    assert units.parse_rate_bytes_per_second(units.format_rate(size_bytes)) == size_bytes


@given(st.integers(0, 10**12))
def test_a_formatted_duration_reads_back_to_the_microsecond(microseconds: int) -> None:
    text = units.format_duration(microseconds / 1e6)
    assert round(units.parse_duration_seconds(text) * 1e6) == microseconds


def test_formats_take_the_largest_fitting_unit() -> None:
    assert units.format_size(64 << 30) == "64GiB"
    assert units.format_size(1000) == "1000B"
    assert units.format_size(0) == "0B"
    assert units.format_duration(120) == "2m"
    assert units.format_duration(0.05) == "50ms"
    assert units.format_duration(0) == "0s"
    assert units.size_text(3_972_844_748) == "3.70 GiB"
    assert units.size_text(2 << 20) == "2.00 MiB"
    assert units.size_text(0) == "0 B"


def test_negative_values_are_not_formatted() -> None:
    with pytest.raises(InvalidArgument, match="negative"):
        units.format_size(-1)
    with pytest.raises(InvalidArgument, match="negative"):
        units.format_duration(-0.5)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.6, "1 min"),
        (75, "1 min 15 s"),
        (3600, "1 h"),
        (11_520, "3 h 12 min"),
        (86_399, "23 h 59 min"),
        (187_200, "2 d 4 h"),
    ],
)
def test_durations_for_people_have_two_units(seconds: float, text: str) -> None:
    assert units.duration_text(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (99_999, "99999"), (100_000, "100.0 k"), (116_939_000.0, "116.9 M"), (-3, "-3")]
)
def test_counts_of_up_to_five_digits_are_exact(count: float, text: str) -> None:
    assert units.short_count_text(count) == text


def test_a_part_is_a_percentage_with_a_space() -> None:
    assert (units.percent_text(0.3812), units.percent_text(0.3812, 1)) == ("38 %", "38.1 %")


def test_a_printed_size_can_be_typed() -> None:
    assert units.parse_size_bytes(units.size_text(200 << 30)) == 200 << 30
