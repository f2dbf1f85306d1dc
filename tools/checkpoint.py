#!/usr/bin/env python3
"""`megatron-hybrid checkpoint` from a clone: python -m tools.checkpoint --help."""

import sys
from pathlib import Path

# Python puts this file's folder on the path of a script, and not the project's.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_hybrid.checkpoint.command import main
from megatron_hybrid.endings import run

if __name__ == "__main__":
    sys.exit(run(main))
