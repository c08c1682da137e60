"""The changelog: versions, newest first, with the same headings, and entries that are short."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HEADINGS = ["Breaking", "Added", "Changed", "Fixed"]
LONGEST = 350
"""Characters of an entry; CONTRIBUTING.md says so too."""
NAMED = re.compile(r"(?:kvdepot:|kvdepot-|releases/|version )(\d+\.\d+\.\d+)")
ENTRY = re.compile(r"^- .*\n(?:  .*\n)*", re.MULTILINE)


def problems(changelog: str) -> list[str]:
    found = []
    for section in changelog.split("\n## ")[1:]:
        version, _, body = section.partition("\n")
        kinds = re.findall(r"^### (.+)$", body, re.MULTILINE)
        if kinds != [kind for kind in HEADINGS if kind in kinds]:
            found.append(f"{version}: headings {kinds}")
        lists = re.findall(r"^### (.+)\n\n((?:(?!###).*\n?)*)", body, re.MULTILINE)
        found += [
            f"{version}: {kind} is no list of entries"
            for kind, text in lists
            if ENTRY.sub("", text).strip() or not text.strip()
        ]
        entries = [" ".join(entry.split()) for entry in ENTRY.findall(body)]
        found += [f"{version}: too long: {entry[:60]}..." for entry in entries if len(entry) > LONGEST]
    return found


def repeated(changelog: str) -> list[str]:
    """Entries of two versions: a merge keeps both sides (`.gitattributes`), wherever the other side has moved them."""
    entries = Counter(" ".join(entry.split()) for entry in ENTRY.findall(changelog))
    return [entry for entry, count in entries.items() if count > 1]


def versions(changelog: str) -> list[str]:
    return re.findall(r"^## (.+)$", changelog, re.MULTILINE)


def test_each_version_has_its_entries_under_the_same_headings_and_they_are_short() -> None:
    assert problems((ROOT / "CHANGELOG.md").read_text()) == []


def test_no_entry_is_in_two_versions() -> None:
    assert repeated((ROOT / "CHANGELOG.md").read_text()) == []
    assert repeated("## 2.0.0\n\n- One\n  line.\n- Two.\n\n## 1.0.0\n\n- One line.\n") == ["- One line."]


def test_the_newest_version_of_the_changelog_is_the_version_of_the_package() -> None:
    named = versions((ROOT / "CHANGELOG.md").read_text())
    released = [tuple(map(int, name.split("."))) for name in named if name != "Unreleased"]
    assert "Unreleased" not in named[1:]
    assert released == sorted(released, reverse=True)
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == ".".join(map(str, released[0]))


def test_pages_images_and_manifests_name_the_version_of_the_package() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    files = ["Dockerfile", "README.md", "docs/index.md", "docs/install.md"]
    files += [f"configs/kubernetes/{name}.yaml" for name in ("daemonset", "engine", "hold")]
    files += ["configs/examples/compose.yaml"]
    named = {name: set(NAMED.findall((ROOT / name).read_text())) for name in files}
    assert named == {name: {version} for name in files}
    assert _notes(version).read_text().startswith(f"# Release notes {version}\n")
    notes = NAMED.findall((ROOT / "configs" / "mkdocs.yml").read_text())
    assert notes == [one for one in versions((ROOT / "CHANGELOG.md").read_text()) if _notes(one).is_file()]
    assert len(notes) == len(list(_notes(version).parent.iterdir()))


def _notes(version: str) -> Path:
    return ROOT / "docs" / "releases" / f"{version}.md"


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("### Added\n\n- One.\n\n### Fixed\n\n- Two\n  lines.\n", []),
        ("### Fixed\n\n- One.\n\n### Added\n\n- Two.\n", ["1.0.0: headings ['Fixed', 'Added']"]),
        ("### Added\n\nText.\n", ["1.0.0: Added is no list of entries"]),
        ("### Added\n\n- " + "x " * 200 + "\n", ["1.0.0: too long: - " + "x " * 29 + "..."]),
    ],
)
def test_what_is_no_entry_is_found(body: str, found: list[str]) -> None:
    assert problems(f"# Changelog\n\n## 1.0.0\n\n{body}") == found


def test_entries_of_two_branches_are_both_kept(tmp_path: Path) -> None:
    base, ours, theirs = (tmp_path / name for name in ("base", "ours", "theirs"))
    base.write_text("### Fixed\n\n- One.\n")
    ours.write_text("### Fixed\n\n- Two.\n- One.\n")
    theirs.write_text("### Fixed\n\n- Three.\n- One.\n")
    said = subprocess.run(
        ["git", "check-attr", "merge", "CHANGELOG.md"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert said.stdout.strip().endswith(": union")
    subprocess.run(["git", "merge-file", "--union", ours, base, theirs], check=True)
    assert ours.read_text() == "### Fixed\n\n- Two.\n- Three.\n- One.\n"
