"""Which pages are checked, and how many findings each may still have."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from tests.prose.findings import Finding, findings, findings_of_code

ROOT: Final = Path(__file__).parents[2]
AT_THE_ROOT: Final = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
FOLDERS: Final = ("docs", "docs/formats", "docs/releases")
FIRST_DECISION: Final = "0072"
"""Earlier decisions keep their words."""
GENERATED: Final = frozenset({"docs/metrics.md", "docs/errors.md", "docs/requirements-tests.md"})
"""Made from the code, which states the same texts to operators."""
_BUDGETS: Final = tomllib.loads((Path(__file__).parent / "budget.toml").read_text())
BUDGET: Final[Mapping[str, int]] = _BUDGETS["findings"]
CODE_BUDGET: Final[Mapping[str, int]] = _BUDGETS["code"]
_RELEASED: Final = "\n## 0"
"""Where the entries of a released version begin."""


def pages() -> dict[str, str]:
    """Return name -> text of each page that is checked."""
    paths = [ROOT / name for name in AT_THE_ROOT]
    paths += [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.md"))]
    paths += [path for path in sorted((ROOT / "docs/adr").glob("*.md")) if path.name[:4] >= FIRST_DECISION]
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in paths}
    texts["CHANGELOG.md"] = unreleased((ROOT / "CHANGELOG.md").read_text())
    return {name: text for name, text in texts.items() if name not in GENERATED}


def unreleased(changelog: str) -> str:
    """Return the changelog down to the first released version; line numbers stay true."""
    return changelog.partition(_RELEASED)[0]


def code_complaints() -> Iterator[str]:
    """Yield a line for each word in the comments and texts of a part of the product above its budget."""
    for part, allowed in CODE_BUDGET.items():
        sources = [path for path in sorted((ROOT / part).rglob("*.py")) if "_pb2" not in path.stem]
        shown = [
            _shown(str(path.relative_to(ROOT)), result)
            for path in sources
            for result in findings_of_code(path.read_text())
        ]
        if len(shown) > allowed:
            yield from shown
        if len(shown) != allowed:
            yield f"{part}: {len(shown)} words, the budget is {allowed}: it only shrinks"


def complaints(texts: Mapping[str, str], budget: Mapping[str, int] = BUDGET) -> Iterator[str]:
    """Yield a line for each finding of a page above its budget, and for each budget that should shrink."""
    for name, text in texts.items():
        results = findings(text)
        allowed = budget.get(name, 0)
        if len(results) > allowed:
            yield from (_shown(name, result) for result in results)
        if len(results) != allowed:
            yield f"{name}: {len(results)} findings, the budget is {allowed}"
        if len(results) < allowed:
            yield f"{name}: lower its budget to {len(results)}: a budget only shrinks"
    for name in budget.keys() - texts.keys():
        yield f"{name}: has a budget, and is no page that is checked"


def _shown(name: str, finding: Finding) -> str:
    return f"{name}:{finding.line}: {finding.rule}: {finding.text}"
