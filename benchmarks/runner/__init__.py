"""`python -m benchmarks run` and `list`: finds the benchmarks, runs them one after the other, each
a process of its own, and files their results.
"""
