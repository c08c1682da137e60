"""`[[tier]]` of kind "object": which keys go together, and what a refusal never repeats."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvdepot.core.errors import ConfigError
from kvdepot.server.config import config as config_module
from kvdepot.server.config.config import Config, load
from kvdepot.server.config.tier_settings import object_config
from kvdepot.server.io.bucket import SignPayload

HEAD = '[ram]\ncapacity = "1GiB"\npath = "{path}"\n[[tier]]\nname = "bucket"\nkind = "{kind}"\ncapacity = "1GiB"\n'
SECRET = "hunter2"


def loaded(folder: Path, lines: str, kind: str = "object") -> Config:
    file = folder / "kvdepot.toml"
    file.write_text(HEAD.format(path=folder, kind=kind) + lines)
    return load(file)


def test_an_object_tier_has_the_bucket_and_the_prefix_as_its_place(tmp_path: Path) -> None:
    config = loaded(
        tmp_path, 'url = "s3://kv"\nprefix = "a/b"\nregion = "r"\ndeadline = "5s"\nsign_payload = "always"\n'
    )
    bucket = object_config(config.tables, config.tables.tier[0]).bucket
    assert (bucket.url, bucket.region, bucket.timeout_seconds) == ("s3://kv/a/b", "r", 10.0)
    assert bucket.sign_payload is SignPayload.ALWAYS
    assert type(bucket).unpack(bucket.pack()) == bucket


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("", "needs url"),
        ('url = "s3://kv"\npath = "/data"', "needs url instead of path"),
        (f'url = "s3://user:{SECRET}@kv"', "the name of a bucket"),
        (f'url = "s3://kv?key={SECRET}"', "the name of a bucket"),
        ('url = "ftp://kv"', "the name of a bucket"),
        ('url = "s3://kv"\nprefix = "../up"', "prefix"),
        ('url = "s3://kv"\nprefix = ".tmp"', "prefix"),
        ('url = "s3://kv"\nendpoint = "http://host:1"', "set allow_http"),
        (f'url = "s3://kv"\nendpoint = "https://user:{SECRET}@host"', "without user"),
        ('url = "gs://kv"\nendpoint = "https://host"', "begins with s3://"),
        ('url = "gs://kv"\nsign_payload = "never"', "begins with s3://"),
        ('url = "s3://kv"\nrequest_budget = 4', "greater than 4"),
        (f'url = "s3://kv"\ncredentials_file = "{SECRET}"', "absolute path"),
    ],
)
def test_keys_that_contradict_are_refused_and_secrets_not_repeated(tmp_path: Path, lines: str, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        loaded(tmp_path, lines)
    assert why in str(refused.value)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("kind", ["disk", "shared"])
@pytest.mark.parametrize("line", ['region = "r"', 'sign_payload = "always"'])
def test_keys_of_buckets_are_refused_for_directories(tmp_path: Path, kind: str, line: str) -> None:
    with pytest.raises(ConfigError, match='needs kind = "object"'):
        loaded(tmp_path, f'path = "{tmp_path}/d"\n{line}\n', kind)


def test_without_its_library_the_tier_is_refused_by_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_module, "has_library", lambda: False)
    with pytest.raises(ConfigError, match="need the package obstore") as refused:
        loaded(tmp_path, 'url = "s3://kv"\n')
    assert "kvdepot[object]" in str(refused.value)
