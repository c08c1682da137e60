"""Secrets in texts: a URL may carry a user, a password or a token, and nobody may read them in a log or an answer."""

from __future__ import annotations

import re
from typing import Final

MASK: Final = "***"
_USERS: Final = re.compile(r"(?<=://)(?!/)\S*@|[^\s:/'\"]+:(?!//)[^\s'\"]*@")
"""Up to the last "@" without a space: a password that was not escaped may have any other character. Also without
"://", as in a URL that is refused. A path (unix:///run/a@b) has no user."""
_URL_TOKENS: Final = re.compile(r"(://(?!/)[^\s'\"?#]*)[?#][^\s'\"]+")
_QUERIES: Final = re.compile(r"\?[^\s'\"=]+=[^\s'\")]*")
"""Of a URL that is named without its host."""


def mask_secrets(text: str) -> str:
    """Return the text with users, passwords, queries and fragments of its URLs replaced by `MASK`."""
    if "@" in text:
        text = _USERS.sub(f"{MASK}@", text)
    if "?" in text or "#" in text:
        text = _QUERIES.sub(f"?{MASK}", _URL_TOKENS.sub(rf"\1?{MASK}", text))
    return text
