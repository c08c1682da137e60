"""Weights that the engine changes in place: no rank copies before the scheduler side knows of a later reset."""

from __future__ import annotations

import ast
import sys
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
from kvdepot.client.vllm.base import compat
from kvdepot.client.vllm.base.metadata import StepMeta
from kvdepot.client.vllm.base.worker_hooks import CHANGE_WEIGHTS
from kvdepot.client.vllm.worker import weight_changes
from kvdepot.client.vllm.worker.layers import RankLayers
from kvdepot.client.vllm.worker.worker import WorkerSide
from kvdepot.core.errors import ConfigError

from tests.fakes.idle_attachment import IdleAttachment


class Copies:
    """What a rank tells its copying thread."""

    def __init__(self) -> None:
        self.allowed = True

    def suspend(self) -> bool:
        self.allowed = False
        return True

    def resume(self) -> None:
        self.allowed = True


class Rank:
    def __init__(self) -> None:
        self.copies = Copies()
        copies: Any = self.copies
        self.side = WorkerSide(0, IdleAttachment(), copies, RankLayers((), ()))
        self._number = 0

    def step(self, resets: int, *, computes: bool = True) -> bool:
        """Return whether it copies then."""
        self._number += 1
        self.side.start_loads(StepMeta(number=self._number, resets=resets, computes=computes))
        return self.copies.allowed


@pytest.fixture
def rank() -> Rank:
    return Rank()


class Model:
    """An engine's model."""

    def __init__(self) -> None:
        self.loaded: list[object] = []

    def load_weights(self, weights: object) -> set[str]:
        self.loaded.append(weights)
        return {"loaded"}


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> type[Model]:
    made = type("Served", (Model,), {})
    monkeypatch.setattr(compat, "model_class", lambda _config: made)
    return made


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, model: type[Model]) -> Any:
    """An engine's worker, as its module has it."""
    methods: dict[str, Any] = {name: lambda self, *arguments: arguments for name in CHANGE_WEIGHTS}
    made = type("Worker", (), methods | {"load_model": lambda self: model().load_weights("files")})
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_worker", SimpleNamespace(Worker=made))
    return made


@pytest.mark.requirement("I1")
def test_after_a_change_a_later_reset_lets_it_copy_and_nothing_else_does(rank: Rank) -> None:
    assert rank.step(resets=1)
    rank.side.weights_change()
    assert not rank.step(resets=1)
    rank.side.resume()  # KV memory is there; what may be copied is another question
    assert not rank.step(resets=0), "a step without a scheduler side"
    assert not rank.step(resets=1)
    assert rank.step(resets=2)


def test_a_reset_just_before_the_change_is_a_later_one(rank: Rank) -> None:
    """No step computed in between, so no KV of the new epoch is of the former weights."""
    rank.step(resets=1)
    rank.step(resets=2, computes=False)
    rank.side.weights_change()
    assert rank.step(resets=2, computes=False)
    assert rank.step(resets=2)
    rank.side.weights_change()
    assert not rank.step(resets=2)


def test_memory_that_is_away_stays_so_after_a_reset(rank: Rank) -> None:
    rank.side.suspend()
    rank.side.weights_change()
    assert not rank.step(resets=1)
    rank.side.resume()
    assert rank.copies.allowed


@pytest.mark.requirement("I1")
@pytest.mark.parametrize("name", CHANGE_WEIGHTS)
def test_each_way_to_change_weights_is_seen_once_it_begins(rank: Rank, worker: Any, name: str) -> None:
    weight_changes.watch(None)
    weight_changes.watch(None)
    weight_changes.tell(rank.side)
    assert getattr(worker(), name)("path") == ("path",)
    assert not rank.copies.allowed


@pytest.mark.requirement("I1")
def test_weights_that_an_extension_loads_into_the_model_are_seen(rank: Rank, worker: Any, model: type[Model]) -> None:
    served = model()
    served.load_weights("files")  # at the start, before there is a connector
    weight_changes.watch(None)
    weight_changes.watch(None)
    weight_changes.tell(rank.side)
    assert served.load_weights("others") == {"loaded"}
    assert not rank.copies.allowed
    assert served.loaded == ["files", "others"]
    assert not hasattr(Model.load_weights, "kvdepot_wraps"), "models of other classes are not ours to watch"


def test_another_engine_that_starts_in_this_process_changes_no_weights(rank: Rank, worker: Any) -> None:
    weight_changes.watch(None)
    weight_changes.tell(rank.side)
    assert worker().load_model() == {"loaded"}
    assert rank.copies.allowed


KNOWN: Final = {
    "what is computed with, and where": (
        "annotate_profile", "check_health", "compile_or_warm_up_model", "determine_available_memory", "execute_model",
        "execute_dummy_batch", "get_cache_block_size_bytes", "get_kv_cache_spec", "get_supported_kv_cache_layouts",
        "get_kv_connector_handshake_metadata", "get_simple_cpu_offload_num_cpu_blocks", "init_device",
        "initialize_from_config", "profile", "release_late_interaction_query_cache", "reset_encoder_cache",
        "reset_mm_cache", "sample_tokens", "set_kv_cache_layout", "shutdown", "synchronize_device",
        "take_draft_token_ids", "update_max_model_len",
    ),
    "reads": (
        "compute_weight_checksums", "get_compilation_match_table", "get_draft_model", "get_encoder_timing_stats",
        "get_model", "get_model_inspection", "get_supported_tasks", "list_loras", "randomize_dummy_inputs",
        "save_sharded_state", "save_tensorized_model", "sleep_mode_backend", "supports_draft_weight_updates",
        "vocab_size",
    ),
    "adapters have keys of their own": ("add_lora", "pin_lora", "remove_lora"),
    "the engine resets its caches around it": ("discard", "sleep", "wake_up"),
    "takes effect with the next `reload_weights`": ("update_config",),
    "takes effect with the next `update_weights`": ("start_draft_weight_update",),
    "connects to a trainer": ("init_weight_transfer_engine", "shutdown_weight_transfer_engine"),
    "refused where it is used": ("elastic_ep_execute", "handle_ft_command"),
    "suspends the communication between ranks": ("checkpoint_prepare", "checkpoint_restore"),
    "is the start": ("load_model",),
    "calls what its user gives it (docs/vllm.md)": ("apply_model",),
}  # fmt: skip


@pytest.mark.requirement("I1")
def test_each_method_of_a_worker_changes_weights_by_our_word_or_does_not() -> None:
    """By vLLM's text: a method that a later version adds is judged here before that version is served."""
    found = find_spec("vllm")
    assert found is not None and found.origin is not None
    methods = set()
    for file, name in (("gpu_worker.py", "Worker"), ("worker_base.py", "WorkerBase")):
        tree = ast.parse((Path(found.origin).parent / "v1/worker" / file).read_text())
        (kind,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
        methods |= {node.name for node in kind.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"}
    assert methods - {*CHANGE_WEIGHTS, *chain.from_iterable(KNOWN.values())} == set()


def test_an_engine_that_changes_weights_in_another_way_is_refused(worker: Any) -> None:
    del worker.reload_weights
    with pytest.raises(ConfigError, match="reload_weights"):
        weight_changes.watch(None)
