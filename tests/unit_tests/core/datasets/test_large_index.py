"""A corpus of fifty million documents: the processor time and the memory its sample index takes.

The .idx file, 1 GB, is written in pieces straight in the format; the .bin is a sparse file, of
which nothing is read.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

_PIECE = 1 << 20
_MEASURE = """
import json, sys, time
from pathlib import Path
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.sample_index import EpochStream

def anonymous_mb():
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024

peak = before = anonymous_mb()
pieces = EpochStream.sample_starts

def watched(*arguments):
    global peak
    for piece in pieces(*arguments):
        peak = max(peak, anonymous_mb())
        yield piece

EpochStream.sample_starts = watched
cpu = time.process_time()
indexed = IndexedDataset(sys.argv[1])
dataset = GPTDataset(indexed, range(len(indexed)), 1, 1024, 1)
cpu = time.process_time() - cpu
peak = max(peak, anonymous_mb())
print(json.dumps({"cpu": cpu, "mb": peak - before, "samples": dataset.samples_per_epoch}))
"""


def _write_index(prefix: Path, num_documents: int) -> None:
    """An index of documents of 0 to 599 uint16 tokens, and a .bin of the size it says that takes no
    space.
    """
    pieces = [
        (begin, min(_PIECE, num_documents - begin)) for begin in range(0, num_documents, _PIECE)
    ]
    lengths = np.random.default_rng(0).integers(0, 600, _PIECE).astype("<i4")
    offsets = 2 * (np.cumsum(lengths, dtype=np.int64) - lengths)
    per_piece = 2 * int(lengths.sum())
    with Path(f"{prefix}.idx").open("wb") as index:
        index.write(
            struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, num_documents, num_documents + 1)
        )
        for _, count in pieces:
            index.write(lengths[:count].tobytes())
        for number, (_, count) in enumerate(pieces):
            index.write((offsets[:count] + number * per_piece).tobytes())
        for begin in range(0, num_documents + 1, _PIECE):
            index.write(np.arange(begin, min(begin + _PIECE, num_documents + 1)).tobytes())
    *_, (_, last) = pieces
    num_bytes = (len(pieces) - 1) * per_piece + 2 * int(lengths[:last].sum())
    with Path(f"{prefix}.bin").open("wb") as tokens:
        tokens.truncate(num_bytes)


def _measure(folder: Path, num_documents: int) -> dict[str, Any]:
    prefix = folder / "large"
    _write_index(prefix, num_documents)
    try:
        ran = subprocess.run(
            [sys.executable, "-c", _MEASURE, str(prefix)],
            capture_output=True,
            text=True,
            check=True,
        )
    finally:
        for path in [
            prefix.with_suffix(".idx"),
            prefix.with_suffix(".bin"),
            *folder.rglob("*.npy"),
        ]:
            path.unlink(missing_ok=True)
    measured: dict[str, Any] = json.loads(ran.stdout)
    return measured


def test_an_index_of_one_gigabyte_is_cut_in_seconds_and_in_the_memory_of_a_small_one(
    tmp_path: Path,
) -> None:
    small = _measure(tmp_path, 500_000)
    large = _measure(tmp_path, 50_000_000)
    assert large["samples"] > 90 * small["samples"]
    # Of the process, not of the clock: what else runs on the machine does not count.
    assert large["cpu"] < 10, large
    assert large["mb"] < small["mb"] + 50, (small, large)
    assert large["mb"] < 150, large
