"""A reader that does what no reader may: it writes over NIXL to a source's RAM. `python -m tests.rigs.nixl_writer`.

It reads a line of JSON from its standard input, with the lender's `metadata` in hexadecimal digits, the address `base`
and an `offset`. It reads there first, then writes. It prints what came of both, in a line each.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from typing import Any, Final

_BYTES: Final = 4096
_SECONDS: Final = 60.0


def main() -> None:
    os.environ["NIXL_LOG_LEVEL"] = "WARN"  # it logs to the standard output
    import numpy as np
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    told = json.loads(sys.stdin.readline())
    agent = nixl_agent("writer", nixl_agent_config(backends=["UCX"], enable_prog_thread=False))
    memory = np.frombuffer(mmap.mmap(-1, _BYTES), dtype=np.uint8)
    address = int(memory.ctypes.data)
    agent.register_memory([(address, _BYTES, 0, "")], "DRAM")
    name = agent.add_remote_agent(bytes.fromhex(told["metadata"]))
    here = agent.get_xfer_descs([(address, _BYTES, 0)], "DRAM")
    there = agent.get_xfer_descs([(told["base"] + told["offset"], _BYTES, 0)], "DRAM")
    print(_done(agent, "READ", here, there, name), bytes(memory[:4]).hex(), flush=True)
    memory[:] = 0x5A
    print(_done(agent, "WRITE", here, there, name), flush=True)


def _done(agent: Any, operation: str, here: Any, there: Any, name: Any) -> str:
    until = time.monotonic() + _SECONDS
    try:
        handle = agent.initialize_xfer(operation, here, there, name)
        state = agent.transfer(handle)
        while state == "PROC" and time.monotonic() < until:
            time.sleep(0.0001)
            state = agent.check_xfer_state(handle)
    except Exception as error:  # noqa: BLE001 - what it is, is printed
        return type(error).__name__
    return str(state)


if __name__ == "__main__":
    main()
    os._exit(0)  # UCX crashes in the interpreter's exit
