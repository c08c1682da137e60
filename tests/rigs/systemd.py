"""Tests that ask systemd's own tools: without these they skip with a reason, and fail in CI."""

from __future__ import annotations

import os
import shutil

import pytest

NEEDS_SYSTEMD = pytest.mark.skipif(
    "CI" not in os.environ and shutil.which("systemd-analyze") is None,
    reason="there is no systemd-analyze (Debian: systemd)",
)
