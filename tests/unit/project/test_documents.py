"""The documents: pages made from the code are up to date, and what pages and comments name is there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from kvdepot.client.vllm.identity import speculation
from kvdepot.server.observe import error_docs, metric_docs

from tests.requirements import page
from tests.rigs import model_sizes
from tests.rigs.manual import anchor

ROOT = Path(__file__).parents[3]
FOLDERS = ("docs", "configs", "tests", "benchmarks", "core", "proto", "server", "client", "demo")
SUFFIXES = {".md", ".py", ".toml", ".yml", ".yaml", ".service", ".proto"}
GENERATED = ("_pb2", "_pb2_grpc")
IMPORTED = r"kvdepot/(?:core|proto|server|client)"
PATH = re.compile(rf"(?<![\w/.-])(?:{'|'.join((*FOLDERS, IMPORTED))})/[\w./-]*\w")
DECISION = re.compile(r"docs/adr/(\d{4})\b")
BY_NAME = re.compile(r"\bADR (\d{1,4})\b")
MADE = {
    "docs/metrics.md": metric_docs.markdown,
    "docs/errors.md": error_docs.markdown,
    "docs/model-sizes.md": model_sizes.markdown,
    "docs/requirements-tests.md": page.markdown,
}
DECISIONS = "docs/adr/"
"""Never rewritten: they name what was there on their day."""
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
SECTION = re.compile(r"\bdesign\.md#([\w-]+)")
FORMER = re.compile(r"\bDESIG[N]\b((?:(?:,|\s+and)?\s+\d+\b|\s+\([^)]*\))*)")
"""The first design, which is not in the repository, and the sections cited. [N]: this file does not cite it."""
OLD_ROW = re.compile(r"^\| (I?\d+)[^|]*\|(.*)\|$", re.MULTILINE)
CODE_NAME = re.compile(r"^\| `(\w+)`", re.MULTILINE)
PRODUCT = ("core/", "proto/", "server/", "client/")
RULES_OF_RUFF = "pyproject.toml"
"""Their codes look like ids of requirements."""


def _texts() -> dict[str, str]:
    """Path -> text of all that people read here, code with its comments too."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    found += [path for path in ROOT.iterdir() if path.suffix in SUFFIXES]
    return {str(path.relative_to(ROOT)): path.read_text() for path in found if not path.stem.endswith(GENERATED)}


def _is_there(named: str) -> bool:
    """A path, the beginning of one, or a module's without the folders that all of its kind are in."""
    layer, _, rest = named.rstrip(".").removeprefix("kvdepot/").partition("/")
    return any(any(ROOT.glob(f"{beginning}*")) for beginning in (f"{layer}/{rest}", f"{layer}/kvdepot/{layer}/{rest}"))


@pytest.mark.requirement("P10")
@pytest.mark.parametrize("name", MADE)
def test_pages_that_are_made_from_the_code_are_up_to_date(name: str) -> None:
    assert (ROOT / name).read_text().rstrip() == MADE[name]().rstrip(), "run `make docs`"


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


def test_a_path_that_leads_nowhere_is_found() -> None:
    gone = "kvdepot/client/" + "vllm/gone.py"  # in two parts, or this file would name it too
    found = PATH.findall(f"see `{gone}`, kvdepot/core/keys.py and server/io/pool.py")
    assert [_is_there(one) for one in found] == [False, True, True]


def test_decisions_that_texts_name_are_there() -> None:
    there = {path.name[:4] for path in (ROOT / "docs/adr").glob("[0-9]*.md")}
    for name, text in _texts().items():
        assert {number.zfill(4) for number in DECISION.findall(text) + BY_NAME.findall(text)} <= there, name


def _old_names() -> dict[str, list[str]]:
    """Sections of the first design, and ids that only it had, with the sections that replace them."""
    names: dict[str, list[str]] = {}
    for old, sections in OLD_ROW.findall((ROOT / "docs/adr/README.md").read_text()):
        names.setdefault(old, []).extend(re.findall(r"\(\.\./([\w/]+\.md#[\w-]+)\)", sections))
    return names


def _dangling_sections(texts: dict[str, str]) -> set[str]:
    headings = HEADING.findall((ROOT / "docs/design.md").read_text())
    sections = {re.sub(r"\W+", "-", heading.lower()).strip("-") for heading in headings}
    return {
        f"{name}: {cited}" for name, text in texts.items() for cited in SECTION.findall(text) if cited not in sections
    }


def _dangling_requirements(texts: dict[str, str]) -> set[str]:
    known = page.rows().keys() | {old for old in _old_names() if not old.isdigit()}
    letters = "".join({row[0] for row in known})
    named = re.compile(rf"\b[{letters}]\d{{1,2}}[a-z]?\b|(?<=\b[Rr]ow )[A-Z]\d+[a-z]?\b")
    return {
        f"{name}: {cited}"
        for name, text in texts.items()
        for cited in named.findall(text)
        if name != RULES_OF_RUFF and cited not in known
    }


def _dangling_former(texts: dict[str, str]) -> set[str]:
    known = _old_names()
    return {
        f"{name}: {cited or 'the first design'}"
        for name, text in texts.items()
        for numbers in FORMER.findall(text)
        for cited in re.findall(r"\b\d+\b", re.sub(r"\([^)]*\)", "", numbers)) or [""]
        if not name.startswith(DECISIONS) or (cited and cited not in known)
    }


def test_sections_of_the_design_that_texts_name_are_there() -> None:
    texts = _texts()
    assert sum(len(SECTION.findall(text)) for text in texts.values()) > 50
    assert not _dangling_sections(texts)


def test_requirements_that_texts_name_are_there() -> None:
    assert not _dangling_requirements(_texts())


def test_only_decisions_cite_the_first_design_and_each_section_that_they_cite_has_a_successor() -> None:
    assert all(_old_names().values())
    assert not _dangling_former(_texts())


def test_references_that_lead_nowhere_are_found() -> None:
    marked = {  # without the marks, this file would have them too
        "a.py": "(design.md~#no-such-section), row ~Q7, (I~77)",
        f"{DECISIONS}x.md": "DESIG~N 5 (Audit), 99 and 98; DESIG~N",
        "x.md": "DESIG~N 5 and DESIG~N",
    }
    wrong = {name: text.replace("~", "") for name, text in marked.items()}
    assert _dangling_sections(wrong) == {"a.py: no-such-section"}
    assert _dangling_requirements(wrong) == {f"a.py: {letter}{number}" for letter, number in (("Q", 7), ("I", 77))}
    assert _dangling_former(wrong) == {
        f"{DECISIONS}x.md: 99", f"{DECISIONS}x.md: 98", "x.md: 5", "x.md: the first design",
    }  # fmt: skip


def test_names_that_the_glossary_has_of_the_code_are_in_the_code() -> None:
    names = CODE_NAME.findall((ROOT / "docs/design.md").read_text())
    code = "\n".join(text for name, text in _texts().items() if name.startswith(PRODUCT))
    assert names
    assert [name for name in names if not re.search(rf"\b{name}", code, re.IGNORECASE)] == []


def test_links_of_the_readme_lead_to_sections_that_are_there() -> None:
    """No page of the site, so mkdocs does not check it."""
    linked = re.findall(r"\]\((docs/[\w./-]+\.md|CHANGELOG\.md)(?:#([\w-]+))?\)", (ROOT / "README.md").read_text())
    assert len(linked) >= 5
    for name, section in linked:
        titles = HEADING.findall((ROOT / name).read_text())
        assert not section or section in {anchor(title) for title in titles}, f"{name}#{section}"


def test_the_readme_shows_the_live_page_and_links_the_page_of_each_kind_of_remote_tier() -> None:
    text = (ROOT / "README.md").read_text()
    (image,) = re.findall(r"!\[[^]]+\]\(([\w./-]+)\)", text)
    assert (ROOT / image).is_file()
    assert {"docs/object-stores.md", "docs/peers.md"} <= set(re.findall(r"\]\((docs/[\w-]+\.md)\)", text))


def test_the_page_on_vllm_names_each_method_of_speculative_decoding() -> None:
    page = (ROOT / "docs" / "vllm.md").read_text()
    section = page.partition("## Speculative decoding\n")[2].partition("\n## ")[0]
    served, _, rest = section.partition("Refused, with the reason:")
    refused = rest.partition("What was run:")[0]
    assert {method for method in speculation.LOOKAHEAD if f"`{method}`" not in served} == set()
    assert {method for method in speculation.REFUSED if f"`{method}`" not in refused} == set()


def test_the_page_of_the_architecture_says_what_each_package_is_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    del groups["dev"]
    assert groups.pop("node") == ["kvdepot[server,ctl]"]
    required = {(package.partition(">=")[0], extra) for extra, packages in groups.items() for package in packages}
    section = (ROOT / "docs/architecture.md").read_text().partition("## Packages\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?`) \| (?:`(\w+)` )?\|", section, re.MULTILINE)
    assert {(package.strip("`"), extra) for packages, extra in rows for package in packages.split(", ")} == required
