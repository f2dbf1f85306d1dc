"""Processes that write into one file, past the page cache where that is possible."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from unittest import mock

import pytest

from megatron.core.device import Device
from megatron.core.dist_checkpointing.save.data_file import BufferPool
from megatron.core.shared_file import SharedFile

PAGE = 4096


@pytest.mark.parametrize("is_direct", [True, False])
def test_ranks_that_share_pages_leave_each_others_bytes(tmp_path: Path, is_direct: bool) -> None:
    num_bytes = 10 * PAGE + 77
    content = os.urandom(num_bytes)
    buffers = BufferPool(Device("cpu"), 2, 8 << 20).lend()
    with mock.patch.object(os, "O_DIRECT", os.O_DIRECT if is_direct else 0):
        sinks = [SharedFile(tmp_path / "file", num_bytes) for _ in range(2)]
        were_direct = [sink._direct is not None for sink in sinks]
        begin = 0
        for number in range(13):
            end = min(begin + 3001, num_bytes) if number < 12 else num_bytes
            # As it will lie in its pages, and otherwise.
            where = begin % PAGE + 8 * (number % 3 == 0)
            span = buffers[number % 2][where : where + end - begin]
            span[:] = content[begin:end]
            sinks[number % 2].write_at(begin, span)
            begin = end
        are_direct = [sink._direct is not None for sink in sinks]
        assert are_direct == were_direct, "nothing was asked of direct I/O that it refuses"
        for sink in sinks:
            sink.close()
    assert (tmp_path / "file").read_bytes() == content


def test_a_file_system_without_direct_io_is_written_through_its_cache(tmp_path: Path) -> None:
    pwrite, refused = os.pwrite, []

    def without_direct(descriptor: int, content: memoryview, offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite(descriptor, content, offset)

    (buffer, _) = BufferPool(Device("cpu"), 2, 8 << 20).lend()
    buffer[:] = os.urandom(len(buffer))
    sink = SharedFile(tmp_path / "file", len(buffer))
    is_there = sink._direct is not None
    with mock.patch.object(os, "pwrite", without_direct):
        for offset in (0, 4 << 20):
            sink.write_at(offset, buffer[offset : offset + (4 << 20)])
    sink.close()
    assert (tmp_path / "file").read_bytes() == bytes(buffer)
    assert refused == ([0] if is_there else []), "it is not tried again"
