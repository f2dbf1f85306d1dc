"""Blobs compared with `torch.save` and `torch.load`."""

from __future__ import annotations

import copy
import io
import math
import random
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.serialization import config as serialization_config

from megatron.core.dist_checkpointing.format import blob
from megatron.core.dist_checkpointing.format.blob import (
    blob_frame,
    blob_layout,
    fake_tensor_mode,
    plain_blob,
)

DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn),
    *(torch.uint8, torch.int64, torch.int16, torch.bool, torch.uint16),
]
GIB = 1 << 30


def saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


class CountingFile:
    """Counts the bytes that torch.save writes and skips, without parsing them."""

    def __init__(self) -> None:
        self.nbytes = 0

    def write(self, content: bytes) -> int:
        self.nbytes += len(content)
        return len(content)

    def seek(self, offset: int, whence: int) -> int:
        assert whence == io.SEEK_CUR
        self.nbytes += offset
        return self.nbytes

    def flush(self) -> None:
        pass


def nbytes_that_torch_saves(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    file = CountingFile()
    with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(torch.empty(shape, dtype=dtype), file)
    return file.nbytes


def shapes(max_numel: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of 0 to 4 dims with sizes of every magnitude, including sizes whose pickled integers
    take one more byte.
    """
    edges = [n + step for n in (1 << 8, 1 << 16, 1 << 31) for step in (-1, 0, 1)]
    size = st.integers(0, 40).flatmap(lambda bits: st.integers(0, 1 << bits)) | st.sampled_from(
        edges
    )
    return (
        st.lists(size, max_size=4)
        .filter(lambda sizes: math.prod(n or 1 for n in sizes) <= max_numel)
        .map(tuple)
    )


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(DTYPES), shapes(max_numel=1 << 17))
@example(torch.float32, ())
@example(torch.bfloat16, (0, 3))
@example(torch.float8_e4m3fn, (255, 257))
def test_frame_and_data_are_a_blob_that_loads_bit_equal(dtype, shape):
    tensor = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    tensor = (tensor % 2 if dtype == torch.bool else tensor).view(dtype).view(shape)
    header, footer = blob_frame(dtype, shape)
    content = header + raw_bytes(tensor) + footer
    loaded = torch.load(io.BytesIO(content), weights_only=True)
    assert (loaded.dtype, loaded.shape, loaded.stride()) == (dtype, shape, tensor.stride())
    assert raw_bytes(loaded) == raw_bytes(tensor)
    layout = blob_layout(dtype, shape)
    assert (layout.header_nbytes, layout.data_nbytes) == (len(header), tensor.nbytes)
    assert layout.nbytes == len(content) == len(saved(tensor))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(DTYPES), shapes(max_numel=1 << 45))
def test_lengths_match_torch_save_at_any_size(dtype, shape):
    assert blob_layout(dtype, shape).nbytes == nbytes_that_torch_saves(dtype, shape)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_lengths_are_right_where_offsets_stop_fitting_32_bits(dtype):
    beyond = [*range(-5000, 5000, 499), *range(-2200, -300, 37), -2, -1, 0, 1, 2]
    sizes = [(1 << 32) // dtype.itemsize + elements for elements in beyond]
    assert [blob_layout(dtype, [n]).nbytes for n in sizes] == [
        nbytes_that_torch_saves(dtype, (n,)) for n in sizes
    ]


def test_lengths_of_many_shapes_take_few_calls_of_torch_save(monkeypatch):
    monkeypatch.setattr(blob, "_header_nbytes", {})
    monkeypatch.setattr(blob, "_footer_nbytes", {})
    blob._frame.cache_clear()
    draw = random.Random(0)
    different = {(draw.randrange(1, 250000), draw.randrange(1, 9000)) for _ in range(5000)}
    layouts = [blob_layout(torch.float32, shape) for shape in different]
    assert len(set(layouts)) > 4000
    assert any(layout.nbytes > 4 * GIB for layout in layouts)
    assert 0 < blob._frame.cache_info().misses < 60


def test_a_blob_of_more_than_4_gib_loads(tmp_path):
    shape = (4 * GIB + 12345,)
    header, footer = blob_frame(torch.uint8, shape)
    with Path(tmp_path / "blob").open("wb") as file:  # a sparse file
        file.write(header)
        file.seek(shape[0] - 3, io.SEEK_CUR)
        file.write(b"\x07\x08\x09" + footer)
        assert file.tell() == blob_layout(torch.uint8, shape).nbytes
    loaded = torch.load(tmp_path / "blob", weights_only=True, mmap=True)
    assert loaded.shape == shape
    assert loaded[-4:].tolist() == [0, 7, 8, 9]


def test_negative_sizes_are_rejected():
    with pytest.raises(ValueError, match=r"Expected sizes of at least 0, got \(-3, -2\)"):
        blob_layout(torch.float32, (-3, -2))


def test_a_torch_that_writes_blobs_of_another_length_raises():
    blob_layout(torch.float32, (10, 3))
    blob._frame.cache_clear()
    with (
        serialization_config.patch("save.storage_alignment", 4096),
        pytest.raises(
            RuntimeError,
            match=r"Expected torch.save of torch.float32 \(10, 3\) to write BlobLayout",
        ),
    ):
        blob_frame(torch.float32, (10, 3))
    blob._frame.cache_clear()


# Plain data.

plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=12,
)


def without_shared_parts(value: object) -> object:
    """Returns an equal value without shared objects, including strings."""
    if isinstance(value, str):
        return "".join(list(value))
    if isinstance(value, list | tuple):
        return type(value)([without_shared_parts(item) for item in value])
    if isinstance(value, dict):
        return {
            without_shared_parts(key): without_shared_parts(item) for key, item in value.items()
        }
    return copy.copy(value)


@settings(max_examples=200, deadline=None)
@given(plain_values)
def test_plain_data_loads_and_equal_values_give_equal_bytes(value):
    content = plain_blob([value, value])
    assert torch.load(io.BytesIO(content), weights_only=True) == [value, value]
    assert content == plain_blob([without_shared_parts(value), without_shared_parts(value)])


def test_tensors_in_plain_data_are_saved_without_the_rest_of_their_storage():
    whole = torch.arange(1 << 16, dtype=torch.float32)
    content = plain_blob(
        {"rng": torch.get_rng_state(), "row": whole[3:6], "twice": whole[3:6], "dtype": whole.dtype}
    )
    assert len(content) < 16384
    loaded = torch.load(io.BytesIO(content), weights_only=True)
    assert torch.equal(loaded["rng"], torch.get_rng_state())
    assert loaded["row"].tolist() == loaded["twice"].tolist() == [3, 4, 5]
    assert loaded["dtype"] is torch.float32


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (np.float64(1.0), r"at the value, got a numpy.float64"),
        ({"a": [1, {2}]}, r"at the value\['a'\]\[1\], got a builtins.set"),
        ({(1, Path()): 2}, r"at a key of the value\[1\], got a pathlib"),
        ([torch.nn.Parameter(torch.ones(2))], r"at the value\[0\], got a .*Parameter"),
    ],
)
def test_other_objects_than_plain_data_are_rejected_with_their_path(value, place):
    with pytest.raises(ValueError, match="Expected plain data " + place):
        plain_blob(value)


# Fake tensors on threads that end. See [Note: a guard that dies with its thread].

ROOT = Path(__file__).resolve().parents[5]

# A separate program, since the failure is a segmentation fault.
FIRST_BACKWARD_AFTER_A_THREAD = """
import threading

import torch

from megatron.core.dist_checkpointing.format.blob import blob_frame

thread = threading.Thread(target=blob_frame, args=(torch.float32, (3, 4)))
thread.start()
thread.join()

weight = torch.ones(3, requires_grad=True)
weight.sum().backward()
blob_frame(torch.float32, (5,))
"""


def test_the_first_backward_may_come_after_a_thread_that_saved_has_ended():
    command = [sys.executable, "-c", FIRST_BACKWARD_AFTER_A_THREAD]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr


def test_a_fake_tensor_has_a_size_and_no_memory_on_any_thread():
    made = []

    def make() -> None:
        with fake_tensor_mode():
            made.append(torch.empty(1 << 40, dtype=torch.float32, device="cpu"))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert made[0].shape == (1 << 40,)
