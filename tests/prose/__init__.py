"""Check the English of the documents: `python -m tests.prose`, as a part of `make lint`.

vale, the usual tool, is not used: its packages on PyPI and npm only download a binary from GitHub, and Debian has none.
"""
