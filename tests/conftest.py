"""How property tests run: without a limit per example (machines are shared), repeatable in CI. Fixtures of many."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from kvdepot.core.errors import KvDepotError
from kvdepot.server.engine.counters import Counters
from kvdepot.server.guard import Guard
from kvdepot.server.io.wire import WireError
from kvdepot.server.metric_families import FAMILIES
from kvdepot.server.tiers.base import UnknownWorker

from tests.fakes.fuse_directory import FuseDirectory

settings.register_profile(
    "kvdepot",
    deadline=None,
    derandomize="CI" in os.environ,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kvdepot")


_BEGAN = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sample", "a sample of the tests")
    group.addoption("--sample-seconds", type=float, help="begin no test after so long")
    group.addoption("--sample-seed", type=int, help="draws the order of the modules")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("--sample-seed")
    if seed is not None:
        paths = sorted({str(item.path) for item in items})
        random.Random(seed).shuffle(paths)
        items.sort(key=lambda item: paths.index(str(item.path)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before anything of the test is set up."""
    seconds = item.config.getoption("--sample-seconds")
    if seconds is not None and time.monotonic() - _BEGAN > seconds:
        pytest.skip("not in this sample: its time is over")


@pytest.fixture(autouse=True, scope="session")
def declared_counters() -> Iterator[None]:
    """What a test makes the daemon's code count has a declared name and label (row P10)."""
    declared = {family.name: family for family in FAMILIES if family.samples is None}
    add = Counters.add

    def checked(self: Counters, name: str, amount: float = 1) -> None:
        family, _, key = name.partition(".")
        assert family in declared, f"{name}: declare it in server/kvdepot/server/metric_families.py"
        label = key.partition("/")[2] if declared[family].tier_kinds else key
        assert label in (declared[family].values or ("",)), f"{name}: not among the labels declared"
        add(self, name, amount)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Counters, "add", checked)
        yield


@pytest.fixture(autouse=True)
def unexpected_errors() -> Iterator[list[str]]:
    """A guard keeps what a callback raises from a test. What the test has not raised itself fails it all the same.

    A test that has them come takes out of the list what it expects.
    """
    found: list[str] = []
    caught = Guard.caught

    def noted(self: Guard, place: str, error: Exception) -> None:
        if _unexpected(error):
            found.append(f"{place}: {error!r}")
        caught(self, place, error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Guard, "caught", noted)
        yield found
    assert not found, f"a guard caught {found}"


def _unexpected(error: Exception) -> bool:
    """A broken assertion, or what the product raised of its own accord and does not name."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    ours = trace is not None and "/kvdepot/" in trace.tb_frame.f_code.co_filename
    return isinstance(error, AssertionError) or (
        ours and not isinstance(error, KvDepotError | UnknownWorker | WireError)
    )  # fmt: skip


@pytest.fixture
def fuse() -> Iterator[FuseDirectory]:
    """A mount of the test's own; modules that use it skip where there is no FUSE."""
    with FuseDirectory() as mounted:
        yield mounted
