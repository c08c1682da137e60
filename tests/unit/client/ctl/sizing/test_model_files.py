"""Where `kvdepotctl size` finds a model's configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kvdepot.client.ctl.sizing.model_files import read_model_config
from kvdepot.core.errors import InvalidArgument, NotFound

OLD, NEW = {"architectures": ["Old"]}, {"architectures": ["New"]}


def write(folder: Path, config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_folder_and_its_file_are_the_same_model(tmp_path: Path) -> None:
    folder = write(tmp_path, NEW)
    assert read_model_config(str(folder)) == read_model_config(f"{folder}/config.json") == (NEW, folder / "config.json")


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"])
def test_an_id_is_found_in_the_cache_and_its_main_branch_comes_first(tmp_path: Path, variable: str) -> None:
    cache = {"HF_HUB_CACHE": tmp_path, "HF_HOME": tmp_path / "hub", "XDG_CACHE_HOME": tmp_path / "huggingface" / "hub"}
    model = cache[variable] / "models--Owner--Model"
    write(model / "snapshots" / "aaa", NEW)
    write(model / "snapshots" / "bbb", OLD)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("aaa\n")
    assert read_model_config("Owner/Model", {variable: str(tmp_path)})[0] == NEW
    (model / "refs" / "main").write_text("ccc")
    assert read_model_config("Owner/Model", {variable: str(tmp_path)})[0] == OLD, "the newest of those that are there"


@pytest.mark.parametrize("model", ["Owner/Model", "nowhere", "./Owner/Model", "../../etc"])
def test_a_model_that_is_not_here_is_refused_with_the_command_that_fetches_it(tmp_path: Path, model: str) -> None:
    with pytest.raises(NotFound, match=f"hf download {model} config.json"):
        read_model_config(model, {"HF_HUB_CACHE": str(tmp_path)})


@pytest.mark.parametrize("text", ["", "[]", "\x80", "{"])
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidArgument, match="name a model's config"):
        read_model_config(str(file))
