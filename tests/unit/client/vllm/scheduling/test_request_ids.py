"""What the installed vLLM makes of a request's id is one of the forms in which users' ids are found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvdepot.core.request_ids import meant
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest


def test_the_engine_s_id_of_an_answer_is_found_by_the_users_id() -> None:
    params = SamplingParams(n=3)
    request: Any = SimpleNamespace(
        request_id="cmpl-my-id-0", external_req_id=None, params=params, sampling_params=params
    )
    InputProcessor.assign_request_id(request)
    parent: Any = ParentRequest(request)
    ids = [request.request_id, *(parent.get_child_info(index)[0] for index in range(3)), "cmpl-not-my-id"]
    assert ids[1] != ids[0] != "cmpl-my-id-0"
    for asked in ("my-id", "cmpl-my-id", "cmpl-my-id-0"):
        assert meant(asked, ids) == [0, 1, 2, 3]
