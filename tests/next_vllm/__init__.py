"""The Python sources of another vLLM over the kernels of the one that is installed, for tests (`make test-next`)."""
