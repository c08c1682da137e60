"""`kvdepotctl size` and the daemon name the same bytes for an engine."""

from __future__ import annotations

import json
from pathlib import Path

from demo.engine import EngineOptions
from tests.e2e.fleet import Fleet
from tests.rigs.ctl_process import kvdepotctl


def size_arguments(options: EngineOptions) -> list[str]:
    """Return what `size` has to know of an engine on a CPU: its block, and the type of its states.

    vLLM has them in float32 on CPUs that compute in bfloat16, and in the model's type on others.
    """
    block = options.arguments.get("block_size") or options.toy.engine.get("block_size") or 128
    states = "float32" if "avx512_bf16" in Path("/proc/cpuinfo").read_text().split() else options.toy.dtype
    return [
        str(options.model), "--dtype", options.toy.dtype, "--state-dtype", states, "--block-size", str(block),
    ]  # fmt: skip


def assert_size_is_what_the_daemon_reports(fleet: Fleet, name: str) -> None:
    """Compare all objects and the chunk with the namespaces of running engines."""
    endpoint = fleet.daemon.endpoint
    spaces = json.loads(kvdepotctl(endpoint, "ls", "--json").stdout)["namespaces"]
    described = [
        json.loads(kvdepotctl(endpoint, "describe", space["namespace_id"], "--json").stdout)
        for space in spaces
        if space["sessions"]
    ]
    sized = json.loads(kvdepotctl(endpoint, "size", *size_arguments(fleet.options(name)), "--json").stdout)
    objects = {kind: sized[f"{kind}_bytes"] for kind in ("attention", "window", "state") if sized[f"{kind}_bytes"]}
    assert (objects, sized["chunk_tokens"]) in [(one["object_bytes"], one["chunk_tokens"]) for one in described]
