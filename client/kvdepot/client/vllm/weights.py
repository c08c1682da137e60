"""What the weights are: a digest of their files, taken once and off the engine's threads (DESIGN 2).

A file's digest is kept by (path, inode, mtime_ns, ctime_ns, size) in the user's cache
directory, so that only files that changed are read again at the next start.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import xxhash
from kvdepot.core.errors import ConfigError

READ_BYTES: Final = 8 << 20
CACHE_ENTRIES_MAX: Final = 4096
"""Files remembered: a few hundred models or some thousand adapters; the one not used for longest goes first."""
ANSWERS_MAX: Final = 1024
"""Folders remembered; another one in use is digested again, from the files that are remembered."""
LOOK_AGAIN_SECONDS: Final = 5.0
"""How often at most the files of an adapter in use are looked at again: a stat each, read only where they changed."""
WANTED_MAX: Final = 256
"""Folders waiting to be digested; beyond it an adapter is unknown until it is asked for again."""
_Key = TypeVar("_Key", str, tuple[Path, int])
_Value = TypeVar("_Value")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_LOADS_THE_FOLDER: Final = frozenset(
    {
        "auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "npcache", "pt", "runai_streamer",
        "runai_streamer_sharded", "sharded_state",
    }
)  # fmt: skip
"""vLLM's load formats whose weights are files of the model's folder."""
_SKIPPED_FOLDERS: Final = frozenset({".cache", ".git"})


def cache_path(environment: Mapping[str, str] = os.environ) -> Path:
    """Where file digests are kept between starts."""
    base = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "kvdepot" / "file-digests.json"


class FileDigests:
    """XXH3-128 of files, remembered. Used by one thread; a lost or damaged cache only costs reading again."""

    def __init__(self, cache: Path | None) -> None:
        self._cache = cache
        self._known: dict[str, str] = {}
        self._saved = True
        if cache is not None:
            with suppress(OSError, ValueError, AttributeError):
                loaded = json.loads(cache.read_text())
                for key, value in loaded.items():
                    _remember(self._known, str(key), str(value), CACHE_ENTRIES_MAX)

    def digest(self, path: Path) -> str:
        """Hex digest of the file's bytes. Raises OSError."""
        status = path.stat()
        key = "|".join(
            map(str, (path.resolve(), status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size))
        )
        known = self._known.pop(key, None)
        if known is None:
            self._saved = False
            total = xxhash.xxh3_128()
            with path.open("rb") as file:
                while part := file.read(READ_BYTES):
                    total.update(part)
            known = total.hexdigest()
        _remember(self._known, key, known, CACHE_ENTRIES_MAX)
        return known

    def save(self) -> None:
        """Keep what is known for the next start. A read-only home is no error."""
        if self._cache is None or self._saved:
            return
        self._saved = True
        temporary = self._cache.with_suffix(f".{os.getpid()}.tmp")
        with suppress(OSError):
            self._cache.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(self._known))
            temporary.replace(self._cache)


def _remember(known: dict[_Key, _Value], key: _Key, value: _Value, count_max: int) -> None:
    """As the newest entry. The oldest goes when there are too many."""
    known.pop(key, None)
    known[key] = value
    if len(known) > count_max:
        del known[next(iter(known))]


def folder_digest(folder: Path, digests: FileDigests) -> str:
    """One digest over every file below a folder: relative names, sizes and contents. Raises OSError."""
    total = xxhash.xxh3_128()
    files = 0
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if _SKIPPED_FOLDERS.intersection(relative.parts) or not path.is_file():
            continue
        files += 1
        total.update(json.dumps([relative.as_posix(), path.stat().st_size, digests.digest(path)]).encode())
    if not files:
        raise FileNotFoundError(f"{folder} holds no files")
    return total.hexdigest()


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """Where the identity of the weights comes from: `text` if it is known without reading, else `folder`."""

    text: str = ""
    folder: Path | None = None


def weights_source(model_config: Any, load_config: Any, model_revision: str) -> WeightsSource:
    """Raises ConfigError when the weights cannot be identified: then nothing may be kept beyond the process."""
    load_format = str(load_config.load_format)
    if load_format == "dummy":
        return WeightsSource(text=f"dummy seed {model_config.seed}")
    if model_revision:
        # With the model's name: "v1" of two models of one architecture are not the same weights.
        source = getattr(model_config, "model_weights", "") or model_config.model
        return WeightsSource(text=f"revision {model_revision} of {source}")
    if load_format not in _LOADS_THE_FOLDER:
        raise _unidentified(f"load_format {load_format!r} may load others than the model's folder has")
    if getattr(model_config, "model_weights", ""):
        raise _unidentified(f"weights are streamed from {model_config.model_weights}")
    if Path(model_config.model).is_dir():
        return WeightsSource(folder=Path(model_config.model))
    if os.environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() in ("1", "true"):
        raise _unidentified(f"{model_config.model!r} comes from ModelScope")
    # What vLLM found a branch or tag to be when it started: the cache's own answer may be newer, or older.
    revision = getattr(model_config.revision, "resolved", None) or model_config.revision
    snapshot = _hub_snapshot(model_config.model, revision, load_config.download_dir)
    if snapshot is None:
        raise _unidentified(f"{model_config.model!r} is neither a folder nor in the local hub cache")
    return WeightsSource(folder=snapshot)


def _unidentified(reason: str) -> ConfigError:
    return ConfigError(
        "kv_connector_extra_config",
        "model_revision",
        f"{reason}, so its weights cannot be told from others",
        advice="set model_revision to something that changes whenever the weights do, as a commit",
    )


def _hub_snapshot(model: str, revision: str | None, download_dir: str | None) -> Path | None:
    """The folder a hub model was downloaded to, without touching the network."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.file_download import repo_folder_name

    with suppress(ValueError):  # not a hub name
        found = try_to_load_from_cache(model, "config.json", cache_dir=download_dir, revision=revision)
        if isinstance(found, str):
            return Path(found).parent
    # vLLM puts weights alone into `download_dir`, without the names of branches.
    snapshots = Path(download_dir or constants.HF_HUB_CACHE) / repo_folder_name(repo_id=model, repo_type="model")
    folder = snapshots / "snapshots" / str(revision)
    return folder if revision and _COMMIT.fullmatch(revision) and folder.is_dir() else None


class Digests:
    """Digests folders on a thread of its own; asks are answered from what is known, never by waiting.

    Used for the weights (once) and for LoRA adapters (whenever a new one comes).
    """

    def __init__(self, cache: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._files = FileDigests(cache)
        self._clock = clock
        self._answers: dict[tuple[Path, int], tuple[str, float]] = {}  # and when the folder was looked at
        self._problems: dict[tuple[Path, int], str] = {}
        self._wanted: list[tuple[Path, int]] = []
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvdepot-digests", daemon=True)
        self._thread.start()

    def get(self, folder: Path, load: int = 0) -> str | None:
        """The digest, None while it is not known (it is being taken) or cannot be (`problem`).

        `load` tells apart the times that the engine has loaded the folder: its files may have changed between. From 1
        on the engine may also read it again unsaid, so once they have changed there is no digest of that load any more.
        """
        key = (folder, load)
        with self._wake:
            answer, looked_at = self._answers.get(key, (None, 0.0))
            if answer is not None:
                _remember(self._answers, key, (answer, looked_at), ANSWERS_MAX)
                due = load > 0 and self._clock() - looked_at >= LOOK_AGAIN_SECONDS
            else:
                due = key not in self._problems
            if due and key not in self._wanted and len(self._wanted) < WANTED_MAX:
                self._wanted.append(key)
                self._wake.notify()
            return answer

    def problem(self, folder: Path, load: int = 0) -> str:
        """Why there will be no digest; empty otherwise."""
        return self._problems.get((folder, load), "")

    def close(self) -> None:
        """Ask the thread to end; a file that is being read does not hold up the engine."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._wanted or self._stopping):
                    self._wake.wait()
                if self._stopping:
                    return
                key = self._wanted[0]
            answer, problem = self._digest(key[0])
            with self._wake:
                before, _ = self._answers.pop(key, ("", 0.0))
                if before and answer and answer != before:
                    answer, problem = "", f"{key[0]} has changed since it was loaded"
                else:
                    answer = answer or before  # what is gone since it was loaded cannot be read again
                if answer:
                    _remember(self._answers, key, (answer, self._clock()), ANSWERS_MAX)
                else:
                    _remember(self._problems, key, problem, ANSWERS_MAX)
                self._wanted.remove(key)

    def _digest(self, folder: Path) -> tuple[str, str]:
        """The digest, or the problem."""
        try:
            answer = folder_digest(folder, self._files)
            self._files.save()
        except OSError as error:
            return "", str(error)
        except Exception as error:  # noqa: BLE001 - I3: without this thread every digest would stay unknown, unsaid
            return "", f"{folder} cannot be digested: {error!r}"
        return answer, ""


class LoraSalts:
    """Key salts of LoRA requests: the engine's hashes cover only an adapter's name and path."""

    def __init__(self, digests: Digests) -> None:
        self._digests = digests

    def salt(self, lora_request: Any) -> bytes | None:
        """The content digest, None while unknown."""
        path = str(getattr(lora_request, "lora_path", "") or "")
        if not path:
            return None
        # The engine gives an adapter that is loaded anew another id, under the same name and path.
        digest = self._digests.get(Path(path), int(getattr(lora_request, "lora_int_id", 0)))
        return bytes.fromhex(digest) if digest else None
