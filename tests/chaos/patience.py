"""How much longer things may take on a machine that does other things as well."""

from __future__ import annotations

import os
from typing import Final

_LOAD_PER_CPU: Final = 5.0
"""What a run makes by itself, and room: up to it everything has the time that it is given."""
_TIMES_MAX: Final = 10.0


def patience() -> float:
    """At least 1. By the load of the last minute: a wait that lasts asks again and again."""
    try:
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:
        return 1.0
    return min(max(1.0, load / _LOAD_PER_CPU), _TIMES_MAX)
