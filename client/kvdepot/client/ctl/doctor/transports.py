"""Check of what NIXL can use on this host, for daemons that lend or read over it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from kvdepot.client.ctl.doctor import ucx_probe
from kvdepot.client.ctl.doctor.findings import HOST, Check
from kvdepot.client.ctl.doctor.programs import Program
from kvdepot.core.nixl_packages import INSTALL, PACKAGES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvdepot.client.ctl.doctor.findings import Finding

PROBE: Final = (sys.executable, "-I", ucx_probe.__file__, *PACKAGES)
_SECONDS: Final = 20.0
_CHECK: Final = Check("NIXL", HOST)
_BETWEEN_HOSTS: Final = ("tcp/", "rc", "dc", "ud", "srd")
_RDMA: Final = _BETWEEN_HOSTS[1:]
"""How names of transports begin: of InfiniBand and RoCE, and of EFA."""


def check_transports(
    daemon: Mapping[str, str] | None, command: Sequence[str] = PROBE, seconds: float = _SECONDS
) -> Finding:
    """`daemon`: the daemon's environment, as far as it can be read, whose variables of UCX count."""
    variables = {name: value for name, value in (daemon or {}).items() if name.startswith("UCX_")}
    ended = Program(command, {**os.environ, **variables}).wait(time.monotonic() + seconds)
    if ended is None:
        return _CHECK.fail(f"UCX did not start within {seconds:g} s", "see whether a network device hangs: `dmesg`")
    if ended.code:
        reason = (ended.errors.strip().splitlines() or [f"exit status {ended.code}"])[-1]
        return _CHECK.fail(f"UCX cannot be asked: {reason}", INSTALL)
    found: list[str] | None = ended.parsed()
    if not isinstance(found, list):
        return _CHECK.fail(f"UCX cannot be asked: the answer is {ended.output.strip()[:80]!r}", INSTALL)
    shown = f"UCX has {', '.join(found) or 'no transports'}"
    if any(one.startswith(_RDMA) for one in found):
        return _CHECK.ok(shown)
    if any(one.startswith(_BETWEEN_HOSTS) for one in found):
        return _CHECK.warn(
            f"{shown}: without RDMA it is about as fast as the stream, which is encrypted",
            'lane = "stream"; or give the daemon the RDMA devices (PrivateDevices=no)',
        )
    return _CHECK.fail(
        f"{shown}: none of them reaches another host", "unset UCX_TLS, or name a network's transport in it"
    )
