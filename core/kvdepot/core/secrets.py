"""Secrets in texts: a URL may carry a user, a password or a token, and nobody may read them in a log or an answer."""

from __future__ import annotations

import re
from typing import Final

MASK: Final = "***"
_USERS: Final = re.compile(r"(?<=://)(?!/)\S*@|[^\s:/'\"]+:(?!//)[^\s'\"]*@")
"""Up to the last "@" without a space: a password that was not escaped may have any other character. Also without
"://", as in a URL that is refused. A path (unix:///run/a@b) has no user."""
_URL_TOKENS: Final = re.compile(r"(://(?!/)[^\s'\"?#]*)[?#][^\s'\"]+")
_PATHS: Final = re.compile(
    r"((?i:https?)://[^\s'\"/?#]+|\bwith url: )(/(?:[^\s'\"?#]|['\"](?=[\w/]))*)"  # a quote within a path is no end
)
_OPEN_PATHS: Final = frozenset({"/", "/v1/traces"})
"""What every collector has. In any other path a folder may be a token: nothing tells it from a name."""
_QUERIES: Final = re.compile(r"\?[^\s'\"=]+=[^\s'\")]*")
"""Of a URL that is named without its host."""


def mask_secrets(text: str) -> str:
    """Return the text with users, passwords, paths, queries and fragments of its URLs replaced by `MASK`."""
    if "@" in text:
        text = _USERS.sub(f"{MASK}@", text)
    if "?" in text or "#" in text:
        text = _QUERIES.sub(f"?{MASK}", _URL_TOKENS.sub(rf"\1?{MASK}", text))
    return _PATHS.sub(_mask_path, text)


def _mask_path(url: re.Match[str]) -> str:
    return url[0] if url[2] in _OPEN_PATHS else f"{url[1]}/{MASK}"
