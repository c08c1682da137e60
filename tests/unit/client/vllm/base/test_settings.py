"""The connector's settings: what is refused, and that it is refused by name."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from kvdepot.client.endpoint import PACKAGED_ENDPOINT
from kvdepot.client.vllm.base.settings import parse_settings
from kvdepot.core.errors import ConfigError

ENDPOINT = {"endpoint": "unix:///run/kvdepot/kvdepot.sock"}


def test_defaults_are_the_documented_ones() -> None:
    settings = parse_settings(ENDPOINT, {})
    assert (settings.lookup_min_seconds, settings.lookup_timeout_seconds) == (0.05, 1.0)
    assert settings.load_timeout_seconds == 30
    assert settings.min_load_tokens == 64
    assert settings.store_decode
    assert settings.speculative_acquire
    assert not settings.keep_across_sleep
    assert settings.chunk_tokens is None
    assert settings.audit_path == ""


def test_an_unknown_key_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"load_timout_seconds.*'load_timeout_seconds'"):
        parse_settings(ENDPOINT | {"load_timout_seconds": 3}, {})


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("chunk_tokens", 0, "from 1 to"),
        ("chunk_tokens", "256", "expected int, got '256'"),
        ("load_timeout_seconds", 0.01, "from 0.1 to"),
        ("lookup_timeout_seconds", 60, "to 5, got 60"),
        ("min_load_tokens", True, "expected int"),
        ("store_decode", 1, "expected bool"),
        ("tenant", 7, "expected str"),
        ("transport", "tcp", "auto, shm, stream"),
        ("tls", {"cert": "x"}, "not supported"),
        ("endpoint", "tcp://1.2.3.4:5", "unix://"),
        ("endpoint", "", "empty"),
        ("experimental_cuda", True, "no longer a key.*remove it: copies on GPUs need no setting"),
        ("experimental_cuda", False, "remove it"),
    ],
)
def test_a_bad_value_is_refused_with_its_reason(key: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        parse_settings(ENDPOINT | {key: value}, {})
    assert caught.value.key == key


def test_without_an_endpoint_it_is_that_of_kvdepotctl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert str(parse_settings({}, {}).endpoint) == PACKAGED_ENDPOINT
    assert str(parse_settings({}, {"KVDEPOT_ENDPOINT": "unix:///a"}).endpoint) == "unix:///a"
    assert str(parse_settings(ENDPOINT, {"KVDEPOT_ENDPOINT": "unix:///a"}).endpoint) == ENDPOINT["endpoint"]
    own = tmp_path / f"kvdepot-{os.geteuid()}"
    own.mkdir(mode=0o700)
    (own / "kvdepot.sock").touch()
    assert str(parse_settings({}, {}).endpoint) == f"unix://{own}/kvdepot.sock"


def test_integers_are_taken_for_seconds() -> None:
    assert parse_settings(ENDPOINT | {"load_timeout_seconds": 3}, {}).load_timeout_seconds == 3.0


def test_the_audit_may_be_switched_on_from_outside() -> None:
    assert parse_settings(ENDPOINT, {"KVDEPOT_AUDIT_PATH": "/tmp/a"}).audit_path == "/tmp/a"
    assert parse_settings(ENDPOINT | {"audit_path": "/tmp/b"}, {"KVDEPOT_AUDIT_PATH": "/tmp/a"}).audit_path == "/tmp/b"
