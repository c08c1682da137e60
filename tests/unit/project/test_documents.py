"""The documents: pages made from the code are up to date, and what pages and comments name is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from kvdepot.server import error_docs, metric_docs

ROOT = Path(__file__).parents[3]
FOLDERS = ("docs", "configs", "tests", "benchmarks", "core", "proto", "server", "client", "demo")
SUFFIXES = {".md", ".py", ".toml", ".yml", ".yaml", ".service", ".proto"}
GENERATED = ("_pb2", "_pb2_grpc")
PATH = re.compile(rf"(?<![\w/.-])(?:{'|'.join(FOLDERS)})/[\w./-]*\w")
DECISION = re.compile(r"docs/adr/(\d{4})\b")
BY_NAME = re.compile(r"\bADR (\d{4})\b")
MADE = {"docs/metrics.md": metric_docs.markdown, "docs/errors.md": error_docs.markdown}
DECISIONS = "docs/adr/"
"""Never rewritten: they name what was there on their day."""


def _texts() -> dict[str, str]:
    """Path -> text of all that people read here, code with its comments too."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    found += [path for path in ROOT.iterdir() if path.suffix in SUFFIXES]
    return {str(path.relative_to(ROOT)): path.read_text() for path in found if not path.stem.endswith(GENERATED)}


def _is_there(named: str) -> bool:
    """A path, the beginning of one, or a module's without the folders that all of its kind are in."""
    layer, _, rest = named.rstrip(".").partition("/")
    return any(any(ROOT.glob(f"{beginning}*")) for beginning in (f"{layer}/{rest}", f"{layer}/kvdepot/{layer}/{rest}"))


@pytest.mark.requirement("P10")
@pytest.mark.parametrize("page", MADE)
def test_pages_that_are_made_from_the_code_are_up_to_date(page: str) -> None:
    assert (ROOT / page).read_text().rstrip() == MADE[page]().rstrip(), "run `make docs`"


def test_what_texts_name_is_there() -> None:
    texts = _texts()
    assert len(texts) > 300
    missing = {
        f"{name}: {found}"
        for name, text in texts.items()
        if not name.startswith(DECISIONS)
        for found in PATH.findall(text)
        if not _is_there(found)
    }
    assert not missing


def test_decisions_that_texts_name_are_there() -> None:
    there = {path.name[:4] for path in (ROOT / "docs/adr").glob("[0-9]*.md")}
    for name, text in _texts().items():
        assert {*DECISION.findall(text), *BY_NAME.findall(text)} <= there, name


def test_the_site_is_built_without_a_link_that_leads_nowhere_and_has_every_page(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "-f", "configs/mkdocs.yml", "-d", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    made = {path.relative_to(tmp_path / "site") for path in (tmp_path / "site").rglob("*.html")}
    assert {Path(str(page).replace("README", "index")) for page in pages} <= made
