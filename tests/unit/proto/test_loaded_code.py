"""A process knows whether the files on the disk are the code that it has imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kvdepot.proto.loaded_code import UNKNOWN, CodeReplacedError, LoadedCode

PACKAGE = "toy_of_loaded_code"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / PACKAGE / "inner"
    folder.mkdir(parents=True)
    for module in (folder.parent / "one.py", folder / "two.py"):
        module.write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder.parent
    for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
        del sys.modules[name]


def replaced(file: Path, text: str) -> None:
    """As pip, dpkg and git do it."""
    new = file.with_name("new")
    new.write_text(text)
    new.rename(file)


CHANGES: dict[str, Callable[[Path], None]] = {
    "replaced": lambda package: replaced(package / "inner" / "two.py", "x = 2\n"),
    "added": lambda package: (package / "three.py").touch(),
    "removed": lambda package: (package / "one.py").unlink(),
    "moved": lambda package: (package / "inner" / "two.py").rename(package / "two.py").touch(),
}


@pytest.mark.requirement("I8")
@pytest.mark.parametrize("change", CHANGES)
def test_code_that_was_replaced_is_noticed(package: Path, change: str) -> None:
    loaded = LoadedCode(PACKAGE)
    loaded.check("this test")
    CHANGES[change](package)
    with pytest.raises(CodeReplacedError, match="replaced on the disk since this test has started: restart it"):
        loaded.check("this test")
    assert not LoadedCode(PACKAGE).is_of(loaded.digest)


@pytest.mark.requirement("I8")
def test_a_file_that_was_written_in_its_place_has_another_digest(package: Path) -> None:
    loaded = LoadedCode(PACKAGE)
    (package / "one.py").write_text("x = 3\n")
    assert not LoadedCode(PACKAGE).is_of(loaded.digest)


def test_the_same_code_installed_again_and_caches_are_no_change(package: Path) -> None:
    loaded = LoadedCode(PACKAGE)
    replaced(package / "one.py", "x = 1\n")
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "one.py").write_text("not read")
    (package / "data.txt").write_text("not code")
    loaded.check("this test")
    assert LoadedCode(PACKAGE).is_of(loaded.digest)


@pytest.mark.requirement("I8")
def test_code_that_goes_while_it_is_read_equals_no_other(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = LoadedCode(PACKAGE)

    def gone(_: Path) -> bytes:
        raise FileNotFoundError

    (package / "three.py").touch()
    monkeypatch.setattr(Path, "read_bytes", gone)
    half = LoadedCode(PACKAGE)
    assert half.digest == UNKNOWN and not half.is_of(UNKNOWN) and not half.is_of(half.digest)
    with pytest.raises(CodeReplacedError):
        whole.check("this test")
