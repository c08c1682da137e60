"""Which tests have to notice a change of which modules."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple


class Room(NamedTuple):
    """Modules and their tests, as patterns of paths below the root."""

    modules: Sequence[str]
    tests: Sequence[str]


_SERVER: Final = "server/kvdepot/server"
_CLIENT: Final = "client/kvdepot/client"
ROOMS: Final[dict[str, Room]] = {  # a module belongs to the first one that names it
    "processes": Room(
        (
            f"{_SERVER}/attach.py", f"{_SERVER}/processes.py", f"{_SERVER}/guard.py", f"{_SERVER}/engine/sessions.py",
            f"{_SERVER}/engine/departures.py",
        ),
        (
            "tests/unit/test_guard.py", "tests/unit/test_accepting.py", "tests/unit/test_arena_file.py",
            "tests/unit/test_daemon_exceptions.py", "tests/unit/test_engine_*.py",
            "tests/contract/test_attach_socket.py", "tests/contract/test_scarce_descriptors.py",
            "tests/stateful/test_attach_model.py",
        ),
    ),
    "engine": Room(
        (f"{_SERVER}/engine/*.py",),
        (
            "tests/unit/test_engine_*.py", "tests/unit/test_call_turns.py", "tests/unit/test_lent_extents.py",
            "tests/unit/test_eviction.py", "tests/stateful/test_engine_model.py", "tests/stateful/test_tier_model.py",
            "tests/stateful/test_quota_model.py", "tests/stateful/test_shared_model.py",
        ),
    ),
    "rpc": Room((f"{_SERVER}/rpc/*.py",), ("tests/unit/test_call_*.py", "tests/contract/test_rpc.py")),
    "arena": Room((f"{_SERVER}/populate.py",), ("tests/unit/test_populate.py", "tests/unit/test_arena_file.py")),
    "io": Room(
        (f"{_SERVER}/io/*.py",),
        (
            "tests/unit/test_io_*.py", "tests/unit/test_codecs.py", "tests/unit/test_child_stream.py",
            "tests/unit/test_durable_files.py", "tests/unit/test_file_room.py", "tests/unit/test_lent_extents.py",
            "tests/unit/test_objectfile.py", "tests/unit/test_tier_trouble.py", "tests/contract/test_io_*.py",
            "tests/contract/test_hung_*.py", "tests/contract/test_stream_proxy.py",
            "tests/contract/test_children_of_a_killed_daemon.py",
        ),
    ),
    "disk": Room(
        (f"{_SERVER}/tiers/disk/*.py",),
        (
            "tests/unit/test_disk_*.py", "tests/stateful/test_disk_model.py", "tests/crash/test_disk_*.py",
            "tests/contract/test_disk_*.py", "tests/contract/test_tier_*.py",
        ),
    ),
    "shared": Room(
        (f"{_SERVER}/tiers/shared/*.py", f"{_SERVER}/tiers/shared/keeper/*.py"),
        (
            "tests/unit/test_shared_*.py", "tests/unit/test_keeper_*.py", "tests/unit/test_late_janitor.py",
            "tests/stateful/test_keeper*.py", "tests/stateful/test_shared_*.py", "tests/stateful/test_slow_keepers.py",
            "tests/contract/test_shared_*.py", "tests/contract/test_tier_*.py",
        ),
    ),
    "tiers": Room(
        (f"{_SERVER}/tiers/*.py",),
        (
            "tests/unit/test_disk_*.py", "tests/unit/test_shared_*.py", "tests/unit/test_tier_*.py",
            "tests/contract/test_tier_*.py",
        ),
    ),
    "connector": Room(
        (f"{_CLIENT}/vllm/*.py",),
        (
            "tests/unit/test_vllm_*.py", "tests/unit/test_review_connector.py", "tests/contract/test_connector_*.py",
            "tests/stateful/test_connector_orders.py",
        ),
    ),
    "copy": Room(
        (f"{_CLIENT}/copy/*.py",),
        ("tests/unit/test_copiers.py", "tests/unit/test_copy_*.py", "tests/contract/test_connector_device.py"),
    ),
    "client": Room(
        (f"{_CLIENT}/*.py", f"{_CLIENT}/transports/*.py"),
        (
            "tests/unit/test_client_*.py", "tests/unit/test_call_socket.py", "tests/contract/test_client_*.py",
            "tests/contract/test_lost_replies.py", "tests/contract/test_operator_export.py",
        ),
    ),
}  # fmt: skip


def room_of(path: Path) -> str | None:
    return next((name for name, room in ROOMS.items() if any(map(path.match, room.modules))), None)


def modules(root: Path, patterns: Sequence[str]) -> list[Path]:
    """Modules of rooms that a pattern fits, or a room's name (none: all of them), relative to the root."""
    every = [path.relative_to(root) for top in ("server", "client") for path in (root / top).rglob("*.py")]
    return sorted(
        path
        for path in every
        if (room := room_of(path)) is not None and (not patterns or room in patterns or any(map(path.match, patterns)))
    )


def files_of(root: Path, room: str) -> list[str]:
    """The files of its tests."""
    files = {file for pattern in ROOMS[room].tests for file in root.glob(pattern)}
    return [str(file.relative_to(root)) for file in sorted(files)]
