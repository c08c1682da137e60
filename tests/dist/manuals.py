"""Manual pages of both commands, by click-man: a page for each command and each verb."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from click_man.core import write_man_pages
from click_man.man import ManPage
from kvdepot.client.ctl.app import cli
from kvdepot.server.daemon.app import _parser


def write_manuals(folder: Path, version: str, date: str) -> None:
    """Write all pages. `date`: YYYY-MM-DD, of the heads of the pages."""
    cli.verbs()  # click-man knows what has been imported
    write_man_pages("kvdepotctl", cli, version=version, target_dir=str(folder), date=date)
    _of_a_parser(_parser(), folder, version, date)


def _of_a_parser(parser: argparse.ArgumentParser, folder: Path, version: str, date: str, about: str = "") -> None:
    """Write the page of an argparse command, which click-man does not know, and those of its verbs."""
    page = ManPage(parser.prog)
    page.version, page.date = version, date
    page.short_help = about or _line(parser.description)
    page.synopsis = _line(parser.format_usage()).removeprefix(f"usage: {parser.prog} ")
    page.description = "\n\n".join(text for text in (parser.description, parser.epilog) if text)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            abouts = {choice.dest: str(choice.help) for choice in action._choices_actions}
            page.commands = list(abouts.items())
            for name, verb in action.choices.items():
                _of_a_parser(verb, folder, version, date, abouts[name])
        elif action.option_strings:
            page.options.append((", ".join(action.option_strings), str(action.help or "")))
    # A dot at the beginning of a line is a request of troff.
    text = re.sub(r"^(\.(?!TH|SH|PP|B|TP))", r"\\&\1", str(page), flags=re.MULTILINE)
    (folder / f"{parser.prog.replace(' ', '-')}.1").write_text(text)


def _line(text: str | None) -> str:
    return " ".join((text or "").split())
