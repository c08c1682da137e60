"""What the engine's own cache may hold under the name of a LoRA adapter (P2).

vLLM's block hashes have an adapter's name and path. One that is loaded again from the same path, with other files,
finds there what was computed with the former ones; stored under the new one's digest, it would be everybody's, and for
good.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

ADAPTERS_MAX: Final = 65_536
"""Names and paths remembered. Of any further adapter nothing is stored or loaded."""

Adapter = tuple[str, str]
"""Name and path: what the engine's hashes have of one."""


@dataclass(slots=True)
class _Loaded:
    load: int  # the engine's id of it: another one whenever it is loaded, but for a load in place
    salt: bytes | None = None  # None: not known yet
    in_place: bool = False  # it may have been replaced since, by whatever


def adapter_of(lora_request: Any) -> Adapter:
    return str(getattr(lora_request, "lora_name", "")), str(getattr(lora_request, "lora_path", "") or "")


class LoadedAdapters:
    """Used on the scheduler's thread only."""

    def __init__(self) -> None:
        self._loaded: dict[Adapter, _Loaded] = {}

    def asked(self, lora_request: Any, salt: bytes | None) -> tuple[bytes | None, set[Adapter]]:
        """A request comes with an adapter; its content's salt, None: not known yet, or never.

        The salt that its keys may have (None: none), and the adapters under whose names the engine may have cached
        what another content computed.
        """
        adapter, load = adapter_of(lora_request), int(getattr(lora_request, "lora_int_id", 0))
        known = self._loaded.get(adapter)
        if known is None and len(self._loaded) >= ADAPTERS_MAX:
            return None, set()
        replaced = {adapter} if known is not None and known.load != load else set()
        if known is None or replaced:
            known = self._loaded[adapter] = _Loaded(load)
        if getattr(lora_request, "load_inplace", False) and not known.in_place:
            # It keeps the id, also from another path: then requests with the former one are computed with it, too.
            for other, loaded in self._loaded.items():
                if loaded.load == load:
                    loaded.in_place = True
                    replaced.add(other)
        if salt is not None and known.salt not in (None, salt):
            known.in_place = True  # the files are others, and what the engine has is not known any more
            replaced.add(adapter)
        if salt is None or known.in_place:
            return None, replaced
        known.salt = salt
        return salt, replaced
