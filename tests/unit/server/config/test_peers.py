"""Peers in the configuration: nothing without certificates, nobody without a name, no key of tiers that are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kvdepot.core.errors import ConfigError
from kvdepot.server.config.config import Config, check
from kvdepot.server.config.memory_room import PEER_RESERVE_BYTES, SCOUT_RESERVE_BYTES
from kvdepot.server.config.peers import Peers
from kvdepot.server.config.tier_settings import peer_config
from kvdepot.server.io import nixl_agent
from kvdepot.server.io.peer_wire import Lane
from kvdepot.server.tiers.peer.places import DnsName, PlacesFile

TLS = {"cert": "/c", "key": "/k", "client_ca": "/ca", "allow_peers": ["DNS:Node-B", "URI:x"]}
TIER = {"name": "b", "kind": "peer", "url": "tcp://node-b:7448", "capacity": "64MiB"}
SEVERAL = TIER | {"url": "dns://peers.fleet:7448"}
MANY = [f"URI:spiffe://fleet/{number:0>{181}}" for number in range(1024)]
TENANTS = [{"name": "a", "users": ["1"], "peers": ["DNS:node-b"]}, {"name": "c", "users": ["2"], "peers": ["URI:x"]}]


def checked(**tables: Any) -> Config:
    document = {"daemon": {"listen": ["unix:///run/k.sock"]}, "ram": {"capacity": "1GiB"}, "tls": TLS} | tables
    return check("f", document)


def refusal(**tables: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        checked(**tables)
    return str(caught.value)


LISTENING = {"listen": ["unix:///run/k.sock"], "listen_peers": "tcp://0.0.0.0:7448"}


@pytest.mark.requirement("T3")
def test_a_source_and_a_reader_are_told_by_address_and_names() -> None:
    source, reader = checked(daemon=LISTENING), checked(tier=[TIER])
    assert source.tables.daemon.peers_address == ("0.0.0.0", 7448)
    assert reader.tables.tier[0].peer_address == ("node-b", 7448)
    assert reader.peers.names_of(None) == ("DNS:node-b", "URI:x")
    assert source.peers.tenant_of(["DNS:node-b", "DNS:other"]) == (True, None)
    assert source.peers.tenant_of(["DNS:other"]) == (False, None)
    assert source.arena_bytes < checked(tls={}).arena_bytes and reader.arena_bytes < checked(tls={}).arena_bytes


@pytest.mark.requirement("S3")
@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"daemon": LISTENING, "tls": {}}, "daemon.listen_peers: peers need [tls] cert, key and client_ca"),
        ({"tier": [TIER], "tls": {}}, "tier.b.kind: peers need [tls] cert, key and client_ca"),
        ({"tier": [TIER], "tls": TLS | {"allow_peers": []}}, "tls.allow_peers: allows no peer"),
        ({}, "has certificates, and daemon.listen has no tcp:// address"),
        (
            {"daemon": {"listen": [*LISTENING["listen"], "tcp://[::]:1"]}, "tls": TLS | {"allow_admins": ["DNS:o"]}},
            "nobody could call",
        ),
        ({"tier": [TIER], "tls": TLS | {"allow_peers": ["node-b"]}}, "expected DNS:host or URI:uri"),
        ({"tier": [TIER], "tls": TLS | {"allow_peers": MANY}}, "tls.allow_peers: has 208896 bytes"),
        ({"tier": [TIER], "tls": TLS | {"allow_peers": ["DNS:*.fleet"]}}, "got the pattern"),
        ({"daemon": LISTENING | {"listen_peers": "unix:///x"}}, "expected tcp://host:port"),
        ({"tier": [TIER | {"url": "s3://bucket"}]}, 'kind = "peer" needs url = "tcp://host:port"'),
        ({"tier": [TIER | {"url": "dns://peers"}]}, 'expected "host:port"'),
        ({"tier": [TIER | {"url": "file://peers"}]}, "expected file:///absolute/path"),
        ({"tier": [TIER | {"peers_max": 2}]}, "tcp:// is one peer"),
        ({"tier": [SEVERAL | {"peers_max": 33}]}, "less than or equal to 32"),
        (
            {"tier": [TIER | {"kind": "shared", "url": "", "path": "/x", "peers_max": 2}]},
            'peers_max needs kind = "peer"',
        ),
        ({"tier": [TIER | {"kind": "object"}]}, "expected the url of a bucket"),
        ({"tier": [TIER | {"path": "/x"}]}, 'path is no key of kind = "peer"'),
        ({"tier": [TIER | {"write": "commit"}]}, 'write is no key of kind = "peer": nothing is written there'),
        ({"tier": [TIER | {"key_file": "/x"}]}, 'key_file is no key of kind = "peer"'),
        ({"tier": [TIER | {"tenant": "a"}]}, "tier.b.tenant: there is no tenant 'a'"),
        ({"tier": [TIER], "tenant": TENANTS}, "a peer tier needs the name of a tenant"),
        (
            {"daemon": LISTENING, "tenant": [TENANTS[0] | {"peers": ["DNS:stranger"]}]},
            "'DNS:stranger' is not in [tls] allow_peers",
        ),
        (
            {"daemon": LISTENING, "tenant": [TENANTS[0], TENANTS[1] | {"peers": ["URI:x", "DNS:node-b"]}]},
            "'DNS:node-b' is in tenant 'a' already",
        ),
        ({"daemon": LISTENING, "tenant": TENANTS[:1]}, "'URI:x' is in no tenant"),
        ({"daemon": {"lend_nixl": True}, "tier": [TIER]}, "daemon.lend_nixl: nobody could borrow"),
        ({"daemon": LISTENING | {"lend_nixl": True}, "tenant": TENANTS}, "daemon.lend_nixl: NIXL shows all of RAM"),
        ({"tier": [TIER | {"lane": "nixl", "tenant": "a"}], "tenant": TENANTS}, "tier.b.lane: NIXL shows all of RAM"),
        ({"tier": [TIER | {"lane": "rdma"}]}, "'stream' or 'nixl'"),
        ({"tier": [TIER | {"kind": "shared", "url": "", "path": "/x", "lane": "nixl"}]}, 'lane needs kind = "peer"'),
    ],
)
def test_what_cannot_be_meant_is_refused(tables: dict[str, Any], said: str) -> None:
    assert said in refusal(**tables)


@pytest.mark.parametrize(
    ("url", "places"),
    [
        ("dns://peers.fleet:7448", DnsName("peers.fleet", 7448)),
        ("file:///etc/kvdepot/peers", PlacesFile(Path("/etc/kvdepot/peers"))),
    ],
)
def test_several_peers_are_told_by_a_name_or_a_file_and_take_memory_each(url: str, places: object) -> None:
    config = checked(tier=[TIER | {"url": url, "peers_max": 2}])
    peer = peer_config(config.tables, config.tables.tier[0], config.peers)
    assert (peer.places, peer.peers_max) == (places, 2)
    more = checked(tier=[TIER | {"url": url, "peers_max": 5}])
    one = checked(tier=[TIER])
    with_guest = one.arena_bytes - SCOUT_RESERVE_BYTES - 2 * 2 * PEER_RESERVE_BYTES
    assert with_guest > config.arena_bytes > more.arena_bytes
    assert config.arena_bytes - more.arena_bytes >= 3 * 2 * PEER_RESERVE_BYTES


@pytest.mark.requirement("S4")
def test_a_peer_belongs_to_the_tenant_that_names_it_and_to_one_alone() -> None:
    config = checked(tier=[TIER | {"tenant": "a"}], tenant=TENANTS)
    assert config.peers.names_of("a") == ("DNS:node-b",)
    assert config.peers.tenant_of(["DNS:node-b"]) == (True, "a")
    assert config.peers.tenant_of(["URI:x", "DNS:stranger"]) == (True, "c")
    assert config.peers.tenant_of(["DNS:node-b", "URI:x"]) == (False, None)
    assert Peers().tenant_of(["DNS:node-b"]) == (False, None)


@pytest.mark.requirement("T3")
@pytest.mark.parametrize("key", ["daemon.lend_nixl", "tier.b.lane"])
def test_nixl_needs_its_package_and_memory_and_nobody_gets_it_unasked(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables: dict[str, Any] = {"daemon": LISTENING, "tier": [TIER]}
    stream = checked(**tables)
    assert not stream.tables.daemon.lend_nixl and stream.tables.tier[0].lane is Lane.STREAM
    if key == "tier.b.lane":
        tables["tier"] = [TIER | {"lane": "nixl"}]
    else:
        tables["daemon"] = LISTENING | {"lend_nixl": True}
    assert checked(**tables).arena_bytes < stream.arena_bytes
    monkeypatch.setattr(nixl_agent, "PACKAGES", ("kvdepot_no_such_package",))
    assert f"{key}: needs the package nixl-cu12, which is not installed" in refusal(**tables)
    assert "pip install --no-deps nixl-cu12" in refusal(**tables)
