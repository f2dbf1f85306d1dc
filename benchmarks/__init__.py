"""Benchmarks of this project's parts against other implementations: `python -m benchmarks`.

Each module in this directory is one benchmark: it declares `BENCHMARK` and has a `main(argv)` that
hands over a `Result`. docs/benchmarks.md has the list, and describes how to add one.
"""
