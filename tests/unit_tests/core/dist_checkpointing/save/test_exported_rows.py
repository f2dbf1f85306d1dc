"""Rows of exported files: written to their offsets, with digests, along with a data file."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.core.device import Device
from megatron.core.dist_checkpointing.format.index import ExportedRows
from megatron.core.dist_checkpointing.format.manifest import (
    BLOCK_BYTES,
    DATA_ALIGNMENT,
    digests_of,
)
from megatron.core.dist_checkpointing.layout.boxes import Box
from megatron.core.dist_checkpointing.save.data_file import BufferPool, DataFileWriter
from megatron.core.dist_checkpointing.store import LocalStore
from megatron.core.shared_file import SharedFile

CPU = Device("cpu")
FOLDER = "iter_0000010.token.saving"
BUFFERS = (BLOCK_BYTES, BLOCK_BYTES + 3 * DATA_ALIGNMENT, 8 << 20)


def writer_of(
    root: Path, num_bytes: int, buffer_bytes: int, check: Callable[[], None] = lambda: None
) -> DataFileWriter:
    """Writes a data file, and exported files of this size."""
    store, folder = LocalStore(root), root / FOLDER
    store.make_folder(f"{FOLDER}/hf")
    return DataFileWriter(
        lambda: store.open_data(f"{FOLDER}/__0_0.distcp"),
        BufferPool(CPU, 2, buffer_bytes),
        CPU.host_lane("disk"),
        open_exported=lambda file: SharedFile(folder / file, num_bytes),
        check=check,
    )


# Bytes of runs of rows: much less than a page, some pages, more than a block.
SIZES = st.lists(
    st.one_of(
        st.integers(1, 40), st.integers(2000, 9000), st.integers(BLOCK_BYTES, 3 * BLOCK_BYTES)
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=SIZES, buffer_bytes=st.sampled_from(BUFFERS), seed=st.integers(0, 9))
def test_rows_of_several_files_are_written_along_with_a_data_file(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], buffer_bytes: int, seed: int
) -> None:
    root, lot = tmp_path_factory.mktemp("rows"), random.Random(seed)
    # In half-precision, behind a header of any length, in any order, in two files.
    header, numels = 2 * lot.randrange(3000), [-(-size // 2) for size in sizes]
    num_bytes = header + 2 * sum(numels)
    values = [torch.randn(numel) for numel in numels]
    offsets = [header + 2 * sum(numels[:place]) for place in range(len(numels))]

    writer = writer_of(root, num_bytes, buffer_bytes)
    data = torch.randn(BLOCK_BYTES)
    order = lot.sample(range(len(values)), len(values))
    for place in order:
        for file in ("hf/one", "hf/other"):
            box = Box((0,), (numels[place],))
            rows = ExportedRows("name", torch.bfloat16, box, box, file, offsets[place])
            digests = writer.write_rows(rows, values[place])
            content = values[place].bfloat16().view(torch.uint8).numpy().data
            assert digests == digests_of(content)
        if writer.position % DATA_ALIGNMENT == 0:
            writer.write_tensor(data)
    writer.finish()
    writer._disk.close()

    expected = bytes(header) + torch.cat(values).bfloat16().view(torch.uint8).numpy().tobytes()
    for file in ("hf/one", "hf/other"):
        assert (root / FOLDER / file).read_bytes() == expected
    own = (root / FOLDER / "__0_0.distcp").read_bytes()
    assert own == data.numpy().tobytes() * (len(own) // data.nbytes)


def test_a_check_that_fails_ends_the_files_before_rows_are_written(tmp_path: Path) -> None:
    def check() -> None:
        raise InterruptedError

    writer = writer_of(tmp_path, 100, BLOCK_BYTES, check)
    box = Box((0,), (10,))
    writer.write_rows(ExportedRows("name", torch.float32, box, box, "hf/one", 0), torch.ones(10))
    with pytest.raises(InterruptedError):
        writer.finish()
    assert not (tmp_path / FOLDER / "hf/one").exists()
    writer._disk.close()


def test_an_error_in_an_exported_file_ends_the_data_file_and_frees_the_pool(
    tmp_path: Path,
) -> None:
    writer = writer_of(tmp_path, 100, BLOCK_BYTES)
    box = Box((0,), (10,))
    rows = ExportedRows("name", torch.float32, box, box, "hf/one", 0)
    with mock.patch.object(os, "pwritev", side_effect=OSError(errno.ENOSPC, "No space left")):
        writer.write_rows(rows, torch.ones(10))
        with pytest.raises(OSError, match="No space left") as error:
            writer.finish()
    assert str(tmp_path / FOLDER / "hf/one") in str(error.value)
    assert not (tmp_path / FOLDER / "__0_0.distcp").exists()
    writer._pool.lend()
    writer._disk.close()
