"""Real daemons with an object tier in Azure, as Azurite speaks it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.azurite import CONTAINER, NO_AZURITE, Azurite
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import wait_until
from tests.rigs.raw_client import CHUNK_TOKENS, RawEngine, keys_of, payload_of, status_of

CONFIG = """
[[tier]]
name = "bucket"
kind = "object"
url = "az://{container}"
prefix = "fleet/one"
allow_http = true
credentials_file = "{credentials}"
capacity = "64MiB"
write = "commit"
io_workers = 2
deadline = "10s"
"""


@pytest.fixture
def azurite() -> Iterator[Azurite]:
    if NO_AZURITE:
        pytest.skip(NO_AZURITE)
    with Azurite() as server:
        yield server


@pytest.mark.long(seconds=15)
@pytest.mark.requirement("T3")
def test_what_one_daemon_put_into_azure_another_one_loads_and_none_puts_it_again(
    azurite: Azurite, tmp_path: Path
) -> None:
    credentials = tmp_path / "credentials"
    credentials.touch(mode=0o600)
    credentials.write_text(azurite.credentials)
    config = CONFIG.format(container=CONTAINER, credentials=credentials)
    keys = keys_of("azure", 12)
    for served in (False, True, True):
        with DaemonProcess(ram="456MiB", config=config) as daemon, RawEngine(daemon.socket) as engine:
            wait_until(lambda: status_of(daemon.socket).tiers[1].state == "ready", "the tier is ready")
            if served:
                wait_until(lambda: engine.locate(keys) == len(keys) * CHUNK_TOKENS, "all are found")
                assert engine.load(keys) == [payload_of(key) for key in keys]
            else:
                engine.store(keys)
            wait_until(lambda: len(azurite.names()) == len(keys), "all are there")
            counters = status_of(daemon.socket).counters
            written = counters.get("shared_publications.bucket/written", 0)
            assert written == (0 if served else len(keys))


@pytest.mark.long(seconds=10)
@pytest.mark.requirement("N3")
def test_wrong_credentials_of_azure_leave_the_tier_offline_with_the_reason(azurite: Azurite, tmp_path: Path) -> None:
    credentials = tmp_path / "credentials"
    credentials.touch(mode=0o600)
    wrong = "QUJD" * 20 + "QQ=="
    credentials.write_text(
        azurite.credentials.partition("account_key")[0] + f"account_key = {wrong}\nendpoint = {azurite.url}\n"
    )
    config = CONFIG.format(container=CONTAINER, credentials=credentials)
    with DaemonProcess(ram="456MiB", config=config) as daemon:
        wait_until(lambda: status_of(daemon.socket).tiers[1].state == "offline", "the tier is offline")
        wait_until(lambda: "unreadable" in status_of(daemon.socket).tiers[1].reason, "the reason is said")
        assert wrong not in daemon.log
