"""The check of arenas that daemons have left in memory, as `kvdepotd arena list` sees them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvdepot.client.ctl.doctor.findings import Check
from kvdepot.client.ctl.doctor.programs import Program
from kvdepot.client.ctl.doctor.settings import KVDEPOTD, SECONDS_MAX
from kvdepot.core.units import size_text

if TYPE_CHECKING:
    from kvdepot.client.ctl.doctor.findings import Finding
    from kvdepot.client.ctl.doctor.settings import Settings

COMMAND: Final = (*KVDEPOTD, "arena", "list", "--json")


def check_unused_arenas(
    settings: Settings, command: tuple[str, ...] = COMMAND, seconds: float = SECONDS_MAX
) -> Finding:
    """Warn of memory that no daemon uses. The arena of these settings is no such memory: its daemon may start again."""
    check, folder = Check("unused arenas", "ram"), str(Path(settings.arena).parent)
    ended = Program([*command, "--arena-dir", folder]).wait(time.monotonic() + seconds)
    if ended is None or ended.code:
        return check.skipped("`kvdepotd arena list` does not say")
    try:
        arenas = [one for one in ended.parsed() if one["unused"]]
        found = [one for one in arenas if Path(one["path"]).resolve() != Path(settings.arena).resolve()]
    except (KeyError, TypeError):  # another version
        return check.skipped("`kvdepotd arena list` does not say")
    if not found:
        return check.ok("none of this user")
    size = size_text(sum(one["memory_bytes"] for one in found))
    return check.warn(
        f"{len(found)} of this user have {size} of memory, and no daemon", "`kvdepotd arena list`, `arena remove`"
    )
