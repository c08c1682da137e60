"""The coordinator process, with a line in a log before each deletion: its term."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kvdepot.server.io.lifeline import exit_code
from kvdepot.server.tiers.shared.coordinator import janitor
from kvdepot.server.tiers.shared.coordinator import main as shared_coordinator
from kvdepot.server.tiers.shared.coordinator.deletion import delete_object

_SECONDS = 0.03
"""So that a test can stop it in between."""
LOG = "KVDEPOT_TEST_DELETIONS"
_WHERE = "kvdepot.server.tiers.shared.coordinator"
_made: list[janitor.Janitor] = []


class LoggedJanitor(janitor.Janitor):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        _made.append(self)


def delete(root: Path, file: str, mtime_ns: int, may: Callable[[], bool]) -> int:
    with Path(os.environ[LOG]).open("a") as log:
        log.write(f"{_made[0].lease.term}\n")
    time.sleep(_SECONDS)
    return delete_object(root, file, mtime_ns, may)


if __name__ == "__main__":
    with patch(f"{_WHERE}.coordinator.Janitor", LoggedJanitor), patch(f"{_WHERE}.janitor.delete_object", delete):
        sys.exit(exit_code(shared_coordinator.main))
