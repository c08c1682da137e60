"""vLLM's plugin entry point: it makes the connectors known by their names alone, without a module path."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Final

from kvdepot.client.endpoint import ENDPOINT_VARIABLE, default_endpoint

ENTRY_POINT: Final = "kvdepot.client.vllm.base.plugin:register"
"""As pyproject.toml has it."""
_CONNECTORS: Final = {
    "KVDepotConnector": "kvdepot.client.vllm.connector",
    "WeightedMultiConnector": "kvdepot.client.vllm.weighted",
}


def register() -> None:
    """Register the connectors, which import their modules when they are used.

    vLLM calls this in each of its processes, of every engine in this environment. So it never raises: an engine that
    does not use kvdepot must start with any vLLM.

    The first of these processes starts the others. They inherit the endpoint that it found, so that the scheduler and
    all ranks use one daemon, whatever starts in between.
    """
    try:
        os.environ.setdefault(ENDPOINT_VARIABLE, default_endpoint())
        from kvdepot.client.vllm.base.compat import KVConnectorFactory

        for name, module in _CONNECTORS.items():
            with contextlib.suppress(ValueError):  # it is known
                KVConnectorFactory.register_connector(name, module, name)
    except Exception as error:  # noqa: BLE001 - whatever this vLLM has moved
        logging.getLogger("vllm.kvdepot").warning("kvdepot: the connectors are not known by name: %s", error)
