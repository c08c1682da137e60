"""Step 9: two engines without a model on a real daemon, and the death of one while it stores."""

from __future__ import annotations

import mmap
import os
import select
import signal
import subprocess
import time
from importlib.util import find_spec
from typing import Any

from kvdepot.client.extents import parse_extents

from benchmarks.day_one import child
from benchmarks.day_one.steps import Context, NotRunError, WrongByteError

_NEEDED = {
    "grpc": "grpcio", "google.protobuf": "protobuf", "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection", "pydantic": "pydantic", "numcodecs": "numcodecs", "lz4": "lz4",
    "xxhash": "xxhash", "prometheus_client": "prometheus_client",
}  # fmt: skip
"""Module -> wheel. The daemon's; nothing else of the kit needs them."""
_RAM = "384MiB"
_STORING_SECONDS, _LOOK_SECONDS = 0.5, 1.0


def missing() -> list[str]:
    """Return the wheels that this step lacks here."""
    return [wheel for module, wheel in _NEEDED.items() if not _is_there(module)]


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def processes(context: Context) -> None:
    """Compare digests of what one engine stored and the other one loaded; then kill one that stores."""
    if lacking := missing():
        raise NotRunError(f"these wheels are not here: {', '.join(lacking)}")
    from kvdepot.server.arena.holding import held_files

    from benchmarks.depot import daemon

    with daemon(_RAM) as node:
        endpoint = str(node.endpoint)
        stored = child.answer(context, "engine", "store", endpoint)
        loaded = child.answer(context, "engine", "load", endpoint)
        if not (stored and loaded and "digest" in stored and "digest" in loaded):
            raise RuntimeError(f"an engine ended without a digest: {stored}, {loaded}")
        if stored["digest"] != loaded["digest"]:
            raise WrongByteError("the second engine has not loaded what the first one stored")
        context.note("stored and loaded", stored["digest"][:16])
        (path,) = node.arena_directory.glob("*.arena")
        column, data = held_files(path).others
        os.close(column)
        with os.fdopen(data) as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as arena:
            kill(context, endpoint, arena)


def kill(context: Context, endpoint: str, arena: mmap.mmap) -> None:
    """Kill an engine while it stores. After the kernel has told its death, nothing is written any more."""
    engine = child.spawn("engine", "forever", endpoint, stand_in=context.machine.stands_in)
    try:
        extents = parse_extents(bytes.fromhex(_first_answer(engine)["extents"]), len(arena))
        time.sleep(_STORING_SECONDS)
        descriptor = os.pidfd_open(engine.pid)
        engine.send_signal(signal.SIGKILL)
        told = select.poll()
        told.register(descriptor, select.POLLIN)
        told.poll()
        os.close(descriptor)
        then = _held(arena, extents)
        time.sleep(_LOOK_SECONDS)
        now = _held(arena, extents)
    finally:
        engine.kill()
        engine.communicate()
    if not any(then):
        raise RuntimeError("the engine had not stored anything when it was killed")
    if then != now:
        raise WrongByteError("extents were written after the death of their rank had been told")
    context.note("written after the death was told", "nothing")
    context.note("values that the last stores left", sorted(set(then)))


def _first_answer(engine: subprocess.Popen[str]) -> Any:
    assert engine.stdout is not None
    for line in engine.stdout:
        if (said := child.last([line])) is not None:
            return said
    raise RuntimeError("the engine ended before it stored")


def _held(arena: mmap.mmap, extents: Any) -> bytes:
    """Return what the extents hold."""
    places = zip(extents.offsets.tolist(), extents.lengths.tolist(), strict=True)
    return b"".join(arena[offset : offset + length] for offset, length in places)
