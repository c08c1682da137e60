"""docs/kvdepotctl.md lists the checks of `kvdepotctl doctor`, and none that is not there."""

from __future__ import annotations

import re
from pathlib import Path

from kvdepot.client.ctl.doctor import findings

from tests.rigs.manual import sections

CODE = Path(findings.__file__).parent


def test_every_check_is_documented_with_its_fix() -> None:
    made = {name for path in CODE.glob("*.py") for name in re.findall(r"""\bCheck\("([^"]+)",""", path.read_text())}
    section = sections("kvdepotctl.md", 2)["kvdepotctl doctor"]
    rows = re.findall(r"^\| [^|]+ \| `([^`]+)` \| [^|]+ \| [^|]+ \|$", section, re.MULTILINE)
    assert set(rows) == made
