"""The lock files of a tier's directory: a FIFO in the place of one is an error, and nobody waits for its writer."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from kvdepot.server.io.directory_guard import enter, read_token, renew_token


@pytest.mark.requirement("I4")
@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "use",
    [
        read_token,
        lambda path: enter(path, "token"),
        lambda path: renew_token(path, "token"),
    ],
    ids=["read", "enter", "renew"],
)
def test_a_pipe_in_the_place_of_a_lock_file_is_an_error_at_once(tmp_path: Path, use: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(OSError, match="lock"):
        use(tmp_path / "lock")
