"""Configuration: every refusal names file, key and reason (design.md#configuration)."""

from __future__ import annotations

import errno
import os
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvdepot.core.arena import ArenaLayout
from kvdepot.core.control import QuotaEntry, QuotaSubject
from kvdepot.core.errors import ConfigError
from kvdepot.core.ram_size import PROCESS_RESERVE_BYTES, arena_bytes_of
from kvdepot.server.config.config import Config, check, embedded, load
from kvdepot.server.config.depot_settings import depot_config
from kvdepot.server.config.memory_room import (
    CAPACITY_BYTES_MIN,
    cgroup_limits,
)
from kvdepot.server.config.operators import Role
from kvdepot.server.config.schema import QuotaTable, Tables, TenantTable, TierTable
from kvdepot.server.config.set_quotas import SetQuotas
from kvdepot.server.config.tier_settings import depot_tier_config, disk_config, shared_config
from kvdepot.server.daemon import app
from kvdepot.server.depot.types import Quota, TenantBudget, WritePolicy
from kvdepot.server.io.pool import worker_reserve_bytes

REPOSITORY = Path(__file__).parents[4]
MIB = 1 << 20
TIER = '\n[[tier]]\nname = "nvme"\nkind = "disk"\npath = "/d"\ncapacity = "1GiB"\n'
SHARED = TIER.replace('"nvme"', '"pool"').replace('"disk"', '"shared"').replace('"/d"', '"/s"')
TLS = '[tls]\ncert = "/c"\nkey = "/k"\nclient_ca = "/a"\n'
TENANT = '\n[[tenant]]\nname = "a"\nusers = ["1001"]\n'
SECOND = '\n[[tenant]]\nname = "b"\nusers = ["1002"]\n'
QUOTA = '[[quota]]\ntier = "nvme"\ncapacity = "1GiB"\n'
GOOD = '[daemon]\nlisten = ["unix:///tmp/k.sock"]\n[ram]\ncapacity = "512MiB"\npath = "/tmp"\n'


def _load(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "kvdepot.toml"
    path.write_text(text)
    return load(path)


def test_a_small_file_gets_the_defaults(tmp_path: Path) -> None:
    config = _load(tmp_path, GOOD)
    assert config.capacity_bytes == 512 * MIB
    assert config.tables.policy.lease_deadline == 120.0
    assert config.tables.sessions.grace == 60.0
    assert config.arena_path.parent == Path("/tmp")
    assert config.credit_bytes == config.arena_bytes // 2  # the default of 2 GiB would be more than the arena


def test_a_larger_arena_gets_the_credit_of_the_reference(tmp_path: Path) -> None:
    assert _load(tmp_path, GOOD.replace("512MiB", "64GiB")).credit_bytes == 2 << 30


@pytest.mark.parametrize(
    ("text", "key", "reason"),
    [
        ('[deamon]\nmode = "0660"', "deamon", "did you mean 'daemon'?"),
        ('[daemon]\nlistenn = ["unix:///tmp/k"]', "daemon.listenn", "did you mean 'listen'?"),
        ('[ram]\ncapasity = "1GiB"', "ram.capasity", "did you mean 'capacity'?"),
        ('[ram]\ncapacity = "1GB"', "ram.capacity", "unknown unit 'GB'"),
        ("[ram]\ncapacity = 1073741824", "ram.capacity", "expected a string with a unit"),
        ('[ram]\ncapacity = "100MiB"', "ram.capacity", "expected at least 320 MiB, got 100 MiB"),
        ('[ram]\npath = "relative"', "ram.path", "expected the absolute path of a directory"),
        ('[ram]\npath = "/nowhere/at/all"', "ram.path", "is not a directory"),
        ("[ram]\nhigh_watermark = 1.5", "ram.high_watermark", "less than or equal to 1"),
        ("[ram]\nhigh_watermark = 0.5", "ram", "low_watermark 0.9 is not below high_watermark 0.5"),
        (TIER + "high_watermark = 0.5", "tier[0]", "low_watermark 0.9 is not below high_watermark 0.5"),
        (TIER + "low_watermark = 1.5", "tier[0].low_watermark", "less than or equal to 1"),
        ('[daemon]\nlisten = ["tcp://0.0.0.0:1"]', "daemon.listen", "expected a unix:// address too"),
        ('[daemon]\nlisten = ["unix:///a", "tcp://0.0.0.0"]', "daemon.listen", 'expected "host:port"'),
        ('[daemon]\nlisten = ["unix:///a", "tcp://0.0.0.0:1"]', "daemon.listen", "needs [tls] cert, key and client_ca"),
        ('[daemon]\nlisten = ["/tmp/k.sock"]', "daemon.listen", "expected unix:///absolute/path"),
        ("[daemon]\nlisten = []", "daemon.listen", "at least 1 item"),
        (f'[daemon]\nlisten = ["unix:///{"x" * 120}"]', "daemon.listen", "expected at most 107"),
        ('[daemon]\nlisten = ["unix:///a", "unix:///a"]', "daemon.listen", "expected different addresses"),
        ('[daemon]\nmetrics = "9421"', "daemon.metrics", 'expected "host:port"'),
        ('[daemon]\nmode = "rw-rw----"', "daemon.mode", "match pattern"),
        ("[policy]\nloads_in_flight = 0", "policy.loads_in_flight", "greater than or equal to 1"),
        ('[policy]\neviction = "random"', "policy.eviction", "'adaptive', 'gdsf' or 'lru'"),
        ('[sessions]\ncredit = "0"', "sessions.credit", "greater than 0"),
        ('[ram]\ncapacity = "512MiB"\n[sessions]\ncredit = "1GiB"', "sessions.credit", "at most the whole arena"),
        ('[log]\nlevel = "loud"', "log.level", "'info'"),
        ('[[tier]]\nname = "nvme"\nkind = "disk"', "tier[0].capacity", "Field required"),
        ('[[tier]]\nname = "nvme"\nkind = "disk"\ncapacity = "1GiB"', "tier[0]", "path is required"),
        (SHARED.replace("1GiB", "4MiB"), "tier.pool.capacity", "expected at least 16MiB, got 4194304 bytes"),
        (TIER + SHARED.replace('"/s"', '"/d"'), "tier.pool.path", "/d and /d of tier 'nvme' overlap"),
        (SHARED + QUOTA.replace("nvme", "pool"), "quota[0].tier", "'pool' is a shared tier"),
        ("[policy]\nnegative_ttl = 2", "policy.negative_ttl", "expected a string with a unit"),
        ('[[tier]]\nkind = "s3"', "tier.kind", "'s3' are not available in this version"),
        (TIER.replace('"disk"', '"tape"'), "tier[0].kind", "'disk'"),
        (TIER.replace('"/d"', '"d"'), "tier[0].path", "expected the absolute path of a directory"),
        ('[daemon]\nstate = "state.json"', "daemon.state", "expected the absolute path of a file"),
        ('[daemon]\nstate = "/d/"', "daemon.state", "expected the absolute path of a file"),
        (TIER + '[daemon]\nstate = "/d/../d/x/state.json"', "daemon.state", "lies in the directory of tier 'nvme'"),
        (TIER.replace('"nvme"', '"ram"'), "tier[0].name", "the name of the RAM tier"),
        (TIER.replace('"nvme"', '"a/b"'), "tier[0].name", "match pattern"),
        (TIER + 'wirte = "commit"', "tier[0].wirte", "did you mean 'write'?"),
        (TIER + 'write = "always"', "tier[0].write", "'auto', 'commit', 'evict' or 'second_use'"),
        (TIER + "drive_writes_per_day = 2.0", "tier[0]", 'drive_writes_per_day needs write = "auto"'),
        (
            TIER + 'write = "auto"\ndrive_writes_per_day = -1',
            "tier[0].drive_writes_per_day",
            "greater than or equal to 0",
        ),
        (SHARED + 'write = "auto"', "tier[0]", 'write = "auto" needs kind = "disk"'),
        (TIER + "codec = 1", "tier[0].codec", "'none', 'lz4'"),
        (TIER + "on_root_filesystem = true", "tier[0]", 'on_root_filesystem needs kind = "shared"'),
        (TIER + "io_workers = 0", "tier[0].io_workers", "greater than or equal to 1"),
        (TIER + "write_budget = 5", "tier[0].write_budget", "expected a string with a unit"),
        (TIER.replace("1GiB", "4MiB"), "tier.nvme.capacity", "4194304 bytes are less than"),
        (TIER + TIER.replace('"/d"', '"/e"'), "tier.name", "two tiers have the name 'nvme'"),
        (TIER + TIER.replace("nvme", "b"), "tier.b.path", "overlap"),
        (TIER + TIER.replace("nvme", "b").replace('"/d"', '"/x/../d/e"'), "tier.b.path", "/d/e and /d of tier 'nvme'"),
        ('[ram]\ncapacity = "384MiB"' + TIER, "ram.capacity", "for lower tiers and peers"),
        (
            '[ram]\ncapacity = "1GiB"\npath = "/tmp"' + TIER.replace('"/d"', '"/tmp/."'),
            "tier.nvme.path",
            "contains the arena",
        ),
        ("[breaker]\nfailures = 0", "breaker.failures", "greater than or equal to 1"),
        ('[breaker]\nprobe_every = "0s"', "breaker.probe_every", "greater than 0"),
        ('[scrub]\nrate = "50MiB"', "scrub.rate", "is not a rate"),
        ('[tls]\ncert = "x"', "tls.cert", "expected the absolute path of a file"),
        ('[tls]\ncert = "/x"', "tls", "needs key, client_ca too"),
        ('[tls]\nallow_readers = ["DNS:a"]', "tls", "needs cert, key, client_ca too"),
        (TLS, "tls", "daemon.listen has no tcp:// address"),
        (TLS + '[daemon]\nlisten = ["unix:///a", "tcp://0.0.0.0:1"]', "tls", "allows nobody to call"),
        (f'{TLS}allow_admins = ["CN:ops"]', "tls.allow_admins", "expected DNS:host or URI:uri"),
        (f'{TLS}allow_admins = ["DNS:"]', "tls.allow_admins", "expected DNS:host or URI:uri"),
        (f'{TLS}allow_readers = ["DNS:*.a"]', "tls.allow_readers", "expected the name of one host, got the pattern"),
        (f'{TLS}allow_readers = ["URI:a b"]', "tls.allow_readers", "expected a name of visible ASCII characters"),
        ('[[quota]]\ntenant = "*"', "quota[0].capacity", "Field required"),
        ("[[quota]]\ncapacity = 5", "quota[0].capacity", "expected a string with a unit"),
        ('[[quota]]\ncapacity = "0"', "quota[0].capacity", "greater than 0"),
        ('[[quota]]\ncapacity = "1GiB"\nlabel = "x"', "quota[0].label", "did you mean"),
        ('[[quota]]\ncapacity = "1GiB"\nnamespace = ""', "quota[0].namespace", "at least 1 character"),
        ('[[quota]]\ncapacity = "1GiB"\nnamespace = "beef"', "quota[0].namespace", "8 to 32 digits"),
        (f'[[quota]]\ncapacity = "1GiB"\nnamespace = "{"a" * 33}"', "quota[0].namespace", "8 to 32 digits"),
        (
            f'[[quota]]\ncapacity = "1GiB"\nnamespace = "{"x" * 97}"',
            "quota[0].namespace",
            "expected at most 96 bytes, got 97",
        ),
        (
            f'[[quota]]\ncapacity = "1GiB"\ntenant = "{"x" * 129}"',
            "quota[0].tenant",
            "expected at most 128 bytes, got 129",
        ),
        (TENANT.replace('"a"', '"*"'), "tenant[0].name", "expected a name without control characters, and not '*'"),
        (TENANT.replace('"a"', '"a\\u001b[31m"'), "tenant[0].name", "expected a name without control characters"),
        (TENANT.replace('"a"', '""'), "tenant[0].name", "at least 1 character"),
        (TENANT.replace('["1001"]', "[]"), "tenant[0]", "has neither users nor groups"),
        (TENANT.replace('["1001"]', '[""]'), "tenant[0].users", "expected names or ids, got an empty text"),
        (TENANT + "user = 1", "tenant[0].user", "did you mean 'users'?"),
        (TENANT + TENANT, "tenant[1].name", "two tenants have the name 'a'"),
        (TENANT + TENANT.replace('"a"', '"b"'), "tenant[1].users", "'1001' is in tenant 'a' already"),
        (
            TENANT + 'ram = "1GiB"\n[[quota]]\ntenant = "a"\ntier = "ram"\ncapacity = "1GiB"',
            "quota[0]",
            "about the same",
        ),
        (TENANT + 'credit = "64GiB"', "tenant.credit", "MiB, got 65536 MiB"),
        (TENANT + SECOND + 'ram = "64GiB"', "tenant.ram", "MiB for all tenants, and 2 MiB at least for each of them"),
        (TENANT + 'ram = "64GiB"' + SECOND + 'ram = "64GiB"', "tenant.ram", "MiB for all tenants, and 2 MiB"),
        (TENANT + SECOND + 'ram = "1MiB"', "tenant.ram", "2 MiB at least for each of them"),
        ("[ram]\nsealed = false\n" + TENANT + SECOND, "ram.sealed", "several tenants need sealed memory"),
        (TENANT + "credit = 5", "tenant[0].credit", "expected a string with a unit"),
        (TENANT + "sessions = 2000", "tenant[0].sessions", "less than or equal to 1024"),
        (
            TENANT + "sessions = 1024" + TENANT.replace('"a"', '"b"').replace("1001", "2"),
            "tenant.sessions",
            "at most 1024 for all tenants, and one for each of them",
        ),
        (TENANT + '[[quota]]\ntenant = "b"\ncapacity = "1GiB"', "quota[0].tenant", "there is no tenant 'b'"),
        ('[[quota]]\ncapacity = "1GiB"\ntier = "nvme"', "quota[0].tier", "there is no tier 'nvme'"),
        (TIER + QUOTA + QUOTA.replace('"nvme"', '"ram"') + QUOTA.replace("1GiB", "2GiB"), "quota[2]", "as quota[0]"),
        ("[policy]\nprefetch_share = 1.5", "policy.prefetch_share", "less than or equal to 1"),
        ("[policy]\naudit_sample = 1.5", "policy.audit_sample", "less than or equal to 1"),
    ],
)
def test_refuses_with_file_key_and_reason(tmp_path: Path, text: str, key: str, reason: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        _load(tmp_path, text)
    assert refusal.value.file == str(tmp_path / "kvdepot.toml")
    assert refusal.value.key == key
    assert reason in str(refusal.value)


@pytest.mark.parametrize("text", ["[daemon", "\x00", "a = 1\na = 2"])
def test_refuses_what_is_no_toml(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="is no TOML"):
        _load(tmp_path, text)


def test_refuses_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "absent.toml")
    (tmp_path / "latin").write_bytes(b"# \xe9")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        load(tmp_path / "latin")


def test_check_config_says_yes_or_no_by_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kvdepot.toml"
    path.write_text(GOOD)
    assert app.main(["check-config", str(path)]) == 0
    assert "ok" in capsys.readouterr().out
    path.write_text(GOOD + "\n[sesions]\n")
    assert app.main(["check-config", str(path)]) == app.EXIT_CONFIG
    assert "did you mean 'sessions'?" in capsys.readouterr().err


def test_the_reference_file_has_every_key_at_its_default() -> None:
    document = tomllib.loads((REPOSITORY / "configs" / "kvdepot.toml").read_text())
    assert Tables.model_validate(document) == Tables()
    for table, model in Tables():
        if table not in ("tier", "quota", "tenant"):
            assert set(document[table]) == set(type(model).model_fields), table


@pytest.mark.parametrize(("table", "model"), [("tier", TierTable), ("quota", QuotaTable), ("tenant", TenantTable)])
def test_the_reference_file_shows_every_key_of_a_list_of_tables_at_its_default(
    table: str, model: type[TierTable | QuotaTable | TenantTable]
) -> None:
    lines = (REPOSITORY / "configs" / "kvdepot.toml").read_text().splitlines()
    (shown,) = tomllib.loads("\n".join(line[3:] for line in lines if line.startswith("#: ")))[table]
    fields = dict(model.model_fields)
    if table == "quota":
        assert fields.pop("namespace").default is None  # absent is a value of its own: the total
    assert set(shown) == set(fields)
    required = {name: shown[name] for name, field in fields.items() if field.is_required() or name in ("users", "path")}
    assert model.model_validate(shown) == model.model_validate(required)


@pytest.mark.requirement("S4")
def test_the_ram_of_a_tenant_is_a_quota_that_operators_can_override(tmp_path: Path) -> None:
    path = tmp_path / "k.toml"
    path.write_text(GOOD + TENANT + 'ram = "64MiB"\ncredit = "32MiB"\n')
    config, quotas = load(path), SetQuotas()
    (quota,) = depot_config(config, quotas).quotas
    assert (quota.tenant, quota.namespace, quota.tier, quota.capacity_bytes) == ("a", None, "ram", 64 << 20)
    assert depot_config(config, quotas).tenants == {"a": TenantBudget(32 << 20)}
    quotas.set(config.tables, QuotaEntry(QuotaSubject("a", None, "ram"), 16 << 20))
    assert [one.capacity_bytes for one in depot_config(config, quotas).quotas] == [16 << 20]


@pytest.mark.requirement("S2", "S4")
def test_several_tenants_divide_the_data_whatever_their_order(tmp_path: Path) -> None:
    third = TENANT.replace('"a"', '"c"').replace("1001", "3")
    config = _load(tmp_path, GOOD + third + SECOND + 'ram = "65MiB"\n' + TENANT)
    data_bytes = ArenaLayout.plan(config.arena_bytes).data_bytes
    assert list(config.parts) == ["a", "b", "c"] and sum(config.parts.values()) == data_bytes
    assert config.parts["b"] == 64 << 20, "in huge pages"
    assert 0 <= config.parts["a"] - config.parts["c"] <= 2 << 20
    assert _load(tmp_path, GOOD + TENANT + SECOND + 'ram = "65MiB"\n' + third).parts == config.parts
    assert depot_config(config, SetQuotas()).quotas == (), "the part is the bound"
    all_of_them = _load(tmp_path, GOOD + TENANT + 'ram = "64MiB"\n' + SECOND + 'ram = "32MiB"\n')
    assert sum(all_of_them.parts.values()) == data_bytes
    assert all_of_them.parts["a"] - all_of_them.parts["b"] == pytest.approx(32 << 20, abs=2 << 20)
    assert _load(tmp_path, GOOD + TENANT).parts == {}


@pytest.mark.requirement("T8")
def test_quotas_reach_the_engine(tmp_path: Path) -> None:
    text = (
        GOOD + QUOTA.replace("nvme", "ram") + '[[quota]]\ntenant = "a"\nnamespace = "DEADBEEF00"\ncapacity = "none"\n'
    )
    config, quotas = _load(tmp_path, text), SetQuotas()
    of_ram, exempt = Quota(tier="ram", capacity_bytes=1 << 30), Quota("a", "deadbeef00", "*", None)
    assert depot_config(config, quotas).quotas == (of_ram, exempt)
    quotas.set(config.tables, QuotaEntry(QuotaSubject("a", "DeadBeef00"), 5))
    assert depot_config(config, quotas).quotas == (of_ram, replace(exempt, capacity_bytes=5))
    quotas.delete(QuotaSubject("a", "DeadBeef00"))
    assert depot_config(config, quotas).quotas == (of_ram, exempt)


@pytest.mark.parametrize(
    ("setting", "drives"), [("", 1.0), ("drive_writes_per_day = 0.5", 0.5), ("drive_writes_per_day = 0", 0)]
)
def test_drive_writes_are_of_the_capacity_of_the_tier(tmp_path: Path, setting: str, drives: float) -> None:
    config = _load(tmp_path, GOOD.replace("512MiB", "1GiB") + TIER + f'write = "auto"\n{setting}\n')
    settings = depot_tier_config(config.tables.tier[0])
    assert (settings.write, settings.write_bytes_per_day) == (WritePolicy.AUTO, drives * (1 << 30))


def test_a_tier_takes_its_settings_from_three_tables(tmp_path: Path) -> None:
    text = GOOD.replace("512MiB", "1GiB") + TIER + 'codec = "lz4"\nwrite_budget = "2GiB"\n[breaker]\nfailures = 3\n'
    config = _load(tmp_path, text + '[scrub]\nrate = "0"\n')
    disk = disk_config(config.tables, config.tables.tier[0])
    assert (disk.name, disk.path, disk.codec, disk.write_budget_bytes) == ("nvme", Path("/d"), 1, 2 << 30)
    assert (disk.failures, disk.scrub_bytes_per_second) == (3, 0)


def test_a_shared_tier_takes_its_settings_from_four_tables(tmp_path: Path) -> None:
    text = GOOD.replace("512MiB", "1GiB") + SHARED + 'codec = "lz4"\nhigh_watermark = 0.8\nlow_watermark = 0.7\n'
    config = _load(tmp_path, text + '[policy]\nnegative_ttl = "5s"\n[breaker]\nfailures = 3\n')
    shared = shared_config(config.tables, config.tables.tier[0])
    assert (shared.name, shared.path, shared.codec, shared.negative_ttl_seconds) == ("pool", Path("/s"), 1, 5.0)
    assert (shared.failures, shared.high_watermark, shared.low_watermark) == (3, 0.8, 0.7)
    assert shared.quarantine_bytes_max == (1 << 30) // 16
    assert config.arena_bytes < _load(tmp_path, GOOD.replace("512MiB", "1GiB")).arena_bytes


@pytest.mark.requirement("T1")
def test_workers_and_objects_of_tiers_are_taken_from_the_capacity(tmp_path: Path) -> None:
    text = GOOD.replace("512MiB", "1GiB")
    without, having = _load(tmp_path, text).arena_bytes, _load(tmp_path, text + TIER).arena_bytes
    assert without - having >= 3 * worker_reserve_bytes(having, codec=False)
    coded = _load(tmp_path, text.replace("1GiB", "64GiB") + TIER + 'codec = "lz4"').arena_bytes
    assert coded < _load(tmp_path, text.replace("1GiB", "64GiB") + TIER).arena_bytes


@pytest.mark.parametrize("name", ["development.toml", "disk.toml", "gpu-node.toml", "nfs.toml"])
def test_the_other_files_are_good(name: str) -> None:
    assert load(REPOSITORY / "configs" / name).capacity_bytes > 0


def test_options_override_single_keys(tmp_path: Path) -> None:
    path = tmp_path / "kvdepot.toml"
    path.write_text(GOOD)
    config = load(path, {"ram": {"capacity": "1GiB"}})
    assert config.capacity_bytes == 1 << 30
    assert config.tables.daemon.listen == ["unix:///tmp/k.sock"]


def test_an_option_over_a_file_that_is_malformed_there_is_an_error_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "kvdepot.toml"
    for text, key in (("daemon = 5", "daemon"), ("[daemon]\nlisten = 5", "daemon.listen"), ("ram = []", "ram")):
        path.write_text(text)
        with pytest.raises(ConfigError) as refused:
            load(path, {"daemon": {"listen": ["unix:///x"]}, "ram": {"capacity": "1GiB"}})
        assert (refused.value.file, refused.value.key) == (str(path), key)


def test_another_socket_leaves_the_addresses_of_other_hosts(tmp_path: Path) -> None:
    path = tmp_path / "kvdepot.toml"
    listen = 'listen = ["unix:///a", "tcp://[::]:7447", "unix:///b"]'
    path.write_text(f'[daemon]\n{listen}\n{TLS}allow_admins = ["DNS:A.example"]\n[ram]\ncapacity = "1GiB"\n')
    config = load(path, {"daemon": {"listen": ["unix:///c"]}})
    assert config.tables.daemon.sockets == (Path("/c"),)
    assert config.tables.daemon.tcp_addresses == (("::", 7447),)
    assert config.operators.role_of_names(["DNS:a.example"]) is Role.ADMIN


@pytest.mark.requirement("T1")
def test_embedded_default_is_a_quarter_and_at_most_4_gib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("kvdepot.server.config.config.cgroup_limits", lambda: [("/cg", 4 << 30, 0)])
    config = embedded()
    assert config.capacity_bytes <= 1 << 30
    assert config.tables.daemon.sockets == (tmp_path / "kvdepot" / "kvdepot.sock",)
    monkeypatch.setattr("kvdepot.server.config.config.cgroup_limits", list)
    monkeypatch.setattr("kvdepot.server.config.config.host_bytes", lambda: 1 << 40)
    monkeypatch.setattr("kvdepot.server.config.config.directory_bytes", lambda _: 1 << 40)
    assert embedded().capacity_bytes == 4 << 30


def _embedded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int, **ram: str) -> Config:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "run").mkdir()
    room = SimpleNamespace(f_bavail=free_bytes // 4096, f_frsize=4096, f_blocks=1 << 40)
    monkeypatch.setattr("kvdepot.server.config.embedded_disk.os.statvfs", lambda _: room)
    return embedded({"ram": ram})


def test_embedded_default_has_a_disk_tier_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _embedded(tmp_path, monkeypatch, 10 << 30, capacity="1GiB")
    (tier,) = config.tables.tier
    assert (tier.name, tier.write, tier.capacity) == ("disk", "second_use", 10 << 28)
    assert Path(tier.path).is_relative_to(tmp_path / "cache" / "kvdepot") and Path(tier.path).is_dir()
    assert config.note == ""


def test_the_files_of_the_embedded_disk_tier_count_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free_bytes, held_bytes = (2 << 30) - (4 << 20), 8 << 20
    config = _embedded(tmp_path, monkeypatch, free_bytes, capacity="1GiB")
    (tier,) = config.tables.tier
    assert tier.capacity == 256 << 20
    for folder in ("segments", "quarantine", "lost+found"):
        (Path(tier.path) / folder).mkdir()
        (Path(tier.path) / folder / "file").write_bytes(bytes(held_bytes // 2))
    (again,) = embedded({"ram": {"capacity": "1GiB"}}).tables.tier
    assert again.capacity == 512 << 20


def test_no_embedded_disk_tier_becomes_smaller_because_a_folder_of_it_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _embedded(tmp_path, monkeypatch, 10 << 30, capacity="1GiB")
    folder = f"{config.tables.tier[0].path}/segments"
    scandir = os.scandir

    def refused(path: str) -> Any:
        if path == folder:
            raise PermissionError(errno.EACCES, "Permission denied", folder)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    config = embedded({"ram": {"capacity": "1GiB"}})
    assert config.tables.tier == []
    assert config.note == f"no disk tier: {folder}: Permission denied"


@pytest.mark.parametrize(
    ("free_bytes", "capacity", "reason"),
    [(900 << 20, "1GiB", "less than 256 MiB"), (10 << 30, "336MiB", "includes the private memory")],
)
def test_embedded_default_has_no_disk_tier_where_there_is_no_room_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int, capacity: str, reason: str
) -> None:
    config = _embedded(tmp_path, monkeypatch, free_bytes, capacity=capacity)
    assert config.tables.tier == []
    assert "no disk tier" in config.note and reason in config.note


def test_the_disk_of_the_command_line_stands_for_all_tiers(tmp_path: Path) -> None:
    path = tmp_path / "kvdepot.toml"
    path.write_text(GOOD.replace("512MiB", "1GiB") + TIER)
    config = load(path, {"disk": {"path": str(tmp_path / "d"), "capacity": "64MiB"}})
    assert [(tier.name, tier.path, tier.capacity) for tier in config.tables.tier] == [
        ("disk", str(tmp_path / "d"), 64 << 20)
    ]
    assert load(path, {"disk": {"path": ""}}).tables.tier == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--disk"):
        load(path, {"disk": {"path": str(tmp_path / "file")}})


def test_embedded_refuses_a_runtime_directory_others_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / "kvdepot"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="only uid"):
        embedded()


@pytest.mark.requirement("T1")
def test_the_arena_leaves_room_for_the_processes() -> None:
    for capacity_bytes in (CAPACITY_BYTES_MIN, 1 << 30, 64 << 30):
        arena_bytes = arena_bytes_of(capacity_bytes)
        assert 0 < arena_bytes <= capacity_bytes - PROCESS_RESERVE_BYTES
        assert arena_bytes % (2 * MIB) == 0


def test_two_sockets_have_two_arenas() -> None:
    def arena(socket: str) -> Path:
        document = {"daemon": {"listen": [f"unix://{socket}"]}, "ram": {"path": "/tmp", "capacity": "512MiB"}}
        return check("test", document).arena_path

    assert arena("/tmp/a.sock") == arena("/tmp/a.sock") != arena("/tmp/b.sock")


@pytest.mark.requirement("T1")
def test_reads_limits_of_both_cgroup_versions(tmp_path: Path) -> None:
    proc = tmp_path / "cgroup"
    proc.write_text("4:memory:/one\n0::/two/three\n")
    files = {
        "memory/one/memory.limit_in_bytes": "1000",
        "memory/one/memory.usage_in_bytes": "10",
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "memory/memory.usage_in_bytes": "10",
        "two/memory.max": "2000",
        "two/memory.current": "20",
        "two/memory.stat": "anon 12\ninactive_file 8\nactive_file 5",
        "two/three/memory.max": "max",
        "two/three/memory.current": "20",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert sorted(cgroup_limits(proc, tmp_path)) == [
        (str(tmp_path / "memory/one"), 1000, 10),
        (str(tmp_path / "two"), 2000, 12),
    ]


@pytest.mark.requirement("T2")
def test_a_tier_has_watermarks_of_its_own(tmp_path: Path) -> None:
    config = _load(tmp_path, GOOD + TIER + "high_watermark = 0.8\nlow_watermark = 0.7\n")
    (table,) = config.tables.tier
    settings = depot_tier_config(table)
    assert (settings.high_watermark, settings.low_watermark) == (0.8, 0.7)
    assert config.tables.ram.high_watermark == 0.95


@pytest.mark.requirement("S4")
@pytest.mark.parametrize("several", [False, True])
def test_the_credit_of_a_tenant_is_at_most_its_data(tmp_path: Path, several: bool) -> None:
    second = SECOND + 'ram = "64MiB"\n' if several else ""
    config = _load(tmp_path, GOOD + TENANT + second)
    most = config.parts["a"] if several else ArenaLayout.plan(config.arena_bytes).data_bytes
    assert most < config.arena_bytes
    text = GOOD + TENANT + 'credit = "{}B"\n' + second
    assert _load(tmp_path, text.format(most)).tenants
    with pytest.raises(ConfigError, match="expected at most the data of tenant 'a'"):
        _load(tmp_path, text.format(most + 1))
