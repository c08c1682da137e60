"""What operators tell a daemon, over an engine without one."""

from __future__ import annotations

import logging
from pathlib import Path

from kvdepot.server.config.config import Config
from kvdepot.server.config.operators import resolve
from kvdepot.server.config.schema import Tables
from kvdepot.server.config.set_quotas import SetQuotas
from kvdepot.server.daemon.control import Control
from kvdepot.server.daemon.state_file import StateFile
from kvdepot.server.platform.audit_log import AuditLog
from kvdepot.server.platform.peers import Peer
from kvdepot.server.rpc.operator_calls import OperatorCalls

from tests.rigs.engine_rig import Rig


async def _nothing() -> None:
    pass


def calls_of_anybody() -> OperatorCalls:
    """Let every connection be root's."""
    log = logging.getLogger("tests.operators")
    return OperatorCalls(lambda _: Peer(1, 0, 0, frozenset()), resolve((), ()), AuditLog("", log, lambda _: None))


def control_over(rig: Rig, file: StateFile) -> Control:
    config = Config("none", Tables(), 1 << 30, Path("/none"))
    return Control(
        rig.depot,
        file,
        config,
        reread=None,
        configure=lambda _: None,
        readiness_changed=_nothing,
        quotas=SetQuotas(),
        log=logging.getLogger("tests.operators"),
    )
