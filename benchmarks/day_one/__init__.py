"""The day-one kit: what is tried on the first machine with a GPU. `python -m benchmarks.cuda --day-one --out DIR`."""
