"""The house rules that a linter does not know: layout, names, sizes, banned calls."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from tests.rigs.syntax import parsed

ROOT = Path(__file__).resolve().parents[3]
PRODUCT = ("core", "proto", "server", "client")
LINES_MAX = 450
TEST_LINES_MAX = 600
"""Tables of cases and models are long."""
FUNCTION_LINES_MAX = 70
BANNED_NAMES = re.compile(r"(^|_)(utils?|helpers?|manager|common|misc|v2)($|_)")
BANNED_CALLS = {"pickle.loads", "pickle.dumps", "pickle.load", "pickle.dump", "time.sleep", "eval", "exec", "os.system"}
ROW_CODE = re.compile(r"test_[pcadbtsgno]\d+_|test_i\d[a-z]?_")
GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$")


def tracked(*suffixes: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    paths = [ROOT / name for name in listed.split("\0") if name.endswith(suffixes)]
    return [path for path in paths if path.is_file()]


def python_files(*folders: str) -> list[Path]:
    files = [p for p in tracked(".py") if not GENERATED.search(p.name)]
    return [p for p in files if not folders or p.relative_to(ROOT).parts[0] in folders]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def called_name(call: ast.Call) -> str:
    return ast.unparse(call.func)


def test_the_namespace_package_has_no_init_file() -> None:
    for folder in PRODUCT:
        assert (ROOT / folder / "kvdepot").is_dir()
        assert not (ROOT / folder / "kvdepot" / "__init__.py").exists()
        assert [p.name for p in (ROOT / folder).iterdir() if not p.name.startswith((".", "__"))] == ["kvdepot"]


def longer_than(lines_max: int, *folders: str) -> set[str]:
    return {named(path) for path in python_files(*folders) if path.read_text().count("\n") > lines_max}


def test_modules_stay_small() -> None:
    assert longer_than(LINES_MAX, *PRODUCT) == set()
    assert longer_than(TEST_LINES_MAX) == set()


def test_functions_stay_small() -> None:
    long = [
        f"{named(path)}:{function.lineno} {function.name}"
        for path in python_files()
        for function in functions(parsed(path))
        if function.end_lineno is not None and function.end_lineno - function.lineno > FUNCTION_LINES_MAX
    ]
    assert long == []


def test_names_of_tests_have_no_row_codes() -> None:
    coded = [
        f"{named(path)}:{function.lineno} {function.name}"
        for path in python_files("tests")
        for function in functions(parsed(path))
        if ROW_CODE.match(function.name)
    ]
    assert coded == [], "a code goes into @pytest.mark.requirement"


def test_every_folder_of_tests_is_a_package() -> None:
    """Without that, two files of one name would collide."""
    folders = {path.parent for path in python_files("tests")}
    assert [named(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def imported(tree: ast.Module) -> set[str]:
    """Modules that may be imported, within functions and for types alone too, and names of theirs."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_no_test_module_is_imported() -> None:
    """What tests share lies in `tests/fakes` or `tests/rigs`, or next to them: a test may be moved or split."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in python_files("tests")}
    of_tests = {module for module in modules if module.rpartition(".")[2].startswith("test_")}
    importers = {named(path): imported(parsed(path)) & of_tests for path in python_files()}
    assert {path: found for path, found in importers.items() if found} == {}


def test_no_modules_import_each_other_in_a_circle() -> None:
    """A circle of types counts too: whoever reads one of its modules has to read all. import-linter allows it."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts[1:]): path for path in python_files(*PRODUCT)}
    imports = {name: (imported(parsed(path)) & modules.keys()) - {name} for name, path in modules.items()}
    assert sum(map(len, imports.values())) > 1000
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle


def test_no_name_that_says_nothing() -> None:
    bad = [named(p) for p in python_files() if any(BANNED_NAMES.search(part) for part in (p.stem, p.parent.name))]
    classes = [
        f"{named(p)}:{node.name}"
        for p in python_files(*PRODUCT)
        for node in ast.walk(parsed(p))
        if isinstance(node, ast.ClassDef) and re.search(r"(Manager|Helper|Util|V2)$", node.name)
    ]
    assert bad + classes == []


def test_no_banned_call_in_the_product() -> None:
    bad = [
        f"{named(path)}:{node.lineno} {called_name(node)}"
        for path in python_files(*PRODUCT)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and called_name(node) in BANNED_CALLS
    ]
    assert bad == []


def test_public_modules_say_what_they_are() -> None:
    bare = [named(p) for p in python_files(*PRODUCT) if not ast.get_docstring(parsed(p))]
    assert bare == []


def test_no_left_over_marks_and_no_machine_paths() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|/home/\w+|/root/|" + re.escape(f"{ROOT}/"))
    bad = [
        f"{named(path)}:{number}"
        for path in tracked(".py", ".md", ".toml", ".proto", ".txt", "Makefile", "run")
        if path != Path(__file__).resolve()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if marks.search(line)
    ]
    assert bad == []
