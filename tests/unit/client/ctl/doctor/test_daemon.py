"""`kvdepotctl doctor` of a daemon, its sockets, its configuration, and of engines."""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from kvdepot.client.credentials import Credentials
from kvdepot.client.ctl.doctor import daemon as asking
from kvdepot.client.ctl.doctor import daemon_checks, engines
from kvdepot.client.ctl.doctor.daemon import Attachment, Daemon
from kvdepot.client.ctl.doctor.findings import Outcome
from kvdepot.client.ctl.doctor.host import Host
from kvdepot.client.ctl.doctor.settings import UNIT_CONFIG, Place, Settings, config_file, read_settings
from kvdepot.client.endpoint import Endpoint
from kvdepot.core.report import NamespaceStatus, SessionStatus
from kvdepot.server.daemon import app

from tests.fakes.daemon_status import NVME, RAM, STATUS

ENDPOINT = Endpoint("/run/kvdepot/kvdepot.sock")


SILENT = Daemon(ENDPOINT, None, "UNAVAILABLE: No such file or directory")
SETTINGS = Settings(
    "a.toml", 1 << 30, (Place("ram", "ram", "/dev/shm", 1 << 30), Place("nvme", "disk", "/mnt", 1 << 40)),
    (str(ENDPOINT),), metrics="127.0.0.1:9421",
)  # fmt: skip
BLAMED = {Outcome.WARN, Outcome.FAIL}


def good() -> Daemon:
    """The daemon as this process sees it, which may be a copy of the one that has imported this module."""
    return Daemon(ENDPOINT, STATUS, peer=Credentials(7, 990, 990), attachment=Attachment("", 1 << 30, (os.getpid(),)))


def with_tier(**changed: object) -> Daemon:
    return replace(good(), status=replace(STATUS, tiers=(RAM, replace(NVME, **changed))))  # type: ignore[arg-type]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """With both sockets."""
    (tmp_path / "run/kvdepot").mkdir(parents=True)
    for path in (ENDPOINT.path, ENDPOINT.attach_path):
        os.mknod(tmp_path / path[1:], stat.S_IFSOCK | 0o660)
        (tmp_path / path[1:]).chmod(0o660)
    return Host(tmp_path, environment={})


def test_a_good_daemon_is_ok(host: Host) -> None:
    findings = [
        daemon_checks.check_daemon(good()),
        daemon_checks.check_same_configuration(good(), SETTINGS),
        daemon_checks.check_sockets(good(), SETTINGS, host),
        daemon_checks.check_descriptor(good()),
        daemon_checks.check_identity(good()),
        daemon_checks.check_metrics(SETTINGS, good(), "kvdepot"),
        *daemon_checks.check_tiers(good()),
    ]
    assert {one.outcome for one in findings} == {Outcome.OK}


def test_a_daemon_that_does_not_answer_is_one_failure(tmp_path: Path) -> None:
    found = daemon_checks.check_daemon(SILENT)
    assert found.outcome is Outcome.FAIL and "No such file" in found.message and "systemctl start" in found.fix
    others = [
        daemon_checks.check_same_configuration(SILENT, SETTINGS),
        daemon_checks.check_sockets(SILENT, SETTINGS, Host(tmp_path)),
        daemon_checks.check_descriptor(SILENT),
        daemon_checks.check_identity(SILENT),
    ]
    assert {one.outcome for one in others} == {Outcome.SKIPPED}
    assert not list(daemon_checks.check_tiers(SILENT))
    denied = daemon_checks.check_daemon(replace(SILENT, silence="UNAVAILABLE: connect: Permission denied"))
    assert "[operators]" in denied.fix


def test_a_daemon_that_is_not_ready_or_degraded() -> None:
    waiting = replace(good(), status=replace(STATUS, ready=False, reason="starting"))
    assert daemon_checks.check_daemon(waiting).outcome is Outcome.FAIL
    degraded = replace(good(), status=replace(STATUS, reason="the arena stopped growing"))
    assert daemon_checks.check_daemon(degraded).outcome is Outcome.WARN


@pytest.mark.parametrize(
    ("daemon", "outcome", "message"),
    [
        (with_tier(state="offline", reason="not mounted?"), "fail", "offline: not mounted?"),
        (with_tier(breaker="open", reason="io_error: read"), "fail", "breaker open"),
        (with_tier(state="read-only", reason="the file system is full"), "warn", "the file system is full"),
        (with_tier(reason="the write budget of this day is spent"), "warn", "budget"),
    ],
)
def test_a_bad_disk_is_told_by_the_daemon(daemon: Daemon, outcome: str, message: str) -> None:
    ram, tier = daemon_checks.check_tiers(daemon)
    assert ram.outcome is Outcome.OK
    assert (tier.subject, tier.outcome) == ("nvme", outcome) and message in tier.message and "dmesg" in tier.fix


def test_a_tier_that_is_being_made_is_well() -> None:
    growing = replace(STATUS, tiers=(replace(STATUS.tiers[0], state="growing"), *STATUS.tiers[1:]))
    found = [
        *daemon_checks.check_tiers(replace(good(), status=growing)),
        *daemon_checks.check_tiers(with_tier(state="opening")),
    ]
    assert {one.outcome for one in found} == {Outcome.OK}


def test_another_configuration_than_the_running_one() -> None:
    smaller = daemon_checks.check_same_configuration(with_tier(capacity_bytes=1 << 39), SETTINGS)
    assert smaller.outcome is Outcome.WARN and "capacity of nvme" in smaller.message
    ram = daemon_checks.check_same_configuration(good(), replace(SETTINGS, capacity_bytes=4 << 30))
    assert ram.outcome is Outcome.WARN and "capacity of ram" in ram.message
    elsewhere = daemon_checks.check_same_configuration(good(), replace(SETTINGS, listen=("unix:///x",)))
    assert elsewhere.outcome is Outcome.WARN and "none of the sockets of a.toml" in elsewhere.message


def test_sockets_that_are_not_as_they_should_be(host: Host) -> None:
    def found(daemon: Daemon | None = None, settings: Settings = SETTINGS) -> tuple[Outcome, str]:
        one = daemon_checks.check_sockets(daemon or good(), settings, host)
        assert one.fix
        return one.outcome, one.message

    assert found(settings=replace(SETTINGS, mode=0o600))[0] is Outcome.WARN
    assert found(settings=replace(SETTINGS, group_id=12345))[0] is Outcome.WARN
    assert found(replace(good(), peer=None, attach_error="Connection refused")) == (
        Outcome.FAIL, f"{ENDPOINT.attach_path}: Connection refused",
    )  # fmt: skip
    attach = host.path(ENDPOINT.attach_path)
    attach.chmod(0o600)
    assert found()[0] is Outcome.WARN
    attach.chmod(0o666)
    assert "every user" in found()[1]
    attach.unlink()
    assert found()[0] is Outcome.FAIL
    attach.touch()
    assert found() == (Outcome.FAIL, "what lies there is no socket")


def test_no_descriptor_and_another_namespace_of_pids() -> None:
    stolen = replace(good(), attachment=Attachment("the answer came without a descriptor"))
    found = daemon_checks.check_descriptor(stolen)
    assert found.outcome is Outcome.FAIL and "transport = stream" in found.fix
    assert daemon_checks.check_identity(stolen).outcome is Outcome.SKIPPED
    for pids in ((0,), (), (os.getpid() + 1,)):
        other = daemon_checks.check_identity(replace(good(), attachment=Attachment("", 1, pids)))
        assert other.outcome is Outcome.WARN and "--pid=host" in other.fix
    unseen = daemon_checks.check_identity(replace(good(), peer=Credentials(0, 990, 990)))
    assert unseen.outcome is Outcome.WARN and "cannot be seen" in unseen.message
    assert "--read-only" in daemon_checks.check_descriptor(replace(good(), attachment=None)).message


# The port of the metrics


class _Health(BaseHTTPRequestHandler):
    body = b'{"ready": true, "reason": ""}'

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def http() -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), _Health) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_who_is_at_the_port_of_metrics(http: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"127.0.0.1:{http.server_address[1]}"
    assert asking.metrics_answer(address, 5) == "kvdepot"
    assert asking.metrics_answer(f"0.0.0.0:{http.server_address[1]}", 5) == "kvdepot"
    for body in (b'{"status": "UP"}', b"[]"):
        monkeypatch.setattr(_Health, "body", body)
        assert asking.metrics_answer(address, 5) == "something else"
    monkeypatch.setattr(_Health, "body", b"<html>")
    taken = asking.metrics_answer(address, 5)
    assert taken.startswith("no good answer")
    found = daemon_checks.check_metrics(SETTINGS, good(), taken)
    assert found.outcome is Outcome.FAIL and "address that is free" in found.fix


def test_a_port_of_metrics_that_nobody_has() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
    assert asking.metrics_answer(f"127.0.0.1:{port}", 5) == "free"
    with closing(socket.socket()) as bound:
        bound.bind(("127.0.0.1", 0))
        taken = asking.metrics_answer(f"127.0.0.1:{bound.getsockname()[1]}", 5)
    assert "cannot be bound: Address already in use" in taken
    assert daemon_checks.check_metrics(SETTINGS, good(), taken).outcome is Outcome.FAIL
    assert daemon_checks.check_metrics(SETTINGS, SILENT, "free").outcome is Outcome.OK
    assert daemon_checks.check_metrics(SETTINGS, good(), "free").outcome is Outcome.WARN
    assert daemon_checks.check_metrics(SETTINGS, good(), "").outcome is Outcome.SKIPPED


# The configuration


def test_a_configuration_is_read_by_the_daemons_own_program(tmp_path: Path) -> None:
    file, key_file = tmp_path / "kvdepot.toml", tmp_path / "nfs.key"
    key_file.touch(0o600)
    key_file.write_text("01" * 32)
    file.write_text(
        f'[daemon]\nlisten = ["unix:///run/x.sock"]\nmode = "0600"\n[ram]\ncapacity = "640MiB"\npath = "{tmp_path}"\n'
        '[[tier]]\nname = "nvme"\nkind = "disk"\npath = "/mnt/nvme"\ncapacity = "256MiB"\n'
        '[[tier]]\nname = "nfs"\nkind = "shared"\npath = "/mnt/nfs"\ncapacity = "1GiB"\non_root_filesystem = true\n'
        f'key_file = "{key_file}"\n'
    )
    settings, found = read_settings(str(file))
    assert found.outcome is Outcome.OK and settings is not None
    assert (settings.listen, settings.mode, settings.group_id) == (("unix:///run/x.sock",), 0o600, -1)
    assert (settings.capacity_bytes, settings.metrics) == (640 << 20, "127.0.0.1:9421")
    ram, nvme, nfs = settings.places
    assert ram.path == str(tmp_path) and 0 < ram.needed_bytes < 640 << 20
    assert ram.held.startswith("kvdepot-*-") and ram.held.endswith(".arena*")
    assert nvme == Place("nvme", "disk", "/mnt/nvme", 256 << 20, "*")
    assert nfs == Place("nfs", "shared", "/mnt/nfs", 1 << 30, "", on_root_filesystem=True, keyed=True)


def test_a_configuration_that_is_refused_hangs_or_cannot_be_read_here(tmp_path: Path) -> None:
    file = tmp_path / "kvdepot.toml"
    file.write_text("[sesions]\n")
    none, refused = read_settings(str(file))
    assert none is None and refused.outcome is Outcome.FAIL and "did you mean 'sessions'?" in refused.message
    hang = (sys.executable, "-I", "-c", "import time; time.sleep(60)")
    hung = read_settings(None, hang, 0.2)[1]
    assert hung.outcome is Outcome.FAIL and "not over within 0.2 s" in hung.message and "mount" in hung.fix
    absent = read_settings(None, (sys.executable, "-I", "-c", "import pydantic_that_is_absent"))[1]
    assert absent.outcome is Outcome.SKIPPED and "kvdepot[server]" in absent.message
    said: dict[str, object] = {"file": "embedded default", "note": "no disk tier: full", "tiers": []}
    said["daemon"] = {"listen": [], "mode": 0o600, "group_id": -1, "metrics": ""}
    said["ram"] = {
        "capacity_bytes": 2, "created_in": "", "arena_path": "/dev/shm/kvdepot-0-a.arena",
        "arena_file_bytes": 1, "sealed": True,
    }  # fmt: skip
    noted = read_settings(None, (sys.executable, "-I", "-c", f"print({json.dumps(said)!r})"))
    assert noted[0] is not None and noted[1].outcome is Outcome.WARN and "no disk tier" in noted[1].message


@pytest.mark.parametrize("said", ["", "Hello from sitecustomize", "[]", "3", "null", '{"file": "a"}', '{"ram": []}'])
def test_a_kvdepotd_that_answers_something_else_is_a_finding(said: str) -> None:
    settings, finding = read_settings(None, (sys.executable, "-I", "-c", f"print({said!r})"))
    assert settings is None and finding.outcome is Outcome.FAIL
    assert (said or "nothing") in finding.message and "version" in finding.fix


def test_the_file_of_the_service_is_the_default(host: Host) -> None:
    assert config_file(host, None) is None
    host.path(UNIT_CONFIG).parent.mkdir(parents=True)
    host.path(UNIT_CONFIG).touch()
    assert config_file(host, None) == str(host.path(UNIT_CONFIG))
    assert config_file(host, "mine.toml") == "mine.toml"


def test_check_config_without_a_file_is_about_the_embedded_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert app.main(["check-config", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["daemon"]["listen"] == [f"unix://{tmp_path}/kvdepot/kvdepot.sock"]


# Engines


@pytest.mark.parametrize(
    ("version", "outcome"),
    [("0.32.0", "ok"), ("0.33.1.dev3", "ok"), ("0.31.9", "fail"), (None, "skipped"), ("", "skipped")],
)
def test_versions_of_vllm(version: str | None, outcome: str) -> None:
    found = engines.check_vllm(version)
    assert found.outcome == outcome
    assert (outcome == "fail") == ("0.32 to 0.33" in found.fix)


def test_the_version_of_vllm_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "an_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert engines.vllm_version("an_engine") == ""
    (package / "_version.py").write_text("__version__: str\n__version__ = version = '0.32.0+cpu'\n")
    assert engines.vllm_version("an_engine") == "0.32.0+cpu"
    assert engines.vllm_version("no_engine") is None


def hashed(namespace: int, seed: str, label: str = "a") -> NamespaceStatus:
    identity = {"hashes.algorithm": '"xxhash"', "hashes.seed": f'"{seed}"'}
    return NamespaceStatus(bytes([namespace]) * 16, label, identity=identity)


def test_engines_that_hash_differently(host: Host) -> None:
    assert engines.check_hashes(host, (), [hashed(1, "0"), hashed(2, "0"), hashed(3, "1", "b")]).outcome is Outcome.OK
    found = engines.check_hashes(host, (), [hashed(1, "0"), hashed(2, "1")])
    assert (
        found.outcome is Outcome.WARN
        and "engines of a hash differently" in found.message
        and "same number" in found.fix
    )


def test_engines_with_several_hash_seeds(host: Host) -> None:
    sessions = (SessionStatus("one", pids=(11, 12)), SessionStatus("gone", pids=(13,)))
    for pid, text in ((11, "HOME=/\0PYTHONHASHSEED=0\0"), (12, "PYTHONHASHSEED=0\0")):
        host.path(f"/proc/{pid}").mkdir(parents=True)
        host.path(f"/proc/{pid}/environ").write_text(text)
    found = engines.check_hashes(host, sessions, ())
    assert found.outcome is Outcome.OK and "is 0 for all 2 engine processes" in found.message
    host.path("/proc/12/environ").write_text("HOME=/\0")
    found = engines.check_hashes(host, sessions, ())
    assert found.outcome is Outcome.WARN and "0, unset" in found.message


@pytest.mark.parametrize(("seed", "said"), [("", "refused for xxhash"), ("random", "refused"), ("7", "is 7 here")])
def test_the_seed_here_where_no_engine_is_attached(tmp_path: Path, seed: str, said: str) -> None:
    found = engines.check_hashes(Host(tmp_path, environment={"PYTHONHASHSEED": seed}), (), ())
    assert found.outcome is Outcome.OK and said in found.message
