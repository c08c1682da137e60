"""Checks of a running engine's flags, by the rules of the connector and the flags of `kvdepotctl size`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from kvdepot.client.ctl.doctor.findings import ENGINES, Check, Finding, Outcome
from kvdepot.client.ctl.sizing.architectures import AUTO, describe_model
from kvdepot.client.ctl.sizing.flags import (
    BATCHED_TOKENS,
    CACHING,
    RETENTION,
    TRANSFER,
    Flag,
    engine_flags,
    transfer_flag,
)
from kvdepot.client.ctl.sizing.geometry import BLOCK_TOKENS, Engine, check_retention
from kvdepot.client.ctl.sizing.model_files import View, read_model_config
from kvdepot.client.vllm.base.engine_rules import (
    CONNECTOR,
    FAILURE_POLICY,
    check_hash_algorithm,
    check_parallel,
    check_role,
)
from kvdepot.client.vllm.base.settings import Settings, parse_settings
from kvdepot.client.vllm.identity.speculation import LOOKAHEAD, REFUSED
from kvdepot.core.errors import ConfigError, InvalidArgument, KvDepotError

if TYPE_CHECKING:
    from kvdepot.client.ctl.doctor.engine_process import EngineProcess
    from kvdepot.client.endpoint import Endpoint

_SEVERAL: Final = ("WeightedMultiConnector", "MultiConnector")
_NO_ENVIRONMENT: Final = "the engine's environment may not be read"
_FIX: Final = f"start it with {transfer_flag()}"


def check_flags(process: EngineProcess, endpoint: Endpoint) -> Iterator[Finding]:
    """Yield a finding for each rule. `endpoint`: that of the daemon that is examined."""
    if process.unread:
        yield Check("flags of the engine", ENGINES).skipped(process.unread)
        return
    yield from _check_connector(process, endpoint)
    yield _ruled(Check("ranks of the engine", ENGINES), "as served", lambda: check_parallel(_parallel(process)))
    yield _check_hashes(process)
    yield _check_caching(process)
    yield _check_speculation(process)
    yield _check_plugins(process)
    yield from _check_model(process)


def _check_connector(process: EngineProcess, endpoint: Endpoint) -> Iterator[Finding]:
    check = Check("connector", ENGINES)
    try:
        transfer = process.settings(TRANSFER)
    except InvalidArgument as error:
        yield check.fail(str(error), _FIX)
        return
    if transfer is None:
        yield check.fail("--kv-transfer-config is not set: this engine has no connector", _FIX)
        return
    name = transfer.get("kv_connector")
    if name in _SEVERAL:
        yield check.skipped(f"{name}: the settings of its children are not checked")
        return
    if name != CONNECTOR:
        yield check.fail(f"kv_connector is {name!r}", f"set kv_connector to {CONNECTOR!r}")
        return
    yield check.ok(CONNECTOR)
    policy = transfer.get("kv_load_failure_policy", "fail")
    failures = Check("failed loads", ENGINES)
    yield (
        failures.ok(f"kv_load_failure_policy is {policy!r}")
        if policy == FAILURE_POLICY
        else failures.fail(
            f"kv_load_failure_policy is {policy!r}: this engine stores and never loads",
            f"set kv_load_failure_policy to {FAILURE_POLICY!r}",
        )
    )
    yield from _check_settings(process, transfer, endpoint)


def _check_settings(process: EngineProcess, transfer: dict[str, Any], endpoint: Endpoint) -> Iterator[Finding]:
    check = Check("connector settings", ENGINES)
    try:
        settings: Settings = parse_settings(transfer.get("kv_connector_extra_config") or {}, process.environment)
        check_role(str(transfer.get("kv_role")), settings.load_weight)
    except ConfigError as error:
        yield check.fail(error.reason, error.advice or "correct it")
        return
    yield check.ok("known, and within their bounds")
    daemon = Check("daemon of the engine", ENGINES)
    named = "endpoint" in (transfer.get("kv_connector_extra_config") or {})
    if settings.endpoint.path == endpoint.path:
        yield daemon.ok(f"unix://{endpoint.path}")
    elif named or process.environment_known:
        yield daemon.warn(
            f"the engine uses unix://{settings.endpoint.path}, and this is unix://{endpoint.path}",
            "name one socket for both: endpoint in kv_connector_extra_config, or KVDEPOT_ENDPOINT",
        )
    else:
        yield daemon.skipped(_NO_ENVIRONMENT)


def _ruled(check: Check, good: str, rule: Callable[[], None]) -> Finding:
    """Return the finding of a rule that raises ConfigError."""
    try:
        rule()
    except ConfigError as error:
        return check.fail(f"{error.key}: {error.reason}", error.advice or "")
    return check.ok(good)


def _parallel(process: EngineProcess) -> SimpleNamespace:
    return SimpleNamespace(
        nnodes=process.number("nnodes", 1),
        enable_elastic_ep=process.is_on("enable-elastic-ep", False),
        enable_fault_tolerance=process.is_on("enable-fault-tolerance", False),
        decode_context_parallel_size=process.number("decode-context-parallel-size", 1),
        prefill_context_parallel_size=process.number("prefill-context-parallel-size", 1),
    )


def _check_hashes(process: EngineProcess) -> Finding:
    check = Check("prefix hashes", ENGINES)
    algorithm = process.flags.get("prefix-caching-hash-algo", "sha256")
    seed = process.environment.get("PYTHONHASHSEED", "")
    found = _ruled(check, "equal in all processes", lambda: check_hash_algorithm(algorithm, seed))
    return found if process.environment_known or found.outcome is Outcome.OK else check.skipped(_NO_ENVIRONMENT)


def _check_caching(process: EngineProcess) -> Finding:
    check = Check("prefix caching", ENGINES)
    if process.is_on(CACHING, True):
        return check.ok("on")
    return check.fail("prefix caching is off: vLLM then hashes no blocks, and nothing is stored", f"set --{CACHING}")


def _check_speculation(process: EngineProcess) -> Finding:
    check = Check("speculative decoding", ENGINES)
    try:
        config = process.settings("speculative-config")
    except InvalidArgument as error:
        return check.fail(str(error), "correct it")
    method = str((config or {}).get("method", ""))
    if not method:
        return check.ok("off" if config is None else "its method follows from the drafter: the engine's log has it")
    if method in REFUSED:
        return check.fail(f"{method}: {REFUSED[method]}", "switch speculative decoding off")
    if method not in LOOKAHEAD:
        return check.skipped(f"{method}: vLLM may call it by another name: the engine's log has it")
    return check.ok(method)


def _check_plugins(process: EngineProcess) -> Finding:
    check = Check("plugin", ENGINES)
    if not process.environment_known:
        return check.skipped(_NO_ENVIRONMENT)
    named = process.environment.get("VLLM_PLUGINS")
    if named is not None and "kvdepot" not in named.split(","):
        return check.fail(f"VLLM_PLUGINS is {named!r}: vLLM does not find the connector", "add kvdepot to VLLM_PLUGINS")
    return check.ok("vLLM may load it")


def _check_model(process: EngineProcess) -> Iterator[Finding]:
    """Yield one finding for each flag that the model needs."""
    check = Check("flags of the model", ENGINES)
    try:
        config, _ = read_model_config(process.model, View(process.environment, process.root, process.directory))
        model = describe_model(config)
    except KvDepotError as error:
        yield check.skipped(str(error))
        return
    engine = _engine(process)
    try:
        check_retention(model, engine)
    except InvalidArgument as error:
        yield Check(RETENTION, ENGINES).fail(error.message, error.advice)
        return
    if not model.is_hybrid:
        yield check.ok(f"{model.architecture} needs none")
        return
    try:
        flags = engine_flags(model, engine)
    except InvalidArgument as error:
        yield check.skipped(str(error))
        return
    for flag in flags:
        if flag.why and flag.name not in (TRANSFER, CACHING):
            yield _compared(flag, process.flags.get(flag.name))


def _compared(flag: Flag, given: str | None) -> Finding:
    check = Check(flag.name, ENGINES)
    if given == flag.value:
        return check.ok(given)
    if given is None or flag.name == BATCHED_TOKENS:
        said = "not set" if given is None else given
        return check.warn(f"--{flag.name} is {said}: {flag.why}", f"set {flag}")
    return check.fail(f"--{flag.name} is {given}: {flag.why}", f"set {flag}")


def _engine(process: EngineProcess) -> Engine:
    """Return how the engine serves its model. A block of its own is its own choice."""
    flags = process.flags
    return Engine(
        process.number("tensor-parallel-size", 1),
        flags.get("dtype", AUTO),
        flags.get("kv-cache-dtype", AUTO),
        flags.get("mamba-ssm-cache-dtype", AUTO),
        process.number("block-size", BLOCK_TOKENS),
        retention_tokens=process.number(RETENTION, 0),
    )
