"""docs/requirements-tests.md, from the markers: `python -m tests.requirements > docs/requirements-tests.md`."""

from tests.requirements.page import markdown

print(markdown())
