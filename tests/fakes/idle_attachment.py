"""An attachment of a process that is attached to nothing."""

from __future__ import annotations

from typing import Any


class IdleAttachment:
    arena: Any = None
    session: bytes | None = None

    def close(self) -> None: ...
