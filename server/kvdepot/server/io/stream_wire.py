"""What the daemon tells a proxy when it begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvdepot.core.bounds import SessionToken
from kvdepot.server.io.framing import Framing


@dataclass(frozen=True, slots=True)
class Opening:
    """The slot of the attachment, and the token of its session."""

    attachment: int
    session: SessionToken


OPENING: Final[Framing[Opening]] = Framing(Opening, bytes_max=64)
