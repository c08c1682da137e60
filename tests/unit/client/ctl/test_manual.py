"""docs/kvdepotctl.md has a section for each verb of `kvdepotctl`, and for nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest
from kvdepot.client.ctl.app import cli

from tests.rigs.ctl_process import commands_of
from tests.rigs.manual import anchor, sections

TITLE = "kvdepotctl "
SECTIONS = {title: text for title, text in sections("kvdepotctl.md", 2).items() if title.startswith(TITLE)}


def verbs(group: click.Group, path: str = TITLE) -> Iterator[tuple[str, click.Command]]:
    """Yield the whole name of each verb that does something, groups resolved."""
    for name, command in commands_of(group).items():
        if isinstance(command, click.Group):
            yield from verbs(command, f"{path}{name} ")
        if not isinstance(command, click.Group) or command.invoke_without_command:
            yield f"{path}{name}", command


VERBS = dict(verbs(cli))


@pytest.mark.requirement("P10")
def test_each_verb_has_its_section_and_each_section_its_verb() -> None:
    assert len(VERBS) > 25
    assert set(SECTIONS) == set(VERBS)


@pytest.mark.requirement("P10")
@pytest.mark.parametrize("verb", VERBS)
def test_a_section_has_usage_example_options_and_exit_codes(verb: str) -> None:
    text = SECTIONS[verb]
    parts = re.findall(r"^- \*\*(\w+):\*\*", text, re.MULTILINE)[:3]
    assert parts == ["Usage", "Example", "Options"]
    assert re.search(rf"^- \*\*Usage:\*\* `{re.escape(verb)}[ `]", text, re.MULTILINE)
    assert re.search(r"^\| exit code \| meaning \|\n\|---\|---\|\n\| 0 \| .+ \|$", text, re.MULTILINE)
    assert verb in text.split("**Example:**")[1]


@pytest.mark.requirement("P10")
@pytest.mark.parametrize("verb", VERBS)
def test_a_section_names_the_options_of_its_verb_and_no_others(verb: str) -> None:
    known = {name for option in VERBS[verb].params for name in option.opts if name.startswith("--")}
    options = SECTIONS[verb].split("**Options:**")[1].split("\n\n")[0]
    assert known - {"--output"} <= set(re.findall(r"--[a-z-]+", options))
    assert bool(re.search(r"`-o`,\s+`--json`", options)) == (known >= OUTPUT)
    usage = SECTIONS[verb].split("**Usage:**")[1].split("\n- **")[0]
    assert set(re.findall(r"--[a-z-]+", usage)) == (REPLAY if verb == "kvdepotctl trace replay" else known - OUTPUT)
    assert ("[-o FORM]" in usage) == (known >= OUTPUT)


OUTPUT = {"--output", "--json"}
"""The page's head says what is common to all."""
REPLAY = {
    "--ram", "--disk", "--write", "--drive-writes-per-day", "--eviction", "--chunks", "--checkpoints", "--json",
}  # fmt: skip
"""Options of `kvdepotd replay`, to which the verb passes all that it gets."""


def test_the_page_leads_to_each_verb() -> None:
    page = sections("kvdepotctl.md", 2)["Verbs"]
    assert set(re.findall(r"\(#([\w-]+)\)", page)) == {anchor(verb) for verb in VERBS}
