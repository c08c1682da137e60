"""`[[tier]] key_file`: a file that only the daemon's user can read, or a refusal that says what to do (S5)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kvdepot.core.errors import ConfigError
from kvdepot.core.object_keys import FILE_BYTES_MAX, KeyRing, key_id
from kvdepot.server.config.config import Config, check
from kvdepot.server.config.facts import facts
from kvdepot.server.config.key_files import read_keys, with_keys
from kvdepot.server.config.reloading import changes, refuse_what_needs_a_restart, values

A, B = bytes(range(32)), bytes(range(1, 33))


def config_with(key_file: Path | str, **changes: object) -> Config:
    tier = {"name": "nfs", "kind": "shared", "path": "/shared", "capacity": "1GiB", "key_file": str(key_file)}
    return check("kvdepot.toml", {"tier": [tier | changes]})


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "nfs.key"
    path.touch(0o600)
    path.write_text(f"{A.hex()}\n{B.hex()}\n")
    return path


def refusal(path: Path | str) -> str:
    with pytest.raises(ConfigError) as refused:
        read_keys(config_with(path))
    assert refused.value.key == "tier.nfs.key_file"
    return str(refused.value)


def test_the_keys_of_a_tier_are_read(key_file: Path) -> None:
    assert with_keys(config_with(key_file)).keys == {"nfs": KeyRing((A, B))}
    assert with_keys(config_with("")).keys == {}


def test_a_link_to_a_secret_is_followed(key_file: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(key_file)
    assert read_keys(config_with(tmp_path / "link"))["nfs"].keys == (A, B)


@pytest.mark.requirement("S5")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_file_that_others_can_read_is_refused(key_file: Path, mode: int) -> None:
    key_file.chmod(mode)
    assert f"mode is {mode:04o}" in refusal(key_file) and "chmod 0600" in refusal(key_file)


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file away needs root")
def test_a_file_of_another_user_is_refused(key_file: Path) -> None:
    os.chown(key_file, 61003, -1)
    assert "of uid 61003, and the daemon's uid is 0" in refusal(key_file)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    assert "no regular file" in refusal(tmp_path / "fifo")
    assert "no regular file" in refusal(tmp_path)
    assert "No such file" in refusal(tmp_path / "gone")


@pytest.mark.parametrize("data", [b"", b"\xff" * 64, b"0" * (FILE_BYTES_MAX + 1), A[:31].hex().encode()])
def test_what_has_no_keys_is_refused_and_never_repeated(key_file: Path, data: bytes) -> None:
    key_file.write_bytes(data)
    said = refusal(key_file)
    assert "openssl rand -hex 32" in said
    assert A.hex()[:16] not in said and "\\xff" not in said


def test_the_setting_is_a_path_and_a_shared_tier_s() -> None:
    with pytest.raises(ConfigError, match="absolute path") as refused:
        config_with(A.hex())
    assert A.hex() not in str(refused.value), "somebody took the setting for the key itself"
    with pytest.raises(ConfigError, match='key_file needs kind = "shared"'):
        config_with("/etc/kvdepot/nfs.key", kind="disk")


@pytest.mark.requirement("S5")
def test_ids_are_shown_and_keys_are_not(key_file: Path) -> None:
    config = with_keys(config_with(key_file))
    shown = values(config)["tier.nfs.key_file"]
    assert shown == f"{key_file} (keys {key_id(A).hex()}, {key_id(B).hex()})"
    said = f"{values(config)} {facts(config)} {config!r}"
    assert not any(text in said for key in (A, B) for text in (key.hex(), repr(key)[2:-1]))


@pytest.mark.requirement("S5", "T9")
def test_a_reload_takes_other_keys_of_the_same_file(key_file: Path) -> None:
    before = with_keys(config_with(key_file))
    key_file.write_text(f"{B.hex()}\nretired {key_id(A).hex()}\n")
    after = with_keys(config_with(key_file))
    (change,) = changes(before, after)
    assert (change.key, change.live) == ("tier.nfs.key_file", True)
    assert f"(keys {key_id(B).hex()}, retired {key_id(A).hex()})" in change.after
    refuse_what_needs_a_restart(before, after, (change,))
    assert changes(before, before) == ()
