"""Quotas that operators set at run time. They override those of the configuration (docs/adr/0035)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Final

from kvdepot.core.control import QuotaEntry, QuotaSubject
from kvdepot.core.errors import ConfigError, InvalidArgument, NotFound
from kvdepot.core.limits import check_limit
from kvdepot.server.config.config import check_quotas
from kvdepot.server.config.schema import QuotaTable, Tables
from kvdepot.server.depot.types import Quota
from pydantic import ValidationError

SET_MAX: Final = 256


class SetQuotas:
    """By subject: one that is set stands in place of what the configuration says about the same subject."""

    def __init__(self) -> None:
        self._set: dict[QuotaSubject, int | None] = {}

    def restore(self, entries: Iterable[QuotaEntry]) -> None:
        """Restore the quotas of an earlier run. One of a tier that no longer exists limits nothing."""
        self._set = {entry.subject: entry.capacity_bytes for entry in entries}

    def set(self, tables: Tables, entry: QuotaEntry) -> None:
        """Set a quota. Raise InvalidArgument for what no configuration may have, or LimitExceeded."""
        subject = _checked(tables, entry)
        check_limit("quotas that are set", len({*self._set, subject}), SET_MAX)
        self._set[subject] = entry.capacity_bytes

    def delete(self, subject: QuotaSubject) -> None:
        """Delete a quota. Raise NotFound for one that no operator has set, or InvalidArgument."""
        subject = spelled(subject)
        if subject not in self._set:
            raise NotFound(
                f"no runtime quota for {subject}",
                advice="to remove a quota of the configuration, edit the file and run `kvdepotctl reload`",
            )
        del self._set[subject]

    def kept(self) -> tuple[QuotaEntry, ...]:
        return tuple(QuotaEntry(subject, capacity, by_operator=True) for subject, capacity in self._set.items())

    def in_effect(self, tables: Tables) -> tuple[QuotaEntry, ...]:
        """Return the entries of the configuration that are not overridden, then those of operators."""
        configured = {_subject(one): one.capacity for one in (*tables.quota, *_of_tenants(tables))}
        return (
            *(QuotaEntry(subject, capacity) for subject, capacity in configured.items() if subject not in self._set),
            *self.kept(),
        )

    def for_engine(self, tables: Tables) -> tuple[Quota, ...]:
        return tuple(
            Quota(one.subject.tenant, one.subject.namespace, one.subject.tier, one.capacity_bytes)
            for one in self.in_effect(tables)
        )


def _of_tenants(tables: Tables) -> Iterator[QuotaTable]:
    """Yield the quota that `ram` of a tenant is, if there is one tenant: of several it is the size of their parts."""
    for tenant in tables.tenant:
        if tenant.ram is not None and len(tables.tenant) == 1:
            yield QuotaTable.model_construct(tenant=tenant.name, namespace=None, tier="ram", capacity=tenant.ram)


def _subject(one: QuotaTable) -> QuotaSubject:
    return QuotaSubject(one.tenant, one.namespace, one.tier)


def spelled(subject: QuotaSubject) -> QuotaSubject:
    """Return the subject as the configuration would spell it, for any tier name. Raise InvalidArgument."""
    return _subject(_table(subject, None))


def _checked(tables: Tables, entry: QuotaEntry) -> QuotaSubject:
    """Return the entry, after all checks of the configuration. Raise InvalidArgument."""
    one = _table(entry.subject, entry.capacity_bytes)
    try:
        check_quotas("", tables.model_copy(update={"quota": [one]}))
    except ConfigError as error:
        raise InvalidArgument(error.reason, advice=error.advice) from error
    return _subject(one)


def _table(subject: QuotaSubject, capacity_bytes: int | None) -> QuotaTable:
    capacity = "none" if capacity_bytes is None else f"{capacity_bytes}B"
    try:
        return QuotaTable.model_validate(asdict(subject) | {"capacity": capacity})
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidArgument(f"{first['loc'][0]}: {first['msg'].removeprefix('Value error, ')}") from error
