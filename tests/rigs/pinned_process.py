"""`python -m tests.rigs.pinned_process [close]`: pin a whole arena by a slow driver, say so, and end."""

from __future__ import annotations

import logging
import sys
import time
from types import SimpleNamespace
from typing import Any, Final

import torch
from kvdepot.client.copy import device as device_module
from kvdepot.client.copy import pinning
from kvdepot.client.copy.device import DeviceCopier
from kvdepot.client.vllm.base.guard import Failures
from kvdepot.client.vllm.worker.copy_thread import CopyThread

from tests.fakes.late_device import LateDevice
from tests.rigs.memory_arena import ARENA_BYTES, make_arena

PIECE_BYTES: Final = 4096
PIECES: Final = ARENA_BYTES // PIECE_BYTES
UNPIN_SECONDS: Final = 0.05


class SlowDevice(LateDevice):
    """Unpins slowly."""

    def unpin(self, host: memoryview) -> None:
        time.sleep(UNPIN_SECONDS)
        super().unpin(host)


def main(*arguments: str) -> None:
    pinning.PIECE_BYTES = device_module.PIECE_BYTES = PIECE_BYTES  # type: ignore[attr-defined,misc]
    arena, _ = make_arena()
    arena.populated(arena.size_bytes)
    attachment: Any = SimpleNamespace(arena=arena)
    device = SlowDevice()
    copier = DeviceCopier([torch.zeros((8, 4096), dtype=torch.uint8)], device)
    thread = CopyThread(attachment, copier, Failures(logging.getLogger(__name__)))
    assert not thread.prove()
    thread.prepare_at_once()
    print(f"{len(device.pinned)} pieces are pinned", flush=True)
    if "close" in arguments:
        thread.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
