"""The documents as a site: it is built strictly, and each page fits a desk's and a phone's screen."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.browser import NEEDS_CHROMIUM, Browser
from tests.rigs.site import CONFIGURATION, NEEDS_THEME, ROOT, build_site, served

pytestmark = NEEDS_THEME

DOCS = ROOT / "docs"
WIDTHS = (1280, 390)
MOST_READ = ("index.md", "install.md", "kvdepotctl.md", "operations.md", "vllm.md", "metrics.md")
"""Opened by every run; the rest by long tests."""
PARTS = 8
"""A page takes one to two seconds, and all of them longer than the time limit of a test."""
LINK = re.compile(r"\[[^\]]*\](?:\([^)]*\)|\[[^\]]*\])|^\[[^\]]+\]: .*$|`[^`\n]*`", re.MULTILINE)
BARE = re.compile(r"\bdocs/[\w./-]+|\bADR \d+")
MEASURED = """(() => {
  const width = document.documentElement.clientWidth;
  const text = document.createTreeWalker(document.querySelector("article"), NodeFilter.SHOW_TEXT);
  const backslashes = [];
  for (let node; (node = text.nextNode());) {
    const code = node.parentElement.closest("pre, code");
    const found = code === null ? node.data.includes("\\\\") : !code.closest("pre") && node.data.includes("\\\\|");
    if (found) backslashes.push(node.data);
  }
  const tables = [...document.querySelectorAll("article table")].filter((table) => {
    const box = table.getBoundingClientRect();
    const room = table.closest("article").getBoundingClientRect();
    return box.right > room.right + 1 || table.scrollWidth > table.clientWidth + 1;
  });
  return {
    title: document.title,
    sideways: document.documentElement.scrollWidth - width,
    tables: tables.map((table) => table.innerText.slice(0, 60)),
    backslashes,
    menu: [...document.querySelectorAll(".md-nav--primary a")].length,
  };
})()"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build_site(CONFIGURATION, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


def page_of(document: Path) -> str:
    """Return the path of a document's page."""
    return str(document.relative_to(DOCS).with_suffix(".html")).replace("README", "index")


def documents() -> list[Path]:
    return sorted(DOCS.rglob("*.md"))


def measured(browser: Browser, url: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Open a page, and yield what it looks like at each width."""
    browser.open(url, width=WIDTHS[0])
    browser.wait_for(f"location.href === {url!r} && document.readyState === 'complete'")
    for width in WIDTHS:  # of the one document: another load of the same address looks like the one before
        browser.resize(width)
        browser.wait_for(f"innerWidth === {width}")
        yield width, browser.value(MEASURED)


def faults(browser: Browser, base: str, pages: list[str]) -> list[str]:
    """Return what is wrong with how pages look."""
    found = []
    for page in pages:
        for width, look in measured(browser, f"{base}/{page}"):
            wrong = {name: look[name] for name in ("tables", "backslashes") if look[name]}
            if look["sideways"] > 0:
                wrong["wider by px"] = look["sideways"]
            if look["menu"] < len(documents()) // 2:
                wrong["menu"] = look["menu"]
            if wrong:
                found.append(f"{page} at {width} px: {wrong}")
    return found


def test_the_site_is_built_without_a_link_that_leads_nowhere_and_has_every_page(site: Path) -> None:
    made = {str(path.relative_to(site)) for path in site.rglob("*.html")}
    assert {page_of(document) for document in documents()} <= made


def test_a_link_to_a_section_that_is_not_there_ends_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "configs").mkdir()
    settings, _, _ = CONFIGURATION.read_text().partition("\nnav:\n")
    (tmp_path / "configs" / CONFIGURATION.name).write_text(settings)
    shutil.copy(DOCS / "site.css", tmp_path / "docs")
    (tmp_path / "docs/index.md").write_text("# Home\n\n[nowhere](operations.md#no-such-section)\n")
    (tmp_path / "docs/operations.md").write_text("# Operations\n")
    done = build_site(tmp_path / "configs" / CONFIGURATION.name, tmp_path / "site")
    assert done.returncode != 0
    assert "operations.md#no-such-section" in done.stdout + done.stderr


@NEEDS_CHROMIUM
def test_the_most_read_pages_fit_a_desk_and_a_phone_and_fetch_nothing_from_elsewhere(
    site: Path, browser: Browser
) -> None:
    with served(site) as base:
        assert faults(browser, base, [page_of(DOCS / name) for name in MOST_READ]) == []
        assert {url for url in browser.requests if not url.startswith((f"{base}/", "data:", "blob:"))} == set()
    assert browser.complaints == []


@NEEDS_CHROMIUM
@pytest.mark.long(seconds=30)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_page_fits_a_desk_and_a_phone(site: Path, browser: Browser, part: int) -> None:
    with served(site) as base:
        assert faults(browser, base, [page_of(document) for document in documents()[part::PARTS]]) == []


@NEEDS_CHROMIUM
def test_a_page_that_does_not_fit_is_found(site: Path, browser: Browser) -> None:
    table = f"<table><tr><td style='white-space:nowrap'>{'x' * 400}</table>"
    (site / "wrong.html").write_text(f"<title>t</title><article>{table}<p>a\\b <code>on\\|off</code></article>")
    with served(site) as base:
        found = faults(browser, base, ["wrong.html"])
    assert len(found) == len(WIDTHS)
    assert all("'tables'" in one and "on\\\\|off" in one and "wider by px" in one for one in found)


def bare_references(text: str) -> list[str]:
    return BARE.findall(LINK.sub("", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)))


def test_a_reference_to_a_page_is_a_link() -> None:
    found = {document: bare_references(document.read_text()) for document in documents()}
    of_today = {document: names for document, names in found.items() if document.parent.name != "adr"}
    assert {str(document): names for document, names in of_today.items() if names} == {}  # decisions keep their words


def test_a_bare_reference_is_found() -> None:
    text = "[ADR 1](adr/1.md), [ADR 2][], `docs/faq.md` and ADR 3 (docs/vllm.md)\n\n[ADR 2]: adr/2.md\n"
    assert bare_references(text) == ["ADR 3", "docs/vllm.md"]
