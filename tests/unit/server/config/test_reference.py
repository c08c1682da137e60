"""The reference file explains every key: what it is for, what to set, and by which query one sees that it is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kvdepot.server.config.schema import QuotaTable, Tables, TenantTable, TierTable

from tests.rigs.promql import NO_PROMTOOL, promtool, series, why_unknown

ROOT = Path(__file__).parents[4]
REFERENCE = ROOT / "configs" / "kvdepot.toml"


def _explained() -> dict[str, list[str]]:
    """The comment before each key, by the key."""
    found: dict[str, list[str]] = {}
    table, comment = "", list[str]()
    for line in REFERENCE.read_text().splitlines():
        text = line.removeprefix("#: ")
        if header := re.match(r"\[+(\w+)\]+", text):
            table, comment = header[1], []
        elif key := re.match(r"(\w+) = ", text):
            found[f"{table}.{key[1]}"], comment = comment, []
        elif line.startswith("# "):
            comment.append(line.removeprefix("# "))
        else:
            comment = []
    return found


EXPLAINED = _explained()
QUERIES = {
    key: line.removeprefix("Wrong when: ")
    for key, comment in EXPLAINED.items()
    for line in comment
    if line.startswith("Wrong when: ")
}


def test_every_key_is_explained_and_nothing_else() -> None:
    lists: dict[str, type[TierTable | QuotaTable | TenantTable]] = {
        "tier": TierTable,
        "quota": QuotaTable,
        "tenant": TenantTable,
    }
    keys = {f"{table}.{name}" for table, model in lists.items() for name in model.model_fields}
    for table, model in Tables():
        if table not in lists:
            keys |= {f"{table}.{name}" for name in type(model).model_fields}
    assert set(EXPLAINED) == keys - {"quota.namespace"}  # absent is a value of its own; it is explained in place


@pytest.mark.parametrize("key", EXPLAINED)
def test_the_explanation_says_what_it_is_and_what_to_set(key: str) -> None:
    comment = EXPLAINED[key]
    assert comment and not comment[0].startswith(("Recommended", "Wrong"))
    assert sum(line.startswith("Recommended: ") for line in comment) == 1


@pytest.mark.requirement("P10")
@pytest.mark.parametrize("key", QUERIES)
def test_its_query_asks_for_metrics_that_exist(key: str) -> None:
    found = series(QUERIES[key])
    assert found or QUERIES[key].startswith("up{")
    assert [why for one in found if (why := why_unknown(one))] == []


def test_most_keys_have_a_query() -> None:
    assert len(QUERIES) > len(EXPLAINED) / 2


@pytest.mark.requirement("P10")
@pytest.mark.skipif(bool(NO_PROMTOOL), reason=NO_PROMTOOL)
def test_promtool_can_read_the_queries(tmp_path: Path) -> None:
    rules = "".join(
        f"      - record: x:{key.replace('.', '_')}\n        expr: '{query}'\n" for key, query in QUERIES.items()
    )
    (tmp_path / "rules.yml").write_text(f"groups:\n  - name: reference\n    rules:\n{rules}")
    checked = promtool("check", "rules", str(tmp_path / "rules.yml"))
    assert checked.returncode == 0, checked.stdout + checked.stderr
