"""Checks of what engines need: a version of vLLM that is known, and hashes that every process has alike."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvdepot.client.ctl.doctor.findings import ENGINES, Check
from kvdepot.client.vllm.base.versions import check_version
from kvdepot.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvdepot.client.ctl.doctor.findings import Finding
    from kvdepot.client.ctl.doctor.host import Host
    from kvdepot.core.report import NamespaceStatus, SessionStatus

SEED: Final = "PYTHONHASHSEED"
_ALGORITHM, _HASH_SEED = "hashes.algorithm", "hashes.seed"
"""Of a namespace's identity (client.vllm.identity)."""
_VERSION: Final = re.compile(r"^__version__\b[^'\"\n]*['\"]([^'\"]+)['\"]", re.MULTILINE)
_FIX: Final = (
    f"set {SEED} to the same number for every engine, or prefix_caching_hash_algo to sha256 and leave it unset"
)


def vllm_version(module: str = "vllm") -> str | None:
    """As its `_version.py` says: importing it would take a minute. None: it is not installed; empty: not found out."""
    spec = find_spec(module)
    if spec is None:
        return None
    for folder in spec.submodule_search_locations or ():
        file = Path(folder, "_version.py")
        if file.is_file() and (match := _VERSION.search(file.read_text(errors="replace"))):
            return match[1]
    return ""


def check_vllm(version: str | None) -> Finding:
    check = Check("vLLM", ENGINES)
    if version is None:
        return check.skipped("it is not installed next to kvdepotctl")
    if not version:
        return check.skipped("it does not say its version")
    try:
        check_version(version)
    except ConfigError as error:
        return check.fail(f"{version}: the connector will not start", error.advice or "")
    return check.ok(version)


def check_hashes(host: Host, sessions: Iterable[SessionStatus], namespaces: Sequence[NamespaceStatus]) -> Finding:
    """docs/vllm.md: the sha256 ones are alike anyway; xxhash needs the same seed everywhere, and is refused without."""
    check = Check("hash determinism", ENGINES)
    for label in sorted({one.label for one in namespaces}):
        hashes = {
            (one.identity.get(_ALGORITHM, ""), one.identity.get(_HASH_SEED, ""))
            for one in namespaces
            if one.label == label and _ALGORITHM in one.identity
        }
        if len(hashes) > 1:
            shown = "; ".join(f"{algorithm} with seed {seed}" for algorithm, seed in sorted(hashes))
            return check.warn(f"engines of {label} hash differently, and share nothing: {shown}", _FIX)
    pids = {pid for session in sessions for pid in session.pids}
    found = {pid: environment for pid in pids if (environment := host.environment_of(pid)) is not None}
    seeds = {environment.get(SEED, "unset") for environment in found.values()}
    if len(seeds) > 1:
        return check.warn(f"{SEED} of attached engines: {', '.join(sorted(seeds))}; these share nothing", _FIX)
    if seeds:
        return check.ok(f"{SEED} is {seeds.pop()} for all {len(found)} engine processes that can be looked into")
    own = host.environment.get(SEED, "")
    if own in ("", "random"):
        return check.ok(f"no engine is attached; {SEED} is not fixed here: right for sha256, refused for xxhash")
    return check.ok(f"no engine is attached; {SEED} is {own} here: right where every engine has it")
