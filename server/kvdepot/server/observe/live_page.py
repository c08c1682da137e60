"""The live page as it is sent: one file of this package, and a policy that allows its own style and script only."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files
from typing import Final

FIGURES_PATH: Final = b"/live.json"
HEADERS: Final = (
    "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\n"
    "Cross-Origin-Resource-Policy: same-origin\r\n"
)
"""Of the page and its figures: other sites cannot embed either."""


def page() -> tuple[bytes, str]:
    """Return the page, and the header of its policy."""
    text = files("kvdepot.server.observe").joinpath("live_page.html").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; style-src {_hash_of('style', text)}; script-src {_hash_of('script', text)}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), f"Content-Security-Policy: {policy}\r\n"


def _hash_of(tag: str, text: str) -> str:
    """Return the source expression of the only element of this kind (CSP level 3)."""
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'"
