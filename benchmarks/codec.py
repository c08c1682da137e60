"""What the codecs gain and cost: on KV and state of the toy models, and on random normal bfloat16.

KV is what the toy models (demo/toys.py) leave in the cache of transformers after random prompts, computed on
the CPU in bfloat16 and cut into objects like the connector's: per layer keys, then values, of a chunk. A state
object is the recurrent state of all linear layers after one chunk, as bfloat16. The dense toy is also taken in
float32, as the demo serves it.

One thread encodes into and decodes into memory that exists already, object by object, with the checksums that
an I/O worker takes (raw, and stored where a codec is used). A codec pays on a medium slower than the bytes it
saves divided by the seconds it costs beyond the checksum of codec none: one worker, which reads, then decodes.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a file and with -m

from kvdepot.core.objectfile import Codec, payload_sum
from kvdepot.server.io.codecs import SLICE_BYTES, decode, encode
from kvdepot.server.storage.base import IoOutcome

from benchmarks.report import Report, arguments, median
from demo.toys import DENSE, HYBRID, Toy, make_toy, prompt

_PROMPT_TOKENS = 2048
_OBJECT_BYTES = 4 << 20  # of random bytes
_CODECS = (Codec.LZ4, Codec.BITSHUFFLE_LZ4)

Objects = list[bytes]


def normal_bf16(size_bytes: int, seed: int) -> Objects:
    """Standard normal numbers, rounded to bfloat16."""
    draw = np.random.default_rng(seed)
    objects = []
    for _ in range(max(size_bytes // _OBJECT_BYTES, 1)):
        bits = draw.standard_normal(_OBJECT_BYTES // 2, dtype=np.float32).view(np.uint32)
        objects.append(((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes())
    return objects


class ToyModel:
    """A toy model in transformers, and what its cache holds after a prompt."""

    def __init__(self, toy: Toy, folder: Path, dtype: str) -> None:
        import torch
        import transformers

        self._torch = torch
        self._dtype = getattr(torch, dtype)
        self.chunk_tokens = toy.chunk_tokens
        load = transformers.AutoModelForCausalLM.from_pretrained
        self._model = load(make_toy(toy, folder), dtype=self._dtype).eval()

    def layers(self, tokens: list[int]) -> list[Any]:
        with self._torch.inference_mode():
            answer = self._model(self._torch.tensor([tokens]), use_cache=True, logits_to_keep=1)
        return list(answer.past_key_values.layers)

    def bytes_of(self, tensor: Any) -> bytes:
        plain = tensor.detach().to(self._dtype).contiguous().view(self._torch.uint8)
        return bytes(plain.numpy().tobytes())


def attention(model: ToyModel, size_bytes: int) -> Objects:
    """Chunks of as many prompts as it takes."""
    objects: Objects = []
    while sum(map(len, objects)) < size_bytes:
        layers = model.layers(prompt(_PROMPT_TOKENS, f"codec-{len(objects)}"))
        caches = [tensor for layer in layers if hasattr(layer, "keys") for tensor in (layer.keys, layer.values)]
        for start in range(0, _PROMPT_TOKENS - model.chunk_tokens + 1, model.chunk_tokens):
            end = start + model.chunk_tokens
            objects.append(b"".join(model.bytes_of(cache[:, :, start:end]) for cache in caches))
    return objects


def states(model: ToyModel, count: int) -> Objects:
    """A checkpoint each of `count` prompts of one chunk."""
    return [
        b"".join(map(model.bytes_of, _recurrent(model.layers(prompt(model.chunk_tokens, f"codec-state-{index}")))))
        for index in range(count)
    ]


def _recurrent(layers: list[Any]) -> Iterator[Any]:
    for layer in layers:
        for name in ("conv_states", "recurrent_states"):
            found = getattr(layer, name, None)
            if found is not None:
                yield from found.values() if isinstance(found, dict) else [found]


def seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Trial:
    """One set of objects under one codec: lengths, and seconds to encode and decode all of them, with sums."""

    def __init__(self, codec: Codec, objects: Objects) -> None:
        self._codec = codec
        self._objects = [memoryview(raw) for raw in objects]
        self.raw_bytes = sum(map(len, objects))
        self._into = [memoryview(bytearray(len(raw) + 4 * (len(raw) // SLICE_BYTES + 1))) for raw in objects]
        self._back = [memoryview(bytearray(len(raw))) for raw in objects]
        self._lengths: list[int] = []
        self.encode()
        self.stored_bytes = sum(self._lengths)
        self.decode()
        if any(back != raw for back, raw in zip(self._back, self._objects, strict=True)):
            raise SystemExit(f"{codec.name}: decoded bytes differ")

    def encode(self) -> None:
        self._lengths = []
        for raw, into in zip(self._objects, self._into, strict=True):
            payload_sum([raw])
            self._lengths.append(encode(self._codec, [raw], into))
            payload_sum([into[: self._lengths[-1]]])

    def decode(self) -> None:
        for length, into, back in zip(self._lengths, self._into, self._back, strict=True):
            payload_sum([into[:length]])
            if decode(self._codec, into[:length], [back]) is not IoOutcome.OK:
                raise SystemExit(f"{self._codec.name}: does not decode what it encoded")
            payload_sum([back])

    def sum_only(self) -> None:
        """What codec none costs in either direction."""
        for raw in self._objects:
            payload_sum([raw])


def measure(report: Report, payload: str, objects: Objects, rounds: int) -> None:
    trials = {codec: Trial(codec, objects) for codec in _CODECS}
    seconds: dict[tuple[Codec, str], list[float]] = {}
    for _ in range(rounds):
        for codec, trial in trials.items():
            for name, work in (("sum", trial.sum_only), ("encode", trial.encode), ("decode", trial.decode)):
                seconds.setdefault((codec, name), []).append(seconds_of(work))
    for codec, trial in trials.items():
        key = f"{payload}_{codec.name.lower()}"
        report.figure(f"{key}_ratio", trial.raw_bytes / trial.stored_bytes, "")
        summing = median(seconds[codec, "sum"])
        for name in ("encode", "decode"):
            taken = median(seconds[codec, name])
            saved = max(trial.raw_bytes - trial.stored_bytes, 0)
            report.figure(f"{key}_{name}_gb_s", trial.raw_bytes / taken / 1e9, "GB/s")
            report.figure(f"{key}_{name}_pays_below_gb_s", saved / (taken - summing) / 1e9, "GB/s")


def run(options: argparse.Namespace) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    size_bytes = options.mib << 20
    report = Report("codec")
    with tempfile.TemporaryDirectory(prefix="kvdepot-codec-") as folder:
        dense = ToyModel(DENSE, Path(folder), "bfloat16")
        hybrid = ToyModel(HYBRID, Path(folder), "bfloat16")
        exact = ToyModel(DENSE, Path(folder), "float32")
        payloads: dict[str, Callable[[], Objects]] = {
            "normal_bf16": lambda: normal_bf16(size_bytes, options.seed),
            "dense_kv_bf16": lambda: attention(dense, size_bytes),
            "hybrid_kv_bf16": lambda: attention(hybrid, size_bytes // 4),
            "hybrid_state_bf16": lambda: states(hybrid, options.states),
            "dense_kv_float32": lambda: attention(exact, size_bytes),
        }
        for name, make in payloads.items():
            objects = make()
            report.note(name, f"{len(objects)} objects, {sum(map(len, objects)) / 2**20:.1f} MiB")
            measure(report, name, objects, options.rounds)
    report.finish(options.json)


if __name__ == "__main__":
    parser = arguments(__doc__ or "")
    parser.add_argument("--mib", type=int, default=64, help="size of the largest sets")
    parser.add_argument("--states", type=int, default=48, help="checkpoints")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    run(parser.parse_args())
