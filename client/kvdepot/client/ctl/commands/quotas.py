"""`kvdepotctl quota`: what tenants and namespaces may hold, changed at run time."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click
from kvdepot.client.ctl.calls import connect
from kvdepot.client.ctl.commands.options import json_option
from kvdepot.client.ctl.completing import Name
from kvdepot.client.ctl.printer import new_table, quotas_table, show, size_text
from kvdepot.core.control import QuotaEntry, QuotaSubject
from kvdepot.core.errors import NotFound
from kvdepot.core.units import parse_size_bytes
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvdepot.client.ctl.calls import Operator
    from kvdepot.client.endpoint import Endpoint
    from kvdepot.core.report import QuotaStatus


@click.group()
def quota() -> None:
    """What a tenant or a namespace may hold of a tier: as [[quota]] in the configuration, changed at run time."""


def _subject(run: Callable[..., int]) -> Callable[..., int]:
    for option in (
        click.option("--tier", default="*", show_default=True, help="A tier by its name; *: each by itself."),
        click.option(
            "--namespace",
            metavar="NAMESPACE",
            type=Name(chunks=False),
            help="A label, 8 to 32 digits that begin an id; *: each by itself. [default: the total of the tenant's]",
        ),
        click.option("--tenant", default="*", show_default=True, help="A tenant; *: each by itself."),
    ):
        run = option(run)
    return run


@quota.command(name="set")
@click.argument("capacity")
@_subject
@json_option
@click.pass_obj
def set_(
    connection: tuple[Endpoint, float], capacity: str, tenant: str, namespace: str | None, tier: str, as_json: bool
) -> int:
    """Let the subject hold CAPACITY (20GiB; none: no limit), in place of what the configuration says about it.

    A smaller one refuses at once, and is evicted to within seconds, of the subject's own. It outlives restarts and
    reloads, until `delete`. Who is not there yet is held to it on coming: the answer says where it is about nobody.
    """
    subject = QuotaSubject(tenant, namespace, tier)
    capacity_bytes = None if capacity == "none" else parse_size_bytes(capacity)
    with connect(*connection) as operator:
        not_kept = operator.set_quota(QuotaEntry(subject, capacity_bytes))
        entry, held = _found(operator, subject)
    _show(entry, held, {"not_kept": not_kept}, as_json=as_json)
    return 0


@quota.command()
@_subject
@json_option
@click.pass_obj
def get(connection: tuple[Endpoint, float], tenant: str, namespace: str | None, tier: str, as_json: bool) -> int:
    """Show the entry about the subject, and what those hold whom it is about. Exit code 1: there is none."""
    with connect(*connection) as operator:
        entry, held = _found(operator, QuotaSubject(tenant, namespace, tier))
    _show(entry, held, {}, as_json=as_json)
    return 0


@quota.command()
@_subject
@json_option
@click.pass_obj
def delete(connection: tuple[Endpoint, float], tenant: str, namespace: str | None, tier: str, as_json: bool) -> int:
    """Delete what `set` has set about the subject: what the configuration says about it is in effect again."""
    subject = QuotaSubject(tenant, namespace, tier)
    with connect(*connection) as operator:
        not_kept = operator.delete_quota(subject)
    if as_json:
        click.echo(json.dumps(asdict(subject) | {"not_kept": not_kept}, indent=2))
        return 0
    click.echo(f"deleted: {subject}")
    _warn(not_kept)
    return 0


@quota.command(name="list")
@json_option
@click.pass_obj
def list_(connection: tuple[Endpoint, float], as_json: bool) -> int:
    """List the entries in effect: of the configuration, and those that were set. `status` says who holds what."""
    with connect(*connection) as operator:
        entries = operator.quotas()
    if as_json:
        click.echo(json.dumps([_record(one) for one in entries], indent=2))
        return 0
    table = new_table("quotas", "tenant", "namespace", "tier", "capacity", "source")
    for one in entries:
        names = (one.subject.tenant, one.subject.namespace or "(total)", one.subject.tier)
        table.add_row(*map(escape, names), _capacity(one), _source(one))
    show(Console(), table if entries else "there is no quota")
    return 0


def _found(operator: Operator, subject: QuotaSubject) -> tuple[QuotaEntry, list[QuotaStatus]]:
    """The entry, and what is held by those whom it limits. Raises NotFound."""
    entry = next(iter(operator.quotas(subject)), None)
    if entry is None:
        raise NotFound(f"there is no quota for {subject}", advice="`kvdepotctl quota list` shows all")
    subject = entry.subject
    tiers = {subject.tier}
    status = operator.status().quotas
    if subject.tier == "*":  # those of which no other entry is about the same
        others = {one.subject.tier for one in operator.quotas() if replace(one.subject, tier="*") == subject}
        tiers = {one.tier for one in status} - others
    about = (subject.tenant, subject.namespace or "")
    return entry, [one for one in status if (one.tenant, one.namespace) == about and one.tier in tiers]


def _show(entry: QuotaEntry, held: list[QuotaStatus], more: dict[str, str], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(_record(entry) | {"tiers": [asdict(one) for one in held]} | more, indent=2))
        return
    click.echo(f"{_capacity(entry)}: {entry.subject}, {_source(entry)}")
    if held:
        show(Console(), quotas_table(held))
    _warn(more.get("not_kept", ""))


def _warn(not_kept: str) -> None:
    if not_kept:
        click.echo(f"warning: {not_kept}", err=True)


def _capacity(entry: QuotaEntry) -> str:
    return "none" if entry.capacity_bytes is None else size_text(entry.capacity_bytes)


def _source(entry: QuotaEntry) -> str:
    return "set" if entry.by_operator else "configuration"


def _record(entry: QuotaEntry) -> dict[str, Any]:
    return asdict(entry.subject) | {"capacity_bytes": entry.capacity_bytes, "by_operator": entry.by_operator}
