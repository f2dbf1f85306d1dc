"""Where benchmarks run, and where their results lie."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
QUICK_RESULTS = ROOT / "runs" / "benchmarks"  # figures of small sizes are not kept
LOGS = QUICK_RESULTS / "logs"
