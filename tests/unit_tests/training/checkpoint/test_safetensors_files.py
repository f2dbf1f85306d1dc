"""Safetensors files that a process has no room to map."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError
from megatron.training.checkpoint.safetensors_files import open_safetensors

TERABYTE = 1 << 40


@contextmanager
def little_room() -> Iterator[None]:
    """As under `ulimit -v`: 256 MiB more than the process has by now."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    room = num_pages * resource.getpagesize() + (256 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (room, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_a_file_is_open_for_a_block(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.arange(3)}, path)
    with open_safetensors(path) as opened:
        assert opened.num_bytes == path.stat().st_size
        assert torch.equal(opened.reader.get_tensor("a"), torch.arange(3))


@pytest.mark.parametrize(
    ("header", "got"),
    [
        (b"", "a header of 0 bytes in a file of 1099511627776"),
        (
            json.dumps(
                {
                    "a": {
                        "dtype": "U8",
                        "shape": [TERABYTE - 100],
                        "data_offsets": [0, TERABYTE - 100],
                    }
                }
            ).encode(),
            "1099511627776 bytes, which this process has no room to map",
        ),
    ],
    ids=["without a header", "with a header that fits"],
)
def test_a_sparse_terabyte_is_one_error(tmp_path: Path, header: bytes, got: str) -> None:
    path = tmp_path / "x.safetensors"
    if header:
        header = header.ljust(92)
        path.write_bytes(len(header).to_bytes(8, "little") + header)
    else:
        path.touch()
    os.truncate(path, TERABYTE)
    with (
        little_room(),
        pytest.raises(CheckpointDamagedError, match=f"at {path}, got: {got}"),
        open_safetensors(path),
    ):
        pass
