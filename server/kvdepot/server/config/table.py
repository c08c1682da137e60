"""The base of every table of the configuration file."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Table(BaseModel):
    """One table. Keys that it does not know are refused, and no value is converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
