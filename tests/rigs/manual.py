"""Sections of the documents: their titles, anchors and texts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

DOCS: Final = Path(__file__).parents[2] / "docs"
_TITLE: Final = re.compile(r"^(#{2,3}) (.+)$", re.MULTILINE)


def sections(name: str, level: int) -> dict[str, str]:
    """Return title -> text of each section of that level, down to the next title of that level or above."""
    text = (DOCS / name).read_text()
    titles = [match for match in _TITLE.finditer(text) if len(match[1]) <= level]
    ends = [match.start() for match in titles[1:]] + [len(text)]
    pairs = [
        (match[2], text[match.end() : end]) for match, end in zip(titles, ends, strict=True) if len(match[1]) == level
    ]
    assert len(dict(pairs)) == len(pairs), "two sections of one title have no anchors of their own"
    return dict(pairs)


def anchor(title: str) -> str:
    """Return the anchor of a title, as GitHub and mkdocs make it."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip())
