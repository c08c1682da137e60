"""vLLM finds the connectors by the plugin of this package."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from kvdepot.client.endpoint import ENDPOINT_VARIABLE, default_endpoint
from kvdepot.client.vllm.base import plugin
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from tests.rigs.patience import patient

_NAMED = """
import os, sys
from vllm.plugins import load_general_plugins
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
assert not any(name.startswith("kvdepot") for name in sys.modules)
for given in ("", "unix:///given"):  # vLLM is imported once for both
    if os.fork():
        assert os.wait()[1] == 0
        continue
    if given:
        os.environ["KVDEPOT_ENDPOINT"] = given
    load_general_plugins()
    print("NAMED", os.environ["KVDEPOT_ENDPOINT"])
    for name in ("KVDepotConnector", "WeightedMultiConnector"):
        print("NAMED", KVConnectorFactory.get_connector_class_by_name(name).__module__)
    break
"""


def test_the_installed_package_has_the_entry_point() -> None:
    (point,) = (point for point in entry_points(group="vllm.general_plugins") if point.name == "kvdepot")
    assert point.value == plugin.ENTRY_POINT
    assert point.load() is plugin.register


@pytest.mark.long(seconds=45)
def test_vllm_knows_the_connectors_by_their_names_alone() -> None:
    """As engines of `tests/e2e` do. And processes that this one starts use the same daemon."""
    environment = {name: value for name, value in os.environ.items() if name != ENDPOINT_VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", _NAMED],
        capture_output=True, text=True, check=True, timeout=patient(300), env=environment,
    )  # fmt: skip
    named = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("NAMED ")]
    modules = ["kvdepot.client.vllm.connector", "kvdepot.client.vllm.weighted"]
    assert named == [default_endpoint(), *modules, "unix:///given", *modules]


def test_a_vllm_that_has_moved_its_names_starts_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(ENDPOINT_VARIABLE, "unix:///a")
    monkeypatch.delattr(KVConnectorFactory, "register_connector")
    logger = logging.getLogger("vllm.kvdepot")
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    plugin.register()
    assert "the connectors are not known by name" in caplog.text
