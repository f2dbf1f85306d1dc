"""What all tests share."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

# One thread a rank: the pools' ranks and this process would otherwise fight over the cores. Before
# torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent
# The scripts at the root (pretrain_gpt.py), tools/ and the tests' own helpers (tests/helpers) are
# not installed.
sys.path.insert(0, str(ROOT))


def pytest_collection_finish() -> None:
    """Takes what has been imported and collected out of every later look for garbage."""
    gc.collect()
    gc.freeze()
