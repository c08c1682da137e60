"""`kvdepotctl size`: how much room a model's prompts take, before an engine runs. It needs no daemon."""

from __future__ import annotations

import re
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from kvdepot.client.ctl.as_json import echo_record
from kvdepot.client.ctl.commands.options import json_option
from kvdepot.client.ctl.doctor.host import Host
from kvdepot.client.ctl.sizing.architectures import AUTO, ELEMENT_BYTES, describe_model
from kvdepot.client.ctl.sizing.flags import engine_flags
from kvdepot.client.ctl.sizing.geometry import Engine, vllm_defaults
from kvdepot.client.ctl.sizing.model_files import read_model_config
from kvdepot.client.ctl.sizing.sizes import Load, Sizes, sizes
from kvdepot.client.ctl.texts import say
from kvdepot.core.units import format_size, size_text

if TYPE_CHECKING:
    from kvdepot.client.ctl.sizing.architectures import Model

_TOKENS: Final = re.compile(r"([0-9]{1,9})([km]?)", re.IGNORECASE)
_FACTORS: Final = {"": 1, "k": 1024, "m": 1 << 20}


class TokensType(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    """A count of tokens: `32768` or `32k`."""

    name = "tokens"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = _TOKENS.fullmatch(str(value))
        if match is None:
            self.fail(f"{value!r} is no count of tokens: write 32768, or 32k", param, ctx)
        return int(match[1]) * _FACTORS[match[2].lower()]


GPU: Final = "gpu"
CPU: Final = "cpu"
_POSITIVE: Final = click.IntRange(min=1)
_DTYPES: Final = (AUTO, *(name for name in ELEMENT_BYTES if not name.startswith("fp8")))
_CACHE_DTYPES: Final = (AUTO, *(name for name in ELEMENT_BYTES if name != "float32"))
"""vLLM's CacheDType: only a model's own type can be float32."""


@click.command()
@click.argument("model", metavar="MODEL")
@click.option("--tp", "ranks", type=_POSITIVE, default=1, show_default=True, help="Tensor parallel ranks.")
@click.option("--tokens", type=TokensType(), default="32k", show_default=True, help="Tokens of a session.")
@click.option("--sessions", type=_POSITIVE, default=1, show_default=True, help="Sessions to keep.")
@click.option("--turns", type=_POSITIVE, default=1, show_default=True, help="Prompts of a session.")
@click.option("--dtype", type=click.Choice(_DTYPES), default=AUTO, show_default=True, help="Of the model.")
@click.option(
    "--kv-cache-dtype", type=click.Choice(_CACHE_DTYPES), default=AUTO, show_default=True,
    help="Of keys and values.",
)  # fmt: skip
@click.option(
    "--state-dtype", type=click.Choice(_DTYPES), default=AUTO, show_default=True,
    help="Of recurrent states: vLLM's mamba_ssm_cache_dtype.",
)  # fmt: skip
@click.option("--device", type=click.Choice([GPU, CPU]), help="vLLM's. [default: gpu if this host has one]")
@click.option("--block-size", type=_POSITIVE, help="vLLM's block. [default: 16; on CPUs 128, except for MLA]")
@click.option("--chunk-tokens", type=_POSITIVE, help="kvdepot's setting. [default: as the connector chooses]")
@click.option(
    "--retention", type=TokensType(), default=0, show_default=True, help="vLLM's prefix_cache_retention_interval."
)
@json_option
def size(
    model: str, ranks: int, tokens: int, sessions: int, turns: int, dtype: str, kv_cache_dtype: str, state_dtype: str,
    device: str | None, block_size: int | None, chunk_tokens: int | None, retention: int, as_json: bool,
) -> int:  # fmt: skip
    """Compute the room that a model needs.

    MODEL is a folder with a config.json, such a file, or an id in Hugging Face's cache on this host. Prints the bytes
    of a chunk, of a session and of all sessions, capacities for the configuration, and the flags of `vllm serve`. No
    daemon is asked.
    """
    config, file = read_model_config(model)
    described = describe_model(config)
    on_gpus = bool(Host().gpu_devices()) if device is None else device == GPU
    block_default, states = vllm_defaults(described, on_gpus=on_gpus)
    states = states if state_dtype == AUTO else state_dtype
    engine = Engine(ranks, dtype, kv_cache_dtype, states, block_size or block_default, chunk_tokens, retention)
    load = Load(tokens, sessions, turns)
    found = sizes(described, engine, load)
    flags = engine_flags(described, engine)
    if as_json:
        record = _record(described, str(file), engine, load, found) | {"device": GPU if on_gpus else CPU}
        echo_record(record | {"vllm_flags": list(map(str, flags))})
    else:
        serve = [f"vllm serve {shlex.quote(_served(model))}", *map(str, flags)]
        lines = _lines(described, engine, load, found)
        lines.insert(1, f"device      {_device_line(on_gpus, asked=device is not None)}")
        say("\n".join([*lines, "", " \\\n  ".join(serve)]))
    return 0


def _device_line(on_gpus: bool, *, asked: bool) -> str:
    if asked:
        return "GPUs" if on_gpus else "CPUs"
    return "GPUs, as this host has" if on_gpus else "CPUs: this host has no GPU; --device gpu is for others"


def _served(model: str) -> str:
    """Return the model as vLLM takes it: a folder or an id."""
    path = Path(model)
    return str(path.parent) if path.is_file() else model


def _record(model: Model, file: str, engine: Engine, load: Load, found: Sizes) -> dict[str, Any]:
    engine_record = asdict(engine)
    del engine_record["block_tokens"], engine_record["chunk_tokens"]  # the result has what they become
    return {"config": file, "architecture": model.architecture} | engine_record | asdict(load) | asdict(found)


def _lines(model: Model, engine: Engine, load: Load, found: Sizes) -> list[str]:
    parts = [f"attention {size_text(found.attention_bytes)}"] if found.attention_bytes else []
    parts += [f"windows {size_text(found.window_bytes)}"] if found.window_bytes else []
    count = found.session_checkpoints
    checkpoints = f", {count} checkpoint{'s' * (count != 1)}" if model.is_hybrid else ""
    stored = f"{found.session_chunks} chunks{checkpoints}, {size_text(found.session_bytes)}"
    ranks = f"{engine.ranks} rank{'s' * (engine.ranks != 1)}"
    lines = [
        f"{model.architecture}: {ranks}, blocks of {found.block_tokens} tokens",
        f"chunk       {found.chunk_tokens} tokens: {', '.join(parts)}",
        *([f"checkpoint  {size_text(found.state_bytes)}"] if model.is_hybrid else []),
        f"session     {load.tokens} tokens: {stored}",
        f"load        {size_text(found.load_bytes)}, to continue a session from its last chunk",
        f"all         {load.sessions} session{'s' * (load.sessions != 1)}: {size_text(found.all_bytes)}",
        "",
        "[ram]",
        f'capacity = "{format_size(found.ram_capacity_bytes)}"',
        "",
        "[[tier]]  # optional: a disk with room for the same sessions",
        'name = "nvme"',
        'kind = "disk"',
        'path = "/var/lib/kvdepot"',
        f'capacity = "{format_size(found.tier_capacity_bytes)}"',
    ]
    if not found.session_chunks:
        lines.insert(3, f"            shorter than a chunk of {found.chunk_tokens} tokens: nothing is stored")
    return lines
