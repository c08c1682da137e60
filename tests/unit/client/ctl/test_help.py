"""The help of kvdepotctl and kvdepotd: verbs by purpose, with short summaries that start with a verb."""

from __future__ import annotations

import argparse

import click
import pytest
from kvdepot.client.ctl.app import cli
from kvdepot.client.ctl.sections import SectionedGroup, summary
from kvdepot.server.daemon.app import _parser

SUMMARY_LENGTH_MAX = 45
IMPERATIVES = frozenset(
    {
        "Check", "Compare", "Compute", "Delete", "Describe", "Explain", "Export", "Grant", "Hold",
        "Import", "Invalidate", "List", "Measure", "Print", "Protect", "Read", "Record", "Reload",
        "Remove", "Replay", "Run", "Set", "Show", "Stop", "Switch", "Verify",
        "Write",
    }
)  # fmt: skip


def summaries(group: click.Group, path: str) -> dict[str, str]:
    """Return the summary of each verb and of each group of verbs, by its whole name."""
    texts = {}
    for name, command in group.commands.items():
        texts[f"{path} {name}"] = summary(command)
        if isinstance(command, click.Group):
            texts |= summaries(command, f"{path} {name}")
    return texts


def daemon_summaries() -> dict[str, str]:
    (verbs,) = (action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction))
    return {f"kvdepotd {choice.dest}": str(choice.help).capitalize() for choice in verbs._choices_actions}


SUMMARIES = summaries(cli, "kvdepotctl") | daemon_summaries()


@pytest.mark.requirement("P10")
@pytest.mark.parametrize("verb", SUMMARIES)
def test_a_summary_is_short_and_starts_with_a_verb(verb: str) -> None:
    text = SUMMARIES[verb]
    assert 0 < len(text) <= SUMMARY_LENGTH_MAX
    assert text.split()[0] in IMPERATIVES
    assert not text.endswith(".") and "\n" not in text


@pytest.mark.requirement("P10")
def test_the_help_lists_each_verb_once_in_the_section_of_its_purpose() -> None:
    assert isinstance(cli, SectionedGroup)
    assert list(cli.sections) == ["Inspect", "Control", "Move", "Diagnose"]
    listed = [command.name for commands in cli.sections.values() for command in commands]
    assert sorted(map(str, listed)) == sorted(cli.commands)
    text = cli.get_help(click.Context(cli, info_name="kvdepotctl", terminal_width=80))
    lines = [line.strip() for line in text.splitlines()]
    headings = [lines.index(f"{title}:") for title in cli.sections]
    assert headings == sorted(headings)
    for name, command in cli.commands.items():
        assert [" ".join(line.split()) for line in lines].count(f"{name} {summary(command)}") == 1
