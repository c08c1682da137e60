"""The scripted engine on a real daemon, by the real client: its sessions, attachments, sockets and threads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvdepot.client.vllm.connector import KVDepotConnector

from tests.fakes.scripted_engine import ScriptedEngine

CALLED = tuple(
    name
    for name, member in vars(KVDepotConnector).items()
    if callable(member) and not name.startswith("_") and name not in ("shutdown", "fail_allocated")
)
"""What vLLM calls while it serves."""


class LiveEngine(ScriptedEngine):
    """Notes how long the longest call of each method of its connector took, by `clock`, in seconds."""

    def __init__(
        self, endpoint: str, folder: Path, monkeypatch: pytest.MonkeyPatch, clock: Callable[[], float], **options: Any
    ) -> None:
        options["settings"] = {"endpoint": endpoint} | options.get("settings", {})
        wait = options.pop("wait", True)
        super().__init__(None, folder, monkeypatch, wait=False, **options)  # type: ignore[arg-type]  # there is a daemon
        self.longest: dict[str, float] = {}
        for connector in (self.connector, *self.workers):
            for name in CALLED:
                setattr(connector, name, self._timed(name, getattr(connector, name), clock))
        if wait:
            self.wait_attached()

    def _connect(self, monkeypatch: pytest.MonkeyPatch, streams: bool) -> None:
        """Nothing to put in its place."""

    def _timed(self, name: str, method: Callable[..., Any], clock: Callable[[], float]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            began = clock()
            try:
                return method(*args, **kwargs)
            finally:
                self.longest[name] = max(self.longest.get(name, 0.0), clock() - began)

        return call
