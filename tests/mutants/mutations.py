"""Small changes of a module, one at a time: each of them should make some test fail.

A change is text for a piece of the source, so that everything else stays as it is. Left out is what no test has to
notice: annotations, docstrings, assertions, log lines, `__repr__`, and constants of modules.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_COMPARES: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
_LOGS: Final = ("log", "_log", "logger")


@dataclass(frozen=True, slots=True)
class Mutation:
    """`before` in `line` (from 1) of `path` becomes `after`; `start` and `end` are offsets in bytes of the file."""

    path: Path
    line: int
    start: int
    end: int
    before: str
    after: str
    lines: frozenset[int]
    """Of the statement, or of its head where others are within."""
    text: str
    """Of the line: it tells changes from each other when lines move."""

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.change}"

    @property
    def change(self) -> str:
        before, after = " ".join(self.before.split()), " ".join(self.after.split())
        return f"{before}  ->  {after}"


def mutations(path: Path, source: str) -> list[Mutation]:
    """All of them, in the order of the source, each different from it."""
    lines = [0]
    for line in source.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    found = []
    tree = ast.parse(source)
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    for node, after in _changes(tree):
        assert node.end_lineno is not None and node.end_col_offset is not None
        start, end = lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset
        before = source.encode()[start:end].decode()
        if " ".join(before.split()) != after:
            text = source.splitlines()[node.lineno - 1].strip()
            found.append(Mutation(path, node.lineno, start, end, before, after, _lines(node, statements), text))
    return found


def _lines(node: ast.expr | ast.stmt, statements: list[ast.stmt]) -> frozenset[int]:
    """Executing any of these may show a change of the node: a statement need not be seen on each of its lines."""
    around = max((one for one in statements if one.lineno <= node.lineno <= (one.end_lineno or 0)), key=_first)
    body = getattr(around, "body", None)
    last = (around.end_lineno or 0) if body is None else max(around.lineno, body[0].lineno - 1)
    lines = frozenset(range(around.lineno, last + 1)) | frozenset(range(node.lineno, (node.end_lineno or 0) + 1))
    return lines | {
        decorator.lineno
        for one in statements
        if isinstance(one, ast.FunctionDef) and one.lineno <= node.lineno <= (one.end_lineno or 0)
        for decorator in one.decorator_list
        if _compiles(decorator)
    }


def _compiles(decorator: ast.expr) -> bool:
    """Whether numba does. No test is seen to execute what it makes: importing is, and that may be any test."""
    return isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name) and decorator.func.id == "njit"


def _first(statement: ast.stmt) -> int:
    return statement.lineno


def _changes(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _within(statement)


def _within(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Of what is below a node."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Assert | ast.JoinedStr | ast.arguments | ast.Raise):
            if isinstance(child, ast.Raise) and not _asserts(child):
                yield child, "pass"
            continue
        if isinstance(child, ast.AnnAssign):
            if child.value is not None:
                yield from _within(child.value)
            continue
        if child in getattr(node, "decorator_list", ()) or child is getattr(node, "returns", None):
            continue
        if _tells(child) or _asserts(child):
            continue
        yield from _of_statement(child)
        yield from _of_expression(child)
        yield from _within(child)


def _tells(node: ast.AST) -> bool:
    """Whether it is a docstring, a line of the log, or what a debugger shows."""
    if isinstance(node, ast.FunctionDef) and node.name == "__repr__":
        return True
    if not isinstance(node, ast.Expr):
        return False
    if isinstance(node.value, ast.Constant):
        return True
    call = node.value
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return False
    owner = call.func.value
    name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
    return name in _LOGS


def _asserts(node: ast.AST) -> bool:
    """Whether it only says what cannot be: that lengths are equal, or that a place is not reached."""
    match node:
        case ast.keyword(arg="strict") | ast.Raise(exc=ast.Call(func=ast.Name(id="AssertionError"))):
            return True
    return False


def _of_statement(node: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    match node:
        case ast.Expr(value=ast.Call()) | ast.Continue() | ast.Break() | ast.Delete():
            yield node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, "pass"
        case ast.AugAssign(op=operator):
            yield node, "pass"
            if type(operator) in _OPERATORS:
                changed = deepcopy(node)
                changed.op = _OPERATORS[type(operator)]()
                yield node, ast.unparse(changed)
        case ast.Return(value=ast.Constant(value=bool(value))):
            yield node, f"return {not value}"


def _of_expression(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    match node:
        case ast.Compare(ops=operators):
            for at, operator in enumerate(operators):
                compare = deepcopy(node)
                compare.ops[at] = _COMPARES[type(operator)]()
                yield node, ast.unparse(compare)
        case ast.BoolOp(values=values):
            other = deepcopy(node)
            other.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield node, f"({ast.unparse(other)})"
            for at in range(len(values)):
                fewer = deepcopy(node)
                del fewer.values[at]
                text = ast.unparse(fewer if len(fewer.values) > 1 else fewer.values[0])
                yield node, f"({text})"
        case ast.UnaryOp(op=ast.Not()):
            yield node, f"({ast.unparse(node.operand)})"
        case ast.BinOp(op=operator) if type(operator) in _OPERATORS:
            binary = deepcopy(node)
            binary.op = _OPERATORS[type(operator)]()
            yield node, f"({ast.unparse(binary)})"
            yield node, f"({ast.unparse(node.left)})"
        case ast.Constant(value=bool(value)):
            yield node, str(not value)
        case ast.Constant(value=int(value)):
            yield node, str(value + 1)
