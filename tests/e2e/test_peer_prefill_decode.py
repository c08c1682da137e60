"""Prefill and decode engines on two nodes, whose daemons are peers of each other (rows A4, B1, B3)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import pytest
from kvdepot.client.ctl.calls import connect
from kvdepot.client.endpoint import Endpoint
from kvdepot.client.vllm.scheduling.transfer_params import PREFIX
from kvdepot.core.control import Switch, SwitchCall

from demo.engine import ROOT
from demo.toys import DENSE, HYBRID, Toy
from tests.e2e.fleet import LOOKUP_TIMEOUT_SECONDS, Fleet, Loaded
from tests.e2e.router import ASKED
from tests.rigs import ports
from tests.rigs.certificates import Authority
from tests.rigs.patience import patient
from tests.rigs.peer_fleet import PEER

READY_SECONDS: Final = 60.0
COMPUTE_SECONDS: Final = 10.0
"""Of a toy for a short prompt, where the tests of other modules compute too."""
TIERS: Final = """
[breaker]
probe_every = "500ms"
[tls]
cert = "{cert}"
key = "{key}"
client_ca = "{ca}"
allow_peers = ["{peer}"]
[[tier]]
name = "node"
kind = "peer"
url = "{url}"
capacity = "256MiB"
deadline = "5s"
"""
Params = dict[str, Any]


@dataclass(frozen=True)
class Pair:
    """Two nodes, each with one engine."""

    toy: Toy
    prefill: Fleet
    decode: Fleet

    def forget(self) -> None:
        """Let both engines have nothing of their own, and both daemons see each other."""
        for fleet in (self.prefill, self.decode):
            fleet.engine(self.toy.name)
            fleet.daemon.wait(
                lambda status: (status.tiers[1].state, status.tiers[1].breaker) == ("ready", "closed"),
                READY_SECONDS,
                "sees its peer",
            )

    def ask(self, fleet: Fleet, ids: list[int], tokens: int, params: Params | None) -> tuple[Loaded, Params]:
        engine = fleet.running(self.toy.name)
        assert engine is not None
        loaded = fleet.ask(engine, ids, tokens, params)
        return loaded, loaded.answer.completion.params or {}

    def reference(self, ids: list[int], tokens: int, resumed: int) -> tuple[int, ...]:
        """Return the tokens of a cold run, or of a hit in the engine's own cache: a hybrid's rounding differs there."""
        self.decode.engine(self.toy.name)
        cold, _ = self.ask(self.decode, ids, tokens, None)
        assert (cold.local_tokens, cold.external_tokens) == (0, 0)
        if self.toy is not HYBRID:
            return cold.tokens
        hit, _ = self.ask(self.decode, ids, tokens, None)
        assert (hit.local_tokens, hit.external_tokens) == (resumed, 0)
        return hit.tokens


def boundary(params: Params) -> int:
    (said,) = (said for key, said in params.items() if key.startswith(PREFIX))
    return int(said["boundary_tokens"])


@pytest.fixture(
    scope="module",
    params=[pytest.param(toy, marks=pytest.mark.long(seconds=110)) for toy in (HYBRID, DENSE)],
    ids=lambda toy: str(toy.name),
)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, engines_of_this_module: None
) -> Iterator[Pair]:
    """Of one model at a time."""
    toy: Toy = request.param
    folder = tmp_path_factory.mktemp("pair")
    authority = Authority(folder)
    files = authority.issue("peer", PEER)
    with ExitStack() as stack:
        holders = [stack.enter_context(ports.held()) for _ in range(2)]
        urls = [f"tcp://127.0.0.1:{ports.port_of(holder)}" for holder in holders]
        fleets = []
        for number, own in enumerate(urls):
            tiers = TIERS.format(
                cert=files.cert, key=files.key, ca=authority.pem, peer=PEER, url=urls[1 - number]
            )  # fmt: skip
            node = folder / f"node-{number}"
            node.mkdir()
            listen = f'listen_peers = "{own}"\n'
            fleet = stack.enter_context(Fleet(node, ROOT / "build" / "toys", tiers, of_daemon=listen))
            # Of a hybrid, a checkpoint at each chunk: what is generated has some too.
            fine = {"prefix_cache_retention_interval": toy.chunk_tokens, "max_num_batched_tokens": toy.chunk_tokens}
            fleet.define(toy.name, toy, fine if toy is HYBRID else {"block_size": 32})
            fleets.append(fleet)
        for fleet in fleets:
            fleet.ensure_daemon()
        for fleet in fleets:
            fleet.launch([toy.name])
        yield Pair(toy, *fleets)


@contextmanager
def stopped(fleet: Fleet) -> Iterator[None]:
    """Stop a daemon and its children, which are one process group."""
    os.killpg(fleet.daemon.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(fleet.daemon.pid, signal.SIGCONT)


@contextmanager
def loads_off(fleet: Fleet) -> Iterator[None]:
    with connect(Endpoint.parse(fleet.daemon.endpoint), patient(READY_SECONDS)) as operator:
        operator.switch(SwitchCall(Switch.LOADS, on=False))
        try:
            yield
        finally:
            operator.switch(SwitchCall(Switch.LOADS, on=True))


@pytest.mark.requirement("A4", "B1", "B3")
def test_two_nodes_take_turns_in_a_conversation(pair: Pair) -> None:
    pair.forget()
    chunk = pair.toy.chunk_tokens
    first = pair.prefill.prompt(2 * chunk + 40)
    computed, params = pair.ask(pair.prefill, first, 1, ASKED)
    assert (computed.local_tokens, computed.external_tokens) == (0, 0)
    # Asked at once, before the other node had committed and summed its stores: it waited for them.
    answered, params = pair.ask(pair.decode, first, chunk + 16, params)
    assert (answered.local_tokens, answered.external_tokens) == (0, 2 * chunk), pair.decode.told()
    assert boundary(params) == 3 * chunk
    assert pair.decode.daemon.status().counters["named_sources.peer"] >= 1

    second = [*first, *answered.tokens, *pair.prefill.prompt(30)]
    computed, _ = pair.ask(pair.prefill, second, 16, params)
    assert computed.external_tokens > 0, pair.prefill.told()
    assert computed.local_tokens + computed.external_tokens == 3 * chunk, pair.prefill.told()

    # A hit of what the other engine has kept itself. A hybrid's state of generated tokens is rounded otherwise than
    # that of a prompt.
    own, _ = pair.ask(pair.decode, second, 16, None)
    assert own.local_tokens >= 3 * chunk and not own.external_tokens
    assert computed.tokens == own.tokens

    pair.forget()
    with loads_off(pair.decode):
        assert pair.reference(first, chunk + 16, 2 * chunk) == answered.tokens
        if pair.toy is not HYBRID:
            assert pair.reference(second, 16, 3 * chunk) == computed.tokens


@pytest.mark.requirement("B3", "I3")
def test_a_named_daemon_that_is_stopped_or_gone_costs_a_computation_in_time(pair: Pair) -> None:
    pair.forget()
    size = pair.toy.chunk_tokens + 40
    for event in ("stopped", "gone"):
        prompt = pair.prefill.prompt(size)
        cold, params = pair.ask(pair.prefill, prompt, 8, ASKED)
        assert boundary(params) > 0
        pair.prefill.settle()
        with ExitStack() as stack:
            if event == "stopped":
                stack.enter_context(stopped(pair.prefill))
            else:
                pair.prefill.daemon.kill()
            computed, _ = pair.ask(pair.decode, prompt, 8, params)
        assert (computed.local_tokens, computed.external_tokens) == (0, 0), event
        assert computed.tokens == cold.tokens, event
        seconds = computed.answer.completion.seconds
        assert seconds < patient(2 * LOOKUP_TIMEOUT_SECONDS + COMPUTE_SECONDS), event
        pair.forget()
