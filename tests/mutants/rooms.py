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
_UNIT: Final = "tests/unit/server"
_DEPOT: Final = f"{_UNIT}/depot/test_*.py"
_TIERS: Final = ("tests/contract/tiers/test_*.py", f"{_UNIT}/tiers/test_*.py")
ROOMS: Final[dict[str, Room]] = {  # a module belongs to the first one that names it
    "processes": Room(
        (
            f"{_SERVER}/attach/attach.py", f"{_SERVER}/platform/processes.py", f"{_SERVER}/platform/guard.py",
            f"{_SERVER}/depot/sessions/sessions.py", f"{_SERVER}/depot/departures.py",
        ),
        (
            f"{_UNIT}/platform/test_*.py", f"{_UNIT}/attach/test_attaching.py",
            f"{_UNIT}/arena/test_arena_file.py", f"{_UNIT}/daemon/test_daemon_exceptions.py", _DEPOT,
            "tests/stateful/test_attach_model.py", "tests/process/daemon/test_attach_socket.py",
            "tests/process/daemon/test_scarce_descriptors.py",
            "tests/process/io/test_stream_proxy.py", "tests/process/client/test_streams.py",
        ),
    ),
    "depot": Room(
        (f"{_SERVER}/depot/*.py", f"{_SERVER}/depot/*/*.py"),
        (
            _DEPOT, f"{_UNIT}/rpc/test_turns.py", f"{_UNIT}/io/test_lent_extents.py",
            "tests/unit/core/test_eviction.py", "tests/stateful/test_engine_model.py",
            "tests/stateful/test_tier_model.py", "tests/stateful/test_quota_model.py",
            "tests/stateful/test_shared_model.py",
        ),
    ),
    "rpc": Room(
        (f"{_SERVER}/rpc/*.py",),
        (f"{_UNIT}/rpc/test_*.py", "tests/unit/client/transports/test_*.py", "tests/process/daemon/test_rpc.py"),
    ),
    "streams": Room(
        (f"{_SERVER}/attach/streams.py",),
        (
            f"{_UNIT}/attach/test_*.py", "tests/stateful/test_attach_model.py",
            "tests/process/io/test_stream_proxy.py", "tests/process/client/test_streams.py",
            "tests/process/daemon/test_attach_socket.py", "tests/process/daemon/test_scarce_descriptors.py",
        ),
    ),
    "arena": Room(
        (f"{_SERVER}/arena/*.py",),
        (
            f"{_UNIT}/arena/test_*.py", f"{_UNIT}/config/test_arena_directory.py",
            f"{_UNIT}/daemon/test_loops_go_on.py", "tests/process/daemon/test_holder.py",
            "tests/process/daemon/test_short_memory.py", "tests/security/test_default_arena.py",
            "tests/crash/test_daemon_restart.py", "tests/crash/test_service.py",
        ),
    ),
    "checksums": Room(
        (f"{_SERVER}/daemon/checksums.py",),
        (
            f"{_UNIT}/daemon/test_checksums.py", f"{_UNIT}/daemon/test_daemon_exceptions.py",
            "tests/process/io/test_hung_checksum_worker.py",
            "tests/process/daemon/test_audit.py", "tests/process/daemon/test_scarce_descriptors.py",
        ),
    ),
    "platform": Room(
        (f"{_SERVER}/platform/*.py",),
        (
            f"{_UNIT}/platform/test_*.py", f"{_UNIT}/io/test_directory_guard.py", f"{_UNIT}/rpc/test_admin_socket.py",
            f"{_UNIT}/arena/test_arena_file.py", f"{_UNIT}/daemon/test_daemon_exceptions.py",
            f"{_UNIT}/daemon/test_loops_go_on.py", f"{_UNIT}/observe/test_http_listener.py",
            f"{_UNIT}/tiers/shared/test_*.py", "tests/process/daemon/test_log.py",
            "tests/process/daemon/test_operators.py", "tests/process/daemon/test_scarce_descriptors.py",
            "tests/security/test_identity.py",
        ),
    ),
    "io": Room(
        (f"{_SERVER}/io/*.py",),
        (
            f"{_UNIT}/io/test_*.py", f"{_UNIT}/platform/test_durable_files.py", f"{_UNIT}/platform/test_file_room.py",
            "tests/unit/core/test_objectfile.py", f"{_UNIT}/tiers/test_*.py", f"{_UNIT}/tiers/disk/test_*.py",
            f"{_UNIT}/tiers/shared/test_*.py", f"{_UNIT}/daemon/test_daemon_exceptions.py",
            "tests/process/io/test_*.py", "tests/process/daemon/test_hung_files.py",
            "tests/process/daemon/test_children_of_a_killed_daemon.py",
        ),
    ),
    "disk": Room(
        (f"{_SERVER}/tiers/disk/*.py",),
        (*_TIERS, f"{_UNIT}/tiers/disk/test_*.py", "tests/stateful/test_disk_model.py", "tests/crash/test_disk_*.py"),
    ),
    "shared": Room(
        (f"{_SERVER}/tiers/shared/*.py", f"{_SERVER}/tiers/shared/coordinator/*.py"),
        (
            *_TIERS, f"{_UNIT}/tiers/shared/test_*.py", f"{_UNIT}/tiers/shared/coordinator/test_*.py",
            "tests/stateful/test_coordinator*.py", "tests/stateful/test_shared_*.py",
            "tests/stateful/test_slow_coordinators.py",
            "tests/process/tiers/test_shared_*.py",
        ),
    ),
    "tiers": Room(
        (f"{_SERVER}/tiers/[!c]*.py", f"{_SERVER}/tiers/config.py"),  # conformance.py is tests itself
        (*_TIERS, f"{_UNIT}/tiers/disk/test_*.py", f"{_UNIT}/tiers/shared/test_*.py", f"{_UNIT}/config/test_*.py"),
    ),
    "connector": Room(
        (f"{_CLIENT}/vllm/*.py", f"{_CLIENT}/vllm/*/*.py"),
        (
            "tests/unit/client/vllm/test_*.py", "tests/unit/client/vllm/*/test_*.py",
            "tests/contract/connector/test_*.py", "tests/unit/client/copy/test_device.py",
            "tests/stateful/test_connector_orders.py",
        ),
    ),
    "copy": Room(
        (f"{_CLIENT}/copy/[!c]*.py", f"{_CLIENT}/copy/cpu.py"),  # cuda.py: its tests need a GPU
        ("tests/unit/client/copy/test_*.py", "tests/contract/connector/test_device.py"),
    ),
    "client": Room(
        (f"{_CLIENT}/*.py", f"{_CLIENT}/transports/*.py"),
        (
            "tests/unit/client/test_*.py", "tests/unit/client/transports/test_*.py",
            "tests/process/client/test_daemon.py", "tests/process/client/test_streams.py",
            "tests/process/client/test_lost_replies.py", "tests/process/ctl/test_export.py",
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
