"""Three nodes, each in a network namespace of its own: what one has computed is loaded by the others (row P4).

Node 1 loads over the stream, from a list that names all nodes and itself, and node 2 over NIXL, with a tier for each
other node. The wire has a delay of 0.5 ms and a rate of 10 Gbit/s. In one test node 1 may have one peer alone, which
does not have what moves to it (ADR 86).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Final

import pytest
from kvdepot.core.report import DaemonStatus

from demo.engine import ROOT, Engine
from demo.toys import DENSE, HYBRID, Toy
from tests.e2e.fleet import Fleet
from tests.e2e.forked import start_forked
from tests.e2e.hybrid import check_loads, hits, lengths, store
from tests.rigs.network import MTU, Network, why_no_network
from tests.rigs.patience import patience, wait_until
from tests.rigs.peer_fleet import LENT
from tests.rigs.peer_network import PORT, PeerNetwork

LANES: Final = ("stream", "stream", "nixl")
"""By node: what its tiers load over."""
LISTING: Final = 1
"""The node that has one tier for all."""
READY_SECONDS: Final = 60.0
LOADED: Final = "peer_loaded_bytes."
POLICY: Final = '[breaker]\nprobe_every = "500ms"\n'

pytestmark = pytest.mark.timeout(900)
Prompts = list[list[int]]
Tokens = list[tuple[int, ...]]


@dataclass(frozen=True)
class Node:
    """A daemon that lends its RAM and has a tier for each other node, and its engine."""

    fleet: Fleet
    model: str
    lane: str
    network: Network

    @property
    def engine(self) -> Engine:
        """Return the engine, with nothing in its own cache."""
        return self.fleet.engine(self.model)

    def start(self) -> None:
        """Return when the daemon runs and lends over NIXL."""
        daemon = self.fleet.daemon
        if not daemon.running:
            before = daemon.log.read_text() if daemon.log.exists() else ""
            daemon.start()
            wait_until(lambda: LENT in daemon.log.read_text().removeprefix(before), LENT)

    def end(self, *, kill: bool, lose_ram: bool) -> None:
        """End the engine and the daemon."""
        self.fleet.end(self.model, kill=True)
        self.fleet.daemon.kill() if kill else self.fleet.daemon.stop()
        if lose_ram:
            self.fleet.daemon.arena.unlink()

    def loaded_bytes(self) -> Counter[str]:
        """Return what has come from peers since the daemon's start, by lane."""
        lanes = Counter[str]()
        for name, value in self.fleet.daemon.status().counters.items():
            if name.startswith(LOADED):
                lanes[name.rpartition("/")[2]] += int(value)
        return lanes

    def check_loads(self, prompts: Prompts, reference: Tokens) -> None:
        """Ask for prompts that the node does not have. Every byte of them has to come from a peer, over its lane."""
        engine = self.engine
        loaded, served = self.loaded_bytes(), self.fleet.daemon.served()
        carried = self.network.counts()["carried"]
        check_loads(self.fleet, engine, prompts, reference)
        came = self.fleet.daemon.served().since(served).bytes
        assert came > 0
        assert self.loaded_bytes() - loaded == {self.lane: came}
        assert (self.network.counts()["carried"] - carried) * MTU >= came


@dataclass(frozen=True)
class Nodes:
    nodes: tuple[Node, ...]
    plain: Engine
    """It has no kvdepot."""

    def start(self) -> None:
        """Return when all daemons run and see each other."""
        for node in self.nodes:
            node.start()
        for node in self.nodes:
            node.fleet.daemon.wait(sees_all, READY_SECONDS, "sees its peers")

    def computed(self) -> tuple[Prompts, Tokens]:
        """Let the first node compute ten prompts. Return them, and the tokens of the engine without kvdepot."""
        first = self.nodes[0]
        prompts = [first.fleet.prompt(tokens) for tokens in lengths(self.plain.options.toy.chunk_tokens)]
        reference = hits(self.plain, prompts)
        assert store(first.fleet, first.engine, prompts) == reference
        first.fleet.settle(summed=True)
        return prompts, reference


def sees_all(status: DaemonStatus) -> bool:
    """Return whether all tiers can be used, and all peers of each have answered."""
    tiers = status.tiers[1:]
    peers = (peer for tier in tiers for peer in tier.peers)
    return all((tier.state, tier.breaker) == ("ready", "closed") for tier in tiers) and all(
        peer.state in ("ready", "itself") for peer in peers
    )


def knows_all(status: DaemonStatus) -> bool:
    """Return whether a tier can be used whose scout has a summary of each other node."""
    ready = any(peer.state == "ready" for peer in status.tiers[1].peers)
    return ready and status.counters.get("peer_summaries.peer-0/new", 0.0) >= len(LANES) - 1


@contextmanager
def one_peer(reader: Node, *, but: str) -> Iterator[None]:
    """Let the node that has a list start again with nothing, and with one peer, which is not this one."""
    daemon = reader.fleet.daemon
    file = daemon.directory / "kvdepot.toml"
    before = file.read_text()
    file.write_text(before.replace('kind = "peer"\n', 'kind = "peer"\npeers_max = 1\n'))
    try:
        peers = {but}
        while but in peers:  # hashing chooses another one with each new arena
            reader.end(kill=False, lose_ram=True)
            reader.start()
            daemon.wait(knows_all, READY_SECONDS, "knows what the others have")
            peers = {peer.address for peer in daemon.status().tiers[1].peers}
        yield
    finally:
        file.write_text(before)
        reader.end(kill=False, lose_ram=True)


@pytest.fixture(
    scope="module",
    params=[pytest.param(toy, marks=pytest.mark.long(seconds=150)) for toy in (HYBRID, DENSE)],
    ids=lambda toy: str(toy.name),
)
def all_nodes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, engines_of_this_module: None
) -> Iterator[Nodes]:
    """Of one model at a time."""
    if reason := why_no_network():
        pytest.skip(reason)
    toy: Toy = request.param
    folder = tmp_path_factory.mktemp("nodes")
    with ExitStack() as stack:
        network = stack.enter_context(Network(len(LANES)))
        peers = PeerNetwork(folder, network)
        nodes = []
        for number, lane in enumerate(LANES):
            listed = number == LISTING
            sources = [other for other in network.nodes if other != number or listed]
            found = peers.tiers(number, *sources, deadline="10s", borrows=lane == "nixl", listed=listed)
            tiers = peers.tls() + found + POLICY
            directory = folder / f"node-{number}"
            directory.mkdir()
            fleet = Fleet(
                directory, ROOT / "build" / "toys", tiers,
                of_daemon=peers.listening(number, lends=True), program=peers.program(number),
            )  # fmt: skip
            fleet.define(toy.name, toy, {} if toy is HYBRID else {"block_size": 32})
            nodes.append(Node(stack.enter_context(fleet), toy.name, lane, network))
        options = replace(nodes[0].fleet.options(toy.name), connector=None)
        plain = stack.enter_context(Engine(options, folder / "plain.log", start_forked, patience))
        yield Nodes(tuple(nodes), plain)


@pytest.fixture
def nodes(all_nodes: Nodes) -> Nodes:
    all_nodes.start()
    return all_nodes


@pytest.mark.requirement("P4", "T3")
def test_ten_of_ten_from_the_ram_of_another_node(nodes: Nodes) -> None:
    prompts, reference = nodes.computed()
    for reader in nodes.nodes[1:]:
        reader.check_loads(prompts, reference)
    namespaces = [{one.namespace_id for one in node.fleet.daemon.status().namespaces} for node in nodes.nodes]
    assert namespaces[0] == namespaces[1] == namespaces[2]


@pytest.mark.requirement("P4", "I8")
def test_ten_of_ten_after_engines_and_daemons_have_started_again(nodes: Nodes) -> None:
    prompts, reference = nodes.computed()
    source, *readers = nodes.nodes
    source.end(kill=True, lose_ram=False)
    nodes.start()
    for reader in readers:
        reader.check_loads(prompts, reference)
    for reader in readers:
        reader.end(kill=False, lose_ram=True)
    nodes.start()
    for reader in readers:
        reader.check_loads(prompts, reference)


@pytest.mark.requirement("P4")
def test_ten_of_ten_from_a_node_that_has_loaded_them_itself(nodes: Nodes) -> None:
    prompts, reference = nodes.computed()
    source, relay, reader = nodes.nodes
    relay.check_loads(prompts, reference)
    source.end(kill=False, lose_ram=True)
    reader.check_loads(prompts, reference)


@pytest.mark.requirement("P4", "T3")
def test_conversations_that_moved_are_loaded_by_their_first_request_from_a_node_that_was_no_peer(nodes: Nodes) -> None:
    prompts, reference = nodes.computed()
    source, reader = nodes.nodes[0], nodes.nodes[LISTING]
    with one_peer(reader, but=f"{source.network.address(0)}:{PORT}"):
        reader.check_loads(prompts, reference)
        assert reader.fleet.daemon.status().counters["peer_guests.peer-0/useful"] == 1
