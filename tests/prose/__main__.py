"""Check the English of the documents, or of the Markdown files named; exit with 1 at a finding above its budget."""

import sys
from pathlib import Path

from tests.prose.pages import code_complaints, complaints, pages

named = {name: Path(name).read_text() for name in sys.argv[1:]}
lines = list(complaints(named, {})) if named else [*complaints(pages()), *code_complaints()]
print("\n".join(lines) or "prose: ok")
sys.exit(1 if lines else 0)
