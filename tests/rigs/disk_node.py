"""A daemon with a disk tier, as an engine sees it, and a reboot of its node."""

from __future__ import annotations

from pathlib import Path

from kvdepot.core.report import TierStatus

from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import wait_until
from tests.rigs.raw_client import RawEngine

RAM = "512MiB"


def config(path: Path, **keys: str) -> str:
    lines = {"capacity": '"128MiB"', "write": '"commit"'} | keys
    text = "\n".join(f"{key} = {value}" for key, value in lines.items())
    breaker = '[breaker]\nfailures = 2\nprobe_every = "200ms"\n'
    return f'[[tier]]\nname = "nvme"\nkind = "disk"\npath = "{path}"\n{text}\n{breaker}'


def daemon(path: Path, **keys: str) -> DaemonProcess:
    return DaemonProcess(ram=RAM, config=config(path, **keys))


def tier(engine: RawEngine) -> TierStatus:
    return engine.status().tiers[1]


def ram(engine: RawEngine) -> TierStatus:
    return engine.status().tiers[0]


def wait_ready(engine: RawEngine) -> None:
    wait_until(lambda: tier(engine).state == "ready", "the tier opens", seconds=30)


def wait_written(engine: RawEngine, objects: int) -> None:
    wait_until(lambda: tier(engine).objects == objects, f"{objects} objects on the disk", seconds=30)


def reboot(node: DaemonProcess, *, kill: bool = False, config: str | None = None) -> None:
    """The memory is gone, the disk is not."""
    node.kill() if kill else node.stop()
    node.arena.unlink()
    node.config = config or node.config
    node.start()
