"""`kvdepotctl assets`: the files that the package brings: units, rules, dashboard, configurations, manifests."""

from __future__ import annotations

import sys
from pathlib import Path, PurePosixPath

import click
from kvdepot.client.ctl.as_json import echo_record
from kvdepot.client.ctl.commands.options import json_option
from kvdepot.client.ctl.texts import say
from kvdepot.core.assets import ASSETS, BY_NAME, Asset, contents, located

_NAME = click.Choice(list(BY_NAME))


@click.group()
def assets() -> None:
    """Show and write the files of the package."""


@assets.command("list")
@json_option
def list_(as_json: bool) -> int:
    """List the files that the package brings."""
    if as_json:
        echo_record([{"name": one.name, "path": one.path, "about": one.about} for one in ASSETS])
        return 0
    widths = [max(map(len, column)) for column in zip(*((one.name, one.path) for one in ASSETS), strict=True)]
    for one in ASSETS:
        say(f"{one.name:<{widths[0]}}  {one.path:<{widths[1]}}  {one.about}")
    return 0


@assets.command()
@click.argument("name", type=_NAME)
def show(name: str) -> int:
    """Print one file."""
    asset = BY_NAME[name]
    if located(asset).is_dir():
        raise click.UsageError(f"{name} is a folder: write it with `kvdepotctl assets write {name}`")
    ((_, content),) = contents(asset)
    sys.stdout.write(content.decode())
    return 0


@assets.command()
@click.argument("names", nargs=-1, required=True, type=_NAME)
@click.option(
    "--to", "folder", type=click.Path(file_okay=False, path_type=Path), default=Path(), metavar="FOLDER",
    help="Folder, which is made if it is not there. Default: the current one.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace files that have other contents.")
def write(names: tuple[str, ...], folder: Path, force: bool) -> int:
    """Write files into a folder.

    Replaces no file that has other contents, unless --force is given. Exit code 1: one was kept.
    """
    kept = [path for name in dict.fromkeys(names) for path in _written(BY_NAME[name], folder, force=force)]
    for path in kept:
        say(f"kvdepotctl: {path} has other contents and was kept; --force replaces it", err=True)
    return 1 if kept else 0


def _written(asset: Asset, folder: Path, *, force: bool) -> list[Path]:
    """Write the files of an asset, print their paths, and return those that were kept."""
    kept = []
    for name, content in contents(asset):
        path = folder / PurePosixPath(name)
        try:
            if not force and path.exists() and path.read_bytes() != content:
                kept.append(path)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        except OSError as error:
            raise click.ClickException(f"cannot write {path}: {error.strerror}") from error
        say(str(path))
    return kept
