"""Request traces of workload families, drawn from a seed with parameters of published studies.

    python -m benchmarks.workloads FAMILY [--seed 0] [--requests 600] > trace.jsonl

The lines have the form of the Mooncake traces: `timestamp` (milliseconds), `input_length` and `output_length`
(tokens), and `hash_ids`, one a 512-token block of the prompt. The same arguments give the same lines.
"""
