"""Pictures and tables from the stored results: `python -m benchmarks report`."""
