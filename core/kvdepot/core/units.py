"""Sizes, durations and rates as people write them: always with a unit ("64GiB", "120s", "50MiB/s").

A number without a unit is refused, except 0, because a reader cannot tell whether 512 means bytes or MiB.
All parsers raise InvalidArgument (a ValueError) that says what is accepted.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

from kvdepot.core.errors import InvalidArgument

SIZE_UNITS_BYTES: Final[dict[str, int]] = {
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "PiB": 1 << 50,
}
DURATION_UNITS_SECONDS: Final[dict[str, Fraction]] = {
    "us": Fraction(1, 1_000_000),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}
_SIZE_BYTES_END: Final = 1 << 63
"""First size that files, messages and Prometheus cannot represent."""
_SHORT_COUNT_END: Final = 100_000
_NUMBER = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,9})?) ?([A-Za-z]*)", re.ASCII)
_SIZES = 'a size such as "64GiB", "4MiB" or "512KiB" (B, KiB, MiB, GiB, TiB, PiB)'
_DURATIONS = 'a duration such as "50ms", "120s", "5m" or "7d" (us, ms, s, m, h, d)'
_RATES = 'a rate such as "50MiB/s" (a size, then /s)'


def parse_size_bytes(text: str | int) -> int:
    """Return `text` in bytes. Fractions are accepted ("1.5GiB") if the result is a whole number of bytes."""
    number, unit = _split(text, _SIZES)
    if not unit:
        return 0
    if unit not in SIZE_UNITS_BYTES:
        raise InvalidArgument(f"{text!r}: unknown unit {unit!r}", advice=f"write {_SIZES}")
    size_bytes = number * SIZE_UNITS_BYTES[unit]
    if size_bytes != int(size_bytes) or size_bytes >= _SIZE_BYTES_END:
        wrong = "is too large" if size_bytes >= _SIZE_BYTES_END else "is not a whole number of bytes"
        raise InvalidArgument(f"{text!r} {wrong}", advice=f"write {_SIZES}")
    return int(size_bytes)


def parse_duration_seconds(text: str | int) -> float:
    """Return `text` in seconds."""
    number, unit = _split(text, _DURATIONS)
    if not unit:
        return 0.0
    if unit not in DURATION_UNITS_SECONDS:
        raise InvalidArgument(f"{text!r}: unknown unit {unit!r}", advice=f"write {_DURATIONS}")
    return float(number * DURATION_UNITS_SECONDS[unit])


def parse_rate_bytes_per_second(text: str | int) -> int:
    """Return `text` in bytes per second; 0 for "0"."""
    if isinstance(text, str) and text.strip() != "0":
        size, slash, second = text.strip().partition("/")
        if not slash or second.strip() != "s":
            raise InvalidArgument(f"{text!r} is not a rate", advice=f"write {_RATES}")
        text = size.rstrip()
        if text == "0":
            return 0
    return parse_size_bytes(text)


def format_size(size_bytes: int) -> str:
    """Return a size in the largest unit that keeps it exact ("64GiB", "1000B"); `parse_size_bytes` reads it back."""
    if size_bytes < 0:
        raise InvalidArgument(f"a size of {size_bytes} bytes is negative")
    for unit, unit_bytes in reversed(SIZE_UNITS_BYTES.items()):
        if size_bytes and size_bytes % unit_bytes == 0:
            return f"{size_bytes // unit_bytes}{unit}"
    return "0B"


def size_text(size_bytes: float) -> str:
    """Return a size for people: two decimals in the largest unit that leaves at least 1 ("3.70 GiB", "512 B")."""
    for unit, unit_bytes in reversed(SIZE_UNITS_BYTES.items()):
        if unit_bytes > 1 and abs(size_bytes) >= unit_bytes:
            return f"{size_bytes / unit_bytes:.2f} {unit}"
    return f"{size_bytes:.0f} B"


def count_text(count: float) -> str:
    """Return a number for people, in thousands, millions or more ("842", "12.4 k", "1.2 M")."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f}"


def short_count_text(count: float) -> str:
    """Return a number of up to five digits as it is, and a longer one as `count_text` does ("99999", "100.0 k")."""
    return f"{count:.0f}" if abs(count) < _SHORT_COUNT_END else count_text(count)


def percent_text(share: float, decimals: int = 0) -> str:
    """Return a part of 1 for people ("38 %", with one decimal "38.1 %")."""
    return f"{100 * share:.{decimals}f} %"


def duration_text(seconds: float) -> str:
    """Return a duration for people, in its two largest units ("15 s", "3 h 12 min", "2 d")."""
    whole = round(seconds)
    for unit, unit_seconds, smaller, smaller_seconds in (
        ("d", 86_400, "h", 3_600), ("h", 3_600, "min", 60), ("min", 60, "s", 1)
    ):  # fmt: skip
        if whole >= unit_seconds:
            rest = whole % unit_seconds // smaller_seconds
            return f"{whole // unit_seconds} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"


def format_duration(seconds: float) -> str:
    """Return a duration in the largest unit in which it is whole, rounded to the microsecond ("2m" for 120 s)."""
    if seconds < 0:
        raise InvalidArgument(f"a duration of {seconds} seconds is negative")
    exact = Fraction(round(seconds * 1_000_000), 1_000_000)
    for unit, unit_seconds in reversed(DURATION_UNITS_SECONDS.items()):
        if exact and exact % unit_seconds == 0:
            return f"{int(exact / unit_seconds)}{unit}"
    return "0s"


def format_rate(bytes_per_second: int) -> str:
    """Return a rate in the largest unit that keeps it exact ("50MiB/s")."""
    return f"{format_size(bytes_per_second)}/s"


def _split(text: str | int, accepted: str) -> tuple[Fraction, str]:
    """Return number and unit. The unit is empty only for 0."""
    match = None if isinstance(text, bool) else _NUMBER.fullmatch(str(text).strip())
    if match is None:
        raise InvalidArgument(f"{text!r} is not a number with a unit", advice=f"write {accepted}")
    number, unit = Fraction(match[1]), match[2]
    if number and not unit:
        raise InvalidArgument(f"{text!r} has no unit", advice=f"write {accepted}")
    return number, unit
