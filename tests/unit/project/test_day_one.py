"""The day-one kit: what it makes of its steps' results, a rehearsal of all steps, and the command of its tests."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvdepot.client.copy.backend import Way

from benchmarks import cuda
from benchmarks.day_one import kit
from benchmarks.day_one.golden import golden_cases
from benchmarks.day_one.machine import Machine
from benchmarks.day_one.memcheck import PARTS
from benchmarks.day_one.stand_in import StandIn
from benchmarks.day_one.steps import Context, NotRunError, Step, WrongByteError
from tests.rigs.patience import patient
from tests.rigs.seeds import RUN_SEED

ROOT = Path(__file__).resolve().parents[3]


class JudgedMachine(StandIn):
    """One whose figures count, as a GPU's do."""

    name = "a judged stand-in"
    stands_in = False


def passed(_: Context) -> None: ...


def missed(context: Context) -> None:
    context.figure("speed", 0.5, "", at_least=0.9)
    context.figure("other", 0.95, "", at_least=0.9)


def wrong(_: Context) -> None:
    raise WrongByteError("byte 3 is wrong")


def failed(_: Context) -> None:
    raise RuntimeError("no such thing")


def not_run(_: Context) -> None:
    raise NotRunError("there is no second one")


def late_miss(context: Context) -> None:
    missed(context)
    raise NotRunError("the time was over")


def ended_with(
    out: Path, monkeypatch: pytest.MonkeyPatch, *steps: Callable[[Context], None]
) -> tuple[int, dict[str, Any], str]:
    """Return the exit code, the JSON and the page of a run of these steps."""

    def make(*, stand_in: bool) -> Machine:
        return JudgedMachine()

    monkeypatch.setattr(kit, "machine_of", make)
    monkeypatch.setattr(
        kit, "STEPS", tuple(Step(number, work.__name__, 1.0, work) for number, work in enumerate(steps))
    )
    code = kit.run(out, 60.0)
    return code, json.loads((out / "report.json").read_text()), (out / "report.md").read_text()


def test_a_wrong_byte_ends_the_run_and_is_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, record, page = ended_with(tmp_path, monkeypatch, missed, wrong, passed)
    assert code == record["exit_code"] == 3
    assert [step["status"] for step in record["steps"]] == ["missed an aim", "WRONG BYTES"]
    assert record["verdict"].startswith("WRONG BYTES") and "byte 3 is wrong" in record["verdict"]
    assert "byte 3 is wrong" in page


def test_a_missed_aim_is_named_and_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, record, page = ended_with(tmp_path, monkeypatch, missed, passed)
    assert code == 1
    assert record["steps"][0]["figures"]["missed"] == ["speed"]
    assert "step 0 (speed)" in record["verdict"]
    assert page.count("MISSED") == 1 and page.count("  met") == 1


def test_a_missed_aim_is_not_hidden_by_the_end_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, record, _ = ended_with(tmp_path, monkeypatch, late_miss)
    assert (code, record["steps"][0]["status"]) == (1, "missed an aim")


def test_a_failed_step_is_no_success_and_others_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, record, _ = ended_with(tmp_path, monkeypatch, failed, passed)
    assert code == 1
    assert [step["status"] for step in record["steps"]] == ["failed", "passed"]
    assert "no such thing" in record["verdict"]


def test_what_was_not_run_has_not_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, record, page = ended_with(tmp_path, monkeypatch, not_run, passed)
    assert code == 0
    assert record["steps"][0]["status"] == "not run"
    assert "there is no second one" in record["verdict"] and "there is no second one" in page


def test_no_case_is_left_out_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cuda.parse(["--day-one", "--out", "there", "--cases", "2"])
    assert "on a GPU no case is left out" in capsys.readouterr().err


def without_vllm(directory: Path) -> Path:
    """Return a directory whose `vllm` cannot be imported, for the head of a process's list of paths."""
    (directory / "vllm").mkdir()
    (directory / "vllm/__init__.py").write_text("raise ImportError('there is no vLLM on that machine')\n")
    return directory


GPU_TESTS = "tests/contract/copies"


def test_the_documented_command_collects_the_tests_of_a_gpu_without_vllm(tmp_path: Path) -> None:
    documents = [ROOT / name for name in ("README.md", "pyproject.toml", "Makefile", "docs/gpu.md", "docs/testing.md")]
    given = {command for page in documents for command in re.findall(r"pytest -m gpu\b[^`)#\n]*", page.read_text())}
    assert {command.strip() for command in given} == {f"pytest -m gpu {GPU_TESTS}"}
    collected = subprocess.run(
        [sys.executable, "-m", *f"pytest -m gpu {GPU_TESTS}".split(), "--collect-only", "-q", "-p", "no:cacheprovider"],
        cwd=ROOT, timeout=patient(60), capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(without_vllm(tmp_path))},
    )  # fmt: skip
    assert collected.returncode == 0, collected.stdout + collected.stderr
    assert re.findall(r"::test_a_step_passes\[cuda-(.+)\]", collected.stdout) == [
        step.title for step in kit.STEPS if 1 <= step.number <= 5
    ]


def test_all_tests_of_a_gpu_are_where_the_command_looks() -> None:
    marked = {path.parent for path in (ROOT / "tests").rglob("*.py") if "pytest.mark.gpu" in path.read_text()}
    assert marked - {Path(__file__).parent} == {ROOT / GPU_TESTS}


DRAWN = 2


@pytest.mark.requirement("I1")
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(DRAWN, id="drawn", marks=pytest.mark.long(seconds=35, always=True)),
        pytest.param(None, id="all", marks=pytest.mark.long(seconds=130)),
    ],
)
@pytest.mark.timeout(400)
def test_every_step_is_rehearsed_without_vllm_and_without_an_installation(tmp_path: Path, cases: int | None) -> None:
    """`-S`: the environment's own list of paths, which names the sources, is not read."""
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    command = [sys.executable, "-S", "-m", "benchmarks.cuda", "--day-one", "--stand-in"]
    command += ["--out", str(tmp_path / "out"), "--seconds", str(patient(1000)), "--seed", str(RUN_SEED)]
    command += [] if cases is None else ["--cases", str(cases)]
    environment = os.environ | {"PYTHONPATH": f"{without_vllm(tmp_path)}:{packages}"}
    ended = subprocess.run(
        command, cwd=ROOT, timeout=patient(380), capture_output=True, text=True, check=False, env=environment
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    record = json.loads((tmp_path / "out/report.json").read_text())
    assert [step["number"] for step in record["steps"]] == list(range(11))
    assert {step["status"] for step in record["steps"]} == {"passed"}, record["verdict"]
    layouts = len(golden_cases())
    assert record["steps"][2]["figures"]["cases"] == len(Way) * (layouts if cases is None else cases)
    notes = record["steps"][2]["figures"]["notes"]
    assert notes.get("cases drawn") == (None if cases is None else f"{cases} of {layouts}")
    checked = record["steps"][3]["figures"]["notes"]["without compute-sanitizer"]
    assert all(part in checked for part in PARTS)
    assert "4 KiB, 32 MiB: replay p99" in record["steps"][6]["figures"]
    assert record["verdict"].startswith("a rehearsal without a GPU")
