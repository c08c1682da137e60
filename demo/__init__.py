"""Toy models, a real vLLM engine and kvdepotd as processes, and the demo that shows them together.

Shared by `make demo`, tests/e2e and benchmarks/; not part of any shipped package.
"""
