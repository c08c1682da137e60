"""When the engine changes the weights of this process in place (docs/adr/0098).

vLLM tells connectors nothing of it. Its worker's methods are therefore wrapped. What they return or raise is never
touched.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kvdepot.client.vllm.base import compat

if TYPE_CHECKING:
    from kvdepot.client.vllm.worker.worker import WorkerSide

LOGGER = logging.getLogger("vllm.kvdepot")

_SIDES: Final[weakref.WeakSet[WorkerSide]] = weakref.WeakSet()


def watch() -> None:
    """Watch the engine's workers in this process. Raise ConfigError if this vLLM changes weights in another way."""
    worker = compat.worker_class()
    for name in compat.CHANGE_WEIGHTS if worker is not None else ():
        method = getattr(worker, name)
        if not hasattr(method, "kvdepot_sees"):
            setattr(worker, name, _watched(method))


def tell(side: WorkerSide) -> None:
    """Tell this side of every change from now on. Of several engines in one process, a change concerns all."""
    _SIDES.add(side)


def _watched(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def watched(*args: Any, **kwargs: Any) -> Any:
        for side in list(_SIDES):
            try:
                side.weights_change()
            except Exception:
                LOGGER.exception("kvdepot: a rank may not know that its weights change")  # I3: they change all the same
        return method(*args, **kwargs)

    watched.kvdepot_sees = True  # type: ignore[attr-defined]
    return watched
