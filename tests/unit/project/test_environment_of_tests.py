"""What a test leaves in the environment does not reach the next one."""

from __future__ import annotations

import os

import pytest

from tests.conftest import pytest_runtest_protocol


def test_settings_of_kvdepot_are_as_they_were_after_each_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVDEPOT_CHANGED", "before")
    monkeypatch.setenv("KVDEPOT_REMOVED", "before")
    around = pytest_runtest_protocol()
    next(around)
    os.environ["KVDEPOT_ADDED"] = "by a test"
    os.environ["KVDEPOT_CHANGED"] = "by a test"
    del os.environ["KVDEPOT_REMOVED"]
    with pytest.raises(StopIteration):
        around.send(None)
    assert "KVDEPOT_ADDED" not in os.environ
    assert (os.environ["KVDEPOT_CHANGED"], os.environ["KVDEPOT_REMOVED"]) == ("before", "before")
