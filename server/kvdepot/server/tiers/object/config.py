"""What an object tier is configured with, in addition to what a shared tier is."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvdepot.server.io.bucket import BucketSettings
from kvdepot.server.tiers.shared.config import SharedConfig


@dataclass(frozen=True, slots=True)
class ObjectConfig(SharedConfig):
    """`path` is the URL, for people: no file is below it. `capacity_bytes` bounds what this node knows of.

    Nothing is counted or evicted in the bucket: its lifecycle rules delete.
    """

    touches: bool = False
    gives_up: bool = False  # a network fails, and says nothing of an object
    kind: str = "object"
    bucket: BucketSettings = field(default_factory=lambda: BucketSettings(""))
    request_budget: int | None = None  # a day (UTC), of this daemon; None: none
    read_budget_bytes: int | None = None  # a day (UTC), of this daemon; None: none
