"""Reload (row T9): what changes live changes at once and drops no lease; else nothing does, and it is named."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from kvdepot.core.calls import AcquireOutcome, Kind, ReserveOutcome
from kvdepot.core.errors import ConfigError
from kvdepot.server.config import embedded_disk
from kvdepot.server.config.config import Config, load
from kvdepot.server.config.depot_settings import depot_config
from kvdepot.server.config.reloading import changes, values
from kvdepot.server.config.schema import Tables
from kvdepot.server.config.set_quotas import SetQuotas
from kvdepot.server.daemon.app import _config, _parser, _reread, described
from kvdepot.server.daemon.control import Control
from kvdepot.server.daemon.state_file import StateFile
from kvdepot.server.depot.types import Quota, TenantBudget, TierConfig, WritePolicy

from tests.fakes.thread_room import no_room_for_threads
from tests.rigs.engine_rig import CHUNK, Rig, audit, path
from tests.rigs.patience import patient, until
from tests.rigs.tier_rig import COMMIT, in_tier, on_tier_only, settle, store

LOG = logging.getLogger("test")
TEXT = """
[daemon]
listen = ["unix:///tmp/k.sock"]
[ram]
capacity = "2GiB"
path = "/tmp"
[[tier]]
name = "nvme"
kind = "disk"
path = "/d"
capacity = "1GiB"
[[tier]]
name = "pool"
kind = "shared"
path = "/s"
capacity = "1GiB"
[[quota]]
tenant = "a"
capacity = "10MiB"
"""


async def _nothing() -> None:
    pass


class Daemon:
    """A control over a file, and what it had the daemon run with."""

    def __init__(self, folder: Path, text: str = TEXT) -> None:
        self.file = folder / "kvdepot.toml"
        self.file.write_text(text)
        self.ran: list[Config] = []
        config = load(self.file)
        self.control = Control(
            Rig().depot, StateFile(folder / "state"), config,
            reread=lambda: load(self.file), configure=self.ran.append,
            readiness_changed=_nothing, quotas=SetQuotas(), log=LOG,
        )  # fmt: skip

    def change(self, before: str, after: str) -> None:
        text = self.file.read_text()
        assert before in text
        self.file.write_text(text.replace(before, after))


@pytest.mark.requirement("T9")
def test_a_reload_says_what_it_has_changed(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    assert asyncio.run(daemon.control.reload()).changes == ()
    daemon.change('path = "/tmp"', 'path = "/tmp"\nhigh_watermark = 0.8\nlow_watermark = 0.7\n[log]\nlevel = "debug"')
    daemon.change('path = "/d"', 'path = "/d"\nload_weight = 2.5\nwrite = "auto"\ndrive_writes_per_day = 3')
    daemon.change('"10MiB"', '"20MiB"\n[[quota]]\ntenant = "b"\ncapacity = "none"')
    compared = asyncio.run(daemon.control.compare())
    assert daemon.control.configuration().values["log.level"] == "info"
    reply = asyncio.run(daemon.control.reload())
    assert reply == compared
    assert {one.key: (one.before, one.after) for one in reply.changes} == {
        "ram.high_watermark": ("0.95", "0.8"),
        "ram.low_watermark": ("0.9", "0.7"),
        "log.level": ("info", "debug"),
        "tier.nvme.load_weight": ("1.0", "2.5"),
        "tier.nvme.write": ("second_use", "auto"),
        "tier.nvme.drive_writes_per_day": ("1.0", "3.0"),
        "quota[tenant=a,namespace=(total),tier=*].capacity": (str(10 << 20), str(20 << 20)),
        "quota[tenant=b,namespace=(total),tier=*].capacity": ("(absent)", "none"),
    }
    assert all(one.live for one in reply.changes)
    assert daemon.ran[-1].tables.log.level == daemon.control.configuration().values["log.level"] == "debug"


@pytest.mark.requirement("T9")
@pytest.mark.parametrize(
    ("before", "after", "key"),
    [
        ('"2GiB"', '"3GiB"', "ram.capacity"),
        ('path = "/d"\ncapacity = "1GiB"', 'path = "/d"\ncapacity = "2GiB"', "tier.nvme.capacity"),
        ('path = "/d"', 'path = "/d"\ncodec = "lz4"', "tier.nvme.codec"),
        ('path = "/s"', 'path = "/s"\nhigh_watermark = 0.99', "tier.pool.high_watermark"),
        ('name = "pool"', 'name = "another"', "tier, tier.another"),
        ("[ram]", '[policy]\neviction = "lru"\n[ram]', "policy.eviction"),
        ("k.sock", "other.sock", "daemon.listen"),
    ],
)
def test_what_needs_a_restart_is_refused_by_name_and_nothing_is_changed(
    tmp_path: Path, before: str, after: str, key: str
) -> None:
    daemon = Daemon(tmp_path)
    daemon.change('path = "/tmp"', 'path = "/tmp"\n[log]\nlevel = "debug"')
    daemon.change(before, after)
    with pytest.raises(ConfigError) as refused:
        asyncio.run(daemon.control.reload())
    assert refused.value.key.startswith(key)
    assert "log.level" not in refused.value.key
    assert daemon.ran == []
    assert daemon.control.configuration().values["log.level"] == "info"
    assert {one.key: one.live for one in asyncio.run(daemon.control.compare()).changes}["log.level"]


@pytest.mark.requirement("T9")
@pytest.mark.parametrize(
    ("before", "after", "empties", "quota"),
    [
        ('"2GiB"', '"3GiB"', True, True),
        ('path = "/d"\ncapacity = "1GiB"', 'path = "/d"\ncapacity = "32GiB"', False, True),
        ('path = "/d"', 'path = "/d"\ncodec = "lz4"', False, False),
        ('path = "/s"\ncapacity = "1GiB"', 'path = "/s"\ncapacity = "1025MiB"', False, False),
        ('path = "/d"', 'path = "/d"\ndeadline = "9s"', False, False),
    ],
)
def test_a_refusal_says_what_to_do_and_what_the_restart_costs(
    tmp_path: Path, before: str, after: str, empties: bool, quota: bool
) -> None:
    daemon = Daemon(tmp_path)
    daemon.change(before, after)
    with pytest.raises(ConfigError) as refused:
        asyncio.run(daemon.control.reload())
    assert asyncio.run(daemon.control.compare()).empties_ram is empties
    advice = refused.value.advice
    assert advice.startswith("nothing was changed; undo the change in the file, or restart kvdepotd")
    assert ("empty RAM tier" in advice, "[[quota]]" in advice) == (empties, quota)


@pytest.mark.requirement("T9")
@pytest.mark.parametrize(
    ("before", "after", "least", "most"),
    [
        ('"2GiB"', '"3GiB"', 1.0, 1.0),  # another arena
        ('path = "/d"\ncapacity = "1GiB"', 'path = "/d"\ncapacity = "32GiB"', 0.001, 0.9),  # its index takes memory
        ('path = "/d"', 'path = "/d"\ncodec = "lz4"', 0.001, 0.9),  # its workers do
        ('path = "/s"', 'path = "/s"\ndeadline = "9s"', 0.0, 0.0),
    ],
)
def test_a_comparison_says_how_much_of_ram_a_restart_loses(
    tmp_path: Path, before: str, after: str, least: float, most: float
) -> None:
    daemon = Daemon(tmp_path)
    whole = load(daemon.file).arena_layout.data_bytes
    daemon.change(before, after)
    reply = asyncio.run(daemon.control.compare())
    assert least * whole <= reply.ram_lost_bytes <= most * whole


@pytest.mark.requirement("T9")
def test_the_arena_keeps_its_size_where_auto_means_another_one_by_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdepot.server.config.config._auto_capacity_bytes", lambda *_, **__: 2 << 30)
    daemon = Daemon(tmp_path, TEXT.replace('"2GiB"', '"auto"'))
    monkeypatch.setattr("kvdepot.server.config.config._auto_capacity_bytes", lambda *_, **__: 1 << 30)
    daemon.change('path = "/tmp"', 'path = "/tmp"\nhigh_watermark = 0.99')
    assert [one.key for one in asyncio.run(daemon.control.reload()).changes] == ["ram.high_watermark"]
    assert daemon.ran[-1].capacity_bytes == 2 << 30


@pytest.mark.requirement("T9")
def test_a_lower_memory_limit_is_in_the_way_of_no_reload_where_ram_is_auto(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What "auto" would be now is too little for the tiers of the file."""
    monkeypatch.setattr("kvdepot.server.config.config._auto_capacity_bytes", lambda *_, **__: 2 << 30)
    daemon = Daemon(tmp_path, TEXT.replace('"2GiB"', '"auto"'))
    options = _parser().parse_args(["serve", str(daemon.file)])
    daemon.control._reread = partial(_reread, options, load(daemon.file))
    monkeypatch.setattr("kvdepot.server.config.config._auto_capacity_bytes", lambda *_, **__: 320 << 20)
    with pytest.raises(ConfigError, match="expected at least"):
        load(daemon.file)
    daemon.change('path = "/tmp"', 'path = "/tmp"\nhigh_watermark = 0.99')
    assert [one.key for one in asyncio.run(daemon.control.reload()).changes] == ["ram.high_watermark"]
    assert daemon.ran[-1].capacity_bytes == 2 << 30
    assert "the next start of the daemon will be refused: ram.capacity: expected at least" in caplog.text
    daemon.change('path = "/tmp"', 'path = "/tmp"\nlow_watermark = 2.0')
    with pytest.raises(ConfigError, match="low_watermark"):
        asyncio.run(daemon.control.reload())


@pytest.mark.requirement("T9")
def test_a_disk_that_became_fuller_is_in_the_way_of_no_reload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The capacity of `--disk` is a share of what was free at the start."""
    monkeypatch.setattr(embedded_disk, "_free_share_bytes", lambda _: 1 << 30)
    text = '[daemon]\nlisten = ["unix:///tmp/k.sock"]\n[ram]\ncapacity = "2GiB"\npath = "/tmp"\n'
    daemon = Daemon(tmp_path, text)
    options = _parser().parse_args(["serve", str(daemon.file), "--disk", str(tmp_path / "disk")])
    started = daemon.control._config = _config(options)
    daemon.control._reread = partial(_reread, options, started)
    monkeypatch.setattr(embedded_disk, "_free_share_bytes", lambda _: 512 << 20)
    assert asyncio.run(daemon.control.reload()).changes == ()
    daemon.change("[ram]", '[log]\nlevel = "debug"\n[ram]')
    assert [one.key for one in asyncio.run(daemon.control.reload()).changes] == ["log.level"]


@pytest.mark.requirement("T9")
def test_a_file_that_is_wrong_or_gone_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    daemon = Daemon(tmp_path)
    daemon.change("[ram]", "[ran]")
    with pytest.raises(ConfigError, match="did you mean 'ram'"):
        asyncio.run(daemon.control.reload())
    assert "configuration not reloaded" in caplog.text
    daemon.file.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        asyncio.run(daemon.control.reload())
    assert daemon.ran == []


@pytest.mark.requirement("T9")
def test_a_reload_without_room_for_a_thread_is_refused_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    daemon = Daemon(tmp_path)
    with no_room_for_threads(monkeypatch), pytest.raises(ConfigError, match="no room for another thread"):
        asyncio.run(daemon.control.reload())
    assert "configuration not reloaded" in caplog.text and daemon.ran == []
    asyncio.run(daemon.control.reload())


@pytest.mark.requirement("T9")
def test_a_read_that_hangs_keeps_no_other_reload_waiting_and_takes_nothing_back(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    hangs, goes_on = threading.Event(), threading.Event()

    def read() -> Config:
        config = load(daemon.file)
        if not hangs.is_set():
            hangs.set()
            assert goes_on.wait(patient(30))
        return config

    daemon.control._reread = read

    async def test() -> None:
        first = asyncio.create_task(daemon.control.reload())
        await until(hangs.is_set, "it has read the file of before")
        daemon.change('"10MiB"', '"20MiB"')
        assert len((await daemon.control.reload()).changes) == 1
        goes_on.set()
        assert (await first).changes == ()
        assert [one.tables.quota[0].capacity for one in daemon.ran] == [20 << 20]

    asyncio.run(test())


@pytest.mark.requirement("T9")
def test_without_a_file_there_is_nothing_to_reload(tmp_path: Path) -> None:
    config = load(Daemon(tmp_path).file)
    control = Control(
        Rig().depot, StateFile(tmp_path / "state"), config,
        reread=None, configure=lambda _: None, readiness_changed=_nothing, quotas=SetQuotas(), log=LOG,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="without a configuration file"):
        asyncio.run(control.reload())


@pytest.mark.requirement("S6")
def test_secrets_of_a_url_are_compared_and_never_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = "http://me:s3cret@collector:4318/v1/traces?token=t0ken"
    daemon = Daemon(tmp_path, TEXT + f'[trace]\nendpoint = "{url}"\n')
    assert daemon.control.configuration().values["trace.endpoint"] == "http://***@collector:4318/v1/traces?***"
    daemon.change("s3cret", "n3w")
    (change,) = asyncio.run(daemon.control.compare()).changes
    assert (change.key, change.before) == ("trace.endpoint", change.after)
    with pytest.raises(ConfigError) as refused:
        asyncio.run(daemon.control.reload())
    daemon.change("http://me:", "me:")
    with pytest.raises(ConfigError, match="expected an http") as wrong:
        asyncio.run(daemon.control.reload())
    said = f"{change} {refused.value} {wrong.value} {caplog.text} {described(load_again(daemon, url))}"
    assert not any(secret in said for secret in ("me:", "s3cret", "n3w", "t0ken"))
    assert daemon.ran == []


def load_again(daemon: Daemon, url: str) -> Config:
    """Return the configuration of the first file."""
    daemon.file.write_text(TEXT + f'[trace]\nendpoint = "{url}"\n')
    return load(daemon.file)


def test_every_key_is_shown() -> None:
    config = Config("none", Tables(), 1 << 30, Path("/none"))
    shown = values(config)
    for table, model in Tables():
        lists = ("tier", "quota", "tenant")
        assert table in lists or {f"{table}.{name}" for name in type(model).model_fields} <= shown.keys()
    assert changes(config, config) == ()


# What the engine makes of it


@pytest.mark.requirement("T9")
def test_limits_change_and_every_lease_stays() -> None:
    rig = Rig(loads_in_flight=1, lease_deadline_seconds=100.0)
    client = rig.attach()
    keys = path("p", 3)
    client.store(keys[:2])
    lease, _ = client.acquire(keys[:1])
    writing, _ = client.reserve(keys)
    assert client.acquire(keys[1:2])[1].outcome is AcquireOutcome.LATER
    rig.depot.configure(replace(rig.config, loads_in_flight=2, lease_deadline_seconds=10.0, credit_bytes=4096), {})
    assert client.acquire(keys[1:2])[1].outcome is AcquireOutcome.GRANTED
    assert client.reserve(path("more", 1))[1].outcomes == bytes([ReserveOutcome.REFUSED])  # more than the whole credit
    assert rig.depot.status().sessions[0].credit_bytes == 4096
    assert client.commit(writing, 2) == b"\1"
    client.release(lease)
    rig.now += 11
    rig.depot.tick()
    assert rig.counter("expired_leases.read") == 1  # the one that was granted since; also an older one would be over
    audit(rig.depot)


@pytest.mark.requirement("T9")
def test_a_shorter_deadline_holds_for_older_leases_too() -> None:
    rig = Rig(lease_deadline_seconds=100.0)
    client = rig.attach()
    client.store(path("p", 1))
    client.acquire(path("p", 1))
    rig.depot.configure(replace(rig.config, lease_deadline_seconds=10.0), {})
    client.acquire(path("p", 1))
    rig.now += 11
    rig.depot.tick()
    assert rig.counter("expired_leases.read") == 2


@pytest.mark.requirement("T9")
def test_watermarks_change() -> None:
    rig = Rig(data_pages=16)
    client = rig.attach()
    client.store(path("p", 6))
    rig.sum_all()
    rig.depot.tick()
    assert rig.depot.status().tier.objects == 6
    rig.depot.configure(replace(rig.config, high_watermark=0.6, low_watermark=0.5), {})
    for _ in range(3):
        rig.depot.tick()
    assert rig.depot.status().tier.used_bytes <= 8 * 4096
    audit(rig.depot)


@pytest.mark.requirement("T9")
def test_quotas_change_and_their_counts_never_fall() -> None:
    rig = Rig(quotas=(Quota(capacity_bytes=2 * 8192),))
    client = rig.attach()
    client.store(path("p", 2))
    client.reserve(path("p", 3))
    (before,) = rig.depot.status().quotas
    assert before.refused_objects + before.evicted_objects > 0
    rig.depot.configure(replace(rig.config, quotas=(Quota(capacity_bytes=4 * 8192),)), {})
    (after,) = rig.depot.status().quotas
    assert after.capacity_bytes == 4 * 8192
    assert (after.refused_objects, after.evicted_objects) == (before.refused_objects, before.evicted_objects)
    assert after.owners[0].used_bytes == rig.depot.status().tier.used_bytes
    client.store(path("q", 1))
    audit(rig.depot)
    rig.depot.configure(replace(rig.config, quotas=(Quota(capacity_bytes=8192),)), {})
    for _ in range(5):
        rig.depot.tick()
    assert rig.depot.status().quotas[0].owners[0].used_bytes <= 8192
    rig.depot.configure(replace(rig.config, quotas=()), {})
    assert rig.depot.status().quotas == ()
    client.store(path("r", 4))
    audit(rig.depot)


@pytest.mark.requirement("T9")
def test_a_quota_of_a_disk_may_come_later() -> None:
    rig = Rig(tier=COMMIT)
    client = on_tier_only(rig, path("p", 3))
    rig.depot.configure(replace(rig.config, quotas=(Quota(tier="memory", capacity_bytes=1 << 20),)), {})
    (shown,) = rig.depot.status().quotas
    assert shown.owners[0].used_bytes == 3 * rig.tier.cost_bytes(8192)
    assert client.locate(path("p", 3)).boundary_tokens == 3 * CHUNK
    rig.depot.configure(rig.config, {})
    store(client, path("q", 2))
    settle(rig)
    rig.depot.configure(replace(rig.config, quotas=(Quota(tier="memory", capacity_bytes=1 << 20),)), {})
    assert rig.depot.status().quotas[0].owners[0].used_bytes == 5 * rig.tier.cost_bytes(8192)
    audit(rig.depot)


@pytest.mark.requirement("T9")
def test_what_a_tier_is_given_changes() -> None:
    rig = Rig(tier=TierConfig(WritePolicy.EVICT))
    client = rig.attach()
    store(client, path("p", 1))
    rig.tier.run()
    assert in_tier(rig) == 0
    rig.depot.configure(rig.config, {rig.tier.name: replace(COMMIT, load_weight=3.0)})
    store(client, path("q", 2), kinds=(Kind.ATTENTION,))
    rig.tier.run()
    assert in_tier(rig) == 2
    audit(rig.depot)


@pytest.mark.requirement("T9", "S4")
def test_budgets_of_tenants_change_at_once(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, TEXT.replace('"a"', '"*"') + '[[tenant]]\nname = "t"\nusers = ["1001"]\n')
    daemon.change('users = ["1001"]', 'users = ["1001"]\nram = "1GiB"\ncredit = "64MiB"\nsessions = 100')
    found = asyncio.run(daemon.control.reload()).changes
    assert [(one.key, one.before, one.after) for one in found] == [
        ("tenant.t.credit", "none", str(64 << 20)), ("tenant.t.ram", "none", str(1 << 30)),
        ("tenant.t.sessions", "0", "100"),
    ]  # fmt: skip
    (ran,) = daemon.ran
    config = depot_config(ran, SetQuotas())
    assert config.tenants == {"t": TenantBudget(64 << 20, 100)} and Quota("t", None, "ram", 1 << 30) in config.quotas


@pytest.mark.requirement("T9", "S2")
@pytest.mark.parametrize(
    ("before", "after", "key"),
    [
        ('users = ["1001"]', 'users = ["1001", "1002"]', "tenant.t.users"),
        ('users = ["1001"]', 'users = ["1001"]\ngroups = ["2001"]', "tenant.t.groups"),
        ('name = "t"', 'name = "u"', "tenant, tenant.t.groups, tenant.t.name, tenant.t.users, tenant.u.groups"),
    ],
)
def test_who_is_in_a_tenant_takes_a_restart(tmp_path: Path, before: str, after: str, key: str) -> None:
    daemon = Daemon(tmp_path, TEXT.replace('"a"', '"*"') + '[[tenant]]\nname = "t"\nusers = ["1001"]\n')
    daemon.change(before, after)
    with pytest.raises(ConfigError, match="cannot change while the daemon runs") as refused:
        asyncio.run(daemon.control.reload())
    assert refused.value.key.startswith(key) and not daemon.ran
    assert daemon.control.configuration().values["tenant.t.users"] == "1001"
