"""`python -m tests.next_vllm VERSION COMMAND...`: run a command on the Python sources of that version of vLLM.

They are fetched once, then what of the contract has changed is said by name. COMMAND runs whatever that was, so that
its tests show what follows from it. Exits with 2 where there are no such sources, else with 1 where a name has
changed, else as COMMAND does.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.next_vllm.sources import ROOT, NoSourcesError, environment, ready


def main(version: str, *command: str) -> int:
    try:
        folder = ready(version)
    except NoSourcesError as error:
        print(f"test-next: {error}", file=sys.stderr)
        return 2
    os.chdir(ROOT)
    check = [sys.executable, "-m", "tests.next_vllm.check", str(folder)]
    changed = subprocess.run(check, env=environment(folder)).returncode
    if command and not changed:
        os.execvpe(command[0], command, environment(folder))  # signals of `timeout` are for it
    if command:
        subprocess.run(command, env=environment(folder))
    return changed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
