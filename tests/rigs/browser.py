"""A headless Chromium, driven by its DevTools protocol: without it tests skip with a reason, and fail in CI."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pytest
from websockets.sync.client import connect

from tests.rigs.patience import WAIT_SECONDS, patient, wait_until

CHROMIUM = shutil.which("chromium")
NEEDS_CHROMIUM = pytest.mark.skipif(
    "CI" not in os.environ and CHROMIUM is None, reason="there is no chromium (Debian: chromium)"
)


class Browser:
    """One browser with one page. `complaints` are all that the console has got: errors, and refusals of a policy."""

    def __init__(self) -> None:
        assert CHROMIUM is not None, "there is no chromium (Debian: chromium)"
        self._directory = Path(tempfile.mkdtemp(prefix="kvd", dir="/tmp"))
        self._process = subprocess.Popen(
            [
                CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                "--no-first-run", "--disable-background-networking", "--remote-debugging-port=0",
                f"--user-data-dir={self._directory}", "about:blank",
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._number = 0
        self._stack = ExitStack()
        try:
            self._socket = self._stack.enter_context(connect(self._page_url(), max_size=None))
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(patient(WAIT_SECONDS)))
            if message.get("id") == self._number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def resize(self, width: int, height: int = 900) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def open(self, url: str, *, width: int, height: int = 900, dark: bool = False) -> None:
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until a JavaScript expression is true."""
        wait_until(lambda: self.value(expression), expression)

    def close(self) -> None:
        self._stack.close()
        self._process.terminate()
        try:
            self._process.wait(patient(30))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _note(self, message: dict[str, Any]) -> None:
        method, parameters = message.get("method"), message.get("params", {})
        if method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.complaints.append(json.dumps(parameters))
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    def _page_url(self) -> str:
        """Return where the only page listens."""
        port_file = self._directory / "DevToolsActivePort"
        wait_until(lambda: port_file.exists() and port_file.read_text().count("\n"), "chromium's port")
        port = int(port_file.read_text().split("\n")[0])
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
            (page,) = [one for one in json.load(answer) if one["type"] == "page"]
        url: str = page["webSocketDebuggerUrl"]
        return url
