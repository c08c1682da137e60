"""The default directory of the arena, in which every user may create names: nobody stops a start by one (I8, S1)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.ctl_process import record, text
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.other_uids import HOSTILE, OtherUser, needs_root
from tests.rigs.patience import wait_until
from tests.rigs.raw_client import RawEngine, keys_of, payload_of, status_of

KEYS = keys_of("default", 4)
USUAL = f"kvdepot-{os.geteuid()}"


class DefaultPlace(DaemonProcess):
    """A daemon without `[ram] path`. `arena_directory` stands for /dev/shm."""

    def __init__(self) -> None:
        super().__init__()
        self.arena_directory.chmod(0o1777)
        self.under = ("tests.fakes.shared_memory", str(self.arena_directory))

    @property
    def folder(self) -> Path:
        """Directory of the arena."""
        (path,) = self.arena_directory.glob("*/*.arena")
        return path.parent

    def start_as_before(self) -> None:
        """Start with the arena directly in `arena_directory`, as earlier versions placed it."""
        under, self.under = self.under, ()
        self.start()
        self.under = under

    def _arguments(self, *options: str) -> list[str]:
        given = super()._arguments(*options)
        at = given.index("--arena-dir")
        return given[:at] + given[at + 2 :] if self.under else given


@pytest.fixture
def daemon() -> Iterator[DefaultPlace]:
    process = DefaultPlace()
    try:
        yield process
    finally:
        process.close()


def take(kind: str, path: str) -> None:
    """Take a name before the daemon does."""
    taken = Path(path)
    if kind == "directory":
        taken.mkdir()
        taken.chmod(0o777)
    elif kind == "link":
        taken.with_name("elsewhere").mkdir()
        taken.symlink_to("elsewhere")
    else:
        os.mkfifo(taken)


def free(path: str) -> None:
    taken = Path(path)
    if taken.is_dir() and not taken.is_symlink():
        taken.rmdir()
    else:
        taken.unlink()


def _store(daemon: DaemonProcess) -> None:
    with RawEngine(daemon.socket) as engine:
        engine.store(KEYS)
        wait_until(lambda: engine.counter("checksummed_objects") == len(KEYS), "checksums")


def _are_served(daemon: DaemonProcess) -> bool:
    wait_until(lambda: not status_of(daemon.socket).tiers[0].unverified_objects, "verification")
    with RawEngine(daemon.socket) as engine:
        return engine.load(KEYS) == [payload_of(key) for key in KEYS]


@needs_root
@pytest.mark.requirement("I8")
@pytest.mark.parametrize("kind", [pytest.param("directory", marks=pytest.mark.long(seconds=10)), "link"])
def test_a_stranger_who_takes_the_names_first_stops_no_start_and_ends_no_ram(daemon: DefaultPlace, kind: str) -> None:
    daemon.start_as_before()
    daemon.kill()
    files = list(daemon.arena_directory.iterdir())
    for path in files:
        path.unlink()
    with OtherUser(HOSTILE, __name__) as stranger:
        usual = str(daemon.arena_directory / USUAL)
        stranger.run("take", kind, usual)
        for path in files:
            stranger.run("take", "pipe", str(path))
        daemon.start()
        folder = daemon.folder
        assert folder.name.startswith(f"{USUAL}-") and folder.stat().st_mode & 0o777 == 0o700
        _store(daemon)
        daemon.kill()
        stranger.run("free", usual)
        assert _are_served(daemon.start())
        assert daemon.folder == folder
        assert not list((daemon.arena_directory / "elsewhere").glob("*"))


@pytest.mark.requirement("I8")
@pytest.mark.long(seconds=15)
def test_the_arena_of_an_earlier_version_and_its_settings_are_adopted(daemon: DefaultPlace) -> None:
    daemon.config = "[ram]\nsealed = false\n"  # earlier versions had files alone
    daemon.start_as_before()
    _store(daemon)
    text(daemon, "stores", "off")
    daemon.kill()
    daemon.start()
    assert [path.name for path in daemon.arena_directory.iterdir()] == [USUAL]
    assert record(daemon, "status")["switches"]["stores_off"]
    assert _are_served(daemon)
    assert "moved from an earlier version's place" in daemon.log
