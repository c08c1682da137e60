"""Which tests have to notice a change of which modules. The first pattern that fits a module counts."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

_ENGINE: Final = (
    "tests/unit/server/engine/test_*.py", "tests/unit/server/rpc/test_turns.py",
    "tests/unit/server/io/test_lent_extents.py", "tests/stateful/test_engine_model.py",
    "tests/stateful/test_tier_model.py", "tests/stateful/test_quota_model.py", "tests/stateful/test_shared_model.py",
)  # fmt: skip
_PROCESSES: Final = (
    "tests/process/daemon/test_attach_socket.py", "tests/unit/server/engine/test_watches.py",
    "tests/unit/server/engine/test_sessions.py", "tests/unit/server/engine/test_departures.py",
    "tests/stateful/test_attach_model.py",
)  # fmt: skip
_CONNECTOR: Final = (
    "tests/unit/client/vllm/test_*.py", "tests/contract/connector/test_*.py", "tests/process/connector/test_*.py",
    "tests/stateful/test_connector_orders.py",
)  # fmt: skip
_CLIENT: Final = (
    "tests/unit/client/test_*.py", "tests/unit/client/transports/test_*.py", "tests/process/client/test_daemon.py",
    "tests/process/client/test_streams.py", "tests/process/client/test_lost_replies.py",
)  # fmt: skip
_TIERS: Final = "tests/unit/server/tiers"
ROOMS: Final[dict[str, Sequence[str]]] = {
    "server/kvdepot/server/engine/*.py": _ENGINE,
    "server/kvdepot/server/attach.py": _PROCESSES,
    "server/kvdepot/server/processes.py": _PROCESSES,
    "server/kvdepot/server/rpc/*.py": (
        "tests/unit/server/rpc/test_*.py", "tests/unit/client/transports/test_*.py", "tests/process/daemon/test_rpc.py",
    ),
    "server/kvdepot/server/populate.py": (
        "tests/unit/server/test_populate.py", "tests/unit/server/test_arena_file.py",
    ),
    "server/kvdepot/server/io/*keeper*.py": (
        f"{_TIERS}/shared/test_*.py", f"{_TIERS}/shared/keeper/test_*.py", "tests/stateful/test_keeper*.py",
    ),
    "server/kvdepot/server/io/*.py": (
        "tests/unit/server/io/test_*.py", "tests/process/io/test_*.py", "tests/process/daemon/test_hung_files.py",
    ),
    "server/kvdepot/server/tiers/disk/*.py": (
        f"{_TIERS}/disk/test_*.py", "tests/stateful/test_disk_model.py", "tests/crash/test_disk_*.py",
    ),
    "server/kvdepot/server/tiers/shared/*.py": (
        f"{_TIERS}/shared/test_*.py", f"{_TIERS}/shared/keeper/test_*.py", "tests/stateful/test_keeper*.py",
        "tests/stateful/test_shared_*.py", "tests/process/tiers/test_shared_*.py",
    ),
    "server/kvdepot/server/tiers/*.py": (
        f"{_TIERS}/test_*.py", f"{_TIERS}/disk/test_*.py", f"{_TIERS}/shared/test_*.py",
    ),
    "client/kvdepot/client/vllm/*.py": _CONNECTOR,
    "client/kvdepot/client/*.py": _CLIENT,
}  # fmt: skip


def modules(root: Path, patterns: Sequence[str]) -> list[Path]:
    """Modules with a room that fit one of the patterns (none: all of them), relative to the root."""
    every = [path.relative_to(root) for top in ("server", "client") for path in (root / top).rglob("*.py")]
    chosen = [path for path in every if not patterns or any(fnmatch(str(path), pattern) for pattern in patterns)]
    return sorted(path for path in chosen if room(path) is not None)


def room(path: Path) -> Sequence[str] | None:
    """The patterns of its tests."""
    return next((tests for pattern, tests in ROOMS.items() if fnmatch(str(path), pattern)), None)


def files_of(root: Path, path: Path) -> list[str]:
    """The files of its tests; those that have its name first, so that most changes are noticed soon."""
    found = [file for pattern in room(path) or () for file in sorted(root.glob(pattern))]
    stem = path.stem.removeprefix("_").rstrip("s")
    return [
        str(file.relative_to(root)) for file in sorted(dict.fromkeys(found), key=lambda file: stem not in file.stem)
    ]
