"""`python -m tests.next_vllm.check FOLDER`: what of the contract with vLLM has changed in these sources, by name.

Runs with FOLDER in front (`PYTHONPATH`). Exits with 1 where anything has.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from kvdepot.client.vllm.base import contract

ROOT = Path(__file__).resolve().parents[2]
IMPORTING = ("client", "demo", "benchmarks", "tests")


def sources() -> list[Path]:
    """Ours, that may import from vLLM."""
    return [path for folder in IMPORTING for path in sorted((ROOT / folder).rglob("*.py"))]


def changes() -> Iterator[str]:
    """First what is imported: without it nothing else can be looked at."""
    missing = contract.missing_imports(contract.imports_of(sources()))
    yield from missing
    if any("/client/" in line.rpartition("(")[2] for line in missing):
        return
    from kvdepot.client.vllm.base import compat
    from kvdepot.client.vllm.connector import KVDepotConnector
    from kvdepot.client.vllm.weighted import WeightedMultiConnector

    for connector in (KVDepotConnector, WeightedMultiConnector):
        yield from (f"{connector.__name__}: {change}" for change in compat.changes(connector))


def main(folder: str) -> int:
    import vllm
    from vllm.platforms import current_platform

    print(f"vLLM {vllm.__version__} on {type(current_platform).__name__}, from {Path(vllm.__file__).parent}")
    if Path(vllm.__file__).parent.parent != Path(folder) or not current_platform.is_cpu():
        print(f"expected the sources of {folder} on CpuPlatform")
        return 1
    found = list(dict.fromkeys(changes()))
    print(f"names that have changed: {len(found)}", *found, sep="\n  ")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
