"""Digests of weights and adapters."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import ResolvedRevision
from kvdepot.client.vllm.identity import weights
from kvdepot.client.vllm.identity.weights import (
    LOOK_AGAIN_SECONDS,
    Digests,
    FileDigests,
    LoraSalts,
    folder_digest,
    weights_source,
)
from kvdepot.core.errors import ConfigError

from tests.rigs.patience import Deadline


def write(folder: Path, **files: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def digest(folder: Path, cache: Path | None = None) -> str:
    digests = FileDigests(cache)
    found = folder_digest(folder, digests)
    digests.save()
    return found


@pytest.mark.requirement("P2")
def test_a_swapped_tensor_of_the_same_size_changes_the_digest(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", a=b"x" * 64 + b"y" * 64, b=b"1")
    cache = tmp_path / "cache.json"
    before = digest(folder, cache)
    assert digest(folder, cache) == before
    write(folder, a=b"y" * 64 + b"x" * 64)
    assert digest(folder, cache) != before


@pytest.mark.requirement("P3")
def test_the_digest_is_of_contents_and_relative_names(tmp_path: Path) -> None:
    one, two = write(tmp_path / "1", a=b"x", b=b"y"), write(tmp_path / "2", a=b"x", b=b"y")
    assert digest(one) == digest(two)
    (two / "b").rename(two / "c")
    assert digest(one) != digest(two)


def test_unchanged_files_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "m", a=b"x")
    cache = tmp_path / "cache.json"
    before = digest(folder, cache)
    digests = FileDigests(cache)
    digests.digest(folder / "a")  # reads the cache
    monkeypatch.setattr(Path, "open", lambda *_, **__: pytest.fail("read again"))
    assert folder_digest(folder, digests) == before


def test_a_damaged_cache_is_only_a_loss_of_time(tmp_path: Path) -> None:
    cache = tmp_path / "cache.json"
    cache.write_text("{")
    assert digest(write(tmp_path / "m", a=b"x"), cache) == digest(tmp_path / "m")


def engine(**model: Any) -> tuple[Any, Any]:
    values = {"model": "org/none", "revision": None, "model_weights": "", "seed": 3} | model
    return SimpleNamespace(**values), SimpleNamespace(load_format=model.get("load_format", "auto"), download_dir=None)


@pytest.mark.requirement("P3")
def test_weights_that_cannot_be_identified_are_refused_with_the_setting(tmp_path: Path) -> None:
    model, load = engine()
    load.download_dir = str(tmp_path)
    with pytest.raises(ConfigError, match="model_revision"):
        weights_source(model, load, "")
    assert weights_source(model, load, "abc").text == "revision abc of org/none"


def test_local_and_dummy_weights_are_identified(tmp_path: Path) -> None:
    model, load = engine(model=str(tmp_path))
    assert weights_source(model, load, "").folder == tmp_path
    load.load_format = "dummy"
    assert weights_source(model, load, "").text == "dummy seed 3"


@pytest.mark.requirement("P2")
@pytest.mark.parametrize("load_format", ["tensorizer", "ipc_cache", "modelexpress", "a plugin's"])
def test_a_load_format_that_may_load_other_weights_than_the_folder_s_needs_a_name_for_them(
    tmp_path: Path, load_format: str
) -> None:
    model, load = engine(model=str(tmp_path), load_format=load_format)
    with pytest.raises(ConfigError, match="load_format"):
        weights_source(model, load, "")
    assert "abc" in weights_source(model, load, "abc").text


def snapshots(cache: Path, **files: str) -> dict[str, Path]:
    """Two commits of a hub model; `main` is the first one as far as the cache knows."""
    model = cache / "models--org--m"
    found = {digit: model / "snapshots" / (digit * 40) for digit in "01"}
    for digit, folder in found.items():
        folder.mkdir(parents=True)
        for name, content in files.items():
            (folder / name).write_text(content + digit)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0" * 40)
    return found


@pytest.mark.requirement("P2")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"], ids=["all of it", "weights alone"])
def test_of_a_hub_model_the_snapshot_is_digested_that_vllm_has_resolved(tmp_path: Path, name: str) -> None:
    """The cache's own answer for a branch may be another commit. With `download_dir` it has no config.json."""
    found = snapshots(tmp_path, **{name: "content"})
    resolved = ResolvedRevision(resolved="1" * 40, initial=None, repo_id="org/m")
    model, load = engine(model="org/m", revision=resolved)
    load.download_dir = str(tmp_path)
    assert weights_source(model, load, "").folder == found["1"]
    model.revision = "0" * 40
    assert weights_source(model, load, "").folder == found["0"]


@pytest.mark.requirement("P2")
def test_a_model_of_modelscope_needs_a_name_for_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots(tmp_path, **{"config.json": "{}"})
    model, load = engine(model="org/m", revision="0" * 40)
    load.download_dir = str(tmp_path)
    assert weights_source(model, load, "").folder
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    with pytest.raises(ConfigError, match="ModelScope"):
        weights_source(model, load, "")


def eventually(digests: Digests, folder: Path) -> str:
    until = Deadline(10)
    while not until.is_over():
        found = digests.get(folder) or digests.problem(folder)
        if found:
            return found
        time.sleep(0.005)
    raise AssertionError("no digest")


@pytest.mark.requirement("I2")
def test_a_digest_is_never_waited_for(tmp_path: Path) -> None:
    digests = Digests(None, started_ns=time.time_ns)
    folder = write(tmp_path / "m", a=b"x")
    assert digests.get(tmp_path / "absent") is None
    assert eventually(digests, folder) == digest(folder)
    assert "holds no files" in eventually(digests, tmp_path / "absent")
    digests.close()


@pytest.mark.requirement("P2")
def test_lora_keys_depend_on_the_adapters_content_and_wait_for_it(tmp_path: Path) -> None:
    digests = Digests(None, started_ns=time.time_ns)
    salts = LoraSalts(digests)
    one, two = write(tmp_path / "1", adapter=b"x"), write(tmp_path / "2", adapter=b"y")
    requests = [SimpleNamespace(lora_path=str(path), load_inplace=False) for path in (one, two)]
    first = salts.salt(requests[0])
    for path in (one, two):
        eventually(digests, path) if digests.get(path) is None else None
    assert first is None, "unknown yet: neither stored nor served"
    known = [salts.salt(request) for request in requests]
    assert None not in known
    assert known[0] != known[1]
    digests.close()


def looked_again(digests: Digests, folder: Path, load: int) -> str | None:
    """The answer once whatever is asked for has been done."""
    digests.get(folder, load)
    until = Deadline(10)
    while digests._wanted and not until.is_over():
        time.sleep(0.005)
    return digests.get(folder, load)


@pytest.mark.requirement("P2")
def test_an_adapter_whose_files_change_while_it_is_loaded_has_no_digest_any_more(tmp_path: Path) -> None:
    """vLLM reads one again, under the same id, that its own LRU (`max_cpu_loras`) had dropped."""
    now = 0.0
    digests = Digests(None, clock=lambda: now, started_ns=time.time_ns)
    folder = write(tmp_path / "a", adapter=b"x")
    first = looked_again(digests, folder, 1)
    assert first == looked_again(digests, folder, 2) == digest(folder)
    write(folder, adapter=b"x")  # touched
    now += LOOK_AGAIN_SECONDS
    assert looked_again(digests, folder, 1) == first
    write(folder, adapter=b"y")
    assert looked_again(digests, folder, 1) == first, "it was looked at a moment ago"
    now += LOOK_AGAIN_SECONDS
    for _ in range(2):
        assert looked_again(digests, folder, 1) is None
        assert "changed since it was loaded" in digests.problem(folder, 1)
    assert looked_again(digests, folder, 2) is None, "nor has it by another id of before"
    assert looked_again(digests, folder, 3) == digest(folder) != first
    digests.close()


@pytest.mark.requirement("P2")
def test_weights_and_adapters_that_were_removed_since_they_were_loaded_keep_their_digest(tmp_path: Path) -> None:
    now = 0.0
    digests = Digests(None, clock=lambda: now, started_ns=time.time_ns)
    folder = write(tmp_path / "a", adapter=b"x")
    first = looked_again(digests, folder, 0)
    assert first == looked_again(digests, folder, 1)
    write(folder, adapter=b"y")
    now += LOOK_AGAIN_SECONDS
    assert looked_again(digests, folder, 0) == first, "weights are read once"
    (folder / "adapter").unlink()
    assert looked_again(digests, folder, 1) == first
    assert not digests.problem(folder, 1)
    digests.close()


@pytest.mark.requirement("I3")
def test_an_unexpected_error_is_a_named_problem_and_the_next_folder_is_digested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = write(tmp_path / "good", a=b"x"), write(tmp_path / "bad", a=b"y")
    real = Path.resolve

    def resolve(path: Path, strict: bool = False) -> Path:
        if path.parent == bad:
            raise RuntimeError("Symlink loop")
        return real(path, strict)

    monkeypatch.setattr(Path, "resolve", resolve)
    digests = Digests(None, started_ns=time.time_ns)
    assert "Symlink loop" in eventually(digests, bad)
    assert eventually(digests, good) == digest(good)
    digests.close()


@pytest.mark.requirement("I4")
def test_what_is_remembered_of_files_and_folders_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "ANSWERS_MAX", 3)
    monkeypatch.setattr(weights, "CACHE_ENTRIES_MAX", 4)
    digests = Digests(None, started_ns=time.time_ns)
    folders = [write(tmp_path / f"m{number}", a=bytes([number])) for number in range(8)]
    found = [eventually(digests, folder) for folder in folders]
    for number in range(8):
        eventually(digests, tmp_path / f"absent{number}")
    assert len(digests._answers) <= 3
    assert len(digests._problems) <= 3
    assert len(digests._files._known or {}) <= 4
    assert eventually(digests, folders[0]) == found[0], "and what was forgotten is found again"
    digests.close()


def test_a_cache_that_is_no_table_is_only_a_loss_of_time(tmp_path: Path) -> None:
    cache = tmp_path / "cache.json"
    cache.write_text("[]")
    assert digest(write(tmp_path / "m", a=b"x"), cache) == digest(tmp_path / "m")
