"""The files that a package brings: all of configs, each under one name."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvdepot.core import assets

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
NO_ASSETS = ("mkdocs.yml", "deb/")
"""What makes the documents and the Debian package."""


def test_each_file_of_configs_belongs_to_one_asset() -> None:
    files = [str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*") if path.is_file()]
    owners = {
        file: [asset.name for asset in assets.ASSETS if f"{file}/".startswith(f"{asset.path}/")]
        for file in files
        if not file.startswith(NO_ASSETS)
    }
    assert {file: names for file, names in owners.items() if len(names) != 1} == {}
    assert {name for names in owners.values() for name in names} == assets.BY_NAME.keys()


@pytest.mark.parametrize("asset", assets.ASSETS, ids=lambda asset: asset.name)
def test_contents_are_those_of_the_source_tree(asset: assets.Asset) -> None:
    for path, content in assets.contents(asset):
        assert (CONFIGS / asset.path).parent.joinpath(path).read_bytes() == content
        assert path.split("/")[0] == asset.path.rpartition("/")[2]
