"""Tenants: an engine reaches its own namespaces alone, and cannot find out what others have (S2, S7)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvdepot.core.calls import AcquireCall, Kind, LocateCall, ReserveCall
from kvdepot.core.epochs import Epochs
from kvdepot.core.errors import EngineIdInUse, NotReady, PermissionDenied, UnknownNamespace
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.misses import MissReason
from kvdepot.server.depot.types import Membership, Owner, TierConfig

from tests.rigs.engine_rig import CHUNK, DENSE, Client, Rig, path, process, u32

A, B = Owner(1001, tenant="a"), Owner(1002, tenant="b")
OF_A, OF_B = replace(DENSE, tenant="a"), replace(DENSE, tenant="b")
KEYS = path("p", 3)


def refusal(rig: Rig, client: Client, spec: NamespaceSpec) -> str:
    with pytest.raises(PermissionDenied) as refused:
        rig.depot.register_namespace(client.session, spec)
    return str(refused.value)


def unknown(client: Client, namespace: bytes) -> list[str]:
    """Return what each call is told that names the namespace."""
    depot, session, keys = client.rig.depot, client.session, b"".join(KEYS)
    texts = []
    for call in (
        lambda: depot.locate(LocateCall(session, namespace, keys, 1 << 30), lambda _: None),
        lambda: depot.acquire(AcquireCall(session, 1, namespace, keys, bytes([Kind.ATTENTION] * 3)), lambda _: None),
        lambda: depot.reserve(
            ReserveCall(session, 2, namespace, KEYS[0], bytes(16), bytes([Kind.ATTENTION]), u32(CHUNK))
        ),
    ):
        with pytest.raises(UnknownNamespace) as refused:
            call()
        texts.append(str(refused.value).replace(namespace.hex(), "NAMESPACE"))
    return texts


@pytest.mark.requirement("S2")
@pytest.mark.parametrize("tenant", ["", "a", "c"])
def test_a_spec_of_another_tenant_is_refused(tenant: str) -> None:
    rig = Rig()
    client = rig.attach(spec=OF_B, owner=B)
    text = refusal(rig, client, replace(DENSE, tenant=tenant))
    assert text == (
        f'uid 1002 is in tenant \'b\', and the namespace says {tenant!r}; set "tenant": "b" in '
        "kv_connector_extra_config"
    )


@pytest.mark.requirement("S7")
def test_the_refusal_does_not_depend_on_what_the_other_tenant_has() -> None:
    rig = Rig()
    client = rig.attach("b", 11, spec=OF_B, owner=B)
    before = refusal(rig, client, OF_A), unknown(client, OF_A.namespace_id())
    rig.attach("a", 10, spec=OF_A, owner=A).store(KEYS)
    rig.depot.invalidation.begin(Epochs(0, (OF_A.namespace_id(),)))
    assert (refusal(rig, client, OF_A), unknown(client, OF_A.namespace_id())) == before
    assert unknown(client, replace(DENSE, tenant="never").namespace_id()) == before[1]


@pytest.mark.requirement("S7", "I8")
def test_adopted_objects_stay_with_their_tenant() -> None:
    rig = Rig()
    rig.attach("a", 10, spec=OF_A, owner=A).store(KEYS)
    rig.sum_all()
    rig.crash()
    theirs = rig.attach("b", 11, spec=OF_B, owner=B)
    rig.sum_all()
    assert theirs.locate(KEYS).boundary_tokens == 0
    assert refusal(rig, theirs, OF_A)
    assert rig.attach("a", 10, spec=OF_A, owner=A).locate(KEYS).boundary_tokens == 3 * CHUNK


@pytest.mark.requirement("S7")
def test_the_reason_of_a_miss_is_the_same_whether_or_not_another_tenant_has_the_chunk() -> None:
    def reason(*, theirs: bool, shared: bool) -> str:
        rig = Rig(shared=TierConfig() if shared else None)
        if theirs:
            rig.attach("a", 10, spec=OF_A, owner=A).store(KEYS)
        client = rig.attach("b", 11, spec=OF_B, owner=B)
        answers = client.locate_later(KEYS, wait_seconds=1.0)
        if shared:
            rig.shared.run()
        (reply,) = answers
        return reply.miss

    assert reason(theirs=True, shared=False) == reason(theirs=False, shared=False) == MissReason.UNKNOWN
    assert reason(theirs=True, shared=True) == reason(theirs=False, shared=True) == MissReason.PROBE_ABSENT


@pytest.mark.requirement("S7")
def test_another_tenant_does_not_hide_what_the_own_tenant_has() -> None:
    rig = Rig()
    rig.attach("a", 10, spec=OF_A, owner=A).store(KEYS)
    rig.attach("b", 11, spec=replace(OF_B, identity={"model": '"other"'}), owner=B).store(KEYS)
    assert rig.attach("b2", 12, spec=OF_B, owner=B).locate(KEYS).miss == MissReason.OTHER_NAMESPACE


@pytest.mark.requirement("S2")
def test_a_process_in_another_tenant_does_not_join_an_engine_of_its_user() -> None:
    """Its groups put it there."""
    rig = Rig()
    first, second = Owner(1001, tenant="a"), Owner(1001, tenant="b")
    rig.depot.attach(process(10), Membership("e", scheduler=True, rank=0, world_size=2, owner=first))
    with pytest.raises(EngineIdInUse, match="uid 1001 has an engine with this id in another tenant"):
        rig.depot.attach(process(11), Membership("e", scheduler=False, rank=1, world_size=2, owner=second))
    rig.depot.attach(process(11), Membership("e", scheduler=False, rank=1, world_size=2, owner=first))


@pytest.mark.requirement("S2", "I8")
def test_a_process_in_another_tenant_does_not_join_an_adopted_engine_of_its_user() -> None:
    """The tables know the user of a session, and not its tenant."""
    rig = Rig()
    first, second = Owner(1001, tenant="a"), Owner(1001, tenant="b")
    rig.depot.attach(process(10), Membership("e", scheduler=True, rank=0, world_size=2, owner=first))
    rig.crash()
    with pytest.raises(NotReady, match="tenant is not known until a process of it attaches again"):
        rig.depot.attach(process(11), Membership("e", scheduler=False, rank=1, world_size=2, owner=second))
    rig.depot.attach(process(10), Membership("e", scheduler=True, rank=0, world_size=2, owner=first))
    with pytest.raises(EngineIdInUse, match="uid 1001 has an engine with this id in another tenant"):
        rig.depot.attach(process(11), Membership("e", scheduler=False, rank=1, world_size=2, owner=second))
    rig.depot.attach(process(12), Membership("e", scheduler=False, rank=1, world_size=2, owner=first))


@pytest.mark.requirement("S2", "I8")
def test_a_proxy_joins_an_adopted_engine_if_its_client_was_in_it() -> None:
    rig, owner = Rig(), Owner(1001, tenant="a")
    rig.depot.attach(process(10), Membership("e", scheduler=True, rank=0, world_size=1, owner=owner))
    rig.crash()
    member = Membership("e", scheduler=True, rank=0, world_size=1, owner=owner)
    rig.depot.attach(process(20), member, process(10))
    (session,) = {one.session for one in rig.depot._sessions.attachments.values()}
    assert session.owner == owner


@pytest.mark.requirement("S2", "I8")
def test_a_process_in_another_pid_namespace_does_not_join_an_adopted_engine() -> None:
    rig = Rig()
    for namespace in (0, 7):
        member = Membership("e", scheduler=True, rank=0, world_size=2, owner=Owner(1001, namespace))
        rig.depot.attach(process(10 + namespace), member)
    rig.crash()
    rank = Membership("e", scheduler=False, rank=1, world_size=2, owner=Owner(1001, 7))
    rig.depot.attach(process(20), rank)
    sessions = rig.depot._sessions.by_slot.values()
    assert [sorted(a.process.pid for a in one.attachments.values()) for one in sessions] == [[10], [17, 20]]


@pytest.mark.requirement("S2", "I8")
def test_an_adopted_engine_gets_the_tenant_that_the_configuration_gives_its_user_now() -> None:
    rig = Rig()
    rig.attach("e", 10, spec=DENSE, owner=Owner(1001)).store(KEYS)
    rig.sum_all()
    rig.crash()
    client = rig.attach("e", 10, spec=OF_A, owner=A)
    rig.sum_all()
    assert client.locate(KEYS).boundary_tokens == 0
    assert refusal(rig, client, DENSE)
