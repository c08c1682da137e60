"""The tables of call orders against the code of vLLM's model runners that is installed."""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.base import KVConnectorBase
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.v1.worker import kv_connector_model_runner_mixin as mixin
from vllm.v1.worker.gpu import kv_connector as gpu
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2Runner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1Runner

from tests.fakes.call_orders import (
    DRAFT_FORWARD,
    FORWARD,
    POSTPROCESS,
    V1,
    V1_DEFERRED,
    V2,
    V2_DEFERRED,
    V2_LOAD_ARGUMENTS,
)

STEP: Any = SimpleNamespace(kv_connector_metadata=object(), has_sync_kv_loads=False, finished_req_ids=set())


class Recorder(KVConnectorBase):
    """Writes down what it is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.load_arguments: tuple[str, ...] = ()

    def __getattribute__(self, name: str) -> Any:
        own = ("calls", "load_arguments", "register_kv_caches", "set_host_xfer_buffer_ops")
        if name in own or name.startswith("__"):
            return object.__getattribute__(self, name)

        def call(*_: Any, **arguments: Any) -> Any:
            self.calls.append(name)
            if name == "start_load_kv":
                self.load_arguments = tuple(arguments)
            return KVConnectorTransferResults() if name == "get_transfer_results" else None

        return call

    def register_kv_caches(self, kv_caches: Any) -> None: ...

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None: ...


Recorder.__abstractmethods__ = frozenset()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    for module in (mixin, gpu):
        monkeypatch.setattr(module, "get_kv_transfer_group", lambda: recorder)
        monkeypatch.setattr(module, "has_kv_transfer_group", lambda: True)
        monkeypatch.setattr(module, "get_forward_context", lambda: None)
        monkeypatch.setattr(module, "set_forward_context", lambda *_: contextlib.nullcontext())
    return recorder


@pytest.mark.parametrize("deferred", [False, True])
def test_the_v1_runner_calls_in_the_order_of_its_table(recorder: Recorder, deferred: bool) -> None:
    runner = mixin.KVConnectorModelRunnerMixin
    with runner.maybe_get_kv_connector_output(STEP, defer_finalize=deferred):
        recorder.calls.append(FORWARD)
    if deferred:
        recorder.calls += [POSTPROCESS, DRAFT_FORWARD]
        runner.finalize_kv_connector()
    assert ("handle_preemptions", *recorder.calls) == (V1_DEFERRED if deferred else V1)


def parameters(method: Any) -> set[str]:
    return {*inspect.signature(method).parameters} - {"self"}


V2_DEFERS = "defer_finalize" in parameters(gpu.ActiveKVConnector.post_forward)
"""From vLLM 0.33 on."""


@pytest.mark.parametrize("deferred", [False, True] if V2_DEFERS else [False])
def test_the_v2_runner_calls_in_the_order_of_its_table(recorder: Recorder, deferred: bool) -> None:
    connector = gpu.ActiveKVConnector(None, {})
    batch: Any = SimpleNamespace(idx_mapping=None, req_ids=[], num_tokens=0)
    connector.pre_forward(STEP, batch)
    recorder.calls.append(FORWARD)
    connector.finish_forward()
    if not deferred:
        recorder.calls += [POSTPROCESS, DRAFT_FORWARD]
    connector.post_forward(set(), **({"defer_finalize": True} if deferred else {}))
    if deferred:
        recorder.calls += [POSTPROCESS, DRAFT_FORWARD]
        connector.finalize_step()
    assert tuple(recorder.calls) == (V2_DEFERRED if deferred else V2)
    assert recorder.load_arguments == V2_LOAD_ARGUMENTS


def calls_of(method: Any) -> Iterator[str]:
    """The names of what a method calls, in the order of its text."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
        assert isinstance(call.func, ast.Attribute)
        yield call.func.attr


def order_of(method: Any, **names: str) -> list[str]:
    """The order in which a method makes these calls; the last one counts, as other stages leave the method before."""
    calls = list(calls_of(method))
    assert {*names} <= {*calls}, "the runner's own code has other names"
    return [names[call] for call in sorted(names, key=lambda name: len(calls) - calls[::-1].index(name))]


def test_the_v1_runner_copies_states_after_sampling_and_then_drafts() -> None:
    """Also where the drafter computes with tokens that the host has, after its bookkeeping."""
    names = {"_sample": FORWARD, "_update_states_after_model_execute": POSTPROCESS, "finalize_kv_connector": "save"}
    assert order_of(V1Runner.sample_tokens, **names) == [FORWARD, POSTPROCESS, "save"]
    text = inspect.getsource(V1Runner.sample_tokens)
    drafts = [at for at in range(len(text)) if text.startswith("self.propose_draft_token_ids(", at)]
    copies, saves = (text.index(f"self.{name}(") for name in [*names][1:])
    assert drafts
    assert all(copies < at < saves for at in drafts)


def test_the_v2_runner_copies_states_after_sampling_and_then_drafts() -> None:
    names = {"sample": FORWARD, "postprocess_sampled": POSTPROCESS, "propose": DRAFT_FORWARD, "post_forward": "kv"}
    if V2_DEFERS:
        order = [FORWARD, "kv", POSTPROCESS, DRAFT_FORWARD, "save"]
        assert order_of(V2Runner.sample_tokens, **names, finalize_step="save") == order
    else:
        assert order_of(V2Runner.sample_tokens, **names) == [FORWARD, POSTPROCESS, DRAFT_FORWARD, "kv"]
    assert "postprocess_state" in calls_of(V2Runner.postprocess_sampled)


def test_the_runners_have_no_way_through_a_step_that_no_table_has() -> None:
    """A parameter or a method more may be another order."""
    runner, connector = mixin.KVConnectorModelRunnerMixin, gpu.ActiveKVConnector
    assert parameters(runner.maybe_get_kv_connector_output) == {"scheduler_output", "defer_finalize"}
    assert parameters(runner.kv_connector_no_forward) == {"scheduler_output", "vllm_config"}
    assert parameters(connector.pre_forward) == {"scheduler_output", "input_batch", "attn_metadata"}
    assert parameters(connector.post_forward) - {"defer_finalize"} == {"finished_req_ids"}
    of_steps = {name for name in vars(connector) if not name.startswith("_")} - {"set_disabled", "reset_capture_state"}
    deferring = {"finalize_step"} if V2_DEFERS else set()
    assert of_steps == {"pre_forward", "finish_forward", "post_forward", "no_forward"} | deferring


def test_steps_without_tokens_make_the_same_calls(recorder: Recorder) -> None:
    mixin.KVConnectorModelRunnerMixin.kv_connector_no_forward(STEP, None)
    assert ("handle_preemptions", *recorder.calls) == tuple(call for call in V1 if call != FORWARD)
    recorder.calls.clear()
    gpu.ActiveKVConnector(None, {}).no_forward(STEP)
    assert tuple(recorder.calls) == tuple(call for call in V2 if call not in (FORWARD, POSTPROCESS, DRAFT_FORWARD))
    assert recorder.load_arguments == ()
