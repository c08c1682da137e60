"""What the weights are: a digest of their files, taken off the engine's threads (design.md#identity, docs/adr/0046).

A file's digest is kept by (path, inode, mtime_ns, ctime_ns, size) in the user's cache
directory, so that only files that changed are read again at the next start.

A digest must never name other bytes than the engine computes with. It has read the weights before they are digested,
and reads adapters again without a word. Where files may have changed in between, there is no digest.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import xxhash
from kvdepot.client.vllm.identity import file_state
from kvdepot.client.vllm.identity.speculation import speculation
from kvdepot.core.errors import ConfigError

if TYPE_CHECKING:
    from kvdepot.client.vllm.base.metadata import AdapterRead

READ_BYTES: Final = 8 << 20
CACHE_ENTRIES_MAX: Final = 4096
"""Files remembered: a few hundred models or some thousand adapters; the one not used for longest goes first."""
ANSWERS_MAX: Final = 1024
"""Folders remembered; another one in use is digested again, from the files that are remembered."""
LOOK_AGAIN_SECONDS: Final = 5.0
"""How old the last look at an adapter's files may be: an older answer is none. A look is a stat of each file."""
LOOK_SECONDS: Final = 2.0
"""How often the files of adapters in use are looked at."""
IN_USE_SECONDS: Final = 3600.0
"""How long an adapter is in use after its last request. The first request after that is computed and not stored."""
STATES_MAX: Final = 16
"""States of an adapter's files that are remembered: its contents are equal, as after a `touch`."""
TICK_SECONDS: Final = 0.02
"""Two changes within a tick of a file system's clock have one time."""
COARSE_TICK_SECONDS: Final = 2.0
"""The same where times are whole seconds."""
TRIES_MAX: Final = 3
WANTED_MAX: Final = 256
"""Folders waiting to be digested; beyond it an adapter is unknown until it is asked for again."""
READS_MAX: Final = 65_536
"""Loads of adapters whose readers are remembered."""
_Key = TypeVar("_Key", str, int, tuple[Path, int])
_Value = TypeVar("_Value")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_LOADS_THE_FOLDER: Final = frozenset(
    {
        "auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "npcache", "pt", "runai_streamer",
        "runai_streamer_sharded", "sharded_state",
    }
)  # fmt: skip
"""vLLM's load formats whose weights are files of the model's folder."""


def cache_path(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Where file digests are kept between starts; None: nowhere, as this user has no home directory."""
    base = environment.get("XDG_CACHE_HOME")
    if not base:
        try:
            base = str(Path.home() / ".cache")
        except (RuntimeError, KeyError, OSError):  # no HOME, and no passwd entry
            return None
    return Path(base) / "kvdepot" / "file-digests.json"


class FileDigests:
    """XXH3-128 of files, remembered. Used by one thread; a lost or damaged cache only costs reading again."""

    def __init__(self, cache: Path | None) -> None:
        self._cache = cache
        self._known: dict[str, str] | None = None  # None: not read yet; a home may hang, and an engine's start must not
        self._saved = True
        self._run = secrets.token_hex(8)
        self._lasts: dict[int, bool] = {}  # by device: whether a file's times tell it from others in later runs, too

    def _key(self, path: Path, status: os.stat_result) -> str:
        if status.st_dev not in self._lasts:
            kind = file_state.file_system(path.resolve())
            self._lasts[status.st_dev] = bool(kind) and not kind.startswith(file_state.TIMES_OF_AN_IMAGE)
        parts = [path.resolve(), status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size]
        return "|".join(map(str, parts if self._lasts[status.st_dev] else [*parts, self._run]))

    def _remembered(self) -> dict[str, str]:
        if self._known is None:
            self._known = {}
            if self._cache is not None:
                with suppress(OSError, ValueError, AttributeError, RecursionError):
                    for key, value in json.loads(self._cache.read_text()).items():
                        _remember(self._known, str(key), str(value), CACHE_ENTRIES_MAX)
        return self._known

    def digest(self, path: Path) -> str:
        """Hex digest of the file's bytes. Raises OSError, also for a file that changes meanwhile."""
        status = _settled(path)
        known = self._remembered()
        key = self._key(path, status)
        digest = known.get(key)
        if digest is None:
            self._saved = False
            total = xxhash.xxh3_128()
            with path.open("rb") as file:
                while part := file.read(READ_BYTES):
                    total.update(part)
            if self._key(path, path.stat()) != key:
                raise OSError(f"{path} changes while it is read")
            digest = total.hexdigest()
        _remember(known, key, digest, CACHE_ENTRIES_MAX)
        return digest

    def save(self) -> None:
        """Keep what is known for the next start. A read-only home is no error."""
        if self._cache is None or self._known is None or self._saved:
            return
        self._saved = True
        temporary = self._cache.with_suffix(f".{os.getpid()}.tmp")
        with suppress(OSError):
            self._cache.parent.mkdir(parents=True, exist_ok=True)
            try:
                temporary.write_text(json.dumps(self._known))
                temporary.replace(self._cache)
            finally:
                temporary.unlink(missing_ok=True)


def _settled(path: Path) -> os.stat_result:
    """Return the file's status as soon as a further change would have another time. Raise OSError."""
    for _ in range(TRIES_MAX):
        status = path.stat()
        tick = TICK_SECONDS if status.st_ctime_ns % 10**9 else COARSE_TICK_SECONDS
        wait = status.st_ctime_ns / 1e9 + tick - time.time()
        if wait <= 0 or wait > tick:  # another host's clock may be fast
            break
        threading.Event().wait(wait)
    return status


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
    for path in file_state.files_below(folder):
        files += 1
        name = path.relative_to(folder).as_posix()
        total.update(json.dumps([name, path.stat().st_size, digests.digest(path)]).encode())
    if not files:
        raise FileNotFoundError(f"{folder} holds no files")
    return total.hexdigest()


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """Where the identity of the weights comes from: `text` if it is known without reading, else `folder`."""

    text: str = ""
    folder: Path | None = None


def weights_sources(vllm_config: Any, model_revision: str) -> dict[str, WeightsSource]:
    """Return what identifies the engine's weights, and its drafter's where these are others. Raise ConfigError."""
    model, load = vllm_config.model_config, vllm_config.load_config
    sources = {"weights": weights_source(model, load, model_revision)}
    drafting = speculation(vllm_config)
    if drafting is None or not drafting.keeps_kv:
        return sources
    drafter = vllm_config.speculative_config.draft_model_config
    if drafting.method != "draft_model":  # vLLM loads a draft model as it loads the target
        load = vllm_config.speculative_config.draft_load_config or load
    # An MTP head without a revision of its own is taken from the hub's main branch, whatever the target's revision is.
    own = (_files_of(drafter), _revision(drafter), load) != (
        _files_of(model),
        _revision(model),
        vllm_config.load_config,
    )
    if model_revision and not own:
        return sources
    try:
        # Digested also with a `model_revision`: somebody may replace the drafter and think of the model alone.
        source = weights_source(drafter, load, "")
    except ConfigError:
        source = weights_source(drafter, load, model_revision and f"{model_revision} with {_revision(drafter)}")
    return sources if source == sources["weights"] else sources | {"draft_weights": source}


def _files_of(model_config: Any) -> str:
    return str(getattr(model_config, "model_weights", "") or model_config.model)


def _revision(model_config: Any) -> str | None:
    """Return what vLLM found a branch or tag to be when it started: the cache's answer may be newer, or older."""
    revision: str | None = getattr(model_config.revision, "resolved", None) or model_config.revision
    return revision


def weights_source(model_config: Any, load_config: Any, model_revision: str) -> WeightsSource:
    """Return what identifies the weights. Raise ConfigError if nothing does: then nothing may outlive the process."""
    load_format = str(load_config.load_format)
    if load_format == "dummy":
        return WeightsSource(text=f"dummy seed {model_config.seed}")
    if model_revision:
        # With the model's name: "v1" of two models of one architecture are not the same weights.
        return WeightsSource(text=f"revision {model_revision} of {_files_of(model_config)}")
    if load_format not in _LOADS_THE_FOLDER:
        raise _unidentified(f"load_format {load_format!r} may load others than the model's folder has")
    if getattr(model_config, "model_weights", ""):
        raise _unidentified(f"weights are streamed from {model_config.model_weights}")
    if Path(model_config.model).is_dir():
        return WeightsSource(folder=Path(model_config.model))
    if os.environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() in ("1", "true"):
        raise _unidentified(f"{model_config.model!r} comes from ModelScope")
    revision = _revision(model_config)
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
    """Return the folder that a hub model was downloaded to, without using the network."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.file_download import repo_folder_name

    with suppress(ValueError):  # not a hub name
        config = try_to_load_from_cache(model, "config.json", cache_dir=download_dir, revision=revision)
        if isinstance(config, str):
            return Path(config).parent
    # vLLM puts weights alone into `download_dir`, without the names of branches.
    snapshots = Path(download_dir or constants.HF_HUB_CACHE) / repo_folder_name(repo_id=model, repo_type="model")
    folder = snapshots / "snapshots" / str(revision)
    return folder if revision and _COMMIT.fullmatch(revision) and folder.is_dir() else None


@dataclass(slots=True)
class _Answer:
    digest: str
    looked_at: float
    asked_at: float
    states: dict[str, None] = field(default_factory=dict)  # fingerprints of the files that have this digest


class Digests:
    """Digests folders on a thread of its own; asks are answered from what is known, never by waiting.

    Used for the weights (once) and for LoRA adapters (as long as they are in use).
    """

    def __init__(
        self,
        cache: Path | None,
        clock: Callable[[], float] = time.monotonic,
        started_ns: Callable[[], int] | None = None,
    ) -> None:
        """`started_ns`: a moment of the wall clock before which the engine had read no weights. Raises OSError."""
        self._files = FileDigests(cache)
        self._clock = clock
        self._started_ns = started_ns or file_state.process_started_ns
        self._answers: dict[tuple[Path, int], _Answer] = {}
        self._problems: dict[tuple[Path, int], str] = {}
        self._wanted: list[tuple[Path, int]] = []
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvdepot-digests", daemon=True)
        self._thread.start()

    def get(self, folder: Path, load: int = 0) -> str | None:
        """Return the digest, or None while it is being taken, or if it cannot be taken (`problem`).

        `load` tells apart the times that the engine has loaded the folder: its files may have changed between. 0 are
        the weights, which were read while this process started. From 1 on the engine may also read the folder again
        unsaid: an answer counts for LOOK_AGAIN_SECONDS, and once the files have changed that load has none any more.
        """
        key = (folder, load)
        with self._wake:
            answer, now = self._answers.get(key), self._clock()
            if answer is None:
                due = key not in self._problems
            else:
                answer.asked_at = now
                _remember(self._answers, key, answer, ANSWERS_MAX)
                due = load > 0 and now - answer.looked_at >= LOOK_AGAIN_SECONDS
            if due:
                self._want(key)
            return answer.digest if answer is not None and not due else None

    def has(self, folder: Path, load: int, state: str) -> bool:
        """Whether files in this state (`file_state.fingerprint`) have the digest of that load."""
        with self._wake:
            answer = self._answers.get((folder, load))
            return answer is not None and state in answer.states

    def problem(self, folder: Path, load: int = 0) -> str:
        """Why there will be no digest; empty otherwise."""
        return self._problems.get((folder, load), "")

    def close(self) -> None:
        """Ask the thread to end; a file that is being read does not hold up the engine."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def _want(self, key: tuple[Path, int]) -> None:
        if key not in self._wanted and len(self._wanted) < WANTED_MAX:
            self._wanted.append(key)
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._want_in_use()
                while not (self._wanted or self._stopping):
                    self._wake.wait(LOOK_SECONDS)
                    self._want_in_use()
                if self._stopping:
                    return
                key = self._wanted[0]
                before = self._answers.get(key)
            began = self._clock()
            digest, state, problem = self._look(*key, before)
            with self._wake:
                self._wanted.remove(key)
                self._answers.pop(key, None)
                if before is not None and digest and digest != before.digest:
                    digest, problem = "", f"{key[0]} has changed since it was loaded"
                if digest:
                    answer = before or _Answer(digest, began, began)
                    answer.looked_at = began
                    if state:
                        _remember(answer.states, state, None, STATES_MAX)
                    _remember(self._answers, key, answer, ANSWERS_MAX)
                elif before is not None and not problem:
                    _remember(self._answers, key, before, ANSWERS_MAX)  # not seen: it becomes too old
                else:
                    _remember(self._problems, key, problem, ANSWERS_MAX)

    def _want_in_use(self) -> None:
        """Look again at digests in use, with half of the queue. The other half is for those that are asked for."""
        now = self._clock()
        for key, answer in self._answers.items():
            if len(self._wanted) >= WANTED_MAX // 2:
                return
            if key[1] and now - answer.looked_at >= LOOK_SECONDS and now - answer.asked_at < IN_USE_SECONDS:
                self._want(key)

    def _look(self, folder: Path, load: int, before: _Answer | None) -> tuple[str, str, str]:
        """Return the digest, the state of its files, and the problem otherwise: empty if a later look may succeed."""
        problem = ""
        for _ in range(TRIES_MAX):
            try:
                return self._digest(folder, load, before)
            except FileNotFoundError as error:
                if before is not None:
                    return before.digest, "", ""  # what is gone since it was loaded cannot be read again
                problem = str(error)
            except OSError as error:
                problem = "" if before is not None else str(error)
            except Exception as error:  # noqa: BLE001 - I3: without this thread all digests would stay unknown, unsaid
                return "", "", f"{folder} cannot be digested: {error!r}"
        return "", "", problem

    def _digest(self, folder: Path, load: int, before: _Answer | None) -> tuple[str, str, str]:
        """As `_look`. Raises OSError."""
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} holds no files")
        state = file_state.fingerprint(folder)
        if before is not None and state in before.states:
            return before.digest, state, ""
        problem = "" if load else self._changed_since_start(folder)
        if problem:
            return "", "", problem
        digest = folder_digest(folder, self._files)
        if file_state.fingerprint(folder) != state:
            raise OSError(f"{folder} changes while it is digested")
        self._files.save()
        problem = "" if load else self._changed_since_start(folder)
        return ("", "", problem) if problem else (digest, state, "")

    def _changed_since_start(self, folder: Path) -> str:
        """Why the weights that the engine has read may be others than those of the files now. Raises OSError."""
        advice = "start the engine again, or set model_revision to something that changes whenever the weights do"
        try:
            changed = file_state.changed_since(folder, self._started_ns())
        except (ValueError, IndexError, OSError) as error:
            return f"it is not known whether {folder} has changed since this engine started ({error}): {advice}"
        if changed is None:
            return ""
        return f"{changed} may have changed after this engine began to read its weights: {advice}"


class LoraSalts:
    """Key salts of LoRA requests: the engine's hashes cover only an adapter's name and path.

    Used on the scheduler's thread only.
    """

    def __init__(self, digests: Digests) -> None:
        self._digests = digests
        self._reads: dict[int, dict[tuple[int, int], AdapterRead]] = {}  # by load, then by reader: the last one

    def salt(self, lora_request: Any) -> bytes | None:
        """Return the content digest, or None while it is unknown."""
        path = str(getattr(lora_request, "lora_path", "") or "")
        if not path:
            return None
        # The engine gives an adapter that is loaded again another id, under the same name and path.
        load = int(getattr(lora_request, "lora_int_id", 0))
        digest = self._digests.get(Path(path), load)
        reads = self._reads.get(load, {}).values()
        if digest is None or not all(
            read.path == path and self._digests.has(Path(path), load, read.state) for read in reads
        ):
            return None
        return bytes.fromhex(digest)

    def read(self, read: AdapterRead) -> bool:
        """Note that a rank has read an adapter. Return whether it read other files before, under the same id."""
        reads = self._reads.get(read.load, {})
        before = reads.get((read.rank, read.reader))
        if before is not None and before.at_ns >= read.at_ns:
            return False
        reads[read.rank, read.reader] = read
        _remember(self._reads, read.load, reads, READS_MAX)
        return before is not None and (before.path, before.state) != (read.path, read.state)
