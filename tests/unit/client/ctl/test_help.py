"""The help of kvdepotctl and kvdepotd: verbs by purpose, with short summaries that start with a verb."""

from __future__ import annotations

import argparse
import subprocess
import sys
from unittest.mock import MagicMock

import click
import pytest
from click.testing import CliRunner
from kvdepot.client.ctl.app import cli
from kvdepot.client.ctl.commands.options import place
from kvdepot.client.ctl.sections import SectionedGroup, summary
from kvdepot.server.daemon.app import _parser

from tests.rigs.ctl_process import commands_of

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
    for name, command in commands_of(group).items():
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
def test_a_verb_takes_namespaces_and_chunks_as_one_argument() -> None:
    def options(group: click.Group, path: str) -> dict[str, set[str]]:
        """Return the options of each verb, but of `quota`: there, a namespace is one of three keys of a [[quota]]."""
        found: dict[str, set[str]] = {}
        for name, command in commands_of(group).items():
            if isinstance(command, click.Group):
                found |= {} if name == "quota" else options(command, f"{path} {name}")
            else:
                found[f"{path} {name}"] = {option for one in command.params for option in one.opts}
        return found

    found = options(cli, "kvdepotctl")
    assert {"kvdepotctl verify", "kvdepotctl prefetch", "kvdepotctl epoch bump"} <= found.keys()
    assert [verb for verb, given in found.items() if given & {"--namespace", "--chunk", "--key"}] == []


@pytest.mark.requirement("P10")
@pytest.mark.parametrize(
    "verb", ["evict", "pin", "verify", "prefetch", "epoch bump", "loads off", "loads on", "stores off", "explain"]
)
def test_an_empty_name_is_wrong_usage_and_never_everything(verb: str) -> None:
    done = CliRunner().invoke(cli, ["--endpoint", "unix:///nowhere/d.sock", *verb.split(), ""])
    assert done.exit_code == 2 and "is empty" in done.output


@pytest.mark.requirement("P10")
@pytest.mark.parametrize("name", ["/", "/61833e", "1b4fd7/"])
def test_a_name_without_a_namespace_or_without_its_chunk_is_wrong_usage(name: str) -> None:
    operator = MagicMock()
    with pytest.raises(click.UsageError):
        place(operator, name)
    assert operator.mock_calls == []
    for verb in (["unpin", name], ["export", name, "/nowhere/file"]):
        done = CliRunner().invoke(cli, ["--endpoint", "unix:///nowhere/d.sock", *verb])
        assert done.exit_code == 2 and "names no" in done.output


@pytest.mark.requirement("P10")
def test_the_help_lists_each_verb_once_in_the_section_of_its_purpose() -> None:
    assert isinstance(cli, SectionedGroup)
    assert list(cli.sections) == ["Inspect", "Control", "Move", "Diagnose"]
    listed = [name for names in cli.sections.values() for name in names]
    assert sorted(listed) == sorted(cli.verbs())
    text = cli.get_help(click.Context(cli, info_name="kvdepotctl", terminal_width=80))
    lines = [line.strip() for line in text.splitlines()]
    headings = [lines.index(f"{title}:") for title in cli.sections]
    assert headings == sorted(headings)
    for name, command in cli.verbs().items():
        assert [" ".join(line.split()) for line in lines].count(f"{name} {summary(command)}") == 1


@pytest.mark.requirement("P10")
def test_a_verb_imports_no_other_and_each_has_the_name_by_which_it_is_found() -> None:
    program = (
        "import sys; from kvdepot.client.ctl.app import cli; cli.main(['health', '--help'], standalone_mode=False); "
        "print(*(name for name in sys.modules if name.startswith('kvdepot.client.ctl.commands.')))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    loaded = {name.rpartition(".")[2] for name in done.stdout.splitlines()[-1].split()}
    assert loaded == {"options", "status"}
    assert all(name == verb.name for name, verb in cli.verbs().items())


@pytest.mark.requirement("P10")
def test_a_wrong_verb_is_answered_with_those_that_look_like_it() -> None:
    done = CliRunner().invoke(cli, ["statsu"])
    assert done.exit_code == 2 and "status" in done.output
