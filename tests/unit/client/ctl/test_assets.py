"""`kvdepotctl assets`: files are listed, printed and written, and nothing of a site is overwritten."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from kvdepot.client.ctl.app import cli
from kvdepot.core.assets import ASSETS, Asset

ROOT = Path(__file__).resolve().parents[4]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["assets", *arguments], standalone_mode=False)


def test_all_are_listed_with_what_they_are() -> None:
    lines = run("list").output.splitlines()
    assert [line.split()[0] for line in lines] == [asset.name for asset in ASSETS]
    assert all(asset.about in line for asset, line in zip(ASSETS, lines, strict=True))
    assert [one["path"] for one in json.loads(run("list", "--json").output)] == [asset.path for asset in ASSETS]


@pytest.mark.parametrize("asset", [one for one in ASSETS if "." in one.path], ids=lambda asset: asset.name)
def test_a_file_is_printed_as_it_is(asset: Asset) -> None:
    assert run("show", asset.name).output == (ROOT / "configs" / asset.path).read_text()


def test_files_are_written_and_named(tmp_path: Path) -> None:
    done = run("write", "unit", "rules", "--to", str(tmp_path / "new"))
    written = [tmp_path / "new" / name for name in ("kvdepotd.service", "kvdepot.rules.yml")]
    assert (done.return_value, done.output.splitlines()) == (0, list(map(str, written)))
    assert written[0].read_text() == (ROOT / "configs/systemd/kvdepotd.service").read_text()


def test_a_changed_file_is_kept_unless_forced(tmp_path: Path) -> None:
    changed = tmp_path / "kvdepot.toml"
    changed.write_text("# of this site\n")
    for repeated in range(2):
        done = run("write", "config", "tmpfiles", "--to", str(tmp_path))
        assert done.return_value == 1, repeated
        assert "was kept" in done.output and changed.read_text() == "# of this site\n"
        assert (tmp_path / "kvdepot.tmpfiles.conf").exists()
    assert run("write", "config", "--to", str(tmp_path), "--force").return_value == 0
    assert changed.read_text() == (ROOT / "configs/kvdepot.toml").read_text()


def test_a_folder_is_written_whole_and_not_printed(tmp_path: Path) -> None:
    assert "kvdepotctl assets write chart" in str(run("show", "chart").exception)
    assert run("write", "chart", "--to", str(tmp_path)).return_value == 0
    chart = ROOT / "configs/helm/kvdepot"
    written = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert written == {
        str(path.relative_to(chart.parent)): path.read_text() for path in chart.rglob("*") if path.is_file()
    }


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    assert "dashboard" in str(run("show", "grafana").exception)
