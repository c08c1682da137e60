"""Requests with an adapter whose files change."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

from vllm.lora.request import LoRARequest

from tests.fakes.scripted_engine import ScriptedEngine
from tests.rigs.connector_rig import prompt
from tests.rigs.patience import Deadline

PROMPT = prompt(5.5)
_ids = itertools.count(1000)


def in_place(path: Path, content: bytes) -> None:
    path.mkdir(exist_ok=True)
    (path / "adapter").write_bytes(content)


def loaded(path: Path, name: str = "") -> LoRARequest:
    """As vLLM's API does: an id that no other adapter has."""
    return LoRARequest(name or path.name, next(_ids), str(path))


def known(engine: ScriptedEngine, adapter: LoRARequest, seconds: float = 5) -> bool:
    until = Deadline(seconds)
    while engine.side._adapters.salt(adapter) is None:
        if until.is_over():
            return False
        time.sleep(0.002)
    return True
