"""How texts that others chose are printed: without what a terminal would obey."""

from __future__ import annotations

import click
from kvdepot.core.printable import printable
from rich import markup


def escape(text: str) -> str:
    """Return the text for a cell or line of rich, which takes nothing in it for a style."""
    return markup.escape(printable(text))


def say(text: str, *, err: bool = False) -> None:
    """Print lines."""
    click.echo("\n".join(map(printable, text.split("\n"))), err=err)
