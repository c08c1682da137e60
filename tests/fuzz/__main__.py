"""Coverage-guided fuzzing of one target: `python -m tests.fuzz TARGET [-max_total_time=60 ...]`, libFuzzer's arguments.

Needs atheris (`pip install atheris`), which is no part of the test environment: it is 130 MB. `make test` runs the
same targets with Hypothesis.
"""

from __future__ import annotations

import resource
import sys
import tempfile

MEMORY_BYTES_MAX = 4 << 30
"""Of the address space: an allocation by a length that was read ends the run."""


def main() -> int:
    import atheris

    with atheris.instrument_imports(include=["kvdepot"]):
        from tests.fuzz.targets import CORPORA, TARGETS
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        print(f"usage: python -m tests.fuzz TARGET [libFuzzer arguments]\ntargets: {' '.join(TARGETS)}")
        return 2
    name = sys.argv.pop(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    # libFuzzer writes what it finds interesting into its first folder, so the good examples come second.
    found = tempfile.mkdtemp(prefix=f"kvdepot-fuzz-{name}-")
    print(f"inputs, and what breaks the target: {found}")
    folders = [found, str(CORPORA[name])] if name in CORPORA else [found]
    atheris.Setup([*sys.argv, *folders, "-timeout=10", f"-artifact_prefix={found}/"], TARGETS[name])
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
