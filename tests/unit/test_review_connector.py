"""Orders of events that a review of the connector found wrong, each as small as it can be."""

from __future__ import annotations

import logging
import time
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvdepot.client.vllm import compat
from kvdepot.client.vllm.compat import environment_facts
from kvdepot.client.vllm.connector import KVDepotConnector
from kvdepot.client.vllm.layers import RankLayers, rank_layers
from kvdepot.client.vllm.metadata import LoadOp, StepMeta
from kvdepot.client.vllm.namespaces import Namespaces
from kvdepot.client.vllm.pins import BlockHolds
from kvdepot.client.vllm.rank import software_facts
from kvdepot.client.vllm.weights import Digests, LoraSalts, weights_source
from kvdepot.client.vllm.worker import LINGER_SECONDS, WorkerSide, _Outcome
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec


def salt_of(salts: LoraSalts, path: Path, load: int) -> bytes:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        found = salts.salt(SimpleNamespace(lora_path=str(path), lora_int_id=load, load_inplace=False))
        if found is not None:
            return found
        time.sleep(0.005)
    raise AssertionError("no digest")


def test_p2_an_adapter_replaced_on_disk_and_loaded_anew_has_another_salt(tmp_path: Path) -> None:
    """Unloaded, overwritten, loaded again under the same name and path: the engine gives it a new id."""
    digests = Digests(None)
    salts = LoraSalts(digests)
    (tmp_path / "adapter").write_bytes(b"x" * 64)
    first = salt_of(salts, tmp_path, 1)
    (tmp_path / "adapter").write_bytes(b"y" * 64)
    second = salt_of(salts, tmp_path, 2)
    digests.close()
    assert first != second


def test_p2_one_declared_revision_of_two_models_is_not_one_identity() -> None:
    load = SimpleNamespace(load_format="auto", download_dir=None)
    names = ("org/base-tuned-for-code", "org/base-tuned-for-law")
    models = [SimpleNamespace(model=name, revision=None, model_weights="", seed=0) for name in names]
    first, second = (weights_source(model, load, "v1").text for model in models)
    assert first != second


@pytest.mark.parametrize("name", ["VLLM_CPU_INT4_W4A8", "VLLM_FLOAT32_MATMUL_PRECISION", "ONEDNN_DEFAULT_FPMATH_MODE"])
def test_p2_a_variable_that_chooses_arithmetic_is_part_of_the_ranks_facts(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv(name, raising=False)
    before = software_facts(RankLayers((), ()))
    monkeypatch.setenv(name, "medium" if name.endswith("PRECISION") else "1")
    assert software_facts(RankLayers((), ())) != before


@pytest.mark.parametrize("name", ["_is_amx_tile_supported", "_is_avx512_supported"])
def test_p2_what_a_processor_can_do_is_part_of_the_ranks_facts(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """With AMX, vLLM orders keys and values within a block otherwise; get_cpu_capability does not tell of it."""
    before = software_facts(RankLayers((), ()))
    has = getattr(torch.cpu, name)()
    monkeypatch.setattr(torch.cpu, name, lambda: not has)
    assert software_facts(RankLayers((), ())) != before


def test_p2_so_are_transformers_and_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    before = software_facts(RankLayers((), ()))
    assert software_facts(RankLayers((), ())) == before
    with monkeypatch.context() as patched:
        patched.setattr(compat, "version", lambda name: "0.0.1")
        assert software_facts(RankLayers((), ())) != before
    plugin = EntryPoint("models", "package:register", "vllm.general_plugins")
    monkeypatch.setattr(compat, "entry_points", lambda group: [plugin] if group == plugin.group else [])
    assert software_facts(RankLayers((), ())) != before


def test_p2_the_precision_of_float32_products_is_part_of_the_ranks_facts() -> None:
    before = software_facts(RankLayers((), ()))
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium" if precision != "medium" else "highest")
        assert software_facts(RankLayers((), ())) != before
    finally:
        torch.set_float32_matmul_precision(precision)


def test_p3_where_an_engine_runs_is_no_part_of_its_environment() -> None:
    here = {"VLLM_CPU_OMP_THREADS_BIND": "0-15", "VLLM_DP_RANK": "1", "VLLM_PORT": "1", "VLLM_LOGGING_LEVEL": "DEBUG"}
    assert environment_facts(here) == {}


class IdleAttachment:
    arena: Any = None
    session: bytes | None = None

    def close(self) -> None: ...


class DoneCopies:
    """A copying thread that has finished a load since the last step."""

    def __init__(self, *done: _Outcome) -> None:
        self._done = list(done)
        self.waits: list[float] = []

    def wait_for_loads(self, seconds: float) -> None:
        self.waits.append(seconds)

    def submit(self, *_: Any) -> None: ...

    def take_done(self) -> list[_Outcome]:
        done, self._done = self._done, []
        return done


@pytest.mark.parametrize("cancelled", [True, False])
def test_i1d_a_load_cancelled_between_its_copy_and_its_report_does_not_succeed(cancelled: bool) -> None:
    """The copy ends, the weights change, the next step reports: the bytes are of the old weights."""
    load = LoadOp(7, "r", time.monotonic() + 60, 1, b"", ())
    rank: Any = WorkerSide(0, IdleAttachment(), None, RankLayers((), ()))
    rank._running = DoneCopies(_Outcome(load, frozenset()))
    rank.start_loads(StepMeta(cancelled_loads=[7] if cancelled else []))
    results = rank.results()
    assert results.finished_recving == {"r"}
    assert results.failed_recving == ({"r"} if cancelled else set())
    assert rank.take_meta().loads == {7: (1, int(cancelled))}


@pytest.mark.parametrize(("idle", "loads"), [(True, True), (True, False), (False, True)])
def test_i2_only_a_step_that_computes_nothing_waits_for_the_loads_that_begin_in_it(idle: bool, loads: bool) -> None:
    rank: Any = WorkerSide(0, IdleAttachment(), None, RankLayers((), ()))
    rank._running = copies = DoneCopies()
    rank.start_loads(StepMeta(idle=idle, loads=[object()] if loads else []))  # type: ignore[list-item]
    rank.results()
    assert copies.waits == ([LINGER_SECONDS] if idle and loads else [])
    assert LINGER_SECONDS <= 0.002, "about a turn of an engine without work"


def test_two_connectors_in_one_engine_both_hear_of_a_reuse() -> None:
    """vLLM keeps one callback a block, and a second connector of the same engine would replace the first one's."""
    pool = BlockPool(5, enable_caching=True, hash_block_size=16)
    first, second = BlockHolds.of(pool), BlockHolds.of(pool)
    block = pool.get_new_blocks(1)
    held = [holds.hold((block[0].block_id,)) for holds in (first, second)]
    pool.free_blocks(block)
    pool.get_new_blocks(4)
    assert [hold.alive for hold in held] == [False, False]
    assert BlockHolds.of(BlockPool(5, enable_caching=True, hash_block_size=16)) is not first


def test_i3_another_connectors_handshake_turns_kvdepot_off_and_raises_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Under MultiConnector the ranks answer with the first child's metadata, whoever that is."""
    connector = KVDepotConnector.__new__(KVDepotConnector)
    connector._world_size = 1
    connector.scheduler_side = None
    with caplog.at_level(logging.ERROR, logger="vllm.kvdepot"):
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): SimpleNamespace(agent_name="another")})
    assert connector.scheduler_side is None


def test_i3_a_configuration_that_cannot_be_read_is_a_problem_and_no_exception() -> None:
    def build() -> Any:
        raise TypeError("a foreign object")

    session: Any = SimpleNamespace(attached=True, refusal="", registered=lambda _: False)
    namespaces = Namespaces(session, build, 1, logging.getLogger("test"), lambda: "x", lambda: 0.0)
    namespaces.update()
    assert "a foreign object" in namespaces.problem
    assert namespaces.usable is None


def _facts(blocks: int, cache: torch.Tensor) -> Any:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
    layout = KVCacheConfig(blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["a"], spec)])
    return rank_layers({"a": cache}, layout, (0,)).facts


def test_p4_how_many_blocks_an_engine_has_is_no_part_of_its_layers_facts() -> None:
    """Two engines with other amounts of memory share bytes, also where keys and values lie outside the blocks."""

    def outside(blocks: int) -> torch.Tensor:
        return torch.zeros(2, blocks, 16, 2, 8).transpose(0, 1)

    assert _facts(4, outside(4)) == _facts(7, outside(7))
    assert _facts(4, outside(4)) != _facts(4, torch.zeros(4, 16, 2, 2, 8).permute(0, 2, 1, 3, 4)), "another order"
