"""What a shell completes of a command line: verbs and options from the code, names from the daemon."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

import click
import grpc
from click.shell_completion import CompletionItem
from kvdepot.client.ctl.calls import connect
from kvdepot.core.errors import KvDepotError

if TYPE_CHECKING:
    from kvdepot.client.ctl.calls import Operator

_SHOWN: Final = 50
_DIGITS: Final = 12


class Name(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    """NAMESPACE, or with `chunks` also NAMESPACE/KEY, as an operator writes it: what it names is found out later."""

    name = "name"

    def __init__(self, *, chunks: bool) -> None:
        self._chunks = chunks

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """None where no daemon answers: a shell shows no errors."""
        del param
        given = ctx.find_root().params
        with contextlib.suppress(grpc.RpcError, KvDepotError), connect(given["endpoint"], given["timeout"]) as operator:
            return self._found(operator, incomplete)
        return []

    def _found(self, operator: Operator, incomplete: str) -> list[CompletionItem]:
        namespace, slash, prefix = incomplete.partition("/")
        if slash and self._chunks:
            found = operator.chunks(operator.find_namespace(namespace), prefix, _SHOWN).chunks
            return [
                CompletionItem(f"{namespace}/{chunk.key.hex()[:_DIGITS]}", help=f"{chunk.boundary_tokens} tokens")
                for chunk in found
            ]
        names = operator.namespaces(incomplete, _SHOWN).namespaces
        return [CompletionItem(one.namespace_id.hex()[:_DIGITS], help=one.label) for one in names]
