"""The shadow audit on real engines: wrong bytes of which every checksum is right are found (design.md#audit)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kvdepot.client.ctl.importing import spec_of
from kvdepot.core.calls import Kind
from kvdepot.core.export_file import ExportedObject, ExportReader, ExportWriter
from kvdepot.core.objectfile import payload_sum
from kvdepot.core.report import DaemonStatus

from demo.engine import ROOT
from demo.toys import DENSE, HYBRID
from tests.e2e import speculation
from tests.e2e.fleet import Fleet
from tests.rigs.ctl_process import text

pytestmark = pytest.mark.long

COMPUTE = {"max_load_tokens": 0}
"""Params of a request that is computed, whatever the daemon has."""
AUDIT_SECONDS = 60.0
CHUNK = {"dense": 256, "hybrid": 384}


@pytest.fixture(scope="module")
def audited_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("audit"), ROOT / "build" / "toys", "[policy]\naudit_sample = 1.0\n") as fleet:
        fleet.define("dense", DENSE, {"block_size": 32})
        fleet.define("hybrid", HYBRID, {})
        speculation.define(fleet)
        yield fleet


@pytest.fixture
def fleet(audited_fleet: Fleet) -> Fleet:
    return audited_fleet


def audits(status: DaemonStatus) -> dict[str, float]:
    """How many objects were compared, by what came of it."""
    return {outcome: status.counters.get(f"audits.{outcome}", 0) for outcome in ("same", "drifted")}


def computed_twice(fleet: Fleet, name: str) -> tuple[dict[str, float], dict[str, float]]:
    """What was compared before and after an engine computed a stored prompt and its answer again."""
    engine, ids = fleet.engine(name), fleet.prompt(2 * speculation.HYBRID_CHUNK + 60)
    first = engine.ask(ids, speculation.GENERATED)
    fleet.forget(engine)
    before = audits(fleet.daemon.status())
    again = fleet.ask(engine, ids, speculation.GENERATED, COMPUTE)
    assert (again.external_tokens, again.tokens) == (0, first.tokens)
    assert first.prompt.draft_tokens
    fleet.forget(engine)
    return before, audits(fleet.daemon.settle())


def plant(file: Path, wrong: Path, kind: Kind, boundary_tokens: int) -> None:
    """A copy of an export in which one object's numbers are turned around, and summed as they are then."""
    planted = 0
    with file.open("rb") as source, wrong.open("wb") as target:
        reader = ExportReader(source)
        writer = ExportWriter(target, reader.head)
        for one in reader.objects(spec_of(reader).object_bytes):
            payload = bytes(one.payload)
            if (one.name.kind, one.name.boundary_tokens) == (kind, boundary_tokens):
                payload = np.frombuffer(payload, dtype=np.uint32)[::-1].tobytes()
                planted += 1
            writer.add(ExportedObject(one.name, payload), payload_sum((payload,)))
        assert reader.end is not None and planted == 1
        writer.end(0)


@pytest.mark.requirement("I1", "I1e")
@pytest.mark.parametrize(
    ("name", "kind", "chunks"), [("dense", Kind.ATTENTION, 2), ("hybrid", Kind.STATE, 2), ("hybrid", Kind.ATTENTION, 3)]
)
def test_wrong_bytes_with_a_right_checksum_are_found_when_an_engine_computes_them_again(
    fleet: Fleet, name: str, kind: Kind, chunks: int, tmp_path: Path
) -> None:
    engine, boundary = fleet.engine(name), chunks * CHUNK[name]
    ids = fleet.prompt(boundary + 60)
    cold = engine.ask(ids).tokens
    hit = engine.ask(ids).tokens  # what is loaded must give these: a batch of other shape rounds otherwise
    fleet.forget(engine)
    namespace = fleet.namespace_told()
    file, wrong = tmp_path / "right.kvdx", tmp_path / "wrong.kvdx"
    text(fleet.daemon.endpoint, "export", namespace, str(file))
    plant(file, wrong, kind, boundary)
    text(fleet.daemon.endpoint, "evict", namespace, "--yes")
    text(fleet.daemon.endpoint, "import", str(wrong))
    before = audits(fleet.daemon.settle())

    # No checksum says anything: the wrong bytes are loaded, and the tokens show it.
    loaded = fleet.ask(engine, ids)
    assert loaded.external_tokens == boundary and loaded.tokens != hit
    fleet.forget(engine)
    assert audits(fleet.daemon.status()) == before, "what is loaded is not computed, so nothing is compared"

    computed = fleet.ask(engine, ids, params=COMPUTE)
    assert (computed.external_tokens, computed.tokens) == (0, cold)
    drifted = before["drifted"] + 1
    fleet.daemon.wait(lambda status: audits(status)["drifted"] == drifted, AUDIT_SECONDS, "the comparison")
    fleet.forget(engine)
    refused = fleet.ask(engine, ids)
    assert (refused.external_tokens, refused.tokens) == (0, cold), "the namespace is in quarantine"
    assert [one.hex()[: len(namespace)] for one in fleet.daemon.status().switches.loads_off_namespaces] == [namespace]
    fleet.forget(engine)

    # What the engine has stored since is right, and is found to be when it is computed once more.
    text(fleet.daemon.endpoint, "loads", "on", namespace)
    whole = fleet.ask(engine, ids)
    assert (whole.external_tokens, whole.tokens) == (boundary, hit), fleet.told()
    fleet.forget(engine)
    same = audits(fleet.daemon.status())["same"]
    assert fleet.ask(engine, ids, params=COMPUTE).tokens == cold
    fleet.daemon.wait(lambda status: audits(status)["same"] > same, AUDIT_SECONDS, "the comparison")
    fleet.forget(engine)
    assert audits(fleet.daemon.status())["drifted"] == drifted
    assert fleet.ask(engine, ids).external_tokens == boundary


@pytest.mark.requirement("I1")
def test_noise_of_other_batches_is_no_drift(fleet: Fleet) -> None:
    """Stored in bfloat16 from prompts one by one, and computed again in batches, whose steps cut them elsewhere."""
    engine = fleet.engine("hybrid")
    prompts = [fleet.prompt(CHUNK["hybrid"] * chunks + 50) for chunks in (2, 3, 5, 4)]
    for ids in prompts:
        engine.ask(ids)
    fleet.forget(engine)
    before = audits(fleet.daemon.status())
    done = engine.finish(engine.begin(prompts, 16, params=COMPUTE))
    assert [one.error for one in done] == [""] * len(prompts)
    after = audits(fleet.daemon.settle())
    assert after["same"] > before["same"] and after["drifted"] == before["drifted"]
    fleet.forget(engine)
    assert fleet.ask(engine, prompts[2]).external_tokens == 5 * CHUNK["hybrid"], "no quarantine"


@pytest.mark.requirement("I1", "C6")
def test_states_under_ngram_are_compared_and_have_not_drifted(fleet: Fleet) -> None:
    """The tokens of a convolution that rejected drafts leave behind a boundary differ, and are not compared."""
    before, after = computed_twice(fleet, "ngram_hybrid_every_chunk")
    assert after["same"] >= before["same"] + 4, "a state and the attention of each of two chunks"
    assert after["drifted"] == before["drifted"]


@pytest.mark.requirement("I1", "C6")
def test_nothing_is_compared_whose_draft_layers_read_the_next_token(fleet: Fleet) -> None:
    before, after = computed_twice(fleet, "mtp_2_every_chunk")
    assert after == before
