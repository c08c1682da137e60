"""Which tests show which requirement of docs/requirements.md, by their markers."""
