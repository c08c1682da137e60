"""What the daemon's configuration means, as `kvdepotd check-config --json` says it.

That program knows the file's keys, their defaults, the environment over them, and the arena that follows; nothing of it
is known here a second time.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvdepot.client.ctl.doctor.findings import HOST, Check
from kvdepot.client.ctl.doctor.programs import Program

if TYPE_CHECKING:
    from kvdepot.client.ctl.doctor.findings import Finding
    from kvdepot.client.ctl.doctor.host import Host

UNIT_CONFIG: Final = "/etc/kvdepot/kvdepot.toml"
"""What the packaged unit serves."""
SECONDS_MAX: Final = 30.0
"""Of a program that imports all of the daemon."""
KVDEPOTD: Final = (sys.executable, "-P", "-m", "kvdepot.server.daemon.app")
"""`-P`: Python would import from the current directory first, in which another user may have placed a module."""
COMMAND: Final = (*KVDEPOTD, "check-config", "--json")
_CHECK: Final = Check("configuration", HOST)
_REFUSED: Final = "kvdepotd: "


@dataclass(frozen=True, slots=True)
class Place:
    """A tier's directory. `kind`: ram, disk or shared. `needed_bytes`: what all its files take when it is full.

    `held`: pattern of those that lie there already; empty where that would take too long to count. `sealed`: the
    arena's data lies in memory without a name.
    """

    name: str
    kind: str
    path: str
    needed_bytes: int
    held: str = ""
    sealed: bool = False
    on_root_filesystem: bool = False
    is_of_all_users: bool = False  # the daemon creates a directory of its user in it
    keyed: bool = False  # objects have MACs


@dataclass(frozen=True, slots=True)
class Settings:
    """`mode` of the sockets; `group_id` -1: the daemon's own. `metrics` empty: off."""

    file: str
    capacity_bytes: int
    places: tuple[Place, ...]  # RAM first
    listen: tuple[str, ...] = ()
    mode: int = 0o660
    group_id: int = -1
    metrics: str = ""
    note: str = ""
    arena: str = ""  # path of its tables
    uses_nixl: bool = False

    @property
    def ram(self) -> Place:
        return self.places[0]


def config_file(host: Host, given: str | None) -> str | None:
    """None: the embedded default."""
    if given is not None:
        return given
    return str(host.path(UNIT_CONFIG)) if host.path(UNIT_CONFIG).exists() else None


def read_settings(
    file: str | None, command: tuple[str, ...] = COMMAND, seconds: float = SECONDS_MAX
) -> tuple[Settings | None, Finding]:
    """None with the reason where there are none."""
    ended = Program([*command, *([file] if file else [])]).wait(time.monotonic() + seconds)
    if ended is None:
        return None, _CHECK.fail(
            f"`kvdepotd check-config` was not over within {seconds:g} s",
            "a path in the configuration lies on a mount that hangs: see to the mount, or name another path",
        )
    if ended.code and not ended.output:
        lines = ended.errors.strip().splitlines()
        reason = (lines or ["no reason given"])[-1]
        if reason.startswith(_REFUSED):
            reasons = [line.removeprefix(_REFUSED) for line in lines if line.startswith(_REFUSED)]
            return None, _CHECK.fail(
                "; ".join(reasons), "correct it; `kvdepotd check-config FILE` says whether it will do"
            )
        return None, _CHECK.skipped(f"kvdepotd does not run here ({reason}): install kvdepot[server]")
    facts = ended.parsed()
    try:
        settings = decode(facts)
    except (KeyError, TypeError, AttributeError):  # AttributeError: a list has no `get`
        said = (ended.output.strip().splitlines() or ["nothing"])[0]
        return None, _CHECK.fail(
            f"`kvdepotd check-config` does not answer as this version's does: {said[:80]}",
            "install kvdepot[server] of the version of kvdepotctl",
        )
    if reason := facts.get("refused"):
        return settings, _refused(reason, by_permissions=facts["refused_by_permissions"])
    if settings.note:
        return settings, _CHECK.warn(f"{settings.file}: {settings.note}", "make room, or name a tier in a file")
    return settings, _CHECK.ok(f"{settings.file}: good")


def _refused(reason: str, *, by_permissions: bool) -> Finding:
    """Return the finding for a file that `serve` refuses. If only permissions are missing, the file is good."""
    if by_permissions:
        return _CHECK.ok(f"good; uid {os.geteuid()} could not serve it: {reason}")
    return _CHECK.fail(reason, "correct it; `kvdepotd check-config FILE` says whether it will do")


def decode(facts: Any) -> Settings:
    """From `kvdepot.server.config.facts`."""
    arena = Path(facts["ram"]["arena_path"])
    # Of any user who runs the daemon: the name has the uid in its middle. What is small next to it, too.
    held = "-".join((arena.name.split("-")[0], "*", f"{arena.name.split('-')[-1]}*"))
    folder, shared = facts["ram"]["created_in"] or str(arena.parent), bool(facts["ram"]["created_in"])
    file_bytes, sealed = facts["ram"]["arena_file_bytes"], facts["ram"]["sealed"]
    ram = Place("ram", "ram", folder, file_bytes, held, sealed=sealed, is_of_all_users=shared)
    tiers = (
        Place(
            one["name"], one["kind"], one["path"], one["capacity_bytes"],
            held="*" if one["kind"] == "disk" else "", on_root_filesystem=one["on_root_filesystem"],
            keyed=one["keyed"],
        )
        for one in facts["tiers"]
    )  # fmt: skip
    daemon = facts["daemon"]
    return Settings(
        facts["file"], facts["ram"]["capacity_bytes"], (ram, *tiers), tuple(daemon["listen"]), daemon["mode"],
        daemon["group_id"], daemon["metrics"], facts["note"], str(arena), facts.get("uses_nixl", False),
    )  # fmt: skip
