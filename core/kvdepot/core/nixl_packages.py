"""The packages that NIXL comes in, for daemons that use it and for `kvdepotctl doctor`."""

from __future__ import annotations

from typing import Final

PACKAGES: Final = ("nixl_cu12", "nixl_cu13", "nixl_rocm")
"""One is enough: nothing here is memory of a GPU. The package nixl would import torch to choose one (ADR 82)."""
INSTALL: Final = "pip install --no-deps nixl-cu12"
