"""What operators told the daemon, kept for its next run (row I1e)."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from kvdepot.core.control import BumpCall, QuotaEntry, QuotaSubject, Switch, SwitchCall
from kvdepot.core.epochs import Epochs
from kvdepot.core.errors import ConfigError, LimitExceeded, StaleEpoch
from kvdepot.core.keys import bumped_id
from kvdepot.core.misses import MissReason
from kvdepot.core.report import SwitchesStatus
from kvdepot.server.config.set_quotas import SET_MAX
from kvdepot.server.daemon.state_file import KeptPin, OperatorState, StateFile
from kvdepot.server.depot.operators.invalidation import Invalidated

from tests.fakes.operator_control import control_over
from tests.rigs.engine_rig import DENSE, Rig, path

EMPTY = {"format": 1, "loads_off": False, "loads_off_namespaces": [], "stores_off": False, "stores_off_namespaces": []}
STATE = OperatorState(
    SwitchesStatus(True, (bytes(range(16)),), False, (bytes(16), b"x" * 16)),
    (KeptPin(bytes(16), b"", 1.5e9), KeptPin(bytes(16), b"k" * 16, 2e9)),
    (
        QuotaEntry(QuotaSubject("a", None, "ram"), 1 << 40, by_operator=True),
        QuotaEntry(QuotaSubject("*", "*", "*"), None, by_operator=True),
    ),
    Epochs(3, (bytes(16), b"y" * 16)),
)


def test_a_state_comes_back_equal_and_no_file_is_none(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "state")
    assert file.read() == OperatorState()
    assert asyncio.run(file.write(STATE)) == ""
    assert file.read() == STATE
    assert [one.name for one in tmp_path.iterdir()] == ["state"]


def test_a_state_says_since_when_switches_are_off_unless_the_clock_was_set_back(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "state")
    asyncio.run(file.write(OperatorState(SwitchesStatus(loads_off=True, loads_off_seconds=720.0))))
    switches = file.read().switches
    assert 720.0 <= switches.loads_off_seconds < 780.0
    assert switches.stores_off_seconds == 0.0
    for at, seconds in ((None, 0.0), (1e12, 0.0)):
        (tmp_path / "state").write_text(json.dumps(EMPTY | {"loads_off_at": at}))
        assert file.read().switches.loads_off_seconds == seconds


@pytest.mark.requirement("I1e")
@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        json.dumps({"format": 2}),
        json.dumps({"format": 1}),
        json.dumps(
            {"format": 1, "loads_off": 1, "loads_off_namespaces": [], "stores_off": 0, "stores_off_namespaces": []}
        ),
        json.dumps(
            {
                "format": 1,
                "loads_off": True,
                "loads_off_namespaces": ["00"],
                "stores_off": True,
                "stores_off_namespaces": [],
            }
        ),
        *(
            json.dumps(EMPTY | {"quotas": [{"tenant": "a", "namespace": None, "tier": "ram", "capacity": 1} | wrong]})
            for wrong in ({"tenant": None}, {"namespace": 1}, {"tier": None}, {"capacity": 0}, {"capacity": "1GiB"})
        ),
        *(
            json.dumps(EMPTY | {"epochs": {"bump": 0, "invalidated": []} | wrong})
            for wrong in ({"bump": -1}, {"bump": 1 << 32}, {"bump": "1"}, {"invalidated": ["00"]})
        ),
        *(json.dumps(EMPTY | {"loads_off_at": wrong}) for wrong in ("noon", "", float("nan"))),
        " " * ((1 << 20) + 1),
    ],
)
def test_a_state_that_cannot_be_read_refuses_the_start(tmp_path: Path, text: str) -> None:
    (tmp_path / "state").write_text(text)
    with pytest.raises(ConfigError, match="delete it"):
        StateFile(tmp_path / "state").read()


@pytest.mark.requirement("I1e")
def test_a_switch_is_restored_by_the_next_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rig, file = Rig(), StateFile(tmp_path / "state")
    rig.attach().store(path("p", 1))
    call = SwitchCall(Switch.LOADS, on=False, namespace_id=DENSE.namespace_id())
    assert asyncio.run(control_over(rig, file).switch(call)).not_persisted == ""
    rig.crash()
    control_over(rig, file).restore()
    assert rig.depot.switches.off(Switch.LOADS, DENSE.namespace_id())
    assert f"restored switch: loads off for {DENSE.namespace_id().hex()}" in caplog.text
    rig.sum_all()
    assert rig.attach().locate(path("p", 1)).boundary_tokens == 0
    assert rig.counter("misses.loads_off") == 1


@pytest.mark.requirement("I8")
def test_a_bump_is_kept_before_it_is_done_and_restored_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a run that is killed in between could give a counter again under which it has stored."""
    rig, file = Rig(), StateFile(tmp_path / "state")
    rig.attach()
    done_at_writes: list[Epochs] = []
    write = StateFile.write

    async def noting(self: StateFile, state: OperatorState) -> str:
        done_at_writes.append(rig.depot.invalidation.epochs)
        return await write(self, state)

    monkeypatch.setattr(StateFile, "write", noting)
    reply = asyncio.run(control_over(rig, file).bump(BumpCall()))
    assert (reply.epochs, reply.namespaces, reply.not_persisted) == (Epochs(1), 1, "")
    assert done_at_writes[0] == Epochs()
    assert file.read().epochs == Epochs(1)
    rig.crash()
    control_over(rig, file).restore()
    with pytest.raises(StaleEpoch):
        rig.attach()


@pytest.mark.requirement("I8")
def test_bumps_and_switches_side_by_side_are_all_kept(tmp_path: Path) -> None:
    rig, file = Rig(), StateFile(tmp_path / "state")
    control, void = control_over(rig, file), DENSE.namespace_id()
    rig.attach()

    async def run() -> None:
        off = SwitchCall(Switch.LOADS, on=False, namespace_id=void)
        await control.switch(off)
        await asyncio.gather(
            control.bump(BumpCall()), control.bump(BumpCall()), control.switch(SwitchCall(Switch.STORES, on=False))
        )

    asyncio.run(run())
    kept = file.read()
    assert (kept.epochs, rig.depot.invalidation.epochs) == (Epochs(2), Epochs(2))
    assert kept.switches.loads_off_namespaces == (bumped_id(void, 2),)
    assert kept.switches.stores_off


@pytest.mark.requirement("I1e")
@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("bumps", [0, 1, 5_000])
def test_loads_stay_off_for_what_comes_after_a_namespace_that_nobody_has_registered(
    tmp_path: Path, everywhere: bool, bumps: int
) -> None:
    rig, file = Rig(), StateFile(tmp_path / "state")
    spec, control = replace(DENSE, bumps=bumps), control_over(rig, file)

    async def switch_off() -> None:
        if bumps:
            await control.bump(BumpCall(to=bumps))
        rig.attach(spec=spec)
        await control.switch(SwitchCall(Switch.LOADS, on=False, namespace_id=spec.namespace_id()))

    async def bump() -> None:
        control = control_over(rig, file)
        control.restore()
        await control.bump(BumpCall(b"" if everywhere else spec.namespace_id()))
        heir = replace(DENSE, bumps=bumps + 1)
        client = rig.attach(spec=heir)
        client.store(path("p", 1))
        assert client.locate(path("p", 1)).miss == MissReason.LOADS_OFF
        await control.close(60.0)
        assert file.read().switches.loads_off_namespaces == (heir.namespace_id(),)

    asyncio.run(switch_off())
    rig.crash()
    asyncio.run(bump())


@pytest.mark.requirement("I8")
def test_of_bumps_side_by_side_each_is_kept_before_it_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, file = Rig(), StateFile(tmp_path / "state")
    control, begin = control_over(rig, file), rig.depot.invalidation.begin
    done_and_kept: list[tuple[int, int]] = []

    def noting(epochs: Epochs) -> Invalidated:
        done_and_kept.append((epochs.bump, file.read().epochs.bump))
        return begin(epochs)

    monkeypatch.setattr(rig.depot.invalidation, "begin", noting)

    async def run() -> None:
        await asyncio.gather(*(control.bump(BumpCall()) for _ in range(3)))

    asyncio.run(run())
    assert done_and_kept == [(1, 1), (2, 2), (3, 3)]


def test_a_bump_that_cannot_be_kept_takes_effect_and_says_so(tmp_path: Path) -> None:
    rig = Rig()
    control = control_over(rig, StateFile(tmp_path / "gone" / "state"))
    client = rig.attach()
    assert "not saved for the next run" in asyncio.run(control.bump(BumpCall(client.namespace))).not_persisted
    assert rig.depot.invalidation.covers(client.namespace)


@pytest.mark.requirement("I8")
def test_quotas_that_are_set_have_a_bound_and_change_one_by_one(tmp_path: Path) -> None:
    async def run() -> None:
        for number in range(SET_MAX):
            await control.set_quota(QuotaEntry(QuotaSubject(f"t{number}"), 1 << 20))
        with pytest.raises(LimitExceeded, match="quotas that are set"):
            await control.set_quota(QuotaEntry(QuotaSubject("one-more"), 1 << 20))
        await control.set_quota(QuotaEntry(QuotaSubject("t0"), None))
        await control.delete_quota(QuotaSubject("t1"))

    control, file = control_over(Rig(), StateFile(tmp_path / "state")), StateFile(tmp_path / "state")
    asyncio.run(run())
    kept = file.read().quotas
    assert (len(kept), kept[0], kept[1].subject.tenant) == (
        SET_MAX - 1,
        QuotaEntry(QuotaSubject("t0"), None, by_operator=True),
        "t2",
    )


@pytest.mark.requirement("I1e")
def test_a_state_that_can_never_be_written_is_told_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    control_over(Rig(), StateFile(tmp_path / "state")).restore()
    assert "not writable" not in caplog.text
    control_over(Rig(), StateFile(tmp_path / "gone" / "state")).restore()
    assert (
        f"state file is not writable: {tmp_path}/gone/state; operator settings will be lost on restart" in caplog.text
    )


def test_a_switch_that_cannot_be_kept_takes_effect_and_says_so(tmp_path: Path) -> None:
    rig, file = Rig(), StateFile(tmp_path / "gone" / "state")
    reply = asyncio.run(control_over(rig, file).switch(SwitchCall(Switch.STORES, on=False)))
    assert "not saved for the next run" in reply.not_persisted
    assert rig.counter("failed_state_writes") == 1
    assert rig.depot.switches.off(Switch.STORES, DENSE.namespace_id())
