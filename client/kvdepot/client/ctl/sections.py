"""A group of verbs whose help lists them by purpose, and of which a call imports only its own."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

import click

_COMMANDS: Final = "kvdepot.client.ctl.commands"


class SectionedGroup(click.Group):
    """A click group with sections. Each verb is in one section; `--help` keeps their order."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.sections: dict[str, list[str]] = {}
        self._modules: dict[str, str] = {}

    def add_section(self, title: str, modules: Mapping[str, str]) -> None:
        """Add verbs under a title, with the module in `commands` of each.

        All of them together take 0.4 s to import, and a probe or a script calls one.
        """
        self.sections[title] = list(modules)
        self._modules |= modules

    def list_commands(self, ctx: click.Context | None) -> list[str]:
        del ctx
        return sorted(self._modules)

    def get_command(self, ctx: click.Context | None, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in self._modules:
            self.verbs()  # of which click names those that look like it
            return None
        if cmd_name not in self.commands:
            module = import_module(f"{_COMMANDS}.{self._modules[cmd_name]}")
            found = [one for one in vars(module).values() if isinstance(one, click.Command) and one.name == cmd_name]
            self.add_command(found[0])
        return self.commands[cmd_name]

    def verbs(self) -> dict[str, click.Command]:
        """Import all verbs. Return them by name, in the order of `--help`."""
        names = [name for section in self.sections.values() for name in section]
        return {name: verb for name in names if (verb := self.get_command(None, name)) is not None}

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one list of verbs per section, each verb with its whole summary."""
        del ctx
        verbs = self.verbs()
        for title, names in self.sections.items():
            with formatter.section(title):
                formatter.write_dl([(name, summary(verbs[name])) for name in names])


def summary(command: click.Command) -> str:
    """Return the first paragraph of a verb's help, without its full stop."""
    return (command.help or "").partition("\n\n")[0].strip().removesuffix(".")
