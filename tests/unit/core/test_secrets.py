"""What a URL says of its user is masked, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvdepot.client.endpoint import Endpoint, EndpointError
from kvdepot.core.errors import ConfigError
from kvdepot.core.secrets import mask_secrets


@pytest.mark.requirement("S6")
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://127.0.0.1:4318/v1/traces", "http://127.0.0.1:4318/v1/traces"),
        ("http://me:pw@host:1/v1/traces", "http://***@host:1/v1/traces"),
        ("http://token@host/", "http://***@host/"),
        ("https://me:p/w@x?#@host/v1/traces", "https://***@host/v1/traces"),  # not escaped, and so refused
        ("got 'https://host:1/t0ken/v1/traces', not x", "got 'https://host:1/***', not x"),
        ("https://host/v1/traces/t0ken", "https://host/***"),
        ("HTTPS://host/a't0ken", "HTTPS://host/***"),
        ("http://me:pw@host/t0ken?x=1", "http://***@host/***?***"),
        ("got 'me:pw@host:4318'", "got '***@host:4318'"),
        ("https://host/v1/traces?token=t0ken&x=1#f", "https://host/v1/traces?***"),
        ("https://host/v1/traces?t0ken", "https://host/v1/traces?***"),
        ("https://host/v1/traces#t0ken", "https://host/v1/traces?***"),
        ("exceeded with url: /v1/traces?token=t0ken (Caused by x)", "exceeded with url: /v1/traces?*** (Caused by x)"),
        ("exceeded with url: /t0ken/v1/traces (Caused by x)", "exceeded with url: /*** (Caused by x)"),
        ("https://a:b@c, https://d:e@f", "https://***@c, https://***@f"),
        ("unix:///run/kvdepot@1/kvdepot.sock", "unix:///run/kvdepot@1/kvdepot.sock"),
        ("/run/a@b/c#d", "/run/a@b/c#d"),
        ("what? this # that", "what? this # that"),
        ("127.0.0.1:9421", "127.0.0.1:9421"),
    ],
)  # fmt: skip
def test_users_passwords_paths_and_queries_are_masked(text: str, shown: str) -> None:
    assert mask_secrets(text) == shown


@given(st.text(st.characters(exclude_categories=("Z", "C")), min_size=8).map(lambda text: text.replace("'", "")))
def test_no_password_stays(password: str) -> None:
    assert f":{password}@" not in mask_secrets(f"endpoint 'http://me:{password}@host:1/v1/traces'")


def test_errors_of_settings_mask_what_they_quote() -> None:
    error = ConfigError("kvdepot.toml", "trace.endpoint", "got 'ftp://me:pw@host'")
    assert "pw" not in f"{error} {error.reason}"
    with pytest.raises(EndpointError, match=r"tcp://\*\*\*@host") as refused:
        Endpoint.parse("tcp://me:pw@host:1")
    assert "pw" not in str(refused.value)
