"""Where `kvdepotctl size` finds a model's configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kvdepot.client.ctl.sizing.model_files import View, read_model_config
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
    assert read_model_config("Owner/Model", View({variable: str(tmp_path)}))[0] == NEW
    (model / "refs" / "main").write_text("ccc")
    assert read_model_config("Owner/Model", View({variable: str(tmp_path)}))[0] == OLD, "the newest that is there"


@pytest.mark.parametrize("model", ["Owner/Model", "nowhere", "./Owner/Model", "../../etc"])
def test_a_model_that_is_not_here_is_refused_with_the_command_that_fetches_it(tmp_path: Path, model: str) -> None:
    with pytest.raises(NotFound, match=f"hf download {model} config.json"):
        read_model_config(model, View({"HF_HUB_CACHE": str(tmp_path)}))


@pytest.mark.parametrize("text", ["", "[]", "\x80", "{"])
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidArgument, match="name a model's config"):
        read_model_config(str(file))


@pytest.mark.parametrize(
    "model", ["/models/m", "m", "../models/m", "~/m", "linked", "linked/config.json", "Owner/Model"]
)
def test_paths_are_those_of_the_process_that_serves_the_model(tmp_path: Path, model: str) -> None:
    """Its root, its working directory and its home are its own, and so is where its links lead."""
    root = tmp_path / "container"
    write(root / "models/m", NEW)
    (root / "app").mkdir()
    (root / "app/m").symlink_to("/models/m")
    (root / "users/x").mkdir(parents=True)
    (root / "users/x/m").symlink_to("../../../../../models/m")  # no link leads out of a root
    cache = root / "cache/models--Owner--Model"
    write(cache / "blobs", NEW)
    (cache / "snapshots/aaa").mkdir(parents=True)
    (cache / "snapshots/aaa/config.json").symlink_to("../../blobs/config.json")
    (root / "app/linked").symlink_to("/app/again")
    (root / "app/again").symlink_to("../models/./m")
    view = View({"HOME": "/users/x", "HF_HUB_CACHE": "/cache"}, root, "/app")
    config, file = read_model_config(model, view)
    assert config == NEW
    assert file.is_relative_to(root) and not file.is_symlink()


def test_links_that_lead_in_a_circle_or_to_what_only_this_process_has_are_no_model(tmp_path: Path) -> None:
    root = tmp_path / "container"
    root.mkdir()
    (root / "circle").symlink_to("/circle")
    (root / "out").symlink_to(write(tmp_path / "secret", NEW))
    for model in ("/circle", "/out", "/../secret"):
        with pytest.raises((NotFound, InvalidArgument)):
            read_model_config(model, View({}, root, "/"))
