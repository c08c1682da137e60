"""Every verb of kvdepotctl against a daemon that holds what a real engine has computed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvdepot.client.ctl.app import cli

from demo.engine import ROOT, Engine
from demo.scenarios import await_lookups
from demo.toys import HYBRID
from tests.e2e.fleet import Fleet, Loaded
from tests.e2e.hybrid import CHUNK, boundary, store
from tests.e2e.sizing import size_arguments
from tests.rigs.ctl_process import kvdepotctl, problems
from tests.rigs.patience import patient

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def operated_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Of its own: what is bumped here stays bumped."""
    with Fleet(tmp_path_factory.mktemp("operator"), ROOT / "build" / "toys") as fleet:
        fleet.define("hybrid", HYBRID, {})
        yield fleet


@pytest.fixture
def fleet(operated_fleet: Fleet) -> Fleet:
    return operated_fleet


@pytest.fixture
def engine(fleet: Fleet) -> Engine:
    return fleet.engine("hybrid")


class Operator:
    """Runs verbs, and remembers which."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self.verbs: set[str] = set()

    def says(self, *words: str, code: int = 0) -> str:
        self.verbs.add(words[0])
        printed = kvdepotctl(self._endpoint, *words)
        assert printed.returncode == code, (words, printed.stdout, printed.stderr)
        return printed.stdout

    def json(self, *words: str, code: int = 0) -> Any:
        """The last line, or all of it."""
        text = self.says(*words, "--json", code=code)
        try:
            return json.loads(text)
        except ValueError:
            return json.loads(text.splitlines()[-1])


def test_every_verb_on_what_an_engine_has_stored(fleet: Fleet, engine: Engine, tmp_path: Path) -> None:
    operator = Operator(fleet.daemon.endpoint)
    prompts = [fleet.prompt(tokens) for tokens in (2 * CHUNK + 9, 4 * CHUNK + 120)]
    reference = store(fleet, engine, prompts)

    def again() -> list[Loaded]:
        """Asked with an empty cache of the engine's own; tokens are equal, whatever the daemon does."""
        fleet.forget(engine)
        answers = [fleet.ask(engine, ids) for ids in prompts]
        assert [one.tokens for one in answers] == reference
        return answers

    def loads_all() -> None:
        assert [one.external_tokens for one in again()] == [boundary(len(ids)) for ids in prompts], fleet.told()

    loads_all()
    _look(operator, fleet)
    name = operator.json("ls")["namespaces"][0]["namespace_id"]
    for switch in ("loads", "stores"):
        operator.json(switch, "off", name)
        assert all(one.external_tokens == 0 for one in again()) == (switch == "loads")
        operator.json(switch, "on", name)
    operator.json("drain", "--wait", "20")
    assert all(one.external_tokens == 0 for one in again())
    operator.json("resume")
    loads_all()
    _keep_and_limit(operator, name)
    _configure(operator)
    trace = tmp_path / "asked.trace"
    recording = subprocess.Popen(
        [sys.executable, "-m", "kvdepot.client.ctl.app", "--endpoint", fleet.daemon.endpoint, "trace", "record",
         str(trace), "--seconds", "15"], stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    fleet.daemon.wait(lambda _: trace.exists() and trace.stat().st_size > 0, 15, "recording")
    loads_all()
    _, said = recording.communicate(timeout=patient(60))
    assert recording.returncode == 0 and "2 requests" in said, said
    assert operator.json("trace", "replay", str(trace))["requests"] == 2
    file = tmp_path / "warm.kvdx"
    assert operator.json("export", name, str(file))["left_out"] == {}
    assert operator.json("evict", name)["chunks"] > 0
    assert operator.json("import", str(file))["refused"] == {}
    loads_all()
    assert operator.json("epoch", "bump", name)["changed"]
    await_lookups(engine, fleet.daemon)
    assert all(one.external_tokens == 0 for one in again()), "void, and computed again"
    loads_all()
    assert operator.json("bench", "--object-size", "1MiB", "--bytes", "16MiB")["measured"]
    assert operator.verbs == set(cli.verbs()), "no verb is left out"


def _look(operator: Operator, fleet: Fleet) -> None:
    """Verbs that change nothing."""
    status = operator.json("status")
    assert status["ready"] and any(one["engine_id"] for one in status["sessions"])
    operator.verbs.add("health")
    assert problems(kvdepotctl(fleet.daemon.endpoint, "health", "-o", "json").stdout) == []
    assert operator.json("top", "--count", "1", "--interval", "0.2")["engines"]
    (space,) = [one for one in operator.json("ls")["namespaces"] if one["sessions"]]
    name = space["namespace_id"]
    chunks = operator.json("ls", name)["chunks"]
    usable = next(one for one in chunks if one["usable"])
    described = operator.json("describe", name)
    assert set(described["object_bytes"]) == {"attention", "state"}
    sized = operator.json("size", *size_arguments(fleet.options("hybrid")))
    assert {"attention": sized["attention_bytes"], "state": sized["state_bytes"]} == described["object_bytes"]
    assert sized["chunk_tokens"] == described["chunk_tokens"]
    assert "state" in operator.says("describe", f"{name}/{usable['key']}")
    request = operator.json("requests", "--last", "1")[0]["request_id"]
    (explained,) = operator.json("explain", request)
    assert explained["request_id"] == request and explained["lookup"]["path_chunks"] > 0
    assert f"hit       {explained['lookup']['path_chunks']} chunks from the start" in operator.says("explain", request)
    verified = operator.json("verify", name)["tiers"][0]
    assert verified["verified"] > 0 and verified["damaged"] == {}
    assert operator.json("prefetch", name)["failed"] == {}
    findings = operator.json("doctor", "--read-only")["findings"]
    assert {"answers", "descriptor passing", "hash determinism"} <= {one["check"] for one in findings}
    assert "kvdepotctl" in operator.says("completion", "bash")
    assert operator.json("peers")["tiers"] == {}
    assert operator.json("what-if", code=1)["ram"]["requests"] > 0, "too few for an estimate"
    assert operator.json("assets", "list")


def _keep_and_limit(operator: Operator, name: str) -> None:
    assert operator.json("pin", name, "--ttl", "10m")["objects"] > 0
    operator.json("unpin", name)
    operator.json("quota", "set", "1GiB", "--tier", "ram")
    assert operator.json("quota", "get", "--tier", "ram")["tiers"][0]["owners"]
    operator.json("quota", "delete", "--tier", "ram")


def _configure(operator: Operator) -> None:
    assert operator.json("config", "show")["values"]
    assert operator.json("config", "diff")["changes"] == []
    assert operator.json("reload")["changes"] == []
