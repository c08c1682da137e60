"""What verbs of `kvdepotd` print for people: golden screens, of one width, because these verbs wrap nothing.

`python -m tests.unit.server.offline.test_screens` writes the golden screens. Look at them before they are committed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final
from unittest.mock import patch

import pytest
from kvdepot.core.errors import ConfigError
from kvdepot.server.arena.arena_request import Outlook
from kvdepot.server.arena.unused_arenas import FoundArena
from kvdepot.server.config.config import check
from kvdepot.server.daemon.app import described
from kvdepot.server.offline.arena_verb import lines_of

GOLDEN: Final = Path(__file__).parents[3] / "golden/screens"
FILE: Final = "/etc/kvdepot/kvdepot.toml"
ARENAS: Final = (
    FoundArena("/dev/shm/kvdepot/kvdepot", 64 << 30, 4711, (7352, 7353), 4709, 11_520.0),
    FoundArena("/dev/shm/kvdepot/old", 10 << 30, None, (), 3001, 1_036_800.0),
    FoundArena("/mnt/huge/kvdepot/trial", 2 << 30, None, (7352, 0), None, 95.0),
)


def checked(*problems: ConfigError, outlook: Outlook) -> str:
    """Return what `check-config` says of a file, on the host with this name."""
    document = {
        "daemon": {"listen": ["unix:///run/kvdepot/kvdepot.sock"], "metrics": "127.0.0.1:9400"},
        "ram": {"capacity": "64GiB"},
        "trace": {"endpoint": "http://user:secret@collector:4318/v1/traces"},
    }
    config = check(FILE, document)
    with patch("kvdepot.server.daemon.app.os.uname") as uname:
        uname.return_value.nodename = "gpu-17"
        text = described(config, problems, outlook)
    return text.replace(str(config.arena_path), "/dev/shm/kvdepot/kvdepot.arena")  # the name has the user's number


SCENES: Final[dict[str, Callable[[], str]]] = {
    "arena-list": lambda: "\n".join(lines_of(ARENAS)),
    "arena-list-none": lambda: "\n".join(lines_of(())),
    "check-config": lambda: checked(outlook=Outlook(loss="its size is 32.00 GiB, and it cannot grow")),
    "check-config-other-host": lambda: checked(
        ConfigError(FILE, "ram.capacity", "is 64.00 GiB, and this host has 24.00 GiB", of_host=True),
        ConfigError(FILE, "daemon.metrics", "port 9400 is in use", of_host=True),
        outlook=Outlook(),
    ),
}


def golden(scene: str) -> Path:
    return GOLDEN / f"kvdepotd-{scene}.txt"


@pytest.mark.requirement("O1")
@pytest.mark.parametrize("scene", SCENES)
def test_the_screen_is_as_somebody_has_looked_at_it(scene: str) -> None:
    assert f"{SCENES[scene]()}\n" == golden(scene).read_text()


if __name__ == "__main__":
    for name, text in SCENES.items():
        golden(name).write_text(f"{text()}\n")
