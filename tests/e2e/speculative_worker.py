"""What the ranks of speculating engines have in addition: kernels that the CPU backend lacks, and faults for controls.

vLLM mixes the `worker_extension_cls` of its settings into each worker, and `collective_rpc` calls its methods. So the
product, the demo and the engine's front know nothing of it.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from kvdepot.client.copy.base import CopyBatch, CopyMemory, Direction
from kvdepot.client.copy.cpu import CpuCopier
from vllm.distributed.kv_transfer import get_kv_transfer_group

from tests.fakes import cpu_kernels

EXTENSION = "tests.e2e.speculative_worker.SpeculativeWorker"
_COPY = CpuCopier.copy

cpu_kernels.install()


class SpeculativeWorker:
    """vLLM's `worker_extension_cls`."""

    def leave_out_postprocess(self, parts: int) -> None:
        """Do not copy the last parts of states after sampling: a boundary's block keeps what the step began with."""
        signature = inspect.signature(cpu_kernels.postprocess)

        @functools.wraps(cpu_kernels.postprocess)
        def postprocess(*arguments: Any, **named: Any) -> None:
            call = signature.bind(*arguments, **named)
            call.arguments["state_base_addrs_ptr"] = call.arguments["state_base_addrs_ptr"][:-parts]
            cpu_kernels.postprocess(*call.args, **call.kwargs)

        cpu_kernels.replace_kernel(cpu_kernels.POSTPROCESS, postprocess)

    def spoil_loads(self, prefix: str) -> list[str]:
        """Fill layers whose names begin so with noise after each load. Return their names; "": whole loads again."""
        layers = get_kv_transfer_group().worker_side._layers
        names = [facts.name if prefix and facts.name.startswith(prefix) else "" for facts in layers.facts]

        def spoiled(copier: CpuCopier, arena: CopyMemory, batch: CopyBatch, direction: Direction) -> None:
            _COPY(copier, arena, batch, direction)
            if direction is Direction.LOAD:
                for layer, block in zip(batch.layers, batch.blocks, strict=True):
                    if names[layer]:
                        layers.views[layer][block].random_(-64, 65)

        CpuCopier.copy = spoiled if prefix else _COPY  # type: ignore[assignment,method-assign]
        return [name for name in names if name]
