"""`kvdepotctl bench`: the real command against a real daemon. What is asserted is what it says, not how fast."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvdepot.client.ctl.medium import TEMPORARY, measure
from kvdepot.core.calls import Kind

from tests.fakes.openai_server import FakeServer
from tests.rigs.ctl_process import kvdepotctl
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import wait_until
from tests.rigs.raw_client import RawEngine, keys_of, status_of

SMALL = ("--object-size", "256KiB", "--bytes", "6MiB")


def tier(directory: Path, name: str, write: str) -> str:
    path = directory / name
    path.mkdir()
    return f'[[tier]]\nname = "{name}"\nkind = "disk"\npath = "{path}"\ncapacity = "128MiB"\nwrite = "{write}"\n'


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvddisk", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def daemon(directory: Path) -> Iterator[DaemonProcess]:
    text = "".join(tier(directory, name, write) for name, write in (("used", "second_use"), ("full", "evict")))
    with DaemonProcess(ram="768MiB", config=text) as running:
        wait_until(lambda: all(one.state == "ready" for one in status_of(running.socket).tiers[1:]), "disks open")
        yield running


def benched(daemon: DaemonProcess, *options: str, code: int = 0) -> dict[str, Any]:
    printed = kvdepotctl(daemon, "bench", "--json", *options)
    assert printed.returncode == code, printed.stdout + printed.stderr
    found: dict[str, Any] = json.loads(printed.stdout)
    return found


def test_each_tier_both_ways_beside_what_there_is_and_nothing_is_left(daemon: DaemonProcess, directory: Path) -> None:
    with RawEngine(daemon.socket) as engine:
        engine.store(keys_of("prompt", 12))
        found = benched(daemon, *SMALL, "--chunk-tokens", "64")
        assert (found["shape_of"], found["prefill"]) == ("as given", None)
        assert (found["bytes"], found["bytes_per_token"]) == (6 << 20, 4096)
        lines = {(one["tier"], one["way"]): one for one in found["measured"]}
        assert list(lines) == [
            ("ram", "store"),
            ("ram", "load"),
            ("used", "store"),
            ("used", "load"),
            ("full", "store"),
        ]
        for (name, _), one in lines.items():
            if name == "full":
                assert one["rate"] == 0 and one["note"].startswith("write = evict")
            else:
                assert one["rate"] > 0 and one["limit"] > 0 and one["times_prefill"] == 0
                assert one["limit_name"] == ("memcpy" if name == "ram" else "medium")
                assert one["share"] == pytest.approx(one["rate"] / one["limit"])
        wait_until(lambda: [one.objects for one in engine.status().tiers] == [12, 0, 0], "its own are evicted")
        assert engine.load(keys_of("prompt", 12)) is not None
    assert not list(directory.rglob(f"{TEMPORARY}*"))


@pytest.mark.long(seconds=6)
def test_the_chunk_is_by_default_that_of_an_engine(daemon: DaemonProcess) -> None:
    with RawEngine(daemon.socket) as engine:
        found = benched(daemon, "--bytes", "6MiB")
        spec = engine.spec
        assert (found["object_bytes"], found["chunk_tokens"]) == (spec.object_bytes[Kind.ATTENTION], spec.chunk_tokens)
        assert found["shape_of"] == spec.label
        given = benched(daemon, *SMALL)
        assert (given["object_bytes"], given["chunk_tokens"]) == (256 << 10, 256), "never mixed with an engine's"
        printed = kvdepotctl(daemon, "bench", "--bytes", "6MiB").stdout
        assert printed.startswith(f"chunks of {spec.chunk_tokens} tokens, ") and "no engine has told" in printed


def test_the_verdict_is_against_the_prefill_that_is_given(daemon: DaemonProcess) -> None:
    assert all(one["times_prefill"] > 1 for one in benched(daemon, *SMALL, "--prefill", "0.1")["measured"][:4])
    assert benched(daemon, *SMALL, "--prefill", "1e12", code=1)["measured"][1]["times_prefill"] < 1
    printed = kvdepotctl(daemon, "bench", *SMALL, "--prefill", "1e12")
    assert printed.returncode == 1 and printed.stdout.count("its loads cost more time than they save") == 2
    assert "full, store: write = evict" in printed.stdout


def test_what_cannot_be_measured_is_said(daemon: DaemonProcess) -> None:
    printed = kvdepotctl(daemon, "bench", "--object-size", "900MiB")
    assert printed.returncode == 2 and "does not fit" in printed.stderr
    assert kvdepotctl(daemon, "stores", "off").returncode == 0
    try:
        printed = kvdepotctl(daemon, "bench", *SMALL)
        assert printed.returncode == 1 and "nothing is stored" in printed.stderr and "Traceback" not in printed.stderr
    finally:
        assert kvdepotctl(daemon, "stores", "on").returncode == 0


def test_a_medium_that_cannot_be_written_has_a_reason(tmp_path: Path) -> None:
    assert measure(str(tmp_path / "gone"), 8 << 20).why_not == "No such file or directory"
    found = measure(str(tmp_path), 8 << 20)
    assert found.write > 0 and found.read > 0 and not found.why_not and not list(tmp_path.iterdir())
    cached = measure("/dev/shm", 8 << 20)
    assert cached.read > 0


def test_it_goes_on_after_an_epoch_bump(daemon: DaemonProcess) -> None:
    assert kvdepotctl(daemon, "epoch", "bump", "--yes").returncode == 0
    assert benched(daemon, *SMALL)["measured"][0]["rate"] > 0


def test_first_tokens_of_a_server_are_measured_and_reported(daemon: DaemonProcess, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    with FakeServer() as server:
        done = kvdepotctl(
            daemon, "bench", "engine", "--url", server.url, "--prompts", "4", "--json", "--html", f"{report}"
        )
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["worth"] else 1), done.stderr
    assert [way["name"] for way in found["ways"]] == ["cold", "engine cache", "kvdepot"]
    assert found["ways"][0]["saved"] == 0 and found["loaded"] == found["ways"][2]["saved"] > 0.5
    assert len(found["prompts"]) == 4 and found["verdict"] in report.read_text()


def test_what_cannot_end_well_costs_the_server_nothing(daemon: DaemonProcess, tmp_path: Path) -> None:
    with FakeServer() as server:
        server.own[(1,)] = None
        command = ("bench", "engine", "--url", server.url, "--prompts", "2")
        nobody = kvdepotctl(f"unix://{tmp_path}/none", *command)
        nowhere = kvdepotctl(daemon, *command, "--html", f"{tmp_path}/none/report.html")
    assert nobody.returncode == 3 and "Traceback" not in nobody.stderr
    assert nowhere.returncode == 2 and "no such directory" in nowhere.stderr
    assert server.prompts == [] and server.own


def test_a_server_that_keeps_its_cache_is_refused_with_what_to_do(daemon: DaemonProcess) -> None:
    with FakeServer(offers_reset=False) as server:
        done = kvdepotctl(daemon, "bench", "engine", "--url", server.url, "--prompts", "2")
    assert done.returncode != 0 and "VLLM_SERVER_DEV_MODE=1" in done.stderr
    assert "Traceback" not in done.stderr and "bug" not in done.stderr
    assert server.prompts == []
