"""Which tests have to notice a change of which modules. The first pattern that fits a module counts."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

_ENGINE: Final = (
    "tests/unit/test_engine_*.py", "tests/unit/test_call_turns.py", "tests/unit/test_lent_extents.py",
    "tests/stateful/test_engine_model.py", "tests/stateful/test_tier_model.py", "tests/stateful/test_quota_model.py",
    "tests/stateful/test_shared_model.py",
)  # fmt: skip
_PROCESSES: Final = (
    "tests/contract/test_attach_*.py", "tests/unit/test_attach*.py", "tests/unit/test_engine_sessions.py",
    "tests/unit/test_process*.py", "tests/stateful/test_attach*.py", "tests/stateful/test_process*.py",
)  # fmt: skip
_CONNECTOR: Final = (
    "tests/unit/test_vllm_*.py", "tests/contract/test_connector_*.py", "tests/stateful/test_connector_orders.py",
)  # fmt: skip
_CLIENT: Final = (
    "tests/unit/test_client_*.py", "tests/unit/test_call_socket.py", "tests/contract/test_client_*.py",
    "tests/contract/test_lost_replies.py",
)  # fmt: skip
ROOMS: Final[dict[str, Sequence[str]]] = {
    "server/kvdepot/server/engine/*.py": _ENGINE,
    "server/kvdepot/server/attach.py": _PROCESSES,
    "server/kvdepot/server/processes.py": _PROCESSES,
    "server/kvdepot/server/rpc/*.py": ("tests/unit/test_call_*.py", "tests/contract/test_rpc.py"),
    "server/kvdepot/server/populate.py": ("tests/unit/test_populate*.py", "tests/unit/test_arena_file.py"),
    "server/kvdepot/server/io/*keeper*.py": ("tests/unit/test_shared_*.py", "tests/stateful/test_keeper*.py"),
    "server/kvdepot/server/io/*.py": (
        "tests/unit/test_io_*.py", "tests/unit/test_codecs.py", "tests/contract/test_io_*.py",
        "tests/contract/test_hung_files.py",
    ),
    "server/kvdepot/server/tiers/disk/*.py": (
        "tests/unit/test_disk_*.py", "tests/stateful/test_disk_model.py", "tests/crash/test_disk_*.py",
    ),
    "server/kvdepot/server/tiers/shared/*.py": (
        "tests/unit/test_shared_*.py", "tests/stateful/test_keeper*.py", "tests/stateful/test_shared_*.py",
        "tests/contract/test_shared_*.py",
    ),
    "server/kvdepot/server/tiers/*.py": (
        "tests/unit/test_disk_*.py", "tests/unit/test_shared_*.py", "tests/unit/test_tier_*.py",
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
