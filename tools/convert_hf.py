#!/usr/bin/env python3
"""`megatron-hybrid convert-hf` from a clone: python tools/convert_hf.py --help."""

import sys
from pathlib import Path

# Python puts this file's folder on the path of a script, and not the project's.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_hybrid.convert_hf import main
from megatron_hybrid.endings import run

if __name__ == "__main__":
    sys.exit(run(main))
