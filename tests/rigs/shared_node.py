"""The configuration of a daemon with a shared tier."""

from __future__ import annotations

WAIT_SECONDS = 60.0
CONFIG = """
[[tier]]
name = "pool"
kind = "shared"
path = "{path}"
capacity = "64MiB"
write = "commit"
io_workers = 1
on_root_filesystem = true
"""
