"""Each marker names a requirement, and each requirement has a test or says why not."""

from __future__ import annotations

from tests.requirements.page import marked, rows


def test_every_marker_names_a_requirement() -> None:
    assert set(marked()) <= set(rows())


def test_every_requirement_has_a_test_or_says_why_not_and_never_both() -> None:
    tests = marked()
    assert [row for row, requirement in rows().items() if bool(tests[row]) == bool(requirement.untested)] == []
