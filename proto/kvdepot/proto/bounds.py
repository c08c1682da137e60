"""Checks of what came over the wire; each failure names the field and the limit."""

from __future__ import annotations

from math import inf

from kvdepot.core.errors import InvalidArgument
from kvdepot.core.limits import check_limit


def bad(field: str, why: str) -> InvalidArgument:
    return InvalidArgument(f"{field}: {why}")


def check_at_most(field: str, count: int, count_max: int) -> None:
    """Raises LimitExceeded."""
    check_limit(field, count, count_max)


def check_bytes(field: str, value: bytes, length: int) -> None:
    if len(value) != length:
        raise bad(field, f"{len(value)} bytes, not {length}")


def check_packed(field: str, value: bytes, entry_bytes: int, count_max: int) -> int:
    """Returns the number of entries of `entry_bytes` each."""
    count, rest = divmod(len(value), entry_bytes)
    if rest:
        raise bad(field, f"{len(value)} bytes are no multiple of an entry's {entry_bytes}")
    check_at_most(field, count, count_max)
    return count


def check_values(field: str, value: bytes, allowed: bytes) -> None:
    strange = value.translate(None, allowed)
    if strange:
        raise bad(field, f"{strange[0]} is none of {list(allowed)}")


def check_seconds(field: str, value: float) -> float:
    if not 0 <= value < inf:
        raise bad(field, f"{value} is no finite number of seconds from 0 up")
    return value


def check_text(field: str, value: str, bytes_max: int) -> None:
    check_limit(f"{field} bytes", len(value.encode("utf-8", "surrogatepass")), bytes_max)
