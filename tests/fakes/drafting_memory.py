"""KV memory of a rank that drafts: what each token's slot and each part of a state must hold follows from its prefix.

Every slot of attention is checked, not whole blocks: a step with drafts writes slots whose tokens may be rejected. A
state has two parts, as in a gated delta net: the inputs of the last tokens (conv), and the rest (temporal).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, Final

import numpy as np
import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec

from tests.fakes.rank_memory import RankMemory

HISTORY: Final = 3
"""Inputs that a state keeps: the width of its convolution, without the token that it computes."""
BLOCK: Final = 16
_INPUT_FLOATS: Final = 4
_TEMPORAL_FLOATS: Final = 10
_SLOT_BYTES: Final = 64  # of a token in a layer of attention, as `RankMemory` lays it out
_INPUT_BYTES: Final = 4 * _INPUT_FLOATS
_POISON: Final = 0xEE
_NO_TOKEN: Final = b"before the first token"


def state_shapes(scratch_blocks: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of a state's parts. Its conv part has room for the inputs of one step's drafts."""
    return (HISTORY + scratch_blocks, _INPUT_FLOATS), (_TEMPORAL_FLOATS,)


def chain_of(tokens: Iterable[int]) -> list[bytes]:
    """By position: a digest of the tokens up to it."""
    return list(itertools.accumulate(tokens, _link, initial=b""))[1:]


@functools.lru_cache(1 << 16)
def _link(before: bytes, token: int) -> bytes:
    return blake2b(before + token.to_bytes(4, "little", signed=True), digest_size=16).digest()


@functools.lru_cache(1 << 17)
def _content(label: str, digest: bytes, size_bytes: int) -> bytes:
    block = blake2b(label.encode() + digest, digest_size=min(size_bytes, 64)).digest()
    return block * (size_bytes // len(block)) + block[: size_bytes % len(block)]


def after(digest: bytes, token: int) -> bytes:
    """What a draft layer's KV depends on that also reads the token after a prefix."""
    return digest + b"next" + token.to_bytes(4, "little", signed=True)


def chunk_end(digest: bytes) -> bytes:
    """What it depends on at the end of a chunk of a prompt, in the V1 runner.

    There the runner gives its drafter the last known token for the next one
    (v1/spec_decode/llm_base_proposer.py, prepare_next_token_ids_padded). It costs accepted drafts only.
    """
    return digest + b"end of a chunk"


class DraftingMemory(RankMemory):
    """The KV tensors of one rank."""

    def __init__(self, layout: KVCacheConfig, rank: int) -> None:
        super().__init__(layout, rank)
        self._views = {name: _view(cache) for name, cache in self.caches.items()}
        self._input_rows = {
            name: group.kv_cache_spec.shapes[0][0]
            for group in layout.kv_cache_groups
            if isinstance(group.kv_cache_spec, MambaSpec)
            for name in group.layer_names
        }

    def _label(self, kind: str, layer: str) -> str:
        return f"{self.weights}:{kind}:{layer}:{0 if layer in self._alike else self.rank}"

    # --- attention

    def _slot(self, layer: str, table: Sequence[int], position: int) -> np.ndarray[Any, Any]:
        slots: np.ndarray[Any, Any] = self._views[layer][table[position // BLOCK]]
        begin = position % BLOCK * _SLOT_BYTES
        return slots[begin : begin + _SLOT_BYTES]

    def write_slot(self, layer: str, table: Sequence[int], position: int, digest: bytes) -> None:
        content = _content(self._label("kv", layer), digest, _SLOT_BYTES)
        self._slot(layer, table, position)[:] = np.frombuffer(content, np.uint8)

    def poison_slot(self, layer: str, table: Sequence[int], position: int) -> None:
        self._slot(layer, table, position)[:] = _POISON

    def slot_bytes(self, layer: str, table: Sequence[int], position: int) -> bytes:
        return self._slot(layer, table, position).tobytes()

    def slot_holds(self, layer: str, table: Sequence[int], position: int, digest: bytes) -> bool:
        content = _content(self._label("kv", layer), digest, _SLOT_BYTES)
        return self.slot_bytes(layer, table, position) == content

    # --- states

    def _inputs(self, layer: str, block_id: int) -> np.ndarray[Any, Any]:
        """Of a state's conv part, one row a token."""
        rows = self._input_rows[layer]
        inputs: np.ndarray[Any, Any] = self._views[layer][block_id][: rows * _INPUT_BYTES].reshape(rows, _INPUT_BYTES)
        return inputs

    def _temporal(self, layer: str, block_id: int) -> np.ndarray[Any, Any]:
        temporal: np.ndarray[Any, Any] = self._views[layer][block_id][self._input_rows[layer] * _INPUT_BYTES :]
        return temporal

    def _input(self, layer: str, chain: Sequence[bytes], position: int) -> bytes:
        digest = chain[position] if position >= 0 else _NO_TOKEN
        return _content(self._label("input", layer), digest, _INPUT_BYTES)

    def write_temporal(self, layer: str, block_id: int, digest: bytes) -> None:
        content = _content(self._label("state", layer), digest, 4 * _TEMPORAL_FLOATS)
        self._temporal(layer, block_id)[:] = np.frombuffer(content, np.uint8)

    def write_inputs(self, layer: str, block_id: int, chain: Sequence[bytes], begin: int, end: int) -> None:
        """The inputs of these positions, from the first row on. The rows after them keep what they have."""
        inputs = self._inputs(layer, block_id)
        for row, position in enumerate(range(begin, end)):
            inputs[row] = np.frombuffer(self._input(layer, chain, position), np.uint8)

    def holds_temporal(self, layer: str, block_id: int, digest: bytes) -> bool:
        content = _content(self._label("state", layer), digest, 4 * _TEMPORAL_FLOATS)
        return self._temporal(layer, block_id).tobytes() == content

    def holds_inputs(self, layer: str, block_id: int, bias: int, chain: Sequence[bytes], tokens: int) -> bool:
        """Whether the inputs of the last of so many tokens begin `bias` rows into the conv part."""
        expected = b"".join(self._input(layer, chain, position) for position in range(tokens - HISTORY, tokens))
        return self._inputs(layer, block_id)[bias : bias + HISTORY].tobytes() == expected

    def poison_state(self, layer: str, block_id: int) -> None:
        self._views[layer][block_id][:] = _POISON

    def move_state(self, layer: str, table: Sequence[int], source: int, target: int, bias: int) -> None:
        """Copy a state between two columns of a request's table, as `_copy_mamba_state_block` does it.

        The state after `bias` drafts: its inputs begin `bias` rows into the source's conv part, and the rest lies in
        the scratch column of that draft (v1/worker/mamba_utils.py).
        """
        inputs = self._inputs(layer, table[source])[bias:].copy()
        self._temporal(layer, table[target])[:] = self._temporal(layer, table[source + bias]).copy()
        self._inputs(layer, table[target])[: len(inputs)] = inputs


def _view(cache: torch.Tensor) -> np.ndarray[Any, Any]:
    """A cache's bytes, one row a block."""
    array = cache.numpy().view(np.uint8)
    view: np.ndarray[Any, Any] = np.lib.stride_tricks.as_strided(
        array, (cache.shape[0], cache[0].numel()), (cache.stride(0), 1), writeable=True
    )
    return view
