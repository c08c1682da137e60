"""What a process has, sample by sample, and what grew."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path


def count(pid: int, folder: str) -> int:
    """Return the entries of a folder of /proc/PID: its descriptors ("fd"), its threads ("task")."""
    return len(list(Path(f"/proc/{pid}/{folder}").iterdir()))


def private_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1024


def grown(samples: Sequence[object], counts: Mapping[str, int], memory: Mapping[str, float]) -> list[str]:
    """Return what grew from the second quarter of the samples to the last, beyond what is allowed.

    The names are those of fields of a sample. Of counts the maximum counts, of memory the median, in MiB.
    """
    quarter = max(len(samples) // 4, 1)
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    found = [
        f"{name}: {_most(early, name)}, then {_most(late, name)}"
        for name, slack in counts.items()
        if _most(late, name) > _most(early, name) + slack
    ]
    for name, allowed in memory.items():
        rise = statistics.median(getattr(one, name) for one in late) - statistics.median(
            getattr(one, name) for one in early
        )
        if rise > allowed:
            found.append(f"{name}: {rise:.1f} more")
    return found


def _most(samples: Sequence[object], name: str) -> int:
    return max(int(getattr(one, name)) for one in samples)
