#!/usr/bin/env python3
"""`megatron-hybrid plan` from a clone: python tools/plan.py --help."""

import sys
from pathlib import Path

# Python puts this file's folder on the path of a script, and not the project's.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_hybrid.endings import run
from megatron_hybrid.plan.command import main

if __name__ == "__main__":
    sys.exit(run(main))
