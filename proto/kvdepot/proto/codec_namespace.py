"""Namespace specs between the wire and `kvdepot.core.keys`.

Only shape and bounds are checked here; that sizes follow from the groups, and that the
identity is canonical, is the engine's to say (`kvdepot.core.keys.check_sizes`).
"""

from __future__ import annotations

from types import MappingProxyType

from kvdepot.core import limits
from kvdepot.core.calls import Kind
from kvdepot.core.elements import ElementRun, Elements
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.planner import GroupSpec
from kvdepot.proto.bounds import bad, check_at_most, check_bytes, check_text
from kvdepot.proto.v1 import depot_pb2 as pb

_KINDS = frozenset(Kind)


def encode_register(
    session: bytes,
    spec: NamespaceSpec,
    elements: Elements = MappingProxyType({}),
    *,
    follows_bumps: bool = False,
) -> pb.RegisterNamespaceRequest:
    """`follows_bumps`: the caller understands an answer without an id."""
    runs = [
        pb.ElementRun(kind=int(kind), dtype=run.dtype, part_bytes=run.part_bytes, parts=run.parts)
        for kind, of_kind in elements.items()
        for run in of_kind
    ]
    return pb.RegisterNamespaceRequest(
        session=session, spec=encode_namespace_spec(spec), elements=runs, follows_bumps=follows_bumps
    )


def decode_register(message: pb.RegisterNamespaceRequest) -> tuple[bytes, NamespaceSpec, Elements]:
    """(session token, spec, elements)."""
    check_bytes("session", message.session, limits.SESSION_TOKEN_BYTES)
    return message.session, decode_namespace_spec(message.spec), _decode_elements(message)


def encode_registered(namespace_id: bytes, ranks_attached: int) -> pb.RegisterNamespaceResponse:
    return pb.RegisterNamespaceResponse(namespace=namespace_id, ranks_attached=ranks_attached)


def encode_stale_epoch(bumps: int) -> pb.RegisterNamespaceResponse:
    """Not registered: its bump counter has to be this one."""
    return pb.RegisterNamespaceResponse(bumps=bumps)


def decode_registered(message: pb.RegisterNamespaceResponse) -> tuple[bytes, int]:
    """(namespace id, ranks attached). No id: it is void, and to be registered with another bump counter."""
    if message.namespace:
        check_bytes("namespace", message.namespace, limits.NAMESPACE_ID_BYTES)
    return message.namespace, message.ranks_attached


def encode_namespace_spec(spec: NamespaceSpec) -> pb.NamespaceSpec:
    return pb.NamespaceSpec(
        identity=spec.identity,
        chunk_tokens=spec.chunk_tokens,
        groups=[_encode_group(group) for group in spec.groups],
        object_bytes={int(kind): size for kind, size in spec.object_bytes.items()},
        label=spec.label,
        tenant=spec.tenant,
        epoch=spec.epoch,
        bumps=spec.bumps,
    )


def decode_namespace_spec(message: pb.NamespaceSpec) -> NamespaceSpec:
    check_at_most("spec bytes", message.ByteSize(), limits.SPEC_BYTES_MAX)
    check_at_most("identity", len(message.identity), limits.IDENTITY_ENTRIES_MAX)
    check_at_most("groups", len(message.groups), limits.GROUPS_MAX)
    check_at_most("chunk_tokens", message.chunk_tokens, limits.CHUNK_TOKENS_MAX)
    check_text("label", message.label, limits.LABEL_BYTES_MAX)
    check_text("tenant", message.tenant, limits.TENANT_BYTES_MAX)
    check_text("epoch", message.epoch, limits.EPOCH_BYTES_MAX)
    return NamespaceSpec(
        identity=dict(message.identity),
        chunk_tokens=message.chunk_tokens,
        groups=tuple(_decode_group(index, group) for index, group in enumerate(message.groups)),
        object_bytes={_kind("object_bytes", kind): size for kind, size in sorted(message.object_bytes.items())},
        label=message.label,
        tenant=message.tenant,
        epoch=message.epoch,
        bumps=message.bumps,
    )


def _decode_elements(message: pb.RegisterNamespaceRequest) -> Elements:
    check_at_most("elements", len(message.elements), limits.ELEMENT_RUNS_MAX)
    elements: dict[Kind, tuple[ElementRun, ...]] = {}
    for index, run in enumerate(message.elements):
        field = f"elements[{index}]"
        check_text(f"{field}.dtype", run.dtype, limits.DTYPE_BYTES_MAX)
        check_at_most(f"{field}.part_bytes", run.part_bytes, limits.OBJECT_BYTES_MAX)
        check_at_most(f"{field}.parts", run.parts, limits.ELEMENT_PARTS_MAX)
        kind = _kind(f"{field}.kind", run.kind)
        elements[kind] = (*elements.get(kind, ()), ElementRun(run.dtype, run.part_bytes, run.parts))
    return elements


def _encode_group(group: GroupSpec) -> pb.Group:
    return pb.Group(
        kind=int(group.kind),
        block_tokens=group.block_tokens,
        window_tokens=group.window_tokens,
        rank_block_bytes=group.rank_block_bytes,
        replicated=group.replicated,
        layers=group.layers,
    )


def _decode_group(index: int, group: pb.Group) -> GroupSpec:
    field = f"groups[{index}]"
    check_at_most(f"{field}.rank_block_bytes", len(group.rank_block_bytes), limits.RANKS_MAX)
    check_at_most(f"{field}.layers", len(group.layers), limits.LAYERS_PER_GROUP_MAX)
    for size in group.rank_block_bytes:
        check_at_most(f"{field}.rank_block_bytes[]", size, limits.OBJECT_BYTES_MAX)
    return GroupSpec(
        kind=_kind(f"{field}.kind", group.kind),
        block_tokens=group.block_tokens,
        window_tokens=group.window_tokens,
        rank_block_bytes=tuple(group.rank_block_bytes),
        replicated=group.replicated,
        layers=tuple(group.layers),
    )


def _kind(field: str, value: int) -> Kind:
    if value not in _KINDS:
        raise bad(field, f"{value} is none of {[int(kind) for kind in Kind]}")
    return Kind(value)
