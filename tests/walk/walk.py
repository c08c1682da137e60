"""What a user does with `docs/quickstart.md`: each command as the page has it, in a new clone and a home of its own.

The page leaves the model to the user. Here it is the toy model, which needs flags of its own. vLLM has a port of its
own, too. The page leaves vLLM to the user: an environment that has what the tests' environment has, but for kvdepot.
The daemon's environment is new, so pip downloads what it needs, unless this machine's cache has it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import urllib.request
import venv
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final, Self

from demo.engine import ENVIRONMENT
from demo.toys import DENSE, make_toy
from tests.rigs import ports
from tests.rigs.patience import patient, wait_until
from tests.rigs.vllm_server import START_SECONDS, wait_serving

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE_URL: Final = "http://localhost:8000"
"""Of vLLM, on the page."""
_ENDS_SECONDS: Final = 60.0
_NOT_A_USERS: Final = ("KVDEPOT_", "PYTEST_", "PYTHON", "VIRTUAL_ENV", "XDG_")
"""Beginnings of variables that a user's shell does not have."""
_OWN: Final = ("kvdepot", "_kvdepot", "pip", "__pycache__")
"""Beginnings of what vLLM's environment has itself, or gets from the page."""


def commands(page: str) -> list[str]:
    """Return what the page's consoles say to type, in order, without comments."""
    found: list[str] = []
    for block in re.findall(r"^```console\n(.*?)^```", page, re.S | re.M):
        lines = re.sub(r"\\\n\s*", " ", block).splitlines()
        found += [re.sub(r"\s+# .*", "", line[2:]).strip() for line in lines if line.startswith("$ ")]
    return found


def _vllm_environment(folder: Path) -> Path:
    """Make an environment with links to all packages of the tests' environment but kvdepot."""
    venv.create(folder, symlinks=True, with_pip=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    for one in Path(sysconfig.get_path("purelib")).iterdir():
        if not one.name.startswith(_OWN) and not (packages / one.name).exists():
            (packages / one.name).symlink_to(one.resolve())
    program = Path(sys.executable).parent / "vllm"
    lines = program.read_text().splitlines()
    (folder / "bin" / "vllm").write_text("\n".join([f"#!{folder / 'bin' / 'python'}", *lines[1:], ""]))
    (folder / "bin" / "vllm").chmod(0o755)
    return folder


class Walk:
    """A user's shell and home. `typed` are the commands so far, and `printed` is what the last one printed."""

    def __init__(self, folder: Path) -> None:
        self.clone = folder / "kvdepot"
        git = ["git", "clone", "-q", "--no-hardlinks", str(ROOT), str(self.clone)]
        subprocess.run(git, check=True, capture_output=True, timeout=patient(120))
        self.commands = commands((self.clone / "docs" / "quickstart.md").read_text())
        self.typed: list[str] = []
        self.printed = ""
        self._folder = folder
        self._model = make_toy(DENSE, ROOT / "build" / "toys")
        self._stack = ExitStack()
        holder = self._stack.enter_context(ports.held())
        self._servers = self._stack.enter_context(ExitStack())
        self.arena = folder / "no arena yet"
        self.url = f"http://127.0.0.1:{ports.port_of(holder)}"
        run = folder / "run"
        run.mkdir(mode=0o700)
        self.socket = run / "kvdepot" / "kvdepot.sock"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_A_USERS)}
        cache = os.environ.get("PIP_CACHE_DIR") or str(Path.home() / ".cache" / "pip")
        self._environment = inherited | {
            "HOME": str(folder), "XDG_RUNTIME_DIR": str(run), "COLUMNS": "200", "PIP_CACHE_DIR": cache,
        }  # fmt: skip
        vllm = _vllm_environment(folder / "vllm-venv")
        self._of_vllm = inherited | ENVIRONMENT | {
            "HOME": str(folder), "XDG_RUNTIME_DIR": str(run), "PIP_CACHE_DIR": cache,
            "PATH": f"{vllm / 'bin'}:{inherited['PATH']}", "VIRTUAL_ENV": str(vllm),
        }  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if self.arena.exists():  # gigabytes, which the next daemon of this home would find
            self._run(f"kvdepotd arena remove {self.arena}")

    def next(self, *, start: str) -> str:
        """Return the page's next command, for this model and vLLM. Raise AssertionError unless it begins so."""
        command = self.commands[len(self.typed)]
        assert command.startswith(start), f"the page says {command!r} next"
        self.typed.append(command)
        return command.replace("MODEL", str(self._model)).replace(PAGE_URL, self.url)

    def download(self) -> None:
        """Have pip's cache filled, as the page does not count downloads."""
        self._run(f"{sys.executable} -m pip download -q -d {self._folder / 'downloads'} '.[node]' 'hatchling>=1.27'")

    def type(self, start: str, replaced: Mapping[str, str] = MappingProxyType({})) -> str:
        """Type the next command, which begins so, and return what it prints. Raise AssertionError if it fails."""
        command = self.next(start=start)
        for word, value in replaced.items():
            command = command.replace(word, value)
        if command.startswith("export PATH="):
            self._environment["PATH"] = self._run(f'{command}; printf %s "$PATH"')
        else:
            self.printed = self._run(command)
        return self.printed

    def serve_daemon(self) -> None:
        """Type the command that starts the daemon, and wait for its socket's line of the log."""
        _, log = self._start(self.next(start="kvdepotd serve"), "daemon", self._environment)
        wait_until(lambda: "ready to serve" in log.read_text(), log.read_text, START_SECONDS)
        self.arena = Path(log.read_text().partition("arena opened: ")[2].split(" ")[0])

    def end(self) -> None:
        """End both servers, vLLM first."""
        self._servers.close()

    def install_connector(self) -> None:
        """Type the command that installs the library into vLLM's environment."""
        self._run(self.next(start="pip install"), self._of_vllm)

    def serve_vllm(self) -> None:
        """Type the command that starts vLLM, in vLLM's environment, and wait until it serves."""
        command = self.next(start="VLLM_SERVER_DEV_MODE=1 vllm serve MODEL")
        port = self.url.rpartition(":")[2]
        flags = f"--port {port} --host 127.0.0.1 --skip-tokenizer-init --enforce-eager --dtype {DENSE.dtype}"
        flags += " --max-model-len 8192 --max-num-batched-tokens 8192 --kv-cache-memory-bytes 268435456"
        wait_serving(self.url, *self._start(f"{command} {flags}", "vllm", self._of_vllm))

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def complete(self, prompt: Sequence[int], request: str = "", answers: int = 1) -> dict[str, Any]:
        """Send a prompt, and return the answer. `request`: the X-Request-Id. `answers`: vLLM's `n`."""
        asked = {
            "model": str(self._model), "prompt": list(prompt), "max_tokens": 8, "return_token_ids": True,
            "n": answers, "temperature": int(answers > 1),
        }  # fmt: skip
        return dict(json.loads(self._post("/v1/completions", asked, {"X-Request-Id": request} if request else {})))

    def forget(self) -> None:
        """Empty vLLM's own cache, as the page says."""
        self._post("/reset_prefix_cache", {}, {})

    def metric(self, name: str) -> float:
        """Return the sum of a counter of vLLM."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=patient(30)) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(rf"{name}(_total)?[{{ ]", line))

    def ask(self, *arguments: str) -> str:
        """Return what `kvdepotctl` prints, which the page has no command for."""
        return self._run(f"kvdepotctl {' '.join(arguments)}")

    def _post(self, path: str, content: dict[str, Any], headers: Mapping[str, str]) -> bytes:
        request = urllib.request.Request(
            f"{self.url}{path}", json.dumps(content).encode(), {"Content-Type": "application/json", **headers}
        )
        with urllib.request.urlopen(request, timeout=patient(120)) as answer:
            return bytes(answer.read())

    def _run(self, command: str, environment: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.clone, env=environment or self._environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=patient(600), check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def _start(self, command: str, name: str, environment: dict[str, str]) -> tuple[subprocess.Popen[bytes], Path]:
        path = self._folder / f"{name}.log"
        with path.open("wb") as log:
            process = subprocess.Popen(
                ["bash", "-c", f"exec env {command}"], cwd=self.clone, env=environment, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self._servers.callback(_end, process)
        return process, path


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server as Ctrl-C does, and what it leaves."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(patient(_ENDS_SECONDS))
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
