"""What the engine's own cache may hold under the name of a LoRA adapter (P2, docs/adr/0046).

vLLM's block hashes have an adapter's name and path. One that is loaded again from the same path, with other files,
finds there what was computed with the former ones. Stored under the new one's digest, it would stay, for everybody.
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
    lora_request: Any
    load: int  # the engine's id of it: another one whenever it is loaded, but for a load in place
    salt: bytes | None = None  # None: not known
    in_place: bool = False  # anything may have replaced it since
    indeterminate: bool = False  # its salt was known, and is not any more


def adapter_of(lora_request: Any) -> Adapter:
    """Return the name and path of a LoRA request."""
    return str(getattr(lora_request, "lora_name", "")), str(getattr(lora_request, "lora_path", "") or "")


class LoadedAdapters:
    """Used on the scheduler's thread only."""

    def __init__(self) -> None:
        self._loaded: dict[Adapter, _Loaded] = {}

    def asked(self, lora_request: Any, salt: bytes | None) -> tuple[bytes | None, set[Adapter]]:
        """Note a request with an adapter. `salt` is of the adapter's content; None: not known yet, or never.

        Return the salt that the request's keys may have, or None, and the adapters under whose names the engine may
        have cached what another content computed.
        """
        adapter, load = adapter_of(lora_request), int(getattr(lora_request, "lora_int_id", 0))
        known = self._loaded.get(adapter)
        if known is None and len(self._loaded) >= ADAPTERS_MAX:
            return None, set()
        replaced = {adapter} if known is not None and known.load != load else set()
        if known is None or replaced:
            known = self._loaded[adapter] = _Loaded(lora_request, load)
        if getattr(lora_request, "load_inplace", False) and not known.in_place:
            # It keeps the id, also from another path: then requests with the former one are computed with it, too.
            for other, loaded in self._loaded.items():
                if loaded.load == load:
                    loaded.in_place = True
                    replaced.add(other)
        replaced |= self.checked(adapter, salt)
        if salt is None or known.in_place:
            return None, replaced
        known.salt = salt
        return salt, replaced

    def checked(self, adapter: Adapter, salt: bytes | None) -> set[Adapter]:
        """Compare the salt that requests with the adapter would have now. Return the adapter if it had another one."""
        known = self._loaded.get(adapter)
        if known is None or known.salt in (None, salt):
            return set()
        known.in_place |= salt is not None  # the files are others, and what the engine has is not known any more
        known.indeterminate, known.salt = True, None
        return {adapter}

    def current(self, adapter: Adapter) -> Any:
        """Return the engine's request for the adapter as it was loaded last, or None if it has no salt."""
        known = self._loaded.get(adapter)
        return known.lora_request if known is not None and known.salt is not None else None

    def read(self, load: int) -> set[Adapter]:
        """Note that the engine has read other files than before under this id. Return the adapters that have it."""
        return {adapter for adapter, loaded in self._loaded.items() if loaded.load == load}

    def indeterminate(self, adapter: Adapter) -> bool:
        """Return whether requests without a salt may now compute with another content than a later salt's."""
        known = self._loaded.get(adapter)
        return known is not None and known.indeterminate
