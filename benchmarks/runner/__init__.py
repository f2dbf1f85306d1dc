"""`python -m benchmarks run` and `list`: finds the benchmarks, runs them one after the other, each
in a separate process, and stores their results.
"""
