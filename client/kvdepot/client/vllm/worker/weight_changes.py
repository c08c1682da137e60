"""When the engine changes the weights of this process in place (docs/adr/0098, 0099).

vLLM tells connectors nothing of it. Its worker's methods are therefore wrapped, and `load_weights` of the model, which
worker extensions call. What they return or raise is never touched.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from kvdepot.client.vllm.base import compat, worker_hooks

if TYPE_CHECKING:
    from kvdepot.client.vllm.worker.worker import WorkerSide

LOGGER = logging.getLogger("vllm.kvdepot")

_SIDES: Final[weakref.WeakSet[WorkerSide]] = weakref.WeakSet()
_STARTS: Final = ContextVar("another engine of this process loads its model", default=False)


def watch(vllm_config: Any) -> None:
    """Watch the engine's workers in this process. Raise ConfigError if this vLLM changes weights in another way.

    The engine's own model is loaded by now.
    """
    worker = worker_hooks.worker_class()
    if worker is None:
        return
    for name in worker_hooks.CHANGE_WEIGHTS:
        worker_hooks.wrap_once(worker, name, _watched)
    worker_hooks.wrap_once(compat.model_class(vllm_config), "load_weights", _watched)
    worker_hooks.wrap_once(worker, "load_model", _starting)


def tell(side: WorkerSide) -> None:
    """Tell this side of every change from now on. Of several engines in one process, a change concerns all."""
    _SIDES.add(side)


def _watched(method: Callable[..., Any]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        for side in list(_SIDES) if not _STARTS.get() else ():
            try:
                side.weights_change()
            except Exception:
                LOGGER.exception("kvdepot: a rank may not know that its weights change")  # I3: they change all the same
        return method(*args, **kwargs)

    return watched


def _starting(method: Callable[..., Any]) -> Callable[..., Any]:
    def starting(*args: Any, **kwargs: Any) -> Any:
        before = _STARTS.set(True)
        try:
            return method(*args, **kwargs)
        finally:
            _STARTS.reset(before)

    return starting
