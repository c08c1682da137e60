"""What several of these tests stand on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.other_uids import HONEST, HOSTILE, OtherUser, open_to_group


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess() as process:
        open_to_group(process)
        yield process


@pytest.fixture
def honest(request: pytest.FixtureRequest) -> Iterator[OtherUser]:
    with OtherUser(HONEST, request.module.__name__) as user:
        yield user


@pytest.fixture
def hostile(request: pytest.FixtureRequest) -> Iterator[OtherUser]:
    with OtherUser(HOSTILE, request.module.__name__) as user:
        yield user
