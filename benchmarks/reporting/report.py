"""`python -m benchmarks report`: writes pictures and blocks of Markdown from results, or checks
them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.reporting.blocks import blocks_of, content_of, with_contents
