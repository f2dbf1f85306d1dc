"""Processes that write into one file, past the page cache where that is possible."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.device import Device
from megatron.core.dist_checkpointing.save.data_file import BufferPool
from megatron.core.shared_file import SharedFile, address_of

PAGE = 4096
BUFFERS = BufferPool(Device("cpu"), 2, 8 << 20).lend()
BUFFERS[0][:] = os.urandom(len(BUFFERS[0]))


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
            # As it will be in its pages, and otherwise.
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
    pwritev, refused = os.pwritev, []

    def without_direct(descriptor: int, spans: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwritev(descriptor, spans, offset)

    (buffer, _) = BufferPool(Device("cpu"), 2, 8 << 20).lend()
    buffer[:] = os.urandom(len(buffer))
    sink = SharedFile(tmp_path / "file", len(buffer))
    is_there = sink._direct is not None
    with mock.patch.object(os, "pwritev", without_direct):
        for offset in (0, 4 << 20):
            sink.write_at(offset, buffer[offset : offset + (4 << 20)])
    sink.close()
    assert (tmp_path / "file").read_bytes() == bytes(buffer)
    assert refused == ([0] if is_there else []), "it is not tried again"


def test_a_device_that_takes_whole_pages_of_memory_alone_gets_these_past_the_cache(
    tmp_path: Path,
) -> None:
    pwritev, direct = os.pwritev, []

    def picky(descriptor: int, spans: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            if any(address_of(span) % PAGE for span in spans):
                raise OSError(errno.EINVAL, "Invalid argument")
            direct.append(offset)
        return pwritev(descriptor, spans, offset)

    (buffer, _) = BufferPool(Device("cpu"), 2, 8 << 20).lend()
    buffer[:] = os.urandom(len(buffer))
    sink = SharedFile(tmp_path / "file", 8 * PAGE)
    if sink._direct is None:
        pytest.skip("this file system has no direct I/O")
    elsewhere = buffer[10 * PAGE + 512 : 14 * PAGE + 512]
    with mock.patch.object(os, "pwritev", picky):
        sink.write_at(0, elsewhere)
        sink.write_at(4 * PAGE, buffer[: 4 * PAGE])
    sink.close()
    assert (tmp_path / "file").read_bytes() == bytes(elsewhere) + bytes(buffer[: 4 * PAGE])
    assert direct == [4 * PAGE]


PIECES = st.lists(st.integers(0, 3 * PAGE) | st.sampled_from([0, PAGE, 2 * PAGE]), max_size=6)


@given(PIECES, st.integers(0, 2 * PAGE) | st.just(PAGE), st.integers(1, 5 * PAGE))
@settings(max_examples=60)
def test_spans_of_any_length_stand_one_behind_the_other_however_few_bytes_a_call_takes(
    lengths: list[int], offset: int, most: int
) -> None:
    pwritev, nbytes = os.pwritev, offset + sum(lengths)

    def reluctant(descriptor: int, spans: list[memoryview], offset: int) -> int:
        is_direct = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        first = spans[0][: most // PAGE * PAGE or PAGE] if is_direct else spans[0][:most]
        return pwritev(descriptor, [first], offset)

    (buffer, _) = BUFFERS
    spans = [buffer[(begin := number * 4 * PAGE) : begin + n] for number, n in enumerate(lengths)]
    with tempfile.TemporaryDirectory() as folder:
        sink = SharedFile(Path(folder) / "file", nbytes)
        with mock.patch.object(os, "pwritev", reluctant):
            sink.write_at(offset, *spans)
        sink.close()
        found = (Path(folder) / "file").read_bytes()
    assert found == bytes(offset) + b"".join(spans)
