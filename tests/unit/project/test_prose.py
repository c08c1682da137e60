"""The checker of the documents' English finds what breaks a rule, leaves quoted text alone, and only lowers budgets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.prose.findings import findings, findings_of_code
from tests.prose.pages import CODE_BUDGET, GENERATED, ROOT, code_complaints, complaints, pages, unreleased

LONG = "word " * 26 + "end."
SHORT = "The daemon reads the file."


def rules(text: str) -> list[tuple[int, str]]:
    return [(finding.line, finding.rule) for finding in findings(text)]


def test_the_documents_are_within_their_budgets() -> None:
    texts = pages()
    assert {"README.md", "SECURITY.md", "CHANGELOG.md", "docs/operations.md", "docs/formats/arena.md"} <= texts.keys()
    assert not GENERATED & texts.keys()
    assert list(complaints(texts)) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The tier is out of use.", "word"),
        ("It goes\non by itself.", "word"),
        ("Rejected loads were declined.", "word"),
        ("# What is lent anew", "word"),
        (f"- {LONG}", "sentence"),
        (f"{SHORT} {LONG}", "sentence"),
        ("Who may open the socket may use every verb.", "subject"),
        ("| a | b |\n|---|---|\n| c | What is declined is a miss. |", "subject"),
        (f"| a | b |\n|---|---|\n| c | {'x' * 101} |", "cell"),
        ("a" * 60 + " " + "b" * 60, "line"),
    ],
)
def test_what_breaks_a_rule_is_found(text: str, expected: str) -> None:
    assert expected in {rule for _, rule in rules(text)}


@pytest.mark.parametrize(
    "text",
    [
        "The log says `out of use` and `declined`.",
        "```\nout of use, declined, anew\n```",
        "    declined\n",
        "`a b c d`\n" * 25,
        "Avoid this, e.g. that. kvdepot continues.\n" * 10,
        "What does a prompt take? Look here.",
        "| a | b |\n|---|---|\n| " + "x" * 90 + " | " + "y" * 90 + " |",
        "https://host/" + "a" * 120,
        "<!-- declined -->",
    ],
)
def test_quoted_text_and_good_sentences_are_left_alone(text: str) -> None:
    assert rules(text) == []


def test_words_in_comments_and_texts_of_code_are_found() -> None:
    source = 'beside = 1  # mended\n"""A text.\n\nIt goes\non, not `declined`."""\nf"say {beside} anew"\n"anew"\n'
    found = [(finding.line, finding.text.partition(":")[0]) for finding in findings_of_code(source)]
    assert found == [(1, '"mended"'), (4, '"goes on"'), (6, '"anew"')]


def test_the_code_is_within_its_budget() -> None:
    assert CODE_BUDGET.keys() == {"core", "proto", "server", "client"}
    assert list(code_complaints()) == []


def test_a_budget_of_code_that_is_too_large_or_too_small_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for allowed in (-1, 1):
        monkeypatch.setitem(CODE_BUDGET, "proto", allowed)
        assert any("proto: 0 words, the budget is" in line for line in code_complaints())


def test_a_finding_names_its_line() -> None:
    text = f"# Title\n\n{SHORT}\nIt is mended.\n\n| a |\n|---|\n| b |\n| declined |\n"
    assert rules(text) == [(4, "word"), (9, "word")]


def test_a_finding_above_the_budget_is_told_and_one_within_it_is_not() -> None:
    texts = {"x.md": "It is mended."}
    assert len(list(complaints(texts, {}))) == 2
    assert "x.md:1: word" in next(complaints(texts, {}))
    assert list(complaints(texts, {"x.md": 1})) == []


def test_a_budget_that_is_too_large_or_has_no_page_is_told() -> None:
    assert any("lower its budget to 0" in line for line in complaints({"x.md": SHORT}, {"x.md": 1}))
    assert any("gone.md" in line for line in complaints({"x.md": SHORT}, {"gone.md": 1}))


def test_only_entries_of_the_changelog_that_are_not_released_are_checked() -> None:
    text = "# Changelog\n\n## Unreleased\n\n- It is mended.\n\n## 0.1.0\n\n- It was mended anew.\n"
    assert rules(unreleased(text)) == [(5, "word")]


def test_the_command_fails_at_a_finding(tmp_path: Path) -> None:
    for text, code in (("It is mended.\n", 1), (f"{SHORT}\n", 0)):
        page = tmp_path / "page.md"
        page.write_text(text)
        done = subprocess.run(
            [sys.executable, "-m", "tests.prose", str(page)], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == code, done.stdout + done.stderr
