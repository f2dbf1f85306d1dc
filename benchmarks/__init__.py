"""What this project's parts cost beside other ways to do the same work: `python -m benchmarks`.

Each module in this folder is one benchmark: it declares `BENCHMARK` and has a `main(argv)` that
hands over a `Result`. docs/benchmarks.md has the list, and says how to add one.
"""
