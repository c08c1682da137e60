"""A start without what most environments have: a home directory, a temporary directory, a working directory."""

from __future__ import annotations

import json
import os
import pwd
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvdepot.client.endpoint import default_endpoint
from kvdepot.core.errors import ConfigError
from kvdepot.server.config.config import embedded
from kvdepot.server.daemon import app

PACKAGED = "unix:///run/kvdepot/kvdepot.sock"


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither HOME nor an entry in passwd, and no folder in which `tempfile` can make a file."""

    def unknown(uid: int) -> pwd.struct_passwd:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "KVDEPOT_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "absent")])


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvd", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


def test_without_a_home_directory_there_is_no_disk_tier_and_the_start_goes_on(
    runtime: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdepot.server.config.memory_room._host_bytes", lambda _: 64 << 30)  # whatever others use now
    config = embedded()
    assert config.tables.tier == []
    assert config.note == "no disk tier: no home directory"
    assert config.tables.daemon.sockets == (runtime / "kvdepot/kvdepot.sock",)
    assert app.main(["check-config", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["note"] == config.note


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("home", ["", "relative", "/proc/none", "/dev/null"])
def test_a_home_directory_that_cannot_be_used_is_no_home_directory(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(Path, "mkdir", _refused)  # a root user could make any of them
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvdepot.server.config.config.runtime_directory", lambda: Path("/run/kvdepot"))
        config = embedded()
    assert config.tables.tier == [] and config.note.startswith("no disk tier: ")


def _refused(self: Path, *_: object, **__: object) -> None:
    raise PermissionError(13, "Permission denied", str(self))


def test_a_temporary_directory_is_only_asked_for_where_it_is_needed(runtime: Path) -> None:
    assert default_endpoint() == PACKAGED
    (runtime / "kvdepot").mkdir(mode=0o700)
    (runtime / "kvdepot/kvdepot.sock").touch()
    assert default_endpoint() == f"unix://{runtime}/kvdepot/kvdepot.sock"


def test_without_a_directory_for_the_socket_the_refusal_names_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"daemon\.listen: there is neither XDG_RUNTIME_DIR"):
        embedded()
    for verb in ("check-config", "serve"):
        assert app.main([verb]) == 1
        errors = capsys.readouterr().err
        assert errors.startswith("kvdepotd: embedded default: daemon.listen: ") and errors.count("\n") == 1
    assert default_endpoint() == PACKAGED


def test_a_socket_that_is_given_needs_neither(tmp_path: Path) -> None:
    listen = {"daemon": {"listen": [f"unix://{tmp_path}/k.sock"]}}
    assert embedded(listen).note == "no disk tier: no home directory"


def test_a_relative_path_without_a_working_directory_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert app.main(["serve", "--socket", "k.sock"]) == 1
    assert os.strerror(2) in capsys.readouterr().err
