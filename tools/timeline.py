#!/usr/bin/env python3
"""`python -m megatron_hybrid timeline`, as a script of a clone."""

import sys
from pathlib import Path

# Python puts a script's directory on its path, not the project's.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_hybrid.endings import run
from megatron_hybrid.timeline import main

if __name__ == "__main__":
    sys.exit(run(main))
