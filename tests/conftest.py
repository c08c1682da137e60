"""How all tests run: with a seed of their own run, and with limits that know the machine. Fixtures of many."""

from __future__ import annotations

import atexit
import gc
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator
from types import FrameType
from typing import Any, Final

import pytest
import pytest_timeout
from hypothesis import HealthCheck, settings
from kvdepot.core.errors import KvDepotError
from kvdepot.server.depot.counters import Counters
from kvdepot.server.io.framing import FrameError
from kvdepot.server.observe.metric_families import FAMILIES
from kvdepot.server.platform.guard import Guard
from kvdepot.server.storage.base import UnknownWorker

from tests.fakes.fuse_directory import FuseDirectory
from tests.rigs import forked_program
from tests.rigs.forked_workers import command_of
from tests.rigs.patience import Deadline
from tests.rigs.seeds import RUN_SEED

settings.register_profile(
    "kvdepot",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kvdepot")


LONG_SECONDS = 30.0
"""What a long test takes that does not say it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sample", "a sample of the tests")
    group.addoption("--sample-seconds", type=float, help="draw tests that take so long, one after the other")
    group.addoption("--begin-within", type=float, help="seconds after which no test begins: the rest is skipped")
    group = parser.getgroup("workers", "the workers of pytest-xdist")
    group.addoption("--preload", action="append", default=[], help="module that is imported once for all workers")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Before Hypothesis reads its options."""
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(RUN_SEED)


def pytest_report_header() -> str:
    return f"seed of this run, which repeats it: KVDEPOT_SEED={RUN_SEED}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    if exitstatus:
        terminalreporter.write_line(pytest_report_header())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    if config.option.preload:
        ignored = [f"--ignore={path}" for path in config.option.ignore or ()]
        python = command_of(config.option.preload, [*ignored, *config.args])
        for spec in specs:
            spec.python = python


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """What tests import is left out of every collection of garbage, now and later: vLLM alone is a million objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # modules in C complain of what is not freed at the end


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Draws tests until their time is spent: `long(seconds=...)` says what each takes without other load.

    Those with `always=True` come first, then one case of each test before any other of it. They also run first, so that
    a slow machine does not skip them.
    """
    left = config.getoption("--sample-seconds")
    if left is None:
        return
    shuffled, turns, chosen = sorted(items, key=lambda item: item.nodeid), Counter[str](), dict[pytest.Item, bool]()
    random.Random(RUN_SEED).shuffle(shuffled)
    drawn = list[tuple[bool, int, float, pytest.Item]]()
    for item in shuffled:
        name = item.nodeid.partition("[")[0]
        said = marker.kwargs if (marker := item.get_closest_marker("long")) else {"seconds": 0.0}
        drawn.append((not said.get("always", False), turns[name], said.get("seconds", LONG_SECONDS), item))
        turns[name] += 1
    for sometimes, _, seconds, item in sorted(drawn, key=lambda one: one[:2]):
        if seconds <= left:
            left -= seconds
            chosen[item] = sometimes
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = sorted((item for item in items if item in chosen), key=chosen.__getitem__)


_BEGAN = pytest.StashKey[float]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A sample is no longer on a slow machine. What it has no time for is there to be seen, as skipped."""
    within = item.config.getoption("--begin-within")
    began = item.config.stash.setdefault(_BEGAN, time.monotonic())
    if within is not None and time.monotonic() - began > within:
        pytest.skip(f"the sample's {within:g} s are over")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """No test leaves settings of kvdepot or vLLM to the next one.

    vLLM's plugin sets the endpoint in the environment, for the processes of its engine. Each of vLLM's configurations
    sets variables for these, LD_PRELOAD among them. Later daemons would have them, and could not be forked.
    """
    forked_program.look_at_environment()
    before = _engine_environment()
    try:
        return (yield)
    finally:
        for name in _engine_environment().keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


_OF_ENGINES: Final = (
    "KVDEPOT_", "LD_PRELOAD", "LOCAL_WORLD_SIZE", "NUMEXPR_MAX_THREADS", "TORCHINDUCTOR_", "VLLM_",
)  # fmt: skip
"""Beginnings of names of variables."""


def _engine_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_OF_ENGINES)}


_TICK_SECONDS = 30.0


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> bool | None:
    """A test's time limit passes more slowly on a busy machine, as every wait within it does."""
    if settings.method != "signal" or threading.current_thread() is not threading.main_thread():
        return None
    deadline = Deadline(settings.timeout)

    def look(_: int, __: FrameType | None) -> None:
        __tracebackhide__ = True
        left = deadline.left()
        if left <= 0:
            pytest_timeout.timeout_sigalrm(item, settings)
        else:
            signal.setitimer(signal.ITIMER_REAL, min(left, _TICK_SECONDS))

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    item.cancel_timeout = cancel  # type: ignore[attr-defined]  # what the plugin calls at the end of the test
    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, min(settings.timeout, _TICK_SECONDS))
    return True


@pytest.fixture(autouse=True, scope="session")
def declared_counters() -> Iterator[None]:
    """What a test makes the daemon's code count has a declared name and label (row P10)."""
    declared = {family.name: family for family in FAMILIES if family.samples is None}
    add = Counters.add

    def checked(self: Counters, name: str, amount: float = 1) -> None:
        family, _, key = name.partition(".")
        assert family in declared, f"{name}: declare it in server/kvdepot/server/observe/metric_families.py"
        label = key.partition("/")[2] if declared[family].tier_kinds else key
        known = label in (declared[family].values or ("",)) or declared[family].or_tiers
        assert known, f"{name}: not among the labels declared"
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
        ours and not isinstance(error, KvDepotError | UnknownWorker | FrameError)
    )  # fmt: skip


@pytest.fixture
def fuse() -> Iterator[FuseDirectory]:
    """A mount of the test's own; modules that use it skip where there is no FUSE."""
    with FuseDirectory() as mounted:
        yield mounted
