#!/usr/bin/env python3
"""`megatron-hybrid status` from a clone: python tools/run_status.py --help."""

import sys
from pathlib import Path

# Python puts this file's folder on the path of a script, and not the project's.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_hybrid.endings import run
from megatron_hybrid.run_status import main

if __name__ == "__main__":
    sys.exit(run(main))
