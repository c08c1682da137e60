"""The metrics of tiers and of their quotas: a part of the table of `metric_families`."""

from __future__ import annotations

from typing import Final

from kvdepot.core.health import DEGRADED_STATES, DISABLED
from kvdepot.core.what_if import FACTORS
from kvdepot.core.write_admission import Verdict
from kvdepot.server.observe.metric_family import (
    DISK,
    LOWER,
    OBJECT,
    OF_SEVERAL,
    RAM_ONLY,
    SHARED,
    Family,
    quota,
    tier_counter,
    tier_gauge,
    tier_states,
)
from kvdepot.server.storage.base import DAMAGED, IoOutcome

_STATES = ("closed", "degraded", "growing", "offline", "opening", "read-only", "ready")
_BREAKERS = ("closed", "open", "probing")
_DAMAGES = sorted(DAMAGED)
OUTCOMES: Final = tuple(IoOutcome)

TIERS: Final = (
    Family(
        "tier_expected_hit_ratio",
        "gauge",
        "Hit ratio of the last hour's requests at a factor of the capacity. An upper bound with second_use or auto.",
        ("tier", "capacity_factor"),
        tuple(f"{factor:g}" for factor in FACTORS),
        samples=lambda scrape: [
            ((tier.name, f"{point.factor:g}"), point.hit_ratio)
            for tier in scrape.status.tiers
            if tier.what_if is not None
            for point in tier.what_if.points
            if point.hit_ratio is not None
        ],
    ),
    tier_gauge("capacity_bytes", "Configured capacity, everything included."),
    tier_gauge("ready_bytes", "RAM: populated bytes of the arena. Disk: bytes of the existing segments."),
    tier_gauge(
        "used_bytes",
        "RAM: bytes in extents of objects, reserved ones included. Lower tiers: bytes on the device.",
        lambda tier: tier.used_bytes,
    ),
    tier_gauge("lent_bytes", "Bytes in extents lent to processes.", kinds=RAM_ONLY),
    tier_gauge("objects", "Committed objects."),
    tier_gauge("unverified_objects", "Adopted objects that are not verified yet.", kinds=RAM_ONLY),
    tier_gauge("pending_checksums", "Committed objects without a checksum. A kill would lose them.", kinds=RAM_ONLY),
    tier_gauge("prefetched_objects", "Objects pinned for requests that wait.", kinds=RAM_ONLY),
    tier_gauge("prefetched_bytes", "Bytes of these objects.", kinds=RAM_ONLY),
    tier_gauge("prefetching_requests", "Requests with a prefetch in progress or queued.", kinds=RAM_ONLY),
    tier_gauge("pinned_objects", "Objects that an operator has pinned.", kinds=RAM_ONLY),
    tier_gauge("pinned_bytes", "Bytes of pinned objects, at most `[policy] pin_share` of RAM.", kinds=RAM_ONLY),
    tier_gauge("queued_objects", "Objects that wait to be written to the tier.", kinds=LOWER),
    tier_gauge("queued_bytes", "Bytes of these objects.", kinds=LOWER),
    tier_gauge("written_today_bytes", "Bytes written since midnight UTC.", kinds=LOWER),
    tier_gauge("quarantined_bytes", "Bytes in quarantine.", kinds=LOWER),
    tier_gauge(
        "write_target_bytes",
        'Bytes a day that `write = "auto"` aims at: `drive_writes_per_day` times the capacity. 0: no target.',
        kinds=(DISK,),
    ),
    tier_gauge(
        "janitor",
        "1 while this daemon's node is the janitor of a shared tier.",
        lambda tier: tier.is_janitor,
        kinds=(SHARED,),
    ),
    tier_gauge(
        "degraded", "1 while the tier is degraded, read-only or offline.", lambda tier: tier.state in DEGRADED_STATES
    ),
    tier_states("state", "1 for the state that the tier is in, else 0.", "state", _STATES, lambda tier: tier.state),
    tier_gauge("breaker_open", "1 while the tier is disabled.", lambda tier: tier.breaker in DISABLED),
    tier_states(
        "breaker",
        "1 for the state of the tier's breaker, else 0. open: the tier is disabled.",
        "state",
        _BREAKERS,
        lambda tier: tier.breaker,
    ),
    tier_counter("tier_writes", "Objects written to a tier, by outcome.", "outcome", OUTCOMES),
    tier_counter("tier_written_bytes", "Bytes written to the device."),
    tier_counter(
        "tier_hit_bytes",
        "Bytes read into RAM for loads and prefetch, before the codec. `kvdepot_tier_written_bytes_total` divided by "
        "it is what a hit byte costs a drive.",
    ),
    tier_counter(
        "tier_writes_dropped",
        "Objects that were dropped instead of written, by reason.",
        "reason",
        ("queue_full", "no_parent", "too_large", "budget", "quota", "failed"),
    ),
    tier_counter(
        "tier_admissions",
        'Decisions of `write = "auto"` on a chunk. `decision`: to write it, or that too few chunks like it return, or '
        "that `drive_writes_per_day` leaves room for better ones only.",
        "decision",
        tuple(Verdict),
        kinds=(DISK,),
    ),
    tier_counter(
        "tier_evicted_objects",
        "Objects evicted, or forgotten in a shared tier, by reason.",
        "reason",
        ("watermark", "room", "quota", "nodes"),
    ),
    tier_counter(
        "tier_found_objects",
        "Objects found at an opening or by probes: `accepted`, or the reason why not.",
        "outcome",
        ("accepted", "no_namespace", "invalid", "length", "no_parent", "index_full", "repeated", "failed"),
    ),
    tier_counter("tier_lost_objects", "Objects that were missing when they were read."),
    tier_counter(
        "tier_damaged_objects",
        "Objects whose damage a read or the scrubber proved, by reason; also those of which the tier has no key.",
        "reason",
        _DAMAGES,
    ),
    tier_counter(
        "tier_scrubbed_objects", "Objects read by the scrubber, by outcome.", "outcome", OUTCOMES, kinds=(DISK,)
    ),
    tier_counter("io_answers", "Jobs of the I/O workers, by outcome.", "outcome", OUTCOMES),
    tier_counter("io_seconds", "Seconds that I/O jobs took, in total.", "operation", ("read", "write", "other")),
    tier_counter("io_bytes", "Bytes that I/O workers moved.", "operation", ("read", "written")),
    tier_counter("io_buffered_jobs", "Jobs that used the page cache, because O_DIRECT is refused or unsafe (NFS)."),
    tier_counter(
        "io_workers",
        "I/O workers, by event. overdue: killed because a job or its start took too long. abandoned: killed, and not"
        " dead 5 s later, because it hangs in the kernel.",
        "event",
        ("started", "crashed", "overdue", "abandoned"),
    ),
    tier_counter("io_breaker_openings", "Times that the breaker disabled the tier."),
    tier_counter(
        "io_failed_callbacks", "Exceptions in the tier or its I/O pool. Each is a defect of kvdepot; see the log."
    ),
    tier_counter(
        "shared_publications",
        "Files that this node published in a shared tier. `outcome`: written, or already there.",
        "outcome",
        ("written", "already_there"),
        kinds=OF_SEVERAL,
    ),
    tier_counter(
        "shared_probes",
        "Probes of files in a shared tier. `outcome`: sent (`asked`), the answers, or remembered as absent.",
        "outcome",
        ("asked", "found", "absent", "failed", "remembered"),
        kinds=OF_SEVERAL,
    ),
    tier_counter("bucket_requests", "Requests to the bucket, without the library's retries.", kinds=(OBJECT,)),
    tier_counter("bucket_received_bytes", "Bytes of objects that were read from the bucket.", kinds=(OBJECT,)),
    tier_counter(
        "bucket_refused_jobs",
        "Jobs for which too little of a day's budget was left, by budget.",
        "budget",
        ("requests", "read"),
        kinds=(OBJECT,),
    ),
    tier_counter(
        "shared_touches",
        "Updates of a file's modification time after a use. `outcome`: of the update.",
        "outcome",
        ("ok", "failed"),
        kinds=OF_SEVERAL,
    ),
)

QUOTAS: Final = (
    quota("gauge", "capacity_bytes", "Bytes each owner of the quota may use.", lambda quota: quota.capacity_bytes),
    quota("gauge", "owners", "Tenants or namespaces that the quota applies to.", lambda quota: quota.owners_count),
    quota(
        "gauge",
        "used_bytes",
        "Bytes that the fullest owner uses.",
        lambda quota: quota.owners[0].used_bytes if quota.owners else 0,
    ),
    quota("counter", "refused_objects", "Objects refused because of the quota.", lambda quota: quota.refused_objects),
    quota("counter", "evicted_objects", "Objects evicted because of the quota.", lambda quota: quota.evicted_objects),
)
