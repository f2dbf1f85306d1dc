"""A checkpoint that is not what was written is never taken for one that is: it is refused by
name.
"""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError
from megatron.core.dist_checkpointing.format.manifest import (
    MARKER_FILE,
    METADATA_FILE,
    Manifest,
    data_file,
    files_of,
)
from megatron.core.dist_checkpointing.format.names import checkpoint_name
from megatron.core.dist_checkpointing.load.checkpoint import PublishedCheckpoint
from megatron.core.dist_checkpointing.store import Store, open_store
from tests.helpers.checkpoints import blob_span, chunks_of
from tests.unit_tests.core.dist_checkpointing.helpers.scenes import (
    NEW,
    OLD,
    SMALL,
    check_loads,
    check_published,
    load,
    save_by_two,
)

FILES = [*files_of(2), MARKER_FILE]
# A load reads them. Of `.metadata`, which is for other programs, it only looks at the size.
SMALL_FILES = [name for name in FILES if not name.endswith((".distcp", METADATA_FILE))]


@pytest.fixture(scope="module")
def intact(tmp_path_factory) -> Path:
    """A folder with the old checkpoint and the new one, each of two ranks."""
    root = tmp_path_factory.mktemp("intact")
    for iteration in (OLD, NEW):
        save_by_two(root, iteration, SMALL)
    return root


@pytest.fixture
def damaged(intact, tmp_path) -> Path:
    """The folder of a new checkpoint that is to be damaged."""
    return shutil.copytree(intact, tmp_path / "run") / checkpoint_name(NEW)


def assert_damaged(folder: Path, *names: str) -> None:
    """A load names one of the files; the checkpoint before loads as if nothing had happened."""
    store = open_store(folder.parent)
    with pytest.raises(CheckpointDamagedError) as failure:
        load(store, NEW, SMALL)
    assert any(f"{folder}/{name}" in str(failure.value) for name in names), str(failure.value)


def test_the_files_of_a_checkpoint_are_all_that_there_is(damaged):
    assert sorted(file.name for file in damaged.iterdir()) == sorted(FILES)
    assert check_published(damaged.parent, SMALL) == {OLD: 0, NEW: 0}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_gone_or_is_a_folder_or_is_another_checkpoints_is_damage(damaged, name):
    content = (damaged / name).read_bytes()
    (damaged / name).unlink()
    assert_damaged(damaged, name)
    (damaged / name).mkdir()
    assert_damaged(damaged, name)
    (damaged / name).rmdir()
    shutil.copy(damaged.parent / checkpoint_name(OLD) / name, damaged / name)
    if name != METADATA_FILE:  # in which there are no values, and which no load reads
        # Without its marker, it is the rest that is not as it should be.
        assert_damaged(damaged, *(SMALL_FILES if name == MARKER_FILE else [name]))
    (damaged / name).write_bytes(content)
    assert check_published(damaged.parent, SMALL) == {OLD: 0, NEW: 0}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_length_is_damage(damaged, name):
    content = (damaged / name).read_bytes()
    lot = random.Random(name)
    for length in (0, 1, lot.randrange(2, len(content) - 1), len(content) - 1):
        (damaged / name).write_bytes(content[:length])
        assert_damaged(damaged, name)
    for more in (b"\0", b"\n", content):
        (damaged / name).write_bytes(content + more)
        assert_damaged(damaged, name)


def flip(file: Path, position: int, bit: int) -> None:
    """Changes one bit. Done twice, it is as it was."""
    with file.open("r+b", buffering=0) as stream:
        stream.seek(position)
        byte = stream.read(1)[0]
        stream.seek(position)
        stream.write(bytes([byte ^ 1 << bit]))


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.wide), 5])
@pytest.mark.parametrize("name", SMALL_FILES)
def test_a_flipped_bit_anywhere_in_a_small_file_is_damage(damaged, name, step):
    store, lot = open_store(damaged.parent), random.Random(name)
    positions = range(0, (damaged / name).stat().st_size, step)
    for position in positions:
        bit = lot.randrange(8)
        flip(damaged / name, position, bit)
        with pytest.raises(CheckpointDamagedError, match=re.escape(f"{damaged}/{name}")):
            read_small_files(store)
        flip(damaged / name, position, bit)
    assert len(positions) > 3
    read_small_files(store)
    flip(damaged / name, lot.choice(positions), lot.randrange(8))
    assert_damaged(damaged, name)


def read_small_files(store: Store) -> list[Manifest]:
    checkpoint = PublishedCheckpoint.open(store, checkpoint_name(NEW))
    return [checkpoint.manifest(rank) for rank in range(2)]


@pytest.mark.parametrize("rank", range(2))
def test_a_flipped_bit_in_a_chunk_is_damage_that_names_it_and_around_the_chunks_is_none(
    damaged, rank
):
    store, lot = open_store(damaged.parent), random.Random(rank)
    file, end = damaged / data_file(rank), 0
    seen = set()
    for tensor, chunk in chunks_of(damaged, rank):
        data_end = chunk.offset + tensor.chunk_nbytes(chunk)
        blob_begin, blob_end = blob_span(damaged, tensor, chunk)
        regions = {
            "padding": (end, blob_begin),
            "header": (blob_begin, chunk.offset),
            "first byte": (chunk.offset, min(chunk.offset + 1, data_end)),
            "data": (chunk.offset, data_end),
            "last byte": (max(data_end - 1, chunk.offset), data_end),
            "footer": (data_end, blob_end),
        }
        for region, (begin, stop) in regions.items():
            if begin == stop:
                continue
            seen.add(region)
            position, bit = lot.randrange(begin, stop), lot.randrange(8)
            flip(file, position, bit)
            if chunk.offset <= position < data_end:
                with pytest.raises(
                    CheckpointDamagedError, match=f"{tensor.key!r} .*{re.escape(str(file))}"
                ):
                    load(store, NEW, SMALL)
            else:
                assert check_loads(store, NEW, SMALL) == 0
            flip(file, position, bit)
        end = blob_end
    assert len(seen) == 6
    assert check_loads(store, NEW, SMALL) == 0
