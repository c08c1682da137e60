"""The daemon under a supervisor that speaks systemd's protocol: readiness, watchdog, and RAM over restarts."""

from __future__ import annotations

import grp
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.fakes.confined import settings
from tests.fakes.supervisor import Supervisor
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import patient, wait_until
from tests.rigs.raw_client import CHUNK_TOKENS, RawEngine, keys_of, payload_of, status_of
from tests.rigs.systemd import NEEDS_SYSTEMD

UNIT = Path(__file__).resolve().parents[2] / "configs" / "systemd" / "kvdepotd.service"
WATCHDOG_SECONDS = 2.0


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    running = DaemonProcess()
    yield running
    running.close()


@pytest.fixture
def supervisor(daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    watching = Supervisor(daemon.directory / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", str(watching.address))
    monkeypatch.setenv("WATCHDOG_USEC", str(int(WATCHDOG_SECONDS * 1e6)))
    yield watching
    watching.close()


def test_it_is_ready_when_it_answers_pings_and_says_when_it_stops(
    daemon: DaemonProcess, supervisor: Supervisor
) -> None:
    daemon.start(ready=False)
    supervisor.wait_for("READY=1")
    assert status_of(daemon.socket).pid == daemon.pid
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as engine:
        engine.connect(str(daemon.attach_socket))
    supervisor.hear()
    before = len(supervisor.told)
    for _ in range(3):
        supervisor.wait_for("WATCHDOG=1")
    assert "READY=1" not in supervisor.told[before:]
    assert daemon.stop() == 0
    supervisor.wait_for("STOPPING=1")
    supervisor.hear()
    assert supervisor.told[0].startswith("FDSTOREREMOVE=1")  # a start that fails later loses nothing
    assert any(said.startswith("STATUS=") and "of the arena are populated" in said for said in supervisor.told)


def test_a_start_that_is_refused_is_never_ready(daemon: DaemonProcess, supervisor: Supervisor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        daemon.start(ready=False, options=("--metrics", f"127.0.0.1:{taken.getsockname()[1]}"))
        assert daemon.process is not None
        assert daemon.process.wait(patient(60)) == 1
        daemon.process = None
    supervisor.hear()
    assert "READY=1" not in supervisor.told


@pytest.mark.requirement("T6")
def test_ram_is_kept_over_restarts_though_its_name_is_removed(daemon: DaemonProcess, supervisor: Supervisor) -> None:
    """As an upgrade ends and starts it, with what RemoveIPC or a private directory does to names; once by SIGKILL."""
    daemon.start()
    keys = keys_of("upgraded", 20)
    engine = RawEngine(daemon.socket)
    engine.store(keys)
    wait_until(lambda: engine.counter("checksummed_objects") == len(keys), "the sums", 60)
    for run, end in enumerate((daemon.stop, daemon.kill), 2):
        for path in daemon.arena_directory.iterdir():  # the arena, its data and its lock
            path.unlink()
        end()
        engine.close()
        supervisor.hear()
        assert [name for name, _ in supervisor.store] == ["arena", "arena-data", "arena-data"]
        supervisor.restart(daemon)
        assert "adopted (its name was removed)" in daemon.log
        engine = RawEngine(daemon.socket)
        assert engine.status().run == run
        wait_until(lambda: not status_of(daemon.socket).tiers[0].unverified_objects, "verification", 60)
        assert engine.locate(keys) == len(keys) * CHUNK_TOKENS
        assert engine.load(keys) == [payload_of(key) for key in keys]
    engine.close()
    assert not list(daemon.arena_directory.glob("*.arena"))


@NEEDS_SYSTEMD
def test_it_serves_within_the_unit_s_confinement(daemon: DaemonProcess) -> None:
    """System calls, capabilities and memory as the unit leaves them: workers, tiers, sockets, an engine."""
    daemon.under = ("tests.fakes.confined", str(UNIT))
    daemon.ram = "640MiB"
    daemon.config = f"""
[daemon]
group = "{grp.getgrgid(os.getgid()).gr_name}"
[[tier]]
name = "disk"
kind = "disk"
path = "{daemon.directory}/disk"
capacity = "1GiB"
write = "commit"
[[tier]]
name = "shared"
kind = "shared"
path = "{daemon.directory}/shared"
capacity = "1GiB"
write = "commit"
on_root_filesystem = true
"""
    (daemon.directory / "shared").mkdir(mode=0o700)
    daemon.start()
    confinement = dict(
        line.split(":", 1) for line in Path(f"/proc/{daemon.pid}/status").read_text().splitlines() if ":" in line
    )
    assert (int(confinement["CapEff"], 16), confinement["Seccomp"].strip()) == (0, "2")
    keys = keys_of("confined", 4)
    with RawEngine(daemon.socket) as engine:
        engine.store(keys)
        assert engine.load(keys) == [payload_of(key) for key in keys]
        prompts = count()

        def summed() -> bool:
            """The checksum worker takes sums. Of any one object a tier that writes it may be the first to."""
            engine.store(keys_of(f"confined-{next(prompts)}", 1))
            return engine.counter("checksummed_objects") > 0

        wait_until(summed, "a sum", 60)
        stored = len(keys) + next(prompts)
        wait_until(lambda: [tier.objects for tier in engine.status().tiers] == [stored] * 3, "all in every tier", 60)
    _reload(daemon)
    assert daemon.stop() == 0
    assert "Operation not permitted" not in daemon.log
    assert "Traceback" not in daemon.log


def _reload(daemon: DaemonProcess) -> None:
    """As the unit has it, within the same confinement: what is new is taken on; what cannot be fails the reload."""
    (command,) = settings(UNIT, "ExecReload")
    file = daemon.directory / "kvdepot.toml"
    for before, after, fails in (
        ('name = "disk"', 'name = "disk"\nload_weight = 2.0', False),
        ('name = "disk"', 'name = "disk"\ncodec = "lz4"', True),
    ):
        assert before in file.read_text()
        file.write_text(file.read_text().replace(before, after))
        done = subprocess.run(
            [sys.executable, "-m", "tests.fakes.confined", UNIT, "kvdepot.client.ctl.app", *command.split()[1:]],
            env=os.environ | {"KVDEPOT_ENDPOINT": daemon.endpoint},
            capture_output=True, text=True, timeout=patient(90), check=False,
        )  # fmt: skip
        assert (done.returncode != 0) == fails, done.stderr
        assert ("tier.disk.codec: cannot change while the daemon runs" in done.stderr) == fails
