"""A group of verbs whose help lists them by purpose."""

from __future__ import annotations

from typing import Any

import click


class SectionedGroup(click.Group):
    """A click group with sections. Each verb is in one section; `--help` keeps their order."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.sections: dict[str, list[click.Command]] = {}

    def add_section(self, title: str, *commands: click.Command) -> None:
        """Add verbs under a title."""
        self.sections[title] = list(commands)
        for command in commands:
            self.add_command(command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one list of verbs per section, each verb with its whole summary."""
        del ctx
        for title, commands in self.sections.items():
            with formatter.section(title):
                formatter.write_dl([(command.name or "", summary(command)) for command in commands])


def summary(command: click.Command) -> str:
    """Return the first paragraph of a verb's help, without its full stop."""
    return (command.help or "").partition("\n\n")[0].strip().removesuffix(".")
