"""What a shell completes of a command line: verbs and options from the code, names from the daemon."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

import click
import grpc
from click.shell_completion import CompletionItem
from kvdepot.client.ctl.calls import connect
from kvdepot.client.ctl.remote import chosen
from kvdepot.core.errors import KvDepotError

if TYPE_CHECKING:
    from kvdepot.client.ctl.calls import Operator

_SHOWN: Final = 50
_SILENT: Final = (grpc.RpcError, KvDepotError, click.ClickException)
_DIGITS: Final = 12


class _Asked(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    """What the daemon knows. None where no daemon answers: a shell shows no errors."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        del param
        given = ctx.find_root().params
        with contextlib.suppress(*_SILENT), connect(chosen(given), given["timeout"]) as operator:
            return self._found(operator, ctx, incomplete)
        return []

    def _found(self, operator: Operator, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        raise NotImplementedError


class Name(_Asked):
    """NAMESPACE, or with `chunks` also NAMESPACE/KEY, as an operator writes it: what it names is found out later."""

    name = "name"

    def __init__(self, *, chunks: bool) -> None:
        self._chunks = chunks

    def _found(self, operator: Operator, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        del ctx
        namespace, slash, prefix = incomplete.partition("/")
        if slash and self._chunks:
            return _chunks(operator, namespace, prefix, f"{namespace}/")
        names = operator.namespaces(incomplete, _SHOWN).namespaces
        return [CompletionItem(one.namespace_id.hex()[:_DIGITS], help=one.label) for one in names]


class TierName(_Asked):
    """The name of a tier, completed from the daemon's."""

    name = "name"

    def _found(self, operator: Operator, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        del ctx
        tiers = operator.status().tiers
        return [CompletionItem(one.name, help=one.kind) for one in tiers if one.name.startswith(incomplete)]


def _chunks(operator: Operator, namespace: str, prefix: str, before: str) -> list[CompletionItem]:
    found = operator.chunks(operator.find_namespace(namespace), prefix, _SHOWN).chunks
    return [
        CompletionItem(f"{before}{chunk.key.hex()[:_DIGITS]}", help=f"{chunk.boundary_tokens} tokens")
        for chunk in found
    ]
