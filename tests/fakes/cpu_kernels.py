"""Stand-ins for what vLLM's CPU backend lacks for speculative decoding on hybrid models in align mode.

Without them an engine ends at its first request, with or without kvdepot: two Triton kernels have no fallback there.
They copy recurrent states between columns of a request's block table, as the kernels do:

- `precopy`: before a step, the state of the step before into the column of this one.
- `postprocess`: after sampling, the state at the last boundary that was crossed into that boundary's block.

Only the SD layout of the convolution's state is written, and only the calls of the V1 runner. `install` compares the
parameters of vLLM's kernels with these, so that a later vLLM says what has moved.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

POSTPROCESS: Final = "postprocess_mamba_fused_kernel"
PRECOPY: Final = "precopy_mamba_align_fused_kernel"
_ADDRESS_MASK: Final = 2**64 - 1
"""vLLM keeps addresses as signed numbers."""


@dataclass(frozen=True, slots=True)
class _States:
    """The states of all layers, as vLLM describes them to its kernels: one item a layer and part."""

    block_table_ptrs: Any  # int64 [groups]
    block_table_stride_req: int  # elements
    base_addrs: Any
    block_strides: Any  # bytes
    elem_sizes: Any  # bytes
    inner_sizes: Any  # elements: of a token of the convolution, or of the whole temporal part
    conv_widths: Any  # tokens; 0: a temporal part
    group_indices: Any

    def copy(self, row: int, source: int, target: int, bias: int) -> None:
        """Copy a request's states between columns, where `bias` more tokens are in the state than in `source`."""
        for state in range(len(self.base_addrs)):
            self._copy(state, row, source, target, bias)

    def _copy(self, state: int, row: int, source: int, target: int, bias: int) -> None:
        table = int(self.block_table_ptrs[int(self.group_indices[state])]) & _ADDRESS_MASK
        columns = (ctypes.c_int32 * (max(source + bias, target) + 1)).from_address(
            table + row * int(self.block_table_stride_req) * ctypes.sizeof(ctypes.c_int32)
        )
        base, stride = int(self.base_addrs[state]) & _ADDRESS_MASK, int(self.block_strides[state])
        item_bytes = int(self.inner_sizes[state]) * int(self.elem_sizes[state])
        width = int(self.conv_widths[state])
        if width:  # the same block, `bias` tokens further; a move, because source and target may be one block
            start = base + columns[source] * stride + bias * item_bytes
            ctypes.memmove(base + columns[target] * stride, start, (width - bias) * item_bytes)
        else:  # the scratch column of draft token `bias`
            ctypes.memmove(base + columns[target] * stride, base + columns[source + bias] * stride, item_bytes)


def postprocess(
    num_accepted_tokens_ptr: Any, mamba_state_idx_ptr: Any, num_scheduled_tokens_ptr: Any,
    num_computed_tokens_ptr: Any, num_draft_tokens_ptr: Any, block_table_ptrs_ptr: Any, block_table_stride_req: int,
    state_base_addrs_ptr: Any, state_block_strides_ptr: Any, state_elem_sizes_ptr: Any, state_inner_sizes_ptr: Any,
    state_conv_widths_ptr: Any, state_group_indices_ptr: Any, state_dim_row_count_ptr: Any,
    state_dim_row_stride_ptr: Any, num_accepted_tokens_out_ptr: Any, idx_mapping_ptr: Any, num_reqs: int,
    block_size: int, COPY_BLOCK_SIZE: int, CONV_STATE_DIM_FIRST: bool, HAS_IDX_MAPPING: bool = False,  # noqa: N803
    PRECOMPUTED_NEW_COMPUTED: bool = False, TEMPORAL_TILES: int = 1,  # noqa: N803
) -> None:  # fmt: skip
    """Stand in for `postprocess_mamba_fused_kernel`."""
    _check_call(idx_mapping_ptr, CONV_STATE_DIM_FIRST, PRECOMPUTED_NEW_COMPUTED)
    states = _States(
        block_table_ptrs_ptr, block_table_stride_req, state_base_addrs_ptr, state_block_strides_ptr,
        state_elem_sizes_ptr, state_inner_sizes_ptr, state_conv_widths_ptr, state_group_indices_ptr,
    )  # fmt: skip
    for row in range(num_reqs):
        source = int(mamba_state_idx_ptr[row])
        running = int(num_computed_tokens_ptr[row] + num_scheduled_tokens_ptr[row] - num_draft_tokens_ptr[row])
        boundary = (running + int(num_accepted_tokens_ptr[row]) - 1) // block_size * block_size
        if boundary < running:
            continue
        bias, target = boundary - running, boundary // block_size - 1
        if source == target:
            num_accepted_tokens_out_ptr[row] = 1
        if source != target or bias:
            states.copy(row, source, target, bias)


def precopy(
    mamba_state_idx_ptr: Any, src_col_ptr: Any, token_bias_ptr: Any, block_table_ptrs_ptr: Any,
    block_table_stride_req: int, state_base_addrs_ptr: Any, state_block_strides_ptr: Any, state_elem_sizes_ptr: Any,
    state_inner_sizes_ptr: Any, state_conv_widths_ptr: Any, state_group_indices_ptr: Any,
    state_dim_row_count_ptr: Any, state_dim_row_stride_ptr: Any, idx_mapping_ptr: Any, num_reqs: int,
    COPY_BLOCK_SIZE: int, CONV_STATE_DIM_FIRST: bool, HAS_IDX_MAPPING: bool = True, TEMPORAL_TILES: int = 1,  # noqa: N803
) -> None:  # fmt: skip
    """Stand in for `precopy_mamba_align_fused_kernel`."""
    _check_call(idx_mapping_ptr, CONV_STATE_DIM_FIRST)
    states = _States(
        block_table_ptrs_ptr, block_table_stride_req, state_base_addrs_ptr, state_block_strides_ptr,
        state_elem_sizes_ptr, state_inner_sizes_ptr, state_conv_widths_ptr, state_group_indices_ptr,
    )  # fmt: skip
    for row in range(num_reqs):
        source, target = int(src_col_ptr[row]), int(mamba_state_idx_ptr[row])
        if source not in (-1, target):
            states.copy(row, source, target, int(token_bias_ptr[row]))


def _check_call(idx_mapping: Any, dim_first: bool, precomputed: bool = False) -> None:
    assert idx_mapping is None and not precomputed, "a call of the V2 runner"
    assert not dim_first, "the DS layout of the convolution's state"


def install() -> None:
    """Use the stand-ins in this process. Call it in every rank, before the first step."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    replace_kernel(POSTPROCESS, postprocess)
    replace_kernel(PRECOPY, precopy)
    _fix_convolution(gdn_attention)


def replace_kernel(name: str, kernel: Callable[..., None]) -> None:
    """Launch `kernel` in the place of a kernel of `mamba_utils`, which alone launches it in the V1 runner.

    Not by vLLM's `register_kernels`: it looks at what every imported module has, and fails at a module of cffi.
    """
    from vllm.triton_utils.dispatcher import KernelOverride
    from vllm.v1.worker import mamba_utils

    theirs = getattr(mamba_utils, name)
    names = theirs.arg_names if isinstance(theirs, KernelOverride) else tuple(inspect.signature(theirs).parameters)
    assert names == tuple(inspect.signature(kernel).parameters), f"{name} has other parameters: {names}"
    setattr(mamba_utils, name, KernelOverride(theirs, kernel))


_ROLL: Final = """\
            keep = B[:, offset + 1 : offset + 1 + (state_len - q_i)]
            new_B = torch.cat([keep, x_seq], dim=-1)
            B.copy_(new_B)
"""
"""Of vLLM 0.32's fallback. It ends the engine in a step with fewer drafts than there may be."""
_RIGHT_ROLL: Final = """\
            history = conv_in[0][:, 1:]
            B[:, : history.size(1)].copy_(history)
"""
_ROLL_OF_NEXT: Final = "B[:, : width - 2 + q_i] = conv_in[0, :, 1:]"
"""Of vLLM 0.33, which is right."""


def _fix_convolution(gdn_attention: ModuleType) -> None:
    """Keep the tokens of a step where the next step looks for them, however many drafts the step had."""
    source = inspect.getsource(gdn_attention._spec_forward)
    if _ROLL_OF_NEXT in source:
        return
    assert _ROLL in source, "another fallback: look whether it still needs a repair"
    exec(compile(source.replace(_ROLL, _RIGHT_ROLL), str(gdn_attention.__file__), "exec"), vars(gdn_attention))
