"""Sizes, durations and rates as people write them: always with a unit ("64GiB", "120s", "50MiB/s").

A number without a unit is refused, except 0, because nobody can see whether 512 means bytes or MiB.
All parsers raise InvalidArgument (a ValueError), saying what is accepted.
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
"""What files, messages and Prometheus' tools have room for."""
_NUMBER = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,9})?) ?([A-Za-z]*)", re.ASCII)
_SIZES = 'a size such as "64GiB", "4MiB" or "512KiB" (B, KiB, MiB, GiB, TiB, PiB)'
_DURATIONS = 'a duration such as "50ms", "120s", "5m" or "7d" (us, ms, s, m, h, d)'
_RATES = 'a rate such as "50MiB/s" (a size, then /s)'


def parse_size_bytes(text: str | int) -> int:
    """`text` in bytes. "1.5GiB" is fine as long as it is a whole number of bytes."""
    number, unit = _split(text, _SIZES)
    if not unit:
        return 0
    if unit not in SIZE_UNITS_BYTES:
        raise InvalidArgument(f"{text!r}: unit {unit!r} is not known", advice=f"write {_SIZES}")
    size_bytes = number * SIZE_UNITS_BYTES[unit]
    if size_bytes != int(size_bytes) or size_bytes >= _SIZE_BYTES_END:
        wrong = "is more than can be" if size_bytes >= _SIZE_BYTES_END else "is no whole number of bytes"
        raise InvalidArgument(f"{text!r} {wrong}", advice=f"write {_SIZES}")
    return int(size_bytes)


def parse_duration_seconds(text: str | int) -> float:
    number, unit = _split(text, _DURATIONS)
    if not unit:
        return 0.0
    if unit not in DURATION_UNITS_SECONDS:
        raise InvalidArgument(f"{text!r}: unit {unit!r} is not known", advice=f"write {_DURATIONS}")
    return float(number * DURATION_UNITS_SECONDS[unit])


def parse_rate_bytes_per_second(text: str | int) -> int:
    if isinstance(text, str) and text.strip() != "0":
        size, slash, second = text.strip().partition("/")
        if not slash or second.strip() != "s":
            raise InvalidArgument(f"{text!r} is no rate", advice=f"write {_RATES}")
        text = size.rstrip()
        if text == "0":
            return 0
    return parse_size_bytes(text)


def format_size(size_bytes: int) -> str:
    """The largest unit that keeps the value exact ("64GiB", "1000B"); `parse_size_bytes` takes it back."""
    if size_bytes < 0:
        raise InvalidArgument(f"a size of {size_bytes} bytes is negative")
    for unit, unit_bytes in reversed(SIZE_UNITS_BYTES.items()):
        if size_bytes and size_bytes % unit_bytes == 0:
            return f"{size_bytes // unit_bytes}{unit}"
    return "0B"


def format_size_rounded(size_bytes: float) -> str:
    """For people: at most one decimal in the largest unit that leaves at least 1 ("3.7GiB")."""
    for unit, unit_bytes in reversed(SIZE_UNITS_BYTES.items()):
        if abs(size_bytes) >= unit_bytes:
            return f"{size_bytes / unit_bytes:.1f}".removesuffix(".0") + unit
    return f"{size_bytes:.0f}B"


def format_duration(seconds: float) -> str:
    """The largest unit in which the value is whole, to the microsecond ("120s" is "2m")."""
    if seconds < 0:
        raise InvalidArgument(f"a duration of {seconds} seconds is negative")
    exact = Fraction(round(seconds * 1_000_000), 1_000_000)
    for unit, unit_seconds in reversed(DURATION_UNITS_SECONDS.items()):
        if exact and exact % unit_seconds == 0:
            return f"{int(exact / unit_seconds)}{unit}"
    return "0s"


def format_rate(bytes_per_second: int) -> str:
    return f"{format_size(bytes_per_second)}/s"


def _split(text: str | int, accepted: str) -> tuple[Fraction, str]:
    """Number and unit; the unit is empty for 0 only."""
    match = None if isinstance(text, bool) else _NUMBER.fullmatch(str(text).strip())
    if match is None:
        raise InvalidArgument(f"{text!r} is not understood", advice=f"write {accepted}")
    number, unit = Fraction(match[1]), match[2]
    if number and not unit:
        raise InvalidArgument(f"{text!r} has no unit", advice=f"write {accepted}")
    return number, unit
