"""A bare read over NIXL between two namespaces, as processes: what `lane = "nixl"` can have at most.

`python -m benchmarks.nixl_probe NAMESPACE ROLE BYTES`. The role `lend` registers as many bytes, and prints what its
agent is. It serves until its input ends. The role `read` gets that line as its input. It reads all bytes, 64 MiB at
once, in blocks of 4 MiB, into memory that was touched before. It says how many seconds that took. Both say at last how
much CPU time they took, in seconds. Polls, and the priority of processes, are as peers have them. Nothing is checked.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import sys
import time
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a file and with -m

from kvdepot.server.io.nixl_agent import BATCH_BYTES, POLL_SECONDS

from tests.rigs.namespaces import enter, see_interfaces

NICENESS: Final = 5
BLOCK_BYTES: Final = 4 << 20


def _agent(name: str, memory: mmap.mmap) -> tuple[Any, int]:
    os.environ["NIXL_LOG_LEVEL"] = "WARN"  # it logs to the standard output
    import numpy as np
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"], enable_prog_thread=False))
    base = int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
    agent.register_memory([(base, len(memory), 0, "")], "DRAM")
    return agent, base


def _touched(length: int) -> mmap.mmap:
    memory = mmap.mmap(-1, length)
    for at in range(0, length, BLOCK_BYTES):
        memory[at : at + BLOCK_BYTES] = bytes(min(BLOCK_BYTES, length - at))
    return memory


def lend(length: int) -> None:
    memory = _touched(length)  # NIXL does not keep it
    agent, base = _agent("lender", memory)
    print(json.dumps({"metadata": agent.get_agent_metadata().hex(), "base": base}), flush=True)
    began = time.process_time()
    while not select.select([sys.stdin], [], [], 0)[0]:
        agent.get_new_notifs()
        time.sleep(POLL_SECONDS)
    print(time.process_time() - began, flush=True)


def read(length: int) -> None:
    told = json.loads(sys.stdin.readline())
    memory = _touched(length)
    agent, base = _agent("reader", memory)
    name = agent.add_remote_agent(bytes.fromhex(told["metadata"]))
    _batch(agent, name, base, told["base"], BLOCK_BYTES)  # connects
    began, cpu_began = time.perf_counter(), time.process_time()
    for at in range(0, length, BATCH_BYTES):
        _batch(agent, name, base + at, told["base"] + at, min(BATCH_BYTES, length - at))
    print(time.perf_counter() - began, time.process_time() - cpu_began, flush=True)


def _batch(agent: Any, name: Any, here: int, there: int, length: int) -> None:
    blocks = range(0, length, BLOCK_BYTES)
    ours = agent.get_xfer_descs([(here + at, BLOCK_BYTES, 0) for at in blocks], "DRAM")
    theirs = agent.get_xfer_descs([(there + at, BLOCK_BYTES, 0) for at in blocks], "DRAM")
    handle = agent.initialize_xfer("READ", ours, theirs, name)
    state = agent.transfer(handle)
    while state == "PROC":
        time.sleep(POLL_SECONDS)
        state = agent.check_xfer_state(handle)
    if state != "DONE":
        raise SystemExit(f"a read ended as {state}")
    agent.release_xfer_handle(handle)


def main(arguments: list[str]) -> None:
    namespace, role, length = arguments
    enter(namespace)
    see_interfaces()
    os.nice(NICENESS)
    (lend if role == "lend" else read)(int(length))


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)  # UCX crashes in the interpreter's exit
