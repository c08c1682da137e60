"""Keys from the environment: over the file, under the command line, refused by the variable's name."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvdepot.core.errors import ConfigError
from kvdepot.server.config.config import Config, embedded, load
from kvdepot.server.config.environment import variables
from kvdepot.server.daemon import app

FILE = """
[daemon]
listen = ["unix:///tmp/k.sock"]
[ram]
capacity = "1GiB"
path = "/tmp"
[[tier]]
name = "fast-nvme"
kind = "disk"
path = "/d"
capacity = "1GiB"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvdepot.toml"
    path.write_text(FILE)
    return path


def _loaded(file: Path, **environment: str) -> Config:
    return load(file, variables=variables(environment))


def test_a_variable_goes_over_the_file_and_is_read_as_the_file_would_be(file: Path) -> None:
    tables = _loaded(
        file,
        KVDEPOT_RAM__CAPACITY="2GiB",
        KVDEPOT_RAM__HIGH_WATERMARK="0.97",
        KVDEPOT_DAEMON__LISTEN="unix:///tmp/a.sock, unix:///tmp/b.sock",
        KVDEPOT_DAEMON__METRICS="",
        KVDEPOT_DAEMON__STATE="/e/state.json",
        KVDEPOT_SCRUB__RATE="1MiB/s",
        KVDEPOT_POLICY__LOADS_IN_FLIGHT="7",
        KVDEPOT_TIER__FAST_NVME__FSYNC="true",
        KVDEPOT_TIER__FAST_NVME__WRITE_BUDGET="none",
        KVDEPOT_TIER__FAST_NVME__IO_WORKERS="3",
    ).tables
    assert (tables.ram.capacity, tables.ram.high_watermark, tables.ram.path) == (2 << 30, 0.97, "/tmp")
    assert tables.daemon.listen == ["unix:///tmp/a.sock", "unix:///tmp/b.sock"]
    assert tables.daemon.state == "/e/state.json"
    assert (tables.daemon.metrics, tables.scrub.rate, tables.policy.loads_in_flight) == ("", 1 << 20, 7)
    (tier,) = tables.tier
    assert (tier.fsync, tier.write_budget, tier.io_workers, tier.path) == (True, None, 3, "/d")


def test_others_variables_are_left_alone() -> None:
    assert variables({"KVDEPOT_ENDPOINT": "x", "KVDEPOT_PORT_9421_TCP": "tcp://1", "RAM__CAPACITY": "1GiB"}) == ()


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("KVDEPOT_RAM__CAPASITY", "1GiB", "did you mean KVDEPOT_RAM__CAPACITY?"),
        ("KVDEPOT_RAMM__CAPACITY", "1GiB", "did you mean KVDEPOT_RAM__<KEY>?"),
        ("KVDEPOT_RAM__CAPACITY__MAX", "1GiB", "got 'CAPACITY__MAX'"),
        ("KVDEPOT_ram__capacity", "1GiB", "got 'ram'"),
        ("KVDEPOT_TIER__SATA__CAPACITY", "1GiB", "expected the name of one [[tier]], got SATA"),
        ("KVDEPOT_TIER__FAST_NVME__NAME", "x", "got 'NAME'"),
        ("KVDEPOT_TIER__CAPACITY", "1GiB", "write KVDEPOT_TIER__<NAME>__<KEY>"),
        ("KVDEPOT_QUOTA__CAPACITY", "1GiB", "use [[quota]] in the file"),
        ("KVDEPOT_RAM__CAPACITY", "1GB", "unknown unit 'GB'"),
        ("KVDEPOT_RAM__CAPACITY", "1MiB", "got 1 MiB"),
        ("KVDEPOT_RAM__CAPACITY", "", "is not a number with a unit; write a size"),
        ("KVDEPOT_RAM__HIGH_WATERMARK", "many", "expected a number, got 'many'"),
        ("KVDEPOT_RAM__HIGH_WATERMARK", "0.5", "low_watermark 0.9 is not below high_watermark 0.5"),
        ("KVDEPOT_RAM__HIGH_WATERMARK", "true", "valid number"),
        ("KVDEPOT_DAEMON__STATE", "/d/state.json", "lies in the directory of tier 'fast-nvme'"),
        ("KVDEPOT_LOG__LEVEL", "loud", "'info'"),
        ("KVDEPOT_TIER__FAST_NVME__FSYNC", "yes", "expected true or false, got 'yes'"),
        ("KVDEPOT_TIER__FAST_NVME__IO_WORKERS", "0", "greater than or equal to 1"),
        ("KVDEPOT_TIER__FAST_NVME__CAPACITY", "1KiB", "1024 bytes are less than"),
    ],
)
def test_what_is_wrong_is_refused_by_the_variable(file: Path, name: str, value: str, reason: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        _loaded(file, **{name: value})
    assert (refusal.value.file, refusal.value.key) == ("environment", name)
    assert reason in str(refusal.value)


def test_what_is_wrong_in_the_file_is_still_refused_by_the_file(file: Path) -> None:
    file.write_text(FILE.replace("1GiB", "1GB"))
    with pytest.raises(ConfigError) as refusal:
        _loaded(file, KVDEPOT_LOG__LEVEL="debug")
    assert (refusal.value.file, refusal.value.key) == (str(file), "ram.capacity")


def test_options_go_over_variables(file: Path) -> None:
    found = variables({"KVDEPOT_LOG__LEVEL": "loud", "KVDEPOT_TIER__FAST_NVME__FSYNC": "true"})
    config = load(file, {"log": {"level": "debug"}, "disk": {"path": ""}}, found)
    assert (config.tables.log.level, config.tables.tier) == ("debug", [])
    assert config.sources["log.level"] == ("debug", "command line")


def test_the_embedded_default_takes_variables_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("kvdepot.server.config.embedded_disk._free_share_bytes", lambda _: 1 << 28)
    found = variables({"KVDEPOT_RAM__CAPACITY": "1GiB", "KVDEPOT_TIER__DISK__WRITE": "commit"})
    config = embedded(None, found)
    assert (config.capacity_bytes, config.tables.tier[0].write) == (1 << 30, "commit")
    with pytest.raises(ConfigError, match="KVDEPOT_TIER__OTHER__WRITE"):
        embedded(None, variables({"KVDEPOT_TIER__OTHER__WRITE": "commit"}))


def test_check_config_says_what_came_from_where(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVDEPOT_RAM__CAPACITY", "2GiB")
    monkeypatch.setenv("KVDEPOT_TIER__FAST_NVME__CODEC", "lz4")
    assert app.main(["check-config", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "ok" in lines[0]
    assert 'ram.capacity = "2GiB" (KVDEPOT_RAM__CAPACITY)' in lines
    assert 'ram.path = "/tmp" (file)' in lines
    assert 'tier.fast-nvme.codec = "lz4" (KVDEPOT_TIER__FAST_NVME__CODEC)' in lines
    assert 'tier.fast-nvme.capacity = "1GiB" (file)' in lines
    monkeypatch.setenv("KVDEPOT_RAM__CAPACITY", "lots")
    assert app.main(["check-config", str(file)]) == app.EXIT_CONFIG
    assert "environment: KVDEPOT_RAM__CAPACITY: " in capsys.readouterr().err
