"""The decisions (docs/adr): each has the same headings in the same order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ADR = Path(__file__).parents[3] / "docs/adr"
HEADINGS = ["Context", "Decision", "Consequences", "Alternatives", "Measurements"]
ALWAYS = HEADINGS[:3]
LAST_WITHOUT_HEADINGS = 45
"""Up to this one they were written without headings, and have those alone for which they had text."""
TITLE = re.compile(r"# \S.*\n\n?(?:Date: )?20\d\d-\d\d-\d\d\b")
SECTION = re.compile(r"^## (.+)\n((?:(?!## ).*\n?)*)", re.MULTILINE)


def problems(number: int, text: str) -> list[str]:
    sections = SECTION.findall(text)
    headings = [heading for heading, _ in sections]
    needed = ["Decision"] if number <= LAST_WITHOUT_HEADINGS else ALWAYS
    found = [f"no {heading}" for heading in needed if heading not in headings]
    if headings != [heading for heading in HEADINGS if heading in headings]:
        found.append(f"headings: {headings}")
    found += [f"nothing under {heading}" for heading, body in sections if not body.strip()]
    if not TITLE.match(text):
        found.append("no title, or no date after it")
    return found


def test_there_are_decisions_with_numbers_of_their_own() -> None:
    numbers = [path.name[:4] for path in ADR.glob("[0-9]*.md")]
    assert len(numbers) > 50
    assert len(set(numbers)) == len(numbers)


def test_every_decision_has_context_decision_and_consequences_in_this_order() -> None:
    found = {path.name: problems(int(path.name[:4]), path.read_text()) for path in sorted(ADR.glob("[0-9]*.md"))}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize(
    ("number", "body", "wrong"),
    [
        (57, "## Context\n\na\n\n## Decision\n\nb\n", ["no Consequences"]),
        (45, "## Context\n\na\n\n## Decision\n\nb\n", []),
        (45, "## Decision\n\na\n\n## Context\n\nb\n", ["headings: ['Decision', 'Context']"]),
        (45, "## Decision\n\na\n\n## Notes\n\nb\n", ["headings: ['Decision', 'Notes']"]),
        (45, "## Context\n\n## Decision\n\nb\n", ["nothing under Context"]),
        (45, "## Context\n\nb\n", ["no Decision"]),
    ],
)
def test_a_decision_without_its_headings_is_found(number: int, body: str, wrong: list[str]) -> None:
    assert problems(number, f"# ADR {number}: Decide\n\n2026-11-26. Accepted.\n\n{body}") == wrong
    assert problems(number, f"# ADR {number}: Decide\n\n{body}") == [*wrong, "no title, or no date after it"]
