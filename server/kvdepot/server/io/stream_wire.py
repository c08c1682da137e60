"""What the daemon tells a proxy when it begins: the attachment's slot, and the session's token."""

from __future__ import annotations

import struct
from typing import Final

from kvdepot.core.limits import SESSION_TOKEN_BYTES

OPENING: Final = struct.Struct(f"<I{SESSION_TOKEN_BYTES}s")
