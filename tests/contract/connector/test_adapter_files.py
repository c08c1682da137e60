"""Files that change under LoRA adapters and weights, at every moment between two readings of theirs.

The adapters are in vLLM's own LRU (tests/fakes/adapter_store.py), which reads a path again that it had dropped. What
an engine computes follows from the content that it has read. An engine that has read one content only fails in the
step in which it meets bytes of another one: so each test ends with such engines, on what the others have stored.
"""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from kvdepot.client.vllm import connector as connector_module
from kvdepot.client.vllm.base.compat import KVConnectorRole
from kvdepot.client.vllm.base.metadata import RankMeta
from kvdepot.client.vllm.identity import weights
from kvdepot.client.vllm.scheduling import scheduler as scheduler_module
from kvdepot.client.vllm.scheduling import sides
from kvdepot.core.errors import ConfigError
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager

from tests.fakes import adapter_store, scripted_engine
from tests.fakes.direct_session import DirectDepot
from tests.fakes.scripted_engine import BLOCK, ScriptedEngine, engine_config, model_folder
from tests.rigs.adapter_requests import PROMPT, _ids, in_place, known, loaded
from tests.rigs.connector_rig import Make, prompt
from tests.rigs.patience import Deadline
from tests.rigs.seeds import drawn

OTHER = prompt(5.5, seed=3)
HIT = 5 * BLOCK


def same_times(path: Path, content: bytes) -> None:
    """As `cp -p`, and `rsync -a` of files of one size and time."""
    in_place(path, content)
    os.utime(path / "adapter", (1, 1))


def renamed_folder(path: Path, content: bytes) -> None:
    new = path.with_name(f"{path.name}-new-{next(_ids)}")
    same_times(new, content)
    if path.exists():
        path.rename(path.with_name(f"{path.name}-old-{next(_ids)}"))
    new.rename(path)


def swapped_link(path: Path, content: bytes) -> None:
    target = path.with_name(f"{path.name}-{next(_ids)}")
    in_place(target, content)
    new = path.with_name(f"{path.name}-link")
    new.symlink_to(target)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    new.replace(path)


Change = Callable[[Path, bytes], None]
CHANGES: list[Change] = [in_place, same_times, renamed_folder, swapped_link]
EVERY_CHANGE = pytest.mark.parametrize("change", CHANGES)


def ask(engine: ScriptedEngine, adapter: LoRARequest, tokens: list[int] = PROMPT) -> int:
    """The tokens that the engine had or loaded of it."""
    assert engine.adapters
    request = engine.add(tokens, lora_request=adapter)
    engine.run()
    engine.settle(0.002)
    return engine.hits[request]


def warm(engine: ScriptedEngine, adapter: LoRARequest) -> None:
    """Its first request, which is not stored."""
    ask(engine, adapter, prompt(1.5, seed=9))
    assert known(engine, adapter)


def served_rightly(
    make: Make, change: Change, path: Path, content: bytes, *prompts: list[int], **options: Any
) -> list[int]:
    """A fresh engine with this content, and what it finds: other bytes than its own fail its forward."""
    change(path, content)
    engine, adapter = make(**options), loaded(path)
    warm(engine, adapter)
    return [ask(engine, adapter, tokens) for tokens in prompts]


@EVERY_CHANGE
def test_what_an_adapter_read_again_computes_is_not_stored_as_its_former_content(
    make: Make, tmp_path: Path, change: Change
) -> None:
    """The files are put back before anybody looks, so that they have the former digest again."""
    engine = make(max_cpu_loras=1)
    for name in "xy":
        change(tmp_path / name, b"1")
    x, y = loaded(tmp_path / "x"), loaded(tmp_path / "y")
    warm(engine, x)
    assert ask(engine, x) == 0
    ask(engine, y)  # vLLM drops x
    change(tmp_path / "x", b"2")
    ask(engine, x, OTHER)  # and reads it again
    assert served_rightly(make, change, tmp_path / "x", b"1", PROMPT, OTHER) == [HIT, 0]
    assert served_rightly(make, change, tmp_path / "x", b"2", PROMPT, OTHER) == [0, 0]
    engine.assert_clean()


@EVERY_CHANGE
def test_what_is_read_before_the_first_request_is_not_stored_as_what_the_files_are_then(
    make: Make, tmp_path: Path, change: Change
) -> None:
    engine = make()
    change(tmp_path / "x", b"1")
    x = loaded(tmp_path / "x")
    engine.adapters[0].add(x)
    change(tmp_path / "x", b"2")
    for tokens in (PROMPT, OTHER, PROMPT):
        ask(engine, x, tokens)
        assert not known(engine, x, 0.1)
    assert served_rightly(make, change, tmp_path / "x", b"2", PROMPT, OTHER) == [0, 0]
    assert served_rightly(make, change, tmp_path / "x", b"1", PROMPT, OTHER) == [0, 0]


def test_two_ranks_that_read_two_contents_store_nothing(make: Make, tmp_path: Path) -> None:
    engine = make(ranks=2)
    in_place(tmp_path / "x", b"1")
    x = loaded(tmp_path / "x")
    engine.adapters[0].add(x)
    in_place(tmp_path / "x", b"2")
    engine.adapters[1].add(x)
    for tokens in (PROMPT, OTHER, PROMPT):
        ask(engine, x, tokens)
        assert not known(engine, x, 0.05)
    assert engine.side.counters["stored_objects"] == 0


def test_an_adapter_whose_files_change_while_it_is_read_is_not_stored(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def content_of(path: Path) -> bytes:
        content = read(path)
        in_place(path, b"2")
        return content

    read = adapter_store.content_of
    monkeypatch.setattr(adapter_store, "content_of", content_of)
    in_place(tmp_path / "x", b"1")
    engine, x = make(), loaded(tmp_path / "x")
    for tokens in (PROMPT, OTHER, PROMPT):
        ask(engine, x, tokens)
        assert not known(engine, x, 0.05)
    assert engine.side.counters["stored_objects"] == 0


@pytest.mark.parametrize("order", ["read late", "read first"])
def test_of_two_adapters_with_one_id_only_the_one_that_was_read_is_stored(
    make: Make, tmp_path: Path, order: str
) -> None:
    """Each of several API servers counts ids of its own, and vLLM goes by the id alone."""
    engine = make()
    for name in "xy":
        in_place(tmp_path / name, name.encode())
    x = loaded(tmp_path / "x")
    y = LoRARequest("y", x.lora_int_id, str(tmp_path / "y"))
    if order == "read late":
        assert not known(engine, y, 0)
        assert known(engine, y)
    warm(engine, x)
    for _ in range(2):
        ask(engine, y)  # computed with x
    ask(engine, x, OTHER)
    assert served_rightly(make, in_place, tmp_path / "y", b"y", PROMPT, OTHER) == [0, 0]
    assert served_rightly(make, in_place, tmp_path / "x", b"x", PROMPT, OTHER) == [0, HIT]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks come every few milliseconds."""
    monkeypatch.setattr(weights, "LOOK_SECONDS", 0.005)
    monkeypatch.setattr(scheduler_module, "ADAPTERS_SECONDS", 0.0)


@EVERY_CHANGE
@pytest.mark.usefixtures("quick")
def test_files_that_change_under_an_adapter_end_what_is_served_and_stored_of_it(
    make: Make, tmp_path: Path, change: Change
) -> None:
    """Without a word of the engine, and without a further request."""
    change(tmp_path / "x", b"1")
    engine, x = make(), loaded(tmp_path / "x")
    warm(engine, x)
    assert ask(engine, x) == 0
    running = engine.add(OTHER, max_tokens=4 * BLOCK, lora_request=x)
    for _ in range(4):
        engine.step()
    change(tmp_path / "x", b"2")
    state = engine.side._requests[running]
    until = Deadline(5)
    while not state.invalid:
        assert not until.is_over()
        engine.step()
        time.sleep(0.002)
    stored = engine.side.counters["stored_objects"]
    engine.run()
    engine.settle()
    engine.reset()
    assert ask(engine, x) == 0, "it is in the depot, and is not served"
    assert engine.side.counters["stored_objects"] == stored
    assert served_rightly(make, change, tmp_path / "x", b"1", PROMPT) == [HIT]


def test_files_of_adapters_are_not_looked_at_with_each_step(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_place(tmp_path / "x", b"1")
    engine, x = make(), loaded(tmp_path / "x")
    warm(engine, x)
    looks: list[float] = []
    monkeypatch.setattr(engine.side, "_look_at_adapters", lambda: looks.append(engine.side._looked_at))
    monkeypatch.setattr(scheduler_module, "ADAPTERS_SECONDS", engine.side._clock() / 2)
    engine.add(OTHER, max_tokens=BLOCK, lora_request=x)
    engine.run()
    assert not looks, "the last look was seconds ago"
    monkeypatch.setattr(scheduler_module, "ADAPTERS_SECONDS", 0.0)
    engine.step()
    assert looks


def test_copies_in_progress_of_a_replaced_adapter_are_not_committed(make: Make, tmp_path: Path) -> None:
    """Whatever the ranks have of it: nothing of it, asked for, granted, sent, or done."""
    for steps in range(1, 12):
        in_place(tmp_path / "x", b"1")
        engine, x = make(max_cpu_loras=1), loaded(tmp_path / "x")
        warm(engine, x)
        before = engine.side.counters["stored_objects"]
        request = engine.add(prompt(5.5, seed=20 + steps), max_tokens=2 * BLOCK, lora_request=x)
        for _ in range(steps):
            engine.step()
        committed = engine.side.counters["stored_objects"] - before
        engine.side._replace(engine.side._loaded_adapters.read(x.lora_int_id))
        engine.run()
        engine.settle(0.002)
        assert engine.side.counters["stored_objects"] - before == committed
        assert engine.requests[request].is_finished()
        engine.assert_clean()


def test_an_unknown_content_after_a_known_one_makes_nothing_sound(make: Make, tmp_path: Path) -> None:
    """What is computed while nobody knows of which content is not stored once it is known again."""
    in_place(tmp_path / "x", b"1")
    engine, x = make(), loaded(tmp_path / "x")
    warm(engine, x)
    assert ask(engine, x, OTHER) == 0, "it is known"
    salt = engine.side._adapters.salt
    engine.side._adapters.salt = lambda _: None
    assert ask(engine, x) == 0
    engine.side._adapters.salt = salt
    assert ask(engine, x) == HIT, "vLLM's own cache"
    assert ask(engine, x, [*PROMPT, *OTHER]) > 0
    assert served_rightly(make, in_place, tmp_path / "x", b"1", PROMPT) == [0]


@pytest.mark.parametrize("seed", [*drawn([0]), *drawn(range(1, 20), [pytest.mark.long(seconds=4)])])
def test_whatever_changes_when_no_engine_is_served_another_content(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Random loads, requests, evictions, changes and waits; then an engine of each content asks for all prompts."""
    monkeypatch.setattr(weights, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(weights, "LOOK_AGAIN_SECONDS", 0.03)
    monkeypatch.setattr(scheduler_module, "ADAPTERS_SECONDS", 0.005)
    random, contents = Random(seed), [b"1", b"2"]
    prompts = [prompt(blocks, seed=seed) for seed in range(3) for blocks in (2.5, 4.5)]
    paths = [tmp_path / name for name in "xyz"]
    for path in paths:
        in_place(path, random.choice(contents))
    options = {"hybrid": seed % 2 == 1, "ranks": 1 + seed // 2 % 2, "runs_ahead": seed % 3 == 1, "blocks": 128}
    engine = make(max_cpu_loras=2, **options)
    adapters = {path: loaded(path) for path in paths}
    stored = 0
    for _ in range(150):
        path = random.choice(paths)
        match random.randrange(10):
            case 0 | 1 | 2 | 3 | 4:
                engine.add(random.choice(prompts), random.choice((1, BLOCK)), lora_request=adapters[path])
                for _ in range(random.randrange(30)):
                    engine.step()
            case 5:
                random.choice(CHANGES)(path, random.choice(contents))
            case 6:
                adapters[path] = loaded(path)
                if random.random() < 0.5:
                    engine.adapters[0].add(adapters[path])
            case 7:
                engine.run()
                engine.scheduler.reset_prefix_cache()
            case 8:
                known(engine, adapters[path], 0.02)
            case 9:
                time.sleep(random.choice((0.0, 0.04)))
        stored = engine.side.counters["stored_objects"]
    engine.run()
    engine.settle()
    assert stored
    found = [
        served_rightly(make, in_place, path, content, *prompts, **options) for path in paths for content in contents
    ]
    assert any(itertools.chain(*found)), "something was of use"
    engine.assert_clean()


# Weights


def test_a_model_that_is_replaced_while_an_engine_starts_gives_no_namespace(
    depot: DirectDepot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its workers have read it, and its scheduler is made afterwards."""
    model, worker = model_folder(tmp_path / "model"), scripted_engine._worker

    def replacing(*arguments: Any) -> Any:
        made = worker(*arguments)
        time.sleep(0.02)  # more than a tick of the file system
        (tmp_path / "new").write_bytes(b"weightz")
        (tmp_path / "new").replace(model / "model.safetensors")
        return made

    monkeypatch.setattr(scripted_engine, "_worker", replacing)
    monkeypatch.setattr(sides, "cache_path", lambda: None)
    engine = ScriptedEngine(depot, model, monkeypatch, wait=False)
    until = Deadline(5)
    while not engine.side.namespaces.problem and not until.is_over():
        engine.step()
    assert "model_revision" in engine.side.namespaces.problem
    assert engine.side.namespaces.problem in caplog.text
    engine.generate(PROMPT)
    assert engine.session._registered == set()
    engine.close()


def test_an_engine_without_a_cache_of_digests_stores_and_loads(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "cache_path", lambda: None)
    make().generate(PROMPT)
    assert make().generate(PROMPT)


def test_an_engine_with_adapters_watches_when_they_are_read(folder: Path) -> None:
    config = engine_config(folder)
    config.lora_config = object()
    layout = scripted_engine.cache_layout(hybrid=False, blocks=8, retention=None)
    worker = connector_module.KVDepotConnector(config, KVConnectorRole.WORKER, layout)
    assert worker._adapter_reads is not None


def test_a_vllm_that_reads_adapters_elsewhere_is_refused_with_adapters_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerLoRAManager, "_load_adapter", lambda self, lora_request, more: None)
    layout = scripted_engine.cache_layout(hybrid=False, blocks=8, retention=None)
    config = engine_config(folder)
    assert connector_module.KVDepotConnector(config, KVConnectorRole.WORKER, layout)
    config.lora_config = object()
    with pytest.raises(ConfigError, match="_load_adapter"):
        connector_module.KVDepotConnector(config, KVConnectorRole.WORKER, layout)


def test_what_the_ranks_said_of_adapters_outlives_the_scheduler_side(make: Make, tmp_path: Path) -> None:
    """They do not say it again when the handshake is repeated."""
    in_place(tmp_path / "x", b"1")
    engine, x = make(), loaded(tmp_path / "x")
    engine.adapters[0].add(x)
    in_place(tmp_path / "x", b"2")
    ask(engine, x)
    salts = engine.side._adapters
    facts = {(0, 0): engine.workers[0].get_handshake_metadata()}
    engine.connector.set_xfer_handshake_metadata_pp_aware(facts)
    assert engine.side._adapters is salts
    assert not known(engine, x, 0.1)


def test_a_late_or_repeated_word_of_a_rank_does_not_bring_a_former_content_back(make: Make, tmp_path: Path) -> None:
    engine = make(max_cpu_loras=1)
    for name in "xy":
        in_place(tmp_path / name, b"1")
    x, y = loaded(tmp_path / "x"), loaded(tmp_path / "y")
    warm(engine, x)
    first = next(iter(engine.side._adapters._reads[x.lora_int_id].values()))
    ask(engine, y)
    in_place(tmp_path / "x", b"2")
    ask(engine, x)
    assert engine.side._adapters.salt(x) is None
    for meta in (RankMeta(adapters=(first,)), RankMeta(adapters=(first, first))):
        engine.side.output(meta)
        in_place(tmp_path / "x", b"1")
        assert not known(engine, x, 0.05)
