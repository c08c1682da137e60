"""What tests of the engine over a lower tier share: bytes that are told apart, and a reboot."""

from __future__ import annotations

from kvdepot.core.calls import ROOT_KEY, AcquireReply, Kind, ReserveOutcome
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.limits import RESERVED_PER_CALL_MAX
from kvdepot.core.objectfile import payload_sum
from kvdepot.server.depot.types import TierConfig, WritePolicy

from tests.fakes.shared_memory_tier import SharedMedium
from tests.rigs.engine_rig import CHUNK, DENSE, Client, Rig, audit, unpack

COMMIT = TierConfig(WritePolicy.COMMIT)
EVICT = TierConfig(WritePolicy.EVICT)
SECOND_USE = TierConfig(WritePolicy.SECOND_USE)
BOTH = (Kind.ATTENTION, Kind.STATE)
ATTENTION = bytes([Kind.ATTENTION])


def write(to: Rig | Client, reply_extents: bytes, fill: int) -> None:
    data = to.data if isinstance(to, Client) else to.buffer
    for _, _, offset, length, _ in unpack(reply_extents):
        data[offset : offset + length] = bytes([fill]) * length


def read(by: Rig | Client, reply: AcquireReply) -> set[int]:
    data = by.data if isinstance(by, Client) else by.buffer
    return {byte for _, _, offset, length, _ in unpack(reply.extents) for byte in data[offset : offset + length]}


def store(client: Client, keys: list[bytes], fill: int = 7, kinds: tuple[Kind, ...] = (Kind.ATTENTION,)) -> None:
    chunks = RESERVED_PER_CALL_MAX // len(kinds)
    for at in range(0, len(keys), chunks):
        parent = keys[at - 1] if at else ROOT_KEY
        lease, reply = client.reserve(keys[at : at + chunks], kinds, start=at, parent=parent)
        write(client, reply.extents, fill)
        granted = [i for i, outcome in enumerate(reply.outcomes) if outcome == ReserveOutcome.GRANTED]
        assert set(client.commit(lease, *granted)) <= {1}


def on_tier_only(rig: Rig, keys: list[bytes], fill: int = 7) -> Client:
    """These objects are in the lower tier and not in RAM, as after a reboot."""
    client = rig.attach()
    store(client, keys, fill)
    rig.tier.run()
    reboot(rig)
    return rig.attach()


def reboot(rig: Rig) -> None:
    """The arena is gone, the medium is not."""
    rig.wipe()
    rig.start()


def verify(rig: Rig) -> None:
    """The checksum worker's part, by the bytes that are there."""
    while (job := rig.depot.next_to_sum()) is not None:
        raw_sum = payload_sum([rig.buffer[offset : offset + length] for offset, length in job.extents])
        rig.depot.summed(job.row, job.generation, raw_sum & (1 << 64) - 1, raw_sum >> 64)


def settle(rig: Rig) -> None:
    for _ in range(20):
        rig.depot.tick()
        rig.tier.run()
    audit(rig.depot)


def in_ram(rig: Rig) -> int:
    return rig.depot.status().tier.objects


def in_tier(rig: Rig) -> int:
    return rig.depot.status().lower_tiers[0].objects


def published(
    medium: SharedMedium, keys: list[bytes], spec: NamespaceSpec = DENSE, kinds: tuple[Kind, ...] = (Kind.ATTENTION,)
) -> None:
    """Another node has put these objects there."""
    node = Rig(shared=COMMIT, shared_medium=medium, data_pages=256)
    node.shared.automatic = True
    store(node.attach(spec=spec), keys, kinds=kinds)
    node.shared.run()
    audit(node.depot)


def rig_over(keys: list[bytes], **options: object) -> tuple[Rig, Client]:
    """A node that knows nothing of what lies in its shared tier."""
    medium = SharedMedium()
    published(medium, keys)
    rig = Rig(shared=options.pop("shared", COMMIT), shared_medium=medium, **options)  # type: ignore[arg-type]
    return rig, rig.attach()


def boundary(client: Client, keys: list[bytes]) -> int:
    """Chunks that are located once the tier has answered."""
    answers = client.locate_later(keys)
    client.rig.shared.run()
    audit(client.rig.depot)
    (reply,) = answers
    return reply.boundary_tokens // CHUNK
