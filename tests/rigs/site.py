"""The documents as a site, built and served: without its theme tests skip with a reason, and fail in CI."""

from __future__ import annotations

import functools
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
CONFIGURATION: Final = ROOT / "configs/mkdocs.yml"
NEEDS_THEME: Final = pytest.mark.skipif(
    "CI" not in os.environ and find_spec("material") is None, reason="there is no theme (pip: mkdocs-material)"
)


def build_site(configuration: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Without `-q`, with which mkdocs counts no warning: `strict` would refuse nothing."""
    command = [sys.executable, "-m", "mkdocs", "build", "-f", str(configuration), "-d", str(site)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the name of the base class
        """Say nothing: a test's output has no room for each request."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Yield the URL at which a folder is served."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
