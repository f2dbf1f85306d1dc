"""Rows of exported files: in their places, with their digests, whatever lies beside them."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.core.device import Device
from megatron.core.dist_checkpointing.format.manifest import (
    BLOCK_BYTES,
    DATA_ALIGNMENT,
    digests_of,
)
from megatron.core.dist_checkpointing.plan.boxes import Box
from megatron.core.dist_checkpointing.save.data_file import BufferPool, DataFileWriter
from megatron.core.dist_checkpointing.save.data_sink import SharedSink
from megatron.core.dist_checkpointing.save.export import ExportedRows
from megatron.core.dist_checkpointing.save.export_writer import ExportWriter
from megatron.core.dist_checkpointing.store import LocalStore, open_store

CPU = Device("cpu")
FOLDER = "iter_0000010.token.saving"
BUFFERS = (BLOCK_BYTES, BLOCK_BYTES + 3 * DATA_ALIGNMENT, 8 << 20)


class Writers:
    """A data file, and exported files beside it."""

    def __init__(self, root: Path, num_bytes: int, buffer_bytes: int) -> None:
        self.store = LocalStore(root)
        self.store.make_folder(FOLDER)
        self.lane = CPU.host_lane("disk")
        pool = BufferPool(CPU, 2, buffer_bytes)
        self.own = DataFileWriter(self.store.open_data(f"{FOLDER}/__0_0.distcp"), pool, self.lane)
        self.exported = ExportWriter(
            self.own, lambda file: self.store.open_shared(f"{FOLDER}/{file}", num_bytes)
        )

    def finish(self) -> None:
        self.exported.finish()
        self.own.finish()
        self.lane.close()


# Bytes of runs of rows: much less than a page, some pages, more than a block.
SIZES = st.lists(
    st.one_of(
        st.integers(1, 40), st.integers(2000, 9000), st.integers(BLOCK_BYTES, 3 * BLOCK_BYTES)
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=SIZES, buffer_bytes=st.sampled_from(BUFFERS), seed=st.integers(0, 9))
def test_rows_of_many_files_come_to_their_places_beside_a_data_file(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], buffer_bytes: int, seed: int
) -> None:
    root, lot = tmp_path_factory.mktemp("rows"), random.Random(seed)
    # In half-precision, behind a header of any length, in any order, in two files.
    header, numels = 2 * lot.randrange(3000), [-(-size // 2) for size in sizes]
    num_bytes = header + 2 * sum(numels)
    values = [torch.randn(numel) for numel in numels]
    offsets = [header + 2 * sum(numels[:place]) for place in range(len(numels))]

    writers = Writers(root, num_bytes, buffer_bytes)
    data = torch.randn(BLOCK_BYTES)
    order = lot.sample(range(len(values)), len(values))
    for place in order:
        for file in ("hf/one", "hf/other"):
            box = Box((0,), (numels[place],))
            rows = ExportedRows("name", torch.bfloat16, box, box, file, offsets[place])
            digests = writers.exported.write(rows, values[place])
            content = values[place].bfloat16().view(torch.uint8).numpy().data
            assert digests == digests_of(content)
        if writers.own.position % DATA_ALIGNMENT == 0:
            writers.own.write_tensor(data)
    writers.finish()

    expected = bytes(header) + torch.cat(values).bfloat16().view(torch.uint8).numpy().tobytes()
    for file in ("hf/one", "hf/other"):
        assert (root / FOLDER / file).read_bytes() == expected
    own = (root / FOLDER / "__0_0.distcp").read_bytes()
    assert own == data.numpy().tobytes() * (len(own) // data.nbytes)


@pytest.mark.parametrize("is_direct", [True, False])
def test_ranks_that_share_pages_leave_each_others_bytes(tmp_path: Path, is_direct: bool) -> None:
    num_bytes = 10 * DATA_ALIGNMENT + 77
    content = os.urandom(num_bytes)
    buffers = BufferPool(CPU, 2, 8 << 20).lend()
    with mock.patch.object(os, "O_DIRECT", os.O_DIRECT if is_direct else 0):
        sinks = [SharedSink(tmp_path / "file", num_bytes) for _ in range(2)]
        begin = 0
        for number in range(13):
            end = min(begin + 3001, num_bytes) if number < 12 else num_bytes
            # As it will lie in its pages, and otherwise.
            where = begin % DATA_ALIGNMENT + 8 * (number % 3 == 0)
            span = buffers[number % 2][where : where + end - begin]
            span[:] = content[begin:end]
            sinks[number % 2].write_at(begin, span)
            begin = end
        for sink in sinks:
            sink.close()
    assert (tmp_path / "file").read_bytes() == content


def test_a_file_system_without_direct_io_is_written_through_its_cache(tmp_path: Path) -> None:
    pwrite, refused = os.pwrite, []

    def without_direct(descriptor: int, content: memoryview, offset: int) -> int:
        import fcntl

        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite(descriptor, content, offset)

    (buffer, _) = BufferPool(CPU, 2, 8 << 20).lend()
    buffer[:] = os.urandom(len(buffer))
    sink = SharedSink(tmp_path / "file", len(buffer))
    is_there = sink._direct is not None
    with mock.patch.object(os, "pwrite", without_direct):
        for offset in (0, 4 << 20):
            sink.write_at(offset, buffer[offset : offset + (4 << 20)])
    sink.close()
    assert (tmp_path / "file").read_bytes() == bytes(buffer)
    assert refused == ([0] if is_there else []), "it is not tried again"


def test_an_error_of_the_disk_is_raised_by_the_data_file_and_the_pool_is_free(
    tmp_path: Path,
) -> None:
    writers = Writers(tmp_path, 100, BLOCK_BYTES)
    box = Box((0,), (10,))
    rows = ExportedRows("name", torch.float32, box, box, "hf/one", 0)
    with mock.patch.object(os, "pwrite", side_effect=OSError(errno.ENOSPC, "No space left")):
        writers.exported.write(rows, torch.ones(10))
        writers.exported.finish()
        with pytest.raises(OSError, match="No space left") as error:
            writers.own.finish()
    assert str(tmp_path / FOLDER / "hf/one") in str(error.value)
    writers.exported.abort()
    writers.own._pool.lend()


def test_a_remote_store_has_no_files_that_ranks_write_together() -> None:
    with pytest.raises(NotImplementedError, match="Expected a folder of a file system"):
        open_store("memory://shared").open_shared("iter_0000010/hf/one", 10)
