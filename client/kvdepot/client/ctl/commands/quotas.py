"""`kvdepotctl quota`: limits of tenants and namespaces, changed at run time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
from kvdepot.client.ctl.as_json import echo_record, to_json
from kvdepot.client.ctl.calls import connect
from kvdepot.client.ctl.commands.options import json_option
from kvdepot.client.ctl.completing import Name
from kvdepot.client.ctl.printer import new_table, quotas_table, show
from kvdepot.client.ctl.texts import escape, say
from kvdepot.core.control import QuotaEntry, QuotaSubject
from kvdepot.core.errors import NotFound
from kvdepot.core.units import parse_size_bytes, size_text
from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvdepot.client.ctl.calls import Operator
    from kvdepot.client.endpoint import Endpoint
    from kvdepot.core.report import QuotaStatus


@click.group()
def quota() -> None:
    """Show and set quotas."""


def _subject(run: Callable[..., int]) -> Callable[..., int]:
    for option in (
        click.option("--tier", default="*", show_default=True, help="Name of a tier; *: each tier separately."),
        click.option(
            "--namespace",
            metavar="NAMESPACE",
            type=Name(chunks=False),
            help="A label, or the first 8 to 32 digits of an id; *: each separately. [default: total of the tenant]",
        ),
        click.option("--tenant", default="*", show_default=True, help="Name of a tenant; *: each tenant separately."),
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
    """Set a quota.

    The tenant or namespace may use at most CAPACITY (for example 20GiB; none: no limit) of a tier. The quota replaces
    the [[quota]] entry of the configuration for the same subject. It survives restarts and reloads, until `delete`. If
    the subject uses more now, new objects are refused at once, and its objects are evicted within seconds. Owners that
    do not exist yet are limited when they appear.
    """
    subject = QuotaSubject(tenant, namespace, tier)
    capacity_bytes = None if capacity == "none" else parse_size_bytes(capacity)
    with connect(*connection) as operator:
        not_persisted = operator.set_quota(subject, capacity_bytes)
        entry, held = _found(operator, subject)
    _show(entry, held, {"not_persisted": not_persisted}, as_json=as_json)
    return 0


@quota.command()
@_subject
@json_option
@click.pass_obj
def get(connection: tuple[Endpoint, float], tenant: str, namespace: str | None, tier: str, as_json: bool) -> int:
    """Show one quota and what its owners use.

    Exit code 1: no quota for this subject.
    """
    with connect(*connection) as operator:
        entry, held = _found(operator, QuotaSubject(tenant, namespace, tier))
    _show(entry, held, {}, as_json=as_json)
    return 0


@quota.command()
@_subject
@json_option
@click.pass_obj
def delete(connection: tuple[Endpoint, float], tenant: str, namespace: str | None, tier: str, as_json: bool) -> int:
    """Delete a quota that `set` has set.

    The [[quota]] entry of the configuration for the same subject is in effect again.
    """
    subject = QuotaSubject(tenant, namespace, tier)
    with connect(*connection) as operator:
        not_persisted = operator.delete_quota(subject)
    if as_json:
        echo_record(to_json(subject) | {"not_persisted": not_persisted})
        return 0
    say(f"deleted: {subject}")
    _warn(not_persisted)
    return 0


@quota.command(name="list")
@json_option
@click.pass_obj
def list_(connection: tuple[Endpoint, float], as_json: bool) -> int:
    """List the quotas in effect.

    Lists the entries of the configuration and those that `set` has set. `status` shows what each owner uses.
    """
    with connect(*connection) as operator:
        entries = operator.quotas()
    if as_json:
        echo_record([_record(one) for one in entries])
        return 0
    table = new_table("quotas", "tenant", "namespace", "tier", ">capacity", "source")
    for one in entries:
        names = (one.subject.tenant, one.subject.namespace or "(total)", one.subject.tier)
        table.add_row(*map(escape, names), _capacity(one), _source(one))
    show(Console(), table if entries else "no quotas")
    return 0


def _found(operator: Operator, subject: QuotaSubject) -> tuple[QuotaEntry, list[QuotaStatus]]:
    """Return the entry, and what those hold that it limits. Raise NotFound."""
    entry = next(iter(operator.quotas(subject)), None)
    if entry is None:
        raise NotFound(f"there is no quota for {subject}", advice="`kvdepotctl quota list` shows all quotas")
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
        echo_record(_record(entry) | {"tiers": held} | more)
        return
    say(f"{_capacity(entry)}: {entry.subject}, {_source(entry)}")
    if held:
        show(Console(), quotas_table(held))
    _warn(more.get("not_persisted", ""))


def _warn(not_persisted: str) -> None:
    if not_persisted:
        say(f"warning: {not_persisted}", err=True)


def _capacity(entry: QuotaEntry) -> str:
    return "none" if entry.capacity_bytes is None else size_text(entry.capacity_bytes)


def _source(entry: QuotaEntry) -> str:
    return "set" if entry.by_operator else "configuration"


def _record(entry: QuotaEntry) -> dict[str, Any]:
    return to_json(entry.subject) | {"capacity_bytes": entry.capacity_bytes, "by_operator": entry.by_operator}  # type: ignore[no-any-return]
